#!/usr/bin/env python3
"""Compares the backend gohvd of torch.distributed with gloo: steps of DistributedDataParallel with the shapes of
ResNet-50, and blocking all_reduce of several sizes. It starts the ranks itself, with each backend in turn.

    make libgohvd
    PYTHONPATH=python bench/torch-ddp.py [--rounds 5] [--ranks 2]

"gohvd-arena" is gohvd with gradient buckets and tensors in an arena, where gradients are views of the buckets.
"gloo-views" is gloo with gradients as views of the buckets (gradient_as_bucket_view). For each backend and measurement it prints the
median of the rounds and the lowest and highest one, and then the ratios of the first two backends to gloo in the same
round. It does so for each state of the cores, and compares only runs of the same state (cores.py). In a step of
the model each rank computes one gradient for each parameter, without the layers of the network, so that the step shows
the time of the communication. The step is also measured without communication: no backend can make it faster than that.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import cores

BACKENDS = ("gohvd", "gohvd-arena", "gloo", "gloo-views")
SIZES = [4, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def resnet50():
    """Returns the shapes of the 161 parameters of ResNet-50."""
    shapes, width = [(64, 3, 7, 7), (64,), (64,)], 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, kernel in ((planes, width, 1), (planes, planes, 3), (4 * planes, planes, 1)):
                shapes += [(out, into, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return shapes + [(1000, width), (1000,)]


class Model(torch.nn.Module):
    """A model whose backward pass only writes a gradient for each parameter."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(s)) for s in resnet50()])

    def forward(self, x):
        return sum((w.view(-1)[0] if w.dim() == 1 else w.sum()) * x for w in self.weights)


def timed(call, count):
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def no_communication(state, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def rank(r, ranks, backend, file, steps, queue):
    torch.set_num_threads(1)
    DistributedDataParallel, zeros = torch.nn.parallel.DistributedDataParallel, torch.zeros
    if not backend.startswith("gloo"):
        import gohvd.torch.distributed
    if backend == "gohvd-arena":
        DistributedDataParallel, zeros = gohvd.torch.distributed.DistributedDataParallel, gohvd.torch.alloc_tensor
    dist.init_process_group(backend.partition("-")[0], init_method=f"file://{file}", rank=r, world_size=ranks)
    options = {"gradient_as_bucket_view": True} if backend == "gloo-views" else {}
    model = DistributedDataParallel(Model(), **options)
    alone = DistributedDataParallel(Model(), **options)
    alone.register_comm_hook(None, no_communication)
    x = torch.ones(())
    found = {}
    for what, m in (("DDP step of ResNet-50", model), ("the same without communication", alone)):
        timed(lambda: m(x).backward(), 3)
        found[what] = timed(lambda: m(x).backward(), steps)
    for size in SIZES if backend != "gloo-views" else ():
        data = zeros((size // 4,))
        count = 2000 if size < 4096 else max(4, (256 << 20) // size)
        # More calls than a group has numbers, so that all names are in the response cache.
        timed(lambda: dist.all_reduce(data), 300 if size < 4096 else 5)
        found[f"all_reduce of {size} bytes"] = timed(lambda: dist.all_reduce(data), count)
    dist.barrier()
    if r == 0:
        queue.put(found)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    o = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    watch, measurements = cores.Watch(), []

    def run(backend):
        queue = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank, (o.ranks, backend, os.path.join(folder, "store"), o.steps, queue), o.ranks)
        return queue.get()

    for number in range(o.rounds):
        for backend in BACKENDS:
            found, state = watch.run(lambda backend=backend: run(backend))
            watch.add(state, number, {(what, backend): seconds * 1e3 for what, seconds in found.items()})
            measurements = measurements or list(found)
    print(f"torch {torch.__version__}, {o.ranks} ranks, {o.rounds} rounds, median (lowest to highest)")
    print(f"cores: {watch.summary()}")
    for state in watch.states():
        print(cores.STATES[state])
        for what in measurements:
            times = {b: watch.of(state, (what, b)) for b in BACKENDS}
            texts = [f"{b} {statistics.median(t):.3f} ms ({min(t):.3f} to {max(t):.3f})" for b, t in times.items() if t]
            ratios = [watch.ratio_text(state, (what, b), (what, "gloo")) for b in BACKENDS[:2]]
            print(f"{what}: {', '.join(texts)}, ratios {' and '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
