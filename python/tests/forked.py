"""Runs jobs of test modules that need torch. Each line of the standard input is one: a JSON object with the arguments of
start.

The ranks of all jobs are forked from this process, which has imported torch, because that import takes longer than most of
the tests. Each rank calls run(rank, size, init_method, args) of the module. After each job, a line with its exit codes is
printed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch._dynamo  # DistributedDataParallel imports it, which takes nearly as long as the import of torch
import torch.multiprocessing as mp

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


def _enter(host: str) -> None:
    """Lets this thread, and the threads that it starts, run on a host of internal/testnet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"entering the namespace {host}")
    socket.sethostname(host)


def rank(
    rank: int, module: str, size: int, file: str, args: Sequence[str], env: Mapping[str, str], hosts: Sequence[Sequence[str]]
) -> None:
    init_method = f"file://{file}"
    if hosts:
        _enter(hosts[rank * len(hosts) // size][0])
        init_method = f"tcp://{hosts[0][1]}:29500"
    os.environ.update(env)
    try:
        # gohvd is imported after the fork, as in a program that starts its ranks with torch.multiprocessing.
        importlib.import_module(module).run(rank, size, init_method, args)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def start(
    module: str, ranks: int, args: Sequence[str] = (), env: Mapping[str, str] = {}, hosts: Sequence[Sequence[str]] = ()
) -> list[int]:
    """Runs a job and returns the exit codes of its ranks. env has more variables. hosts are the names and addresses of hosts
    with an equal number of ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = mp.start_processes(
            rank, (module, ranks, os.path.join(folder, "store"), args, env, hosts), ranks, join=False, start_method="fork"
        )
        for p in job.processes:
            p.join()
    return [p.exitcode for p in job.processes]


if __name__ == "__main__":
    for line in sys.stdin:
        print(f"\nexit codes: {start(**json.loads(line))}", flush=True)
