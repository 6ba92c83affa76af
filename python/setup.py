"""Sets the platform tag of a wheel that contains the sidecar, gohvd/bin/hvdd. All other settings are in pyproject.toml.
"""

import pathlib
import struct

from setuptools import Distribution, setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

HVDD = pathlib.Path(__file__).parent / "gohvd" / "bin" / "hvdd"
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of elf(5)


def platform(program: pathlib.Path) -> str:
    """Returns the platform tag for an executable. It is read from the file, because the executable may have been built
    for another machine.
    """
    header = program.read_bytes()[:20]
    machine = struct.unpack("<H", header[18:])[0] if len(header) == 20 and header.startswith(b"\x7fELF") else None
    if machine not in MACHINES:
        raise SystemExit(f"{program} is not a Linux program for {' or '.join(MACHINES.values())}")
    return f"linux_{MACHINES[machine]}"


class Package(Distribution):
    def has_ext_modules(self):
        """Returns whether the wheel contains files for one platform only."""
        return HVDD.exists()


class Wheel(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", platform(HVDD)) if HVDD.exists() else super().get_tag()


setup(distclass=Package, cmdclass={"bdist_wheel": Wheel})
