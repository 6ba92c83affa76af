"""Collectives on numpy arrays.

Every operation has a blocking form, which returns the result, and an asynchronous form (``_async``), which returns a
``Handle``. The element type of an array is bool, an integer of 8 to 64 bits except uint32 and uint64, float16, float32
or float64. Operations work on the memory of the arrays. In memory from ``gohvd.alloc`` or from ``alloc`` of this module,
large operations are faster (docs/execution.md). Ranks match operations by name. They match operations without a name in
the order of the calls, those of ``allreduce`` apart from those of ``allreduce_async``.
"""

from __future__ import annotations

import ctypes
import math
import operator
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _engine
from ._engine import SYNC_NAME, Adasum, Average, AverageActive, Call, Code, Max, Min, Product, Shape, Sum, operation
from ._library import (
    ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST, DTYPES, GATHER, JOIN, KIND_NAMES, RECV, REDUCE, REDUCESCATTER,
    SCATTER, SEND,
)  # fmt: skip
from .basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .exceptions import HorovodInternalError
from .process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = [
    "Adasum", "Average", "AverageActive", "Handle", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum",
    "add_process_set", "allgather", "allgather_async", "alloc", "allreduce", "allreduce_async", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_async", "cross_rank", "cross_size", "gather", "gather_async",
    "global_process_set", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_async",
    "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_size", "rank", "recv", "recv_async", "reduce", "reduce_async", "reducescatter",
    "reducescatter_async", "remove_process_set", "scatter", "scatter_async", "send", "send_async", "shutdown", "size",
]  # fmt: skip

Array = np.ndarray


# CPython keeps the address of the elements of an array at this offset in the array. This reads it in a fraction of the
# time that numpy takes to return it.
_DATA = object.__basicsize__


def _address(x: Array) -> int:
    return ctypes.c_void_p.from_address(id(x) + _DATA).value or 0


def _reads_addresses() -> bool:
    x = np.zeros(3)
    return platform.python_implementation() == "CPython" and _address(x[1:]) == x.ctypes.data + 8


_codes: dict[np.dtype, Code] = {}
"""The element types that operations have met. numpy needs more time to return the name of a type than the rest of a
submission needs.
"""


class _Numpy(_engine.Framework[Array]):
    def operands(
        self, op: _engine.Operation, x: Any, target: Any
    ) -> tuple[list[Array], Sequence[Array] | None]:
        xs, out = (x, target) if op.grouped else ([x], None if target is None else [target])
        if not len(xs):
            raise ValueError(f"grouped {KIND_NAMES[op.kind]}: got no arrays, want at least one")
        arrays = [np.asarray(x, order="C") for x in xs]
        if out is None:
            return arrays, None
        if len(out) != len(arrays):
            raise ValueError(f"out has {len(out)} arrays, want {len(arrays)}")
        same = True
        for o, x in zip(out, arrays):
            same = same and o is x
            if o is not x and (o.dtype != x.dtype or o.shape != x.shape) or not o.flags.writeable:
                raise ValueError(f"out is {o.dtype} of shape {o.shape}, want a writable {x.dtype} of shape {x.shape}")
        return arrays, arrays if same else out

    def code(self, dtype: np.dtype) -> Code:
        found = _codes.get(dtype) or DTYPES.get(dtype.name)
        if found is None or not dtype.isnative:
            raise ValueError(f"numpy arrays of type {dtype} are not supported")
        if dtype.kind not in "biuf":
            # The type is defined by another package, such as ml_dtypes. numpy knows only its size, and frombuffer
            # refuses it.
            raise ValueError(f"numpy has no type {dtype.name}: use float32, or torch.bfloat16 with gohvd.torch")
        _codes[dtype] = found
        return found

    # An array with the flag carray is contiguous, aligned and writable.

    def address(self, x: Array) -> int:
        return x.ctypes.data

    def plain(self, x: Any) -> int:
        return x.ctypes.data if isinstance(x, Array) and x.flags.carray else 0

    if _reads_addresses():

        def address(self, x: Array, read: Any = ctypes.c_void_p.from_address) -> int:  # noqa: F811
            return read(id(x) + _DATA).value

        def plain(self, x: Any, read: Any = ctypes.c_void_p.from_address) -> int:  # noqa: F811
            return read(id(x) + _DATA).value if isinstance(x, Array) and x.flags.carray else 0

    target_address = plain


    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def empty(self, shape: Shape, like: Array, in_memory: bool = False) -> Array:
        return np.empty(shape, like.dtype)

    def wrap(self, memory: Any, shape: Shape, like: Array) -> Array:
        return np.frombuffer(memory, dtype=like.dtype).reshape(shape)


_numpy = _Numpy()
_call = _engine.engine.call


Handle = Call
"""The handle of an asynchronous operation, with the methods done and wait. Until the operation is done, the program must
not write the input arrays and must not read the output arrays.
"""


def _none(call: Call[Array]) -> None:
    call.results()


