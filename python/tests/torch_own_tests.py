"""Runs torch's own tests of backends (torch.testing._internal.distributed.distributed_test) with gloo and with gohvd, and
writes a part of a page with the outcome: ``torch_own_tests.py [--page FILE] [--only REGEXP] [--sizes 2,3]
[PYTHON...]``. Each interpreter has another version of torch; the default is the one that runs this script.

torch starts new processes for each test. Here one process imports torch and forks the ranks of each test, which takes a
fraction of the time. The tests see gohvd under the name "gohvd", but a comparison of the backend's name with "gloo" is
true, so that the tests that torch runs only with gloo run too.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types

from page import write_part

_LIMIT_SECONDS = 90.0
_MODULE = "torch.testing._internal.distributed.distributed_test"

# Why a test that passes with gloo does not pass with gohvd. The first pattern that matches the name of the test counts.
REASONS: list[tuple[str, str]] = [
    (
        "test_barrier_timeout",
        "The test looks for gloo's text `Timed out`. gohvd says which rank has not submitted the barrier, and `timed out`.",
    ),
    (
        "test_monitored_barrier",
        "This version of torch allows `monitored_barrier` only for gloo. The method of the group works.",
    ),
]

_PAGE = """## torch's own tests of backends

torch ships tests of its backends (`{module}`). The table
compares gohvd with gloo on {python}. `make torch-own-tests` runs the tests and writes this part of
the page.

| torch | world size | tests that gloo passes | of these, gohvd passes | tests that only gohvd passes |
|---|---|---|---|---|
{counts}

Tests that torch runs only with gloo also run with gohvd. The other tests of the module need a GPU, another
backend or torchvision.

### Tests that gloo passes and gohvd does not

