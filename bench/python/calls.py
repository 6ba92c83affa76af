#!/usr/bin/env python3
"""Measures the time of calls from Python: blocking and asynchronous allreduces of numpy arrays, and a grouped one.

    make libgohvd
    go build -o bin/ ./cmd/hvdrun
    PYTHONPATH=python bin/hvdrun -np 2 /usr/bin/python3 bench/python/calls.py [ROUNDS]

It measures three medians in each round (default 5): the time of a blocking allreduce of 4 bytes, the time per tensor of
1000 allreduces of 256 bytes that are in flight at the same time, and the time per tensor of one group of 1000 tensors.
Rank 0 prints the median, the minimum and the maximum over the rounds in microseconds, for each state of the cores
(bench/cores.py).
"""

import pathlib
import statistics
import sys
import time

import numpy as np

import gohvd.numpy as hvd

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cores

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

    measurements = {
        "blocking allreduce of 4 B": lambda: median(lambda: hvd.allreduce(one, name="one"), BLOCKING, 1000),
        "1000 x 256 B asynchronous, per tensor": lambda: median(async_step, STEPS, 5) / TENSORS,
        "group of 1000 x 256 B, per tensor": lambda: median(group_step, STEPS, 5) / TENSORS,
    }
    watch = cores.Watch(cores.measure if hvd.rank() == 0 else lambda: None)
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        for what, measure in measurements.items():
            us, state = watch.run(measure)
            watch.add(state, number, {what: us})
    if hvd.rank() == 0:
        print(*watch.table(measurements, "us", 2), sep="\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
