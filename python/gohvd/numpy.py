"""Collectives on numpy arrays.

Every operation has a blocking form, which returns the result, and an asynchronous form (``_async``), which returns a
``Handle``. The element type of an array is bool, an integer of 8 to 64 bits except uint32 and uint64, float16, float32
or float64. If an array is in memory from ``gohvd.alloc`` or from ``alloc`` of this module, operations work on it
without copying. Ranks match operations by name. They match operations without a name in the order of the calls.
"""

from __future__ import annotations

from typing import Any, Dict, Generic, List, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np

from . import _engine
from . import _wire as wire
from ._engine import Adasum, Average, AverageActive, Max, Min, Product, Shape, Sum
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
R = TypeVar("R")


class _Numpy(_engine.Framework[Array]):
    def address(self, x: Array) -> int:
        # An array in an arena does not own its memory, so its base is set. An array without a base is not in an arena.
        return 0 if x.base is None else x.ctypes.data

    def wrap(self, view: memoryview, dtype: Any, shape: Shape) -> Array:
        return np.frombuffer(view, dtype=dtype).reshape(shape)

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def clone(self, x: Array, like: Array) -> Array:
        return x.copy()

    def fresh(self, data: memoryview, shape: Shape, like: Array) -> Array:
        return np.frombuffer(data, dtype=like.dtype).reshape(shape).copy()


_numpy = _Numpy()


class Handle(Generic[R]):
    """The handle of an asynchronous operation. Until the operation is done, the program must not write the input arrays
    and must not read the output arrays.
    """

    __slots__ = ("_call", "_take")

    def __init__(self, call: _engine.Call[Array], take: Any) -> None:
        self._call = call
        self._take = take

    def done(self) -> bool:
        """Returns whether the operation is done. If it is done, ``wait`` does not block."""
        return self._call.done()

    def wait(self) -> R:
        """Waits until the operation is done and returns its result. Later calls return the same result."""
        result: R = self._take(self._call)
        return result


def _one(call: _engine.Call[Array]) -> Array:
    return call.results()[0]


def _none(call: _engine.Call[Array]) -> None:
    call.results()


def _all(call: _engine.Call[Array]) -> List[Array]:
    return call.results()


def _sender(call: _engine.Call[Array]) -> int:
    call.results()
    return call.source


def _with_splits(call: _engine.Call[Array]) -> Tuple[Array, List[int]]:
    return call.results()[0], list(call.received)


_codes: Dict[np.dtype, Tuple[int, int]] = {}
"""The results of _code. They are cached, because numpy needs more time to return the name of a type than the rest of a
submission needs.
"""


def _code(dtype: np.dtype) -> Tuple[int, int]:
    known = _codes.get(dtype)
    if known is not None:
        return known
    known = wire.DTYPES.get(dtype.name)
    if known is None or not dtype.isnative:
        raise ValueError(f"numpy arrays of type {dtype} are not supported")
    if dtype.kind not in "biuf":
        # The type is defined by another package, such as ml_dtypes. numpy knows only its size, and frombuffer refuses
        # it.
        raise ValueError(f"numpy has no type {dtype.name}: use float32, or torch.bfloat16 with gohvd.torch")
    _codes[dtype] = known
    return known


def _begin(
    kind: int,
    xs: Sequence[Any],
    name: Optional[str],
    process_set: ProcessSet,
    out: Optional[Sequence[Array]] = None,
    **kw: Any,
) -> _engine.Call[Array]:
    if not len(xs):
        raise ValueError(f"grouped {wire.KIND_NAMES[kind]}: got no arrays, want at least one")
    arrays = [np.asarray(x, order="C") for x in xs]
    dtype = arrays[0].dtype
    code = _code(dtype)
    shapes, types = [], None
    for x in arrays:
        if x.dtype != dtype and types is None:
            types = tuple([(y.dtype, _code(y.dtype)) for y in arrays])
        shapes.append(x.shape)
    targets: Optional[Sequence[Array]] = None
    if out is not None:
        if len(out) != len(arrays):
            raise ValueError(f"out has {len(out)} arrays, want {len(arrays)}")
        for o, x in zip(out, arrays):
            if o.dtype != x.dtype or o.shape != x.shape or not o.flags.writeable:
                raise ValueError(f"out is {o.dtype} of shape {o.shape}, want a writable {x.dtype} of shape {x.shape}")
        targets = arrays if all(o is x for o, x in zip(out, arrays)) else out
    return _engine.engine.begin(
        _numpy, kind, arrays, tuple(shapes), dtype, code, process_set, name, targets=targets, types=types, **kw
    )


def _allreduce(
    array: Any,
    op: int,
    name: Optional[str],
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    out: Optional[Array],
    at_once: bool,
) -> _engine.Call[Array]:
    return _begin(
        wire.ALLREDUCE, [array], name, process_set, None if out is None else [out],
        reduce_op=_reduction(op), prescale=prescale, postscale=postscale, at_once=at_once,
    )  # fmt: skip


