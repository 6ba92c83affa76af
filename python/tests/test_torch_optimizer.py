"""Tests DistributedOptimizer. The reference trains in one process on the concatenated batches of all ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import unittest
import warnings
import weakref
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from ranks import FUSED, RanksTest, adasum, hvd
from torch.nn import functional

from gohvd import _engine
from gohvd.torch import optimizer as module

ROWS = 4  # the number of rows in a rank's batch
# Each entry has a convolution, the memory format of its weights, and the number of spatial dimensions of its input.
LAYOUTS = (
    (torch.nn.Conv2d, torch.channels_last, (4, 4)),
    (torch.nn.Conv3d, torch.channels_last_3d, (3, 3, 3)),
)


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), x[:, :2].sin())


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


class OptimizerTest(RanksTest):
    def whole(self, step: int) -> torch.Tensor:
        return torch.cat([batch(step, r) for r in range(self.size)])

    def reference(self, make, steps: int, passes: int = 1, factor: float = 1.0, model=None) -> torch.nn.Module:
        """Trains a model on the concatenated batches of all ranks and returns the model. Multiplies the gradients by
        factor.
        """
        model = network() if model is None else model
        optimizer = make(model.parameters())
        for step in range(steps):
            optimizer.zero_grad()
            for i in range(passes):
                (loss_of(model, self.whole(step * passes + i)) * factor).backward()
            optimizer.step()
        return model

    def distributed(self, make=sgd, **options) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Returns a new model and its DistributedOptimizer."""
        model = network()
        return model, hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)

    def steps(self, model, optimizer, steps: int, passes: int | None = None) -> None:
        """Makes steps. All backward passes of a step are on the same batch."""
        for step in range(steps):
            optimizer.zero_grad()
            for _ in range(passes or optimizer.backward_passes_per_step):
                loss_of(model, batch(step, self.rank)).backward()
            optimizer.step()

    def same_weights(self, got: torch.nn.Module, want: torch.nn.Module, tolerance: float = 1e-10) -> None:
        for (name, g), w in zip(got.named_parameters(), want.parameters()):
            self.close(g.detach(), w.detach(), tolerance)

    def same_at_all_ranks(self, model: torch.nn.Module) -> None:
        for p in model.parameters():
            every = hvd.allgather(p.detach().contiguous().unsqueeze(0))
            for other in every:
                self.equal(other, p.detach())


