"""Tests of operations on memory of CUDA devices: hvdrun -np 2 python3 device_ranks.py [TEST...].

The tests call the engine with arrays of their own, because torch makes tensors on devices only with a GPU. HVD_CUDART_LIBRARY
must be the file of the CUDA runtime, which may be the stand-in (internal/testcuda), and HOROVOD_GPU_OPERATIONS must be nccl.
If there are fewer devices than ranks, the ranks share them. With DEFAULT_STREAM=1 the current stream is the default one, as
in a program with torch that makes no streams, and otherwise one of the test.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import devices

from gohvd import _engine, _library, elastic
from gohvd._library import ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST, GATHER, RECV, REDUCE, REDUCESCATTER, SCATTER, SEND
from gohvd.basics import init, rank, shutdown, size
from gohvd.exceptions import HorovodInternalError, PeerError
from gohvd.process_sets import global_process_set

_LIMIT_SECONDS = 300

FLOAT32, INT32, INT16 = (9, 4), (5, 4), (4, 2)
_FORMATS = {FLOAT32: "f", INT32: "i", INT16: "h"}

_runtime = ctypes.CDLL(os.environ["HVD_CUDART_LIBRARY"])
_TO_ANY = 4  # cudaMemcpyDefault


def cuda(name: str, *args: Any) -> None:
    code = getattr(_runtime, name)(*args)
    if code:
        raise AssertionError(f"{name} returned {code}")


def _device() -> int:
    count = ctypes.c_int()
    cuda("cudaGetDeviceCount", ctypes.byref(count))
    if "HOROVOD_RANK" not in os.environ:  # in an elastic job
        init()
        return rank() % count.value
    return devices.share(count.value)


DEVICE = _device()
cuda("cudaSetDevice", DEVICE)


def new_stream() -> int:
    stream = ctypes.c_void_p()
    cuda("cudaStreamCreateWithFlags", ctypes.byref(stream), 1)
    assert stream.value is not None
    return stream.value


class Allocation:
    """Memory of the device, which is freed by free or with the object."""

    def __init__(self, nbytes: int) -> None:
        address = ctypes.c_void_p()
        cuda("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        self.address = address.value or 0

    def free(self) -> None:
        if self.address:
            cuda("cudaFree", ctypes.c_void_p(self.address))
            self.address = 0

    __del__ = free


@contextlib.contextmanager
def held_stream(holds: bool) -> Iterator[tuple[int, str]]:
    """Makes a stream that, if holds is true, does nothing before the file exists whose path is the second value, or before
    the with statement ends, because CUDA waits for the stream when memory is freed.
    """
    with tempfile.TemporaryDirectory() as folder:
        gate = os.path.join(folder, "open")
        with unittest.mock.patch.dict(os.environ, {"STANDIN_CUDA_HOLD": gate} if holds else {}):
            stream = new_stream()
        try:
            yield stream, gate
        finally:
            open(gate, "w").close()
            cuda("cudaStreamSynchronize", ctypes.c_void_p(stream))


class Array:
    """Numbers on the device, in an allocation, or in memory of the host if view is given. If contiguous is false, the
    engine must not use the memory itself.
    """

    def __init__(
        self, shape: Sequence[int], code: _engine.Code = FLOAT32, at: tuple[Allocation, int] | None = None,
        view: memoryview | None = None, contiguous: bool = True,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.view, self.contiguous = tuple(shape), code, view, contiguous
        self.nbytes = math.prod(self.shape) * code[1]
        self.place = at if at is not None or view is not None else (Allocation(self.nbytes), 0)

    @property
    def address(self) -> int:
        if self.view is not None:
            return _address_of(self.view)
        assert self.place is not None
        return self.place[0].address + self.place[1] if self.nbytes else 0  # as with torch

    def write(self, numbers: Sequence[float]) -> Array:
        """Writes numbers on the current stream. The copy is slow with the stand-in, so it goes on when this returns."""
        data = array.array(_FORMATS[self.dtype], numbers)
        assert len(data) * data.itemsize == self.nbytes
        self._copy(self.address, data.buffer_info()[0])
        self._source = data  # it must stay until the copy is done
        return self

    def read(self) -> list[float]:
        data = array.array(_FORMATS[self.dtype], bytes(self.nbytes))
        self._copy(data.buffer_info()[0], self.address)
        cuda("cudaStreamSynchronize", ctypes.c_void_p(fw.current))
        return list(data)

    def _copy(self, to: int, source: int) -> None:
        if self.nbytes:
            copy(to, source, self.nbytes)


def copy(to: int, source: int, nbytes: int) -> None:
    cuda(
        "cudaMemcpyAsync", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), _TO_ANY,
        ctypes.c_void_p(fw.current),
    )  # fmt: skip


class Devices(_engine.Framework[Array]):
    """The functions of the engine for arrays of this file."""

    has_devices = True

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.current = 0 if os.environ.get("DEFAULT_STREAM") else new_stream()
        self.followed: list[int] = []
        self.held: list[tuple[Array, int]] = []

    @property
    def current(self) -> int:
        """The current stream of this thread. It is the default stream in a thread that has not set it, as with torch."""
        return getattr(self._of_thread, "stream", 0)

    @current.setter
    def current(self, stream: int) -> None:
        self._of_thread.stream = stream

    def operands(self, op: Any, x: Any, target: Any) -> tuple[Any, Any]:
        return x, target  # begin gives lists, also if an operation is not grouped

    def code(self, dtype: _engine.Code) -> _engine.Code:
        return dtype

    def plain(self, x: Any) -> int:
        return 0

    def device(self, x: Array) -> int:
        return DEVICE

    def address(self, x: Array) -> int:
        return x.address if x.contiguous else 0

    def empty(self, shape: tuple[int, ...], like: Array, in_memory: bool = False) -> Array:
        nbytes = math.prod(shape) * like.dtype[1]
        made = Array(shape, like.dtype, view=memoryview(bytearray(max(nbytes, 1))) if in_memory else None)
        if not in_memory and nbytes:  # earlier work on the stream may use the memory, as with torch's allocator
            cuda("cudaMemsetAsync", ctypes.c_void_p(made.address), 7, ctypes.c_size_t(nbytes), ctypes.c_void_p(self.current))
        return made

    def stream(self, device: int) -> int:
        return self.current

    def handle(self, stream: int) -> int:
        return stream

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def follow(self, stream: int) -> None:
        self.followed.append(stream)
        if stream != self.current:
            cuda("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def result_stream(self, device: int) -> int:
        return RESULTS

    def hold(self, x: Array, stream: int) -> None:
        self.held.append((x, stream))

    def copy(self, target: Array, source: Array) -> None:
        copy(target.address, source.address, source.nbytes)
        cuda("cudaStreamSynchronize", ctypes.c_void_p(self.current))

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return Array(shape, x.dtype, at=x.place)

    def wrap(self, memory: Any, shape: tuple[int, ...], like: Array) -> Array:
        made = Array(shape, like.dtype)
        if made.nbytes:
            self.copy(made, Array(shape, like.dtype, view=memoryview(memory)))
        return made


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


fw = Devices()
RESULTS = new_stream()


def begin(
    kind: int, arrays: Sequence[Array], name: str | None, targets: Sequence[Array] | None = None,
    outputs: tuple[tuple[int, ...], ...] | None = None, **kw: Any,
) -> _engine.Call[Array]:  # fmt: skip
    how = _engine.operation(kind, **kw)
    return _engine.engine.call(fw, how, name, global_process_set, arrays, targets, outputs=outputs)


def run(kind: int, x: Array, name: str, **kw: Any) -> list[float]:
    return begin(kind, [x], name, **kw).results()[0].read()


class InTheJob(unittest.TestCase):
    def setUp(self) -> None:
        faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)
        init()
        _engine.engine._warned.clear()

    @contextlib.contextmanager
    def warned(self, *texts: str) -> Iterator[None]:
        """Asserts that the block shows exactly one warning for each text, which contains the text."""
        with warnings.catch_warnings(record=True) as got:
            warnings.simplefilter("always")
            yield
        shown = [str(w.message) for w in got]
        self.assertEqual(len(shown), len(texts), shown)
        for text, message in zip(texts, shown):
            self.assertIn(text, message)


class OnDevice(InTheJob):
    """Operations that run on the device, without a warning."""

    def setUp(self) -> None:
        super().setUp()
        none = self.warned()
        none.__enter__()
        self.addCleanup(none.__exit__, None, None, None)


class Values(OnDevice):
    """The results of operations."""

    def test_offsets(self) -> None:
        """Arrays in one allocation, at different offsets."""
        block = Allocation(1 << 16)
        x, y = Array([3], at=(block, 4096)), Array([2], at=(block, 256))
        for i in range(3):
            x.write([rank(), 2, i])
            y.write([1, rank()])
            a = begin(ALLREDUCE, [x], "x", reduction=_engine.Sum)
            b = begin(ALLREDUCE, [y], "y", reduction=_engine.Sum)
            n = size()
            self.assertEqual(a.results()[0].read(), [n * (n - 1) / 2, 2 * n, i * n])
            self.assertEqual(b.results()[0].read(), [n, n * (n - 1) / 2])
            self.assertEqual(x.read(), [rank(), 2, i])

    def test_in_place(self) -> None:
        xs = [Array([4], at=(Allocation(1 << 12), 64))]
        for i in range(10):
            xs[0].write([rank(), i, 1, 2])
            call = begin(ALLREDUCE, xs, "in place", targets=xs, reduction=_engine.Sum, prescale=0.5)
            self.assertIs(call.results()[0], xs[0])
            n = size()
            self.assertEqual(xs[0].read(), [n * (n - 1) / 4, n * i / 2, n / 2, n])

    def test_kinds(self) -> None:
        n = size()
        last = n - 1
        x = Array([2]).write([rank(), 7])
        self.assertEqual(run(BROADCAST, x, "b", root=last), [last, 7])
        xs = [x]
        begin(BROADCAST, xs, "b_", root=last, targets=xs).results()
        self.assertEqual(x.read(), [last, 7])
        x.write([rank(), 7])
        call = begin(REDUCE, [x], "r", root=0, reduction=_engine.Max)
        self.assertEqual([y.read() for y in call.results()], [[last, 7]] if rank() == 0 else [])
        rows = Array([n + 1, 2]).write([rank()] * (2 * n + 2))
        mine = 2 if rank() == 0 else 1
        call = begin(REDUCESCATTER, [rows], "rs", reduction=_engine.Sum)
        self.assertEqual(call.results()[0].shape, (mine, 2))
        self.assertEqual(call.results()[0].read(), [n * (n - 1) / 2] * (2 * mine))
        self.assertEqual(run(ALLREDUCE, Array([0]), "empty", reduction=_engine.Sum), [])
        self.assertEqual(run(BROADCAST, Array([0]), "empty", root=last), [])
        self.assertEqual(run(REDUCESCATTER, Array([1]).write([1]), "one row", reduction=_engine.Sum), [n][rank() :])

    def test_given_outputs(self) -> None:
        """The caller gives the outputs of an allgather and an alltoall. One overlaps the input, and one is not contiguous,
        so the engine copies the smaller of the two on the device.
        """
        n = size()
        x = Array([1, 2]).write([rank(), 5])
        want = [v for r in range(n) for v in (r, 5)]
        for out in (Array([n, 2]), Array([n, 2], contiguous=False)):
            got = begin(ALLGATHER, [x], "ag", targets=[out], outputs=((n, 2),)).results()
            self.assertIs(got[0], out)
            self.assertEqual(out.read(), want)
        block = Allocation(8 * n)
        mine = Array([1, 2], at=(block, 8 * rank())).write([rank(), 5])
        whole = Array([n, 2], at=(block, 0))
        begin(ALLGATHER, [mine], "ag in place", targets=[whole], outputs=((n, 2),)).results()
        self.assertEqual(whole.read(), want)
        parts = Array([n], INT32, contiguous=False).write([10 * rank() + r for r in range(n)])
        out = Array([n], INT32)
        call = begin(ALLTOALL, [parts], "a2a", targets=[out], outputs=((n,),))
        self.assertEqual(call.results()[0].read(), [10 * r + rank() for r in range(n)])
        self.assertEqual(call.received, [1] * n)
        splits = tuple([int(r == 0) for r in range(n)])
        out = Array([n if rank() == 0 else 0, 2])
        begin(ALLTOALL, [x], "to rank 0", targets=[out], splits=splits, outputs=(out.shape,)).results()
        self.assertEqual(out.read(), want if rank() == 0 else [])
        root = rank() == n - 1
        out = Array([n if root else 0, 2])
        begin(GATHER, [x], "g", targets=[out], outputs=(out.shape,), root=n - 1).results()
        self.assertEqual(out.read(), want if root else [])
        begin(SCATTER, [out], "s", targets=[x], outputs=((1, 2),), root=n - 1).results()
        self.assertEqual(x.read(), [rank(), 5])

    def test_known_shapes(self) -> None:
        """The caller knows the shapes of the results, and the engine makes the outputs. So they are not copied."""
        n = size()
        x = Array([rank() + 1, 2]).write([rank(), 5] * (rank() + 1))
        want = [v for r in range(n) for v in [r, 5] * (r + 1)]
        for i in range(2):
            call = begin(ALLGATHER, [x], "known", outputs=((n * (n + 1) // 2, 2),))
            self.assertEqual(call.results()[0].read(), want)
        ints = Array([1], INT32).write([rank()])
        group = begin(ALLGATHER, [x, ints], "known", grouped=True, outputs=((n * (n + 1) // 2, 2), (n,)))
        self.assertEqual([y.read() for y in group.results()], [want, list(range(n))])
        parts = Array([n + 1], INT32).write([10 * rank() + r for r in range(n + 1)])
        call = begin(ALLTOALL, [parts], "known", splits=(1,) * n, outputs=((n,),))
        self.assertEqual(call.results()[0].read(), [10 * r + rank() for r in range(n)])
        self.assertEqual(call.received, [1] * n)

    def test_unknown_sizes(self) -> None:
        """The other ranks determine the sizes of the results, which the framework allocates on the device when they are
        known.
        """
        n, last = size(), size() - 1
        for i in range(2):
            x = Array([rank() + 1, 2]).write([rank(), i] * (rank() + 1))
            want = [v for r in range(n) for v in [r, i] * (r + 1)]
            y = begin(ALLGATHER, [x], "unknown").results()[0]
            self.assertEqual((y.shape, y.read()), ((n * (n + 1) // 2, 2), want))
            ints = Array([1], INT32).write([rank()])
            nothing = begin(ALLGATHER, [x, ints, Array([0, 3])], "unknown", grouped=True).results()
            self.assertEqual([y.read() for y in nothing], [want, list(range(n)), []])
            self.assertEqual(nothing[2].shape, (0, 3))
            splits = tuple([1 + (r == rank()) for r in range(n)])
            call = begin(ALLTOALL, [Array([n + 1], INT32).write(list(range(n + 1)))], "unknown", splits=splits)
            mine = [[rank() + (r < rank())] if r != rank() else [rank(), rank() + 1] for r in range(n)]
            self.assertEqual(call.results()[0].read(), [v for block in mine for v in block])
            self.assertEqual(call.received, [1 + (r == rank()) for r in range(n)])
            y = begin(GATHER, [x], "unknown", root=last).results()[0]
            self.assertEqual((y.shape, y.read()), ((n * (n + 1) // 2, 2), want) if rank() == last else ((0, 2), []))
            splits = tuple(range(n)) if rank() == last else ()
            whole = Array([n * (n - 1) // 2], INT32).write(list(range(n * (n - 1) // 2)))
            y = begin(SCATTER, [whole], "unknown", splits=splits, root=last).results()[0]
            self.assertEqual(y.read(), list(range(rank() * (rank() - 1) // 2, rank() * (rank() + 1) // 2)))

    def test_allocation(self) -> None:
        """The library allocates a result in none of the program's threads, which wait perhaps with a lock or on another
        stream, and for the stream of the operation.
        """
        x = Array([1]).write([rank()])
        first, other, made, allocated = fw.current, new_stream(), fw.empty, []

        def empty(*args: Any) -> Array:
            allocated.append((threading.get_ident() == threading.main_thread().ident, fw.current))
            return made(*args)

        with unittest.mock.patch.object(fw, "empty", empty):
            call = begin(ALLGATHER, [x], "allocation")
            with fw.using(other):
                self.assertEqual(call.results()[0].read(), list(range(size())))
        self.assertEqual(allocated, [(False, first)])

    def test_capture(self) -> None:
        """A result is allocated while another stream is being captured. Then cudaMalloc fails in most threads."""
        x = Array([1]).write([rank()])
        x.read()
        with unittest.mock.patch.dict(os.environ, STANDIN_CUDA_CAPTURE="1"):
            captured = new_stream()
        try:
            y = begin(ALLGATHER, [x], "capture").results()[0]
            self.assertEqual(y.read(), list(range(size())))
        finally:
            cuda("cudaStreamDestroy", ctypes.c_void_p(captured))

    def test_later_capture(self) -> None:
        """The stream of an operation is being captured when the operation is launched."""
        x, stream, last = [Array([1]).write([rank()])], ctypes.c_void_p(fw.current or None), size() - 1
        x[0].read()
        if rank() < last:
            call = begin(ALLREDUCE, x, "captured", targets=x, reduction=_engine.Sum, launched=_engine.AT_LAUNCH)
            cuda("cudaStreamBeginCapture", stream, 2)
        _engine.engine.simple(BARRIER, global_process_set)
        if rank() == last:
            call = begin(ALLREDUCE, x, "captured", targets=x, reduction=_engine.Sum, launched=_engine.AT_LAUNCH)
        call.results()
        if rank() < last:
            cuda("cudaStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))
        self.assertEqual(x[0].read(), [size() * last / 2])

    def test_no_output(self) -> None:
        """Programs in C give neither an output nor a function that allocates it."""
        for kind, rows in (BROADCAST, 1), (ALLGATHER, 0 if rank() == 0 else 1):
            x, shape = Array([1]).write([rank()]), (ctypes.c_int64 * 1)(rows)
            t = _library.Tensor(
                input=x.address if rows and kind == ALLGATHER else None, dims=1, shape=ctypes.addressof(shape)
            )
            op = _library.Op(
                size=ctypes.sizeof(_library.Op), kind=kind, dtype=FLOAT32[0], num_tensors=1, tensors=ctypes.addressof(t),
                root=(rank() + 1) % size(), prescale=1, postscale=1, device=DEVICE, stream=fw.current or None,
            )  # fmt: skip
            status = _library.waiting.hvd_run(ctypes.addressof(op), -1.0, None, None)
            error = str(_library.error(status))
            if size() > 1:
                self.assertIn(f"tensor 0: the result has {4 if kind == BROADCAST else 4 * size() - 4} bytes on device", error)

    def test_no_memory(self) -> None:
        """The framework cannot allocate the result at one rank. The others get theirs."""
        x = Array([1]).write([rank()])
        no = ValueError("there is no memory")
        with unittest.mock.patch.object(fw, "empty", side_effect=no) if rank() == 0 else contextlib.nullcontext() as empty:
            call = begin(ALLGATHER, [x], "no memory")
            if rank() > 0:
                self.assertEqual(call.results()[0].read(), list(range(size())))
            else:
                with self.assertRaisesRegex(RuntimeError, "has not allocated the result of tensor 0") as e:
                    call.results()
                self.assertIs(e.exception.__cause__, no)
                empty.assert_called_once()
        self.assertEqual(run(ALLREDUCE, x, "after", reduction=_engine.Sum), [size() * (size() - 1) / 2])

    def test_groups(self) -> None:
        """A group of several types, of which NCCL does not have one, and some in-place arrays that are not contiguous."""
        xs = [Array([2]).write([rank(), 1]), Array([3], INT16).write([1, 2, rank()]), Array([1], INT32, contiguous=False).write([3])]
        for i in range(2):
            got = begin(ALLREDUCE, xs, f"group {i}", grouped=True, reduction=_engine.Max).results()
            self.assertEqual([y.read() for y in got], [[size() - 1, 1], [1, 2, size() - 1], [3]])
        begin(ALLREDUCE, xs, "group_", grouped=True, targets=xs, reduction=_engine.Max).results()
        self.assertEqual([y.read() for y in xs], [[size() - 1, 1], [1, 2, size() - 1], [3]])

    def test_many(self) -> None:
        """Many operations are in flight."""
        xs = [Array([1]).write([rank() + i]) for i in range(30)]
        for _ in range(3):
            calls = [begin(ALLREDUCE, [x], f"many {i}", reduction=_engine.Min) for i, x in enumerate(xs)]
            self.assertEqual([call.results()[0].read() for call in calls], [[i] for i in range(30)])

    def test_slow(self) -> None:
        """An operation begins after the work on the stream, which goes on for a while with the stand-in."""
        with unittest.mock.patch.dict(os.environ, STANDIN_CUDA_DELAY_US="300000"):
            slow = new_stream()
        x = Array([1])
        with fw.using(slow):
            x.write([rank()])
            self.assertEqual(run(ALLREDUCE, x, "slow", reduction=_engine.Sum), [size() * (size() - 1) / 2])

    def test_order(self) -> None:
        """Another stream that gets the results follows the stream on which the operation was begun."""
        x = Array([1]).write([2])
        first, other = fw.current, new_stream()
        call = begin(ALLREDUCE, [x], "order", reduction=_engine.Sum)
        fw.followed.clear()
        with fw.using(other):
            result = call.results()[0]
            self.assertEqual(fw.followed, [first])
            self.assertEqual(result.read(), [2 * size()])
        call.results()
        self.assertEqual(fw.followed, [first, first], "the current stream may be another one in the second call")

    def test_launched(self) -> None:
        """Operations as torch.distributed begins them are done when they have been launched, although the last rank computes
        its array after that. In the meantime the stream of a call that is done APART is free for other work.
        """
        last, total = size() - 1, size() * (size() - 1) / 2
        with held_stream(rank() == last) as (stream, gate):
            arrays = [Array([1]), Array([1])]
            with fw.using(stream):
                for x in arrays:
                    x.write([rank()])
                if rank() < last:
                    cuda("cudaStreamSynchronize", ctypes.c_void_p(stream))
                fw.followed.clear()
                call = begin(ALLREDUCE, arrays[:1], "apart", targets=arrays[:1], reduction=_engine.Sum, launched=_engine.APART)
                call.written()
                self.assertEqual(fw.followed, [], "another thread may have called it")
                self.assertEqual(_runtime.cudaStreamQuery(ctypes.c_void_p(RESULTS)), 600)
                if rank() < last:
                    cuda("cudaStreamSynchronize", ctypes.c_void_p(stream))
                how = _engine.operation(ALLREDUCE, _engine.Sum, launched=_engine.AT_LAUNCH)
                _engine.engine.call(fw, how, "at launch", global_process_set, arrays[1:], arrays[1:], wait=True)
                self.assertEqual(_runtime.cudaStreamQuery(ctypes.c_void_p(stream)), 600)
                with open(gate, "w"):
                    pass
                call.results()
                self.assertEqual(fw.followed, [stream, RESULTS])
                self.assertEqual([x.read() for x in arrays], [[total], [total]])

    def test_apart(self) -> None:
        """The stream of a call that is done APART need not wait for it. So a copy of an input is held for the stream that
        does, and so are all arrays of a call that the program drops.
        """
        x, y, total = Array([1], contiguous=False).write([rank()]), Array([1]), size() * (size() - 1) / 2
        fw.held.clear()
        call = begin(ALLREDUCE, [x], "copied", targets=[y], reduction=_engine.Sum, launched=_engine.APART)
        self.assertEqual([(a is x, stream) for a, stream in fw.held], [(False, RESULTS)])
        self.assertTrue(call.apart)
        with fw.using(new_stream()):
            call.results()
            self.assertEqual(y.read(), [total])
        x = Array([1]).write([rank()])
        call = begin(ALLREDUCE, [x], "dropped", targets=[y], reduction=_engine.Sum, launched=_engine.APART)
        fw.held.clear()
        del call
        self.assertEqual(fw.held, [(x, RESULTS), (y, RESULTS)])
        z = [Array([1], contiguous=False).write([rank()])]
        call = begin(ALLREDUCE, z, "in place", targets=z, reduction=_engine.Sum, launched=_engine.APART)
        self.assertEqual((call.apart, call.stream), (False, fw.current))
        call.results()
        _engine.engine.simple(BARRIER, global_process_set)
        _library.reap()
        self.assertEqual((y.read(), z[0].read()), ([total], [total]))

    def test_freed(self) -> None:
        """An allocation is freed and another one is at its address."""
        for i in range(5):
            block = Allocation(1 << 20)
            x = Array([1], at=(block, 8 * i)).write([i + rank()])
            self.assertEqual(run(ALLREDUCE, x, "freed", reduction=_engine.Max), [i + size() - 1])
            block.free()

    def test_next_job(self) -> None:
        """The same memory is used in several jobs of the process."""
        x = Array([1]).write([1])
        for _ in range(3):
            self.assertEqual(run(ALLREDUCE, x, "job", reduction=_engine.Sum), [size()])
            shutdown()
            init()


class Fallback(InTheJob):
    """Operations that the engine copies through host memory, and the one warning that says why."""

    def twice(self, kind: int = ALLREDUCE, want: list[float] | None = None, *texts: str) -> None:
        with self.warned(*texts):
            for i in range(2):
                x = Array([1]).write([rank() + i])
                got = run(kind, x, "twice", reduction=_engine.Sum)
                n = size()
                self.assertEqual(got, [n * (n - 1) / 2 + n * i] if want is None else [v + i for v in want])


class Fallbacks(Fallback):
    """Operations that cannot run on the device."""

    def test_messages(self) -> None:
        x, y = Array([2]).write([rank(), 5]), Array([2])
        after, before = (rank() + 1) % size(), (rank() - 1) % size()
        with self.warned("a send is a message", "a recv is a message"):
            for _ in range(2):
                sent = begin(SEND, [x], None, peer=after)
                ys = [y]
                begin(RECV, ys, None, ys, peer=before).results()
                sent.results()
                self.assertEqual(y.read(), [before, 5])


class Killed(OnDevice):
    """The last rank kills itself during an operation. The others get an error that names it, and can use the device."""

    def test_killed(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hvdrun sends it 5 s after the death of a rank
        xs = [Array([1 << 20]).write([1] * (1 << 20)) for _ in range(20)]
        begin(ALLREDUCE, xs[:1], "first", reduction=_engine.Sum).results()
        calls = [begin(ALLREDUCE, [x], f"x{i}", reduction=_engine.Sum) for i, x in enumerate(xs)]
        if rank() == size() - 1:
            calls[0].results()
            os.kill(os.getpid(), signal.SIGKILL)
        with self.assertRaises(PeerError) as e:
            for call in calls:
                call.results()
            begin(ALLREDUCE, xs[:1], "after", reduction=_engine.Sum).results()  # all calls may have been done
        self.assertEqual(list(e.exception.ranks), [size() - 1])
        self.assertEqual(Array([1]).write([7]).read(), [7])


class KilledAt(OnDevice):
    """Ranks die in a call of CUDA or NCCL: KILL_AT has RANK=FUNCTION:N for each. The others get an error that names one of
    them, and can use the device. Only the stand-ins do that.
    """

    def test_killed_at(self) -> None:
        dying = dict(at.split("=") for at in os.environ["KILL_AT"].split())
        xs = [Array([1000]).write([1] * 1000) for _ in range(3)]
        os.environ["STANDIN_CUDA_KILL"] = dying.get(str(rank()), "")
        with self.assertRaises(PeerError) as e:
            for _ in range(100):
                begin(ALLREDUCE, xs, "group", targets=xs, grouped=True, reduction=_engine.Sum).results()
        self.assertIn([str(r) for r in e.exception.ranks], [[r] for r in dying] + [sorted(dying)])
        self.assertEqual(Array([1]).write([7]).read(), [7])


class Faulted(OnDevice):
    """A kernel of the last rank uses a wrong address, so that CUDA does nothing more in its process. The stand-in for CUDA
    does that. Each rank gets an error, and the others that of the last rank.
    """

    def fault(self, in_flight: bool) -> None:
        last = size() - 1
        if rank() == last and in_flight:
            # The operations wait for the stream, which does nothing before a file exists.
            with unittest.mock.patch.dict(os.environ, STANDIN_CUDA_HOLD="/never"):
                fw.current = new_stream()
        xs = [[Array([1]).write([1])] for _ in range(20)]
        calls = []
        if rank() < last or in_flight:
            calls = [begin(ALLREDUCE, x, f"x{i}", targets=x, reduction=_engine.Sum) for i, x in enumerate(xs)]
        if rank() == last:
            _runtime.standin_fault()
            unittest.mock.patch.object(Allocation, "__del__", lambda _: None).start()  # nothing can be freed any more
        with self.assertRaisesRegex(Exception, "cudaErrorIllegalAddress") as e:
            for call in calls:
                call.results()
            begin(ALLREDUCE, xs[0], "after", targets=xs[0], reduction=_engine.Sum).results()
        if rank() < last:
            self.assertIsInstance(e.exception, PeerError)
            self.assertEqual(list(e.exception.ranks), [last])
        shutdown()

    def test_before_operations(self) -> None:
        self.fault(False)

    def test_in_flight(self) -> None:
        self.fault(True)

    def after_launch(self, end: Callable[[], Any]) -> None:
        """Operations that are done when they have been launched fail then, and the program calls only end."""
        last = size() - 1
        if rank() == last:
            with unittest.mock.patch.dict(os.environ, STANDIN_CUDA_HOLD="/never"):
                fw.current = new_stream()
        x = [Array([1]).write([1])]
        launched = 0 if "HOROVOD_ENABLE_ASYNC_COMPLETION" in os.environ else _engine.AT_LAUNCH
        begin(ALLREDUCE, x, "x", targets=x, reduction=_engine.Sum, launched=launched).written()
        note = [Array([1], view=memoryview(bytearray(4)))]
        with unittest.mock.patch.object(fw, "device", lambda _: -1):  # unlike a barrier, a message does not wait for x
            if rank() < last:
                begin(SEND, note, None, peer=last).results()
            else:
                for other in range(last):
                    begin(RECV, note, None, note, peer=other).results()
                _runtime.standin_fault()
        unittest.mock.patch.object(Allocation, "__del__", lambda _: None).start()  # nothing can be freed any more
        end()

    def test_shutdown_after_launch(self) -> None:
        with self.assertRaisesRegex(HorovodInternalError, "cudaErrorIllegalAddress"):
            self.after_launch(shutdown)
        shutdown()

    def test_exit_after_launch(self) -> None:
        """The process exits without a shutdown, which TestDevicePython sees."""
        self.after_launch(lambda: None)


class Cost(InTheJob):
    """Prints the processor time of an allreduce on a device and in host memory, the least of many measurements. The libraries
    of CUDA and NCCL are those that do nothing (internal/testcuda/standin/null.c).
    """

    def test_cost(self) -> None:
        names = [f"x{i}" for i in range(100)]
        for where, device in (f"device {DEVICE}", DEVICE), ("host", -1):
            views = [None if device >= 0 else memoryview(bytearray(64)) for _ in names]
            arrays = [[Array([16], view=view)] for view in views]
            call_ns = all_ns = sys.maxsize
            with unittest.mock.patch.object(fw, "device", lambda _, device=device: device):
                for _ in range(300):
                    thread, process = time.thread_time_ns(), time.process_time_ns()
                    calls = [
                        begin(ALLREDUCE, x, name, targets=x, reduction=_engine.Sum) for x, name in zip(arrays, names)
                    ]
                    call_ns = min(call_ns, time.thread_time_ns() - thread)
                    for call in calls:
                        call.results()
                    all_ns = min(all_ns, time.process_time_ns() - process)
            call_us, all_us = call_ns / 1e3 / len(names), all_ns / 1e3 / len(names)
            print(f"{where}: {call_us:.1f} us of a call, {all_us:.1f} us with all of the engine")


class Elastic(OnDevice):
    """The job is elastic."""

    def test_launched(self) -> None:
        """Operations are done at their end, because a commit says that those before it have succeeded."""
        with held_stream(True) as (stream, gate):
            x = Array([1])
            with fw.using(stream):
                x.write([rank()])
                call = begin(ALLREDUCE, [x], "held", targets=[x], reduction=_engine.Sum, launched=_engine.APART)
                opens = threading.Timer(0.3, lambda: open(gate, "w").close())
                opens.start()
                call.settle()
                self.assertTrue(os.path.exists(gate), "the operation was done before its input was computed")
                opens.join()
                call.results()
                self.assertEqual(x.read(), [size() * (size() - 1) / 2])
        elastic.run(lambda _: None)(elastic.ObjectState(lambda values: values, rank))  # the training is over


class WithoutNCCL(Fallback):
    """The job does not use NCCL."""

    def test_no_devices(self) -> None:
        self.twice(ALLREDUCE, None, "HOROVOD_GPU_OPERATIONS is none")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *(sys.argv[1:] or ["Values"])])