| test | torch and world sizes | what happens | reason |
|---|---|---|---|
{failures}
"""


class _Name(str):
    """The name of our backend, which is equal to the name of gloo too."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str, size: int) -> types.ModuleType:
    """Returns torch's module of tests for a backend and a world size."""
    folder = tempfile.mkdtemp()
    os.environ.update(
        BACKEND=backend, WORLD_SIZE=str(size), TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/shared", MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import importlib.util

    from torch.testing._internal import common_distributed

    if backend == "gohvd":
        import gohvd.torch.distributed  # noqa: F401

        for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add(backend)
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None and spec.origin is not None
    source = pathlib.Path(spec.origin).read_text()
    module = types.ModuleType("torch_tests")
    module.__file__ = spec.origin
    module.__dict__["own_name"] = _Name if backend == "gohvd" else str
    sys.modules["torch_tests"] = module
    source = source.replace('BACKEND = os.environ["BACKEND"]', 'BACKEND = own_name(os.environ["BACKEND"])', 1)
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def rank_of_test(module: types.ModuleType, case: type, name: str, rank: int, file: str, error: str) -> None:
    """Runs one rank of a test, and exits with the status of torch's tests."""
    import torch

    status = 1
    try:
        torch.set_num_threads(1)
        test = case(name)
        test.rank, test.file_name = rank, file
        import torch.distributed as dist
        from datetime import timedelta

        seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
        dist.init_process_group(
            init_method=f"file://{file}", backend=str(module.BACKEND), world_size=int(os.environ["WORLD_SIZE"]),
            rank=rank, timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        test._barrier()
        getattr(test, name)()
        test._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    except BaseException as e:
        if type(e).__name__ == "SkipTest":
            status = 77
        else:
            pathlib.Path(f"{error}.{rank}").write_text("".join(traceback.format_exception(type(e), e, e.__traceback__)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_test(module: types.ModuleType, case: type, name: str, size: int) -> tuple[str, str]:
    """Runs a test. Returns "pass", "skip", "fail" or "hang", and the last line of an error."""
    folder = tempfile.mkdtemp()
    module.initialize_temp_directories()
    module.Barrier.init()
    error = os.path.join(folder, "error")
    pids: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.setpgrp()
            log = os.open(os.path.join(folder, f"log.{rank}"), os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            rank_of_test(module, case, name, rank, os.path.join(folder, "store"), error)
        pids[pid] = rank
    statuses: dict[int, int] = {}
    end = time.monotonic() + _LIMIT_SECONDS
    while len(statuses) < size and time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
        elif pid in pids:
            statuses[pids[pid]] = os.waitstatus_to_exitcode(status)
            if statuses[pids[pid]] not in (0, 77):
                end = min(end, time.monotonic() + 15)  # the other ranks end soon, or not at all
    hung = [r for r in pids.values() if r not in statuses]
    for pid, rank in pids.items():
        if rank in hung:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    errors = [pathlib.Path(f"{error}.{r}") for r in range(size)]
    text = next((last_error(p.read_text()) for p in errors if p.exists()), "")
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips = [77] + [s.exit_code for s in TEST_SKIPS.values()]
    codes = list(statuses.values())
    if not hung and all(c == 0 for c in codes):
        return "pass", ""
    if any(c in skips for c in codes) and all(c in skips or c == 0 for c in codes):
        return "skip", ""
    if hung and not text:
        return "hang", f"rank {hung[0]} did not end in {_LIMIT_SECONDS:g} s"
    return "fail", text or f"statuses {codes}"


def last_error(text: str) -> str:
    """Returns the last line of a traceback that names an exception."""
    lines = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt)\b.*", text, re.MULTILINE)
    return lines[-1] if lines else text.strip().split("\n")[-1]


def run_all(backend: str, size: int, only: str, names_file: str, out: str) -> None:
    """Runs all tests with one backend and writes a line for each to the file out. It runs in a process of its own."""
    module = load(backend, size)
    base = module.DistributedTest._DistTestBase
    case = type("Case", (module.TestDistBackend, base), {"runTest": lambda self: None})
    case.__unittest_skip__ = False
    names = sorted(n for n in dir(base) if n.startswith("test_") and re.search(only, n))
    if names_file:
        wanted = set(pathlib.Path(names_file).read_text().split())
        names = [n for n in names if n in wanted]
    with open(out, "w") as f:
        for name in names:
            begin = time.monotonic()
            outcome, text = run_test(module, case, name, size)
            f.write(f"{name}\t{outcome}\t{text}\n")
            f.flush()
            if outcome != "skip":
                print(f"{backend} {size} {name}: {outcome} in {time.monotonic() - begin:.1f} s {text}", flush=True)


def read(path: str) -> dict[str, tuple[str, str]]:
    rows = [line.rstrip("\n").split("\t") for line in open(path)]
    return {row[0]: (row[1], row[2]) for row in rows}


def reason(name: str) -> str:
    return next((text for pattern, text in REASONS if re.search(pattern, name)), "")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--sizes", default="2,3")
    parser.add_argument("--child", nargs=4)
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    o = parser.parse_args()
    if o.child is not None:
        backend, size, names_file, out = o.child
        run_all(backend, int(size), o.only, names_file, out)
        return 0
    counts, failures, pythons = [], {}, []
    for python in o.pythons:
        code = "import platform, torch; print(platform.python_version(), torch.__version__)"
        version, torch = subprocess.run([python, "-c", code], check=True, text=True, stdout=subprocess.PIPE).stdout.split()
        pythons += [f"Python {version}"] * (f"Python {version}" not in pythons)
        for size in o.sizes.split(","):
            outcome = compare(python, size, o.only)
            passed = [n for n, (how, _) in outcome["gloo"].items() if how == "pass"]
            ours = collections.Counter(outcome["gohvd"][n][0] for n in passed)
            more = [n for n, (how, _) in outcome["gohvd"].items() if how == "pass" and n not in passed]
            counts.append(f"| {torch} | {size} | {len(passed)} | {ours['pass']} | {len(more)} |")
            for n in passed:
                if outcome["gohvd"][n][0] != "pass":
                    failures.setdefault(n, []).append((f"{torch} at {size}", *outcome["gohvd"][n]))
    rows = []
    for n, found in sorted(failures.items()):
        where, how, text = ", ".join([w for w, _, _ in found]), found[0][1], found[0][2].replace("|", "\\|")[:200]
        rows.append(f"| `{n}` | {where} | {how}: {text} | {reason(n) or 'not known yet'} |")
    page = _PAGE.format(
        module=_MODULE, python=" and ".join(pythons), counts="\n".join(counts),
        failures="\n".join(rows) or "| none | | | |",
    )  # fmt: skip
    if o.page is not None:
        write_part(o.page, page)
    else:
        print(page)
    return 0 if all(map(reason, failures)) else 1


def compare(python: str, size: str, only: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Runs the tests with both backends. Returns the outcomes by backend and test."""
    outcome, names_file = {}, ""
    folder = tempfile.mkdtemp()
    for backend in ("gloo", "gohvd"):
        out = os.path.join(folder, backend)
        command = [python, os.path.abspath(__file__), "--only", only, "--child", backend, size, names_file, out]
        subprocess.run(command, check=True)
        outcome[backend] = read(out)
        if backend == "gloo":
            names_file = os.path.join(folder, "names")
            ran = [n for n, (how, _) in outcome["gloo"].items() if how != "skip"]
            pathlib.Path(names_file).write_text("\n".join(ran))
    return outcome


if __name__ == "__main__":
    sys.exit(main())
