"""The engine of one rank, its process sets, and what the interfaces for numpy and torch have in common.

An operation runs on the memory of the arrays of the program. Arrays whose elements are not one aligned block of memory
are copied before and after it. A ``Slot`` has the description of an operation in the form that the library wants. It is
kept for the next operation that differs only in the addresses.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import math
import numbers
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import _exit, _library
from ._library import (
    ALLGATHER, ALLREDUCE, ALLTOALL, ANY_SOURCE, BARRIER, BROADCAST, GATHER, INTERNAL, JOIN, KIND_NAMES, NO_HANDLE, PENDING,
    RECV, REDUCE, REDUCESCATTER, SCATTER, SEND, SLICE, SUCCESS, abandoned, check, quick, waiting,
)  # fmt: skip
from .exceptions import HorovodInternalError, InitError, LibraryError, NotInitializedError

if TYPE_CHECKING:
    from .process_sets import ProcessSet

A = TypeVar("A")
Shape = tuple[int, ...]
Code = tuple[int, int]
"""An element type: its number in the library, and its size in bytes."""

# The reductions. All except AverageActive have the same names and numbers as in Horovod.
Average, Sum, Adasum, Min, Max, Product, AverageActive = range(7)
_IN_LIBRARY = {Average: 1, Sum: 2, Min: 3, Max: 4, Product: 5, Adasum: 6, AverageActive: 7}

# The method device of a Framework returns one of these if an array is not on a CUDA device.
IN_MEMORY, ELSEWHERE = -1, -2

# The most kinds of operations for which slots are kept.
_MAX_SLOTS = 32768

# How long a thread that ends what holds the lock of the engine waits for the lock at a time.
_LOOK_SECONDS = 0.05

# The name of a blocking operation to which the program has given none. Ranks match unnamed operations in the order of the
# calls, so a program has at most one of a kind in flight, also if it has several threads. One name for all stays in the
# response cache, and only one thread at a time uses it (Turn). The library names all other unnamed operations noname.1,
# noname.2 and so on.
SYNC_NAME = "noname.0"

# Operations whose result has the shape of the tensor.
_OUTPUT_LIKE_INPUT = (ALLREDUCE, BROADCAST, REDUCE, RECV)
# Operations whose result may overwrite the tensor, and tells nothing else.
_OVERWRITING = (ALLREDUCE, BROADCAST, REDUCE)
# Operations whose result tells more than the outputs.
_TELLING = (ALLTOALL, JOIN, RECV)


class Framework(Generic[A]):
    """The functions of a framework, numpy or torch, that the engine needs to handle arrays. An array has the attributes
    shape and dtype.
    """

    has_devices = False
    """Whether arrays may be on CUDA devices. A framework without such arrays does not implement the methods for them."""

    def operands(self, op: Operation, x: Any, target: Any) -> tuple[Sequence[A], Sequence[A] | None]:
        """Returns the arrays of an operation and its targets, if it has any. x and target are what the program has given:
        sequences for a grouped operation, and otherwise one array. Raises ValueError if they are not valid.
        """
        raise NotImplementedError

    def code(self, dtype: Any) -> Code:
        """Returns the element type for the library. Raises ValueError if it has no such type."""
        raise NotImplementedError

    def shape(self, x: A) -> Shape:
        """Returns the shape of x for the engine. It depends only on the attribute shape."""
        return x.shape

    def plain(self, x: A) -> int:
        """Returns the address of x's elements if they are in memory and operations can read and write them in place.
        Otherwise it returns 0.
        """
        raise NotImplementedError

    def address(self, x: A) -> int:
        """Returns the address of x's elements, or 0 if operations cannot read them in place."""
        raise NotImplementedError

    def target_address(self, x: A) -> int:
        """Returns the address of x's elements, or 0 if operations cannot write to them in place."""
        return self.address(x)

    def copy(self, target: A, source: A) -> None:
        raise NotImplementedError

    def empty(self, shape: Shape, like: A, in_memory: bool = False) -> A:
        """Returns a new contiguous array with the element type of like and undefined elements. It is on the device of
        like, or in memory.
        """
        raise NotImplementedError

    def wrap(self, memory: Any, shape: Shape, like: A) -> A:
        """Returns an array with the elements in memory, a ctypes array. It has the element type of like and is on its
        device.
        """
        raise NotImplementedError

    def reshape(self, x: A, shape: Shape) -> A:
        """Gives a new array on a device another shape with as many elements, and returns the array."""
        raise NotImplementedError

    def device(self, x: A) -> int:
        """Returns the number of the CUDA device that has x, IN_MEMORY, or ELSEWHERE if operations cannot use x's address."""
        raise NotImplementedError

    def stream(self, device: int) -> Any:
        """Returns the current stream of a device."""
        raise NotImplementedError

    def handle(self, stream: Any) -> int:
        """Returns the cudaStream_t of a stream."""
        raise NotImplementedError

    def using(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which stream is the current stream of its device."""
        raise NotImplementedError

    def follow(self, stream: Any) -> None:
        """Makes the current stream of the device wait for the work that is on stream now."""
        raise NotImplementedError

    def result_stream(self, device: int) -> Any:
        """Returns a stream of the device on which the program puts no work."""
        raise NotImplementedError

    def hold(self, x: A, stream: Any) -> None:
        """Keeps the memory of x from being used again before the work that is on stream when x is freed."""
        raise NotImplementedError


@dataclass(eq=False)
class Operation:
    """What an operation does, apart from its name, its process set and its tensors. Two calls of ``operation`` with the
    same arguments usually return the same object.
    Raises ValueError if the reduction is none or a factor is not a number.
    """

    kind: int
    reduction: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    peer: int = 0
    tag: int = 0
    grouped: bool = False
    timeout: float = 0.0
    """The timeout in seconds. 0 means that of the settings."""
    any_kind: bool = False
    """Whether the name that the ranks compare does not begin with the kind. Then ranks that call different operations
    with the same name get a mismatch error.
    """
    launched: int = 0
    """If it is AT_LAUNCH or APART, an operation that NCCL runs is done when it has been launched. With AT_LAUNCH, the stream
    that is the current one in the call waits for it. With APART, another stream does, and the current one of ``results``.
    """
    overwrites: bool = field(init=False)
    """Whether the operation has one tensor, and its result may overwrite the tensor and tells nothing else."""

    def __post_init__(self) -> None:
        self.overwrites = self.kind in _OVERWRITING and not self.grouped
        if self.reduction not in _IN_LIBRARY:
            raise ValueError(f"got op {self.reduction!r}, want Average, Sum, Adasum, Min, Max, Product or AverageActive")
        # operation finds an object that is no number by its identity, also if the value has changed.
        for factor in (self.prescale, self.postscale):
            if not isinstance(factor, numbers.Real):
                raise ValueError(f"got a factor of type {type(factor).__name__}, want a number: use float(factor)")


operation = functools.lru_cache(maxsize=4096)(Operation)
AT_LAUNCH, APART = 1, 2

# Offsets in a slot, in words of 8 bytes.
_STREAM, _ALLOCATE = _library.Op.stream.offset // 8, _library.Op.allocate.offset // 8
_RESULT_STREAM = _library.Op.result_stream.offset // 8
_HANDLE = ctypes.sizeof(_library.Op) // 8
_NOT_SUBMITTED = (1 << 64) - 1  # it stands for the handle of an operation that was not submitted
_TENSORS = _HANDLE + 1
_INPUT, _OUTPUT = _TENSORS + _library.Tensor.input.offset // 8, _TENSORS + _library.Tensor.output.offset // 8
_TENSOR_WORDS = ctypes.sizeof(_library.Tensor) // 8


class Turn:
    """Lets threads run operations with the same name one after the other. A thread holds the lock while it runs one. The last
    one may still be in flight if an exception of a signal handler has ended the wait for it, or if a signal handler calls the
    engine during the wait.
    """

    __slots__ = ("lock", "words")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.words: Sequence[int] | memoryview = [0] * _TENSORS
        """Those of the slot of the last operation."""

    def settle(self) -> None:
        """Waits until the last operation is done, so that its name is free."""
        handle, index = _library.Handle(self.words[_HANDLE]), ctypes.c_size_t()
        while waiting.hvd_wait_any(handle, 1, SLICE, index) == PENDING:
            pass


class Slot:
    """An operation in the form that the library wants, and its handle while it is in flight. One call at a time uses a
    slot.
    """

    __slots__ = ("memory", "words", "at", "handle_at", "address", "arrays", "home", "outputs", "tells", "turn")

    def __init__(
        self, op: Operation, name: str | None, set_id: int, shapes: Sequence[Shape], codes: Sequence[Code],
        outputs: Sequence[Shape] | None, device: int, home: list[Slot],
        turn: Turn | None,
    ) -> None:  # fmt: skip
        text = b"" if name is None else _library.whole(_full_name(op, name).encode()) + b"\0"
        dims = sum(map(len, shapes))
        numbers = (_TENSORS + _TENSOR_WORDS * len(shapes)) * 8
        size = numbers + 8 * (dims + len(op.splits)) + len(text)
        self.memory = (ctypes.c_uint64 * (-(-size // 8)))()
        self.words = memoryview(self.memory).cast("B").cast("Q")
        self.at = at = ctypes.addressof(self.memory)
        self.handle_at = at + 8 * _HANDLE
        self.address = 0
        """The address of the array, if it is the only one and the result overwrites it. Otherwise it is 0."""
        self.arrays: Any = None
        """What has the arrays that the library reads and writes while the operation is in flight. It is the Completion of an
        operation that is done APART. Otherwise it is None.
        """
        self.home = home
        """The list of the slots like this one that are not in use."""
        self.outputs = outputs
        """The shapes of the results, no shapes if there is no result, and None if the library knows them only when the
        operation is done.
        """
        self.tells = outputs is None or op.kind in _TELLING
        """Whether the library tells more than the elements of the results."""
        self.turn = turn
        """What the operation shares with others of its name, if that is SYNC_NAME."""
        c = _library.Op.from_buffer(self.memory)
        c.size, c.kind, c.process_set, c.device = ctypes.sizeof(c), op.kind, set_id, device
        if op.kind in (ALLREDUCE, REDUCE, REDUCESCATTER):
            c.reduction = _IN_LIBRARY[op.reduction]
        c.dtype = codes[0][0] if codes else 0
        c.flags = _library.GROUPED if op.grouped else 0
        if op.launched and device >= 0:
            c.flags |= _library.ON_DEVICE
        c.num_tensors, c.tensors = len(shapes), at + 8 * _TENSORS
        c.root, c.peer, c.tag = op.root, op.peer, op.tag
        c.prescale, c.postscale, c.timeout_seconds = op.prescale, op.postscale, op.timeout
        after = numbers // 8
        for i, (shape, code) in enumerate(zip(shapes, codes)):
            t = _library.Tensor.from_buffer(self.memory, 8 * (_TENSORS + _TENSOR_WORDS * i))
            t.dims, t.dtype, t.shape = len(shape), code[0], at + 8 * after
            if outputs:
                t.output_bytes = math.prod(outputs[i]) * code[1]
            for n in shape:
                self.words[after] = n
                after += 1
        c.num_splits, c.splits = len(op.splits), at + 8 * after
        for n in op.splits:
            self.words[after] = n
            after += 1
        if text:
            c.name = at + 8 * after
            ctypes.memmove(at + 8 * after, text, len(text))

    def __del__(self) -> None:
        # If an exception of a signal handler has ended __init__ early, the attribute does not exist.
        arrays = getattr(self, "arrays", None)
        if arrays is not None and self.words[_HANDLE] and not sys.is_finalizing():
            if isinstance(arrays, Completion):
                arrays.hold()
            _library.abandon(self.words[_HANDLE], arrays)


def submitted(used: list[Slot]) -> bool:
    """Returns whether the last operation was submitted for which Engine.call has got the list and has not waited."""
    return bool(used) and used[-1].words[_HANDLE] != 0


def _full_name(op: Operation, name: str) -> str:
    """Returns the name by which the ranks match an operation. It begins with the kind, so that the program may use the
    same name for operations of different kinds.
    """
    if op.any_kind:
        return name
    return f"grouped_{KIND_NAMES[op.kind]}.{name}" if op.grouped else f"{KIND_NAMES[op.kind]}.{name}"


_finishing = threading.RLock()  # held by a thread that gets results from the library or writes them


class Made(Generic[A]):
    """The results of an operation on a device whose sizes depend on the other ranks. A thread of the library makes each
    when it knows the size.
    """

    def __init__(self, framework: Framework[A], likes: Sequence[A], sizes: Sequence[int], stream: Any) -> None:
        self.framework, self.likes, self.sizes, self.stream = framework, likes, sizes, stream
        self.arrays: dict[int, A] = {}
        """The results by tensor, without their shapes. Results without elements are missing."""
        self.error: BaseException | None = None

    def allocate(self, _: int, i: int, nbytes: int) -> int:
        """Implements the field allocate of the operation."""
        fw = self.framework
        try:
            with fw.using(self.stream):
                self.arrays[i] = made = fw.empty((nbytes // self.sizes[i],), self.likes[i])
            return fw.address(made)
        except BaseException as e:
            self.error = e.with_traceback(None)  # the traceback would refer to self
            return 0

    def array(self, i: int, shape: Shape) -> A:
        """Returns the result of tensor i."""
        fw = self.framework
        made = self.arrays.get(i)
        if made is not None:
            return fw.reshape(made, shape)
        with fw.using(self.stream):
            return fw.empty(shape, self.likes[i])


@dataclass(eq=False)
class Completion(Generic[A]):
    """What an operation needs when it is done, unless the library has then written all results to their arrays."""

    framework: Framework[A]
    likes: Sequence[A]
    """The arrays of the operation. A result whose size only the library knows has their type and device."""
    copies: Sequence[tuple[A, A]]
    """Pairs of arrays. The second array is copied to the first one."""
    stream: Any
    """The stream on which the results are complete if the arrays are on a device. It is the one that was the current one
    when the operation was begun, unless the operation is done APART.
    """
    result: _library.Result | None
    """What the library tells besides the elements of the results."""
    made: Made[A] | None
    """The results if the library lets this process allocate them on a device."""
    kept: Sequence[A] = ()
    """The arrays of an operation that is done APART, which the device may use until it has done the work of stream."""

    def hold(self) -> None:
        """Makes sure that the memory of the arrays is not used again before the device has done the work of stream."""
        for x in self.kept:
            self.framework.hold(x, self.stream)


def _error(status: int, completion: Completion[A] | None) -> Exception:
    """Returns the error of an operation that has failed."""
    error = _library.error(status)
    if completion is not None and completion.made is not None:
        error.__cause__ = completion.made.error
    return error


class Call(Generic[A]):
    """An operation. Until it is done, the library may use the memory of its arrays."""

    __slots__ = ("slot", "number", "outputs", "take", "completion", "error", "__weakref__")

    def __init__(
        self, slot: Slot | None, number: int, outputs: Sequence[A] | None,
        take: Callable[[Call[A]], Any] | None = None, completion: Completion[A] | None = None,
    ) -> None:  # fmt: skip
        self.slot = slot
        """The description of the operation. It is None when the operation is done."""
        self.number = number
        """The handle of the operation in the library."""
        self.outputs = outputs
        """The results. It is None until the operation is done if the library allocates them."""
        self.take = take
        """The function that returns what wait returns. None stands for the first result."""
        self.completion = completion
        self.error: Exception | None = None

    def wait(self) -> Any:
        """Waits until the operation is done and returns its result. Later calls return the same result."""
        if self.slot is not None:
            self.settle()
        if self.take is None and self.completion is None and self.error is None:
            return self.outputs[0]
        return self.results()[0] if self.take is None else self.take(self)

    def poll(self) -> bool:
        """Returns whether the operation is done, with or without an error."""
        if self.slot is None:
            return True
        done = ctypes.c_int32()
        return quick.hvd_poll(self.number, ctypes.byref(done)) != SUCCESS or done.value != 0

    def handle(self) -> int:
        """Returns the handle of the operation in the library, or 0 if the operation is done."""
        return 0 if self.slot is None else self.number

    def done(self) -> bool:
        """Returns whether the operation is done. If it is done without an error, the results have been written."""
        if not self.poll():
            return False
        self.settle()
        if self.error is None:
            self.written()
        return True

    def settle(self, end: float | None = None) -> bool:
        """Waits until the operation is done, with or without an error, or until the time end, if it is given, of the clock
        time.monotonic. Returns whether the operation is done. It does not write the results to arrays to which the library
        has not written them.
        """
        limit = SLICE
        while True:
            slot, completion = self.slot, self.completion
            if slot is None:
                return True
            if end is not None:
                left = end - time.monotonic()
                limit = ctypes.c_double(min(max(left, 0.0), SLICE.value))
            if completion is None or completion.result is None:
                status = waiting.hvd_finish(self.number, limit, None)
            else:
                status = self._finish(completion.result, limit)
            # An exception of a signal handler may come anywhere, and other threads may wait for the operation too.
            if status == SUCCESS:
                # hvd_finish returns it only once, so no other thread puts the slot back.
                self.slot = slot.arrays = None
                slot.home.append(slot)
                return True
            if status == NO_HANDLE:
                self.slot = None  # hvd_finish has returned before, in another thread or just before an exception
            elif status == PENDING:
                if end is not None and left <= 0:
                    return False
            else:
                self.error = _error(status, completion)
                quick.hvd_release(self.number)
                self.slot = slot.arrays = None

    def _finish(self, result: _library.Result, limit: ctypes.c_double) -> int:
        """Waits as hvd_finish does, and returns its status. It keeps a thread that learns that another one has got the
        result from reading the result too early.
        """
        index = ctypes.c_size_t()
        if waiting.hvd_wait_any(_library.Handle(self.number), 1, limit, index) == PENDING:
            return PENDING
        with _finishing:
            return waiting.hvd_finish(self.number, 0.0, ctypes.addressof(result))

    def results(self) -> Sequence[A]:
        """Waits for the operation and returns its results, which are the targets or new arrays. The current stream of
        their device waits for them. If the operation failed, raises its error.
        """
        outputs, completion = self.written(), self.completion
        if completion is not None and completion.stream is not None:
            completion.framework.follow(completion.stream)
        return outputs

    def hold(self) -> None:
        """Makes sure that the memory of the arrays is not used again too early, although no stream of the program waits for
        the results yet.
        """
        if self.completion is not None:
            self.completion.hold()

    def written(self) -> Sequence[A]:
        """Returns the same as results, but without the wait of the current stream. Any thread may call it."""
        if self.slot is not None:
            self.settle()
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.completion is not None:
            self._complete(self.completion)
        return self.outputs or []

    def _complete(self, completion: Completion[A]) -> None:
        """Writes or makes the results that the library has not written to their arrays."""
        fw, stream, result = completion.framework, completion.stream, completion.result
        if completion.copies or self.outputs is None:
            with _finishing:
                if completion.copies:
                    with fw.using(stream) if stream is not None else contextlib.nullcontext():
                        for target, made in completion.copies:
                            fw.copy(target, made)
                    completion.copies = ()
                if self.outputs is None and result is not None:
                    outputs = []
                    for i, (x, output) in enumerate(zip(completion.likes, result.outputs[: result.num_outputs])):
                        shape = tuple(output.shape[: output.dims])
                        if completion.made is not None:
                            outputs.append(completion.made.array(i, shape))
                            continue
                        memory = _library.memory_at(output.data or 0, output.bytes)
                        memory.owner = result  # frees the memory when the last array is gone
                        outputs.append(fw.wrap(memory, shape, x))
                    self.outputs = outputs

    @property
    def stream(self) -> Any:
        """The stream on which the results are complete, or None if they are not on a device."""
        return None if self.completion is None else self.completion.stream

    @property
    def apart(self) -> bool:
        """Whether the operation is done APART, so that stream has done its work when the results are complete."""
        return self.completion is not None and bool(self.completion.kept)

    @property
    def result(self) -> _library.Result:
        """What the library tells besides the elements of the results. It is known when the operation is done."""
        assert self.completion is not None and self.completion.result is not None
        return self.completion.result

    @property
    def received(self) -> list[int]:
        """The number of rows that were received from each member. It is known when an alltoall is done."""
        return self.result.received[: self.result.num_received]

    @property
    def last_joined(self) -> int:
        """The rank that joined last. It is known when a join is done."""
        return self.result.last_joined

    @property
    def source(self) -> int:
        """The sender of a message. It is known when a recv is done."""
        return self.result.source


@dataclass
class Place:
    """The place of this rank in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool
    devices: bool
    """Whether operations on CUDA devices are possible."""
    at_launch: bool
    """Whether all of them are done when they have been launched (HOROVOD_ENABLE_ASYNC_COMPLETION)."""


class Block:
    """Memory that operations read and write in place.

    ``free`` frees the memory, and the view must not be used afterwards. If ``free`` is not called, the memory is freed
    when the block and all objects made of its view (slices, numpy arrays, tensors) are gone.
    """

    __slots__ = ("nbytes", "view", "_finalizer", "__weakref__")

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"alloc: got {nbytes} bytes, want 0 or more")
        size, at = max(nbytes, 1), ctypes.c_void_p()
        status = waiting.hvd_alloc(size, ctypes.byref(at))
        if status == INTERNAL:
            raise MemoryError(str(_library.error(status)))
        check(status)
        # Every buffer made from the view refers to this ctypes array. So its finalizer runs when the last of these
        # buffers is gone.
        root = _library.memory_at(at.value or 0, size)
        self.nbytes = nbytes
        self.view = memoryview(root).cast("B")[:nbytes]
        """The bytes of the block, which the program may write. In a new block they are zero."""
        self._finalizer = weakref.finalize(root, quick.hvd_free, at.value)
        self._finalizer.atexit = False

    def free(self) -> None:
        """Frees the memory. No operation on the block may be in flight. A further call does nothing."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"<gohvd.Block of {self.nbytes} bytes>"


class Engine:
    """This process as a rank of a job. There is only one instance, the variable ``engine``."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held while the process joins or leaves the job
        self._place: Place | None = None
        self.last_place: Place | None = None
        """The place in the present job, or in the last one."""
        self._sets: dict[int, ProcessSet] = {}
        self._registered: list[ProcessSet] = []  # several objects may stand for one process set of the job
        self._slots: dict[tuple, list[Slot]] = {}
        self._turns: dict[tuple[int, int], Turn] = {}  # of SYNC_NAME, by process set and kind
        self._warned: set[str] = set()  # the reasons for which tensors on CUDA devices are copied that were shown
        self._exit_registered = False
        self._except_hook = _exit.ExceptHook()
        self.mpi_comm: Any = None
        """The mpi4py communicator whose processes are the ranks of the job, if the program has passed one."""
        self._settings: dict[str, str] = {}  # those of the last job
        self._joining = False  # whether a thread waits for the other ranks in init
        self._launched = False  # whether operations of this job may have failed after they were done
        self._submitting: Any = quick  # with a sidecar it is waiting, because a submission may wait for the sidecar
        self.before_step: Callable[[], None] | None = None
        """A function that optimizers call when the gradients are reduced, before they change the parameters."""
        self.before_training: list[Callable[[], None]] = []
        """Functions that elastic.run calls before the process joins the training."""
        self.before_again: list[Callable[[], None]] = []
        """Functions that elastic.run calls before it calls the training function again."""
        self.at_shutdown: list[Callable[[], None]] = []
        """Functions that are called when this process leaves the job."""
        # The object that users know as global_process_set. The module process_sets assigns it.
        self.global_set: Any = None

    # Joining and leaving the job.

    def init(self, process_sets: Sequence[ProcessSet], settings: dict[str, str], mpi_comm: Any = None) -> None:
        """Joins the job. mpi_comm is an mpi4py communicator with the processes of the job, for a library with MPI. If
        this process is already in a job, process_sets must be registered in that job, and settings and mpi_comm have no
        effect.
        """
        with self._lock:
            if self._place is None:
                sets = [_library.Ranks(s.ranks or []) for s in process_sets]
                options = _library.InitOptions(
                    ctypes.sizeof(_library.InitOptions), len(settings), _library.settings(settings),
                    (_library.Ranks * len(sets))(*sets), len(sets),
                )  # fmt: skip
                if mpi_comm is not None:
                    options.mpi_comm = ctypes.pointer(ctypes.c_int32(mpi_comm.py2f()))
                try:
                    if not self._exit_registered:
                        atexit.register(self.close)
                        self._exit_registered = True
                        self._except_hook.install()
                    self._joining = True
                    _library.call(waiting.hvd_init, options)
                    self._launched = _library.told = False
                    sidecar = settings.get("HVD_SIDECAR", os.environ.get("HVD_SIDECAR"))
                    self._submitting = waiting if sidecar else quick
                except LibraryError:
                    raise
                except HorovodInternalError as e:
                    raise InitError(str(e)) from None  # the other error has the same text
                finally:
                    self._joining = False
                self._sets, self.mpi_comm, self._settings = {0: self.global_set}, mpi_comm, settings
                self.find_place()
            if not quick.hvd_epoch():
                return  # a new process of an elastic job, whose ranks have no process sets any more
            for k, s in enumerate(process_sets):
                if s.ranks == self.global_set.ranks:
                    raise ValueError(f"process_sets entry number {k} is a duplicate: {s} has all ranks of the job")
                s.process_set_id = self._id_of(s)

    def find_place(self) -> bool:
        """Gets the place of this process from the library. Returns whether it has changed, because a new process of an
        elastic job has become a rank.
        """
        facts = [getattr(quick, f"hvd_{name}")() for name in _FACTS]
        before, self._place = self._place, Place(*facts[:6], facts[6] == 1, facts[7] > 0, facts[7] == 2)
        self.last_place = self._place
        self.global_set.ranks = list(range(self._place.size))
        return self._place != before

    def new_unique_id(self) -> str:
        """Makes a unique id, with which all ranks can join one job. This process serves the job's store."""
        return _library.text_of(waiting.hvd_new_unique_id, None)

    def _id_of(self, s: ProcessSet) -> int:
        """Returns the number of the registered set that has the same ranks as s, and registers s as a further object
        for this set. Sets that only their members have registered do not count.

        Raises ValueError if no registered set has these ranks.
        """
        alone = {ident for ident, other in self._sets.items() if other.members_only}
        for ident, ranks in self.set_ranks().items():
            if ident not in alone and ranks == s.ranks:
                self._sets[ident] = s
                self._registered.append(s)
                return ident
        raise ValueError(
            f"process set {s.ranks} is not registered: the job was started without it. Pass it to the first init() of this "
            "process, or call add_process_set()"
        )

    def shutdown(self, limit: float = math.inf) -> None:
        """Leaves the job. Outside a job this has no effect. If the other ranks need this one for longer than the limit, in
        seconds, it leaves as a failed rank.

        If the job has failed and no other call has said so, it raises the error if operations were done when they had been
        launched, because their results may be undefined.
        """
        error = self._leave(*_exit.of_shutdown(), limit)
        if error is not None:
            raise error

    def rejoin(self) -> None:
        """Leaves an elastic job and joins it again, with the same settings and without process sets."""
        self._leave("", False)
        self.init([], self._settings)

    def fail(self, reason: str) -> None:
        """Leaves the job as a failed rank, so that the operations of the other ranks end with an error. This also ends
        an init and a shutdown in another thread, which hold the lock while they wait for other ranks.
        """
        # The thread may not have called the library yet.
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            self._fail_now(reason)
        try:
            self._leave(reason, True)
        finally:
            self._lock.release()

    def _fail_now(self, reason: str) -> None:
        with contextlib.suppress(HorovodInternalError, ValueError):
            _library.call(waiting.hvd_shutdown, reason.encode(), _library.FAILED)

    def _leave(self, reason: str, failed: bool, limit: float = math.inf) -> Exception | None:
        """Leaves the job. Returns the error of shutdown, or None."""
        with self._lock:
            if self._place is None:
                return None
            # In an elastic job they are done at their end, unless the setting says otherwise.
            elastic = _library.Elastic(ctypes.sizeof(_library.Elastic))
            quick.hvd_elastic(elastic)
            early = not elastic.generation or self._place.at_launch
            unknown = self._launched and not failed and not _library.told and early
            try:
                handle = _library.Handle()
                check(waiting.hvd_shutdown(reason.encode(), _library.FAILED if failed else 0, handle))
                try:
                    _library.wait(handle, limit=limit)
                except TimeoutError:
                    self._fail_now(f"other ranks still needed this one {limit:g} s after it had left the job")
                    _library.wait(handle)
            except HorovodInternalError as e:
                # The job has failed. Operations that were not done yet have raised its error.
                return e if unknown else None
            except ValueError:
                pass
            finally:
                self._place = self.mpi_comm = None
                for s in self._registered:
                    s._invalidate()
                self._registered = []
                self._sets = {}
                self._slots = {}  # a process set with the same number may have other ranks in the next job
                for f in self.at_shutdown:
                    f()
                _library.reap()
        return None

    def close(self) -> None:
        """Leaves the job when the process exits. If that gives the error of shutdown, it prints the error, and the exit
        status of the process says that its end has failed.
        """
        reason, failed = _exit.of_exit()
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            if self._joining:
                self._fail_now(reason or "its process exits while a thread joins the job")
        try:
            error = self._leave(reason, failed)
        finally:
            self._lock.release()
        if error is not None:
            _exit.fail(error)

    def after_fork(self) -> None:
        """Makes the engine usable in a forked process. It replaces the locks, because no thread exists there that could
        release the old ones.
        """
        global _finishing
        _finishing = threading.RLock()
        self._lock = threading.RLock()
        self._slots, self._turns = {}, {}
        self._joining = self._launched = False  # operations of the parent are not those of this process

    def initialized(self) -> bool:
        return self._place is not None

    def place(self) -> Place:
        """Returns this rank's place in the job: its rank, the size and so on. Raises NotInitializedError outside a job.
        """
        if self._place is None:
            raise NotInitializedError()
        return self._place

    def failure(self) -> Exception | None:
        """Returns the error that has ended the job, or None while the job runs."""
        status = quick.hvd_check()
        return _library.error(status) if status else None

    # Process sets.

    def set_ranks(self) -> dict[int, list[int]]:
        """Returns the ranks of all process sets of the job. The keys are the numbers of the sets."""
        self.place()
        found = {}
        for number in sorted(_library.numbers_of(quick.hvd_process_sets)):
            with contextlib.suppress(ValueError):  # the set was removed since
                found[number] = _library.numbers_of(quick.hvd_process_set_ranks, number)
        return found

    def registered_sets(self, ranks: list[int] | None) -> dict[int, ProcessSet]:
        """Returns the registered process sets with these ranks. The keys are the numbers of the sets."""
        with self._lock:
            return {number: s for number, s in self._sets.items() if number and s.ranks == ranks}

    def add_set(self, s: ProcessSet, members_only: bool, name: str, timeout: float | None) -> None:
        text = _library.whole(name.encode())
        self.place()
        if s.ranks is None:
            s.ranks = ranks_of(s.mpi_comm, self.mpi_comm)
        if s.process_set_id is not None:
            raise ValueError(f"{s} is already registered")
        if not members_only:
            for other in list(self._sets.values()):
                if other.ranks == s.ranks and not other.members_only:
                    raise ValueError(f"a process set with these ranks is already registered: {other}")
        limit = check_timeout(timeout, "add_process_set")
        flags, result = _library.MEMBERS_ONLY if members_only else 0, _library.Result()
        with _library.new_handle() as handle:
            check(quick.hvd_add_process_set(_library.Ranks(s.ranks), flags, text, limit, None, handle))
            _library.wait(handle, result)
        with self._lock:
            self.place()
            self._sets[result.process_set] = s
            self._registered.append(s)
            s.members_only, s.process_set_id = members_only, result.process_set

    def remove_set(self, s: ProcessSet, timeout: float | None = None, wait: bool = True) -> bool:
        """Removes a process set and returns whether it was registered. If wait is false, it does not wait until the
        other ranks have removed the set.
        """
        self.place()
        number = s.process_set_id
        if not number or number not in self._sets:
            return False
        with _library.new_handle() as handle:
            check(quick.hvd_remove_process_set(number, check_timeout(timeout, "remove_process_set"), handle))
            if wait:
                _library.wait(handle)
            else:
                quick.hvd_release(handle.value)
        with self._lock:
            self._sets.pop(number, None)
            for other in [r for r in self._registered if r.process_set_id == number]:
                other._invalidate()
                self._registered.remove(other)
            self._slots = {}  # the object may stand for another set later
            for kind in ALLREDUCE, ALLGATHER:
                self._turns.pop((number, kind), None)
        return True

    def set_id(self, s: ProcessSet, what: str) -> int:
        """Returns the number of a process set. Raises ValueError if the set is not registered or this rank is not a
        member.
        """
        ident = s.process_set_id
        if ident == 0:
            return 0
        if ident is None or ident not in self._sets:
            raise ValueError(f"{what}: process set {s.ranks} does not exist, or has not been registered")
        rank = self.place().rank
        if rank not in (s.ranks or ()):
            raise ValueError(f"{what}: rank {rank} is not a member of process set {ident} with ranks {s.ranks}")
        return ident

    # The timeline and the flight recorder.

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        check(waiting.hvd_start_timeline(_library.whole(os.fsencode(path)), mark_cycles))

    def stop_timeline(self) -> None:
        check(waiting.hvd_stop_timeline())

    def dump(self) -> dict[str, Any]:
        self.place()  # raises ValueError before init
        return json.loads(_library.text_of(waiting.hvd_dump))

    # Operations.

    def call(
        self, fw: Framework[A], op: Operation, name: str | None, process_set: ProcessSet, x: Any, target: Any = None,
        take: Callable[[Call[A]], Any] | None = None, wait: bool = False, outputs: tuple[Shape, ...] | None = None,
        begun: list[Call[A] | None] | None = None, used: list[Slot] | None = None,
    ) -> Any:  # fmt: skip
        """Begins an operation and returns it. If wait is true, waits until it is done, and returns what its method wait
        returns. take is the function that returns the result.

        begun is an empty list, for a caller that waits. If call raises an exception, begun says how far the operation has
        come. If it is still empty, the operation was not submitted. An entry that is None says that the operation is over:
        it has failed, or the exception has prevented the copy of its results. Otherwise the entry is the operation, which
        may still be in flight, because a signal handler has ended the wait with the exception.

        used is a list for a caller that does not wait. It gets the slot of the operation, so that the function submitted
        tells whether the operation was submitted before an exception of a signal handler.

        x is an array, or a sequence of arrays for a grouped operation. The result is written to target, which may be x
        itself. An operation whose result has a size that not only depends on the shapes (allgather, alltoall, gather,
        scatter) has targets only if outputs has the shapes of the results. Without targets, a caller that knows these
        shapes gives them so that results on a CUDA device need not be allocated while the other ranks wait. If a result
        turns out to have another size, the operation fails.

        If the name is SYNC_NAME, the caller waits. Then the threads run the operations of this kind one after the other.
        If op.any_kind is set, the caller makes sure that no earlier operation with this name is in flight.
        """
        if abandoned:
            _library.reap()
        # Most operations of a training step differ from earlier ones at most in the addresses.
        slot, completion = None, None
        if op.overwrites and outputs is None and (target is None or target is x):
            address = fw.plain(x)
            if address:
                shape = x.shape
                try:
                    slot = self._slots[op, name, process_set, shape, x.dtype].pop()
                except LookupError:
                    pass
        if slot is None:
            slot, results, completion = self._prepare(fw, op, name, process_set, x, target, outputs)
        elif target is None and slot.outputs:
            made = fw.empty(shape, x)
            words = slot.words
            words[_INPUT], words[_OUTPUT], slot.address = address, fw.address(made), 0
            slot.arrays, results = (x, made), (made,)
        else:
            if address != slot.address:
                slot.words[_INPUT] = slot.words[_OUTPUT] = slot.address = address
            slot.arrays = results = (x,)
        if wait:
            turn = slot.turn
            if turn is None:
                return self._run(slot, results, take, completion, begun)
            with turn.lock:
                if turn.words[_HANDLE]:
                    turn.settle()
                turn.words = slot.words
                return self._run(slot, results, take, completion, begun)
        if used is not None:
            slot.words[_HANDLE] = 0
            used.append(slot)
        status = self._submitting.hvd_submit(slot.at, slot.handle_at)
        if status == SUCCESS:
            return Call(slot, slot.words[_HANDLE], results, take, completion)
        call = Call(None, 0, results, take, completion)
        call.error = _library.error(status)
        if isinstance(call.error, ValueError):  # the call is wrong; otherwise the job has failed
            raise call.error
        return call

    def _run(
        self, slot: Slot, results: Sequence[A] | None, take: Callable[[Call[A]], Any] | None,
        completion: Completion[A] | None, begun: list[Call[A] | None] | None,
    ) -> Any:  # fmt: skip
        """Runs an operation, waits until it is done, and returns what the method wait of the call returns."""
        into = None if completion is None or completion.result is None else ctypes.addressof(completion.result)
        call = None
        try:
            if begun is not None:
                slot.words[_HANDLE] = _NOT_SUBMITTED
                begun.append(None)
            status = waiting.hvd_run(slot.at, SLICE, slot.handle_at, into)
            if status == PENDING:
                call = Call(slot, slot.words[_HANDLE], results, take, completion)
                call.settle()
        except BaseException:  # of a signal handler
            call = call or Call(slot, slot.words[_HANDLE], results, take, completion)
            if begun:
                if call.number == _NOT_SUBMITTED:
                    begun.clear()
                else:
                    begun[0] = call
            raise
        if call is None:
            slot.arrays = None
            if status != SUCCESS:
                error = _error(status, completion)
                if begun is not None and isinstance(error, ValueError):  # the call is wrong, so it was not submitted
                    begun.clear()
                raise error
            slot.home.append(slot)
            if take is None and completion is None:
                return results[0]
            call = Call(None, 0, results, take, completion)
        return call.wait()

    def _prepare(
        self, fw: Framework[A], op: Operation, name: str | None, process_set: ProcessSet, x: Any, target: Any,
        outputs: tuple[Shape, ...] | None,
    ) -> tuple[Slot, Sequence[A] | None, Completion[A] | None]:  # fmt: skip
        """Returns the slot for an operation, its results if their shapes are known, and what it needs when it is done."""
        arrays, targets = fw.operands(op, x, target)
        codes = [fw.code(x.dtype) for x in arrays]
        if self._place is None:
            raise NotInitializedError()
        set_id = self.set_id(process_set, KIND_NAMES[op.kind])
        shapes = tuple([fw.shape(x) for x in arrays])
        device, stream, in_memory = IN_MEMORY, None, False
        if fw.has_devices and arrays:
            device = fw.device(arrays[0])
            if device == ELSEWHERE:
                device, in_memory = IN_MEMORY, True
            elif device >= 0:
                why = self._not_on_device(op)
                if why:
                    self._warn(why)
                    device, in_memory = IN_MEMORY, True
                else:
                    stream = fw.stream(device)
        if op.overwrites and outputs is None and device < 0:
            key: tuple[Any, ...] = op, name, process_set, arrays[0].shape, arrays[0].dtype
        else:
            key = op, name, process_set, shapes, tuple([x.dtype for x in arrays]), outputs, device
        home = self._slots.get(key)
        if home is None:
            if len(self._slots) >= _MAX_SLOTS:
                self._slots = {}
            home = self._slots[key] = []
        try:
            slot = home.pop()
        except IndexError:
            known = self._outputs(op, shapes, process_set) if outputs is None else outputs
            turn = self._turns.setdefault((set_id, op.kind), Turn()) if name is SYNC_NAME else None
            slot = Slot(op, name, set_id, shapes, codes, known, device, home, turn)
        words = slot.words
        if stream is not None:
            words[_STREAM] = fw.handle(stream)
        copies: list[tuple[A, A]] = []
        used: list[Any] = []
        staged: list[A] = []
        at, slot.address = _INPUT, 0
        for x, shape, (_, size) in zip(arrays, shapes, codes):
            address = 0 if in_memory else fw.address(x)
            if not address or address % size:
                made = fw.empty(shape, x, in_memory)
                if op.kind != RECV:
                    fw.copy(made, x)
                if targets is arrays:
                    copies.append((x, made))
                staged.append(made)
                x, address = made, fw.address(made)
            used.append(x)
            words[at] = address
            at += _TENSOR_WORDS
        results: Sequence[A] | None = None
        at = _OUTPUT
        if slot.outputs and targets is arrays:
            results = arrays
            for _ in arrays:
                words[at] = words[at - 1]
                at += _TENSOR_WORDS
        elif slot.outputs is not None:
            results = made_results = []
            for i, shape in enumerate(slot.outputs):
                x, size = arrays[i], codes[i][1]
                target = fw.empty(shape, x) if targets is None else targets[i]
                made_results.append(target)
                address = 0 if in_memory else fw.target_address(target)
                if targets is not None and address:
                    if self._overlap(op.kind, process_set, words[at - 1], shapes[i], address, shape, size):
                        address = 0
                if not address or address % size:
                    made = fw.empty(shape, x, in_memory)
                    copies.append((target, made))
                    target, address = made, fw.address(made)
                used.append(target)  # keeps it alive
                words[at] = address
                at += _TENSOR_WORDS
        made = None
        if slot.outputs is None and stream is not None:
            made = Made(fw, arrays, [size for _, size in codes], stream)
            function = _library.Allocate(made.allocate)
            used.append(function)  # keeps it alive
            words[_ALLOCATE] = ctypes.cast(function, ctypes.c_void_p).value or 0
        slot.arrays = used
        completion = None
        kept: Sequence[A] = ()
        if stream is not None and op.launched:
            # The copies use the stream of the call, and so does the caller of allocate.
            if op.launched == APART and not copies and made is None:
                stream, kept = fw.result_stream(device), used
                for x in staged:  # the stream of the call, for which they were allocated, may not wait for the results
                    fw.hold(x, stream)
            words[_RESULT_STREAM] = fw.handle(stream)
        if stream is not None and (op.launched or self.place().at_launch):
            self._launched = True
        if copies or stream is not None or slot.tells:
            completion = Completion(fw, arrays, copies, stream, _library.Result() if slot.tells else None, made, kept)
            if kept:
                slot.arrays = completion
        return slot, results, completion

    def _outputs(
        self, op: Operation, shapes: Sequence[Shape], process_set: ProcessSet
    ) -> Sequence[Shape] | None:
        """Returns the shapes of the results, no shapes if there is no result, and None if the library knows them only when
        the operation is done.
        """
        kind = op.kind
        if kind == REDUCE and op.root != self.place().rank or kind in (SEND, BARRIER, JOIN):
            return ()
        if kind in _OUTPUT_LIKE_INPUT:
            return shapes
        if kind == REDUCESCATTER:
            return tuple([(_rows(s[0], process_set),) + tuple(s[1:]) if s else s for s in shapes])
        return None

    @staticmethod
    def _overlap(
        kind: int, process_set: ProcessSet, array: int, shape: Shape, target: int, output: Shape, size: int
    ) -> bool:
        """Returns whether an array and its target overlap in a way that the library refuses."""
        nbytes, out_bytes = math.prod(shape) * size, math.prod(output) * size
        if array + nbytes <= target or target + out_bytes <= array:
            return False
        if kind in (ALLGATHER, REDUCESCATTER):
            me = process_set.rank() or 0
            if kind == ALLGATHER:
                return array != target + me * nbytes
            return nbytes != out_bytes * (process_set.size() or 1) or target != array + me * out_bytes
        return array != target or nbytes != out_bytes or kind in (ALLTOALL, GATHER, SCATTER)

    def _not_on_device(self, op: Operation) -> str:
        """Returns why an operation on tensors on a CUDA device must be copied through host memory, or an empty text."""
        name = KIND_NAMES[op.kind]
        if not self.place().devices:
            return _library.text_of(waiting.hvd_why_no_devices) or "operations on CUDA devices are not possible"
        if op.kind in (SEND, RECV):
            return f"a {name} is a message, which NCCL does not send for gohvd"
        return ""

    def _warn(self, why: str) -> None:
        """Shows why tensors on CUDA devices are copied through host memory, once for each reason."""
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"tensors on CUDA devices are copied through host memory: {why}", RuntimeWarning, stacklevel=5)

    def simple(self, kind: int, process_set: ProcessSet) -> Call[Any]:
        """Runs a barrier or a join, waits until it is done, and returns it."""
        return self.call(_no_arrays, operation(kind), None, process_set, (), take=_settled, wait=True)