def _at_root(root: int) -> Callable[[Call[Array]], None] | None:
    """Returns the function that returns the result of an operation that has one only at the root."""
    return None if root == rank() else _none


def _all(call: Call[Array]) -> Sequence[Array]:
    return call.results()


def _sender(call: Call[Array]) -> int:
    call.results()
    return call.source


def _with_splits(call: Call[Array]) -> tuple[Array, list[int]]:
    return call.results()[0], list(call.received)


def allreduce_async(
    array: Any,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Array | None = None,
) -> Handle[Array]:
    how = operation(ALLREDUCE, op, prescale_factor, postscale_factor)
    return _call(_numpy, how, name, process_set, array, out)


def allreduce(
    array: Any,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Array | None = None,
) -> Array:
    """Reduces an array over all ranks, element by element, and returns the result.

    The array must have the same shape and type at all ranks. If out is given, it receives the result. out may be the
    array itself. Otherwise the result is a new array.
    """
    how = operation(ALLREDUCE, op, prescale_factor, postscale_factor)
    return _call(_numpy, how, SYNC_NAME if name is None else name, process_set, array, out, wait=True)


def grouped_allreduce_async(
    arrays: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Sequence[Array] | None = None,
) -> Handle[list[Array]]:
    how = operation(ALLREDUCE, op, prescale_factor, postscale_factor, grouped=True)
    return _call(_numpy, how, name, process_set, arrays, out, take=_all)


def grouped_allreduce(
    arrays: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Sequence[Array] | None = None,
) -> list[Array]:
    """Reduces arrays as ``allreduce`` does and returns the results. Either all arrays are reduced or none is. The
    arrays may have different types.
    """
    how = operation(ALLREDUCE, op, prescale_factor, postscale_factor, grouped=True)
    return _call(_numpy, how, name, process_set, arrays, out, take=_all, wait=True)


