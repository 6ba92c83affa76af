"""Adds the library and the programs, and the licences of what is in them, to the wheel of gohvd. hatchling calls it.

They are built with Go from the checkout around this file, for the machine GOARCH, as by go build. GO is the path of go, if
it is not on PATH. The C compiler is that of the package ziglang. It links with the symbols of an old glibc and compiles for
both machines.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = CHECKOUT / "cmd" / "libgohvd"
WITH_NCCL = ("./cmd/hvdbench", "./cmd/hvdd")
"""The programs that load NCCL if it is needed, so they need the C library."""
STATIC = ("./cmd/hvdrun",)
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""The machines for which wheels are made, as Go names them and as Python names them."""
GLIBC = (2, 17)
"""The oldest glibc with which the wheel works: that of manylinux2014."""


def zig() -> pathlib.Path:
    """Returns the folder of the package ziglang."""
    import ziglang

    return pathlib.Path(ziglang.__file__).parent


def run(*args: str, **env: str) -> str:
    """Runs go, or a script that runs it, in the checkout, and returns its output."""
    if not (CHECKOUT / "go.mod").exists():
        raise SystemExit(f"{CHECKOUT} is not a checkout of gohvd, so it cannot be built: install a wheel")
    env = {**os.environ, "GOOS": "linux", "GOAMD64": "v1", "GOARM64": "v8.0", **env}
    try:
        return subprocess.run(args, cwd=CHECKOUT, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    except FileNotFoundError:
        raise SystemExit("go is not on PATH, so gohvd cannot be built: install Go or a wheel") from None
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"{' '.join(args[:2])} ended with status {e.returncode}") from None


def go(*args: str, **env: str) -> str:
    """Runs go in the checkout, and returns its output."""
    return run(os.environ.get("GO") or "go", *args, **env)


class Programs(BuildHookInterface):
    """Builds the library and the programs, and gives the wheel the tag of their machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        goarch = go("env", "GOARCH").strip()
        if goarch not in MACHINES:
            raise SystemExit(f"gohvd does not run on {goarch}, only on {' and '.join(MACHINES)}")
        machine = MACHINES[goarch]
        self.files = tempfile.TemporaryDirectory()
        top = pathlib.Path(self.files.name)
        # Without the IDs of the build, the bytes do not depend on the path of the compiler.
        link = f"-s -w -buildid= -X github.com/gohvd/gohvd/internal/config.release=v{self.metadata.version}"
        flags = ("-trimpath", "-buildvcs=false")
        target = "{}-linux-gnu.{}.{}".format(machine, *GLIBC)
        # By default Go compiles with -g. Then the bytes depend on the path of ziglang, and ziglang strips nothing.
        c = {"CGO_ENABLED": "1", "CC": f"'{zig() / 'zig'}' cc -target {target}", "CGO_CFLAGS": "-O2", "CGO_LDFLAGS": "-O2"}
        bin = str(top / "bin") + "/"
        go("build", *flags, f"-ldflags={link}", "-o", bin, *STATIC, CGO_ENABLED="0")
        # The packages are compiled as those of the library, so only once for both. The linker makes programs at fixed
        # addresses of them: at other addresses in each process, ranks that share a core take longer (docs/performance.md).
        pie = ("-buildmode=pie", f"-ldflags={link} -buildmode=exe")
        go("build", *flags, *pie, "-tags", "nccl", "-o", bin, *WITH_NCCL, **c)
        run("scripts/build-libgohvd.sh", str(top / "lib" / "libgohvd.so"), *flags, LDFLAGS=link, **c)
        for folder in ("include", "lib/pkgconfig"):
            (top / folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(LIBRARY / "gohvd.h", top / "include" / "gohvd.h")
        text = (LIBRARY / "gohvd.pc").read_text().replace("@VERSION@", self.metadata.version)
        (top / "lib" / "pkgconfig" / "gohvd.pc").write_text(text)
        build_data["force_include"][self.files.name] = "gohvd"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_{1}_{2}_{0}.manylinux2014_{0}".format(machine, *GLIBC)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.files.cleanup()


class Licences(MetadataHookInterface):
    """Copies the licences and notices of Go, of the modules in the library and the programs, and of the code that
    ziglang's compiler adds to them to the folder third_party, because hatchling takes licences only from the folder of the
    project, and lists them in the metadata.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        listed = "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Dir}}{{end}}{{end}}"
        packages = (*STATIC, *WITH_NCCL, "./cmd/libgohvd")
        modules = go("list", "-deps", "-tags", "nccl", "-f", listed, *packages, CGO_ENABLED="1").splitlines()
        modules.append("go\t" + go("env", "GOROOT").strip())
        modules.append(f"ziglang\t{zig()}")
        files = {"LICENSE"}
        for module, folder in (line.split("\t") for line in set(modules)):
            for file in pathlib.Path(folder).iterdir():
                if re.match("licen[sc]e|copying|notice|patents", file.name, re.IGNORECASE) and file.is_file():
                    copy = f"third_party/{module}/{file.name}"
                    pathlib.Path(self.root, copy).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, pathlib.Path(self.root, copy))
                    files.add(copy)
        metadata["license-files"] = sorted(files)