class Training(OptimizerTest):
    def train(self, make=sgd, steps: int = 3, **options) -> torch.nn.Module:
        model, optimizer = self.distributed(make, **options)
        passes = options.get("backward_passes_per_step", 1)
        for step in range(steps):
            optimizer.zero_grad()
            for i in range(passes):
                loss_of(model, batch(step * passes + i, self.rank)).backward()
            optimizer.step()
        self.same_at_all_ranks(model)
        return model

    def test_every_optimizer(self) -> None:
        for make in (
            sgd,
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda p: torch.optim.Adam(p, lr=0.01),
            lambda p: torch.optim.AdamW(p, lr=0.01),
            lambda p: torch.optim.Adagrad(p, lr=0.01),
            lambda p: torch.optim.RMSprop(p, lr=0.01),
            lambda p: torch.optim.Rprop(p, lr=0.01),
        ):
            self.same_weights(self.train(make), self.reference(make, 3))

    def test_options_that_change_no_value(self) -> None:
        want = self.reference(sgd, 3)
        for options in (
            dict(gradient_as_arena_view=False),
            dict(gradient_predivide_factor=2.0),
            dict(groups=1),
            dict(groups=2),
            dict(groups=3),
            dict(groups=100),
            dict(groups=0),
            dict(sparse_as_dense=True),
            dict(process_set=hvd.global_process_set),
            dict(groups=2, gradient_as_arena_view=False, gradient_predivide_factor=0.5),
        ):
            self.same_weights(self.train(**options), want)

    def test_without_names(self) -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
        names = set(optimizer._parameter_names.values())
        self.assertEqual({name.split("#")[0] for name in names}, {f"allreduce.noname.0.{i}" for i in range(4)})
        self.assertEqual(hvd.allgather_object(names), [names] * self.size)
        self.steps(model, optimizer, 3)
        self.same_weights(model, self.reference(sgd, 3))

    def test_sum(self) -> None:
        self.same_weights(self.train(op=hvd.Sum), self.reference(sgd, 3, factor=self.size))

    def test_compression(self) -> None:
        for compression, tolerance in ((hvd.Compression.fp16, 1e-2), (hvd.Compression.bf16, 5e-2)):
            for groups in (None, 2):
                got = self.train(compression=compression, groups=groups)
                self.same_weights(got, self.reference(sgd, 3), tolerance)
                for p in got.parameters():
                    self.assertEqual(p.grad.dtype, torch.float64)
                if self.size > 1:
                    # Each gradient is a value that 16 bits can represent, because it was sent in 16 bits.
                    p = got[0].weight.grad / (0.5 if self.size == 2 else 1.0)
                    wire = torch.float16 if compression is hvd.Compression.fp16 else torch.bfloat16
                    self.equal(p.to(wire).double(), p)

    def test_compressed_gradients_are_copied_once(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        model, optimizer = self.distributed(compression=hvd.Compression.bf16)
        places = None
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, batch(step, self.rank)).backward()
            optimizer.step()
            now = [optimizer._wires[p].data_ptr() for p in model.parameters()]
            self.assertIn(places, (None, now))
            places = now
        self.assertEqual(optimizer._memory, {})

    def test_a_compressor_of_the_program(self) -> None:
        class Halving(hvd.Compression.none):
            @staticmethod
            def compress(tensor):
                return tensor / 2, tensor.dtype

            @staticmethod
            def decompress(tensor, ctx):
                assert ctx == torch.float64
                return tensor * 2

        self.same_weights(self.train(compression=Halving), self.reference(sgd, 3))
        self.same_weights(self.train(compression=Halving, groups=2), self.reference(sgd, 3))

    def test_lists_of_groups(self) -> None:
        model = network()
        params = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(
            sgd(params), model.named_parameters(), groups=[[params[3], params[0]], [params[1]]]
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step, self.rank)).backward()
            # All reductions have begun. There is one for each of the two groups, and one for the parameter that is in
            # no group.
            self.assertEqual(len(optimizer._handles), 3 if self.size > 1 else 0)
            optimizer.step()
        self.same_weights(model, self.reference(sgd, 3))

    def test_several_types_in_a_group(self) -> None:
        a = torch.nn.Parameter(torch.ones(2))
        b = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], groups=1)
        for step in range(3):
            optimizer.zero_grad()
            (a.sum() * self.rank + (b * b).sum()).backward()
            optimizer.step()
            self.close(a.detach(), torch.ones(2) - (step + 1) * (self.size - 1) / 2, 1e-6)
            # Each step replaces b by b - 2b.
            self.close(b.detach(), torch.full((2,), -1.0 if step % 2 == 0 else 1.0, dtype=torch.float64))

    def test_groups_in_another_order_of_parameters(self) -> None:
        # Each rank lists the parameters in a different order. All ranks use the groups of rank 0.
        params = {name: torch.nn.Parameter(torch.ones(i + 1)) for i, name in enumerate("abcdef")}
        order = sorted(params)[self.rank :] + sorted(params)[: self.rank]
        optimizer = torch.optim.SGD([params[name] for name in order], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, [(name, params[name]) for name in order], groups=3)
        sum((p * (self.rank + 1)).sum() for p in params.values()).backward()
        optimizer.step()
        for i, name in enumerate("abcdef"):
            self.close(params[name].detach(), torch.full((i + 1,), 1 - (self.size + 1) / 2), 1e-6)

    def test_accumulation(self) -> None:
        for options in (dict(), dict(groups=2), dict(gradient_as_arena_view=False)):
            got = self.train(backward_passes_per_step=3, **options)
            self.same_weights(got, self.reference(sgd, 3, passes=3))

    def test_changing_the_number_of_passes(self) -> None:
        model, optimizer = self.distributed()
        optimizer.set_backward_passes_per_step(2)
        self.assertEqual(optimizer.backward_passes_per_step, 2)
        for step in range(3):
            optimizer.zero_grad()
            for i in range(2):
                loss_of(model, batch(step * 2 + i, self.rank)).backward()
            optimizer.step()
        self.same_weights(model, self.reference(sgd, 3, passes=2))

    def test_fewer_passes_than_said(self) -> None:
        model, optimizer = self.distributed(backward_passes_per_step=4, groups=2)
        self.steps(model, optimizer, 3, passes=1)
        self.same_weights(model, self.reference(sgd, 3))

    def test_more_passes_than_said(self) -> None:
        model, optimizer = self.distributed()
        loss_of(model, batch(0, self.rank)).backward()
        if self.size > 1:
            with self.assertRaisesRegex(AssertionError, "backward_passes_per_step"):
                loss_of(model, batch(0, self.rank)).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        loss_of(model, batch(0, self.rank)).backward()
        with optimizer.skip_synchronize():
            optimizer.synchronize()
            optimizer.step()
        self.same_weights(model, self.reference(sgd, 1))

    def test_gradients_that_some_ranks_lack(self) -> None:
        for options in (dict(), dict(groups=1), dict(gradient_as_arena_view=False)):
            for none in (False, True):
                torch.manual_seed(0)
                layers = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(self.size + 1))
                before = [layer.weight.detach().clone() for layer in layers]
                optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
                optimizer = hvd.DistributedOptimizer(optimizer, layers.named_parameters(), **options)
                for _ in range(2):
                    optimizer.zero_grad(set_to_none=none)
                    # Rank r uses layer r. No rank uses the last layer.
                    layers[self.rank](torch.ones(1, 2)).sum().backward()
                    optimizer.step()
                for layer, weight in zip(layers[:-1], before):
                    self.close(layer.weight.detach(), weight - 2 / self.size, 1e-6)
                self.close(layers[-1].weight.detach(), before[-1])

    def test_frozen_and_dynamic_parameters(self) -> None:
        generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(list(m.parameters()) + [frozen], lr=0.1),
                                     [*((f"{i}.{n}", p) for n, p in m.named_parameters()), ("frozen", frozen)])
            for i, m in enumerate((generator, critic))
        ]
        hvd.broadcast_parameters(list(generator.parameters()) + list(critic.parameters()), 0)
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for i, m in enumerate((generator, critic)):
                for p in m.parameters():
                    p.requires_grad_(step % 2 == i)
            critic(generator(torch.ones(3, 2) * (self.rank + 1))).sum().backward()
            for p in critic.parameters():
                self.assertEqual(p.grad is not None and bool(p.grad.abs().max() > 0), step % 2 == 1)
            optimizers[step % 2].step()
        self.same_at_all_ranks(generator)
        self.same_at_all_ranks(critic)
        self.equal(frozen.detach(), torch.ones(1))

    def test_frozen_and_trained_later(self) -> None:
        """Parameters that require no gradient when the optimizer is made are reduced once they do. When they are frozen
        again, they keep their values.
        """

        def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, every: bool) -> torch.nn.Module:
            for step in range(6):
                model[0].requires_grad_(2 <= step < 4)
                for p in model.parameters():
                    p.grad = None
                for i in range(2):
                    loss_of(model, self.whole(2 * step + i) if every else batch(2 * step + i, self.rank)).backward()
                optimizer.step()
            return model

        for options in ({}, dict(groups=1), dict(gradient_as_arena_view=False), dict(compression=hvd.Compression.none)):
            model = network()
            model[0].requires_grad_(False)
            optimizer = hvd.DistributedOptimizer(
                sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=2, **options
            )
            got = train(model, optimizer, False)
            self.same_at_all_ranks(got)
            want = network()
            self.same_weights(got, train(want, sgd(want.parameters()), True))

    def test_frozen_and_trained_later_with_adasum(self) -> None:
        model = network()
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum)
        for step in range(4):
            model[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            loss_of(model, batch(step, self.rank)).backward()
            optimizer.step()
            self.same_at_all_ranks(model)
        self.assertFalse(torch.equal(model[0].weight, network()[0].weight))

    def test_two_optimizers_at_once(self) -> None:
        """Two optimizers without names, or with equal names, may have gradients in flight at the same time."""
        for named in (False, True):
            models = [network(), network()]
            optimizers = [
                hvd.DistributedOptimizer(sgd(m.parameters()), m.named_parameters() if named else None) for m in models
            ]
            for step in range(2):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                sum(loss_of(m, batch(step, self.rank)) for m in models).backward()
                for optimizer in optimizers:
                    optimizer.step()
            names = [set(o._parameter_names.values()) for o in optimizers]
            self.assertFalse(names[0] & names[1])
            self.assertEqual(hvd.allgather_object(names), [names] * self.size)
            for model in models:
                self.same_weights(model, self.reference(sgd, 2))

    def test_names_begin_anew_in_the_next_job(self) -> None:
        def names() -> set:
            model, optimizer = self.distributed()
            return set(optimizer._parameter_names.values())

        self.assertNotEqual(names(), names())
        hvd.shutdown()
        hvd.init()
        self.assertEqual(names(), {name for name, _ in network().named_parameters()})

    def test_tied_weights(self) -> None:
        def tied() -> torch.nn.Module:
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3)).double()
            torch.manual_seed(0)
            for p in model.parameters():
                torch.nn.init.normal_(p)
            model[2].weight = model[0].weight
            return model

        model = tied()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        want = tied()
        reference = sgd(want.parameters())
        for step in range(3):
            for m, o, x in ((model, optimizer, batch(step, self.rank)), (want, reference, self.whole(step))):
                o.zero_grad()
                m(x).pow(2).mean().backward()
                o.step()
        self.same_weights(model, want)

    def test_layouts(self) -> None:
        for kind, layout, tail in LAYOUTS:
            for options in (
                dict(),
                dict(gradient_as_arena_view=False),
                dict(groups=1),
                dict(compression=hvd.Compression.fp16),
                dict(op=hvd.Adasum),
            ):

                def net() -> torch.nn.Module:
                    torch.manual_seed(0)
                    return kind(3, 4, 2).double().to(memory_format=layout)

                model, want = net(), net()
                optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
                reference = sgd(want.parameters())
                # Adasum of equal steps is the same step. So with Adasum all ranks train on the same batch.
                same = "op" in options
                parts = [torch.randn(2, 3, *tail).double().contiguous(memory_format=layout) for _ in range(self.size)]
                whole = torch.cat(parts[:1] if same else parts)
                mine = parts[0 if same else self.rank]
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    for step in range(3):
                        for m, o, x in ((model, optimizer, mine), (want, reference, whole)):
                            o.zero_grad(set_to_none=step == 1)
                            m(x).pow(2).mean().backward()
                            if step == 2 and m is model:
                                # The layout of the gradient becomes another one than the layout in which it is sent.
                                m.weight.grad = m.weight.grad.clone(memory_format=torch.contiguous_format)
                            o.step()
                self.same_weights(model, want, 1e-2 if "compression" in options else 1e-8)

    def test_layouts_without_a_gradient(self) -> None:
        for kind, layout, tail in LAYOUTS:
            for options in (
                dict(),
                dict(gradient_as_arena_view=False),
                dict(groups=1),
                dict(groups=1, gradient_as_arena_view=False),
                dict(compression=hvd.Compression.fp16),
                dict(compression=hvd.Compression.fp16, groups=1),
            ):
                torch.manual_seed(0)
                model = kind(3, 4, 2).to(memory_format=layout)
                start = model.weight.detach().clone()
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
                total = torch.zeros_like(start)
                for step in range(6):
                    optimizer.zero_grad(set_to_none=True)
                    # The elements of the gradient are different integers, so that the test finds an element in a wrong
                    # place.
                    by = torch.arange(float(start.numel())).reshape(start.shape) % 61 * (step + 1)
                    # The list says for each rank whether it has a gradient. In some steps all ranks have one, in others
                    # none or some.
                    has = [step in (0, 4) or step == 2 and r == 0 or step == 5 and r > 0 for r in range(self.size)]
                    if has[self.rank]:
                        (model.weight * by).sum().backward()
                        if step == 4 and self.rank == 0:
                            # The program replaces the gradient by a copy with another layout.
                            model.weight.grad = by.clone(memory_format=torch.contiguous_format)
                            self.assertFalse(model.weight.grad.is_contiguous(memory_format=layout))
                    optimizer.step()
                    total += by * sum(has) / self.size
                    self.close(model.weight.detach(), start - total, 1e-3)
                self.same_at_all_ranks(model)
                if self.size > 1:
                    self.assertEqual(model.weight.grad.stride(), model.weight.stride())

    def test_a_gradient_in_another_layout(self) -> None:
        """This rank's gradient has another layout than its weight. It is sent in the layout of the weight, so that the
        sum over all ranks is right.
        """
        layouts = (torch.channels_last, torch.contiguous_format)
        for views in (True, False):
            for mine, theirs in (layouts, layouts[::-1]):
                p = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).contiguous(memory_format=mine))
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD([p], lr=1.0), [("p", p)], gradient_as_arena_view=views
                )
                by = torch.arange(120.0).reshape(p.shape)
                # Backward adds to an existing gradient without changing its layout.
                if self.rank == 0:
                    p.grad = torch.zeros_like(p).contiguous(memory_format=theirs)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns about the layout of the gradient
                    (p * by * (self.rank + 1)).sum().backward()
                optimizer.step()
                self.close(p.detach(), -by * (self.size + 1) / 2, 1e-5)

    def test_a_transposed_weight(self) -> None:
        """Gradients have the strides of their weights, because fused optimizers do not look at strides."""
        for make in (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, **FUSED), lambda p: torch.optim.AdamW(p, lr=0.1, **FUSED),
        ):  # fmt: skip
            for views in (True, False):
                p, unused, want = (torch.nn.Parameter(torch.ones(3, 4).t()) for _ in range(3))
                optimizer = hvd.DistributedOptimizer(
                    make([p, unused]), [("p", p), ("unused", unused)], gradient_as_arena_view=views
                )
                reference = make([want])
                by = torch.arange(-6.0, 6.0).reshape(4, 3)
                for _ in range(2):
                    for q, o, factor in ((p, optimizer, 2.0 * self.rank), (want, reference, self.size - 1.0)):
                        o.zero_grad(set_to_none=True)
                        (q * by * factor).sum().backward()
                        o.step()
                self.close(p.detach(), want.detach(), 1e-5)
                if self.size > 1:
                    self.assertEqual([q.grad.stride() for q in (p, unused)], [p.stride()] * 2)

    def test_a_layout_that_changes(self) -> None:
        conv = torch.nn.Conv2d(2, 3, 2, bias=False)
        conv.weight.data.zero_()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(conv.parameters(), lr=1.0), conv.named_parameters(), compression=hvd.Compression.fp16
        )
        by = torch.arange(24.0).reshape(conv.weight.shape)
        for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            conv.to(memory_format=layout)
            optimizer.zero_grad(set_to_none=True)
            (conv.weight * by).sum().backward()
            optimizer.step()
        self.close(conv.weight.detach(), -3 * by, 1e-5)

    def test_a_backward_pass_that_gives_no_gradient(self) -> None:
        class Nothing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight, gives):
                ctx.gives = gives
                return x + weight

            @staticmethod
            def backward(ctx, grad):
                return grad, grad if ctx.gives else None, None

        for options in (
            dict(),
            dict(groups=1),
            dict(gradient_as_arena_view=False),
            dict(backward_passes_per_step=2),
            dict(compression=hvd.Compression.fp16),
            dict(op=hvd.Adasum),
        ):
            a, b = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], **options)
            passes = options.get("backward_passes_per_step", 1)
            # b has a gradient at all ranks in the first step, only at rank 0 in the second, and at no rank in the
            # third.
            for gives in (True, self.rank == 0, False):
                optimizer.zero_grad(set_to_none=True)
                for i in range(passes):
                    Nothing.apply(a, b, gives and i == 0).sum().backward()
                    if i + 1 < passes and not gives:
                        self.assertIsNone(b.grad)
                optimizer.step()
            self.close(a.detach(), torch.full((4,), -3.0 * passes), 1e-5)
            if "op" not in options:
                self.close(b.detach(), torch.full((4,), -1.0 - 1 / self.size), 1e-3)
        self.same_at_all_ranks(torch.nn.ParameterList([a, b]))

    def test_closure(self) -> None:
        for make, again in ((sgd, False), (lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4), True)):
            model, want = network(), network()
            optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
            reference = make(want.parameters())
            for step in range(2):
                for m, o, x in ((model, optimizer, batch(step, self.rank)), (want, reference, self.whole(step))):

                    def closure():
                        o.zero_grad()
                        loss = loss_of(m, x)
                        loss.backward()
                        return hvd.allreduce(loss.detach(), name="loss") if m is model else loss

                    loss = o.step(closure)
                    if m is model:
                        mine = float(loss.detach())
            self.assertAlmostEqual(mine, float(loss.detach()), places=6)
            # The tolerance for LBFGS is larger, because its result depends on the last bits of the average, which are
            # different here.
            self.same_weights(model, want, 1e-6 if again else 1e-10)

    def test_closure_with_a_line_search(self) -> None:
        """LBFGS decides by the loss, which is the loss of all ranks, so all ranks call the closure equally often."""
        for op, kind, skips in ((hvd.Average, torch.Tensor, False), (hvd.Sum, float, False), (hvd.Average, torch.Tensor, True)):
            model, calls = network(), []
            lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
            optimizer = hvd.DistributedOptimizer(lbfgs, model.named_parameters(), op=op)

            def closure():
                optimizer.zero_grad()
                loss = functional.mse_loss(model(batch(0, self.rank)), torch.full((ROWS, 2), 3.0 * self.rank).double())
                loss.backward()
                calls.append(loss.item())
                if skips:
                    optimizer.synchronize()
                return loss.view(1) if kind is torch.Tensor else loss.item()

            with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
                first = optimizer.step(closure)
            self.assertIsInstance(first, kind)
            if kind is torch.Tensor:
                self.assertEqual(first.shape, (1,))
            self.assertEqual(len(set(hvd.allgather_object(len(calls)))), 1)
            losses = hvd.allgather_object(calls[0])
            self.assertAlmostEqual(float(first), sum(losses) / (self.size if op == hvd.Average else 1))
            self.same_at_all_ranks(model)

    def test_closure_after_backward(self) -> None:
        model, optimizer = self.distributed()

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(0, self.rank))
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        self.same_weights(model, self.reference(sgd, 1))

    def test_members_of_a_set(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        ps = hvd.add_process_set(list(range(1, self.size)))
        model, optimizer = self.distributed(process_set=ps, groups=2)
        want = network()
        reference = sgd(want.parameters())
        ranks = ps.ranks if ps.included() else [self.rank]
        self.steps(model, optimizer, 3)
        for step in range(3):
            reference.zero_grad()
            loss_of(want, torch.cat([batch(step, r) for r in ranks])).backward()
            reference.step()
        self.same_weights(model, want)
        hvd.remove_process_set(ps)
        hvd.shutdown()
        hvd.init()

    def test_uneven_data_and_join(self) -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Sum
        )
        want = network()
        reference = torch.optim.SGD(want.parameters(), lr=0.1)
        for step in range(self.size):
            active = [r for r in range(self.size) if r >= step]
            reference.zero_grad()
            (loss_of(want, torch.cat([batch(step, r) for r in active])) * len(active)).backward()
            reference.step()
        for step in range(self.rank + 1):
            optimizer.zero_grad()
            loss_of(model, batch(step, self.rank)).backward()
            optimizer.step()
        self.assertEqual(hvd.join(), self.size - 1)
        hvd.shutdown()
        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=self.size - 1)
        self.same_weights(model, want)