_FACTS = (
    "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous", "has_devices",
)  # fmt: skip

class _NoArrays(Framework[Any]):
    def operands(self, op: Operation, x: Any, target: Any) -> tuple[Sequence[Any], None]:
        return (), None


_no_arrays = _NoArrays()


def _settled(call: Call[A]) -> Call[A]:
    call.results()
    return call


def check_root(root: int, process_set: ProcessSet, kind: int = BROADCAST) -> None:
    """Raises ValueError if the rank root is not a member of the set. Before init, the function does nothing, because
    the operation raises the error then.
    """
    if engine.initialized() and process_set.ranks is not None and root not in process_set.ranks:
        raise ValueError(f"{KIND_NAMES[kind]}: root rank {root} is not in process set {process_set.ranks}")


def check_message(peer: int | None, tag: int, process_set: ProcessSet, kind: int) -> int:
    """Returns the peer of a send or a recv for the library, which is ANY_SOURCE for None. Raises ValueError if the peer is
    not another member of the set, or if the tag is not valid. Before init, the function checks only the tag, because
    the operation raises the error then.
    """
    what = KIND_NAMES[kind]
    if not 0 <= tag < 1 << 31:
        raise ValueError(f"{what}: got tag {tag}, want 0 to 2147483647")
    if peer is None:
        return ANY_SOURCE
    ranks = process_set.ranks
    if engine.initialized() and ranks is not None and (peer not in ranks or peer == engine.place().rank):
        raise ValueError(f"{what}: got rank {peer}, want another rank of process set {ranks}")
    return peer


