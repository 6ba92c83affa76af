"""Tests wheels of the package that contain the sidecar, and wheels that do not."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile
from typing import Optional

import programs

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent



def _can_build() -> bool:
    """Returns whether this Python can build wheels, which requires setuptools 70.1 or newer, or the package wheel."""
    try:
        return any(importlib.util.find_spec(name) for name in ("setuptools.command.bdist_wheel", "wheel.bdist_wheel"))
    except ModuleNotFoundError:
        return False


@unittest.skipUnless(programs.alone, "a job of one rank builds them")
@unittest.skipUnless(_can_build(), "this Python cannot build wheels")
class Wheels(unittest.TestCase):
    def build(self, hvdd: Optional[bytes]) -> subprocess.CompletedProcess:
        """Builds a wheel in self.top. If hvdd is not None, the wheel has a sidecar file with this content."""
        self.top = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.top)
        source = self.top / "source"
        shutil.copytree(_PACKAGE / "gohvd", source / "gohvd", ignore=shutil.ignore_patterns("__pycache__", "bin"))
        for name in ("pyproject.toml", "setup.py", "README.md"):
            shutil.copy(_PACKAGE / name, source)
        if hvdd is not None:
            (source / "gohvd" / "bin").mkdir()
            (source / "gohvd" / "bin" / "hvdd").write_bytes(hvdd)
            (source / "gohvd" / "bin" / "hvdd").chmod(0o755)
        return subprocess.run(
            [sys.executable, "-c", "import setuptools.build_meta as b; b.build_wheel('..')"],
            cwd=source,
            env=programs.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
        )

    def test_tags(self) -> None:
        elf = b"\x7fELF" + bytes(14)
        for what, hvdd, tag, pure in (
            ("none", None, "py3-none-any", "true"),
            ("amd64", elf + struct.pack("<H", 62), "py3-none-linux_x86_64", "false"),
            ("arm64", elf + struct.pack("<H", 183), "py3-none-linux_aarch64", "false"),
        ):
            built = self.build(hvdd)
            (path,) = self.top.glob("*.whl") or [built.stdout]
            self.assertTrue(path.name.endswith(f"-{tag}.whl"), f"{what}: {path.name}")
            with zipfile.ZipFile(path) as wheel:
                names = wheel.namelist()
                (about,) = [n for n in names if n.endswith(".dist-info/WHEEL")]
                text = wheel.read(about).decode()
                self.assertIn(f"Root-Is-Purelib: {pure}\n", text, what)
                self.assertIn(f"Tag: {tag}\n", text, what)
                self.assertIn("gohvd/__init__.py", names)
                self.assertEqual("gohvd/bin/hvdd" in names, hvdd is not None, what)
                if hvdd is not None:
                    self.assertTrue(wheel.getinfo("gohvd/bin/hvdd").external_attr >> 16 & 0o111, "it can be run")

    def test_no_program(self) -> None:
        built = self.build(b"#!/bin/sh\n")
        self.assertNotEqual(built.returncode, 0)
        self.assertIn("hvdd is not a Linux program for x86_64 or aarch64", built.stdout)


if __name__ == "__main__":
    unittest.main()