class Sparse(OptimizerTest):
    def inputs(self, rank: int) -> torch.Tensor:
        return torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]] if rank == 0 else [[1, 3, 4], [4, 7, 9]])

    def test_embeddings(self) -> None:
        for make in (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SparseAdam(list(p), lr=0.1)):
            for as_dense in (False, True):
                for groups in (None, 1):
                    torch.manual_seed(0)
                    model, want = torch.nn.Embedding(10, 3, sparse=True), torch.nn.Embedding(10, 3, sparse=True)
                    want.load_state_dict(model.state_dict())
                    optimizer = hvd.DistributedOptimizer(
                        make(model.parameters()), model.named_parameters(), sparse_as_dense=as_dense, groups=groups
                    )
                    reference = make(want.parameters())
                    for _ in range(3):
                        optimizer.zero_grad()
                        (model(self.inputs(self.rank)) ** 2).sum().backward()
                        optimizer.step()
                        self.assertTrue(model.weight.grad.is_sparse)
                        reference.zero_grad()
                        sum((want(self.inputs(r)) ** 2).sum() / self.size for r in range(self.size)).backward()
                        reference.step()
                    self.close(model.weight.detach(), want.weight.detach(), 1e-5)

    def test_a_rank_without_a_sparse_gradient(self) -> None:
        want = torch.zeros(6, 2)
        want[: self.size] -= 1 / self.size
        want[0] -= 1 / self.size
        # The ranks other than rank 0 have a gradient only in this step. Before it, they do not know that it is sparse.
        for step_of_others, copied, groups in ((0, False, None), (0, True, None), (1, False, 2)):
            # Rank 0 and the others compute their gradients in different orders.
            models = [torch.nn.Embedding(6, 2, sparse=True) for _ in range(2)]
            for model in models:
                model.weight.data.zero_()
            both = torch.nn.ModuleList(models)
            optimizer = torch.optim.SGD(both.parameters(), lr=1.0)
            optimizer = hvd.DistributedOptimizer(optimizer, both.named_parameters(), groups=groups)
            for step in range(2):
                optimizer.zero_grad(set_to_none=True)
                if self.rank == 0 or step == step_of_others:
                    for model in both if self.rank == 0 else reversed(both):
                        model(torch.tensor([self.rank])).sum().backward()
                optimizer.step()
                if copied:
                    both, optimizer = pickle.loads(pickle.dumps((both, optimizer)))
            for model in both:
                self.close(model.weight.detach(), want, 1e-6)
                self.assertTrue(model.weight.grad is None or model.weight.grad.is_sparse)

    def test_an_unused_embedding(self) -> None:
        class Two(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused = (torch.nn.Embedding(4, 2, sparse=True) for _ in range(2))

        model = Two()
        for p in model.parameters():
            p.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        nothing = torch.empty(0, dtype=torch.int64)
        for _ in range(5):
            optimizer.zero_grad(set_to_none=True)
            (model.used(torch.tensor([self.rank])).sum() + model.unused(nothing).sum()).backward()
            self.assertTrue(model.unused.weight.grad.is_sparse)
            optimizer.step()
        want = torch.zeros(4, 2)
        want[: self.size] -= 5 / self.size
        self.close(model.used.weight.detach(), want, 1e-6)
        self.equal(model.unused.weight.detach(), torch.zeros(4, 2))

    def test_an_embedding_without_a_gradient(self) -> None:
        """SparseAdam, which refuses dense gradients, skips a table that no rank has used, as in torch."""
        for options in ({}, dict(groups=1), dict(sparse_as_dense=True)):
            tables = torch.nn.ModuleList(torch.nn.Embedding(4, 2, sparse=True) for _ in range(2))
            for p in tables.parameters():
                p.data.zero_()
            optimizer = torch.optim.SparseAdam(list(tables.parameters()), lr=1.0)
            optimizer = hvd.DistributedOptimizer(optimizer, tables.named_parameters(), **options)
            for step in range(2):
                optimizer.zero_grad(set_to_none=True)
                tables[0](torch.tensor([1])).sum().backward()
                if step == 1 and self.rank == 0:
                    tables[1](torch.tensor([2])).sum().backward()
                optimizer.step()
                changed = [p.detach().ne(0).any(1).tolist() for p in tables.parameters()]
                self.assertEqual(changed, [[False, True, False, False], [False, False, step == 1, False]])
                self.assertEqual([bool(optimizer.state.get(p)) for p in tables.parameters()], [True, step == 1])


class Synchronizing(OptimizerTest):
    def test_clipping(self) -> None:
        for none in (False, True):
            model, optimizer = self.distributed()
            want = network()
            reference = sgd(want.parameters())
            for step in range(3):
                optimizer.zero_grad(set_to_none=none)
                loss_of(model, batch(step, self.rank)).backward()
                optimizer.synchronize()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    with optimizer.skip_synchronize():
                        optimizer.step()
                self.assertEqual([w for w in caught if "synchronize" in str(w.message)], [])
                reference.zero_grad()
                loss_of(want, self.whole(step)).backward()
                self.close(norm, torch.nn.utils.clip_grad_norm_(want.parameters(), 0.01))
                reference.step()
            # In the next step, step() synchronizes by itself again.
            for m, o, x in ((model, optimizer, batch(3, self.rank)), (want, reference, self.whole(3))):
                o.zero_grad()
                loss_of(m, x).backward()
                o.step()
            self.same_weights(model, want)

    def test_warning(self) -> None:
        model, optimizer = self.distributed()
        for turn in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(turn, self.rank)).backward()
            optimizer.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            texts = [str(w.message) for w in caught]
            self.assertEqual(len(texts), 1, texts)
            self.assertIn("optimizer.step() called without optimizer.skip_synchronize()", texts[0])
        # The gradients were averaged twice. This changes nothing, because the average of equal gradients is the same
        # gradient.
        self.same_weights(model, self.reference(sgd, 2), 1e-8)

    def test_zero_grad_too_early(self) -> None:
        model, optimizer = self.distributed()
        loss_of(model, batch(0, self.rank)).backward()
        if self.size > 1:
            with self.assertRaisesRegex(AssertionError, r"zero_grad.*call optimizer.synchronize\(\) before"):
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        self.same_weights(model, self.reference(sgd, 1))

    def test_interrupted(self) -> None:
        """A signal handler raises an exception during synchronize. synchronize passes the exception on, and each
        parameter still gets its own gradient.
        """
        if self.size == 1:
            self.skipTest("needs another rank")

        class Tick(Exception):
            pass

        model, optimizer = self.distributed()
        settle, calls = _engine.Call.settle, []

        def interrupted(call: _engine.Call) -> None:
            calls.append(call)
            if len(calls) == 1:
                raise Tick
            settle(call)

        optimizer.zero_grad()
        loss_of(model, batch(0, self.rank)).backward()
        with mock.patch.object(_engine.Call, "settle", interrupted), self.assertRaises(Tick):
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        self.same_weights(model, self.reference(sgd, 1))

    def test_after_a_backward_pass_that_failed(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        model, optimizer = self.distributed()
        x = batch(0, self.rank)

        def fail(grad: torch.Tensor) -> None:
            raise RuntimeError("in the middle")

        for failing in ("yes", "", "", "then loaded", ""):
            optimizer.zero_grad()
            hidden = model[1](model[0](x))
            if failing:
                hidden.register_hook(fail)
            loss = functional.mse_loss(model[2](hidden), x[:, :2].sin())
            if failing:
                with self.assertRaisesRegex(RuntimeError, "in the middle"):
                    loss.backward()
            else:
                loss.backward()
            if failing == "then loaded":
                optimizer.load_state_dict(optimizer.state_dict())
                hvd.barrier()
            else:
                optimizer.step()
        self.same_at_all_ranks(model)

    def test_gradients_stay_where_they_are(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        model, optimizer = self.distributed()
        places = None
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, batch(step, self.rank)).backward()
            now = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
            optimizer.step()
            self.assertEqual(now, [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()])
            if places is not None:
                self.assertEqual(now, places)
            places = now

    def test_what_a_program_holds(self) -> None:
        for none in (False, True):
            for views in (True, False):
                model, optimizer = self.distributed(gradient_as_arena_view=views)
                want = network()
                kept = []
                for step in range(3):
                    optimizer.zero_grad(set_to_none=none)
                    loss_of(model, batch(step, self.rank)).backward()
                    held = [p.grad for p in model.parameters()]
                    optimizer.synchronize()
                    want.zero_grad()
                    loss_of(want, self.whole(step)).backward()
                    for h, p, w in zip(held, model.parameters(), want.parameters()):
                        self.assertIs(h, p.grad)
                        self.close(h, w.grad)
                    if none:
                        # The program keeps a gradient, or a view of a part of it. After zero_grad the gradient belongs
                        # to the program, so its values must not change.
                        kept.append((step, held if step else [h.view(-1)[:2] for h in held]))
                        del held
                        gc.collect()
                for step, grads in kept:
                    want.zero_grad()
                    loss_of(want, self.whole(step)).backward()
                    for g, w in zip(grads, want.parameters()):
                        self.close(g, w.grad if step else w.grad.view(-1)[:2])

    def test_a_gradient_of_the_program(self) -> None:
        # The program replaces the gradients after their reduction has begun. The results must be written to the new
        # gradients.
        model, optimizer = self.distributed()
        loss_of(model, batch(0, self.rank)).backward()
        for p in model.parameters():
            p.grad = p.grad.clone() if self.size > 1 else p.grad
        optimizer.step()
        self.same_weights(model, self.reference(sgd, 1))
        # In this part, the program sets the gradient without a backward pass.
        x = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)])
        x.grad = torch.full((3,), float(self.rank))
        optimizer.step()
        self.close(x.detach(), torch.full((3,), -(self.size - 1) / 2), 1e-6)

    def test_a_failure_leaves_it_usable(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        x = torch.nn.Parameter(torch.zeros(3 if self.rank == 0 else 4))
        y, z = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([y, x, z], lr=1.0), [("y", y), ("x", x), ("z", z)])
        for _ in range(2):
            (y.sum() + x.sum() + z.sum()).backward()
            under_way = [handle for handle, _ in optimizer._handles.values()]
            self.assertEqual(len(under_way), 3)
            with self.assertRaises(hvd.HorovodInternalError):
                optimizer.step()
            self.equal(torch.cat([y.grad, z.grad]), torch.ones(4))
            for handle in under_way:
                self.assertIsNone(hvd.synchronize(handle), "not waited for")
            optimizer.zero_grad()


