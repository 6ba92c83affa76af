"""Makes the wheels of gohvd and gohvd-horovod. pip calls build_wheel, and make wheel runs this file.

A wheel is a zip file that pip unpacks (PEP 427, PEP 517). The wheel of gohvd has the Python package and the programs,
which are built with Go from the checkout around this file. Wheels that are made from the same files by the same versions
of Go and Python have the same bytes, in every directory and at every time.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import tempfile
import time
import zipfile
from typing import Any, Dict, Iterator, List, Optional, Tuple

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

PYTHON = pathlib.Path(__file__).resolve().parent
CHECKOUT = PYTHON.parent
PROJECTS = (PYTHON, PYTHON / "horovod_shim")
PROGRAMS = ("hvdbench", "hvdd", "hvdrun")
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The machines for which wheels are made, as Python names them and as Go names them."""

_COMMANDS = [f"./cmd/{name}" for name in PROGRAMS]
_CONFIG = "github.com/gohvd/gohvd/internal/config"


def version() -> str:
    """Returns __version__ of the package gohvd, which is the version of both wheels and of the programs in them."""
    text = (PYTHON / "gohvd" / "__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    return found


def tag(machine: str) -> str:
    """Returns the tag of a wheel with programs for this machine. The programs need no C library, so the tag has the
    oldest glibc and the oldest musl for which pip installs wheels on Python 3.10.
    """
    return f"py3-none-manylinux_2_17_{machine}.musllinux_1_1_{machine}"


def _go(machine: str, *args: str) -> str:
    """Runs go for a machine in the checkout, and returns its output."""
    if not (CHECKOUT / "go.mod").exists():
        raise SystemExit(f"{CHECKOUT} is not a checkout of gohvd, so the programs cannot be built: install a wheel")
    env = {**os.environ, "CGO_ENABLED": "0", "GOOS": "linux", "GOARCH": MACHINES[machine], "GOAMD64": "v1", "GOARM64": "v8.0"}
    try:
        return subprocess.run(
            [os.environ.get("GO") or "go", *args], cwd=CHECKOUT, env=env, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    except FileNotFoundError:
        raise SystemExit("go is not on PATH, so the programs cannot be built: install Go or a wheel") from None
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"go {args[0]} ended with status {e.returncode}") from None


def programs(machine: str) -> Dict[str, bytes]:
    """Builds the programs for a machine, and returns them by name."""
    with tempfile.TemporaryDirectory() as directory:
        flags = ("-trimpath", "-buildvcs=false", f"-ldflags=-s -w -X {_CONFIG}.release=v{version()}")
        _go(machine, "build", *flags, "-o", directory, *_COMMANDS)
        return {name: pathlib.Path(directory, name).read_bytes() for name in PROGRAMS}


def licences(machine: str) -> Dict[str, bytes]:
    """Returns the licences and notices of Go and of the modules in the programs, by path."""
    found = {}
    listed = "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Dir}}{{end}}{{end}}"
    modules = _go(machine, "list", "-deps", "-f", listed, *_COMMANDS).splitlines()
    modules.append("go\t" + _go(machine, "env", "GOROOT").strip())
    for module, folder in (line.split("\t") for line in modules):
        for file in pathlib.Path(folder).glob("*"):
            if re.match("licen[sc]e|copying|notice|patents", file.name, re.IGNORECASE) and file.is_file():
                found[f"{module}/{file.name}"] = file.read_bytes()
    return found


def sources(project: pathlib.Path, package: str) -> Iterator[Tuple[str, bytes]]:
    """Yields the Python files of a package, each with its path in the wheel."""
    for path in (project / package).rglob("*"):
        if path.suffix == ".py" or path.name == "py.typed":
            yield path.relative_to(project).as_posix(), path.read_bytes()


def metadata(project: pathlib.Path, about: Dict[str, Any], licence_files: List[str]) -> bytes:
    """Returns the file METADATA for the table project of pyproject.toml. Packages of this repository require each other
    in the same version.
    """
    own = {_read(p)["project"]["name"] for p in PROJECTS}
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {about['name']}",
        f"Version: {version()}",
        f"Summary: {about['description']}",
        f"License-Expression: {about['license']}",
        *(f"License-File: {file}" for file in sorted(licence_files)),
        *(f"Classifier: {c}" for c in about["classifiers"]),
        f"Requires-Python: {about['requires-python']}",
    ]
    wanted: List[Tuple[str, str]] = [(r, "") for r in about.get("dependencies", ())]
    for extra, requirements in about.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        wanted += [(r, f' ; extra == "{extra}"') for r in requirements]
    lines += [f"Requires-Dist: {r}=={version()}{only}" if r in own else f"Requires-Dist: {r}{only}" for r, only in wanted]
    text = ""
    if "readme" in about:
        lines.append("Description-Content-Type: text/markdown")
        text = (project / about["readme"]).read_text()
    return ("\n".join(lines) + "\n\n" + text).encode()


