"""The collectives of ``horovod.torch``, with its names, signatures and defaults.

It supports more than Horovod:

- all element types of torch that docs/operations.md lists, including bfloat16 and bool,
- tensors on any device; if the job uses NCCL, those on CUDA devices are not copied to the host,
- ``alloc_tensor``, which makes tensors that operations do not copy.

An operation on a CUDA device begins after the work that is on the current stream when it is begun. When ``synchronize``
has returned, the current stream can use the result. Operations whose result has a size that is not known in advance
(allgather, alltoall, gather, scatter) and messages are copied through host memory.

The data of a tensor in ordinary memory is copied into memory that is shared with the sidecar. The result is copied back
when ``poll`` or ``synchronize`` finds the operation done.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Tuple, Type, Union

import torch

from .. import _engine
from .. import _wire as wire
from .._engine import Adasum, Average, Max, Min, Product, Shape, Sum
from ..basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from ..exceptions import HorovodInternalError
from ..process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ..timeline import start_timeline, stop_timeline
from .compression import Compression, Compressor

__all__ = [
    "Adasum", "Average", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set",
    "alloc_tensor", "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "ccl_built",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "gather", "gather_async", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "poll", "rank", "recv", "recv_async", "reduce", "reduce_async", "reducescatter", "reducescatter_async",
    "remove_process_set", "rocm_built", "scatter", "scatter_async", "send", "send_async", "shutdown", "size",
    "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip

Tensor = torch.Tensor

# The number in the protocol and the size in bytes of each element type.
_DTYPES: Dict[torch.dtype, _engine.Code] = {
    getattr(torch, name): code for name, code in wire.DTYPES.items() if hasattr(torch, name)
}


def write(target: Tensor, source: Tensor) -> None:
    """Copies the elements of source to target, whatever the modes of the thread are in which target was made."""
    # detach keeps autograd from recording the copy. Without detach, torch also refuses to write to a leaf that
    # requires a gradient.
    if target.requires_grad:
        target = target.detach()
    if source.requires_grad:
        source = source.detach()
    if target.is_inference() and not torch.is_inference_mode_enabled():
        # The operation may have begun in torch.inference_mode and end outside of it, perhaps in another thread.
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


class _Torch(_engine.Framework[Tensor]):
    def address(self, x: Tensor) -> int:
        # The memory of a negated view has the elements with the opposite sign, so torch must copy them.
        return x.data_ptr() if x.is_cpu and not x.is_neg() else 0

    def wrap(self, view: memoryview, dtype: Any, shape: Shape) -> Tensor:
        # The engine keeps the array for later operations. If it were an inference tensor, because the caller is in
        # torch.inference_mode, no operation outside of this mode could write to it.
        with torch.inference_mode(False):
            if not len(view):
                return torch.empty(shape, dtype=dtype, device="cpu")
            return torch.frombuffer(view, dtype=dtype).view(shape)

    copy = staticmethod(write)

    def clone(self, x: Tensor, like: Tensor) -> Tensor:
        return x.clone() if like.is_cpu else x.to(like.device)

    def fresh(self, data: memoryview, shape: Shape, like: Tensor) -> Tensor:
        x = torch.empty(shape, dtype=like.dtype, device="cpu")
        if len(data) != x.numel() * x.element_size():
            raise ValueError(f"got a result of {len(data)} bytes, want a {x.dtype} tensor of shape {shape}")
        if len(data):
            # The data is copied into the memory of x, because torch cannot make a tensor over read-only memory.
            _engine.memory_at(x.data_ptr(), len(data))[:] = data
        return x if like.is_cpu else x.to(like.device)

    def device(self, x: Tensor) -> int:
        return x.get_device() if x.is_cuda else -1

    def pointer(self, x: Tensor) -> int:
        return 0 if x.is_neg() else x.data_ptr()

    def empty(self, shape: Shape, like: Tensor) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def stream(self, device: int) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def handle(self, stream: torch.cuda.Stream) -> int:
        return stream.cuda_stream

    def using(self, stream: torch.cuda.Stream) -> ContextManager[Any]:
        return torch.cuda.stream(stream)

    def follow(self, stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(stream.device)
        if current != stream:
            current.wait_stream(stream)


_torch = _Torch()


def alloc_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor of zeros in memory that operations work on without copying. The memory is freed when the last
    reference to it is dropped.
    """
    _, itemsize = _code(dtype)
    count = 1
    for n in shape:
        count *= n
    if count == 0:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(_engine.engine.alloc(count * itemsize).view, dtype=dtype).view(tuple(shape))


