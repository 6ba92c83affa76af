"""Tests the functions that send parameters, optimizer state and objects to other ranks."""

from __future__ import annotations

import collections
import importlib
import os
import sys
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from ranks import FUSED, RanksTest, hvd

OPTIMIZERS = {
    "SGD": dict(lr=0.1),
    "SGD momentum": dict(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": dict(lr=0.1, amsgrad=True),
    "AdamW": dict(lr=0.1, betas=(0.8, 0.9)),
    "Adagrad": dict(lr=0.1),
    "Adadelta": dict(lr=0.1),
    "Adamax": dict(lr=0.1),
    "ASGD": dict(lr=0.1),
    "RMSprop": dict(lr=0.1, centered=True),
    "Rprop": dict(lr=0.1),
    "RAdam": dict(lr=0.1),
    "NAdam": dict(lr=0.1),
}


def make(name: str, model: torch.nn.Module, **more: float) -> torch.optim.Optimizer:
    return getattr(torch.optim, name.split()[0])(model.parameters(), **{**OPTIMIZERS[name], **more})


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    for i in range(n):
        optimizer.zero_grad()
        model(torch.ones(2, 3) * (i + 1)).pow(2).sum().backward()
        optimizer.step()


def flat(tree, out=None) -> list:
    """Returns the leaves of an optimizer's state dictionary. Each leaf comes with the keys that lead to it."""
    out = [] if out is None else out
    for key, value in tree.items():
        if isinstance(value, dict):
            out.append((key, "{"))
            flat(value, out)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for v in value:
                flat(v, out)
        else:
            out.append((key, value))
    return out


class Parameters(RanksTest):
    def test_state_dict(self) -> None:
        torch.manual_seed(self.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1, bias=False))
        model[1].num_batches_tracked.fill_(self.rank + 5)
        torch.manual_seed(self.size - 1)
        want = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1, bias=False))
        want[1].num_batches_tracked.fill_(self.size + 4)
        hvd.broadcast_parameters(model.state_dict(), root_rank=self.size - 1)
        for (name, got), value in zip(model.state_dict().items(), want.state_dict().values()):
            self.equal(got, value, name)

    def test_other_forms(self) -> None:
        for form in ("named", "bare", "iterator", "ordered"):
            p = torch.nn.Parameter(torch.full((2, 2), float(self.rank)))
            q = torch.full((3,), self.rank)
            hvd.broadcast_parameters(
                {
                    "named": [("p", p), ("q", q)],
                    "bare": [p, q, None],
                    "iterator": iter([("p", p), ("q", q)]),
                    "ordered": collections.OrderedDict(q=q, p=p, none=None),
                }[form],
                root_rank=0,
            )
            self.equal(p.detach(), torch.zeros(2, 2))
            self.equal(q, torch.zeros(3, dtype=torch.int64))
            self.assertTrue(p.requires_grad)

    def test_types_that_are_only_moved(self) -> None:
        types = ["complex64", "complex128", "float8_e5m2", "uint16"]
        for dtype in [getattr(torch, name) for name in types if hasattr(torch, name)]:
            tensor = torch.arange(3).add(self.rank).to(torch.float32).to(dtype)
            hvd.broadcast_parameters({"x": tensor}, 0)
            self.equal(tensor.to(torch.complex64), torch.arange(3).to(torch.complex64))
        p = torch.nn.Parameter(torch.full((2,), complex(1, self.rank + 1)))
        optimizer = torch.optim.Adam([p], lr=0.1)
        p.abs().sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        moments = torch.view_as_real(optimizer.state[p]["exp_avg"])
        self.equal(hvd.allgather(moments.unsqueeze(0)), moments.expand(self.size, 2, 2))

    def test_not_contiguous(self) -> None:
        x = torch.full((2, 3, 4, 4), float(self.rank)).contiguous(memory_format=torch.channels_last)
        y = torch.full((4, 2), float(self.rank)).t()
        hvd.broadcast_parameters([("x", x), ("y", y)], root_rank=0)
        self.assertEqual((x.sum(), y.sum()), (0, 0))
        self.assertTrue(x.is_contiguous(memory_format=torch.channels_last))

    def test_again_after_a_failure(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        wrong = {name: torch.zeros(2 + self.rank % 2 * (name == "b")) for name in "abc"}
        with self.assertRaises(hvd.HorovodInternalError):
            hvd.broadcast_parameters(wrong, 0)
        hvd.barrier()
        right = {name: torch.full((2,), float(self.rank)) for name in "abc"}
        hvd.broadcast_parameters(right, self.size - 1)
        for x in right.values():
            self.equal(x, torch.full((2,), self.size - 1.0))

    def test_wrong_arguments(self) -> None:
        for wrong in (1, "weights", torch.ones(2), {"a": 1}, [("a", "b")]):
            with self.assertRaises(ValueError, msg=str(wrong)):
                hvd.broadcast_parameters(wrong, root_rank=0)


class OptimizerState(RanksTest):
    def test_every_optimizer(self) -> None:
        for name in OPTIMIZERS:
            for root in {0, self.size - 1}:
                for distributed in (False, True):
                    # The variable want is the state of the root after two steps.
                    torch.manual_seed(0)
                    model = torch.nn.Linear(3, 2)
                    want = make(name, model)
                    steps(model, want, 2)
                    torch.manual_seed(0)
                    mine = torch.nn.Linear(3, 2)
                    optimizer = make(name, mine) if self.rank == root else make(name, mine, lr=0.5)
                    # The other ranks have no state, or a different state.
                    if self.rank == root:
                        steps(mine, optimizer, 2)
                    elif self.rank == 1:
                        steps(mine, optimizer, 1)
                    if distributed:
                        optimizer = hvd.DistributedOptimizer(optimizer, mine.named_parameters())
                    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
                    got = optimizer.state_dict()
                    self.assertEqual(len(got["state"]), len(want.state_dict()["state"]), name)
                    for (k, g), (wk, w) in zip(flat(got), flat(want.state_dict())):
                        self.assertEqual((k, type(g)), (wk, type(w)), name)
                        if isinstance(g, torch.Tensor):
                            self.equal(g, w, f"{name} {k}")
                        else:
                            self.assertEqual(g, w, f"{name} {k}")
                    hvd.broadcast_parameters(mine.state_dict(), root)
                    steps(mine, optimizer, 1)
                    steps(model, want, 1)
                    self.close(mine.weight.detach(), model.weight.detach(), 1e-5)

    def test_strides_and_types(self) -> None:
        """The state has the types of the root and the strides of the weights, on which fused optimizers rely, also if the
        root has read it from a checkpoint without these strides.
        """
        for name, dtype, more, read in (
            ("AdamW", torch.float32, FUSED, False), ("AdamW", torch.float32, FUSED, True), ("NAdam", torch.bfloat16, {}, False),
        ):  # fmt: skip
            torch.manual_seed(0)
            model = torch.nn.Conv2d(3, 4, 2).to(dtype, memory_format=torch.channels_last)
            optimizer = make(name, model, **more)

            def step() -> None:
                optimizer.zero_grad()
                model(torch.arange(27.0).reshape(1, 3, 3, 3).to(dtype)).pow(2).mean().backward()
                optimizer.step()

            for _ in range(2 if self.rank == 0 else 0):
                step()
            for state in optimizer.state.values() if read else ():
                state.update({k: v.contiguous() for k, v in state.items()})
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            hvd.broadcast_parameters(model.state_dict(), 0)
            every = hvd.allgather_object([
                {k: (v.dtype, v.stride(), v.tolist()) for k, v in optimizer.state[p].items()} for p in model.parameters()
            ])  # fmt: skip
            self.assertEqual(every, every[:1] * self.size)
            step()
            self.equal(model.weight.detach(), hvd.broadcast(model.weight.detach().contiguous(), 0))

    def test_a_root_without_state(self) -> None:
        model = torch.nn.Linear(3, 2)
        before = model.weight.detach().clone()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.25 if self.rank == 0 else 0.5, weight_decay=0.1)
        if self.rank > 0:
            steps(model, optimizer, 1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.assertEqual(len(optimizer.state_dict()["state"]), 0)
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.25)
        if self.rank == 0:
            self.equal(model.weight.detach(), before)
            self.equal(model.weight.grad, torch.zeros(2, 3))

    def test_parameters_that_are_not_trained(self) -> None:
        a = torch.nn.Parameter(torch.tensor([1, 3]), requires_grad=False)
        b = torch.nn.Parameter(torch.rand(4))
        optimizer = torch.optim.SGD([a, b], lr=0.001, weight_decay=1e-6, momentum=0.9, nesterov=True)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("a", a), ("b", b)])
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.assertIsNone(a.grad)
        self.equal(b.grad, hvd.broadcast(b.grad, root_rank=0))

    def test_sparse_gradients_stay_out(self) -> None:
        model = torch.nn.Embedding(5, 2, sparse=True)
        hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), 0, model)
        self.assertIsNone(model.weight.grad)
        hvd.broadcast_optimizer_state(torch.optim.SparseAdam(list(model.parameters())), 0)
        self.assertIsNone(model.weight.grad)

    def test_several_groups(self) -> None:
        a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        groups = [{"params": a.parameters(), "lr": 0.1 + self.rank}, {"params": b.parameters(), "lr": 0.2 + self.rank}]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
        held = list(optimizer.param_groups)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        # Code that holds a reference to a parameter group finds the new values in this group.
        self.assertEqual([g["lr"] for g in held], [0.1, 0.2])
        self.assertEqual([g["lr"] for g in optimizer.param_groups], [0.1, 0.2])

    def test_lbfgs(self) -> None:
        with self.assertRaises(ValueError):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS(torch.nn.Linear(1, 1).parameters()), 0)


