"""Tests gohvd.numpy at 1, 2 and 3 ranks. numpy computes the expected results."""

from __future__ import annotations

import concurrent.futures
import faulthandler
import importlib.util
import os
import random
import re
import sys
import unittest
import weakref
from collections.abc import Callable
from unittest import mock

import numpy as np

import gohvd
import gohvd.numpy as hvd
import programs
from gohvd import _engine, _library, elastic
from gohvd.process_sets import get_process_set_ids_and_ranks

INTS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
FLOATS = ["float16", "float32", "float64"]
SHAPES = [(), (1,), (0,), (17,), (3, 4), (0, 3), (2, 3, 5), (100000,)]


def sample(rank: int, shape, dtype: str) -> np.ndarray:
    """Returns an array of small integers that differ between ranks. Sums and products of the arrays of three ranks are
    exact in every type.
    """
    return (np.arange(int(np.prod(shape))) % 3 + rank + 1).reshape(shape).astype(dtype)


class Numpy(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        hvd.init()
        cls.rank, cls.size = hvd.rank(), hvd.size()

    def setUp(self) -> None:
        faulthandler.dump_traceback_later(100, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)

    def equal(self, got: np.ndarray, want: np.ndarray, message: str = "") -> None:
        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape), message)
        self.assertTrue(np.array_equal(got, want), f"{message} got {got}, want {want}")

    def test_allreduce(self) -> None:
        cases = [(dtype, (3, 4), hvd.Sum, np.add) for dtype in INTS + FLOATS]
        cases += [("float32", shape, hvd.Sum, np.add) for shape in SHAPES]
        others = ((hvd.Min, np.minimum), (hvd.Max, np.maximum), (hvd.Product, np.multiply))
        cases += [("int64", (3, 4), op, f) for op, f in others]
        for dtype, shape, op, f in cases:
            every = np.stack([sample(r, shape, dtype) for r in range(self.size)])
            x = sample(self.rank, shape, dtype)
            self.equal(hvd.allreduce(x, op=op), f.reduce(every, dtype=dtype), f"{dtype} {shape} {op}")
            self.equal(x, sample(self.rank, shape, dtype), "the argument")

    def test_average_and_factors(self) -> None:
        x = np.array([2.0, 4.0], dtype=np.float32) * (self.rank + 1)
        mean = (self.size + 1) / 2
        self.equal(hvd.allreduce(x), np.array([2 * mean, 4 * mean], dtype=np.float32))
        got = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        self.equal(got, np.array([4 * mean, 8 * mean], dtype=np.float32) * self.size)
        for dtype in ("float16", "float32", "float64", "int32"):
            for factors in ({"prescale_factor": 0.0}, {"postscale_factor": 0.0}):
                got = hvd.allreduce(np.array([7], dtype), op=hvd.Sum, **factors)
                self.equal(got, np.array([0], dtype), f"{dtype} {factors}")
        self.equal(hvd.allreduce(np.array([3.0]), op=hvd.AverageActive), np.array([3.0]))

    def test_bool(self) -> None:
        x = np.array([True, self.rank == 0, False])
        self.equal(hvd.allreduce(x, op=hvd.Max), np.array([True, True, False]))
        self.equal(hvd.allreduce(x, op=hvd.Min), np.array([True, self.size == 1, False]))
        self.equal(hvd.allgather(x[:1]), np.array([True] * self.size))
        with self.assertRaisesRegex(ValueError, "bool"):
            hvd.allreduce(x, op=hvd.Sum)

    def test_types_that_are_not(self) -> None:
        for x in (np.zeros(2, np.complex64), np.zeros(2, np.uint32), np.array(["a"]), np.zeros(2, ">f4")):
            with self.assertRaisesRegex(ValueError, "are not supported"):
                hvd.allreduce(x)
        # The fake type has the same name as bfloat16 of the package ml_dtypes.
        fake = type("dtype", (), {"name": "bfloat16", "isnative": True, "kind": "V", "itemsize": 2})()
        with self.assertRaisesRegex(ValueError, "bfloat16.*gohvd.torch"):
            hvd._numpy.code(fake)
        with self.assertRaises(ValueError):
            hvd.allreduce(np.zeros(2), op=9)

    def test_out(self) -> None:
        for op in (hvd.Sum, hvd.Average):
            x = np.full((2, 3), float(self.rank))
            want = hvd.allreduce(x, op=op)
            out = np.zeros((2, 3))
            self.assertIs(hvd.allreduce(x, op=op, out=out), out)
            self.equal(out, want)
            self.assertIs(hvd.allreduce(x, op=op, out=x), x)
            self.equal(x, want)
        x = np.full(4, self.rank)
        out = np.zeros(4, x.dtype)
        hvd.broadcast(x, self.size - 1, out=out)
        self.equal(out, np.full(4, self.size - 1))
        for bad in (np.zeros(3, x.dtype), np.zeros(4, np.float16)):
            with self.assertRaisesRegex(ValueError, "out is"):
                hvd.allreduce(x, out=bad)
        with self.assertRaisesRegex(ValueError, "out has 2 arrays, want 1"):
            hvd.grouped_allreduce([x], out=[x, x])

    def test_the_same_name_again(self) -> None:
        """Operations with one name, in place and not, on arrays that are other ones or have changed."""

        def check(x: np.ndarray, what: str) -> None:
            with self.subTest(what):
                x[...] = self.rank
                self.assertIs(hvd.allreduce(x, op=hvd.Sum, name="again", out=x), x)
                self.equal(x, np.full(x.shape, sum(range(self.size)), x.dtype))
                handle = hvd.allreduce_async(x, op=hvd.Max, name="again", out=x)
                self.assertIs(handle.wait(), x)
                self.equal(x, np.full(x.shape, sum(range(self.size)), x.dtype))
                x[...] = self.rank
                results = [hvd.allreduce(x, op=hvd.Sum, name="again") for _ in range(2)]
                self.equal(x, np.full(x.shape, self.rank, x.dtype))
                for i, result in enumerate(results):
                    self.equal(result, np.full(x.shape, sum(range(self.size)), x.dtype))
                    self.assertFalse(np.shares_memory(result, [x, results[0]][i]))

        x = np.zeros(6)
        for what in ("first", "second"):
            check(x, what)
        check(np.zeros(6), "another array")
        x.shape = 2, 3
        check(x, "another shape")
        x.dtype = np.int64
        check(x, "another type")
        x.resize((2, 3000), refcheck=False)
        check(x, "another size and address")
        x.resize((2, 3), refcheck=False)
        check(x, "a smaller size")
        check(np.zeros((3, 2), np.int64).T, "another order")
        whole = np.zeros((2, 6), np.int64)
        check(whole[:, ::2], "with gaps")
        self.equal(whole[:, 1::2], np.zeros((2, 3), np.int64))
        check(np.zeros(49, np.uint8)[1:].view(np.int64).reshape(2, 3), "not aligned")
        check(np.zeros((2, 3), np.int64).view(type("Kind", (np.ndarray,), {})), "a subclass")
        x.flags.writeable = False
        with self.assertRaisesRegex(ValueError, "writable"):
            hvd.allreduce(x, op=hvd.Sum, name="again", out=x)

    def test_arrays_in_flight(self) -> None:
        """An array lives until its operation is done, and not longer."""
        for name in ("kept", None):
            x = np.full(5, 2.0)
            alive = weakref.ref(x)
            handle = hvd.allreduce_async(x, op=hvd.Sum, name=name, out=x)
            del x
            self.assertIsNotNone(alive())
            self.equal(handle.wait(), np.full(5, 2.0 * self.size))
            del handle
            self.assertIsNone(alive())
        for _ in range(2):
            x = np.ones(5)
            alive = weakref.ref(x)
            hvd.allreduce(x, op=hvd.Sum, name="dropped", out=x)
            if self.rank > 0:
                hvd.barrier()
            hvd.allreduce_async(x, op=hvd.Sum, name="dropped", out=x)
            del x
            if self.rank == 0:
                self.assertIsNotNone(alive())
                hvd.barrier()
            hvd.barrier()

    def test_a_set_that_is_registered_again(self) -> None:
        x = np.ones(2)
        one = hvd.ProcessSet([0])
        for members in ([0], [self.size - 1], [0]):
            one.ranks = members
            if self.size == 1:
                return
            hvd.add_process_set(one)
            if one.included():
                x[...] = 1
                for _ in range(2):
                    hvd.allreduce(x, op=hvd.Sum, name="one", process_set=one, out=x)
                self.equal(x, np.ones(2))
            self.assertTrue(hvd.remove_process_set(one))
            with self.assertRaisesRegex(ValueError, "has not been registered"):
                hvd.allreduce(x, op=hvd.Sum, name="one", process_set=one, out=x)

    def test_arrays_that_are_not_contiguous(self) -> None:
        x = np.arange(12.0).reshape(3, 4)[:, ::2]
        self.equal(hvd.allreduce(x, op=hvd.Sum), np.ascontiguousarray(x) * self.size)
        self.equal(hvd.allreduce(x.T, op=hvd.Sum), np.ascontiguousarray(x.T) * self.size)
        out = np.zeros((4, 3)).T
        hvd.allreduce(np.ones((3, 4)), op=hvd.Sum, out=out)
        self.equal(out, np.full((3, 4), float(self.size)))

    def test_unnamed_in_flight(self) -> None:
        """Several unnamed operations with different values are in flight at the same time. Each gets its own result.
        Repeating this gives the right results again.
        """
        for turn in range(3):
            handles = [hvd.allreduce_async(np.full(2, float(turn + i)), op=hvd.Sum) for i in range(10)]
            for i, h in enumerate(handles):
                self.equal(h.wait(), np.full(2, float((turn + i) * self.size)))

    def interrupted(self, call: Callable[[], object], module: object, wait: str) -> None:
        """Makes a call at rank 0, in which rank 0 waits for the other ranks. An exception ends the wait, as one of a signal
        handler would: the function wait of the module raises it. The other ranks go on afterwards.
        """
        if self.size == 1:
            return
        if self.rank > 0:
            hvd.recv(np.zeros(1), 0)
            return
        with mock.patch.object(module, wait, side_effect=TimeoutError), self.assertRaises(TimeoutError):
            call()
        for r in range(1, self.size):
            hvd.send(np.zeros(1), r)

    def test_interrupted(self) -> None:
        """A rank whose unnamed operation was interrupted may begin the next one."""
        self.interrupted(lambda: hvd.allreduce([1.0], op=hvd.Sum), _engine.Call, "settle")
        if self.rank > 0:
            hvd.allreduce([1.0], op=hvd.Sum)
        self.equal(hvd.allreduce([2.0], op=hvd.Sum), np.array([2.0 * self.size]))

    def test_interrupted_vote(self) -> None:
        """A rank whose commit was interrupted can train in the next job."""

        def train(state: elastic.ObjectState, again: bool) -> None:
            if not again:
                self.interrupted(state.commit, _library, "wait")
                raise KeyError("this training ends")
            state.commit()

        state = elastic.ObjectState(lambda value, root_rank=0: value, hvd.rank, step=0)
        with self.assertRaisesRegex(KeyError, "this training ends"):
            elastic.run(train)(state, False)
        hvd.shutdown()
        hvd.init()
        elastic.run(train)(state, True)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not here")
    def test_with_torch(self) -> None:
        """gohvd.numpy and gohvd.torch use the same name in turn. Both get right results."""
        import torch

        import gohvd.torch

        for _ in range(3):
            self.equal(hvd.allreduce(np.ones(3), op=hvd.Sum, name="both"), np.full(3, float(self.size)))
            got = gohvd.torch.allreduce(torch.ones(3, dtype=torch.float64), op=hvd.Sum, name="both")
            self.equal(got.numpy(), np.full(3, float(self.size)))

    def test_result_not_taken(self) -> None:
        """The program has not taken the result of an operation when it runs another operation with the same name. The
        second operation does not overwrite the result of the first.
        """
        for place in ("ordinary", "arena"):
            first = hvd.allreduce_async(np.full(3, 1.0), op=hvd.Sum, name=place)
            while not first.done():
                pass
            second = hvd.allreduce_async(np.full(3, 2.0), op=hvd.Sum, name=place)
            self.equal(second.wait(), np.full(3, 2.0 * self.size))
            self.equal(first.wait(), np.full(3, 1.0 * self.size))
            self.equal(first.wait(), np.full(3, 1.0 * self.size))

    def test_arena(self) -> None:
        x = hvd.alloc((4, 5), np.float32)
        self.equal(x, np.zeros((4, 5), np.float32))
        for i in range(5):
            x[:] = self.rank + i
            got = hvd.allreduce(x, op=hvd.Sum, name="arena", out=x)
            self.assertIs(got, x)
            want = np.full((4, 5), sum(range(self.size)) + i * self.size, np.float32)
            self.equal(x, want)
            # Without the argument out, the array itself keeps its values.
            self.equal(hvd.allreduce(x, op=hvd.Sum), want * self.size)
            self.equal(x, want)
            self.equal(hvd.allreduce(x[1:3], op=hvd.Max, out=x[1:3]), want[1:3])
            self.equal(hvd.allgather(x[:1]), np.concatenate([want[:1]] * self.size))
        block = gohvd.alloc(16)
        view = np.frombuffer(block.view, dtype=np.int64)
        view[:] = self.rank
        hvd.allreduce(view, op=hvd.Sum, out=view)
        self.equal(view, np.full(2, sum(range(self.size))))
        # The offset of this array is not a multiple of the element size.
        odd = np.frombuffer(gohvd.alloc(20).view[1:17], dtype=np.float64)
        odd[:] = 1
        self.equal(hvd.allreduce(odd, op=hvd.Sum, out=odd), np.full(2, float(self.size)))
        self.assertEqual(hvd.alloc(0).shape, (0,))
        self.assertEqual(hvd.alloc(np.int64(3)).shape, (3,))
        for shape in (-1, (-2, -3)):
            with self.assertRaisesRegex(ValueError, "want no negative dimension"):
                hvd.alloc(shape)

    def test_memory_is_given_back(self) -> None:
        """Memory of dropped arrays, and of results that the program has dropped or not taken, is used again."""
        def resident() -> int:
            with open("/proc/self/statm", encoding="ascii") as f:
                return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        for i in range(60):
            if i == 20:
                before = resident()
            x = hvd.alloc(1 << 20)
            x[:] = 1
            hvd.allreduce_async(x, op=hvd.Sum, name=f"gone{i}")
            hvd.allgather_async(x)
            self.assertEqual(len(hvd.allgather(x)), self.size << 20)
        # The 40 rounds use at least 12 MiB each.
        self.assertLess(resident() - before, 400 << 20)

    def test_allgather(self) -> None:
        for dtype in ("float16", "bool"):
            for rest in ((), (3, 2)):
                shape = (self.rank * 2,) + rest
                want = np.concatenate([sample(r, (r * 2,) + rest, dtype) for r in range(self.size)])
                self.equal(hvd.allgather(sample(self.rank, shape, dtype)), want, f"{dtype} {rest}")
        got = hvd.grouped_allgather([np.full(1, self.rank), np.full((2, 2), self.rank)], name="group")
        self.equal(got[0], np.arange(self.size))
        self.equal(got[1], np.repeat(np.arange(self.size), 4).reshape(-1, 2))

    def test_empty_results_again_and_again(self) -> None:
        # From the third call on, the operation goes through the ring.
        for _ in range(5):
            empty = np.empty((0, 6), np.float32)
            self.equal(hvd.allgather(empty), empty)
            self.equal(hvd.allgather(empty, name="empty"), empty)
            for got in hvd.grouped_allgather([empty, empty], name="both"):
                self.equal(got, empty)
            self.equal(hvd.allgather_async(empty).wait(), empty)

    def test_arrays_of_operations_without_a_wait(self) -> None:
        """The program drops an array and the handle of its operation without waiting. The memory of the array is not
        reused until the operation is done.
        """
        for i in range(20):
            if self.rank == 0:
                hvd.barrier()
            x = hvd.alloc(1 << 20)
            x[:] = 1
            hvd.allreduce_async(x, op=hvd.Sum, out=x)
            del x
            y = hvd.alloc(1 << 20)
            if self.rank != 0:
                hvd.barrier()
            hvd.barrier()
            self.assertEqual(float(np.abs(y).max()), 0.0)

    def test_broadcast(self) -> None:
        for dtype in ("int8", "float64"):
            for root in range(self.size):
                for shape in SHAPES:
                    self.equal(hvd.broadcast(sample(self.rank, shape, dtype), root), sample(root, shape, dtype))
        for root in (-1, self.size):
            with self.assertRaisesRegex(ValueError, "root rank"):
                hvd.broadcast(np.ones(1), root)

    def test_reduce(self) -> None:
        for dtype in ("int8", "float64"):
            for shape in ((), (0,), (3, 4)):
                every = np.stack([sample(r, shape, dtype) for r in range(self.size)])
                for root in range(self.size):
                    for x in (sample(self.rank, shape, dtype), hvd.alloc(shape, dtype)):
                        x[...] = sample(self.rank, shape, dtype)
                        got = hvd.reduce(x, root, op=hvd.Sum)
                        self.equal(x, sample(self.rank, shape, dtype), "the argument")
                        if self.rank == root:
                            self.equal(got, np.add.reduce(every, dtype=dtype), f"{dtype} {shape}")
                        else:
                            self.assertIsNone(got)
        x = np.full(3, self.rank + 1.0)
        handle = hvd.reduce_async(x, 0, name="in place", postscale_factor=4.0, out=x)
        self.assertIs(handle.wait(), x if self.rank == 0 else None)
        self.equal(x, np.full(3, (self.size + 1) * 2.0 if self.rank == 0 else self.rank + 1.0))
        with self.assertRaisesRegex(ValueError, "reduce: root rank 3 is not in process set"):
            hvd.reduce(x, 3)

    def test_gather(self) -> None:
        for dtype in ("int8", "float64"):
            for root in range(self.size):
                every = [sample(r, (2 * r + 1, 3), dtype) for r in range(self.size)]
                got = hvd.gather(every[self.rank], root)
                if self.rank == root:
                    self.equal(got, np.concatenate(every))
                else:
                    self.assertIsNone(got)
        self.assertEqual(hvd.gather(np.empty((2, 0)), 0) is not None, self.rank == 0)

    def test_scatter(self) -> None:
        for dtype in ("int8", "float64"):
            for root in range(self.size):
                for _ in range(2):
                    x = sample(root, (self.size * 2, 3), dtype)
                    mine = x if self.rank == root else np.empty(0, dtype)
                    self.equal(hvd.scatter(mine, root, name="even"), x[2 * self.rank :][:2])
                    splits = list(range(self.size)) if self.rank == root else None
                    first = self.rank * (self.rank - 1) // 2
                    self.equal(hvd.scatter(mine, root, splits, name="uneven"), x[first:][: self.rank])
        self.assertEqual(hvd.scatter(np.empty((3, 0)), 0, [3] + [0] * (self.size - 1)).shape[1:], (0,))
        if self.rank == 0:
            with self.assertRaisesRegex(ValueError, "scatter: got splits"):
                hvd.scatter(np.ones(1), 0, [2] * self.size)

    def test_messages(self) -> None:
        """Arrays go around a ring of ranks, from any memory to any memory, from a known rank and from any rank."""
        if self.size == 1:
            self.skipTest("needs another rank")
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for dtype in ("int8", "float16", "float64"):
            for shape in SHAPES:
                for src in (before, None):
                    for make in (lambda: np.empty(shape, dtype), lambda: hvd.alloc(shape, dtype)):
                        x, got = make(), make()
                        x[...] = sample(self.rank, shape, dtype)
                        handle = hvd.recv_async(got, src, tag=7)
                        hvd.send(x, after, tag=7)
                        self.assertEqual(handle.wait(), before)
                        self.equal(got, sample(before, shape, dtype), f"{dtype} {shape}")
        view = np.zeros((4, 6))[:, ::2]
        sent = hvd.send_async(np.full((4, 3), self.rank), before)
        with self.assertRaisesRegex(hvd.HorovodInternalError, "got 12 elements of int64 from rank"):
            hvd.recv(view)
        sent.wait()
        sent = hvd.send_async(np.full((4, 3), self.rank + 0.5), before)
        self.assertEqual(hvd.recv(view, after), after)
        self.equal(view, np.full((4, 3), after + 0.5))
        sent.wait()
        for call, what in (
            (lambda: hvd.send(view, self.rank), "send: got rank"),
            (lambda: hvd.recv(view, self.size), "recv: got rank"),
            (lambda: hvd.recv(view, before, -1), "recv: got tag -1"),
            (lambda: hvd.recv(view, before, timeout=0), "recv: got a timeout of 0 s"),
            (lambda: hvd.send(view, before, timeout=-1), "send: got a timeout of -1 s"),
            (lambda: hvd.add_process_set([self.rank], timeout=0), "add_process_set: got a timeout of 0 s"),
        ):
            with self.assertRaisesRegex(ValueError, what):
                call()
        hvd.barrier()

    def test_timeouts(self) -> None:
        """Rank 1 begins operations with a timeout in which rank 0 does not take part. Each ends the job with an error
        that names rank 0. Then the program joins a new job.
        """
        if not programs.alone:
            self.skipTest("runs at one rank")
        script = """
            import numpy as np
            import gohvd.numpy as hvd
            x = np.zeros(100000)
            for call in (
                lambda: hvd.recv(x, 0, timeout=0.5),
                lambda: hvd.send(x, 0, timeout=0.5),
                lambda: hvd.add_process_set([1], timeout=0.5),
                lambda: hvd.remove_process_set(added, timeout=0.5),
            ):
                hvd.init()
                added = hvd.add_process_set([0])
                try:
                    call() if hvd.rank() == 1 else hvd.barrier()
                except hvd.HorovodInternalError as e:
                    print(hvd.rank(), e)
                hvd.shutdown()
            """
        out = programs.run(script, interpreter=(os.environ["HVD_RUN"], "-np", "2", sys.executable))
        self.assertEqual(out.returncode, 0, out.stdout + out.stderr)
        for what in ("recv from", "send to", "add process set", "remove process set"):
            found = re.findall(f"rank 0 failed: {what} .* timed out after 0.5s at rank 1", out.stdout)
            self.assertEqual(len(found), 2, out.stdout)

    def test_alltoall(self) -> None:
        got, received = hvd.alltoall(np.arange(2 * self.size) + 100 * self.rank)
        self.equal(got, np.concatenate([np.arange(2) + 2 * self.rank + 100 * r for r in range(self.size)]))
        self.assertEqual(received, [2] * self.size)
        # Each rank sends i rows to rank i and has one row that it does not send.
        rows = sum(range(self.size)) + 1
        got, received = hvd.alltoall(np.full((rows, 2), self.rank), list(range(self.size)))
        self.equal(got, np.repeat(np.arange(self.size), self.rank * 2).reshape(-1, 2))
        self.assertEqual(received, [self.rank] * self.size)
        for splits in ([1] * (self.size + 1), [-1] + [0] * (self.size - 1), [2] * self.size):
            with self.assertRaisesRegex(ValueError, "splits"):
                hvd.alltoall(np.ones(self.size), splits)
        if self.size > 1:
            with self.assertRaisesRegex(ValueError, "rows"):
                hvd.alltoall(np.ones(self.size + 1))

    def test_reducescatter(self) -> None:
        for rows in (0, 1, self.size, 2 * self.size + 1):
            for op, f in ((hvd.Sum, self.size), (hvd.Average, 1)):
                x = np.arange(rows * 2.0).reshape(rows, 2)
                begin = sum(rows // self.size + (r < rows % self.size) for r in range(self.rank))
                mine = rows // self.size + (self.rank < rows % self.size)
                self.equal(hvd.reducescatter(x, op=op), x[begin : begin + mine] * f, f"{rows}")
        got = hvd.grouped_reducescatter([np.ones(self.size), np.ones((self.size, 2))], op=hvd.Max)
        self.equal(got[0], np.ones(1))
        self.equal(got[1], np.ones((1, 2)))

    def test_groups_of_several_types(self) -> None:
        for dtypes in ((np.float32, np.int64, np.float16), (np.float32, np.float64, np.int16)) * 2:
            xs = [np.full(3, self.rank + i, d) for i, d in enumerate(dtypes)]
            wants = [np.full(3, sum(range(self.size)) + i * self.size, d) for i, d in enumerate(dtypes)]
            for turn in range(3):
                for got, want in zip(hvd.grouped_allreduce(xs, op=hvd.Sum, name="types"), wants):
                    self.equal(got, want, f"turn {turn} of {dtypes}")
                for got, d in zip(hvd.grouped_allgather(xs, name="types"), dtypes):
                    self.assertEqual((got.dtype, len(got)), (d, 3 * self.size))
                for got, want, x in zip(hvd.grouped_reducescatter(xs, op=hvd.Sum, name="types"), wants, xs):
                    self.equal(got, want[: len(got)])
            out = [np.zeros_like(x) for x in xs]
            handle = hvd.grouped_allreduce_async(xs, op=hvd.Sum, name="types", out=out)
            for got, o, want in zip(handle.wait(), out, wants):
                self.assertIs(got, o)
                self.equal(got, want)
            with self.assertRaisesRegex(ValueError, "want a writable"):
                hvd.grouped_allreduce(xs, out=out[::-1])
            hvd.grouped_allreduce(xs, op=hvd.Sum, name="types", out=xs)
            for x, want in zip(xs, wants):
                self.equal(x, want)
        # The second array is in the arena. Its address is not aligned for its own type, but is aligned for the type of
        # the first array.
        view = gohvd.alloc(40).view
        first, second = np.frombuffer(view[:4], np.float32), np.frombuffer(view[4:36], np.int64)
        first[:], second[:] = 0.5, self.rank
        got = hvd.grouped_allreduce([first, second], op=hvd.Sum, name="arena")
        self.equal(got[0], np.full(1, 0.5 * self.size, np.float32))
        self.equal(got[1], np.full(4, sum(range(self.size))))
        if self.size > 1:
            last = self.rank == self.size - 1
            with self.assertRaisesRegex(hvd.HorovodInternalError, "grouped_allreduce.types.*data types of tensor 2 of 2"):
                hvd.grouped_allreduce([np.ones(2), np.ones(2, np.int64 if last else np.float64)], name="types")

    def test_process_sets(self) -> None:
        alone = hvd.ProcessSet([self.size - 1])
        self.assertEqual((alone.size(), alone.rank(), alone.included(), alone.process_set_id), (None,) * 4)
        with self.assertRaisesRegex(ValueError, "not been registered"):
            hvd.allreduce(np.ones(1), process_set=alone)
        if self.size == 1:
            return
        hvd.add_process_set(alone)
        member = self.rank == self.size - 1
        self.assertEqual((alone.size(), alone.rank(), alone.included()), (1, 0 if member else None, member))
        if member:
            self.equal(hvd.allreduce(np.full(2, 3.0), op=hvd.Sum, process_set=alone), np.full(2, 3.0))
            self.equal(hvd.broadcast(np.ones(1), self.rank, process_set=alone), np.ones(1))
            with self.assertRaisesRegex(ValueError, "root rank 0"):
                hvd.broadcast(np.ones(1), 0, process_set=alone)
            hvd.barrier(alone)
        else:
            with self.assertRaisesRegex(ValueError, "not a member"):
                hvd.allreduce(np.ones(1), process_set=alone)
        # Each process set counts its unnamed operations by itself. So the operations in the other set do not change the
        # names here.
        self.equal(hvd.allreduce(np.ones(1), op=hvd.Sum), np.full(1, float(self.size)))
        with self.assertRaisesRegex(ValueError, "already registered"):
            hvd.add_process_set([self.size - 1])
        with self.assertRaisesRegex(ValueError, "already registered"):
            hvd.add_process_set(alone)
        self.assertTrue(hvd.remove_process_set(alone))
        self.assertIsNone(alone.process_set_id)
        self.assertFalse(hvd.remove_process_set(alone))
        self.assertFalse(hvd.remove_process_set(hvd.global_process_set))

    def test_sets_that_only_members_add(self) -> None:
        groups = {"a": range(self.size), "b": range(self.size)}
        groups.update({f"pair {r}": {r, (r + 1) % self.size} for r in range(self.size)})
        mine = [(name, sorted(g)) for name, g in groups.items() if self.rank in g]
        random.shuffle(mine)

        def use(name: str, ranks: "list[int]") -> int:
            s = hvd.add_process_set(ranks, members_only=True, name=name)
            self.assertEqual((s.ranks, s.rank(), s.members_only), (ranks, ranks.index(self.rank), True))
            self.equal(hvd.allreduce(np.ones(2), op=hvd.Sum, name="x", process_set=s), np.full(2, float(len(ranks))))
            number = s.process_set_id
            self.assertEqual(get_process_set_ids_and_ranks()[number], ranks)
            self.assertTrue(hvd.remove_process_set(s))
            return number

        with concurrent.futures.ThreadPoolExecutor(len(mine)) as pool:
            numbers = list(pool.map(lambda m: use(*m), mine))
        self.assertEqual(len(set(numbers)), len(mine))
        # Without a name, sets with the same members can be added one after the other, and exist at the same time.
        sets = [hvd.add_process_set([self.rank], members_only=True) for _ in range(2)]
        self.assertNotEqual(sets[0].process_set_id, sets[1].process_set_id)
        for s in sets:
            self.assertTrue(hvd.remove_process_set(s))
        if self.size > 1:
            with self.assertRaisesRegex(ValueError, "is not among the ranks"):
                hvd.add_process_set([(self.rank + 1) % self.size], members_only=True)

    def test_sets_of_init(self) -> None:
        hvd.shutdown()
        sets = [hvd.ProcessSet([0])] if self.size > 1 else []
        hvd.init(process_sets=sets)
        again = [hvd.ProcessSet([0])] if self.size > 1 else []
        hvd.init(process_sets=again)
        for s in sets + again:
            self.assertEqual((s.process_set_id, s.included()), (1, self.rank == 0))
        with self.assertRaisesRegex(ValueError, "the job was started without it"):
            hvd.init(process_sets=[[0, self.size]])
        hvd.barrier()
        hvd.shutdown()
        for s in sets:
            self.assertIsNone(s.process_set_id)
        hvd.init()

    def test_sets_of_several_jobs(self) -> None:
        """A process set of a later job has the same number as a set of an earlier job. Operations use the members of
        the later job.
        """
        if self.size < 3:
            self.skipTest("two sets of different sizes need three ranks")
        for members in ([0], [0, 1]):
            hvd.shutdown()
            s = hvd.ProcessSet(members)
            hvd.init(process_sets=[s])
            if s.included():
                got = hvd.reducescatter(np.ones((4, 2)), op=hvd.Sum, name="rows", process_set=s)
                self.equal(got, np.full((4 // len(members), 2), float(len(members))))
            hvd.barrier()
        hvd.shutdown()
        hvd.init()

    def test_join(self) -> None:
        for turn in range(2):
            # The operations have no names, and the ranks run different numbers of them. The join sets the counts of all
            # ranks to the same value.
            for step in range(self.rank + 1):
                got = hvd.allreduce_async(np.ones(2), op=hvd.Sum).wait()
                self.equal(got, np.full(2, float(self.size - step)))
            self.assertEqual(hvd.join(), self.size - 1, f"turn {turn}")
        self.equal(hvd.allreduce_async(np.ones(2), op=hvd.Sum).wait(), np.full(2, float(self.size)))

    def test_mismatch(self) -> None:
        if self.size == 1:
            self.skipTest("needs another rank")
        for x in (np.ones(self.rank + 1), np.ones(1, "float32" if self.rank else "float64")):
            with self.assertRaises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(x, name="mismatch")
            self.assertEqual(type(caught.exception).__name__, "MismatchError")
        self.equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(self.size)))


if __name__ == "__main__":
    unittest.main()
