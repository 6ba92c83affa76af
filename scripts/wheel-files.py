"""Fails if the wheels of a folder do not have the files and the metadata that wheels of gohvd have."""

import email
import pathlib
import sys
import zipfile

BIN = {"gohvd/bin/hvdbench", "gohvd/bin/hvdd", "gohvd/bin/hvdrun"}


def check(path: pathlib.Path, package: str, pure: str, requires: set, wanted: set) -> None:
    """Checks one wheel: the files outside of package and those that it must have, its tags and its requirements."""
    name, version, tags = path.stem.split("-", 2)
    info = f"{name}-{version}.dist-info/"
    wheel = zipfile.ZipFile(path)
    names = set(wheel.namelist())
    for file in sorted(names):
        assert file.startswith(info) or file in BIN or file.startswith(package) and file.endswith((".py", "py.typed")), file
        mode = wheel.getinfo(file).external_attr >> 16 & 0o777
        assert mode == (0o755 if file in BIN else 0o644), (file, oct(mode))
    assert wanted <= names, wanted - names
    about = email.message_from_bytes(wheel.read(f"{info}WHEEL"))
    assert about["Root-Is-Purelib"] == pure, about["Root-Is-Purelib"]
    python, abi, platforms = tags.split("-")
    assert set(about.get_all("Tag")) == {f"{python}-{abi}-{p}" for p in platforms.split(".")}, about.get_all("Tag")
    about = email.message_from_bytes(wheel.read(f"{info}METADATA"))
    assert {r.format(version) for r in requires} == set(about.get_all("Requires-Dist")), about.get_all("Requires-Dist")
    licences = {f"{info}licenses/{file}" for file in about.get_all("License-File")}
    assert licences == {file for file in names if file.startswith(f"{info}licenses/")}, licences
    for module in ("go", "github.com/spf13/cobra") if pure == "false" else ():
        assert any(f"/third_party/{module}/" in file for file in licences), module


folder = pathlib.Path(sys.argv[1])
(gohvd,) = folder.glob("gohvd-*-py3-none-manylinux_2_17_*.musllinux_1_1_*.whl")
(shim,) = folder.glob("gohvd_horovod-*-py3-none-any.whl")
check(gohvd, "gohvd/", "false",
      {"gohvd-horovod=={}; extra == 'horovod'", "numpy>=1.21; extra == 'numpy'", "torch>=1.13; extra == 'torch'"},
      {*BIN, "gohvd/__init__.py", "gohvd/torch/__init__.py", "gohvd/py.typed"})
check(shim, "horovod/", "true", {"gohvd=={}"}, {"horovod/torch/__init__.py"})
