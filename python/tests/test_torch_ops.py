"""Tests all collectives of gohvd.torch with all types."""

from __future__ import annotations

import os
import random
import sys
import unittest
import warnings
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from ranks import FLOATS, INTS, SHAPES, RanksTest, hvd, sample, samples

from gohvd import _engine
from gohvd.torch import mpi_ops


class Allreduce(RanksTest):
    def test_types_shapes_and_reductions(self) -> None:
        cases = [(dtype, (3, 4), hvd.Sum) for dtype in INTS + FLOATS]
        cases += [(torch.float32, shape, hvd.Sum) for shape in SHAPES]
        cases += [(torch.float32, (3, 4), op) for op in (hvd.Min, hvd.Max, hvd.Product)]
        for dtype, shape, op in cases:
            wide = torch.stack(samples(self.size, shape, dtype)).double()
            reduce = {hvd.Sum: wide.sum, hvd.Min: wide.amin, hvd.Max: wide.amax, hvd.Product: wide.prod}[op]
            x = sample(self.rank, shape, dtype)
            got = hvd.allreduce(x, op=op)
            self.equal(got, reduce(0).to(dtype), f"{dtype} {shape} op {op}")
            self.equal(x, sample(self.rank, shape, dtype), "the argument has changed")

    def test_average_is_the_default(self) -> None:
        negative = torch.tensor([-1 - self.rank, -2])
        self.equal(hvd.allreduce(negative), torch.tensor([int(-(1 + self.size) / 2), -2]), "truncates toward zero")

    def test_bool_is_any_and_all(self) -> None:
        x = torch.tensor([True, False, self.rank == 0])
        self.equal(hvd.allreduce(x, op=hvd.Max), torch.tensor([True, False, True]))
        self.equal(hvd.allreduce(x, op=hvd.Min), torch.tensor([True, False, self.size == 1]))

    def test_average_argument(self) -> None:
        x = sample(self.rank, (4,), torch.float32)
        total = torch.stack(samples(self.size, (4,), torch.float32)).sum(0)
        for value, want in ((True, total / self.size), (False, total)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.close(hvd.allreduce(x, average=value), want, 1e-6)
            self.assertIn(DeprecationWarning, [w.category for w in caught])
            with self.assertRaises(ValueError):
                hvd.allreduce(x, average=value, op=hvd.Sum)
            with self.assertRaises(ValueError):
                hvd.grouped_allreduce([x], average=value, op=hvd.Sum)

    def test_in_place(self) -> None:
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            x = sample(self.rank, (3, 4), dtype)
            address = x.data_ptr()
            got = hvd.allreduce_(x, op=hvd.Sum)
            self.assertIs(got, x)
            self.assertEqual(x.data_ptr(), address)
            self.equal(x, torch.stack(samples(self.size, (3, 4), dtype)).sum(0).to(dtype))

    def test_handles(self) -> None:
        tensors = [sample(self.rank, (n,), torch.float32) for n in range(1, 60)]
        # The ranks submit in different orders.
        order = list(range(len(tensors)))
        order = order[self.rank :] + order[: self.rank]
        handles = {i: hvd.allreduce_async(tensors[i], name=f"handles.{i}", op=hvd.Sum) for i in order}
        self.assertEqual(len(set(handles.values())), len(tensors))
        for i, handle in handles.items():
            self.assertIsInstance(handle, int)
            got = hvd.synchronize(handle)
            self.equal(got, torch.stack(samples(self.size, (i + 1,), torch.float32)).sum(0))
            self.assertIsNone(hvd.synchronize(handle), "a handle counts once")
        x = torch.ones(3)
        handle = hvd.allreduce_async_(x, op=hvd.Sum, name="polled")
        while not hvd.poll(handle):
            pass
        self.assertIs(hvd.synchronize(handle), x)
        self.equal(x, torch.full((3,), float(self.size)))
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="interrupted")
        with mock.patch.object(_engine.Call, "settle", side_effect=TimeoutError), self.assertRaises(TimeoutError):
            hvd.synchronize(handle)  # as if a signal handler raised it
        self.equal(hvd.synchronize(handle), torch.full((3,), float(self.size)))

    def test_scaling(self) -> None:
        for dtype in FLOATS:
            x = sample(self.rank, (5,), dtype)
            total = torch.stack(samples(self.size, (5,), torch.float64)).sum(0)
            got = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
            self.equal(got, (total * 2).to(dtype), str(dtype))
        got = hvd.allreduce_(torch.tensor([3, -3]), op=hvd.Sum, postscale_factor=0.5)
        self.equal(got, torch.tensor([int(1.5 * self.size), -int(1.5 * self.size)]), "truncates toward zero")
        got = hvd.grouped_allreduce([torch.ones(2)], op=hvd.Sum, prescale_factor=3.0)
        self.equal(got[0], torch.full((2,), 3.0 * self.size))
        # Calls with the same arguments share an operation, and a tensor with another value is the same argument.
        for factors in ({"prescale_factor": torch.tensor(2.0)}, {"postscale_factor": torch.tensor(2.0)}):
            with self.assertRaisesRegex(ValueError, "factor of type Tensor, want a number"):
                hvd.allreduce(torch.ones(2), op=hvd.Sum, **factors)

    def test_compression(self) -> None:
        x = torch.tensor([1.0, 0.1, 3.0]) * (self.rank + 1)
        for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
            wide = sum((torch.tensor([1.0, 0.1, 3.0]) * (r + 1)).to(dtype).float() for r in range(self.size))
            got = hvd.allreduce(x, op=hvd.Sum, compression=compression)
            self.equal(got, wide.to(dtype).float(), str(dtype))
            got = hvd.grouped_allreduce([x], op=hvd.Sum, compression=compression)[0]
            self.equal(got, wide.to(dtype).float(), str(dtype))

    def test_compressors(self) -> None:
        for compression, wire in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                small, ctx = compression.compress(torch.ones(3, dtype=dtype))
                self.equal(small, torch.ones(3, dtype=wire))
                self.equal(compression.decompress(small, ctx), torch.ones(3, dtype=dtype))
            for dtype in INTS + [torch.bool]:
                x = torch.ones(3, dtype=dtype)
                same, ctx = compression.compress(x)
                self.assertIs(compression.decompress(same, ctx), x)
        x = torch.ones(3)
        same, ctx = hvd.Compression.none.compress(x)
        self.assertIs(hvd.Compression.none.decompress(same, ctx), x)

    def test_grouped(self) -> None:
        shapes = [(3,), (), (2, 2), (0,), (1000,)]
        tensors = [sample(self.rank, s, torch.float32) for s in shapes]
        wants = [torch.stack(samples(self.size, s, torch.float32)).sum(0) for s in shapes]
        for got, want in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), wants):
            self.equal(got, want)
        outputs = hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="grouped"))
        for got, want, x, s in zip(outputs, wants, tensors, shapes):
            self.equal(got, want)
            self.equal(x, sample(self.rank, s, torch.float32), "the argument has changed")
        outputs = hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Sum))
        for got, x, want in zip(outputs, tensors, wants):
            self.assertIs(got, x)
            self.equal(x, want)
        tensors = [sample(self.rank, s, torch.float32) for s in shapes]
        for got, x, want in zip(hvd.grouped_allreduce_(tensors, op=hvd.Sum), tensors, wants):
            self.assertIs(got, x)
            self.equal(x, want)

    def test_grouped_on_several_devices(self) -> None:
        tensors = [torch.ones(2), torch.ones(2, device="meta")]
        for grouped in (hvd.grouped_allreduce, hvd.grouped_allreduce_async_, hvd.grouped_allgather, hvd.grouped_reducescatter):
            with self.assertRaisesRegex(ValueError, "^grouped .*: got tensors on cpu and meta, want one device$"):
                grouped(tensors)

    def test_grouped_of_several_types(self) -> None:
        dtypes = [torch.float32, torch.int64, torch.float32, torch.bfloat16]
        for name in (None, "types"):
            tensors = [sample(self.rank, (i + 1,), d) for i, d in enumerate(dtypes)]
            wants = [sum(samples(self.size, (i + 1,), d)) for i, d in enumerate(dtypes)]
            for got, want in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name), wants):
                self.equal(got, want)
            handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, name=name)
            while not hvd.poll(handle):
                os.sched_yield()
            for x, want in zip(tensors, wants):
                self.equal(x, want, "when poll has said that it is done")
            for got, x in zip(hvd.synchronize(handle), tensors):
                self.assertIs(got, x)
            for got, want in zip(hvd.grouped_allgather(wants, name=name), wants):
                self.equal(got, torch.cat([want] * self.size))
            for got, want in zip(hvd.grouped_reducescatter(wants, op=hvd.Sum, name=name), wants):
                self.equal(got, torch.tensor_split(want * self.size, self.size)[self.rank])

    def test_a_group_of_types_again(self) -> None:
        """Groups with the same name and shapes and different types run one after the other. The results of each group
        have its own types.
        """
        kinds = [
            [torch.float32, torch.int64, torch.float16],
            [torch.float32, torch.float64, torch.int16],
            [torch.float32, torch.float32, torch.float32],
            [torch.float32, torch.int64, torch.bfloat16],
            [torch.uint8, torch.float64, torch.float16],
        ]
        shapes = [(3, 2), (5,), ()]
        for dtypes in kinds + kinds[::-1]:
            wants = [sum(samples(self.size, s, d)) for s, d in zip(shapes, dtypes)]
            for turn in range(3):
                for fresh in (torch.zeros, hvd.mpi_ops.alloc_tensor):
                    what = f"{dtypes}, turn {turn} of {fresh.__name__}"
                    tensors = [fresh(s, dtype=d).copy_(sample(self.rank, s, d)) for s, d in zip(shapes, dtypes)]
                    handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="again")
                    for got, want, x, s in zip(hvd.synchronize(handle), wants, tensors, shapes):
                        self.equal(got, want, what)
                        self.equal(x, sample(self.rank, s, x.dtype), f"{what}: the argument has changed")
                    handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, name="again")
                    for got, want, x in zip(hvd.synchronize(handle), wants, tensors):
                        self.assertIs(got, x)
                        self.equal(x, want, f"{what}, in place")

    def test_what_cannot_be_sent(self) -> None:
        for refused in (torch.ones(4, 4).t()[:3], torch.ones(3, dtype=torch.complex64)):
            for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
                with self.assertRaises(ValueError, msg=f"{call.__name__} {refused.dtype}"):
                    call(refused)
            with self.assertRaises(ValueError):
                hvd.broadcast_(refused, 0)
        self.equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([float(self.size)]))

    def test_memory_of_the_arena(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            for shape in ((), (0,), (3, 4)):
                x = hvd.mpi_ops.alloc_tensor(shape, dtype)
                self.assertEqual((tuple(x.shape), x.dtype), (shape, dtype))
                self.assertTrue(x.is_contiguous())
                x.fill_(1)
                op = hvd.Max if dtype == torch.bool else hvd.Sum
                self.assertIs(hvd.allreduce_(x, op=op), x)
                want = 1 if dtype == torch.bool else self.size
                self.equal(x, torch.full(shape, want, dtype=dtype))

    def test_negated_view(self) -> None:
        for fresh in (torch.zeros, hvd.mpi_ops.alloc_tensor):
            x = torch._neg_view(fresh((3,)))
            x.fill_(self.rank + 1.0)
            self.equal(hvd.allreduce(x, op=hvd.Max), torch.full((3,), float(self.size)))
            self.assertIs(hvd.allreduce_(x, op=hvd.Max), x)
            self.equal(x, torch.full((3,), float(self.size)))

    def test_memory_of_other_devices(self) -> None:
        """The elements of a tensor that is neither on the CPU nor on a CUDA device, as on xpu or hpu, are copied to memory."""

        class Elsewhere(torch.Tensor):
            is_cpu = False
            __torch_function__ = torch._C._disabled_torch_function_impl

            def data_ptr(self) -> int:
                raise AssertionError("the address means nothing in this process")

        x = torch.full((3,), self.rank + 1.0)
        elsewhere = x.as_subclass(Elsewhere)
        gathered = hvd.allgather(elsewhere[:1].as_subclass(Elsewhere))  # a slice is a plain tensor
        for got in (hvd.allreduce(elsewhere, op=hvd.Max), gathered[-1] * torch.ones(3)):
            self.equal(got, torch.full((3,), float(self.size)))
        self.assertIs(hvd.allreduce_(elsewhere, op=hvd.Max), elsewhere)
        self.equal(x, torch.full((3,), float(self.size)))

    def test_sparse(self) -> None:
        rows = torch.tensor([[self.rank, 4]])
        values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        for op, divisor in ((hvd.Average, self.size), (hvd.Sum, 1)):
            sparse = torch.sparse_coo_tensor(rows, values, (5, 2))
            result = hvd.sparse_allreduce_async(sparse, f"sparse.{op}", op)
            self.assertTrue(callable(result))
            want = torch.zeros(5, 2)
            for r in range(self.size):
                want[r] += torch.tensor([1.0, 2.0]) / divisor
                want[4] += torch.tensor([3.0, 4.0]) / divisor
            got = result()
            self.assertTrue(got.is_sparse)
            self.close(got.to_dense(), want, 1e-6)

    def test_sparse_without_elements(self) -> None:
        for _ in range(5):
            none = torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.int64), torch.empty(0, 2), (5, 2))
            got = hvd.sparse_allreduce_async(none, "nothing", hvd.Average)()
            self.assertTrue(got.is_sparse)
            self.equal(got.to_dense(), torch.zeros(5, 2))

    def test_interrupted_sparse(self) -> None:
        """If a signal handler raises an exception between the two operations of a rank, or just after one of them, its next
        call still meets those of the other ranks.
        """
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([[1.0, 2.0]]), (5, 2))
        begun = hvd.sparse_allreduce_async
        operation, ticks = mpi_ops.operation, [KeyboardInterrupt()]

        def interrupted(*args: object, **named: object) -> object:
            if named and ticks:  # the operation of the values
                raise ticks.pop()
            return operation(*args, **named)

        def just_after(count: int) -> mock.Mock:
            submit, calls = _engine.quick.hvd_submit, []

            def hvd_submit(*args: int) -> int:
                calls.append(submit(*args))
                if len(calls) == count:
                    raise KeyboardInterrupt
                return calls[-1]

            return mock.Mock(hvd_submit=hvd_submit)

        for patch in (
            mock.patch.object(mpi_ops, "operation", interrupted),
            mock.patch.object(_engine.engine, "_submitting", just_after(1)),
            mock.patch.object(_engine.engine, "_submitting", just_after(2)),
        ):
            if self.rank == 0:
                with patch:
                    self.assertRaises(KeyboardInterrupt, begun, sparse, None, hvd.Sum)
            else:
                begun(sparse, None, hvd.Sum)()
        self.equal(begun(sparse, None, hvd.Sum)().to_dense()[0], torch.tensor([1.0, 2.0]) * self.size)


