"""Runs jobs of a test module that needs torch: ``forked.py MODULE "RANKS [ARG...]"...``, one argument for each job.

The ranks of all jobs are forked from one process that has imported torch, because that import takes longer than most of the
tests. Each rank calls MODULE.run(rank, size, file, args), and the ranks of a job meet at the file. After each job, its
exit codes are printed. The exit status is 1 if one of them is not 0.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch._dynamo  # DistributedDataParallel imports it, which takes nearly as long as the import of torch
import torch.multiprocessing as mp


def rank(rank: int, module: str, size: int, file: str, args: list[str]) -> None:
    # gohvd is imported after the fork, as in a program that starts its ranks with torch.multiprocessing.
    importlib.import_module(module).run(rank, size, file, args)


def run(module: str, job: str) -> bool:
    """Runs a job and reports whether all of its ranks have passed."""
    size, *args = job.split()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            rank, (module, int(size), os.path.join(folder, "store"), args), int(size), join=False, start_method="fork"
        )
        for p in ranks.processes:
            p.join()
    codes = [p.exitcode for p in ranks.processes]
    print(f"job {job}: {codes}", flush=True)
    return not any(codes)


if __name__ == "__main__":
    sys.exit(not all([run(sys.argv[1], job) for job in sys.argv[2:]]))
