"""Tests what hatch_build.py adds to the wheel. scripts/wheel-check.sh builds real wheels, installs them and uses them."""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tempfile
import types
import unittest
from unittest import mock

import programs

import gohvd

PYTHON = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PYTHON))
# hatchling is not installed here. Its classes only define how it calls the hooks.
with mock.patch.dict(sys.modules, {
    "hatchling.builders.hooks.plugin.interface": types.SimpleNamespace(BuildHookInterface=object),
    "hatchling.metadata.plugin.interface": types.SimpleNamespace(MetadataHookInterface=object),
}):
    import hatch_build


@unittest.skipUnless(programs.alone, "a job of one rank tests it")
class Build(unittest.TestCase):
    def build(self, goarch: str) -> dict:
        """Returns what the hook adds for a machine. Nothing is built. The commands that would build are in built."""
        hook = hatch_build.Programs()
        hook.metadata = types.SimpleNamespace(version=gohvd.__version__)
        added: dict = {"force_include": {}}
        self.built = []

        def run(*args: str, **env: str) -> str:
            if args[1:] == ("env", "GOARCH"):
                return goarch + "\n"
            self.built.append((args, env))
            return ""

        with mock.patch.object(hatch_build, "run", run), mock.patch.object(hatch_build, "zig", lambda: pathlib.Path("/z z")):
            hook.initialize("standard", added)
        ((folder, inside),) = added["force_include"].items()
        self.assertEqual(inside, "gohvd")
        text = pathlib.Path(folder, "lib", "pkgconfig", "gohvd.pc").read_text()
        self.assertIn(f"\nVersion: {gohvd.__version__}\n", text)
        self.assertIn("HVD_ABI_VERSION", pathlib.Path(folder, "include", "gohvd.h").read_text())
        hook.finalize("standard", added, "")
        self.assertFalse(os.path.exists(folder), "the hook has left its folder")
        return added

    def test_machines(self) -> None:
        for goarch, machine in (("amd64", "x86_64"), ("arm64", "aarch64")):
            added = self.build(goarch)
            self.assertEqual(added["tag"], f"py3-none-manylinux_2_17_{machine}.manylinux2014_{machine}")
            self.assertIs(added["pure_python"], False)
            compilers = [env.get("CC") for _, env in self.built]
            zig = f"'/z z/zig' cc -target {machine}-linux-gnu.2.17"
            self.assertEqual(compilers, [None, zig, zig], self.built)  # for hvdrun, for the others, for the library
        with self.assertRaisesRegex(SystemExit, "does not run on s390x, only on amd64 and arm64"):
            self.build("s390x")

    def test_licences(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for name in ("LICENSE", "NOTICE.txt", "README.md"):
                pathlib.Path(directory, name).write_text(name)
            hook = hatch_build.Licences()
            hook.root = directory
            added: dict = {}
            out = {"list": f"example.com/a\t{directory}\n" * 2, "env": directory}
            with mock.patch.object(hatch_build, "go", lambda command, *_, **__: out[command]), mock.patch.object(
                hatch_build, "zig", lambda: directory
            ):
                hook.update(added)
            want = [f"third_party/{m}/{f}" for m in ("example.com/a", "go", "ziglang") for f in ("LICENSE", "NOTICE.txt")]
            self.assertEqual(added["license-files"], ["LICENSE", *want])
            for path in added["license-files"]:
                self.assertEqual(pathlib.Path(directory, path).read_text(), pathlib.Path(path).name)

    def test_no_go(self) -> None:
        with mock.patch.dict(os.environ, GO="/nowhere/go"), self.assertRaisesRegex(SystemExit, "go is not on PATH"):
            hatch_build.go("version")

    def test_no_checkout(self) -> None:
        with mock.patch.object(hatch_build, "CHECKOUT", pathlib.Path("/nowhere")):
            with self.assertRaisesRegex(SystemExit, "/nowhere is not a checkout of gohvd"):
                hatch_build.go("version")


@unittest.skipUnless(programs.alone, "a job of one rank tests it")
class Versions(unittest.TestCase):
    def test_requirements(self) -> None:
        """gohvd and gohvd-horovod require each other in their own version, and are made by the same hatchling."""
        texts = [(PYTHON / project / "pyproject.toml").read_text() for project in (".", "horovod_shim")]
        requirements = re.findall(r'"(gohvd(?:-horovod)?[=<>~!].*?)"', "".join(texts))
        self.assertEqual(requirements, [f"gohvd-horovod=={gohvd.__version__}", f"gohvd=={gohvd.__version__}"])
        one, other = (re.findall(r'"hatchling==.*?"', text) for text in texts)
        self.assertEqual((len(one), one), (1, other))


if __name__ == "__main__":
    unittest.main()
