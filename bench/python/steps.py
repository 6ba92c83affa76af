#!/usr/bin/env python3
"""Measures training steps and calls in Python: the gradients of ResNet-50 with DistributedOptimizer, and single
allreduces. It measures the same with torch.distributed over gloo.

    make libgohvd
    go build -o bin/ ./cmd/hvdrun
    PYTHONPATH=python bin/hvdrun -np 2 /usr/bin/python3 bench/python/steps.py [ROUNDS]

One run measures all cases in turn, ROUNDS times (default 7). For each case and state of the cores (bench/cores.py) it
prints the median, the minimum and the maximum over the rounds. A step lasts from the beginning of the backward pass
until the last gradient is reduced. The backward pass makes each gradient by filling a tensor, and "backward alone" is
the time that this takes. torch's DistributedDataParallel over gloo does the same with its default buckets of 25 MB.
"gloo, 25 MB buckets" has no backward pass: its gradients exist already. It packs them, reduces the buckets
asynchronously, divides by the number of ranks and unpacks the results.
"""

import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import gohvd.torch as hvd

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import cores

STEPS = 8
BUCKET_BYTES = 25 << 20
# Each line of this file has the name, the number of elements and the shape of a gradient. hvdbench --workload resnet50
# uses it too.
SHAPES = pathlib.Path(__file__).parent.parent.parent / "cmd" / "hvdbench" / "shapes" / "resnet50.txt"


def sizes():
    lines = (line.split() for line in SHAPES.read_text().splitlines() if line and not line.startswith("#"))
    return [int(fields[1]) for fields in lines]


def backward(params):
    """Runs the backward pass of a loss whose gradients are all 1. Returns the time at which the pass began."""
    loss = torch.stack([p.sum() for p in params]).sum()
    hvd.barrier()
    begun = time.perf_counter()
    loss.backward()
    return begun


class Ours:
    def __init__(self, numels, keep):
        self.keep = keep
        self.params = [torch.nn.Parameter(torch.zeros(n)) for n in numels]
        names = [(f"{'kept' if keep else 'new'}.{i}", p) for i, p in enumerate(self.params)]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.params, lr=0.0), named_parameters=names)

    def __call__(self):
        self.optimizer.zero_grad(set_to_none=not self.keep)
        begun = backward(self.params)
        self.optimizer.synchronize()
        return time.perf_counter() - begun


class Sums(torch.nn.Module):
    """A model whose output is the sum of all its parameters."""

    def __init__(self, numels):
        super().__init__()
        self.params = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(n)) for n in numels)

    def forward(self):
        return torch.stack([p.sum() for p in self.params]).sum()


class Parallel:
    def __init__(self, numels, keep):
        self.keep = keep
        self.model = torch.nn.parallel.DistributedDataParallel(Sums(numels))

    def __call__(self):
        self.model.zero_grad(set_to_none=not self.keep)
        loss = self.model()
        hvd.barrier()
        begun = time.perf_counter()
        loss.backward()  # returns when all gradients have been reduced
        return time.perf_counter() - begun


class Gloo:
    def __init__(self, numels):
        self.buckets, bucket, numbytes = [], [], 0
        for n in reversed(numels):
            bucket.append(torch.ones(n))
            numbytes += 4 * n
            if numbytes >= BUCKET_BYTES:
                self.buckets.append(bucket)
                bucket, numbytes = [], 0
        if bucket:
            self.buckets.append(bucket)

    def __call__(self):
        hvd.barrier()
        begun = time.perf_counter()
        works = []
        for bucket in self.buckets:
            flat = _flatten_dense_tensors(bucket)
            works.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        for work, flat, bucket in works:
            work.wait()
            flat.div_(hvd.size())
            for grad, part in zip(bucket, _unflatten_dense_tensors(flat, bucket)):
                grad.copy_(part)
        return time.perf_counter() - begun


class Alone:
    def __init__(self, numels):
        self.params = [torch.nn.Parameter(torch.zeros(n)) for n in numels]

    def __call__(self):
        for p in self.params:
            p.grad = None
        begun = backward(self.params)
        return time.perf_counter() - begun


def each(call, times):
    """Calls a function the given number of times and returns the median time of a call in seconds."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def many(tensors):
    """Reduces all tensors by asynchronous allreduces, and waits for the results."""
    for handle in [hvd.allreduce_async_(t, name=f"many.{i}") for i, t in enumerate(tensors)]:
        hvd.synchronize(handle)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    numels = sizes()
    tensors = [torch.ones(64) for _ in range(1000)]
    small, large = torch.ones(1), torch.ones(16 << 20)
    arena = hvd.alloc_tensor((16 << 20,), torch.float32)
    arena.fill_(1)
    steps = {
        "kept gradients": Ours(numels, keep=True),
        "set_to_none": Ours(numels, keep=False),
        "DDP, kept": Parallel(numels, keep=True),
        "DDP, set_to_none": Parallel(numels, keep=False),
        "gloo, 25 MB buckets": Gloo(numels),
        "backward alone": Alone(numels),
    }
    calls = {
        "4 B": (lambda: hvd.allreduce(small, name="small"), 500),
        "1000 of 256 B": (lambda: many(tensors), 10),
        "4 B, gloo": (lambda: dist.all_reduce(small), 200),
        "64 MiB in the arena": (lambda: hvd.allreduce_(arena, name="arena", op=hvd.Sum), 10),
        "64 MiB": (lambda: hvd.allreduce_(large, name="large", op=hvd.Sum), 10),
        "64 MiB, gloo": (lambda: dist.all_reduce(large), 5),
    }
    cases = {what: lambda step=step: statistics.median(step() for _ in range(STEPS)) for what, step in steps.items()}
    cases |= {what: lambda case=case: each(*case) for what, case in calls.items()}
    watch = cores.Watch(cores.measure if hvd.rank() == 0 else lambda: None)
    for n in range(rounds + 1):
        for what, case in cases.items():
            if n == 0:
                case()  # a warm-up
            else:
                seconds, state = watch.run(case)
                watch.add(state, n, {what: 1e3 * seconds})
            large.fill_(1)
            arena.fill_(1)
        if hvd.rank() == 0:
            print(f"round {n} of {rounds}", file=sys.stderr, flush=True)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, torch {torch.__version__}, {len(numels)} gradients of {4 * sum(numels) / 1e6:.0f} MB, {rounds} rounds")
        print(*watch.table(cases, "ms", 3), sep="\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