class TheOptimizerItself(OptimizerTest):
    def test_class(self) -> None:
        model = network()
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        self.assertIsInstance(optimizer, torch.optim.Adam)
        self.assertEqual(type(optimizer).__name__, "Adam")
        self.assertIs(optimizer.param_groups[0], plain.param_groups[0])
        self.assertEqual(optimizer.defaults, plain.defaults)
        repr(optimizer)
        with self.assertRaises(ValueError):
            hvd.DistributedOptimizer(optimizer)

    def test_state_is_kept(self) -> None:
        model, want = network(), network()
        plain, reference = sgd(model.parameters()), sgd(want.parameters())
        for m, o in ((model, plain), (want, reference)):
            loss_of(m, self.whole(0)).backward()
            o.step()
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        for m, o, x in ((model, optimizer, batch(1, self.rank)), (want, reference, self.whole(1))):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
        self.same_weights(model, want)
        # A checkpoint is saved and restored, with the state of the optimizer.
        other = network()
        other.load_state_dict(model.state_dict())
        again = hvd.DistributedOptimizer(sgd(other.parameters()), other.named_parameters())
        again.load_state_dict(optimizer.state_dict())
        for m, o, x in ((other, again, batch(2, self.rank)), (want, reference, self.whole(2))):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
        self.same_weights(other, want)

    def test_copies_and_pickles(self) -> None:
        """A copy or a loaded pickle of a model and its optimizer goes on as they do, with the same options."""
        pair = hvd.add_process_set([0, 1]) if self.size > 2 else hvd.global_process_set
        for options in (
            {}, {"groups": 2}, {"op": hvd.Sum, "compression": hvd.Compression.fp16}, {"op": hvd.Adasum},
            {"backward_passes_per_step": 2, "gradient_predivide_factor": 2.0, "process_set": pair},
        ):  # fmt: skip
            model, optimizer = self.distributed(**options)
            self.steps(model, optimizer, 2)
            saved = io.BytesIO()
            torch.save((model, optimizer), saved)
            saved.seek(0)
            # Only one rank at a time loads the pickle, so no rank waits for others in torch.load.
            for rank in range(self.size):
                if rank == self.rank:
                    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
                    copies.append(torch.load(saved, weights_only=False))
                hvd.barrier()
            self.steps(model, optimizer, 3)
            for other, its_optimizer in copies:
                self.assertIs(type(its_optimizer).__bases__[1], torch.optim.SGD)
                self.assertIs(its_optimizer.process_set, optimizer.process_set)
                groups = [o._arguments().get("groups", ()) for o in (its_optimizer, optimizer)]
                self.assertEqual(len(groups[0]), len(groups[1]))
                self.steps(other, its_optimizer, 3)
                self.same_weights(other, model)
        if pair is not hvd.global_process_set:
            hvd.remove_process_set(pair)

    def test_copies_with_frozen_parameters(self) -> None:
        """Parameters that are frozen now keep their values, also if only some ranks have made a copy."""
        for copied in (True, self.rank == 0):
            for options in (dict(groups=None), dict(groups=1), dict(groups=4), dict(op=hvd.Adasum)):
                model, optimizer = self.distributed(**options)
                self.steps(model, optimizer, 2)
                model[0].requires_grad_(False)
                optimizer.zero_grad(set_to_none=True)
                if copied:
                    model, optimizer = copy.deepcopy((model, optimizer))
                before = [p.detach().clone() for p in model.parameters()]
                for step in range(2):
                    optimizer.zero_grad(set_to_none=True)
                    loss_of(model, batch(step, self.rank)).backward()
                    optimizer.step()
                kept = [torch.equal(p, b) for p, b in zip(model.parameters(), before)]
                self.assertEqual(kept, [True, True, False, False])
                self.same_at_all_ranks(model)

    def test_no_copies_in_the_middle_or_outside(self) -> None:
        model, optimizer = self.distributed()
        if self.rank == 0:  # only one rank, because the program imports torch
            program = "import pickle, sys; pickle.load(sys.stdin.buffer)"
            outside = subprocess.run(
                [sys.executable, "-c", program], input=pickle.dumps(optimizer), stderr=subprocess.PIPE, timeout=200,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
            self.assertNotEqual(outside.returncode, 0)
            self.assertIn(b"can only be loaded in a job: call hvd.init() first", outside.stderr)
        loss_of(model, batch(0, self.rank)).backward()
        if self.size > 1:
            with self.assertRaisesRegex(AssertionError, "copied or pickled after loss.backward"):
                copy.deepcopy(optimizer)
        optimizer.step()
        copy.deepcopy(optimizer)
        # Gradients of earlier passes, or of a part of a group, are not being reduced yet, but a copy would lose them.
        for options in ({"backward_passes_per_step": 2}, {"groups": 1}):
            optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
            passes = options.get("backward_passes_per_step", 1)
            (loss_of(model, batch(0, self.rank)) if passes > 1 else model[2].bias.sum()).backward()
            if self.size > 1:
                with self.assertRaisesRegex(AssertionError, "copied or pickled after loss.backward"):
                    copy.deepcopy(optimizer)
            optimizer.step()
            copy.deepcopy(optimizer)

    def test_loading_in_the_middle(self) -> None:
        model, optimizer = self.distributed(groups=2)
        loss_of(model, batch(0, self.rank)).backward()
        with optimizer.skip_synchronize():
            optimizer.load_state_dict(optimizer.state_dict())
            # After this barrier all operations are done, so that their names can be used again.
            hvd.barrier()
            hvd.allreduce(torch.ones(1), name="after")
            self.steps(model, optimizer, 2)
        self.same_weights(model, self.reference(sgd, 2))

    def test_loading_while_other_ranks_are_late(self) -> None:
        """Operations that load_state_dict discards are still in flight. They send the gradients of that step, and their
        results do not get into the gradients of the next one.
        """
        if self.size == 1:
            self.skipTest("needs another rank")
        want = network()
        loss_of(want, self.whole(0)).backward()
        for options in (
            {}, {"groups": 1}, {"gradient_as_arena_view": False}, {"compression": hvd.Compression.fp16}, {"op": hvd.Adasum},
        ):  # fmt: skip
            model, optimizer = self.distributed(**options)
            if self.rank > 0:
                hvd.recv(torch.zeros(1), 0)
            loss_of(model, batch(0, self.rank)).backward()
            if self.rank == 0:
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.zero_grad(set_to_none=False)
                for r in range(1, self.size):
                    hvd.send(torch.zeros(1), r)
                hvd.barrier()  # after it, the operations are done
                for p in model.parameters():
                    self.equal(p.grad, torch.zeros_like(p))
            else:
                optimizer.synchronize()
                for p, w in zip(model.parameters(), want.parameters()):
                    if "op" not in options:  # otherwise the ranks send steps
                        self.close(p.grad, w.grad, 1e-2 if "compression" in options else 1e-10)
                hvd.barrier()
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            loss_of(model, batch(1, self.rank)).backward()
            optimizer.step()
            self.same_at_all_ranks(model)

    def test_no_memory_for_copies(self) -> None:
        """If there is no memory for the gradients in place of those in flight, the next step is as after any other error."""
        if self.size == 1:
            self.skipTest("needs another rank")
        model, optimizer = self.distributed()
        loss_of(model, batch(0, self.rank)).backward()
        error = MemoryError("no memory")
        with mock.patch("gohvd.torch.optimizer.in_flight", return_value=True), \
                mock.patch.object(torch.Tensor, "clone", side_effect=error), self.assertRaises(MemoryError):  # fmt: skip
            optimizer.load_state_dict(optimizer.state_dict())
        self.assertEqual([p.grad for p in model.parameters()], [None for _ in model.parameters()])
        hvd.barrier()
        loss_of(model, batch(0, self.rank)).backward()
        optimizer.step()
        self.same_weights(model, self.reference(sgd, 1))

    def test_made_alone(self) -> None:
        """An optimizer that was made by the only rank of a job does not train alone in a job of several."""
        model = network()
        for op in (hvd.Average, hvd.Adasum):
            with mock.patch.object(module, "_always_alone", return_value=True):
                optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=op)
            if self.size == 1:
                self.steps(model, optimizer, 1)
                continue
            with self.assertRaisesRegex(RuntimeError, "reduced with no other rank.*call DistributedOptimizer again"):
                self.steps(model, optimizer, 1)

    def test_arguments_of_its_class(self) -> None:
        class Own(torch.optim.SGD):
            def __init__(self, params, must_be_given, lr):
                super().__init__(params, lr=lr)
                self.given = must_be_given

        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(Own([x], "this", lr=0.5), [("x", x)])
        self.assertEqual(optimizer.given, "this")
        x.sum().backward()
        optimizer.step()
        self.equal(x.detach(), torch.tensor([-0.5]))

    def test_schedulers(self) -> None:
        for early in (False, True):
            x = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([x], lr=1.0)
            if early:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            optimizer = hvd.DistributedOptimizer(optimizer, [("x", x)])
            if not early:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            for _ in range(3):
                optimizer.zero_grad()
                (x * (self.rank + 1)).sum().backward()
                optimizer.step()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    scheduler.step()
            self.close(x.detach(), torch.tensor([-1.75 * (self.size + 1) / 2]), 1e-6)

    def test_schedulers_after_loading(self) -> None:
        def broadcast(optimizer: torch.optim.Optimizer) -> None:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

        def load(optimizer: torch.optim.Optimizer) -> None:
            state = hvd.broadcast_object(optimizer.state_dict(), 0, "state")
            # All ranks load the state, because torch replaces the parameter groups during loading.
            optimizer.load_state_dict(state)

        for take in (broadcast, load):
            for early in (False, True):
                x, y = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
                lr = 1.0 if self.rank == 0 else 0.125
                plain = torch.optim.SGD([{"params": [x]}, {"params": [y], "lr": 2 * lr}], lr=lr, momentum=0.5)
                if early:
                    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
                optimizer = hvd.DistributedOptimizer(plain, [("x", x), ("y", y)])
                if not early:
                    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
                hvd.broadcast_parameters([x, y], 0)
                groups, state = list(optimizer.param_groups), optimizer.state
                for step in range(3):
                    take(optimizer)
                    self.assertEqual([g["lr"] for g in optimizer.param_groups], [0.5**step, 2 * 0.5**step])
                    optimizer.zero_grad()
                    ((x + y) * (self.rank + 1)).sum().backward()
                    optimizer.step()
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        scheduler.step()
                self.assertEqual([g["lr"] for g in optimizer.param_groups], [0.125, 0.25])
                for mine, other, old in zip(optimizer.param_groups, plain.param_groups, groups):
                    self.assertIs(mine, old)
                    self.assertIs(mine, other)
                self.assertIs(optimizer.state, state)
                self.assertIs(plain.state, state)
                # The momentum is 1 times the gradient in the first step, then 1.5 times and then 1.75 times the
                # gradient.
                mean = (self.size + 1) / 2
                want = -(1 + 1.5 * 0.5 + 1.75 * 0.25) * mean
                self.close(torch.cat([x, y]).detach(), torch.tensor([want, 2 * want]), 1e-6)
                self.close(optimizer.state[x]["momentum_buffer"], torch.tensor([1.75 * mean]), 1e-6)

    def test_a_group_added_later(self) -> None:
        x, y = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)])
        optimizer.add_param_group({"params": [y], "lr": 2.0})
        ((x + y) * self.rank).sum().backward()
        optimizer.step()
        self.close(torch.cat([x, y]).detach(), torch.tensor([-0.5, -1.0]) * (self.size - 1), 1e-6)

    def test_another_over_the_same_parameters(self) -> None:
        model = network()
        first = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        gone = weakref.ref(first)
        loss_of(model, batch(0, self.rank)).backward()
        first.step()
        first.zero_grad()
        # The optimizer is not part of a reference cycle, so it is deleted immediately, without the garbage collector.
        gc.disable()
        self.addCleanup(gc.enable)
        del first
        self.assertIsNone(gone())
        model.load_state_dict(network().state_dict())
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        self.steps(model, optimizer, 2)
        self.same_weights(model, self.reference(sgd, 2))

    def test_one_that_is_gone_in_the_middle_of_a_step(self) -> None:
        """An optimizer is deleted in the middle of a step. Another optimizer can then use the names of its gradients.
        """
        for _ in range(3):
            model, optimizer = self.distributed()
            loss_of(model, batch(0, self.rank)).backward()
            hvd.barrier()  # after this barrier the gradients are reduced, but not synchronized
            del optimizer
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        optimizer.zero_grad()
        loss_of(model, batch(0, self.rank)).backward()
        optimizer.step()
        self.same_weights(model, self.reference(sgd, 1))

    @unittest.skipUnless(hasattr(torch.optim.Optimizer, "register_step_pre_hook"), "this torch has no step hooks")
    def test_step_hooks_run_once(self) -> None:
        for op in (hvd.Average, hvd.Adasum):
            x, y = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
            plain = torch.optim.SGD([x, y], lr=1.0)
            optimizer = hvd.DistributedOptimizer(plain, [("x", x), ("y", y)], op=op)
            optimizer.load_state_dict(optimizer.state_dict())
            seen = []
            optimizer.register_step_pre_hook(lambda *_: seen.append((float(x.grad), float(x), float(y))))
            optimizer.register_step_post_hook(lambda *_: seen.append((float(x), float(y))))
            factor = self.rank if op == hvd.Average else 1
            (x * factor + y * factor).sum().backward()
            optimizer.step()
            # The Adasum of equal steps is that step.
            step = (self.size - 1) / 2 if op == hvd.Average else 1.0
            self.assertEqual(seen, [(step, 0.0, 0.0), (-step, -step)])

    def test_wrong_arguments(self) -> None:
        model = network()
        named = list(model.named_parameters())
        params = list(model.parameters())

        def make(**options):
            return hvd.DistributedOptimizer(sgd(params), **options)

        for options, text in (
            (dict(named_parameters=named + [named[0]]), "Found duplicates: 0.weight"),
            (dict(named_parameters=[("same", p) for p in params]), "must be unique"),
            (dict(named_parameters=named[:1]), "were not named"),
            (dict(named_parameters=params), "sequence of tuples"),
            (dict(backward_passes_per_step=0), "backward_passes_per_step must be > 0"),
            (dict(backward_passes_per_step=-1), "backward_passes_per_step must be > 0"),
            (dict(gradient_predivide_factor=2.0, op=hvd.Sum), "gradient_predivide_factor"),
            (dict(gradient_predivide_factor=2.0, op=hvd.Adasum), "gradient_predivide_factor"),
            (dict(gradient_predivide_factor=torch.tensor(2.0)), "gradient_predivide_factor of type Tensor, want a number"),
            (dict(groups=-1), "non-negative integer"),
            (dict(groups="a"), "non-negative integer"),
            (dict(groups=[params[0]]), "list of torch.Tensor"),
            (dict(groups=[[1]]), "list of torch.Tensor"),
            (dict(groups=[[params[0]], [params[0]]]), "only appear once"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                make(**options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(num_groups=2)
        self.assertEqual([w.category for w in caught], [DeprecationWarning])


class AdasumOptimizer(OptimizerTest):
    def test_steps_are_combined(self) -> None:
        for options in (dict(), dict(compression=hvd.Compression.fp16), dict(backward_passes_per_step=2)):
            passes = options.get("backward_passes_per_step", 1)
            model, optimizer = self.distributed(op=hvd.Adasum, **options)
            # Each reference makes the step of one rank. All begin with the same weights. Then the steps are combined.
            others = [network() for _ in range(self.size)]
            references = [sgd(m.parameters()) for m in others]
            for step in range(3):
                before = [p.detach().clone() for p in others[0].parameters()]
                optimizer.zero_grad()
                for i in range(passes):
                    loss_of(model, batch(step * passes + i, self.rank)).backward()
                    for p, b in zip(model.parameters(), before):
                        self.close(p.detach(), b, 1e-2 if options.get("compression") else 1e-10)
                optimizer.step()
                for r, (m, o) in enumerate(zip(others, references)):
                    o.zero_grad()
                    for i in range(passes):
                        loss_of(m, batch(step * passes + i, r)).backward()
                    o.step()
                for i, b in enumerate(before):
                    places = [list(m.parameters())[i] for m in others]
                    after = b + adasum([p.detach() - b for p in places])
                    for p in places:
                        p.data.copy_(after)
                self.same_weights(model, others[0], 2e-2 if options.get("compression") else 1e-9)
            self.same_at_all_ranks(model)

    def test_a_gradient_that_a_rank_lacks(self) -> None:
        x, y = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([x, y], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, [("x", x), ("y", y)], op=hvd.Adasum)
        (x if self.rank == 0 else y).sum().backward()
        optimizer.step()
        self.close(x.detach(), torch.full((2,), -1.0), 1e-6)
        self.close(y.detach(), torch.full((2,), -1.0 if self.size > 1 else 0.0), 1e-6)

    def test_synchronizing(self) -> None:
        model, optimizer = self.distributed(op=hvd.Adasum)
        optimizer.synchronize()
        if self.size > 1:
            with self.assertRaises(AssertionError):
                with optimizer.skip_synchronize():
                    pass
            loss_of(model, batch(0, self.rank)).backward()
            with self.assertRaises(AssertionError):
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        loss = optimizer.step(lambda: (optimizer.zero_grad(), loss_of(model, batch(0, self.rank)))[1])
        self.assertGreater(float(loss.detach()), 0)


if __name__ == "__main__":
    unittest.main()