def allgather_async(
    array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    return _call(_numpy, operation(ALLGATHER), name, process_set, array)


def allgather(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Returns the arrays of all ranks, concatenated along the first dimension. The arrays may have different sizes in
    this dimension.
    """
    return _call(_numpy, operation(ALLGATHER), name, process_set, array, wait=True)


def grouped_allgather_async(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]:
    return _call(_numpy, operation(ALLGATHER, grouped=True), name, process_set, arrays, take=_all)


def grouped_allgather(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Gathers arrays as ``allgather`` does and returns the results. Either all arrays are gathered or none is. The
    arrays must have the same type.
    """
    return _call(_numpy, operation(ALLGATHER, grouped=True), name, process_set, arrays, take=_all, wait=True)


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: Array | None = None,
) -> Handle[Array]:
    _engine.check_root(root_rank, process_set)
    how = operation(BROADCAST, root=root_rank)
    return _call(_numpy, how, name, process_set, array, out)


def broadcast(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    out: Array | None = None,
) -> Array:
    """Returns the array of the rank root_rank. root_rank is a rank of the job even if process_set is given. The array
    must have the same shape and type at all ranks.
    """
    _engine.check_root(root_rank, process_set)
    return _call(_numpy, operation(BROADCAST, root=root_rank), name, process_set, array, out, wait=True)


def reduce_async(
    array: Any,
    root_rank: int,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Array | None = None,
) -> Handle[Array | None]:
    _engine.check_root(root_rank, process_set, REDUCE)
    how = operation(REDUCE, op, prescale_factor, postscale_factor, root_rank)
    return _call(_numpy, how, name, process_set, array, out, take=_at_root(root_rank))


def reduce(
    array: Any,
    root_rank: int,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Array | None = None,
) -> Array | None:
    """Reduces an array as ``allreduce`` does. Returns the result at the rank root_rank, and None at the other ranks.
    root_rank is a rank of the job even if process_set is given. Only the root uses out.
    """
    _engine.check_root(root_rank, process_set, REDUCE)
    how = operation(REDUCE, op, prescale_factor, postscale_factor, root_rank)
    return _call(_numpy, how, name, process_set, array, out, take=_at_root(root_rank), wait=True)


def gather_async(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array | None]:
    _engine.check_root(root_rank, process_set, GATHER)
    return _call(_numpy, operation(GATHER, root=root_rank), name, process_set, array, take=_at_root(root_rank))


def gather(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array | None:
    """Returns the arrays of all ranks at the rank root_rank, concatenated along the first dimension, and None at the
    other ranks. The arrays may have different sizes in this dimension. root_rank is a rank of the job even if
    process_set is given.
    """
    _engine.check_root(root_rank, process_set, GATHER)
    return _call(_numpy, operation(GATHER, root=root_rank), name, process_set, array, take=_at_root(root_rank), wait=True)


def scatter_async(
    array: Any,
    root_rank: int,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    how, array = _scattered(array, root_rank, splits, process_set)
    return _call(_numpy, how, name, process_set, array)


def _scattered(
    array: Any, root: int, splits: Sequence[int] | None, process_set: ProcessSet
) -> tuple[_engine.Operation, Array]:
    """Returns a scatter and its array, which is empty at the other ranks."""
    _engine.check_root(root, process_set, SCATTER)
    array = np.asarray(array, order="C")
    if _engine.engine.initialized() and root != rank():
        return operation(SCATTER, root=root), np.empty(0, array.dtype)
    given = _engine.check_splits(splits, array.shape, process_set, SCATTER)
    return operation(SCATTER, root=root, splits=given), array


def scatter(
    array: Any,
    root_rank: int,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Returns this rank's rows of the array of the rank root_rank: splits[i] rows go to member i. If splits is None,
    each member gets the same number of rows. root_rank is a rank of the job even if process_set is given.

    At the other ranks splits is ignored, and only the type of the array counts, which may be empty.
    """
    how, array = _scattered(array, root_rank, splits, process_set)
    return _call(_numpy, how, name, process_set, array, wait=True)


def send_async(
    array: Any,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[None]:
    how = _engine.message(SEND, dst, tag, process_set, timeout)
    return _call(_numpy, how, None, process_set, array, take=_none)


def send(
    array: Any,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> None:
    """Sends an array to the rank dst, which must receive it by ``recv`` with the same tag, into an array of the same
    type and size. dst is a rank of the job even if process_set is given. No other rank takes part. Large arrays are
    sent when dst receives them. If the send takes longer than the timeout, in seconds, the job ends. By default
    HVD_OPERATION_TIMEOUT_SECONDS applies.
    """
    how = _engine.message(SEND, dst, tag, process_set, timeout)
    _call(_numpy, how, None, process_set, array, take=_none, wait=True)


def recv_async(
    array: Array,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[int]:
    how = _engine.message(RECV, src, tag, process_set, timeout)
    return _call(_numpy, how, None, process_set, array, array, take=_sender)


def recv(
    array: Array,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> int:
    """Receives an array that the rank src has sent by ``send`` with the same tag. If src is None, receives from any
    rank. Writes the elements to the array and returns the rank that has sent them. src is a rank of the job even if
    process_set is given. If it takes longer than the timeout, in seconds, the job ends. By default
    HVD_OPERATION_TIMEOUT_SECONDS applies.
    """
    how = _engine.message(RECV, src, tag, process_set, timeout)
    return _call(_numpy, how, None, process_set, array, array, take=_sender, wait=True)


def alltoall_async(
    array: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Array, list[int]]]:
    how = operation(ALLTOALL, splits=_engine.check_splits(splits, np.shape(array), process_set))
    return _call(_numpy, how, name, process_set, array, take=_with_splits)


def alltoall(
    array: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Array, list[int]]:
    """Sends splits[i] rows of the array to member i. If splits is None, each member gets the same number of rows.

    Returns the received rows, in the order of the members that sent them, and the number of rows received from each
    member.
    """
    how = operation(ALLTOALL, splits=_engine.check_splits(splits, np.shape(array), process_set))
    return _call(_numpy, how, name, process_set, array, take=_with_splits, wait=True)


def reducescatter_async(
    array: Any,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    how = operation(REDUCESCATTER, op, prescale_factor, postscale_factor)
    return _call(_numpy, how, name, process_set, array)


def reducescatter(
    array: Any,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduces an array as ``allreduce`` does and returns this rank's part of the rows.

    If the rows do not divide evenly among the ranks, each of the first ranks gets one row more.
    """
    how = operation(REDUCESCATTER, op, prescale_factor, postscale_factor)
    return _call(_numpy, how, name, process_set, array, wait=True)


def grouped_reducescatter_async(
    arrays: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    how = operation(REDUCESCATTER, op, prescale_factor, postscale_factor, grouped=True)
    return _call(_numpy, how, name, process_set, arrays, take=_all)


def grouped_reducescatter(
    arrays: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Reduces and scatters arrays as ``reducescatter`` does and returns the results. Either all arrays are reduced or
    none is. The arrays must have the same type.
    """
    how = operation(REDUCESCATTER, op, prescale_factor, postscale_factor, grouped=True)
    return _call(_numpy, how, name, process_set, arrays, take=_all, wait=True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all members of the process set have called barrier."""
    _engine.engine.simple(BARRIER, process_set)


def join() -> int:
    """Declares that this rank has no more data, and waits until all ranks have joined. Returns the rank that joined
    last.

    During the wait, this rank takes part in the allreduces of the other ranks.
    """
    return _engine.engine.simple(JOIN, global_process_set).last_joined


def alloc(shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
    """Returns an array of zeros. Operations on large arrays in this memory are faster. Its memory is freed when the last reference to
    it is gone.
    """
    kind = np.dtype(dtype)
    _numpy.code(kind)
    dims = [operator.index(n) for n in ((shape,) if isinstance(shape, (int, np.integer)) else shape)]
    if min(dims, default=0) < 0:
        raise ValueError(f"alloc: got shape {tuple(dims)}, want no negative dimension")
    return np.frombuffer(_engine.Block(math.prod(dims) * kind.itemsize).view, dtype=kind).reshape(dims)
