"""A job whose rank 1 is killed. The other ranks wait for an operation, and print the error that ends the wait.

forked.py runs it with the way in which the ranks wait, and torchrun with names of tests of distributed_ranks.py. The ranks
that torchrun starts after the death run these tests.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gohvd.torch.distributed

_LIMIT_SECONDS = 300


def die(how: str, **init: object) -> None:
    faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
    # torchrun sends SIGTERM to the other ranks of a rank that has died, which may arrive before the error.
    signal.signal(signal.SIGTERM, lambda *_: None)
    dist.init_process_group("gohvd", **init)
    rank = dist.get_rank()
    x = torch.ones(4)
    model = DistributedDataParallel(torch.nn.Linear(100, 100)) if how == "ddp" else None
    try:
        for _ in range(10):
            dist.all_reduce(x)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # the last operation of the killed rank may fail at the other ranks
            if model is not None:
                model(torch.randn(2, 100)).sum().backward()
            elif how == "future":
                dist.all_reduce(x, async_op=True).get_future().wait()
            elif how == "monitored_barrier":
                dist.monitored_barrier()
            else:
                dist.all_reduce(x)
    except RuntimeError as e:
        sys.stdout.write("\nrank %d got %s\n" % (rank, str(e).replace("\n", " ")))
        sys.exit(1)


def run(rank: int, size: int, file: str, args: list[str]) -> None:
    die(args[0], init_method=f"file://{file}", rank=rank, world_size=size)


if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die("wait")
    import distributed_ranks

    distributed_ranks.run(int(os.environ["RANK"]), 0, "", sys.argv[1:])
