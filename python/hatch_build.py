"""Adds the programs, and the licences of what is in them, to the wheel of gohvd. hatchling calls it.

The programs are built with Go from the checkout around this file, for the machine GOARCH, as by go build. GO is the path
of go, if it is not on PATH.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Any, Dict

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = ("./cmd/hvdbench", "./cmd/hvdd", "./cmd/hvdrun")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""The machines for which wheels are made, as Go names them and as Python names them."""


def go(*args: str) -> str:
    """Runs go in the checkout, and returns its output."""
    if not (CHECKOUT / "go.mod").exists():
        raise SystemExit(f"{CHECKOUT} is not a checkout of gohvd, so the programs cannot be built: install a wheel")
    env = {**os.environ, "CGO_ENABLED": "0", "GOOS": "linux", "GOAMD64": "v1", "GOARM64": "v8.0"}
    try:
        return subprocess.run(
            [os.environ.get("GO") or "go", *args], cwd=CHECKOUT, env=env, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    except FileNotFoundError:
        raise SystemExit("go is not on PATH, so the programs cannot be built: install Go or a wheel") from None
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"go {args[0]} ended with status {e.returncode}") from None


class Programs(BuildHookInterface):
    """Builds the programs, and gives the wheel the tag of their machine."""

    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        goarch = go("env", "GOARCH").strip()
        if goarch not in MACHINES:
            raise SystemExit(f"gohvd does not run on {goarch}, only on {' and '.join(MACHINES)}")
        self.bin = tempfile.TemporaryDirectory()
        release = f"github.com/gohvd/gohvd/internal/config.release=v{self.metadata.version}"
        flags = ("-trimpath", "-buildvcs=false", f"-ldflags=-s -w -X {release}")
        go("build", *flags, "-o", self.bin.name, *COMMANDS)
        build_data["force_include"][self.bin.name] = "gohvd/bin"
        build_data["pure_python"] = False
        # The programs need no C library, so the tag has the oldest glibc and the oldest musl for which pip installs
        # wheels on Python 3.10.
        build_data["tag"] = "py3-none-manylinux_2_17_{0}.musllinux_1_1_{0}".format(MACHINES[goarch])

    def finalize(self, version: str, build_data: Dict[str, Any], artifact_path: str) -> None:
        self.bin.cleanup()


class Licences(MetadataHookInterface):
    """Copies the licences and notices of Go and of the modules in the programs to the folder third_party, because
    hatchling takes licences only from the folder of the project, and lists them in the metadata.
    """

    def update(self, metadata: Dict[str, Any]) -> None:
        listed = "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Dir}}{{end}}{{end}}"
        modules = go("list", "-deps", "-f", listed, *COMMANDS).splitlines()
        modules.append("go\t" + go("env", "GOROOT").strip())
        files = {"LICENSE"}
        for module, folder in (line.split("\t") for line in set(modules)):
            for file in pathlib.Path(folder).iterdir():
                if re.match("licen[sc]e|copying|notice|patents", file.name, re.IGNORECASE) and file.is_file():
                    copy = f"third_party/{module}/{file.name}"
                    pathlib.Path(self.root, copy).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, pathlib.Path(self.root, copy))
                    files.add(copy)
        metadata["license-files"] = sorted(files)
