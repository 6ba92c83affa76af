"""What ranks do in the tests of jobs on Ray and Spark."""

from __future__ import annotations

import pathlib

import numpy as np

import gohvd.numpy as hvd

ELEMENTS = 4 << 20


def place() -> tuple[int, ...]:
    hvd.init()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def traffic() -> int:
    """Returns the number of bytes that this network namespace has sent over loopback."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def sum_of_ranks() -> tuple[float, int]:
    """Returns a sum over the ranks, and the bytes that were sent meanwhile."""
    hvd.init()
    x = np.full(ELEMENTS, hvd.rank(), np.float32)
    hvd.allreduce(x, op=hvd.Sum, name="first")
    before = traffic()
    total = hvd.allreduce(x, op=hvd.Sum, name="second")
    hvd.barrier()
    return float(total[-1]), traffic() - before
