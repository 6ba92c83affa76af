"""The functions and types of libgohvd, the library that runs the engine of a rank in this process (docs/c-api.md).

gohvd.h says what each function does. A function that waits for other ranks is called for at most ``SLICE`` seconds at a
time, so that signal handlers run soon.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from .exceptions import HorovodInternalError, LibraryError, MismatchError, NotInitializedError, PeerError

_ABI_VERSION = 1
_FILE = "libgohvd.so"

SLICE = c_double(0.05)  # ctypes passes it on without a conversion
"""The longest time in seconds in which a wait does not notice a signal. A signal handler should run within 0.1 s, also
if the thread must wait for a processor.
"""

SUCCESS = 0
_USAGE, _DUPLICATE_NAME, _MISMATCH, _PEER, _NOT_INITIALIZED, INTERNAL, NO_HANDLE, _FORKED = 1, 2, 3, 4, 7, 9, 10, 11
PENDING = 12

# The kinds of operations.
ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, JOIN = range(1, 8)
REDUCE, GATHER, SCATTER = range(10, 13)
SEND, RECV = range(14, 16)

KIND_NAMES = {
    ALLREDUCE: "allreduce",
    ALLGATHER: "allgather",
    BROADCAST: "broadcast",
    ALLTOALL: "alltoall",
    REDUCESCATTER: "reducescatter",
    BARRIER: "barrier",
    JOIN: "join",
    REDUCE: "reduce",
    GATHER: "gather",
    SCATTER: "scatter",
    SEND: "send",
    RECV: "recv",
}

# The number and the size in bytes of each element type. The keys are the names of the types in numpy and torch.
DTYPES: dict[str, tuple[int, int]] = {
    "uint8": (1, 1),
    "int8": (2, 1),
    "uint16": (3, 2),
    "int16": (4, 2),
    "int32": (5, 4),
    "int64": (6, 8),
    "float16": (7, 2),
    "bfloat16": (8, 2),
    "float32": (9, 4),
    "float64": (10, 8),
    "bool": (11, 1),
}

ANY_SOURCE = -1
"""The peer of a recv that takes a message of any rank."""

GROUPED = 1
ON_DEVICE = 8
FAILED = 1
MEMBERS_ONLY = 1
PUSH, PULL, IN_SLICES = 1, 2, 4
REMOVED, SAVED, STEP = 1, 4, 8
LOOSE = 1
HELD_NOTHING, HELD_GRANTED, HELD_SAVED = 0, 1, 2
TRAINING_DONE, TRAINING_CHANGED, TRAINING_FAILED, TRAINING_ABANDONED = range(4)


class Tensor(Structure):
    _fields_ = [
        ("input", c_void_p),
        ("output", c_void_p),
        ("output_bytes", c_uint64),
        ("shape", c_void_p),
        ("dims", c_uint32),
        ("dtype", c_uint32),
    ]


class Op(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("reduction", c_uint32),
        ("compression", c_uint32),
        ("flags", c_uint32),
        ("name", c_void_p),
        ("tensors", c_void_p),
        ("num_tensors", c_uint32),
        ("process_set", c_int32),
        ("root", c_int32),
        ("peer", c_int32),
        ("tag", c_uint32),
        ("num_splits", c_uint32),
        ("splits", c_void_p),
        ("prescale", c_double),
        ("postscale", c_double),
        ("timeout_seconds", c_double),
        ("device", c_int32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("allocate", c_void_p),
        ("context", c_void_p),
        ("result_stream", c_void_p),
    ]


Allocate = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_uint32, c_uint64)
"""The type of the field allocate of an Op."""


class Output(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bytes", c_uint64),
        ("shape", POINTER(c_int64)),
        ("dims", c_uint32),
        ("reserved", c_uint32),
    ]


class Result(Structure):
    """The result of an operation. Its memory is freed when the object is gone."""

    _fields_ = [
        ("size", c_uint32),
        ("num_outputs", c_uint32),
        ("outputs", POINTER(Output)),
        ("received", POINTER(c_int64)),
        ("num_received", c_uint32),
        ("source", c_int32),
        ("last_joined", c_int32),
        ("process_set", c_int32),
        ("memory", c_void_p),
    ]

    def __init__(self) -> None:
        super().__init__(ctypes.sizeof(Result))

    def __del__(self) -> None:
        if self.memory and not sys.is_finalizing():
            quick.hvd_free_result(ctypes.addressof(self))


class _Error(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("status", c_uint32),
        ("text", c_char_p),
        ("operation", c_char_p),
        ("tensor", c_char_p),
        ("ranks", POINTER(c_int32)),
        ("num_ranks", c_uint32),
        ("shut_down", c_uint32),
    ]


class Ranks(Structure):
    _fields_ = [("ranks", POINTER(c_int32)), ("num_ranks", c_uint32), ("reserved", c_uint32)]

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__((c_int32 * len(ranks))(*ranks), len(ranks))


class InitOptions(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("num_settings", c_uint32),
        ("settings", POINTER(c_char_p)),
        ("process_sets", POINTER(Ranks)),
        ("num_process_sets", c_uint32),
        ("reserved", c_uint32),
        ("mpi_comm", POINTER(c_int32)),
    ]


class Elastic(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("removed", c_uint32),
        ("generation", c_uint64),
        ("pending", c_uint32),
        ("changes", c_uint32),
        ("held", c_uint32),
        ("restore", c_uint32),
        ("missing", c_uint32),
        ("root", c_int32),
        ("pairs", c_uint32),
        ("source", c_int32),
        ("receiver", c_int32),
    ]


class Node(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("role", c_uint32),
        ("rank", c_int32),
        ("num_workers", c_int32),
        ("num_servers", c_int32),
        ("reserved", c_int32),
    ]


class Exchange(Structure):
    _fields_ = [
        ("size", c_uint32),
        ("app", c_int32),
        ("dtype", c_uint32),
        ("flags", c_uint32),
        ("keys", c_void_p),
        ("num_keys", c_uint64),
        ("values", c_void_p),
        ("values_bytes", c_uint64),
        ("results", c_void_p),
        ("results_bytes", c_uint64),
        ("command", c_int32),
        ("priority", c_int32),
    ]


Handle = c_uint64

# The type of a parameter that is a handle. ctypes converts an int to a c_void_p in a fifth of the time that it takes to
# make a c_uint64 of it.
_HANDLE = c_void_p

# The types of the arguments of the functions.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "hvd_last_error": (POINTER(_Error),),
    "hvd_version": (),
    "hvd_mpi_built": (),
    "hvd_gpu_libraries": (c_int32, POINTER(c_void_p)),
    "hvd_init": (POINTER(InitOptions), POINTER(Handle)),
    "hvd_shutdown": (c_char_p, c_uint32, POINTER(Handle)),
    "hvd_check": (),
    "hvd_rank": (),
    "hvd_size": (),
    "hvd_local_rank": (),
    "hvd_local_size": (),
    "hvd_cross_rank": (),
    "hvd_cross_size": (),
    "hvd_is_homogeneous": (),
    "hvd_has_devices": (),
    "hvd_epoch": (),
    "hvd_new_unique_id": (POINTER(InitOptions), POINTER(c_void_p)),
    "hvd_submit": (c_void_p, c_void_p),
    "hvd_run": (c_void_p, c_double, c_void_p, c_void_p),
    "hvd_wait": (_HANDLE, c_double, c_void_p),
    "hvd_finish": (_HANDLE, c_double, c_void_p),
    "hvd_wait_any": (POINTER(Handle), c_size_t, c_double, POINTER(c_size_t)),
    "hvd_poll": (_HANDLE, c_void_p),
    "hvd_release": (_HANDLE,),
    "hvd_new_gate": (POINTER(Handle),),
    "hvd_open_gate": (_HANDLE,),
    "hvd_free_result": (c_void_p,),
    "hvd_alloc": (c_uint64, POINTER(c_void_p)),
    "hvd_free": (c_void_p,),
    "hvd_add_process_set": (POINTER(Ranks), c_uint32, c_char_p, c_double, POINTER(c_int32), POINTER(Handle)),
    "hvd_remove_process_set": (c_int32, c_double, POINTER(Handle)),
    "hvd_process_sets": (POINTER(c_int32), c_uint32, POINTER(c_uint32)),
    "hvd_process_set_ranks": (c_int32, POINTER(c_int32), c_uint32, POINTER(c_uint32)),
    "hvd_elastic": (POINTER(Elastic),),
    "hvd_elastic_join": (c_uint32, POINTER(Handle)),
    "hvd_elastic_synced": (POINTER(Handle),),
    "hvd_elastic_vote": (c_uint32, c_double, POINTER(Handle)),
    "hvd_elastic_end": (c_uint32, POINTER(Handle)),
    "hvd_start_timeline": (c_char_p, c_int32),
    "hvd_stop_timeline": (),
    "hvd_mark_step": (c_uint64,),
    "hvd_begin_range": (),
    "hvd_end_range": (c_char_p, c_uint64),
    "hvd_dump": (POINTER(c_void_p),),
    "hvd_why_no_devices": (POINTER(c_void_p),),
    "hvd_free_text": (c_void_p,),
    "hvd_ps_start": (POINTER(c_char_p), c_uint32, POINTER(Handle)),
    "hvd_ps_node": (POINTER(Node),),
    "hvd_ps_serve": (c_int32, c_uint32, c_char_p, POINTER(c_double), c_uint32),
    "hvd_ps_exchange": (POINTER(Exchange), POINTER(Handle)),
    "hvd_ps_clock": (POINTER(Handle),),
    "hvd_ps_barrier": (c_int32, POINTER(Handle)),
    "hvd_ps_finalize": (c_int32, POINTER(Handle)),
    "hvd_ps_fail": (c_char_p, POINTER(Handle)),
}
_RESULTS: dict[str, Any] = {"hvd_free_result": None, "hvd_free_text": None, "hvd_mark_step": None,
    "hvd_begin_range": c_uint64, "hvd_epoch": c_uint64, "hvd_end_range": None, "hvd_version": c_char_p}
"""The types of the results of the functions that do not return a number."""


def path() -> str:
    """Returns the path of the library: that in HVD_LIBRARY, or else in this package, or else in bin of the checkout.
    Raises LibraryError if there is none.
    """
    given = os.environ.get("HVD_LIBRARY")
    if given:
        return given
    package = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.join(package, "lib"), os.path.join(os.path.dirname(os.path.dirname(package)), "bin")]
    for place in places:
        if os.path.exists(os.path.join(place, _FILE)):
            return os.path.join(place, _FILE)
    raise LibraryError(
        f"there is no {_FILE} in {', '.join(places)}: install gohvd from a wheel, build it in a checkout with "
        "`make libgohvd`, or set HVD_LIBRARY to its path"
    )


class _Functions:
    """The functions of the library. It is loaded when the first one is used, and not when this module is imported,
    because a process that was forked after the library was loaded cannot use it.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        # Python calls this method only if the object does not have the attribute yet.
        arguments = _FUNCTIONS[name]
        function = getattr(_loaded(self._loader), name)
        function.argtypes = arguments
        if name in _RESULTS:
            function.restype = _RESULTS[name]
        setattr(self, name, function)
        return function