def allreduce_async(
    array: Any,
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Optional[Array] = None,
) -> Handle[Array]:
    return Handle(_allreduce(array, op, name, prescale_factor, postscale_factor, process_set, out, False), _one)


def allreduce(
    array: Any,
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Optional[Array] = None,
) -> Array:
    """Reduces an array over all ranks, element by element, and returns the result.

    The array must have the same shape and type at all ranks. If out is given, it receives the result. out may be the
    array itself. Otherwise the result is a new array.
    """
    return _one(_allreduce(array, op, name, prescale_factor, postscale_factor, process_set, out, True))


def grouped_allreduce_async(
    arrays: Sequence[Any],
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Optional[Sequence[Array]] = None,
) -> Handle[List[Array]]:
    call = _begin(
        wire.ALLREDUCE, arrays, name, process_set, out, grouped=True,
        reduce_op=_reduction(op), prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip
    return Handle(call, _all)


def grouped_allreduce(
    arrays: Sequence[Any],
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Optional[Sequence[Array]] = None,
) -> List[Array]:
    """Reduces arrays as ``allreduce`` does and returns the results. Either all arrays are reduced or none is. The
    arrays may have different types.
    """
    return _engine.begin_and_wait(
        grouped_allreduce_async, arrays, op, name, prescale_factor, postscale_factor, process_set, out
    ).wait()


def allgather_async(
    array: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    return Handle(_begin(wire.ALLGATHER, [array], name, process_set), _one)


def allgather(array: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Array:
    """Returns the arrays of all ranks, concatenated along the first dimension. The arrays may have different sizes in
    this dimension.
    """
    return _engine.begin_and_wait(allgather_async, array, name, process_set).wait()


def grouped_allgather_async(
    arrays: Sequence[Any], name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle[List[Array]]:
    return Handle(_begin(wire.ALLGATHER, arrays, name, process_set, grouped=True), _all)


def grouped_allgather(
    arrays: Sequence[Any], name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[Array]:
    """Gathers arrays as ``allgather`` does and returns the results. Either all arrays are gathered or none is. The
    arrays must have the same type.
    """
    return _engine.begin_and_wait(grouped_allgather_async, arrays, name, process_set).wait()


def broadcast_async(
    array: Any,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    out: Optional[Array] = None,
) -> Handle[Array]:
    _engine.check_root(root_rank, process_set)
    call = _begin(wire.BROADCAST, [array], name, process_set, None if out is None else [out], root=root_rank)
    return Handle(call, _one)


def broadcast(
    array: Any,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    out: Optional[Array] = None,
) -> Array:
    """Returns the array of the rank root_rank. root_rank is a rank of the job even if process_set is given. The array
    must have the same shape and type at all ranks.
    """
    return _engine.begin_and_wait(broadcast_async, array, root_rank, name, process_set, out).wait()


def reduce_async(
    array: Any,
    root_rank: int,
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Optional[Array] = None,
) -> Handle[Optional[Array]]:
    _engine.check_root(root_rank, process_set, wire.REDUCE)
    call = _begin(
        wire.REDUCE, [array], name, process_set, None if out is None else [out], root=root_rank,
        reduce_op=_reduction(op), prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip
    return Handle(call, _one if root_rank == rank() else _none)


def reduce(
    array: Any,
    root_rank: int,
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Optional[Array] = None,
) -> Optional[Array]:
    """Reduces an array as ``allreduce`` does. Returns the result at the rank root_rank, and None at the other ranks.
    root_rank is a rank of the job even if process_set is given. Only the root uses out.
    """
    return _engine.begin_and_wait(
        reduce_async, array, root_rank, op, name, prescale_factor, postscale_factor, process_set, out
    ).wait()


def gather_async(
    array: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle[Optional[Array]]:
    _engine.check_root(root_rank, process_set, wire.GATHER)
    call = _begin(wire.GATHER, [array], name, process_set, root=root_rank)
    return Handle(call, _one if root_rank == rank() else _none)


def gather(
    array: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Optional[Array]:
    """Returns the arrays of all ranks at the rank root_rank, concatenated along the first dimension, and None at the
    other ranks. The arrays may have different sizes in this dimension. root_rank is a rank of the job even if
    process_set is given.
    """
    return _engine.begin_and_wait(gather_async, array, root_rank, name, process_set).wait()


def scatter_async(
    array: Any,
    root_rank: int,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    _engine.check_root(root_rank, process_set, wire.SCATTER)
    array, given = np.asarray(array, order="C"), ()
    if _engine.engine.initialized() and root_rank != rank():
        array = np.empty(0, array.dtype)
    else:
        given = _engine.check_splits(splits, array.shape, process_set, wire.SCATTER)
    return Handle(_begin(wire.SCATTER, [array], name, process_set, root=root_rank, splits=given), _one)


def scatter(
    array: Any,
    root_rank: int,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Returns this rank's rows of the array of the rank root_rank: splits[i] rows go to member i. If splits is None,
    each member gets the same number of rows. root_rank is a rank of the job even if process_set is given.

    At the other ranks splits is ignored, and only the type of the array counts, which may be empty.
    """
    return _engine.begin_and_wait(scatter_async, array, root_rank, splits, name, process_set).wait()


def send_async(
    array: Any,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: Optional[float] = None,
) -> Handle[None]:
    peer = _engine.check_message(dst, tag, process_set, wire.SEND)
    limit = _engine.check_timeout(timeout, "send")
    return Handle(_begin(wire.SEND, [array], None, process_set, peer=peer, tag=tag, timeout=limit), _none)


def send(
    array: Any,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: Optional[float] = None,
) -> None:
    """Sends an array to the rank dst, which must receive it by ``recv`` with the same tag, into an array of the same
    type and size. dst is a rank of the job even if process_set is given. No other rank takes part. Large arrays are
    sent when dst receives them. If the send takes longer than the timeout, in seconds, the job ends. By default
    HVD_OPERATION_TIMEOUT_SECONDS applies.
    """
    _engine.begin_and_wait(send_async, array, dst, tag, process_set, timeout).wait()


def recv_async(
    array: Array,
    src: Optional[int] = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: Optional[float] = None,
) -> Handle[int]:
    peer = _engine.check_message(src, tag, process_set, wire.RECV)
    limit = _engine.check_timeout(timeout, "recv")
    return Handle(_begin(wire.RECV, [array], None, process_set, [array], peer=peer, tag=tag, timeout=limit), _sender)


def recv(
    array: Array,
    src: Optional[int] = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: Optional[float] = None,
) -> int:
    """Receives an array that the rank src has sent by ``send`` with the same tag. If src is None, receives from any
    rank. Writes the elements to the array and returns the rank that has sent them. src is a rank of the job even if
    process_set is given. If it takes longer than the timeout, in seconds, the job ends. By default
    HVD_OPERATION_TIMEOUT_SECONDS applies.
    """
    return _engine.begin_and_wait(recv_async, array, src, tag, process_set, timeout).wait()


def alltoall_async(
    array: Any,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tuple[Array, List[int]]]:
    array = np.asarray(array, order="C")
    given = _engine.check_splits(splits, array.shape, process_set)
    return Handle(_begin(wire.ALLTOALL, [array], name, process_set, splits=given), _with_splits)


def alltoall(
    array: Any,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Tuple[Array, List[int]]:
    """Sends splits[i] rows of the array to member i. If splits is None, each member gets the same number of rows.

    Returns the received rows, in the order of the members that sent them, and the number of rows received from each
    member.
    """
    return _engine.begin_and_wait(alltoall_async, array, splits, name, process_set).wait()


def reducescatter_async(
    array: Any,
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    call = _begin(
        wire.REDUCESCATTER, [array], name, process_set,
        reduce_op=_reduction(op), prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip
    return Handle(call, _one)


def reducescatter(
    array: Any,
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduces an array as ``allreduce`` does and returns this rank's part of the rows.

    If the rows do not divide evenly among the ranks, each of the first ranks gets one row more.
    """
    return _engine.begin_and_wait(
        reducescatter_async, array, op, name, prescale_factor, postscale_factor, process_set
    ).wait()


def grouped_reducescatter_async(
    arrays: Sequence[Any],
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[List[Array]]:
    call = _begin(
        wire.REDUCESCATTER, arrays, name, process_set, grouped=True,
        reduce_op=_reduction(op), prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip
    return Handle(call, _all)


def grouped_reducescatter(
    arrays: Sequence[Any],
    op: int = Average,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> List[Array]:
    """Reduces and scatters arrays as ``reducescatter`` does and returns the results. Either all arrays are reduced or
    none is. The arrays must have the same type.
    """
    return _engine.begin_and_wait(
        grouped_reducescatter_async, arrays, op, name, prescale_factor, postscale_factor, process_set
    ).wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all members of the process set have called barrier."""
    _engine.engine.simple(wire.BARRIER, process_set)


def join() -> int:
    """Declares that this rank has no more data, and waits until all ranks have joined. Returns the rank that joined
    last.

    During the wait, this rank takes part in the allreduces of the other ranks.
    """
    return _engine.engine.simple(wire.JOIN, global_process_set).last_joined


def alloc(shape: Union[int, Sequence[int]], dtype: Any = np.float32) -> Array:
    """Returns an array of zeros. Operations work on it without copying. Its memory is freed when the last reference to
    it is gone.
    """
    kind = np.dtype(dtype)
    _code(kind)
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = int(np.prod(dims, dtype=np.int64)) * kind.itemsize
    return np.frombuffer(_engine.engine.alloc(nbytes).view, dtype=kind).reshape(dims)


def _reduction(op: int) -> int:
    if not 0 <= op <= AverageActive:
        raise ValueError(f"got op {op!r}, want Average, Sum, Adasum, Min, Max, Product or AverageActive")
    return op
