"""Tests of gohvd.torch.distributed. Every rank runs the same tests, in the same order.

distributed_ranks.py [NAME...] runs as one rank of torchrun, and internal/pythontest runs it without. The ranks run the
tests with these names, or else all tests. Then rank 0 prints ``N ranks: M tests passed``, after the names of the tests that
ran or were skipped. The name of this file does not begin with test_, because hvdrun does not start these tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import math
import os
import select
import signal
import sys
import threading
import time
import unittest
import warnings
import weakref
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gohvd.torch as hvd
import gohvd.torch.distributed
from gohvd import _engine, timeline
from gohvd.exceptions import MismatchError
from gohvd.torch import alloc_tensor
from gohvd.torch.distributed import _ddp, _job, _tensors, _work
from gohvd.torch.distributed._group import _CALLS, _HAS_BACKENDS, Backend, Calls

_LIMIT_SECONDS = 300

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

# Whether init_process_group takes a device that is not a GPU.
_NAMES_CPU = _VERSION >= (2, 15)

# Whether torch tells a group that it is destroyed.
_TELLS_GROUPS = _VERSION >= (2, 3)

# The method of an FSDP module that makes it ask the group for memory, which older versions of torch do not have.
_ALLOCATE = "set_allocate_memory_from_process_group_for_comm"

INIT: dict = {}


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        torch.set_num_threads(1)
        if not dist.is_initialized():
            dist.init_process_group("gohvd", **INIT)
        cls.rank, cls.size = dist.get_rank(), dist.get_world_size()
        cls.all = range(cls.size)

    def setUp(self) -> None:
        faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)
        torch.manual_seed(1)

    def equal(self, got: torch.Tensor, want: object, **kw: object) -> None:
        want = torch.as_tensor(want, dtype=got.dtype)
        self.assertTrue(torch.equal(got, want.expand_as(got)), f"got {got}, want {want}")

    def ours(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, self.rank + 1, dtype=dtype)


class Collectives(Ranks):
    def test_all_reduce(self) -> None:
        total = sum(r + 1 for r in self.all)
        product = math.prod(r + 1 for r in self.all)
        wants = {
            dist.ReduceOp.SUM: total, dist.ReduceOp.PRODUCT: product, dist.ReduceOp.MIN: 1,
            dist.ReduceOp.MAX: self.size, dist.ReduceOp.AVG: total / self.size,
        }  # fmt: skip
        for op, want in wants.items():
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
                for shape in ((), (1,), (0,), (3, 4), (1000,)):
                    x = self.ours(*shape, dtype=dtype)
                    dist.all_reduce(x, op=op)
                    self.equal(x, int(want) if not dtype.is_floating_point else want)
        # The ranks' tensors need not have the same shape.
        x = self.ours(*((6,) if self.rank == 0 else (2, 3)))
        dist.all_reduce(x)
        self.equal(x, total)

    def test_other_reductions(self) -> None:
        for op, dtype in (
            (dist.ReduceOp.BAND, torch.int32), (dist.ReduceOp.BXOR, torch.int32), (dist.ReduceOp.MAX, torch.complex64),
            (dist.ReduceOp.AVG, torch.bool),
        ):  # fmt: skip
            with self.assertRaisesRegex((ValueError, RuntimeError), "not supported|does not support"):
                dist.all_reduce(torch.ones(2, dtype=dtype), op=op)
        with self.assertRaisesRegex(TypeError, "reductions of torch.quint8|float8"):
            dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))

    def test_bool_complex_and_views(self) -> None:
        x = torch.tensor([self.rank == 0, False, True])
        dist.all_reduce(x)
        self.equal(x, [True, False, True])
        x = torch.tensor([self.rank == 0, False, True])
        dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
        self.equal(x, [self.size == 1, False, True])
        for dtype in (torch.complex32, torch.complex64, torch.complex128):
            # torch itself passes real numbers to all_reduce, and complex ones to reduce and reduce_scatter_tensor.
            x, part = torch.full((self.size,), complex(self.rank, 1)).to(dtype), torch.zeros(1).to(dtype)
            dist.reduce_scatter_tensor(part, x)
            dist.reduce(x, 0)
            dist.broadcast(x, 0)
            for y in (part, x):
                self.equal(torch.view_as_real(y), [sum(self.all), self.size])
            dist.all_reduce(x)
            self.equal(torch.view_as_real(x), [sum(self.all) * self.size, self.size**2])
        for view in (
            torch.arange(12.0).view(3, 4).t(), torch.arange(24.0).view(2, 3, 4)[:, 1], torch.arange(9.0)[::2],
            torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        ):  # fmt: skip
            want = view.clone() * self.size
            dist.all_reduce(view)
            self.equal(view, want)
            before = view.clone()
            outputs = [torch.zeros_like(view) for _ in self.all]
            dist.all_gather(outputs, view + self.rank)
            for r, got in enumerate(outputs):
                self.equal(got, before + r)

    def test_sparse(self) -> None:
        for dtype in (torch.float32, torch.int64):
            # Rank r has the elements 0 and r + 1 of the rows 0 to r.
            x = torch.zeros(self.size, self.size + 1, dtype=dtype)
            x[: self.rank + 1, 0] = x[: self.rank + 1, self.rank + 1] = 1
            want = x.clone()
            dist.all_reduce(want)
            for requires_grad in (False, True) if dtype.is_floating_point else (False,):
                sparse = x.to_sparse().requires_grad_(requires_grad)
                dist.all_reduce(sparse)
                self.equal(sparse.to_dense(), want)

    def test_broadcast(self) -> None:
        for root in self.all:
            for dtype in (torch.float32, torch.bool, torch.complex64, torch.uint8, torch.int64, torch.float8_e5m2):
                x = self.ours(3).to(dtype)
                dist.broadcast(x, root)
                self.equal(x.to(torch.complex64), torch.full((3,), root + 1.0).to(dtype).to(torch.complex64))

    def test_all_gather(self) -> None:
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.int16):
            outputs = [torch.zeros(2, 3, dtype=dtype) for _ in self.all]
            dist.all_gather(outputs, self.ours(2, 3).to(dtype))
            for r, got in enumerate(outputs):
                self.equal(got, torch.full((2, 3), r + 1.0).to(dtype))
        flat = torch.zeros(self.size * 2, 3)
        dist.all_gather_into_tensor(flat, self.ours(2, 3))
        self.equal(flat, torch.arange(1.0, self.size + 1).repeat_interleave(2).view(-1, 1).expand(-1, 3))
        objects = [None for _ in self.all]
        dist.all_gather_object(objects, {"rank": self.rank})
        self.assertEqual(objects, [{"rank": r} for r in self.all])

    def test_memory_of_the_group(self) -> None:
        """Tensors are not copied, also if an input is the part of this rank of the output or the other way round."""
        group, cpu, n = dist.group.WORLD, torch.device("cpu"), 1000
        self.assertTrue(group.supports_tensor_alloc(cpu))
        apart = group.allocate_tensor(n, dtype=torch.float32, device=cpu)
        for inside in (False, True):
            whole = group.allocate_tensor(n * self.size, dtype=torch.float32, device=cpu)
            mine = whole[n * self.rank : n * (self.rank + 1)] if inside else apart
            mine.fill_(self.rank + 1)
            with mock.patch.object(_tensors.LISTS, "copy", side_effect=AssertionError("a tensor was copied")):
                dist.all_gather_into_tensor(whole, mine)
                self.equal(whole.view(self.size, n), torch.arange(1.0, self.size + 1).view(-1, 1))
                dist.reduce_scatter_tensor(mine, whole)
                self.equal(mine, self.size * (self.rank + 1.0))

    def test_reduce_scatter(self) -> None:
        out = torch.zeros(2)
        dist.reduce_scatter_tensor(out, torch.arange(2.0 * self.size))
        self.equal(out, torch.arange(2.0 * self.size)[2 * self.rank : 2 * self.rank + 2] * self.size)
        dist.reduce_scatter(out, [torch.full((2,), float(r)) for r in self.all], op=dist.ReduceOp.MAX)
        self.equal(out, float(self.rank))

    def test_all_to_all(self) -> None:
        out = torch.zeros(self.size, 2)
        dist.all_to_all_single(out, torch.full((self.size, 2), float(self.rank)))
        self.equal(out, torch.arange(float(self.size)).view(-1, 1).expand(-1, 2))
        # Rank a sends a + b rows to rank b.
        sent, received = [self.rank + b for b in self.all], [a + self.rank for a in self.all]
        out = torch.zeros(sum(received), 2)
        dist.all_to_all_single(out, self.ours(sum(sent), 2), received, sent)
        want = [torch.full((n, 2), a + 1.0) for a, n in enumerate(received)]
        self.equal(out, torch.cat(want))
        outputs = [torch.zeros(n) for n in received]
        dist.all_to_all(outputs, [self.ours(n) for n in sent])
        for a, got in enumerate(outputs):
            self.equal(got, a + 1.0)

    def test_all_to_all_with_wrong_splits(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        ones = [1] * self.size
        # Rank 0 sends the numbers of rows in sent, and rank 1 wants those in received. Each row has two elements.
        for sent, received, got in (
            ([1, 2], [1, 1], rf"result has {8 * self.size + 8} bytes, but the output has {8 * self.size} bytes.* \[4[, ]2"),
            ([1, 1], [2, 0], r"got 2 elements from rank 0 of the group, want 4; 2 elements from rank 1 of .*, want 0:"),
        ):
            call = lambda: dist.all_to_all_single(  # noqa: E731
                torch.zeros(sum(received[:2]) + self.size - 2, 2) if self.rank == 1 else torch.zeros(self.size, 2),
                torch.ones(sum(sent[:2]) + self.size - 2, 2) if self.rank == 0 else torch.ones(self.size, 2),
                received + ones[2:] if self.rank == 1 else ones, sent + ones[2:] if self.rank == 0 else ones,
            )  # fmt: skip
            if self.rank == 1:
                what = r"torch.distributed.all_to_all_single \(call \d+ of group "
                with self.assertRaisesRegex(MismatchError, f"{what}.*{got}.*rank 1 of the group, has"):
                    call()
            else:
                call()

    def test_scatter_of_another_size(self) -> None:
        """Only the ranks whose output has another size get an error."""
        if self.size == 1:
            self.skipTest("needs another rank")
        last = self.rank == self.size - 1
        call = lambda: dist.scatter(  # noqa: E731
            torch.zeros(3 if last else 2), [torch.ones(2)] * self.size if self.rank == 0 else None, 0
        )
        if last:
            got = "the result has 8 bytes, but the output has 12 bytes: the root has sent more or less than this rank has room for"
            with self.assertRaisesRegex(MismatchError, rf"torch.distributed.scatter \(call \d+ of group .*{got}"):
                call()
        else:
            call()

    def test_roots(self) -> None:
        for root in self.all:
            x = self.ours(3)
            dist.reduce(x, root)
            self.equal(x, sum(r + 1.0 for r in self.all) if self.rank == root else self.rank + 1.0)
            outputs = [torch.zeros(2) for _ in self.all] if self.rank == root else None
            dist.gather(self.ours(2), outputs, root)
            for r, got in enumerate(outputs or []):
                self.equal(got, r + 1.0)
            out = torch.zeros(2)
            dist.scatter(out, [torch.full((2,), float(r)) for r in self.all] if self.rank == root else None, root)
            self.equal(out, float(self.rank))
        objects = [{"from": self.rank}]
        dist.broadcast_object_list(objects, self.size - 1)
        self.assertEqual(objects, [{"from": self.size - 1}])

    def test_coalesced(self) -> None:
        group = dist.group.WORLD
        a, b = self.ours(3), self.ours(2, dtype=torch.int64)
        group.allreduce_coalesced([a, b], dist.AllreduceCoalescedOptions()).wait()
        self.equal(a, sum(r + 1.0 for r in self.all))
        self.equal(b, sum(r + 1 for r in self.all))
        outputs = [torch.zeros(2 * self.size), torch.zeros(self.size)]
        work = group.allgather_into_tensor_coalesced(outputs, [self.ours(2), self.ours(1)])
        work.wait()
        self.equal(outputs[1], torch.arange(1.0, self.size + 1))
        with dist._coalescing_manager(group):
            for x in (a, b):
                dist.all_reduce(x, op=dist.ReduceOp.MAX)
        self.equal(b, sum(r + 1 for r in self.all))

    def test_many_calls(self) -> None:
        """More calls are in flight than a group has numbers."""
        works = []
        for i in range(600):
            x = torch.full((4,), float(i))
            works.append((i, x, dist.all_reduce(x, async_op=True)))
        for i, x, work in reversed(works):
            work.wait()
            self.equal(x, float(i * self.size))


    def test_interrupted_wait(self) -> None:
        """A signal handler's exception ends the wait of a call. The call gets its result later, and frees its name."""
        if self.size == 1:
            self.skipTest("needs another rank")
        store, key, x = dist.distributed_c10d._get_default_store(), f"interrupted {self.id()}", torch.ones(2)
        works, count = [], 300  # more calls than a group has numbers
        if self.rank == 0:

            class Interrupt(ValueError):  # the library raises this kind for calls that are wrong
                pass

            def interrupt(*_: object) -> None:
                raise Interrupt

            before = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                with self.assertRaises(Interrupt):
                    dist.all_reduce(x)
            finally:
                signal.signal(signal.SIGALRM, before)
            # The others make their calls while rank 0 waits in the first call whose name is in flight.
            threading.Timer(0.5, store.set, (key, "yes")).start()
        else:
            store.wait([key])
            dist.all_reduce(x)
        for _ in range(count):
            works.append(dist.all_reduce(torch.ones(1), async_op=True))
        for work in works:
            work.wait()
        self.equal(x, float(self.size))

    def test_interrupted_submission(self) -> None:
        """A signal handler raises an exception before a call is submitted, which then does not count."""
        if not hasattr(dist.AllreduceOptions(), "asyncOp"):
            self.skipTest("needs options with asyncOp")
        x = torch.ones(2)
        dist.all_reduce(x)
        if self.rank == 0:
            with mock.patch.object(_engine.waiting, "hvd_run", side_effect=InterruptedError):
                self.assertRaises(InterruptedError, dist.all_reduce, x)
            group = dist.group.WORLD._get_backend(torch.device("cpu"))
            last = mock.MagicMock(wraps=group._last, __setitem__=mock.Mock(side_effect=InterruptedError))
            with mock.patch.object(group, "_last", last):
                self.assertRaises(InterruptedError, dist.all_reduce, x)
        dist.all_reduce(x)
        self.equal(x, float(self.size**2))

    def test_interrupted_sparse(self) -> None:
        """A signal handler raises an exception between the two calls of the group for a sparse tensor, or just after one of
        them. The group makes both, as at the other ranks.
        """
        begin, numbers, x = Calls._begin, [], torch.ones(2).to_sparse()

        def interrupted(group: Calls, *args: object, **named: object) -> object:
            if len(numbers) == 1:
                numbers.append(0)
                raise KeyboardInterrupt
            numbers.append(0)
            return begin(group, *args, **named)

        def just_after(count: int) -> mock.Mock:
            submit, calls = _engine.quick.hvd_submit, []

            def hvd_submit(*args: int) -> int:
                calls.append(submit(*args))
                if len(calls) == count:
                    raise KeyboardInterrupt
                return calls[-1]

            return mock.Mock(hvd_submit=hvd_submit)

        for patch in (
            mock.patch.object(Calls, "_begin", interrupted),
            mock.patch.object(_engine.engine, "_submitting", just_after(1)),
            mock.patch.object(_engine.engine, "_submitting", just_after(2)),
        ):
            if self.rank == 0:
                with patch:
                    self.assertRaises(KeyboardInterrupt, dist.all_reduce, x.clone())
            else:
                dist.all_reduce(x.clone())
        dist.all_reduce(x)
        self.equal(x.to_dense(), torch.full((2,), float(self.size)))

    def test_exception_after_the_operation(self) -> None:
        """An exception of a signal handler during the copy of the result is raised as it is, and uses up the call."""
        if not hasattr(dist.AllreduceOptions(), "asyncOp"):
            self.skipTest("needs options with asyncOp")
        count = dist.group.WORLD._get_sequence_number_for_group
        for kind in (KeyError, ValueError):
            x, number = torch.zeros(4)[::2], count()
            with mock.patch.object(_tensors.LISTS, "copy", side_effect=[None, kind("tick")]) as copy:
                with self.assertRaisesRegex(kind, "^'?tick'?$"):
                    dist.all_reduce(x)
            self.assertEqual((copy.call_count, count()), (2, number + 1))

    def test_few_function_calls(self) -> None:
        # Each call of a function takes time, so a repeated all_reduce of a small tensor makes few of them in this package.
        # Calls of torch are not counted, because their number depends on its version.
        x = torch.ones(1, 1)
        folder, calls, outside = os.path.dirname(gohvd.torch.distributed.__file__), [], []

        def count(frame: object, event: str, function: object) -> None:
            if not frame.f_code.co_filename.startswith(folder):
                return
            if event == "call":
                calls.append(frame.f_code.co_name)
            elif event == "c_call":
                outside.append(function.__name__)

        for _ in range(_CALLS):
            dist.all_reduce(x)
        gc.collect()
        gc.disable()  # the finalizers of earlier tests' objects are calls too
        sys.setprofile(count)
        try:
            dist.all_reduce(x)
        finally:
            sys.setprofile(None)
            gc.enable()
        self.assertLessEqual(len(calls), 7 if hasattr(dist.AllreduceOptions(), "asyncOp") else 22, calls)
        self.assertNotIn("view", outside)

    def test_negated_view(self) -> None:
        x = torch._neg_view(hvd.alloc_tensor((3,))).fill_(self.rank + 1.0)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        self.equal(x, torch.full((3,), float(self.size)))