@functools.lru_cache(maxsize=None)
def _loaded(loader: Any) -> Any:
    file = path()
    try:
        library = loader(file)
    except OSError as e:
        raise LibraryError(f"cannot load the library of gohvd: {e}") from e
    version = library.hvd_abi_version() if hasattr(library, "hvd_abi_version") else 0
    if version != _ABI_VERSION:
        raise LibraryError(
            f"{file} has version {version} of its interface, and this package needs version {_ABI_VERSION}: install "
            "the library and the package from one version of gohvd"
        )
    return library


waiting: Any = _Functions(ctypes.CDLL)
"""The functions, which release the interpreter's lock during a call."""
quick: Any = _Functions(ctypes.PyDLL)
"""The functions, which keep the interpreter's lock during a call. They must not wait then."""


def version() -> str:
    """Returns the version of the library."""
    return quick.hvd_version().decode()


def mpi_built() -> bool:
    """Returns whether the library was built with MPI."""
    return quick.hvd_mpi_built() != 0


def gpu_libraries(count_devices: bool) -> dict[str, Any]:
    """Returns which libraries for GPUs the library loads (docs/nccl.md)."""
    return json.loads(text_of(waiting.hvd_gpu_libraries, count_devices))


told = False
"""Whether error has returned an error since the job has failed."""