def _code(dtype: torch.dtype) -> _engine.Code:
    code = _DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"Tensor type {dtype} is not supported.")
    return code


def _begin(
    kind: int,
    tensors: List[Tensor],
    name: Optional[str],
    process_set: ProcessSet,
    targets: Optional[List[Tensor]] = None,
    reduce_op: int = Average,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Tuple[int, ...] = (),
    peer: int = 0,
    tag: int = 0,
    grouped: bool = False,
    at_once: bool = False,
    later: bool = False,
    types: Optional[Tuple[Tuple[Any, _engine.Code], ...]] = None,
    outputs: Optional[Tuple[Shape, ...]] = None,
    timeout: float = 0.0,
) -> _engine.Call[Tensor]:
    first = tensors[0]
    dtype = first.dtype
    code = _check(first)
    shapes: Tuple[Shape, ...] = tuple([t.shape for t in tensors]) if grouped else (first.shape,)
    return _engine.engine.begin(
        _torch, kind, tensors, shapes, dtype, code, process_set, name, targets=targets, reduce_op=reduce_op,
        prescale=prescale, postscale=postscale, root=root, splits=splits, peer=peer, tag=tag, grouped=grouped,
        at_once=at_once, later=later, types=types, outputs=outputs, timeout=timeout,
    )  # fmt: skip


def _check(tensor: Tensor) -> _engine.Code:
    """Returns the number and size of a tensor's element type. Raises ValueError if the type is not supported, or if the
    tensor is sparse or not contiguous.
    """
    code = _DTYPES.get(tensor.dtype)
    if code is None or tensor.layout is not torch.strided:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return code


# The types that stand for a type of the same size that gohvd does not know, if elements are only moved.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moved(t: Tensor) -> Tensor:
    """Returns the tensor, or its memory as a tensor of a type that gohvd can move between ranks."""
    if t.dtype in _DTYPES:
        return t
    if t.is_complex():
        # A conjugated or negated view has the original elements in its memory.
        return torch.view_as_real(_settled(t)) if t.dtype != torch.complex32 else _settled(t).view(torch.int32)
    size = t.element_size()
    if size in _INTEGERS and not t.dtype.is_floating_point or size == 1:
        return t.view(_INTEGERS[size])
    raise TypeError(f"tensors of type {t.dtype} are not supported")


def _settled(t: Tensor) -> Tensor:
    if t.is_conj() or t.is_neg():
        raise ValueError("got a conjugated or negated view: use resolve_conj() and resolve_neg() first")
    return t


# Handles.


class _Handles:
    """A map from handles to operations in flight. A handle is a number. In each job, handles are counted from 1."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._entries: Dict[int, Tuple[_engine.Call[Tensor], Callable[[_engine.Call[Tensor]], Any]]] = {}

    def add(self, call: _engine.Call[Tensor], result: Callable[[_engine.Call[Tensor]], Any]) -> int:
        """Adds an operation and returns its number. result is a function that returns what synchronize returns."""
        number = next(self._numbers)
        self._entries[number] = call, result
        return number

    def poll(self, number: int) -> bool:
        entry = self._entries.get(number)
        if entry is None:
            raise ValueError(f"handle {number} does not exist, or was already synchronized")
        return entry[0].done()

    def settle(self, number: int, others: Sequence[int]) -> None:
        """Waits until an operation has ended. The argument others has the handles for which the caller waits next."""
        entry = self._entries.get(number)
        if entry is not None and not entry[0].known():
            entry[0].settle([self._entries[n][0] for n in others if n in self._entries])

    def take(self, number: int) -> Any:
        entry = self._entries.pop(number, None)
        if entry is None:
            return None
        try:
            return entry[1](entry[0])
        finally:
            entry[0].release_name()

    def forget(self, number: int) -> None:
        """Discards a handle. Its name becomes free when its operation is done."""
        entry = self._entries.pop(number, None)
        if entry is not None:
            entry[0].release_name()

    def reset(self) -> None:
        self._numbers = itertools.count(1)
        self._entries = {}


_handles = _Handles()
_engine.engine.at_shutdown.append(_handles.reset)


def poll(handle: int) -> bool:
    """Returns whether the operation is done, so that ``synchronize`` returns at once."""
    return _handles.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits until an operation is done and returns its result.

    The result is a tensor. For a group it is a list of tensors, for an alltoall a tensor and the received splits. If
    the handle is unknown or was synchronized before, the result is None. Raises HorovodInternalError if the operation
    has failed.
    """
    return _handles.take(handle)