class Messages(Ranks):
    def test_send_and_recv(self) -> None:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.size == 1:
            self.skipTest("needs another rank")
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.int64):
            sent = dist.isend(self.ours(3, 2).to(dtype), after, tag=7)
            x = torch.zeros(3, 2, dtype=dtype)
            with mock.patch.object(_work._finisher, "add", wraps=_work._finisher.add) as add:
                dist.recv(x, before, tag=7)
                sent.wait()
            self.equal(x, torch.full((3, 2), before + 1.0).to(dtype))
            # The thread that waits does so without the help of another one.
            self.assertEqual([c.args[0].what for c in add.call_args_list if "tag 7" in c.args[0].what], [])
        x, y = torch.zeros(2), torch.zeros(2)
        ops = [dist.P2POp(dist.isend, self.ours(2), after), dist.P2POp(dist.irecv, x, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        self.equal(x, before + 1.0)
        # A message of any rank, while another one is awaited and a collective runs.
        late = dist.irecv(y, before, tag=9)
        dist.all_reduce(x)
        if self.rank == 0:
            seen = []
            for _ in range(self.size - 1):
                seen.append(dist.recv(x))
                self.equal(x, seen[-1] + 1.0)
            self.assertEqual(sorted(seen), list(range(1, self.size)))
        else:
            dist.send(self.ours(2), 0)
        dist.isend(self.ours(2), after, tag=9)
        late.wait()
        self.equal(y, before + 1.0)
        with self.assertRaisesRegex(ValueError, "want another rank|Invalid (source|destination) rank|itself|current rank"):
            dist.send(x, self.rank)

    def test_batches(self) -> None:
        """The timeout of the group limits the wait for a batch of messages. After an error in a batch, the group can be
        used.
        """
        group, x = dist.new_group(list(self.all)), torch.zeros(2)
        if self.size > 1 and self.rank == 0:
            group.set_timeout(timedelta(seconds=0.1))  # the other ranks may take longer to make the group and to send
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1, group)])
            with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as together:
                dist.irecv(x, 1, group=group, tag=1)
            for work in (works[0], together):
                with self.assertRaisesRegex(RuntimeError, r"timed out after 0.1 s, waiting for the other ranks"):
                    work.wait()
        dist.barrier()
        if self.rank == 1:
            dist.send(x, 0, group=group)
            dist.send(x, 0, group=group, tag=1)
        if self.size > 1:
            with self.assertRaisesRegex(ValueError, "layout torch.sparse_coo"):
                dist.batch_isend_irecv([dist.P2POp(dist.isend, x.to_sparse(), (self.rank + 1) % self.size)])
        x = self.ours(2)
        dist.all_reduce(x)
        self.equal(x, sum(r + 1.0 for r in self.all))
        dist.destroy_process_group(group)