def check_timeout(timeout: float | None, what: str) -> float:
    """Returns a timeout for the library, which is 0 for None. Raises ValueError if the timeout is not positive."""
    if timeout is None:
        return 0.0
    if not timeout > 0:
        raise ValueError(f"{what}: got a timeout of {timeout} s, want more than 0 s")
    return timeout


def message(
    kind: int, peer: int | None, tag: int, process_set: ProcessSet, timeout: float | None = None
) -> Operation:
    """Returns a send to a peer or a recv from it. Raises ValueError if an argument is not valid."""
    checked = check_message(peer, tag, process_set, kind)
    return operation(kind, peer=checked, tag=tag, timeout=check_timeout(timeout, KIND_NAMES[kind]))


def check_splits(
    splits: Sequence[int] | None, shape: Shape, process_set: ProcessSet, kind: int = ALLTOALL
) -> tuple[int, ...]:
    """Returns splits as a tuple, which is empty if splits is None. Raises ValueError if splits does not fit the process
    set and the shape of the tensor.
    """
    n, what = len(process_set.ranks or ()), KIND_NAMES[kind]
    if not engine.initialized() or not shape:
        return ()
    if splits is None or len(splits) == 0:
        if n and shape[0] % n:
            raise ValueError(f"{what}: got {shape[0]} rows and no splits, want a multiple of {n} rows or {n} splits")
        return ()
    given = tuple([int(s) for s in splits])
    if len(given) != n or min(given) < 0 or sum(given) > shape[0]:
        raise ValueError(
            f"{what}: got splits {list(given)}, want one for each of {n} members, none negative, "
            f"with a sum of at most {shape[0]} rows"
        )
    return given


def _rows(rows: int, process_set: ProcessSet) -> int:
    """Returns the number of rows that this rank gets in a reducescatter. If the rows do not divide evenly, each of the
    first ranks gets one row more.
    """
    members = process_set.ranks or [0]
    me = members.index(engine.place().rank)
    return rows // len(members) + (1 if me < rows % len(members) else 0)


def ranks_of(comm: Any, job: Any = None) -> list[int]:
    """Returns the ranks of the job that are members of the mpi4py communicator comm. job is the communicator with all
    ranks of the job, by default MPI.COMM_WORLD. Raises ValueError if it lacks a member of comm.
    """
    from mpi4py import MPI

    group, all_ranks = comm.Get_group(), (MPI.COMM_WORLD if job is None else job).Get_group()
    ranks = sorted(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), all_ranks))
    if MPI.UNDEFINED in ranks:
        raise ValueError(
            f"got an mpi4py communicator with {len(ranks)} processes, of which {ranks.count(MPI.UNDEFINED)} are not ranks "
            "of the job"
        )
    return ranks


engine = Engine()

os.register_at_fork(after_in_child=engine.after_fork)
