#!/usr/bin/env python3
"""Measures the time of calls from Python: blocking and asynchronous allreduces of numpy arrays, and a grouped one.

    go build -o bin/ ./cmd/hvdrun ./cmd/hvdd
    PYTHONPATH=python bin/hvdrun -np 2 /usr/bin/python3 bench/python/calls.py

Rank 0 prints three medians in microseconds: the time of a blocking allreduce of 4 bytes, the time per tensor of 1000
allreduces of 256 bytes that are in flight at the same time, and the time per tensor of one group of 1000 tensors.
"""

import statistics
import time

import numpy as np

import gohvd.numpy as hvd

BLOCKING = 6000
STEPS = 25
TENSORS = 1000


def median(call, calls, warmup):
    times = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[warmup:]) * 1e6


def main():
    hvd.init()
    one = np.ones(1, np.float32)
    arrays = [np.ones(64, np.float32) for _ in range(TENSORS)]
    names = [f"tensor.{i}" for i in range(TENSORS)]

    def async_step():
        hvd.barrier()
        handles = [hvd.allreduce_async(a, name=n) for a, n in zip(arrays, names)]
        for h in handles:
            h.wait()

    def group_step():
        hvd.barrier()
        hvd.grouped_allreduce(arrays, name="group")

    rows = [
        ("blocking allreduce of 4 B", median(lambda: hvd.allreduce(one, name="one"), BLOCKING, 1000)),
        ("1000 x 256 B asynchronous, per tensor", median(async_step, STEPS, 5) / TENSORS),
        ("group of 1000 x 256 B, per tensor", median(group_step, STEPS, 5) / TENSORS),
    ]
    if hvd.rank() == 0:
        for what, us in rows:
            print(f"{what:40} {us:8.2f} us")
    hvd.shutdown()


if __name__ == "__main__":
    main()
