"""Fails if the wheels of a folder do not have the files and the metadata that wheels of gohvd have, or if auditwheel finds
that the wheel with the library does not work on all systems of its tag. Needs auditwheel.
"""

import email
import pathlib
import re
import subprocess
import sys
import zipfile

BIN = {"gohvd/bin/hvdbench", "gohvd/bin/hvdd", "gohvd/bin/hvdrun"}
OTHERS = {"gohvd/include/gohvd.h", "gohvd/lib/libgohvd.so", "gohvd/lib/pkgconfig/gohvd.pc"}


def check(path: pathlib.Path, package: str, pure: str, requires: set, wanted: set) -> None:
    """Checks one wheel: the files outside of package and those that it must have, its tags and its requirements."""
    name, version, tags = path.stem.split("-", 2)
    info = f"{name}-{version}.dist-info/"
    wheel = zipfile.ZipFile(path)
    names = set(wheel.namelist())
    for file in sorted(names - BIN - OTHERS):
        assert file.startswith(info) or file.startswith(package) and file.endswith((".py", "py.typed")), file
    for file in names:
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
    for module in ("go", "github.com/spf13/cobra", "ziglang") if pure == "false" else ():
        assert any(f"/third_party/{module}/" in file for file in licences), module


folder = pathlib.Path(sys.argv[1])
wheels = list(folder.glob("gohvd-*.whl"))
assert wheels, folder
for wheel in wheels:
    check(wheel, "gohvd/", "false",
          {"gohvd-horovod=={}; extra == 'horovod'", "numpy>=1.21; extra == 'numpy'", "pyspark>=4.0; extra == 'spark'",
           "ray[train]>=2.60; extra == 'ray'", "torch>=1.13; extra == 'torch'"},
          {*BIN, *OTHERS, "gohvd/__init__.py", "gohvd/torch/__init__.py", "gohvd/py.typed"})
    machine = re.fullmatch(r"gohvd-.*-py3-none-manylinux_2_17_(.*)\.manylinux2014_\1\.whl", wheel.name).group(1)
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], stdout=subprocess.PIPE, text=True, check=True)
    print(shown.stdout)
    text = " ".join(shown.stdout.split())
    assert re.search(f'consistent with the following platform tag: "(manylinux_2_17|manylinux_2_5)_{machine}"', text)
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([0-9.]+)", text)]
    assert versions and max(versions) <= (2, 17), versions
(shim,) = folder.glob("gohvd_horovod-*-py3-none-any.whl")
check(shim, "horovod/", "true", {"gohvd=={}"}, {"horovod/torch/__init__.py"})