def error(status: int) -> Exception:
    """Returns the exception for the status that a function has just returned in this thread. Wrong arguments are a
    ValueError, as in Horovod.
    """
    global told
    e = _Error(ctypes.sizeof(_Error))
    quick.hvd_last_error(ctypes.byref(e))
    text = e.text.decode(errors="replace") if e.status == status else f"hvd: the operation failed with status {status}"
    operation, tensor = e.operation, e.tensor  # copies, because hvd_check may free the texts of e
    told = told or status == _PEER or quick.hvd_check() != SUCCESS
    if status == _USAGE:
        return ValueError(text)
    if status == _DUPLICATE_NAME:
        return ValueError(
            f'hvd: {operation.decode()} "{tensor.decode()}": a tensor with the same name as another tensor that is '
            "currently being processed, or whose handle was not synchronized; use another name, or synchronize first"
        )
    if status == _MISMATCH:
        return MismatchError(text)
    if status == _PEER:
        return PeerError(text, e.ranks[: e.num_ranks] if e.status == status else ())
    if status == _NOT_INITIALIZED:
        return NotInitializedError()
    if status == _FORKED:
        return HorovodInternalError(
            f"process {os.getpid()} was forked from a rank of the job and is not a rank itself: "
            "only the process that called hvd.init can communicate"
        )
    return HorovodInternalError(text)