class Groups(Ranks):
    def test_pg_options(self) -> None:
        """The backend has no options, and says so."""
        for options, count in ((None, 0), (object(), 1)):
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                group = dist.new_group(list(self.all), pg_options=options)
            self.assertEqual([str(w.message).startswith("gohvd: pg_options has no effect") for w in shown
                              if "pg_options" in str(w.message)], [True] * count)  # fmt: skip
            dist.destroy_process_group(group)

    def test_new_group(self) -> None:
        """Groups overlap, and only the members of a group call the backend."""
        ranks = [list(range(k, self.size)) for k in self.all] + [[r] for r in self.all] + [list(self.all)]
        groups = [dist.new_group(r) for r in ranks]
        for group, members in zip(groups, ranks):
            if self.rank not in members:
                continue
            x = self.ours(3)
            dist.all_reduce(x, group=group)
            self.equal(x, sum(r + 1.0 for r in members))
            dist.broadcast(x, members[-1], group=group)
            outputs = [torch.zeros(1) for _ in members]
            dist.all_gather(outputs, self.ours(1), group=group)
            self.assertEqual([o.item() for o in outputs], [r + 1.0 for r in members])
            if len(members) > 1 and self.rank == members[0]:
                dist.send(x, members[1], group=group)
            elif len(members) > 1 and self.rank == members[1]:
                self.assertEqual(dist.recv(x, group=group), members[0])
        # The groups are used at the same time, in a different order at each rank.
        mine = [g for g, members in zip(groups, ranks) if self.rank in members]
        works = [dist.all_reduce(torch.ones(1), group=g, async_op=True) for g in (reversed(mine) if self.rank % 2 else mine)]
        for work in works:
            work.wait()
        dist.barrier()
        for group, members in zip(groups, ranks):
            if self.rank in members:
                dist.destroy_process_group(group)
                if group._why_invalid:  # old versions of torch do not tell the group
                    with self.assertRaises((RuntimeError, ValueError)):
                        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()

    def test_split_group(self) -> None:
        if not hasattr(dist, "split_group"):
            self.skipTest("this torch has no split_group")
        halves = [list(self.all)[: self.size // 2], list(self.all)[self.size // 2 :]]
        half = dist.split_group(split_ranks=[h for h in halves if h], group_desc="halves")
        (members,) = [h for h in halves if self.rank in h]
        x = self.ours(1)
        dist.all_reduce(x, group=half)
        self.equal(x, sum(r + 1.0 for r in members))
        # The numbers in split_ranks are those in the group that is split. Other ranks get no group.
        last = dist.split_group(half, split_ranks=[[len(members) - 1]])
        if self.rank == members[-1]:
            dist.all_reduce(x, group=last)
            dist.destroy_process_group(last)
        else:
            self.assertEqual(last, dist.GroupMember.NON_GROUP_MEMBER)
        self.equal(x, sum(r + 1.0 for r in members))
        self.assertEqual((half.group_desc, half.size(), half.rank()), ("halves", len(members), members.index(self.rank)))
        dist.destroy_process_group(half)
        back = dist.split_group(split_ranks=[list(reversed(self.all))])
        parts = [torch.zeros(1) for _ in self.all]
        dist.all_gather(parts, torch.tensor([float(self.rank)]), group=back)
        self.equal(torch.cat(parts), [float(r) for r in dist.get_process_group_ranks(back)])
        self.assertEqual(dist.get_process_group_ranks(back).index(self.rank), back.rank())

    def test_order_of_ranks(self) -> None:
        """Parts, roots, splits and messages of a group are in the order of its ranks, which need not ascend."""
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            return
        want = [*range(1, self.size), 0]
        group = dist.new_group(want, sort_ranks=False)
        me, n, own = want.index(self.rank), self.size, torch.tensor([float(self.rank)])
        self.assertEqual(group.rank(), me)
        values = [torch.tensor([float(r)]) for r in want]
        parts = [torch.zeros(1) for _ in self.all]
        dist.all_gather(parts, own, group=group)
        self.equal(torch.cat(parts), torch.cat(values))
        for make in (lambda *shape: torch.zeros(shape), lambda rows, columns: torch.zeros(columns, rows).t()):
            whole, pair = make(n, 2), make(1, 2)
            dist.all_gather_into_tensor(whole, own.expand(2), group=group)
            self.equal(whole, torch.stack(values))
            whole.copy_(torch.arange(2.0 * n).view(n, 2))
            dist.reduce_scatter_tensor(pair, whole, group=group)
            self.equal(pair, [[n * 2.0 * me, n * (2.0 * me + 1)]])
        if n > 1:
            with self.assertRaisesRegex(ValueError, "not contiguous, and . parts that do not have whole rows"):
                dist.all_gather_into_tensor(make(n + 1, n), torch.zeros(n + 1), group=group)
        part = torch.zeros(1)
        dist.reduce_scatter(part, [torch.tensor([float(i)]) for i in self.all], group=group)
        self.equal(part, float(n * me))
        for root in self.all:
            dist.scatter(part, values if self.rank == root else None, src=root, group=group)
            self.equal(part, own)
            got = [torch.zeros(1) for _ in self.all] if self.rank == root else None
            dist.gather(own, got, dst=root, group=group)
            if got is not None:
                self.equal(torch.cat(got), torch.cat(values))
            x = own.clone()
            dist.broadcast(x, src=root, group=group)
            self.equal(x, float(root))
        # Rank i of the group sends i + 1 elements to rank 0 of the group, and one element to each other rank.
        sent = [me + 1] + [1] * (n - 1)
        received = [i + 1 for i in self.all] if me == 0 else [1] * n
        out = torch.zeros(sum(received))
        dist.all_to_all_single(out, torch.cat([torch.full((k,), 10.0 * me + i) for i, k in enumerate(sent)]), received, sent, group=group)
        self.equal(out, torch.cat([torch.full((k,), 10.0 * i + me) for i, k in enumerate(received)]))
        outs = [torch.zeros(1) for _ in self.all]
        dist.all_to_all(outs, [torch.tensor([10.0 * me + i]) for i in self.all], group=group)
        self.equal(torch.cat(outs), [10.0 * i + me for i in self.all])
        if n > 1:
            if me == 0:
                dist.send(own, want[1], group=group)
            elif me == 1:
                self.assertEqual(dist.recv(part, None, group=group), want[0])
                self.equal(part, float(want[0]))
        dist.barrier()

    def test_ranks_outside_the_job(self) -> None:
        """If the first group has only some ranks, as beside a default group of gloo, later ones have no others."""
        want = r"ranks \[1\] are not in the job, which has ranks \[0\]: the first group .* must have the ranks of all others"
        with self.assertRaisesRegex(ValueError, want):
            _job.Job([0], True).process_set([0, 1], "later", timedelta(minutes=1))

    def test_several_backends(self) -> None:
        if not _HAS_BACKENDS:
            self.skipTest("this torch has no backends by device")
        total, cpu, cuda = sum(r + 1.0 for r in self.all), torch.device("cpu"), torch.device("cuda")
        for backends, ours in (("cpu:gohvd,cuda:gloo", cpu), ("cuda:gloo,cpu:gohvd", cpu), ("cpu:gloo,cuda:gohvd", cuda)):
            group = dist.new_group(list(self.all), backend=backends)
            self.assertEqual([isinstance(group._get_backend(d), Backend) for d in (cpu, cuda)], [ours is cpu, ours is cuda])
            if ours is cuda:
                continue
            x = self.ours(2)
            dist.all_reduce(x, group=group)
            self.equal(x, total)
            future = dist.all_reduce(self.ours(1), group=group, async_op=True).get_future()
            self.equal(future.wait()[0], total)
            outputs = torch.zeros(self.size)
            dist.all_gather_into_tensor(outputs, self.ours(1), group=group)
            self.equal(outputs, torch.arange(1.0, self.size + 1))
            objects = [None for _ in self.all]
            dist.all_gather_object(objects, self.rank, group=group)
            self.assertEqual(objects, list(self.all))
            with dist._coalescing_manager(group):
                dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
            if self.size > 1 and self.rank == 0:
                dist.send(x, 1, group=group)
            elif self.rank == 1:
                dist.recv(x, 0, group=group)
            model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
            model(self.ours(2, 4)).sum().backward()
            self.equal(model.module.weight.grad, 2 * total / self.size)
            if self.size > 1 and self.rank == 0:
                with self.assertRaisesRegex(RuntimeError, "timed out after 0.01 s"):
                    dist.barrier(group=group, async_op=True).wait(timedelta(seconds=0.01))
            dist.barrier()
            if self.rank > 0:
                dist.barrier(group=group)
            # A part of the group has the same backends.
            part = dist.split_group(group, split_ranks=[[r] for r in self.all])
            self.assertIsInstance(part._get_backend(cpu), Backend)
            dist.all_reduce(x, group=part)
            self.equal(x, total)
            dist.destroy_process_group(part)
            if self.rank > 0:
                with self.assertRaisesRegex(RuntimeError, f"rank {self.rank} is in none of the new groups"):
                    dist.split_group(group, split_ranks=[[0]])
            else:
                dist.destroy_process_group(dist.split_group(group, split_ranks=[[0]]))
            dist.destroy_process_group(group)

    def test_several_backends_with_checks(self) -> None:
        """With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch calls the backend through a wrapper, which checks the calls."""
        if not _HAS_BACKENDS:
            self.skipTest("this torch has no backends by device")
        before, cpu = dist.get_debug_level(), torch.device("cpu")
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        self.addCleanup(dist.set_debug_level, before)
        group = dist.new_group(list(self.all), backend="cpu:gohvd,cuda:gloo")
        self.assertNotIsInstance(group._get_backend(cpu), Backend)
        self.assertFalse(group._get_backend(cpu).supports_tensor_alloc(cpu))
        x = self.ours(2)
        dist.all_reduce(x, group=group)
        self.equal(x, sum(r + 1.0 for r in self.all))
        dist.destroy_process_group(group)

    def test_destroyed_groups_leave_no_sets(self) -> None:
        sets_of_job = _engine.engine.set_ranks
        before = sets_of_job()
        members = list(range(max(1, self.size - 1)))
        groups = [dist.new_group(members) for _ in range(3)]
        if self.rank not in members:
            return
        self.assertEqual(len(sets_of_job()), len(before) + 3)
        works = [dist.all_reduce(self.ours(1), group=g, async_op=True) for g in groups]
        for work in works:
            work.wait()
        # The ranks destroy the groups in different orders, so destroying a group must not wait for the other ranks.
        for group in groups[:: -1 if self.rank % 2 else 1]:
            dist.destroy_process_group(group)
        if not groups[0]._why_invalid:
            return  # torch 2.1 does not tell the group
        until = time.monotonic() + 20
        while len(sets_of_job()) > len(before) and time.monotonic() < until:
            time.sleep(0.01)
        self.assertEqual(sets_of_job(), before)

    def test_device_mesh(self) -> None:
        try:
            from torch.distributed.device_mesh import init_device_mesh
        except ImportError:
            self.skipTest("this torch has no device meshes")

        mesh = init_device_mesh("cpu", (1, self.size), mesh_dim_names=("a", "b"))
        x = self.ours(1)
        dist.all_reduce(x, group=mesh["b"].get_group() if hasattr(mesh, "__getitem__") else mesh.get_dim_groups()[1])
        self.equal(x, sum(r + 1.0 for r in self.all))


class Meshes(Ranks):
    """Several groups at once: of different ranks, as the rows of a mesh, or overlapping."""

    def test_same_names(self) -> None:
        """Torch may give one name to groups that have no rank in common, if not all ranks have called new_group as often."""
        if self.size == 1:
            self.skipTest("needs another rank")
        store = dist.distributed_c10d._get_default_store()
        last = self.size - 1
        members = [last] if self.rank == last else list(range(last))
        for k in range(5):
            # While the set of the other ranks waits for one of them, the last rank makes its own set.
            if self.rank == last:
                store.wait([f"begun {k}"])
            elif self.rank == last - 1 > 0:
                store.wait([f"made {k}"])
            elif self.rank == 0:
                store.set(f"begun {k}", "")
            try:
                made, _ = _job._job.process_set(members, "same name", timedelta(minutes=1))
            finally:
                if self.rank == last:
                    store.set(f"made {k}", "")
            hvd.remove_process_set(made)
        dist.barrier()

    def test_mesh(self) -> None:
        try:
            from torch.distributed.device_mesh import init_device_mesh
        except ImportError:
            self.skipTest("this torch has no device meshes")
        rows = 2 if self.size % 2 == 0 else 1
        columns = self.size // rows
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("rows", "columns"))
        numbers = torch.arange(1.0, self.size + 1).view(rows, columns)
        row, column = divmod(self.rank, columns)
        for dim, want in enumerate((numbers[:, column].sum(), numbers[row].sum())):
            x = self.ours(1)
            dist.all_reduce(x, group=mesh.get_group(dim) if hasattr(mesh, "get_group") else mesh.get_dim_groups()[dim])
            self.equal(x, want)

    def test_many_groups(self) -> None:
        """Dozens of groups that overlap are used at the same time, in a different order at each rank."""
        works = []
        for k in range(1, 49):
            members = [r for r in self.all if k >> r & 1] or list(self.all)
            group = dist.new_group(members)
            if self.rank in members:
                works.append((group, self.ours(3), sum(r + 1.0 for r in members)))
        works = works[:: -1 if self.rank % 2 else 1]
        for (_, x, want), work in [(w, dist.all_reduce(w[1], group=w[0], async_op=True)) for w in works]:
            work.wait()
            self.equal(x, want)


class Works(Ranks):
    def test_work(self) -> None:
        x = self.ours(2)
        work = dist.all_reduce(x, async_op=True)
        self.assertTrue(work.wait())
        self.assertTrue(work.is_completed())
        self.assertTrue(work.is_success())
        self.assertIsNone(work.exception())
        self.assertIs(work.result()[0], x)
        if self.size > 1 and self.rank == 0:
            late = dist.all_reduce(torch.ones(1), async_op=True)
            self.assertFalse(late.is_completed())
            with self.assertRaisesRegex(RuntimeError, r"all_reduce \(call \d+ of group .*timed out after 0.01 s"):
                late.wait(timedelta(seconds=0.01))
        self.store_barrier("late")
        if self.size > 1 and self.rank > 0:
            late = dist.all_reduce(torch.ones(1), async_op=True)
        if self.size > 1:
            self.assertTrue(late.wait(timedelta(seconds=60)))

    def store_barrier(self, name: str) -> None:
        """Waits for all ranks without an operation of the group."""
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{name} {self.rank}", "")
        store.wait([f"{name} {r}" for r in self.all], timedelta(seconds=60))

    def test_future(self) -> None:
        order = []
        x = self.ours(2)
        future = dist.all_reduce(x, async_op=True).get_future()
        first = future.then(lambda f: order.append("first") or f.value()[0] / self.size)
        second = first.then(lambda f: order.append("second") or f.value() + 1)
        self.equal(second.wait(), sum(r + 1.0 for r in self.all) / self.size + 1)
        self.assertEqual(order, ["first", "second"])
        # Several futures are done in any order.
        futures = [dist.all_reduce(torch.full((1,), float(i)), async_op=True).get_future() for i in range(20)]
        self.assertEqual([f.wait()[0].item() for f in reversed(futures)], [float(i * self.size) for i in reversed(range(20))])

    def test_launched(self) -> None:
        """Operations on devices are done when they have been launched. Only a wait makes the current stream wait for them;
        if nobody waits, the tensors are held for the stream of the operation.
        """
        begin = _engine.engine.call
        with mock.patch.object(_engine.engine, "call", side_effect=begin) as called:
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        blocking = _engine.AT_LAUNCH if hasattr(dist.AllreduceOptions(), "asyncOp") else _engine.APART
        self.assertEqual([c.args[1].launched for c in called.call_args_list], [blocking, _engine.APART])
        for waits in (True, False):
            stream, call = mock.Mock(), mock.Mock(spec=_engine.Call)
            call.stream, stream.query.return_value = stream, False
            work = _work.Work(_work.Operation("all_reduce", [call], []))
            with mock.patch.object(_work.LISTS, "follow") as follow:
                if waits:
                    work.wait()
                self.assertFalse(work.is_completed())
                self.assertEqual((follow.called, call.hold.called, call.results.called), (waits, not waits, False))
            stream.query.return_value = True
            self.assertTrue(work.is_completed())
        # A stream of the program may have other work, also work that keeps it from being asked.
        stream, call = mock.Mock(), mock.Mock(spec=_engine.Call, apart=False)
        stream.query.side_effect, call.stream = RuntimeError, stream
        self.assertTrue(_work.Work(_work.Operation("all_reduce", [call], [])).is_completed())

    def test_futures_in_callbacks(self) -> None:
        """A callback may wait for the futures of other operations, which are begun before or in the callback."""
        if self.size == 1:
            self.skipTest("needs another rank")
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size

        def total(depth: int) -> torch.futures.Future:
            future = dist.all_reduce(self.ours(1), async_op=True).get_future()
            return future.then(lambda f: total(depth - 1).wait()[0] + f.value()[0]) if depth else future

        # The callback is registered before the messages are sent, so it does not run in this thread.
        futures = [dist.irecv(torch.zeros(1), before, tag=k).get_future() for k in range(2)]
        later = futures[1].then(lambda f: f.value()[0])
        last = futures[0].then(lambda f: later.wait() + total(2).wait())
        self.store_barrier("callbacks")
        dist.send(self.ours(1), after, tag=0)
        dist.send(self.ours(1), after, tag=1)
        self.equal(last.wait(), before + 1 + 3 * sum(r + 1.0 for r in self.all))

    def test_settled_by_another_thread(self) -> None:
        """A future completes although another thread settles the call just after the finisher has seen it in flight."""
        call, looks, completed = mock.Mock(spec=_engine.Call, stream=None), [], threading.Event()
        call.poll.side_effect = lambda: looks.append(1) or len(looks) > 1
        call.handle.side_effect = lambda: 0 if looks else 1 << 40  # this handle does not exist
        future = _work.Operation("all_reduce", [call], []).future([])
        future.add_done_callback(lambda _: completed.set())
        self.assertTrue(completed.wait(60))

    def test_many_futures(self) -> None:
        """The work for each of many operations that have ended does not grow with their number."""
        calls = [mock.Mock(spec=_engine.Call, stream=None) for _ in range(100)]
        with _work._finisher._cond:  # the thread sees all operations at once
            futures = [_work.Operation("all_reduce", [call], []).future([]) for call in calls]
        for future in futures:
            future.wait()
        self.assertLess(sum(call.handle.call_count for call in calls), 5 * len(calls))

    def test_tensors_are_freed(self) -> None:
        """A group keeps no tensor of a call that is done, with and without a wait."""
        for wait in (True, False):
            x, parts = self.ours(3), torch.zeros(3 * self.size)
            works = [
                dist.all_reduce(x, async_op=True),
                dist.all_gather_into_tensor(parts, self.ours(3), async_op=True),
                dist.reduce_scatter_tensor(self.ours(3), torch.ones(3 * self.size), async_op=True),
            ]
            tensors = [weakref.ref(x), weakref.ref(parts)]
            if wait:
                self.assertTrue(all([work.wait() for work in works]))
            else:
                while not all([work.is_completed() for work in works]):
                    time.sleep(0.001)
            del x, parts, works
            _work.kept.clear()  # it has the results of the last few works without a wait
            gc.collect()  # of torch's own cycles
            self.assertEqual([t() for t in tensors], [None, None])

    def test_no_operation_in_flight(self) -> None:
        """While no operation is in flight, no thread polls for callbacks that wait."""
        dist.all_reduce(self.ours(1), async_op=True).get_future().wait()
        watcher = _work._finisher._watcher
        if watcher is not None:
            watcher.join(60)
            self.assertFalse(watcher.is_alive())

    def test_fork(self) -> None:
        """A forked process drops works of its parent, or asks for their results, while a thread of the parent that does
        not exist there holds their locks.
        """
        error = "was forked after the operation had begun"
        for use, want in (
            (lambda work: None, "dropped"), (lambda work: work.wait(), error), (lambda work: work.get_future().wait(), error),
            (lambda work: dist.all_reduce(torch.ones(1)), f"belongs to process {os.getpid()}"),
        ):  # fmt: skip
            x = self.ours(2)
            work = dist.all_reduce(x, async_op=True)
            with work._operation._lock, dist.group.WORLD._lock:
                self.assertIn(want, self.forked(use, work))
            work.wait()
            self.equal(x, sum(r + 1.0 for r in self.all))
        if self.size == 1:
            return
        # Here the parent has asked for the future already, and a thread of the parent waits for the message.
        x = torch.zeros(1)
        work = dist.irecv(x, (self.rank - 1) % self.size)
        future = work.get_future()
        self.assertIn(error, self.forked(lambda work: work.get_future().wait(), work))
        self.store_barrier("fork")
        dist.send(self.ours(1), (self.rank + 1) % self.size)
        future.wait()
        self.equal(x, float((self.rank - 1) % self.size + 1))

    def forked(self, use, work) -> str:
        """Calls use(work) in a forked process, which then drops work. Returns the error, or "dropped" if there is none."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            outcome = "dropped"
            try:
                use(work)
            except BaseException as e:
                outcome = f"{type(e).__name__}: {e}"
                del e
            work.__del__()
            os.write(writer, outcome.encode())
            os._exit(0)
        os.close(writer)
        self.addCleanup(os.close, reader)
        if not select.select([reader], [], [], 60)[0]:
            os.kill(child, signal.SIGKILL)
        outcome = os.read(reader, 10000).decode()
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        return outcome

    def test_dropped(self) -> None:
        """The result is written even if the program drops the work."""
        x = self.ours(2)
        dist.all_reduce(x, async_op=True)
        dist.barrier()
        limit = threading.Event()
        for _ in range(2000):
            if torch.equal(x, torch.full((2,), sum(r + 1.0 for r in self.all))):
                return
            limit.wait(0.01)
        self.fail(f"got {x}")

    def test_waits_in_cpp(self) -> None:
        """Code in C++ waits for a work that the program has dropped. The results of only a few such works are kept."""
        try:
            from torch._C._distributed_c10d import _register_work
        except ImportError:
            self.skipTest("this torch has no _register_work")
        x = self.ours(2)
        _register_work(x, dist.all_reduce(x, async_op=True))
        self.equal(torch.ops._c10d_functional.wait_tensor(x), sum(r + 1.0 for r in self.all))
        for name, limit in (("_MOST_KEPT", 3), ("_MOST_KEPT_BYTES", 3 * 8)):
            with mock.patch.object(_work, name, limit):
                for _ in range(5):
                    dist.all_reduce(self.ours(2), async_op=True)
                self.assertEqual(len(_work.kept), 3, name)

    def test_errors(self) -> None:
        for make in (
            lambda: dist.all_reduce(torch.ones(2).to_sparse(), op=dist.ReduceOp.MAX),
            lambda: dist.broadcast(torch.ones(2).to_sparse(), 0),
            lambda: dist.all_gather([torch.ones(3)] * self.size, torch.ones(2)),
            lambda: dist.all_gather_into_tensor(torch.ones(self.size * 2 + 1), torch.ones(2)),
            lambda: dist.all_to_all_single(torch.ones(2 * self.size), torch.ones(2 * self.size), [1] * self.size, [1] * self.size),
            lambda: dist.all_reduce(torch.ones(2, device="meta")),
            lambda: dist.all_gather_coalesced([[torch.ones(2)]] * self.size, [torch.ones(2)] * 2),
            lambda: dist.all_gather_coalesced([[torch.ones(2)] * 2] * self.size, [torch.ones(2)]),
            lambda: dist.group.WORLD.allgather_into_tensor_coalesced([], [torch.ones(2)]),
            lambda: dist.group.WORLD.reduce_scatter_tensor_coalesced([torch.ones(2)], [torch.ones(2 * self.size)] * 2),
        ):
            with self.assertRaises((ValueError, RuntimeError)):
                make()
        self.equal_after()

    def equal_after(self) -> None:
        """After an error the group can still be used."""
        x = torch.ones(2)
        dist.all_reduce(x)
        self.equal(x, float(self.size))

    def test_mismatch(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        last = self.rank == self.size - 1
        call = (lambda: dist.broadcast(torch.ones(3), 0)) if last else (lambda: dist.all_reduce(torch.ones(3)))
        name = "broadcast" if last else "all_reduce"
        with self.assertRaisesRegex(MismatchError, rf"torch.distributed.{name} \(call \d+ of group .*mismatched operations"):
            call()
        self.equal_after()
        with self.assertRaisesRegex(MismatchError, "mismatched shapes"):
            dist.all_reduce(torch.ones(4 if last else 3))
        with self.assertRaisesRegex(RuntimeError, "mismatched data types"):
            dist.all_reduce(torch.ones(3, dtype=torch.float64 if last else torch.float32), async_op=True).get_future().wait()
        self.equal_after()

    def test_monitored_barrier(self) -> None:
        group = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=60))
        for absent in range(self.size if self.size > 1 else 0):
            first, *others = [r for r in self.all if r != absent]
            if self.rank == absent:
                group._barriers += 1
            else:
                # The first rank whose limit passes ends the wait of the others.
                limit = timedelta(seconds=0.5 if self.rank == first else 60)
                for r in others if self.rank == first else ():
                    group._store.wait([f"gohvd/monitored barrier {group._life}.{group._barriers + 1}/{r}"], timedelta(seconds=60))
                with self.assertRaisesRegex(RuntimeError, f"Rank {absent} failed to pass monitoredBarrier in 500 ms"):
                    group.monitored_barrier(limit, wait_all_ranks=True)
        self.store_barrier("monitored")
        self.equal_after()

    def test_monitored_barrier_of_a_group_made_again(self) -> None:
        """The barrier does not see the keys of an earlier group with the same name, because the store outlives groups."""
        for absent in (None, self.size - 1):
            store = dist.PrefixStore("again", dist.group.WORLD._store)
            group = Backend(store, self.rank, self.size, timedelta(seconds=60), "again", list(self.all))
            if absent is None or self.size == 1:
                group.monitored_barrier()
            elif self.rank != absent:
                with self.assertRaisesRegex(RuntimeError, "failed to pass monitoredBarrier in 500 ms"):
                    group.monitored_barrier(timedelta(seconds=0.5))
            dist.barrier()
            group.shutdown()


class Training(Ranks):
    def test_ddp(self) -> None:
        torch.manual_seed(self.rank)
        layers = torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 5))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        timeline._marks.reset()
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 10)).square().mean().backward()
            optimizer.step()
        self.assertEqual(timeline._marks._steps, 10)
        for p in model.parameters():
            outputs = [torch.zeros_like(p) for _ in self.all]
            dist.all_gather(outputs, p.detach())
            for got in outputs:
                self.equal(got, p.detach())

    def test_join(self) -> None:
        """The ranks have different numbers of batches. Those that have run out do not count in the mean."""
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        with model.join(divide_by_initial_world_size=False):
            for batch in range(self.rank + 1):
                model.zero_grad()
                model(self.ours(2, 4)).sum().backward()
                left = range(batch, self.size)
                self.equal(model.module.weight.grad, 2 * sum(r + 1 for r in left) / len(left))

    def test_comm_hook(self) -> None:
        def half(state, bucket):
            work = dist.all_reduce(bucket.buffer().to(torch.float16), async_op=True)
            return work.get_future().then(lambda f: f.value()[0].to(torch.float32) / self.size)

        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        model.register_comm_hook(None, half)
        model(self.ours(2, 4)).sum().backward()
        mean = sum(r + 1 for r in self.all) / self.size
        self.assertTrue(torch.allclose(model.module.weight.grad, torch.full((1, 4), 2 * mean), rtol=1e-2))

    def test_ddp_in_arena(self) -> None:
        """The gradients are those of torch's class, and the buckets are in an arena from the first step on. The gradients
        are in the buckets unless the program wants them elsewhere.
        """
        made, buckets = [], []

        def alloc(shape, dtype):
            made.append(alloc_tensor(shape, dtype))
            return made[-1]

        def shared(t: torch.Tensor) -> bool:
            return any([m.data_ptr() <= t.data_ptr() < m.data_ptr() + m.nbytes for m in made])

        def note(group, bucket):
            buckets.append(shared(bucket.buffer()))
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        def gradients(cls: type, hook: object = None, **kw: object) -> list:
            torch.manual_seed(1)
            model = cls(torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(5)]), bucket_cap_mb=0.01, **kw)
            if hook is not None:
                model.register_comm_hook(None, hook)
            found = []
            for _ in range(3):
                model.zero_grad()
                model(torch.randn(3, 40) + self.rank).square().mean().backward()
                found.append([p.grad.clone() for p in model.parameters()])
            if cls is ours:
                inside = [shared(p.grad) for p in model.parameters()]
                self.assertEqual(inside, [kw.get("gradient_as_bucket_view", True)] * len(inside))
            return found

        ours = gohvd.torch.distributed.DistributedDataParallel
        for kw in ({}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}):
            want = gradients(DistributedDataParallel, **kw)
            for hook in (None, note):
                scale = 1.0 if hook is None else 1.0 / self.size
                with mock.patch.object(_ddp, "alloc_tensor", alloc):
                    got = gradients(ours, hook, **kw)
                for a, b in zip(want, got):
                    for x, y in zip(a, b):
                        self.assertTrue(torch.allclose(x, y * scale, rtol=1e-4, atol=1e-6), f"{kw}")
        self.assertGreaterEqual(len(buckets), 9)
        self.assertNotIn(False, buckets)

    def test_fsdp(self) -> None:
        """Sharded training finds the same weights as training in one process with the batches of all ranks. Its buffers
        are in an arena if the program asks for it.
        """
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            self.skipTest("this torch has no fully_shard")
        for in_arena in (False, True):
            self.train_sharded(fully_shard, in_arena)

    def train_sharded(self, fully_shard, in_arena: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        def layers() -> torch.nn.Module:
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5))

        alone, sharded = layers(), layers()
        mesh = init_device_mesh("cpu", (self.size,))
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
            if in_arena and hasattr(layer, _ALLOCATE):
                getattr(layer, _ALLOCATE)(True)
        batches = [torch.randn(4, 6) for _ in self.all]
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, sharded)]
        for _ in range(3):
            (sum(alone(b).square().mean() for b in batches) / self.size).backward()
            sharded(batches[self.rank]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for want, got in zip(alone.parameters(), sharded.parameters()):
            self.assertTrue(torch.allclose(got.full_tensor(), want, atol=1e-6), f"got {got}, want {want}")


    def test_fsdp_losses(self) -> None:
        """A transformer that is sharded has the same losses over gohvd as over gloo."""
        try:
            from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        except ImportError:
            self.skipTest("this torch has no fully_shard")
        from torch.distributed.device_mesh import DeviceMesh

        def shard(model: torch.nn.Module, group: dist.ProcessGroup, new: bool) -> torch.nn.Module:
            if not new:
                return FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu"))
            mesh = DeviceMesh.from_group(group, "cpu")
            for part in (*model.layers, model):
                fully_shard(part, mesh=mesh)
            return model

        def losses(group: dist.ProcessGroup, new: bool) -> list:
            torch.manual_seed(0)
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True)
            model = shard(torch.nn.TransformerEncoder(layer, 2), group, new)
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            torch.manual_seed(self.rank)
            found = []
            for _ in range(5):
                x = torch.randn(2, 5, 16)
                loss = (model(x) - x.flip(1)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

        gloo = dist.new_group(list(self.all), backend="gloo")
        for new in (True, False):
            want, got = losses(gloo, new), losses(dist.group.WORLD, new)
            self.assertTrue(torch.allclose(torch.tensor(got), torch.tensor(want), rtol=1e-5), f"got {got}, want {want}")


class Modes(Ranks):
    """The modes of the caller's thread, and the layouts of tensors, over every collective."""

    def calls(self) -> dict:
        """Returns a function for each collective. It takes a tensor whose rows are a multiple of the number of ranks,
        and returns the results.
        """
        n, rank = self.size, self.rank

        def outputs(t: torch.Tensor) -> list:
            return [torch.zeros_like(t) for _ in self.all]

        def at_root(values: list) -> list | None:
            return values if rank == 0 else None

        def after(call: object, *results: object) -> object:
            call.wait() if hasattr(call, "wait") else None
            return results

        def chunks(t: torch.Tensor) -> list:
            return [c.clone() for c in t.chunk(n)]

        def message(t: torch.Tensor) -> torch.Tensor:
            got = torch.zeros_like(t)
            ops = [dist.P2POp(dist.isend, t, (rank + 1) % n), dist.P2POp(dist.irecv, got, (rank - 1) % n)]
            for work in dist.batch_isend_irecv(ops) if n > 1 else []:
                work.wait()
            return got

        def objects(function: object, *args: object) -> list:
            got = [None] * n
            function(got, *args)
            return got

        return {
            "all_reduce": lambda t: after(dist.all_reduce(t), t),
            "all_reduce async": lambda t: after(dist.all_reduce(t, async_op=True), t),
            "all_reduce_coalesced": lambda t: after(dist.all_reduce_coalesced([t]), t),
            "broadcast": lambda t: after(dist.broadcast(t, 0), t),
            "reduce": lambda t: after(dist.reduce(t, 0), t if rank == 0 else None),
            "all_gather": lambda t: (lambda o: after(dist.all_gather(o, t, async_op=True), o))(outputs(t)),
            "all_gather_into_tensor": lambda t: (
                lambda o: after(dist.all_gather_into_tensor(o, t), o)
            )(torch.zeros((n * t.shape[0], *t.shape[1:]), dtype=t.dtype, device="cpu")),
            "gather": lambda t: (lambda o: after(dist.gather(t, o, 0), o))(at_root(outputs(t))),
            "scatter": lambda t: (lambda o: after(dist.scatter(o, at_root([t] * n), 0), o))(torch.zeros_like(t)),
            "reduce_scatter": lambda t: (
                lambda o: after(dist.reduce_scatter(o, chunks(t)), o)
            )(torch.zeros_like(chunks(t)[0])),
            "reduce_scatter_tensor": lambda t: (
                lambda o: after(dist.reduce_scatter_tensor(o, t, async_op=True), o)
            )(torch.zeros_like(chunks(t)[0])),
            "all_to_all": lambda t: (lambda o: after(dist.all_to_all(o, chunks(t)), o))(chunks(torch.zeros_like(t))),
            "all_to_all_single": lambda t: (lambda o: after(dist.all_to_all_single(o, t), o))(torch.zeros_like(t)),
            "messages": message,
            "sparse": lambda t: (lambda s: after(dist.all_reduce(s), s.to_dense()))(t.to_sparse()),
            "barrier": lambda t: after(dist.barrier()),
            "monitored_barrier": lambda t: after(dist.monitored_barrier()),
            "all_gather_object": lambda t: objects(dist.all_gather_object, t.tolist()),
            "broadcast_object_list": lambda t: (lambda o: after(dist.broadcast_object_list(o, 0), o))([t.tolist()]),
            "future": lambda t: dist.all_reduce(t, async_op=True).get_future().then(lambda f: f.value()[0] + 1).wait(),
        }

    def rows(self, *shape: int) -> torch.Tensor:
        whole = (2 * self.size, *shape)
        return torch.arange(math.prod(whole), dtype=torch.float32, device="cpu").reshape(whole) % 7 + self.rank

    def plain(self, result: object) -> object:
        if isinstance(result, torch.Tensor):
            return [str(result.dtype), str(result.device), result.detach().tolist()]
        return [self.plain(r) for r in result] if isinstance(result, (list, tuple)) else result

    def test_modes(self) -> None:
        """A collective has the same result in each mode and outside of it, in all orders."""

        @contextlib.contextmanager
        def default_dtype() -> Iterator[None]:
            torch.set_default_dtype(torch.float64)
            try:
                yield
            finally:
                torch.set_default_dtype(torch.float32)

        modes = {
            "inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "default dtype": default_dtype,
            "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16), "default device": lambda: torch.device("meta"),
        }  # fmt: skip
        for number, (mode, context) in enumerate(modes.items()):
            for name, call in self.calls().items():
                with self.subTest(mode=mode, function=name):
                    results = []
                    for inside in (True, False, True, False):
                        with context() if inside else contextlib.nullcontext():
                            results.append(self.plain(call(self.rows(3 + number))))
                    self.assertEqual(results, results[:1] * 4)

    def test_begun_inside_and_ended_outside(self) -> None:
        for column in (False, True):
            with torch.inference_mode():
                t = torch.ones(7, 2)[:, 0] if column else torch.ones(9)
                work = dist.all_reduce(t, async_op=True)
            work.wait(timedelta(seconds=60))  # another thread finishes the operation
            self.equal(t, float(self.size))

    def test_layouts(self) -> None:
        """A collective gives for each layout what it gives for a contiguous copy. Only a tensor to which it would write
        several elements at the same place is refused.
        """
        layouts = {
            "contiguous": lambda t: t,
            "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
            "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
            "sliced": lambda t: torch.cat([t, t], 3)[..., ::2],
            "rows of another tensor": lambda t: torch.cat([t, t])[t.shape[0] :],
            "expanded": lambda t: t[:1].expand_as(t),
            "0-d": lambda t: t[0, 0, 0, 0].clone(),
            "empty": lambda t: t[:0].clone(),
        }
        for layout, make in layouts.items():
            for name, call in self.calls().items():
                if layout == "0-d" and name not in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "messages"):
                    continue  # it needs rows
                with self.subTest(layout=layout, function=name):
                    want = self.plain(call(make(self.rows(3, 2, 2)).clone(memory_format=torch.contiguous_format)))
                    try:
                        self.assertEqual(self.plain(call(make(self.rows(3, 2, 2)))), want)
                    except RuntimeError as e:
                        self.assertEqual(layout, "expanded")
                        self.assertIn("single memory location", str(e))