class OtherOperations(RanksTest):
    def test_allgather(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            for tail in ((), (2, 2)):
                for rows in (lambda r: r + 1, lambda r: 0 if r == 0 else 3):
                    x = sample(self.rank, (rows(self.rank),) + tail, dtype)
                    want = torch.cat([sample(r, (rows(r),) + tail, dtype) for r in range(self.size)])
                    self.equal(hvd.allgather(x), want, f"{dtype} {tail}")
        self.equal(hvd.synchronize(hvd.allgather_async(torch.tensor([self.rank]), "g")), torch.arange(self.size))

    def test_empty_results_again_and_again(self) -> None:
        # From the third call on, the operation goes through the ring.
        for _ in range(5):
            empty = torch.empty(0, 6)
            self.equal(hvd.allgather(empty), empty)
            self.equal(hvd.allgather(empty, name="empty"), empty)
            self.equal(hvd.allgather(torch.empty(2, 0)), torch.empty(2 * self.size, 0))
            for got in hvd.grouped_allgather([empty, empty]):
                self.equal(got, empty)
            # In this group, one tensor is not empty.
            got = hvd.grouped_allgather([empty, torch.tensor([self.rank])], name="half")
            self.equal(got[0], empty)
            self.equal(got[1], torch.arange(self.size))
            self.equal(hvd.alltoall(empty), empty)
            received, splits = hvd.alltoall(empty, torch.zeros(self.size, dtype=torch.int32))
            self.equal(received, empty)
            self.assertEqual(splits.tolist(), [0] * self.size)
            self.equal(hvd.reducescatter(empty, op=hvd.Sum), empty)
            for got in hvd.grouped_reducescatter([empty, empty], op=hvd.Sum):
                self.equal(got, empty)
            self.equal(hvd.allreduce(empty, op=hvd.Sum), empty)
            self.equal(hvd.broadcast(empty, 0), empty)

    def test_broadcast(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            for shape in SHAPES:
                for root in range(self.size):
                    x = sample(self.rank, shape, dtype)
                    got = hvd.broadcast(x, root)
                    self.equal(got, sample(root, shape, dtype), f"{dtype} {shape} root {root}")
                    self.equal(x, sample(self.rank, shape, dtype), "the argument has changed")
                    self.assertIs(hvd.broadcast_(x, root_rank=root), x)
                    self.equal(x, sample(root, shape, dtype))
        x = torch.tensor([self.rank])
        self.assertIs(hvd.synchronize(hvd.broadcast_async_(x, self.size - 1, "b")), x)
        self.equal(x, torch.tensor([self.size - 1]))
        self.equal(hvd.synchronize(hvd.broadcast_async(torch.tensor([self.rank]), 0)), torch.tensor([0]))

    def test_reduce(self) -> None:
        for root in range(self.size):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                x = torch.arange(5).to(dtype) + self.rank
                got = hvd.reduce(x, root, op=hvd.Sum)
                self.equal(x, torch.arange(5).to(dtype) + self.rank)
                if self.rank == root:
                    self.equal(got, (torch.arange(5) * self.size + self.size * (self.size - 1) // 2).to(dtype))
                else:
                    self.assertIsNone(got)
        got = hvd.synchronize(hvd.reduce_async(torch.ones(2) * (self.rank + 1), 0, name="r"))
        if self.rank == 0:
            self.equal(got, torch.ones(2) * (self.size + 1) / 2)

    def test_gather_and_scatter(self) -> None:
        for root in range(self.size):
            every = [torch.full((r + 1, 2), r, dtype=torch.bfloat16) for r in range(self.size)]
            whole = torch.cat(every)
            got = hvd.gather(every[self.rank], root)
            if self.rank == root:
                self.equal(got, whole)
            else:
                self.assertIsNone(got)
            mine = whole if self.rank == root else whole[:0]
            splits = torch.arange(1, self.size + 1, dtype=torch.int32)
            self.equal(hvd.scatter(mine, root, splits), every[self.rank])
            self.equal(hvd.synchronize(hvd.scatter_async(mine, root, splits, name="s")), every[self.rank])

    def test_messages(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        others = [r for r in range(self.size) if r != self.rank]
        xs = [(torch.arange(70000) % 50 + r).to(torch.bfloat16).reshape(-1, 7) for r in range(self.size)]
        x = xs[self.rank]
        sends = [hvd.send_async(x, r, tag=self.rank) for r in others]
        for r in others:
            got = torch.empty_like(x)
            self.assertEqual(hvd.recv(got, r, r, timeout=100), r)
            self.equal(got, xs[r])
        self.assertEqual([hvd.synchronize(s) for s in sends], [None] * len(sends))
        if self.rank == 0:
            rows = torch.zeros(self.size, 2, requires_grad=True)
            handles = [hvd.recv_async(rows.detach()[i]) for i in others]
            sources = [hvd.synchronize(h) for h in handles]
            self.assertEqual(sorted(sources), others)
            self.equal(rows[1:], torch.tensor(sources, dtype=torch.float32)[:, None].expand(-1, 2))
        else:
            hvd.send(torch.full((2,), float(self.rank), requires_grad=True), 0)

    def test_alltoall(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            # Rank r sends r+i+1 rows to rank i.
            mine = [self.rank + i + 1 for i in range(self.size)]
            x = torch.cat([torch.full((n, 2), (self.rank * 3 + i) % 2).to(dtype) for i, n in enumerate(mine)])
            want = torch.cat(
                [torch.full((r + self.rank + 1, 2), (r * 3 + self.rank) % 2).to(dtype) for r in range(self.size)]
            )
            got, received = hvd.alltoall(x, splits=torch.tensor(mine, dtype=torch.int32))
            self.equal(got, want, str(dtype))
            self.equal(received.to(torch.int64), torch.tensor([r + self.rank + 1 for r in range(self.size)]))
            self.assertEqual(received.dtype, torch.int32)
        even = torch.arange(2 * self.size) + 10 * self.rank
        want = torch.cat([torch.arange(2) + 2 * self.rank + 10 * r for r in range(self.size)])
        self.equal(hvd.alltoall(even), want)
        got, received = hvd.synchronize(hvd.alltoall_async(even, name="a2a"))
        self.equal(got, want)
        self.assertEqual(received.tolist(), [2] * self.size)
        many = [1 << 31] + [2] * (self.size - 1)
        with mock.patch.object(_engine.Call, "received", many):
            self.equal(hvd.synchronize(hvd.alltoall_async(even))[1], torch.tensor(many))
        nothing = torch.zeros(self.size, dtype=torch.int32)
        got, received = hvd.alltoall(torch.ones(0, 3), splits=nothing)
        self.assertEqual((tuple(got.shape), received.tolist()), ((0, 3), [0] * self.size))

    def test_reducescatter(self) -> None:
        for rows in (0, 1, 7):
            stack = torch.stack(samples(self.size, (rows, 2), torch.float32))
            part = torch.tensor_split(stack.sum(0), self.size)[self.rank]
            x = sample(self.rank, (rows, 2), torch.float32)
            self.equal(hvd.reducescatter(x, op=hvd.Sum), part, f"{rows}")
            self.close(hvd.reducescatter(x), part / self.size, 1e-6)
            self.equal(hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), part * 2)
        part = torch.tensor_split(torch.stack(samples(self.size, (4,), torch.float32)).sum(0), self.size)[self.rank]
        x = sample(self.rank, (4,), torch.float32)
        self.equal(hvd.synchronize(hvd.reducescatter_async(x, "rs", hvd.Sum)), part)
        self.equal(hvd.reducescatter(x, op=hvd.Sum, compression=hvd.Compression.fp16), part)

    def test_barrier(self) -> None:
        self.assertIsNone(hvd.barrier())
        self.assertIsNone(hvd.barrier(process_set=hvd.global_process_set))

    def test_unknown_handle(self) -> None:
        self.assertIsNone(hvd.synchronize(1 << 40))

    def test_many_in_flight(self) -> None:
        handles = [hvd.allreduce_async(torch.full((n % 50,), 1.0), name=f"many.{n}", op=hvd.Sum) for n in range(3000)]
        for n, handle in enumerate(handles):
            self.equal(hvd.synchronize(handle), torch.full((n % 50,), float(self.size)))



class Names(RanksTest):
    def test_same_name_twice(self) -> None:
        """A second operation with the same name is refused at every rank until the first operation is synchronized.
        This is true even if the first operation is already done.
        """
        x = torch.ones(self.size)
        rows = torch.ones(self.size, dtype=torch.float64)
        begin = {
            "allreduce": lambda name: hvd.allreduce_async(x, name=name),
            "allreduce_": lambda name: hvd.allreduce_async_(x.clone(), name=name),
            "allgather": lambda name: hvd.allgather_async(x, name=name),
            "broadcast": lambda name: hvd.broadcast_async(x, 0, name=name),
            "alltoall": lambda name: hvd.alltoall_async(x, name=name),
            "reducescatter": lambda name: hvd.reducescatter_async(x, name=name),
            "grouped_allreduce": lambda name: hvd.grouped_allreduce_async([x, rows], name=name),
            "grouped_allgather": lambda name: hvd.grouped_allgather_async([x, x], name=name),
            "grouped_allgather of two types": lambda name: hvd.grouped_allgather_async([x, rows], name=name),
            "grouped_reducescatter": lambda name: hvd.grouped_reducescatter_async([x, x], name=name),
        }
        random.seed(self.rank)
        for what, start in begin.items():
            for turn in range(10):
                handle = start("twice")
                if turn % 3 == 0:
                    hvd.barrier()  # when the barrier is done, the operation is done too
                for _ in range(random.choice((0, 0, 50))):
                    os.sched_yield()
                with self.assertRaisesRegex(ValueError, "twice.*same name.*not synchronized", msg=what):
                    start("twice")
                if turn % 2:
                    while not hvd.poll(handle):
                        pass
                    hvd.synchronize(start("twice"))
                hvd.synchronize(handle)

    def test_name_of_a_failure(self) -> None:
        """The name of a failed operation stays in use too, until the operation is synchronized."""
        if self.size == 1:
            self.skipTest("needs another rank")
        for begin in (
            lambda x: hvd.allreduce_async(x, name="fails"),
            lambda x: hvd.grouped_allgather_async([x, x.to(torch.int32)[None, :self.rank + 1]], name="fails"),
        ):
            handle = begin(torch.ones(self.rank + 1))
            hvd.barrier()
            with self.assertRaises(ValueError):
                begin(torch.ones(1))
            with self.assertRaises(hvd.HorovodInternalError):
                hvd.synchronize(handle)
            with self.assertRaises(hvd.HorovodInternalError):
                hvd.synchronize(begin(torch.ones(self.rank + 1)))


class Topology(RanksTest):
    def test_places(self) -> None:
        self.assertTrue(hvd.is_initialized())
        self.assertEqual(hvd.size(), int(os.environ.get("HOROVOD_SIZE", "1")))
        self.assertEqual(hvd.rank(), int(os.environ.get("HOROVOD_RANK", "0")))
        # hvdrun sets the variable. The ranks of a host are consecutive.
        hosts = hvd.allgather_object(os.environ.get("HOROVOD_HOSTNAME", ""))
        sizes = {host: hosts.count(host) for host in hosts}
        mine = hosts[self.rank]
        local_rank = self.rank - hosts.index(mine)
        self.assertEqual((hvd.local_rank(), hvd.local_size()), (local_rank, sizes[mine]))
        peers = [host for host in sizes if sizes[host] > local_rank]
        self.assertEqual((hvd.cross_rank(), hvd.cross_size()), (peers.index(mine), len(peers)))
        self.assertEqual(hvd.mpi_ops.is_homogeneous(), len(set(sizes.values())) == 1)
        self.assertEqual(hvd.allgather(torch.tensor([hvd.rank()])).tolist(), list(range(self.size)))

    def test_probes(self) -> None:
        self.assertTrue(hvd.gloo_built())
        for probe in ("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "nccl_built", "cuda_built"):
            self.assertIsInstance(int(getattr(hvd, probe)()), int)
        for probe in ("ddl_built", "ccl_built", "rocm_built"):
            self.assertFalse(getattr(hvd, probe)())

    def test_constants(self) -> None:
        ops = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
        self.assertEqual(ops, (0, 1, 2, 3, 4, 5))

    def test_init_again(self) -> None:
        for _ in range(3):
            hvd.init()
            self.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(self.size)))
            hvd.shutdown()
            self.assertFalse(hvd.is_initialized())
            with self.assertRaises(ValueError):
                hvd.rank()
            with self.assertRaises(ValueError):
                hvd.size()
            with self.assertRaises(hvd.HorovodInternalError):
                hvd.allreduce(torch.ones(2))
            hvd.init()


if __name__ == "__main__":
    unittest.main()
