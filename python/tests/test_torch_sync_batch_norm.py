"""Tests SyncBatchNorm. The reference is torch's BatchNorm on the concatenated batches of all ranks."""

from __future__ import annotations

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from ranks import RanksTest, hvd

KINDS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}


class SyncBatchNorm(RanksTest):
    def compare(self, rows, tail, channels_last=False, dtype=torch.float64, tolerance=1e-10, **options) -> None:
        """Trains both layers on two batches, evaluates them on one batch, and compares the results. rows(r) is the
        number of rows of rank r.
        """
        ours = hvd.SyncBatchNorm(4, **options).to(dtype)
        torchs = KINDS[2 + len(tail)](4, **options).to(dtype)
        if ours.affine:
            weight, bias = torch.rand(4, dtype=dtype), torch.rand(4, dtype=dtype)
            for layer in (ours, torchs):
                layer.weight.data.copy_(weight)
                layer.bias.data.copy_(bias)
        for turn in range(2):
            # The mean is large, so that a formula that subtracts large sums would have a visible error.
            parts = [torch.randn(rows(r), 4, *tail).to(dtype) * (r + 1) + 100 for r in range(self.size)]
            weights = [torch.randn(rows(r), 4, *tail).to(dtype) for r in range(self.size)]
            mine = parts[self.rank].clone()
            if channels_last:
                mine = mine.contiguous(memory_format=torch.channels_last)
            mine.requires_grad_(True)
            whole = torch.cat(parts).requires_grad_(True)
            ours.zero_grad()
            torchs.zero_grad()
            got, want = ours(mine), torchs(whole)
            self.assertEqual(got.dtype, dtype)
            begin = sum(rows(r) for r in range(self.rank))
            end = begin + rows(self.rank)
            self.close(got.detach(), want[begin:end].detach(), tolerance)
            (got * weights[self.rank]).sum().backward()
            (want * torch.cat(weights)).sum().backward()
            self.close(mine.grad, whole.grad[begin:end], tolerance)
            if ours.affine:
                # The gradients are for this rank's batch. Their sum over all ranks is the gradient for the concatenated
                # batches.
                self.close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), torchs.weight.grad, tolerance * 10)
                self.close(hvd.allreduce(ours.bias.grad, op=hvd.Sum), torchs.bias.grad, tolerance * 10)
            if ours.track_running_stats:
                self.close(ours.running_mean, torchs.running_mean, tolerance * 100)
                self.close(ours.running_var, torchs.running_var, tolerance * 100)
                self.assertEqual(int(ours.num_batches_tracked), turn + 1)
        ours.eval()
        torchs.eval()
        if ours.track_running_stats:
            x = torch.randn(3, 4, *tail).to(dtype)
            self.close(ours(x).detach(), torchs(x).detach(), tolerance * 100)

    def test_shapes(self) -> None:
        for tail in ((), (3,), (3, 2), (2, 2, 2)):
            self.compare(lambda r: 4, tail)

    def test_uneven_batches(self) -> None:
        self.compare(lambda r: r + 2, (3, 2))
        self.compare(lambda r: 0 if r == 1 else 3, (2,))

    def test_options(self) -> None:
        self.compare(lambda r: 4, (3,), affine=False)
        self.compare(lambda r: 4, (3,), momentum=None)
        self.compare(lambda r: 4, (3,), momentum=0.5, eps=0.1)
        self.compare(lambda r: 4, (3,), track_running_stats=False)

    def test_types_and_layouts(self) -> None:
        self.compare(lambda r: 4, (5, 3), channels_last=True)
        self.compare(lambda r: 4, (5,), dtype=torch.float32, tolerance=2e-3)

    def test_halves_are_summed_wide(self) -> None:
        # In bfloat16, the sum of 4096 values of 10 and 12 is not exact. The count of the values is not exact either,
        # because the next number after 4080 is 4096.
        x = torch.full((4096, 1), 10.0, dtype=torch.bfloat16)
        x[::2] = 12.0
        x[0] = 100.0
        layer = hvd.SyncBatchNorm(1, eps=0.0).to(torch.bfloat16)
        got = layer(x)
        self.assertEqual(got.dtype, torch.bfloat16)
        wide = x.double()
        want = (wide - wide.mean()) / wide.var(unbiased=False).sqrt()
        self.close(got[:3].detach().double(), want[:3], 5e-3)
        self.close(layer.running_var.double(), 0.9 + 0.1 * wide.var().reshape(1), 5e-3)

    def test_evaluation_is_alone(self) -> None:
        layer = hvd.SyncBatchNorm(2)
        layer.eval()
        if self.rank == 0:
            self.close(layer(torch.ones(1, 2)).detach(), torch.ones(1, 2), 1e-4)
        hvd.barrier()

    def test_in_place_after_it(self) -> None:
        for affine in (True, False):
            x = torch.randn(4, 2, requires_grad=True)
            hvd.SyncBatchNorm(2, affine=affine)(x).relu_().sum().backward()
            self.assertEqual(x.grad.shape, x.shape)

    def test_no_second_derivative(self) -> None:
        for loss in (lambda y: y.pow(3).sum(), lambda y: (y * torch.arange(8.0).view(4, 2)).sum()):
            x = torch.randn(4, 2, requires_grad=True)
            (g,) = torch.autograd.grad(loss(hvd.SyncBatchNorm(2)(x)), x, create_graph=True)
            with self.assertRaisesRegex(RuntimeError, "SyncBatchNorm has no second derivatives"):
                (g.sum() + x.sum()).backward()

    def test_what_cannot_be_normalized(self) -> None:
        with self.assertRaises(ValueError):
            hvd.SyncBatchNorm(2)(torch.ones(2))
        with self.assertRaises(ValueError):
            hvd.SyncBatchNorm(2)(torch.ones(1 if self.rank == 0 else 0, 2))


if __name__ == "__main__":
    unittest.main()