def check(status: int) -> None:
    """Raises the error of a function that has just returned a status in this thread."""
    if status:
        raise error(status)


def wait(handle: Handle, result: Result | None = None, limit: float = math.inf) -> None:
    """Waits for something that a function has begun, and raises its error. After the limit, in seconds, it raises
    TimeoutError, and the handle can still be used.
    """
    into = None if result is None else ctypes.addressof(result)
    end = time.monotonic() + limit
    while True:
        status = waiting.hvd_wait(handle.value, SLICE, into)
        if status != PENDING:
            check(status)
            return
        if time.monotonic() > end:
            raise TimeoutError


@contextlib.contextmanager
def new_handle() -> Iterator[Handle]:
    """Is a context with a new handle, which is released if an exception ends the context, as one of a signal handler."""
    handle = Handle()
    try:
        yield handle
    except BaseException:
        quick.hvd_release(handle.value)
        raise


def call(function: Any, *args: Any) -> None:
    """Calls a function whose last parameter is a handle, and waits for what it has begun."""
    with new_handle() as handle:
        check(function(*args, ctypes.byref(handle)))
        wait(handle)


abandoned: collections.deque[tuple[int, Any]] = collections.deque()
"""What the program has dropped in flight: handles, and what must be kept alive until they are done."""


def abandon(handle: int, keep: Any) -> None:
    """Keeps something alive until a handle is done. Finalizers may call it, because it takes no lock."""
    abandoned.append((handle, keep))


def reap() -> None:
    """Forgets the abandoned handles that are done. Their names are free then."""
    for _ in range(len(abandoned)):
        try:
            handle, keep = abandoned.popleft()
        except IndexError:
            return  # another thread has taken the last one
        if quick.hvd_wait(handle, 0.0, None) == PENDING:
            abandoned.append((handle, keep))


def settings(given: dict[str, str]) -> Any:
    """Returns settings as an array of texts in the form NAME=value."""
    return (c_char_p * len(given))(*[whole(f"{name}={value}".encode()) for name, value in given.items()])


def whole(text: bytes) -> bytes:
    """Returns a name, a path or a setting that the library gets. Raises ValueError if it has a null character, at which the
    library would cut it.
    """
    if b"\0" in text:
        raise ValueError(f"gohvd: {text.decode(errors='backslashreplace')!r} has a null character, want a text without one")
    return text


def text_of(function: Any, *args: Any) -> str:
    """Calls a function whose last parameter is the place of a text, and returns the text."""
    at = c_void_p()
    check(function(*args, ctypes.byref(at)))
    try:
        return ctypes.string_at(at).decode()
    finally:
        waiting.hvd_free_text(at)


def numbers_of(function: Any, *args: Any) -> list[int]:
    """Calls a function that stores a list of numbers, and returns the list."""
    capacity, count = 0, c_uint32()
    while True:
        numbers = (c_int32 * capacity)()
        check(function(*args, numbers, capacity, ctypes.byref(count)))
        if count.value <= capacity:
            return list(numbers[: count.value])
        capacity = count.value


def memory_at(address: int, nbytes: int) -> Any:
    """Returns the memory at an address as a ctypes array. The memory must stay valid as long as the array exists."""
    return (ctypes.c_ubyte * nbytes).from_address(address)


class Gate:
    """Lets a thread wait for operations until another thread has something to tell it."""

    def __init__(self) -> None:
        self._handle = Handle()
        check(quick.hvd_new_gate(self._handle))

    def open(self) -> None:
        """Ends the wait."""
        check(quick.hvd_open_gate(self._handle.value))

    def wait(self, handles: Sequence[int]) -> None:
        """Waits until one of the handles is done or does not exist any more, or the gate is open."""
        both = [*handles, self._handle.value]
        numbers, index = (Handle * len(both))(*both), c_size_t()
        while waiting.hvd_wait_any(numbers, len(both), SLICE, index) == PENDING:
            pass

    def __del__(self) -> None:
        if self._handle and not sys.is_finalizing():
            quick.hvd_release(self._handle.value)