class Objects(RanksTest):
    def test_broadcast(self) -> None:
        want = {"hello": 123, 0: [1, 2], "b": b"x" * 100_000, None: (self.size, {3})}
        for root in range(self.size):
            for other in (None, {}, "another"):
                got = hvd.broadcast_object(want if self.rank == root else other, root_rank=root)
                self.assertEqual(got, want)
                self.assertEqual(got is want, self.rank == root)
        self.assertIs(hvd.broadcast_object(None, 0, name="nothing"), None)

    def test_allgather(self) -> None:
        got = hvd.allgather_object({"rank": self.rank, "more": "x" * (self.rank * 1000)})
        self.assertEqual(got, [{"rank": r, "more": "x" * (r * 1000)} for r in range(self.size)])
        # ctypes.string_at takes a size of at most 2 GiB.
        with mock.patch("ctypes.string_at", side_effect=SystemError("too long")):
            self.assertEqual(hvd.allgather_object(self.rank, name="ranks"), list(range(self.size)))


class Distributed(unittest.TestCase):
    def test_torch_is_too_old(self) -> None:
        """The import of gohvd.torch.distributed says which version of torch it needs."""
        with mock.patch.dict(sys.modules), mock.patch.object(torch, "__version__", "2.0.1"):
            for name in [name for name in sys.modules if name.startswith("gohvd.torch.distributed")]:
                del sys.modules[name]
            with self.assertRaisesRegex(
                ImportError, "^gohvd.torch.distributed needs torch 2.1 or newer, but torch 2.0.1 is installed"
            ):
                importlib.import_module("gohvd.torch.distributed")


if __name__ == "__main__":
    unittest.main()
