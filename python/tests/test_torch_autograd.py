"""Tests the gradients of every collective against closed formulas. Rank r scales the gradient that it passes to
backward by r+1.
"""

from __future__ import annotations

import os
import sys
import unittest
import unittest.mock
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from ranks import RanksTest, hvd

from gohvd._engine import engine
from gohvd._library import ALLGATHER, ALLTOALL


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64, requires_grad=True)


class Autograd(RanksTest):
    def setUp(self) -> None:
        super().setUp()
        self.mine = float(self.rank + 1)
        self.total = self.size * (self.size + 1) / 2
        self.mean = self.total / self.size

    def back(self, output: torch.Tensor) -> torch.Tensor:
        """Runs backward. The gradients at rank r are 0, 1, 2 and so on, times r+1. Returns the gradients of rank 0."""
        self.assertTrue(output.requires_grad)
        ramp = torch.arange(output.numel(), dtype=torch.float64).reshape(output.shape)
        output.backward(ramp * self.mine)
        return ramp

    def test_allreduce(self) -> None:
        for op, factor in ((hvd.Sum, self.total), (hvd.Average, self.mean)):
            x = leaf(2, 3)
            ramp = self.back(hvd.allreduce(x, op=op))
            self.close(x.grad, ramp * factor)
        x = leaf(4)
        ramp = self.back(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0))
        self.close(x.grad, ramp * self.total * 2)

    def test_allreduce_through_more(self) -> None:
        x = leaf(3)
        y = hvd.allreduce(x * 2.0, op=hvd.Sum) ** 2
        y.sum().backward()
        # y = (2n)². The loss of each rank has the derivative 2 · 2n · 2, and there are n losses.
        self.close(x.grad, torch.full((3,), 8.0 * self.size * self.size, dtype=torch.float64))

    def test_grouped_allreduce(self) -> None:
        xs = [leaf(2), leaf(3, 2)]
        outputs = hvd.grouped_allreduce(xs, op=hvd.Average)
        ramps = [torch.arange(y.numel(), dtype=torch.float64).reshape(y.shape) for y in outputs]
        torch.autograd.backward(list(outputs), [ramp * self.mine for ramp in ramps])
        for x, ramp in zip(xs, ramps):
            self.close(x.grad, ramp * self.mean)

    def test_allgather(self) -> None:
        x = leaf(self.rank + 1, 2)
        ramp = self.back(hvd.allgather(x))
        before = self.rank * (self.rank + 1) // 2
        self.close(x.grad, ramp[before : before + self.rank + 1] * self.mean)

    def test_grouped_allreduce_of_several_types(self) -> None:
        wide, narrow = torch.ones(2, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
        counts = torch.ones(1, dtype=torch.int64)
        outputs = hvd.grouped_allreduce([wide, counts, narrow], op=hvd.Sum)
        self.equal(outputs[1], torch.tensor([self.size]))
        self.assertFalse(outputs[1].requires_grad)
        (outputs[0].sum().double() * (self.rank + 1) + 2 * outputs[2].sum()).backward()
        self.equal(wide.grad, torch.full((2,), float(sum(range(self.size + 1)))))
        self.equal(narrow.grad, torch.full((3,), 2.0 * self.size, dtype=torch.float64))

    def test_grouped_allgather(self) -> None:
        xs = [leaf(self.rank + 1), leaf(2, 2), torch.tensor([self.rank > 0]), torch.tensor([self.rank])]
        outputs = hvd.grouped_allgather(xs)
        self.equal(outputs[2], torch.arange(self.size) > 0)
        self.equal(outputs[3], torch.arange(self.size))
        outputs = outputs[:2]  # the others are not floating-point, so they have no gradients
        ramps = [torch.arange(y.numel(), dtype=torch.float64).reshape(y.shape) for y in outputs]
        torch.autograd.backward(list(outputs), [ramp * self.mine for ramp in ramps])
        before = self.rank * (self.rank + 1) // 2
        self.close(xs[0].grad, ramps[0][before : before + self.rank + 1] * self.mean)
        self.close(xs[1].grad, ramps[1][2 * self.rank : 2 * self.rank + 2] * self.mean)

    def test_broadcast(self) -> None:
        for root in range(self.size):
            x = leaf(3)
            ramp = self.back(hvd.broadcast(x, root))
            self.close(x.grad, ramp * self.mean if self.rank == root else torch.zeros(3, dtype=torch.float64))

    def test_alltoall(self) -> None:
        # Rank r sends i+1 rows to rank i. So it receives r+1 rows from each rank.
        splits = torch.tensor([i + 1 for i in range(self.size)], dtype=torch.int32)
        x = leaf(int(splits.sum()), 2)
        output, _ = hvd.alltoall(x, splits=splits)
        ramp = torch.arange(output.numel(), dtype=torch.float64).reshape(output.shape)
        output.backward(ramp * self.mine)
        want = []
        for i in range(self.size):
            rows = torch.arange(2 * (i + 1) * self.size, dtype=torch.float64).reshape(-1, 2) * (i + 1)
            want.append(rows[(i + 1) * self.rank : (i + 1) * (self.rank + 1)])
        self.close(x.grad, torch.cat(want))
        x = leaf(self.size)
        hvd.alltoall(x).sum().backward()
        self.close(x.grad, torch.ones(self.size, dtype=torch.float64))

    def test_reducescatter(self) -> None:
        for op, factor in ((hvd.Sum, float(self.size)), (hvd.Average, 1.0)):
            for scale in (1.0, 3.0):
                x = leaf(self.size + 1, 2)
                self.back(hvd.reducescatter(x, op=op, postscale_factor=scale))
                parts = torch.tensor_split(torch.zeros(self.size + 1, 2), self.size)
                want = [
                    torch.arange(part.numel(), dtype=torch.float64).reshape(part.shape) * (r + 1) * factor * scale
                    for r, part in enumerate(parts)
                ]
                self.close(x.grad, torch.cat(want))

    def test_grouped_reducescatter(self) -> None:
        xs = [leaf(self.size), leaf(2 * self.size, 2)]
        outputs = hvd.grouped_reducescatter(xs, op=hvd.Sum)
        torch.autograd.backward(list(outputs), [torch.full_like(y, self.mine) for y in outputs])
        want = torch.arange(1, self.size + 1, dtype=torch.float64) * self.size
        self.close(xs[0].grad, want)
        self.close(xs[1].grad, want.repeat_interleave(2).reshape(-1, 1).expand(-1, 2))

    def test_second_derivatives(self) -> None:
        """The gradients of each operation have gradients at every rank, as for a gradient penalty."""
        n = float(self.size)
        for op, want in (
            (lambda x: hvd.allreduce(x, op=hvd.Sum), 2 * n * n),
            (lambda x: hvd.grouped_allreduce([x], op=hvd.Average)[0], 2.0),
            (lambda x: hvd.allgather(x), 2 / n),
            (lambda x: hvd.grouped_allgather([x])[0], 2 / n),
            (lambda x: hvd.broadcast(x, 0), 2 / n if self.rank == 0 else 0.0),
            (lambda x: hvd.alltoall(x), 2.0),
            (lambda x: hvd.reducescatter(x, op=hvd.Sum), 2 * n * n),
            (lambda x: hvd.grouped_reducescatter([x], op=hvd.Average)[0], 2.0),
        ):
            x = leaf(self.size, 2)
            (g,) = torch.autograd.grad((op(x) ** 2).sum(), x, create_graph=True)
            (h,) = torch.autograd.grad(g.sum(), x)
            self.close(h, torch.full_like(x, want))

    def test_known_shapes(self) -> None:
        """The engine gets the shapes of gradients, because it needs them to run the operations on CUDA devices."""
        n, given = self.size, []
        plain = engine._prepare

        def call(*args: Any) -> Any:
            given.append((args[1].kind, args[-1]))
            return plain(*args)

        with unittest.mock.patch.object(engine, "_prepare", call):
            x = leaf(2 * n + 1, 3)
            hvd.reducescatter(x, op=hvd.Sum).sum().backward()
            self.assertEqual(given[-1], (ALLGATHER, ((2 * n + 1, 3),)))
            x = leaf(n + 2, 3)
            torch.stack([y.sum() for y in hvd.grouped_reducescatter([x, leaf(n)])]).sum().backward()
            self.assertEqual(given[-1], (ALLGATHER, ((n + 2, 3), (n,))))
            x = leaf(2 * n + 1, 2)
            hvd.alltoall(x, [2] * n)[0].sum().backward()
            self.assertEqual(given[-1], (ALLTOALL, ((2 * n, 2),)))
            self.assertEqual(x.grad[-1].tolist(), [0, 0])
            hvd.SyncBatchNorm(4)(torch.ones(3, 4))
            if n > 1:
                self.assertEqual(given[-1], (ALLGATHER, ((n, 9),)))

    def test_what_needs_no_gradient(self) -> None:
        x = torch.ones(2 * self.size)
        for got in (hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0), hvd.alltoall(x), hvd.reducescatter(x)):
            self.assertFalse(got.requires_grad)


if __name__ == "__main__":
    unittest.main()
