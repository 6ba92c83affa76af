"""A job whose rank 1 is killed, or of which a rank hangs. The other ranks print the error that ends their wait.

internal/pythontest runs it with the way in which the ranks wait for an operation, or with "hung" and the rank that hangs before it
makes the group. torchrun runs it with names of tests of distributed_ranks.py. The ranks that torchrun starts after the death
run these tests.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from datetime import timedelta

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


def hang(hung: int, **init: object) -> None:
    """Rank hung never makes the group. The others make it at the same time."""
    faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
    rank, size = init["rank"], init["world_size"]
    store = dist.FileStore(init["init_method"].removeprefix("file://") + ".ranks", size)
    ready, failed = [f"ready {r}" for r in range(size)], [f"failed {r}" for r in range(size) if r != hung]
    store.set(f"ready {rank}", "")
    store.wait(ready, timedelta(seconds=_LIMIT_SECONDS))
    if rank == hung:
        return store.wait(failed, timedelta(seconds=_LIMIT_SECONDS))
    try:
        dist.init_process_group("gohvd", **init)
    except RuntimeError as e:
        sys.stdout.write("\nrank %d got %s\n" % (rank, str(e).replace("\n", " ")))
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    store.set(f"failed {rank}", "")


def run(rank: int, size: int, init_method: str, args: list[str]) -> None:
    init = {"init_method": init_method, "rank": rank, "world_size": size}
    if args[0] == "hung":
        hang(int(args[1]), **init)
    else:
        die(args[0], **init)


if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die("wait")
    import distributed_ranks

    distributed_ranks.run(int(os.environ["RANK"]), 0, "", sys.argv[1:])
