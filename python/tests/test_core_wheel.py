"""Tests what wheels.py writes into wheels. scripts/wheel-check.sh builds real wheels, installs them and uses them."""

from __future__ import annotations

import base64
import configparser
import email
import hashlib
import os
import pathlib
import shutil
import sys
import tempfile
import unittest
import zipfile
from unittest import mock

import programs

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
try:
    import wheels
except ModuleNotFoundError:  # Python 3.10 without tomli
    wheels = None

import gohvd


@unittest.skipUnless(programs.alone, "a job of one rank builds them")
@unittest.skipUnless(wheels, "this Python does not have tomllib or tomli")
class Wheels(unittest.TestCase):
    def setUp(self) -> None:
        self.out = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.out)
        for name, value in (("programs", {p: b"\x7fELF" for p in wheels.PROGRAMS}), ("licences", {"a/b/LICENSE": b"free"})):
            patch = mock.patch.object(wheels, name, lambda machine, value=value: value)
            patch.start()
            self.addCleanup(patch.stop)

    def build(self, project: pathlib.Path, machine: str = "x86_64") -> zipfile.ZipFile:
        wheel = zipfile.ZipFile(wheels.wheel(project, machine, self.out))
        self.addCleanup(wheel.close)
        return wheel

    def test_tags(self) -> None:
        for project, machine, name, pure in (
            (0, "x86_64", "gohvd-{}-py3-none-manylinux_2_17_x86_64.musllinux_1_1_x86_64", "false"),
            (0, "aarch64", "gohvd-{}-py3-none-manylinux_2_17_aarch64.musllinux_1_1_aarch64", "false"),
            (1, "x86_64", "gohvd_horovod-{}-py3-none-any", "true"),
        ):
            wheel = self.build(wheels.PROJECTS[project], machine)
            name = name.format(gohvd.__version__)
            self.assertEqual(pathlib.Path(str(wheel.filename)).name, name + ".whl")
            info = "-".join(name.split("-")[:2]) + ".dist-info"
            about = email.message_from_bytes(wheel.read(f"{info}/WHEEL"))
            self.assertEqual(about["Root-Is-Purelib"], pure)
            self.assertEqual(about.get_all("Tag"), ["py3-none-" + system for system in name.rsplit("-", 1)[1].split(".")])

    def test_files(self) -> None:
        wheel = self.build(wheels.PROJECTS[0])
        info = f"gohvd-{gohvd.__version__}.dist-info"
        names = wheel.namelist()
        self.assertEqual(names[-1], f"{info}/RECORD")
        for name in ("gohvd/__init__.py", "gohvd/torch/__init__.py", "gohvd/py.typed", f"{info}/licenses/a/b/LICENSE"):
            self.assertEqual(wheel.getinfo(name).external_attr >> 16, 0o100644, name)
        for program in wheels.PROGRAMS:
            self.assertEqual(wheel.getinfo(f"gohvd/bin/{program}").external_attr >> 16, 0o100755, program)
        self.assertEqual([n for n in names if not n.startswith(("gohvd/", info))], [])
        # RECORD has every file once, with its hash and size.
        record = [line.split(",") for line in wheel.read(f"{info}/RECORD").decode().splitlines()]
        self.assertEqual([name for name, _, _ in record], names)
        for name, digest, size in record[:-1]:
            data = wheel.read(name)
            want = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            self.assertEqual((digest, int(size)), ("sha256=" + want, len(data)), name)
        names = self.build(wheels.PROJECTS[1]).namelist()
        self.assertIn("horovod/torch/__init__.py", names)
        self.assertEqual([n for n in names if not n.startswith(("horovod/", "gohvd_horovod-"))], [])

    def test_metadata(self) -> None:
        version = gohvd.__version__
        for project, name, requires, commands in (
            (0, "gohvd", {f'gohvd-horovod=={version} ; extra == "horovod"', 'torch>=1.13 ; extra == "torch"',
                          'numpy>=1.21 ; extra == "numpy"'}, ["hvdbench", "hvdd", "hvdrun"]),
            (1, "gohvd-horovod", {f"gohvd=={version}"}, ["horovodrun"]),
        ):
            wheel = self.build(wheels.PROJECTS[project])
            info = f"{name.replace('-', '_')}-{version}.dist-info"
            about = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
            self.assertEqual((about["Name"], about["Version"]), (name, version))
            self.assertEqual(set(about.get_all("Requires-Dist")), requires)
            for file in about.get_all("License-File"):
                self.assertIn(f"{info}/licenses/{file}", wheel.namelist())
            parser = configparser.ConfigParser()
            parser.read_string(wheel.read(f"{info}/entry_points.txt").decode())
            self.assertEqual(list(parser["console_scripts"]), commands)

    def test_same_bytes(self) -> None:
        """The time, the user's umask and the names of folders have no effect, except for SOURCE_DATE_EPOCH."""
        copy = self.out / "copy"
        shutil.copytree(wheels.PYTHON / "gohvd", copy / "gohvd", copy_function=shutil.copyfile)
        for name in ("pyproject.toml", "README.md"):
            shutil.copyfile(wheels.PYTHON / name, copy / name)
        with mock.patch.dict(os.environ):
            os.environ.pop("SOURCE_DATE_EPOCH", None)
            self.assertEqual(self.build(wheels.PYTHON).infolist()[0].date_time, (1980, 1, 1, 0, 0, 0))
            one = wheels.wheel(wheels.PYTHON, "x86_64", self.out).read_bytes()
            self.addCleanup(os.umask, os.umask(0o077))
            self.assertEqual(wheels.wheel(copy, "x86_64", self.out).read_bytes(), one)
            os.environ["SOURCE_DATE_EPOCH"] = "1700000000"
            self.assertEqual(self.build(copy).infolist()[0].date_time, (2023, 11, 14, 22, 13, 20))


@unittest.skipUnless(programs.alone and wheels, "a job of one rank tests it, if this Python has tomllib or tomli")
class NoPrograms(unittest.TestCase):
    def test_no_go(self) -> None:
        with mock.patch.dict(os.environ, GO="/nowhere/go"), self.assertRaisesRegex(SystemExit, "go is not on PATH"):
            wheels.programs("x86_64")

    def test_no_checkout(self) -> None:
        with mock.patch.object(wheels, "CHECKOUT", pathlib.Path("/nowhere")):
            with self.assertRaisesRegex(SystemExit, "/nowhere is not a checkout of gohvd"):
                wheels.programs("x86_64")

    def test_another_machine(self) -> None:
        with mock.patch.object(wheels.platform, "machine", lambda: "s390x"):
            with self.assertRaisesRegex(SystemExit, "does not run on s390x, only on x86_64 and aarch64"):
                wheels.build_wheel("/nowhere")


if __name__ == "__main__":
    unittest.main()
