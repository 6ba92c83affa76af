#!/usr/bin/env python3
"""Trains a logistic regression with a million features through a parameter server, as examples/sparse_logreg in Go.

    hvdrun --servers 2 --workers 4 python3 examples/sparse_logreg.py

The labels are the probabilities of a model with known weights, so the least possible objective is their mean entropy.
"""

import argparse
import sys
import time

import numpy as np
from gohvd import ps

FEATURES, NONZEROS, BATCH = 1_000_000, 30, 1000


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def entropy(y, p):
    return -(y * np.log(p) + (1 - y) * np.log1p(-p)).sum()


def generate(rng):
    """Makes a batch: its keys, the features of its examples as indices of the keys, and its labels."""
    features = (FEATURES * rng.random((BATCH, NONZEROS)) ** 3).astype(np.uint64) * np.uint64(40503) % np.uint64(FEATURES)
    used, examples = np.unique(features, return_inverse=True)
    truth, examples = np.sin(used * 12.9898) * 2.8 / np.sqrt(NONZEROS), examples.reshape(BATCH, NONZEROS)
    return used * np.uint64(ps.MAX_KEY // FEATURES), examples, sigmoid(truth[examples].sum(1))


def train(node, batches, epochs):
    weights, totals, began = node.worker(0, "float32"), node.worker(1, "float64"), time.time()
    for keys, _, _ in batches:  # a pull of a key that nobody has pushed is an error
        weights.push(keys, np.zeros(len(keys), np.float32)).wait()
    node.clock()
    for keys, examples, labels in batches * epochs:
        slopes = sigmoid(weights.pull(keys).wait()[examples].sum(1)) - labels
        gradient = np.bincount(examples.ravel(), np.repeat(slopes / BATCH, NONZEROS), len(keys))
        weights.push(keys, gradient.astype(np.float32)).wait()
        node.clock()
    node.barrier()
    seconds, sums = time.time() - began, np.zeros(3)
    for keys, examples, y in batches:
        sums += entropy(y, sigmoid(weights.pull(keys).wait()[examples].sum(1))), entropy(y, y), 2 * epochs * len(keys)
    totals.push([0, 1, 2], sums).wait()
    node.clock()
    node.barrier()
    objective, optimum, keys = totals.pull([0, 1, 2]).wait()
    print(f"sparse_logreg: excess_percent={100 * (objective / optimum - 1):.3f} keys_per_second={keys / seconds:.0f}")
    if objective > 1.01 * optimum:
        sys.exit("sparse_logreg: the objective is more than 1% above the optimum")


parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=10, help="number of batches of each worker")
parser.add_argument("--epochs", type=int, default=30, help="number of passes of each worker over its batches")
args = parser.parse_args()
with ps.start() as node:
    if node.role == "server":
        node.serve(0, "float32", "adagrad", 0.3, 1e-8)
        node.serve(1, "float64", "sum")
    elif node.role == "worker":
        train(node, [generate(np.random.default_rng([node.rank, i])) for i in range(args.batches)], args.epochs)
