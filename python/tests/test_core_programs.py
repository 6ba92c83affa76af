"""Tests how the programs in the package are found, and the commands that run them."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile
import unittest

import gohvd
import programs

COMMAND = "import sys; from gohvd import _programs; getattr(_programs, sys.argv[1])()"


@unittest.skipUnless(programs.alone, "runs at one rank")
class Programs(unittest.TestCase):
    def setUp(self) -> None:
        self.top = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.top)
        self.package = pathlib.Path(self.top, "gohvd")
        ignored = shutil.ignore_patterns("bin", "__pycache__")
        shutil.copytree(os.path.dirname(gohvd.__file__), self.package, ignore=ignored)

    def test_store_with_a_child(self) -> None:
        """Closing the store of a job does not wait for a child of the program that has a copy of its pipe."""
        script = """
            import os, signal
            from gohvd import _meeting
            store = _meeting.Store("127.0.0.1")
            child = os.fork()
            if child == 0:
                signal.pause()
            store.close()
            print(store._process.returncode)
            os.kill(child, signal.SIGKILL)
        """
        ran = programs.run(script)
        self.assertEqual(ran.stdout, "0\n", ran.stderr)

    def make(self, path: pathlib.Path) -> str:
        """Makes a program that prints its name, arguments and process ID, and returns its path."""
        path.parent.mkdir(exist_ok=True)
        path.write_text('#!/bin/sh\necho "$0" "$@" $$\nexit 7\n')
        path.chmod(0o755)
        return str(path)

    def test_find(self) -> None:
        script = "from gohvd import _programs; print(_programs.find('hvdrun'))"

        def find() -> str:
            return programs.run(script, PYTHONPATH=self.top, PATH=self.top).stdout.strip()

        self.assertEqual(find(), "None")
        path = self.make(pathlib.Path(self.top, "hvdrun"))
        self.assertEqual(find(), path)
        (self.package / "bin" / "hvdrun").mkdir(parents=True)
        self.assertEqual(find(), path, "a folder is not a program")
        (self.package / "bin" / "hvdrun").rmdir()
        path = self.make(self.package / "bin" / "hvdrun")
        self.assertEqual(find(), path)

    def test_commands(self) -> None:
        for name in ("hvdbench", "hvdd", "hvdrun"):
            path = self.make(self.package / "bin" / name)
            ran = programs.run(COMMAND, name, "-x", "a b", PYTHONPATH=self.top)
            self.assertEqual(ran.returncode, 7, ran.stderr)
            self.assertTrue(ran.stdout.startswith(f"{path} {name} -x a b "), ran.stdout)

    def test_flags(self) -> None:
        """``python -m gohvd`` prints the flags for the library and the header of a wheel, or those of the checkout."""
        checkout = pathlib.Path(gohvd.__file__).resolve().parent.parent.parent

        def ask(top: str, *args: str, **env: str):
            script = "import runpy; runpy.run_module('gohvd', run_name='__main__')"
            return programs.run(script, *args, PYTHONPATH=top, **env)

        ran = ask(str(checkout / "python"), "--libs", "--cflags", HVD_LIBRARY="/a b/libgohvd.so")
        self.assertEqual(ran.stdout, f"-I{checkout}/cmd/libgohvd '-L/a b' '-Wl,-rpath,/a b' -lgohvd\n", ran.stderr)
        (self.package / "include").mkdir()
        self.assertEqual(ask(self.top, "--cflags").stdout, f"-I{self.package}/include\n")
        ran = ask(self.top, "--libs", HVD_LIBRARY="")
        self.assertEqual(ran.returncode, 1)
        self.assertIn("python -m gohvd: there is no libgohvd.so in ", ran.stderr)
        library = self.package / "lib" / "libgohvd.so"
        library.parent.mkdir()
        library.touch()
        folder = library.parent
        self.assertEqual(ask(self.top, "--libs", HVD_LIBRARY="").stdout, f"-L{folder} -Wl,-rpath,{folder} -lgohvd\n")
        self.assertEqual(ask(self.top, "--version").stdout, f"{gohvd.__version__}\n")
        ran = ask(self.top)
        self.assertEqual(ran.returncode, 2)
        self.assertIn("want --cflags, --libs or --version", ran.stderr)

    def test_doctor(self) -> None:
        path = self.make(self.package / "bin" / "hvdrun")
        ran = programs.run("import runpy; runpy.run_module('gohvd.doctor', run_name='__main__')", "--json", PYTHONPATH=self.top)
        self.assertTrue(ran.stdout.startswith(f"{path} doctor --python {sys.executable} --json "), ran.stdout + ran.stderr)

    def test_no_program(self) -> None:
        # A program on PATH is not run: it may be the command itself, which would start itself forever.
        self.make(pathlib.Path(self.top, "hvdrun"))
        ran = programs.run(COMMAND, "hvdrun", PYTHONPATH=self.top, PATH=self.top)
        self.assertEqual(ran.returncode, 1)
        self.assertIn(f"hvdrun: {self.package} does not contain bin/hvdrun", ran.stderr)


if __name__ == "__main__":
    unittest.main()