class Lives(Ranks):
    """The process group is made several times in one process. The order of the names makes these tests the second."""

    def test_again(self) -> None:
        for k in range(2):
            old = dist.group.WORLD
            dist.all_reduce(torch.ones(2), async_op=True)  # the group keeps the result, because nobody waits for it
            self.assertGreater(len(_work.kept), 0)
            dist.destroy_process_group()
            if _TELLS_GROUPS:
                self.assertEqual(len(_work.kept), 0)
            begin(k)
            x = torch.ones(2)
            dist.all_reduce(x)
            self.equal(x, float(self.size))
            with self.assertRaisesRegex(RuntimeError, "was destroyed"):
                old.allreduce([torch.ones(1)])

    def test_device_id(self) -> None:
        """The group and groups of its ranks work if the program names a device, or gohvd for some devices."""
        backends = ["gohvd", "cpu:gohvd", "cpu:gohvd,cuda:gohvd"] + ["cpu:gohvd,cuda:gloo"] * _HAS_BACKENDS
        device = {"device_id": torch.device("cpu:0")} if _NAMES_CPU else {}
        for k, backend in enumerate(backends):
            dist.destroy_process_group()
            begin(f"named {k}", backend, **device)
            groups = [dist.group.WORLD, dist.new_group(list(self.all)), dist.new_group([0])]
            if hasattr(dist, "split_group"):
                groups.append(dist.split_group(dist.group.WORLD, [list(self.all)]))
            for group in groups:
                if group != dist.GroupMember.NON_GROUP_MEMBER:
                    x = torch.ones(2)
                    dist.all_reduce(x, group=group)
                    self.equal(x, float(group.size()))
        dist.barrier()
        dist.destroy_process_group()
        begin("named")

    def test_local_groups(self) -> None:
        """Only the members call new_group. Afterwards torch names new groups differently at other ranks, with any backend,
        so the default group is made again.
        """
        if self.rank != 0 or self.size == 1:
            members = [r for r in self.all if r > 0 or self.size == 1]
            group = dist.new_group(members, use_local_synchronization=True)
            x = self.ours(1)
            dist.all_reduce(x, group=group)
            self.equal(x, sum(r + 1.0 for r in members))
        dist.barrier()
        dist.destroy_process_group()
        begin("local")

    def test_timeouts(self) -> None:
        """A group has the timeout of new_group, or torch's default. It does not have that of the default group."""
        dist.destroy_process_group()
        begin("timeouts", timeout=timedelta(seconds=1234))
        self.assertEqual(dist.group.WORLD._timeout, timedelta(seconds=1234))
        self.assertEqual(dist.new_group(list(self.all), timeout=timedelta(seconds=99))._timeout, timedelta(seconds=99))
        self.assertEqual(dist.new_group(list(self.all))._timeout, timedelta(minutes=30))
        dist.barrier()
        dist.destroy_process_group()
        begin("default")

    def test_first_rank_dies(self) -> None:
        """A rank does not wait for the timeout of the group if the first rank has died before it has said how the ranks
        meet.
        """
        store = dist.HashStore()
        store.compare_set("gohvd/meeting 1/first", "", "0")
        self.assertEqual(_job._LONGEST_START, timedelta(minutes=1))
        with mock.patch.object(_job, "_LONGEST_START", timedelta(seconds=0.1)):
            with self.assertRaisesRegex(RuntimeError, "rank 0 has begun to make it and not gone on"):
                _job._meet(store, 1, 2, None, timedelta(hours=9), False)

    def test_job_of_the_program(self) -> None:
        """If the program has called hvd.init, the group uses that job and does not end it."""
        if "RANK" not in os.environ:
            self.skipTest("only with a launcher, such as torchrun")
        dist.destroy_process_group()
        hvd.init()
        for k in range(2):
            begin(f"mine {k}")
            x = torch.ones(2)
            dist.all_reduce(x)
            self.equal(x, float(self.size))
            self.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="x"), float(self.size))
            dist.destroy_process_group()
            self.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="x"), float(self.size))
        hvd.shutdown()
        begin("ours")


