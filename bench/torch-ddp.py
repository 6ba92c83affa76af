#!/usr/bin/env python3
"""Compares the backend gohvd of torch.distributed with gloo: steps of DistributedDataParallel with the shapes of
ResNet-50, steps of FSDP2 with a GPT-2 of four layers, and blocking all_reduce of several sizes. It starts the ranks
itself, with each backend in turn.

    make libgohvd && PYTHONPATH=python bench/torch-ddp.py [--rounds 5] [--ranks 2]

In "-views" the gradients are views of the buckets (gradient_as_bucket_view), and in "gohvd-arena" the buckets and the
tensors are in an arena too. For each backend and measurement it prints the median of the rounds and the lowest and
highest one, and then the ratios to gloo in the same round, to "gloo-views" for the backends with views. It does so for
each state of the cores, and compares only runs of the same state (cores.py). In a DDP step each rank computes one
gradient for each parameter, without the layers of the network, so that the step shows the time of the communication.
An FSDP2 step computes the whole model, on a batch of one sequence of 64 tokens. Each step is also measured without
communication: no backend can make it faster than that.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import cores

# Each backend, and the one to which it is compared.
BACKENDS = {"gohvd": "gloo", "gohvd-views": "gloo-views", "gohvd-arena": "gloo-views", "gloo": "gloo", "gloo-views": "gloo"}
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


class Block(torch.nn.Module):
    """A layer of GPT-2 small."""

    def __init__(self, width=768, heads=12):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.proj = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.fc, self.fc_proj = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc_proj(F.gelu(self.fc(self.ln_2(x))))


class GPT2(torch.nn.Module):
    """GPT-2 small with fewer layers."""

    def __init__(self, layers=4, width=768, words=50257, length=1024):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(words, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.ln_f(x) @ self.wte.weight.T).view(-1, self.wte.num_embeddings), tokens.view(-1))


def fsdp(found, steps):
    """Measures steps of FSDP2, if this version of torch has it, and the same model on one rank without FSDP2."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return
    tokens = torch.randint(50257, (1, 64))
    alone, model = GPT2(), GPT2()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for what, m in (("FSDP2 step of GPT-2 with 4 layers", model), ("the same on one rank", alone)):
        timed(lambda: m(tokens).backward(), 2)
        found[what] = timed(lambda: m(tokens).backward(), max(2, steps // 3))


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
    name, _, how = backend.partition("-")
    DistributedDataParallel, zeros = torch.nn.parallel.DistributedDataParallel, torch.zeros
    if name == "gohvd":
        import gohvd.torch.distributed
    if how == "arena":
        DistributedDataParallel, zeros = gohvd.torch.distributed.DistributedDataParallel, gohvd.torch.alloc_tensor
    dist.init_process_group(name, init_method=f"file://{file}", rank=r, world_size=ranks)
    options = {"gradient_as_bucket_view": True} if how == "views" else {}
    model = DistributedDataParallel(Model(), **options)
    alone = DistributedDataParallel(Model(), **options)
    alone.register_comm_hook(None, no_communication)
    x = torch.ones(())
    found = {}
    for what, m in (("DDP step of ResNet-50", model), ("the same without communication", alone)):
        timed(lambda: m(x).backward(), 3)
        found[what] = timed(lambda: m(x).backward(), steps)
    if not how:
        fsdp(found, steps)
    for size in SIZES if how != "views" else ():
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
            ratios = [f"{b}/{BACKENDS[b]} {watch.ratio_text(state, (what, b), (what, BACKENDS[b]))}" for b in BACKENDS
                      if b != BACKENDS[b] and times[b] and times[BACKENDS[b]]]
            print(f"{what}: {', '.join(texts)}; ratios: {', '.join(ratios)}", flush=True)
        for step, alone in (("DDP step of ResNet-50", "the same without communication"),
                            ("FSDP2 step of GPT-2 with 4 layers", "the same on one rank")):
            ratios = [f"{b} {watch.ratio_text(state, (step, b), (alone, b))}" for b in BACKENDS if watch.of(state, (step, b))]
            print(f"{step}, ratio to {alone}: {', '.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
