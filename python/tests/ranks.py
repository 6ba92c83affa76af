"""Helpers for the tests of gohvd.torch. Each file of tests runs at 1, 2 and 3 ranks: hvdrun -np N python3 -m
unittest FILE.

All ranks run the same tests in the same order. Each rank checks its own results.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import unittest
from collections.abc import Sequence

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "horovod_shim"))

import torch

import gohvd.torch as hvd

INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (0,), (17,), (3, 4), (2, 3, 5), (1000,)]

# The option with which torch's optimizers use kernels that do not look at the strides of tensors, if the CPU has these.
FUSED = {"fused": True} if tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 4) else {}

# The time limit of a test in seconds. If a test takes longer, for example because a rank has failed, it ends and prints
# where each thread waits.
_LIMIT_SECONDS = 300


class RanksTest(unittest.TestCase):
    """A test case. All ranks of the job run it together."""

    @classmethod
    def setUpClass(cls) -> None:
        torch.set_num_threads(1)
        hvd.init()
        cls.rank, cls.size = hvd.rank(), hvd.size()

    def setUp(self) -> None:
        faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)
        torch.manual_seed(1)

    def equal(self, got: torch.Tensor, want: torch.Tensor, message: str = "") -> None:
        """Asserts that two tensors have the same type, shape and elements."""
        self.assertEqual(got.dtype, want.dtype, message)
        self.assertEqual(tuple(got.shape), tuple(want.shape), message)
        self.assertTrue(torch.equal(got, want), f"{message} got {got}, want {want}")

    def close(self, got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-10) -> None:
        """Asserts that the difference of two tensors is at most tolerance, both relatively and absolutely."""
        self.assertEqual(tuple(got.shape), tuple(want.shape))
        self.assertTrue(torch.allclose(got, want, rtol=tolerance, atol=tolerance), f"got {got}, want {want}")


def sample(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of small integers that differ between ranks. Sums and products of the tensors of three ranks are
    exact in every type.
    """
    count = 1
    for n in shape:
        count *= n
    return (torch.arange(count) % 3 + rank + 1).reshape(tuple(shape)).to(dtype)


def samples(size: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [sample(r, shape, dtype) for r in range(size)]


def adasum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the Adasum of the tensors, by the definition in docs/operations.md."""
    parts = list(tensors)
    p = 1
    while p * 2 <= len(parts):
        p *= 2
    for i in range(len(parts) - p):
        parts[i] = _pair(parts[i], parts[p + i])
    parts = parts[:p]
    while len(parts) > 1:
        parts = [_pair(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x, y = a.double(), b.double()
    dot, xx, yy = (x * y).sum(), (x * x).sum(), (y * y).sum()
    return ((1 - dot / (2 * xx)) * x + (1 - dot / (2 * yy)) * y).to(a.dtype)