def begin(k: object, backend: str = "gohvd", **kw: object) -> None:
    """Makes the default group again, with a new file for each k, because a file:// store can be used only once."""
    args = dict(INIT)
    if args:
        args["init_method"] += f" {k}"
    dist.init_process_group(backend, **args, **kw)


def name_of(test: unittest.TestCase) -> str:
    """The name of a test without that of this module."""
    return test.id().partition(".")[2]


def names_of(suite: unittest.TestSuite) -> list[str]:
    return [name for t in suite for name in (names_of(t) if isinstance(t, unittest.TestSuite) else [name_of(t)])]


def run(rank: int, size: int, init_method: str, names: list[str]) -> None:
    if init_method:
        INIT.update(init_method=init_method, rank=rank, world_size=size)
    module, loader = sys.modules[__name__], unittest.defaultTestLoader
    suite = loader.loadTestsFromNames(names, module) if names else loader.loadTestsFromModule(module)
    ran = names_of(suite)
    result = unittest.TextTestRunner(verbosity=2 if rank == 0 else 1).run(suite)
    size = dist.get_world_size()
    dist.destroy_process_group()
    if not result.wasSuccessful():
        sys.exit(1)
    if rank == 0:
        skipped = {name_of(test): why for test, why in result.skipped}
        for name in ran:
            print(f"skipped {name}: {skipped[name]}" if name in skipped else f"ran {name}")
        print(f"{size} ranks: {result.testsRun - len(result.skipped)} tests passed", flush=True)


if __name__ == "__main__":
    run(int(os.environ["RANK"]), 0, "", sys.argv[1:])
