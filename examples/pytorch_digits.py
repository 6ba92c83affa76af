#!/usr/bin/env python3
"""Trains a network with one hidden layer on handwritten digits, data-parallel, as examples/digits does in Go.

    hvdrun -np 4 python3 examples/pytorch_digits.py

Every rank computes the gradient of its share of each batch. DistributedOptimizer sums the gradients of all ranks while
backward still computes further gradients. At the end every rank prints its result. The hash of the weights is the same
at all ranks.
"""

import argparse
import csv
import gzip
import hashlib
import pathlib
import struct
import sys
import time

import torch
from torch import nn
from torch.nn import functional

HERE = pathlib.Path(__file__).resolve().parent
try:
    import gohvd.torch as hvd
except ModuleNotFoundError as error:
    if error.name != "gohvd":
        raise
    sys.path.insert(0, str(HERE.parent / "python"))
    import gohvd.torch as hvd


def load_images(seed):
    """Returns pixels (n, 64) in 0..1 and digits (n,) of four fifths of the images, for training, and of the rest, for
    testing."""
    with gzip.open(HERE / "optdigits" / "optdigits.csv.gz", "rt") as f:
        rows = torch.tensor([[int(field) for field in row] for row in csv.reader(f)])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    n = len(rows) * 4 // 5
    pixels, digits = rows[:, :64] / 16.0, rows[:, 64]
    return pixels[:n], digits[:n], pixels[n:], digits[n:]


def train(epochs, batch, rate, seed):
    """Trains a model and returns it, with the share of the test images that it recognises."""
    pixels, digits, test_pixels, test_digits = load_images(seed)
    # Each rank draws different weights. Then all ranks take the weights of rank 0, as in a program that starts from a
    # checkpoint that only one rank can read.
    torch.manual_seed(seed + hvd.rank())
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)

    shuffle = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        began = time.monotonic()
        loss_sum = torch.zeros(1, dtype=torch.float64)
        for images in torch.randperm(len(pixels), generator=shuffle).split(batch):
            mine = images[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            # The loss is divided by the size of the whole batch. The shares of the ranks may differ in size, and then
            # the mean of the ranks' means would not be the mean of the batch.
            loss = functional.cross_entropy(model(pixels[mine]), digits[mine], reduction="sum") / len(images)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(images)
        loss_sum = hvd.allreduce(loss_sum, name="loss", op=hvd.Sum)
        if hvd.rank() == 0:
            mean, seconds = loss_sum.item() / len(pixels), time.monotonic() - began
            print(f"epoch {epoch + 1}/{epochs}: loss={mean:.4f} seconds={seconds:.2f}", flush=True)

    with torch.no_grad():
        mine = slice(hvd.rank(), None, hvd.size())
        right = (model(test_pixels[mine]).argmax(1) == test_digits[mine]).sum()
    return model, hvd.allreduce(right, name="right", op=hvd.Sum).item() / len(test_pixels)


def weights_sha256(model):
    """Returns the SHA-256 of the bits of all weights, as hexadecimal digits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().flatten().tolist()
        digest.update(struct.pack(f"<{len(values)}f", *values))
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=64, help="number of images in a step, over all ranks")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=1, help="seed of the split, the weights and the order of the images")
    o = parser.parse_args()
    if o.epochs < 0 or o.batch < 1:
        parser.error("want --epochs of at least 0, and --batch of at least 1")

    hvd.init()
    # The ranks of a host share its cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    began = time.monotonic()
    model, accuracy = train(o.epochs, o.batch, o.rate, o.seed)
    print(
        f"digits: ranks={hvd.size()} epochs={o.epochs} test_accuracy={accuracy:.4f} "
        f"seconds={time.monotonic() - began:.2f} weights_sha256={weights_sha256(model)}",
        flush=True,
    )
    hvd.shutdown()


if __name__ == "__main__":
    main()