def synchronize_next(handle: int, others: Sequence[int]) -> Any:
    """Waits as ``synchronize`` does, and returns the result. The caller synchronizes the handles in others next, and is
    not woken for each of their completions.
    """
    _handles.settle(handle, others)
    return synchronize(handle)


def forget(handle: Union[int, SparseSum]) -> None:
    """Discards a handle that will not be synchronized. Its names become free when its operations are done."""
    for number in (handle.indices, handle.values) if isinstance(handle, SparseSum) else (handle,):
        _handles.forget(number)


def _one(call: _engine.Call[Tensor]) -> Tensor:
    return call.results()[0]


def _none(call: _engine.Call[Tensor]) -> None:
    call.results()


def _all(call: _engine.Call[Tensor]) -> List[Tensor]:
    return call.results()


def _sender(call: _engine.Call[Tensor]) -> int:
    call.results()
    return call.source


def _with_splits(call: _engine.Call[Tensor]) -> Tuple[Tensor, Tensor]:
    output = call.results()[0]
    return output, torch.tensor(call.received, dtype=torch.int32, device="cpu")


def _reduction(op: Optional[int], average: Optional[bool]) -> int:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` is deprecated: use `op`, hvd.Average or hvd.Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if not Average <= op <= Product:
        raise ValueError(f"got op {op!r}, want Average, Sum, Adasum, Min, Max or Product")
    return op


def _wants_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _begin_group(
    kind: int, tensors: Sequence[Tensor], name: Optional[str], process_set: ProcessSet, in_place: bool = False, **kw: Any
) -> int:
    """Begins a grouped operation and returns its handle. The tensors may have different types. If one of them is not
    supported, or they are not on one device, it raises ValueError and begins nothing.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError(f"grouped {wire.KIND_NAMES[kind]}: got no tensors, want at least one")
    codes = [_check(t) for t in tensors]
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise ValueError(f"grouped {wire.KIND_NAMES[kind]}: got tensors on {' and '.join(devices)}, want one device")
    types = tuple([(t.dtype, code) for t, code in zip(tensors, codes)]) if len(set(codes)) > 1 else None
    targets = tensors if in_place else None
    return _handles.add(_begin(kind, tensors, name, process_set, targets, grouped=True, types=types, **kw), _all)


# Allreduce.


def allreduce_async(
    tensor: Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins an ``allreduce`` without autograd, and returns a handle. Its result is a new tensor.

    The program must not write to the tensor until the handle is synchronized.
    """
    op = _reduction(op, average)
    return _handles.add(
        _begin(wire.ALLREDUCE, [tensor], name, process_set, None, op, prescale_factor, postscale_factor), _one
    )


class HorovodAllreduce(torch.autograd.Function):
    """An allreduce whose gradient is the same allreduce of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Optional[str], op: int, pre: float, post: float, ps: ProcessSet) -> Tensor:
        ctx.how = op, pre, post, ps
        return _begin(wire.ALLREDUCE, [tensor], name, ps, None, op, pre, post, at_once=True).results()[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        op, pre, post, ps = ctx.how
        grad = allreduce(
            grad_output.contiguous(), op=op, prescale_factor=pre, postscale_factor=post, process_set=ps
        )
        return grad, None, None, None, None, None


def allreduce(
    tensor: Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Type[Compressor] = Compression.none,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor over all ranks, element by element, and returns a new tensor. Autograd is supported.

    The reduction is op, by default the average. The tensor must have the same shape and type at all ranks.
    """
    op = _reduction(op, average)
    compressed, ctx = compression.compress(tensor)
    if _wants_grad(compressed):
        out = HorovodAllreduce.apply(compressed, name, op, prescale_factor, postscale_factor, process_set)
    else:
        call = _begin(
            wire.ALLREDUCE, [compressed], name, process_set, None, op, prescale_factor, postscale_factor, at_once=True
        )
        out = call.results()[0]
    return compression.decompress(out, ctx)


def allreduce_async_(
    tensor: Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins an ``allreduce_`` and returns a handle. The program must not read or write the tensor until the handle is
    synchronized.
    """
    return begin_allreduce_(tensor, name, _reduction(op, average), prescale_factor, postscale_factor, process_set)


def begin_allreduce_(
    tensor: Tensor, name: Optional[str], op: int, prescale: float, postscale: float, process_set: ProcessSet, later: bool = False
) -> int:
    """Begins an ``allreduce_`` as ``allreduce_async_`` does. If later is true, the sidecar is notified only at the next
    operation, ``notify_now`` or ``synchronize``.
    """
    tensors = [tensor]
    return _handles.add(
        _begin(wire.ALLREDUCE, tensors, name, process_set, tensors, op, prescale, postscale, later=later), _one
    )


def notify_now() -> None:
    """Notifies the sidecar of all operations that were begun with later=True."""
    _engine.engine.notify_now()


def allreduce_(
    tensor: Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor in place as ``allreduce`` does, without autograd."""
    op = _reduction(op, average)
    tensors = [tensor]
    call = _begin(
        wire.ALLREDUCE, tensors, name, process_set, tensors, op, prescale_factor, postscale_factor, at_once=True
    )
    return call.results()[0]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a ``grouped_allreduce`` without autograd, and returns a handle."""
    op = _reduction(op, average)
    return _begin_group(
        wire.ALLREDUCE, tensors, name, process_set,
        reduce_op=op, prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip


class HorovodGroupedAllreduce(torch.autograd.Function):
    """A grouped allreduce whose gradient is the same grouped allreduce of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, name: Optional[str], op: int, pre: float, post: float, ps: ProcessSet, *tensors: Tensor
    ) -> Tuple[Tensor, ...]:
        ctx.how = op, pre, post, ps
        return tuple(synchronize(_engine.begin_and_wait(grouped_allreduce_async, tensors, None, name, op, pre, post, ps)))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        op, pre, post, ps = ctx.how
        grads = grouped_allreduce(
            [g.contiguous() for g in grad_output], op=op, prescale_factor=pre, postscale_factor=post, process_set=ps
        )
        return (None, None, None, None, None, *grads)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Type[Compressor] = Compression.none,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> List[Tensor]:
    """Reduces tensors as ``allreduce`` does, and returns a list of new tensors. Either all tensors are reduced or none
    is.
    """
    op = _reduction(op, average)
    pairs = [compression.compress(t) for t in tensors]
    compressed = [p[0] for p in pairs]
    if any([_wants_grad(t) for t in compressed]):
        out = HorovodGroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, process_set, *compressed)
    else:
        out = synchronize(
            _engine.begin_and_wait(
                grouped_allreduce_async, compressed, None, name, op, prescale_factor, postscale_factor, process_set
            )
        )
    return [compression.decompress(t, p[1]) for t, p in zip(out, pairs)]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a ``grouped_allreduce_`` and returns a handle."""
    op = _reduction(op, average)
    return _begin_group(
        wire.ALLREDUCE, tensors, name, process_set, True,
        reduce_op=op, prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> List[Tensor]:
    """Reduces tensors in place as ``grouped_allreduce`` does, without autograd, and returns them."""
    op = _reduction(op, average)
    return synchronize(
        _engine.begin_and_wait(
            grouped_allreduce_async_, tensors, None, name, op, prescale_factor, postscale_factor, process_set
        )
    )


def sparse_allreduce_async(
    tensor: Tensor, name: Optional[str], op: Optional[int], process_set: ProcessSet = global_process_set
) -> SparseSum:
    """Begins the sum or the average of sparse tensors, by two allgathers of their indices and values.

    Returns a callable that waits for the result and returns it as a sparse tensor that is not coalesced.
    """
    op = Average if op is None else op
    if op not in (Average, Sum):
        raise ValueError(f"sparse allreduce: got op {op!r}, want Average or Sum")
    # The indices are transposed, so that each element has a row: allgather concatenates rows.
    indices = allgather_async(
        tensor._indices().transpose(0, 1).contiguous(), None if name is None else f"{name}.indices", process_set
    )
    values = allgather_async(
        tensor._values().contiguous(), None if name is None else f"{name}.values", process_set
    )

    return SparseSum(tensor, indices, values, op, process_set)


class SparseSum:
    """A sparse allreduce in flight. Calling the object waits for the result and returns it."""

    def __init__(self, tensor: Tensor, indices: int, values: int, op: int, process_set: ProcessSet) -> None:
        self.indices = indices
        self.values = values
        self._tensor = tensor
        self._op = op
        self._process_set = process_set

    def __call__(self) -> Tensor:
        try:
            all_values, all_indices = synchronize(self.values), synchronize(self.indices)
        finally:
            forget(self)  # if the first operation has failed, this discards the second
        if self._op == Average:
            all_values = all_values / self._process_set.size()
        like = self._tensor
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1), all_values, like.size(), dtype=like.dtype, device=like.device
        )


# Allgather.


def allgather_async(
    tensor: Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins an ``allgather`` without autograd, and returns a handle."""
    return _handles.add(_begin(wire.ALLGATHER, [tensor], name, process_set), _one)


def _gathered_rows(rows: List[int], process_set: ProcessSet) -> List[Tuple[int, int]]:
    """Returns for each gathered tensor the index of this rank's first row in it, and the number of this rank's rows.
    The argument rows has the number of rows of this rank in each tensor.
    """
    everyone = allgather(torch.tensor([rows], dtype=torch.int64, device="cpu"), process_set=process_set)
    me = process_set.rank()
    assert me is not None
    begins = everyone[:me].sum(0).tolist()
    return list(zip(begins, rows))


class HorovodAllgather(torch.autograd.Function):
    """An allgather. Its gradient is the average of all ranks' gradients, of which each rank gets its own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Optional[str], ps: ProcessSet, shape: Optional[Shape]) -> Tensor:
        ctx.rows, ctx.ps = tensor.shape[0] if tensor.dim() else 0, ps
        return allgather_of(shape, tensor, name, ps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.ps)
        begin, rows = _gathered_rows([ctx.rows], ctx.ps)[0]
        return grad.narrow(0, begin, rows), None, None, None


def allgather(tensor: Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns the tensors of all ranks, concatenated along the first dimension. Their sizes may differ in this
    dimension.
    """
    return allgather_of(None, tensor, name, process_set)


def allgather_of(
    shape: Optional[Shape], tensor: Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Gathers a tensor as ``allgather`` does. shape is the shape of the result, or None if the caller does not know it."""
    if _wants_grad(tensor):
        return HorovodAllgather.apply(tensor, name, process_set, shape)
    outputs = None if shape is None else (shape,)
    return _begin(wire.ALLGATHER, [tensor], name, process_set, at_once=True, outputs=outputs).results()[0]


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a ``grouped_allgather`` without autograd, and returns a handle."""
    return _begin_grouped_allgather(None, tensors, name, process_set)


def _begin_grouped_allgather(
    shapes: Optional[Tuple[Shape, ...]], tensors: Sequence[Tensor], name: Optional[str], process_set: ProcessSet
) -> int:
    return _begin_group(wire.ALLGATHER, tensors, name, process_set, outputs=shapes)


class HorovodGroupedAllgather(torch.autograd.Function):
    """A grouped allgather. The gradient of each tensor is that of HorovodAllgather."""

    @staticmethod
    def forward(
        ctx: Any, name: Optional[str], ps: ProcessSet, shapes: Optional[Tuple[Shape, ...]], *tensors: Tensor
    ) -> Tuple[Tensor, ...]:
        ctx.rows, ctx.ps = [t.shape[0] if t.dim() else 0 for t in tensors], ps
        return tuple(synchronize(_engine.begin_and_wait(_begin_grouped_allgather, shapes, tensors, name, ps)))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        grads = grouped_allreduce([g.contiguous() for g in grad_output], op=Average, process_set=ctx.ps)
        own = [g.narrow(0, begin, rows) for g, (begin, rows) in zip(grads, _gathered_rows(ctx.rows, ctx.ps))]
        return (None, None, None, *own)


def grouped_allgather(
    tensors: Sequence[Tensor], name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[Tensor]:
    """Gathers tensors as ``allgather`` does, and returns the results. Either all tensors are gathered or none is."""
    return _grouped_allgather_of(None, tensors, name, process_set)


def _grouped_allgather_of(
    shapes: Optional[Tuple[Shape, ...]], tensors: Sequence[Tensor], name: Optional[str], process_set: ProcessSet
) -> List[Tensor]:
    """Gathers tensors as ``grouped_allgather`` does. shapes are those of the results, or None if they are not known."""
    if any([_wants_grad(t) for t in tensors]):
        return list(HorovodGroupedAllgather.apply(name, process_set, shapes, *tensors))
    return synchronize(_engine.begin_and_wait(_begin_grouped_allgather, shapes, tensors, name, process_set))


# Broadcast.


def broadcast_async(
    tensor: Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a ``broadcast`` without autograd, and returns a handle."""
    _engine.check_root(root_rank, process_set)
    return _handles.add(_begin(wire.BROADCAST, [tensor], name, process_set, root=root_rank), _one)


class HorovodBroadcast(torch.autograd.Function):
    """A broadcast. Its gradient is the average of all ranks' gradients at the root, and zero at other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Optional[str], ps: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.ps = root_rank, ps
        return synchronize(_engine.begin_and_wait(broadcast_async, tensor, root_rank, name, ps))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.ps)
        if rank() != ctx.root_rank:
            grad = torch.zeros_like(grad)
        return grad, None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the tensor of rank root_rank. root_rank is a rank of the job even if process_set is given.

    The tensor must have the same shape and type at all ranks.
    """
    if _wants_grad(tensor):
        return HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(_engine.begin_and_wait(broadcast_async, tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a ``broadcast_`` and returns a handle."""
    _engine.check_root(root_rank, process_set)
    tensors = [tensor]
    return _handles.add(_begin(wire.BROADCAST, tensors, name, process_set, tensors, root=root_rank), _one)


def broadcast_(
    tensor: Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrites a tensor with the tensor of rank root_rank, without autograd, and returns it."""
    return synchronize(_engine.begin_and_wait(broadcast_async_, tensor, root_rank, name, process_set))


# Reduce.


def reduce_async(
    tensor: Tensor,
    root_rank: int,
    op: int = Average,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a ``reduce`` and returns a handle."""
    _engine.check_root(root_rank, process_set, wire.REDUCE)
    call = _begin(
        wire.REDUCE, [tensor], name, process_set, None, op, prescale_factor, postscale_factor, root=root_rank
    )
    return _handles.add(call, _one if root_rank == rank() else _none)


def reduce(
    tensor: Tensor,
    root_rank: int,
    op: int = Average,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Optional[Tensor]:
    """Reduces a tensor as ``allreduce`` does, without autograd. Returns the result at rank root_rank, and None at the
    other ranks. root_rank is a rank of the job even if process_set is given.
    """
    return synchronize(_engine.begin_and_wait(
        reduce_async, tensor, root_rank, op, name, process_set, prescale_factor, postscale_factor
    ))


# Gather and scatter.


def gather_async(
    tensor: Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a ``gather`` and returns a handle."""
    _engine.check_root(root_rank, process_set, wire.GATHER)
    call = _begin(wire.GATHER, [tensor], name, process_set, root=root_rank)
    return _handles.add(call, _one if root_rank == rank() else _none)


def gather(
    tensor: Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Optional[Tensor]:
    """Returns the tensors of all ranks at rank root_rank, concatenated along the first dimension, and None at the other
    ranks. Their sizes may differ in this dimension. Gradients do not flow through a gather.
    """
    return synchronize(_engine.begin_and_wait(gather_async, tensor, root_rank, name, process_set))


def scatter_async(
    tensor: Tensor,
    root_rank: int,
    splits: Union[None, Tensor, Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a ``scatter`` and returns a handle."""
    _engine.check_root(root_rank, process_set, wire.SCATTER)
    given: Tuple[int, ...] = ()
    if _engine.engine.initialized() and root_rank != rank():
        tensor = tensor.new_empty(0)
    else:
        given = _splits(splits, tensor, process_set, wire.SCATTER)
    return _handles.add(_begin(wire.SCATTER, [tensor], name, process_set, root=root_rank, splits=given), _one)


def scatter(
    tensor: Tensor,
    root_rank: int,
    splits: Union[None, Tensor, Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns this rank's rows of the tensor of rank root_rank: splits[i] rows go to member i. If splits is None, each
    member gets the same number of rows. Gradients do not flow through a scatter.

    At the other ranks splits is ignored, and only the type of the tensor counts, which may be empty.
    """
    return synchronize(_engine.begin_and_wait(scatter_async, tensor, root_rank, splits, name, process_set))


# Alltoall.

_Splits = Union[None, Tensor, Sequence[int]]


def _splits(
    splits: _Splits, tensor: Tensor, process_set: ProcessSet, kind: int = wire.ALLTOALL
) -> Tuple[int, ...]:
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.dtype != torch.int32:
            raise ValueError(f"{wire.KIND_NAMES[kind]}: splits are {splits.dtype} of shape {tuple(splits.shape)}, want int32 of one dimension")
        splits = splits.tolist()
    return _engine.check_splits(splits, tensor.shape, process_set, kind)


def alltoall_async(
    tensor: Tensor, splits: _Splits = None, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins an ``alltoall`` without autograd, and returns a handle. ``synchronize`` returns the tensor and the
    received splits, whether or not splits are given here.
    """
    return _begin_alltoall(None, tensor, splits, name, process_set)


def _begin_alltoall(
    shape: Optional[Shape], tensor: Tensor, splits: _Splits, name: Optional[str], process_set: ProcessSet
) -> int:
    """Begins an alltoall as ``alltoall_async`` does. shape is the shape of the result, or None if it is not known."""
    given, outputs = _splits(splits, tensor, process_set), None if shape is None else (shape,)
    return _handles.add(
        _begin(wire.ALLTOALL, [tensor], name, process_set, splits=given, outputs=outputs), _with_splits
    )


class HorovodAlltoall(torch.autograd.Function):
    """An alltoall. Its gradient is the alltoall that sends the rows of the gradient back to their senders."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: _Splits, name: Optional[str], ps: ProcessSet
    ) -> Tuple[Tensor, Tensor]:
        output, received = synchronize(_engine.begin_and_wait(alltoall_async, tensor, splits, name, ps))
        ctx.received, ctx.ps, ctx.rows = received, ps, tensor.shape[0]
        given = _splits(splits, tensor, ps)
        ctx.sent = sum(given) if given else ctx.rows
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> Any:
        shape = (ctx.sent,) + tuple(grad_output.shape[1:])
        grad, _ = synchronize(_engine.begin_and_wait(
            _begin_alltoall, shape, grad_output.contiguous(), ctx.received, None, ctx.ps
        ))
        if grad.shape[0] < ctx.rows:
            # The rows after the last split were not sent to any rank, so their gradient is zero.
            rest = (ctx.rows - grad.shape[0],) + tuple(grad.shape[1:])
            grad = torch.cat([grad, grad.new_zeros(rest)])
        return grad, None, None, None


def alltoall(
    tensor: Tensor, splits: _Splits = None, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Sends rows to all members: splits[i] rows to member i. If splits is None, each member gets the same number of
    rows.

    Returns the received rows, in the order of the members. If splits are given, it also returns the number of rows
    received from each member, as an int32 tensor.
    """
    if _wants_grad(tensor):
        output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)
    else:
        output, received = synchronize(_engine.begin_and_wait(alltoall_async, tensor, splits, name, process_set))
    return output if splits is None else (output, received)


# Reducescatter.


def _scattered(op: int) -> int:
    if op not in (Average, Sum):
        # Horovod raises this exception for other reductions, and so does this module. The sidecar and gohvd.numpy do
        # support them.
        raise HorovodInternalError(f"reducescatter: got op {op!r}, want Average or Sum")
    return op


def reducescatter_async(
    tensor: Tensor,
    name: Optional[str] = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a ``reducescatter`` without autograd, and returns a handle."""
    op = _scattered(op)
    call = _begin(wire.REDUCESCATTER, [tensor], name, process_set, None, op, prescale_factor, postscale_factor)
    return _handles.add(call, _one)


def _scatter_scale(op: int, pre: float, post: float, ps: ProcessSet) -> float:
    """Returns the factor by which the gathered gradients of a reducescatter must be multiplied."""
    members = ps.size()
    assert members is not None
    return pre * post * (members if op == Sum else 1)


class HorovodReducescatter(torch.autograd.Function):
    """A reducescatter whose gradient is the allgather of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: Optional[str], op: int, ps: ProcessSet, pre: float, post: float) -> Tensor:
        ctx.how, ctx.shape = (op, pre, post, ps), tuple(tensor.shape)
        return synchronize(_engine.begin_and_wait(reducescatter_async, tensor, name, op, ps, pre, post))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        op, pre, post, ps = ctx.how
        scale = _scatter_scale(op, pre, post, ps)
        grad = allgather_of(ctx.shape, grad_output.contiguous(), process_set=ps)
        return grad if scale == 1 else grad * scale, None, None, None, None, None


def reducescatter(
    tensor: Tensor,
    name: Optional[str] = None,
    compression: Type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces a tensor as ``allreduce`` does, and returns this rank's part of the rows.

    The parts are as even as possible: if the rows do not divide evenly, the first ranks get one row more.
    """
    compressed, ctx = compression.compress(tensor)
    if _wants_grad(compressed):
        out = HorovodReducescatter.apply(compressed, name, op, process_set, prescale_factor, postscale_factor)
    else:
        out = synchronize(_engine.begin_and_wait(
            reducescatter_async, compressed, name, op, process_set, prescale_factor, postscale_factor
        ))
    return compression.decompress(out, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: Optional[str] = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a ``grouped_reducescatter`` without autograd, and returns a handle."""
    op = _scattered(op)
    return _begin_group(
        wire.REDUCESCATTER, tensors, name, process_set,
        reduce_op=op, prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip


class HorovodGroupedReducescatter(torch.autograd.Function):
    """A grouped reducescatter. The gradient of each tensor is that of HorovodReducescatter."""

    @staticmethod
    def forward(
        ctx: Any, name: Optional[str], op: int, ps: ProcessSet, pre: float, post: float, *tensors: Tensor
    ) -> Tuple[Tensor, ...]:
        ctx.how, ctx.shapes = (op, pre, post, ps), tuple([tuple(t.shape) for t in tensors])
        return tuple(synchronize(_engine.begin_and_wait(grouped_reducescatter_async, tensors, name, op, ps, pre, post)))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        op, pre, post, ps = ctx.how
        scale = _scatter_scale(op, pre, post, ps)
        grads = _grouped_allgather_of(ctx.shapes, [g.contiguous() for g in grad_output], None, ps)
        return (None, None, None, None, None, *[g if scale == 1 else g * scale for g in grads])


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: Optional[str] = None,
    compression: Type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> List[Tensor]:
    """Reduces and scatters tensors as ``reducescatter`` does, and returns the results. Either all tensors are reduced
    or none is.
    """
    pairs = [compression.compress(t) for t in tensors]
    compressed = [p[0] for p in pairs]
    if any([_wants_grad(t) for t in compressed]):
        out = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *compressed)
    else:
        out = synchronize(
            _engine.begin_and_wait(
                grouped_reducescatter_async, compressed, name, op, process_set, prescale_factor, postscale_factor
            )
        )
    return [compression.decompress(t, p[1]) for t, p in zip(out, pairs)]


# Messages.


def send_async(
    tensor: Tensor,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: Optional[float] = None,
) -> int:
    """Begins a ``send`` and returns a handle. Its result is None."""
    peer = _engine.check_message(dst, tag, process_set, wire.SEND)
    limit = _engine.check_timeout(timeout, "send")
    return _handles.add(_begin(wire.SEND, [tensor], None, process_set, peer=peer, tag=tag, timeout=limit), _none)


def send(
    tensor: Tensor,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: Optional[float] = None,
) -> None:
    """Sends a tensor to the rank dst, which must receive it by ``recv`` with the same tag, into a tensor of the same
    type and size. dst is a rank of the job even if process_set is given. No other rank takes part. Large tensors are
    sent when dst receives them. If the send takes longer than the timeout, in seconds, the job ends. By default
    HVD_OPERATION_TIMEOUT_SECONDS applies.
    """
    synchronize(_engine.begin_and_wait(send_async, tensor, dst, tag, process_set, timeout))


def recv_async(
    tensor: Tensor,
    src: Optional[int] = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: Optional[float] = None,
) -> int:
    """Begins a ``recv`` and returns a handle. Its result is the rank that has sent the tensor."""
    peer, xs = _engine.check_message(src, tag, process_set, wire.RECV), [tensor]
    limit = _engine.check_timeout(timeout, "recv")
    return _handles.add(_begin(wire.RECV, xs, None, process_set, xs, peer=peer, tag=tag, timeout=limit), _sender)


def recv(
    tensor: Tensor,
    src: Optional[int] = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: Optional[float] = None,
) -> int:
    """Receives a tensor that the rank src has sent by ``send`` with the same tag. If src is None, receives from any
    rank. Writes the elements to the tensor and returns the rank that has sent them. src is a rank of the job even if
    process_set is given. If it takes longer than the timeout, in seconds, the job ends. By default
    HVD_OPERATION_TIMEOUT_SECONDS applies.
    """
    return synchronize(_engine.begin_and_wait(recv_async, tensor, src, tag, process_set, timeout))


# Operations without tensors.


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, waits until all ranks have joined, and returns the rank that joined
    last.

    While it waits, this rank takes part in the allreduces of the other ranks. device is an argument of Horovod and has
    no effect here.
    """
    return _engine.engine.simple(wire.JOIN, global_process_set).last_joined


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all members of the process set have called barrier."""
    _engine.engine.simple(wire.BARRIER, process_set)
