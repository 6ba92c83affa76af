"""Runs all tests with each INTERPRETER: ``all.py [--ranks N,...] [--page FILE] INTERPRETER...``.

The tests run at each number N of ranks, by default at 1, 2 and 3. If an interpreter does not have torch, the tests that
need torch are left out. All tests for one number of ranks run in one program, because importing torch takes longer than
most tests. The variable HVD_RUN must be the path of hvdrun, and HVD_SIDECAR_BINARY the path of hvdd. all.py prints
which tests were left out or skipped, and writes a part of the page FILE that says with which versions the tests pass. It
exits with status 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys

from page import write_part

TESTS = pathlib.Path(__file__).resolve().parent
_LIMIT_SECONDS = 600
_VERSIONS = """
import importlib, platform
versions = [platform.python_version()]
for name in ("torch", "numpy"):
    try:
        versions.append(importlib.import_module(name).__version__)
    except ImportError:
        versions.append("none")
print(*versions)
"""
# The tests that import torch.
_NEED_TORCH = ("test_torch_*.py", "test_shim.py")
_PAGE = """## Tests of the Python package

The table shows the results of the tests of the Python package (python/tests) with several versions of Python,
torch and numpy. `make test-torch2` runs the tests and writes this part of the page.

| Python | torch | numpy | ranks | failed |
|---|---|---|---|---|
{rows}

Every rank runs all tests. A test is skipped if it needs a feature that this version of torch does not have,
or another number of ranks. Without torch, the tests of gohvd.torch do not run.
"""


def run(interpreter: str, ranks: int, torch: bool) -> list[str]:
    """Runs the tests and returns the names of those that fail."""
    files = sorted(TESTS.glob("test_*.py"))
    left_out = [] if torch else [path for path in files if any(path.match(pattern) for pattern in _NEED_TORCH)]
    modules = [path.stem for path in files if path not in left_out]
    # The start timeout is long, because a rank may wait in init for another rank that still has other tests to run.
    start_timeout = f"--start-timeout={_LIMIT_SECONDS}"
    command = [os.environ["HVD_RUN"], "-np", str(ranks), start_timeout, interpreter, "-m", "unittest", "-v", *modules]
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    try:
        job = subprocess.run(
            command, cwd=TESTS, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_LIMIT_SECONDS
        )
        status, output = job.returncode, job.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as e:
        status, output = 124, (e.stdout or b"").decode(errors="replace")
    failed = sorted({name for name in re.findall(r"(?:FAIL|ERROR): .*?\((?:\w+\.)*?(test_\w+)\.", output)})
    ran = re.search(r"^\[0\]<stderr>:Ran \d+ tests?", output, re.MULTILINE)
    if (status != 0 or ran is None) and not failed:
        failed = [f"status {status}"]
    rank0 = "".join(re.findall(r"^\[0\]<stderr>:(.*\n)", output, re.MULTILINE))
    # A test may have a docstring, whose first line is printed.
    reasons = re.findall(r"\b(test_\w+) \(([\w.]+)\)(?:\n.*)? \.\.\. skipped ['\"](.*)['\"]$", rank0, re.MULTILINE)
    if failed:
        print(output)
    for path in left_out:
        print(f"{interpreter} {ranks}: {path.stem} left out: no torch")
    for name, where, why in reasons:
        print(f"{interpreter} {ranks}: {where} {name} skipped: {why}")
    print(f"{interpreter} {ranks}: {'failed' if failed else 'ok'}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("interpreters", nargs="+")
    o = parser.parse_args()
    rows, failures = [], 0
    for interpreter in o.interpreters:
        versions = subprocess.run([interpreter, "-c", _VERSIONS], stdout=subprocess.PIPE, check=True).stdout.decode()
        torch = versions.split()[1] != "none"
        for ranks in map(int, o.ranks.split(",")):
            failed = run(interpreter, ranks, torch)
            failures += len(failed)
            cells = [*versions.split(), ranks, ", ".join(failed) or "none"]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    if o.page is not None:
        write_part(o.page, _PAGE.format(rows="\n".join(rows)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