def wheel(project: pathlib.Path, machine: str, out: pathlib.Path) -> pathlib.Path:
    """Writes the wheel of a project to the directory out, and returns its path. The wheel of a project without programs
    is for every machine.
    """
    tables = _read(project)
    about, own = tables["project"], tables["tool"]["wheels"]
    name = f"{about['name'].replace('-', '_')}-{version()}"
    info = f"{name}.dist-info"
    tags = tag(machine) if own["programs"] else "py3-none-any"
    files = dict(sources(project, own["package"]))
    licence_files = {"LICENSE": (CHECKOUT / "LICENSE").read_bytes()}
    if own["programs"]:
        files.update((f"{own['package']}/bin/{program}", data) for program, data in programs(machine).items())
        licence_files.update(licences(machine))
    rest = {f"{info}/licenses/{file}": data for file, data in licence_files.items()}
    rest[f"{info}/METADATA"] = metadata(project, about, list(licence_files))
    rest[f"{info}/WHEEL"] = "".join([
        f"Wheel-Version: 1.0\nGenerator: gohvd\nRoot-Is-Purelib: {str(not own['programs']).lower()}\n",
        *(f"Tag: py3-none-{system}\n" for system in tags.rpartition("-")[2].split(".")),
    ]).encode()
    rest[f"{info}/entry_points.txt"] = "".join([
        "[console_scripts]\n", *(f"{command} = {call}\n" for command, call in sorted(about["scripts"].items()))
    ]).encode()
    path = out / f"{name}-{tags}.whl"
    _write(path, [*sorted(files.items()), *sorted(rest.items())], f"{info}/RECORD")
    return path


def _write(path: pathlib.Path, files: List[Tuple[str, bytes]], record: str) -> None:
    """Writes a wheel with these files and the list of their hashes. All have the time SOURCE_DATE_EPOCH, or else 1980,
    the first that a zip file can have.
    """
    when = max(time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or 0))[:6], (1980, 1, 1, 0, 0, 0))
    hashes = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files
    ]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as z:
        for name, data in [*files, (record, "".join([*hashes, f"{record},,\n"]).encode())]:
            entry = zipfile.ZipInfo(name, when)
            entry.create_system = 3  # Unix, so that pip reads the mode
            entry.external_attr = (0o100755 if "/bin/" in name else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            z.writestr(entry, data)


def _read(project: pathlib.Path) -> Dict[str, Any]:
    return tomllib.loads((project / "pyproject.toml").read_text())


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    """Writes the wheel of the project in the working directory for this machine, and returns its name. pip calls it
    (PEP 517).
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise SystemExit(f"gohvd does not run on {machine}, only on {' and '.join(MACHINES)}")
    return wheel(pathlib.Path.cwd(), machine, pathlib.Path(wheel_directory)).name


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the wheels of gohvd.")
    parser.add_argument("--machine", action="append", choices=sorted(MACHINES), help="machine for which to make wheels; default: all")
    parser.add_argument("out", type=pathlib.Path, help="folder for the wheels")
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    # The wheel for every machine is written once for each machine.
    for path in sorted({wheel(project, machine, o.out) for machine in o.machine or MACHINES for project in PROJECTS}):
        print(path)


if __name__ == "__main__":
    main()
