"""The collectives of ``horovod.torch``, with its names, signatures and defaults.

It supports more than Horovod:

- all element types of torch that docs/operations.md lists, including bfloat16 and bool,
- tensors on any device; if the job uses NCCL, those on CUDA devices are not copied to the host,
- ``alloc_tensor``, which makes tensors in memory that the other ranks of the host can read.

Operations work on the memory of the tensors. One on a CUDA device begins after the work that is on the current stream
when it is begun. When ``synchronize`` has returned, the current stream can use the result. Messages are copied through
host memory.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import _engine
from .._engine import SYNC_NAME, Adasum, Average, Call, Max, Min, Product, Shape, Sum, operation
from .._library import (
    ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST, DTYPES, GATHER, JOIN, KIND_NAMES, RECV, REDUCE, REDUCESCATTER,
    SCATTER, SEND,
)  # fmt: skip
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

# The number in the library and the size in bytes of each element type.
_DTYPES: dict[torch.dtype, _engine.Code] = {
    getattr(torch, name): code for name, code in DTYPES.items() if hasattr(torch, name)
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


_STRIDED = torch.strided


# The operations take turns on so many streams, because a wait for one of them also waits for the next ones on its stream.
_RESULT_STREAMS = 8


class _Torch(_engine.Framework[Tensor]):
    has_devices = True

    def __init__(self) -> None:
        self._result_streams: dict[int, Iterator[torch.cuda.Stream]] = {}

    def operands(self, op: _engine.Operation, x: Any, target: Any) -> tuple[list[Tensor], list[Tensor] | None]:
        tensors = list(x) if op.grouped else [x]
        if not tensors:
            raise ValueError(f"grouped {KIND_NAMES[op.kind]}: got no tensors, want at least one")
        for t in tensors:
            if t.layout is not _STRIDED:
                raise ValueError(f"Tensor type {t.type()} is not supported.")
            if not t.is_contiguous():
                raise ValueError("Tensor is required to be contiguous.")
            self.code(t.dtype)
        devices = sorted({str(t.device) for t in tensors})
        if len(devices) > 1:
            raise ValueError(f"grouped {KIND_NAMES[op.kind]}: got tensors on {' and '.join(devices)}, want one device")
        return tensors, None if target is None else tensors  # a target is the tensor itself

    def code(self, dtype: torch.dtype) -> _engine.Code:
        code = _DTYPES.get(dtype)
        if code is None:
            raise ValueError(f"Tensor type {dtype} is not supported.")
        return code

    def plain(self, x: Tensor) -> int:
        if not x.is_cpu or x.layout is not _STRIDED or not x.is_contiguous() or x.is_neg():
            return 0
        address = x.data_ptr()
        return 0 if address & 7 and address % x.element_size() else address

    def address(self, x: Tensor) -> int:
        # The memory of a negated view has the elements with the opposite sign, so torch must copy them.
        return 0 if x.is_neg() else x.data_ptr()

    copy = staticmethod(write)

    def empty(self, shape: Shape, like: Tensor, in_memory: bool = False) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device="cpu" if in_memory else like.device)

    def wrap(self, memory: Any, shape: Shape, like: Tensor) -> Tensor:
        if not len(memory):
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        x = self.reshape(torch.frombuffer(memory, dtype=like.dtype), shape)
        return x if like.is_cpu else x.to(like.device)

    def reshape(self, x: Tensor, shape: Shape) -> Tensor:
        # A view that a torch.autograd.Function returns cannot be changed in place.
        return x.resize_(shape)

    def device(self, x: Tensor) -> int:
        return x.get_device() if x.is_cuda else _engine.IN_MEMORY if x.is_cpu else _engine.ELSEWHERE

    def stream(self, device: int) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def handle(self, stream: torch.cuda.Stream) -> int:
        return stream.cuda_stream

    def using(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def follow(self, stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(stream.device)
        if current != stream:
            current.wait_stream(stream)

    def result_stream(self, device: int) -> torch.cuda.Stream:
        streams = self._result_streams.get(device)
        if streams is None:
            made = [torch.cuda.Stream(device) for _ in range(_RESULT_STREAMS)]
            streams = self._result_streams.setdefault(device, itertools.cycle(made))
        return next(streams)

    def hold(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        x.record_stream(stream)


_torch = _Torch()
_call = _engine.engine.call


def alloc_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor of zeros in memory that the other ranks of the host can read, so that large operations on it are
    faster (docs/execution.md). The memory is freed when the last reference to it is dropped.
    """
    _, itemsize = _torch.code(dtype)
    count = 1
    for n in shape:
        count *= n
    if count == 0:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(_engine.Block(count * itemsize).view, dtype=dtype).view(tuple(shape))


# The types that stand for a type of the same size that gohvd does not know, if elements are only moved.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moved(t: Tensor) -> Tensor:
    """Returns the tensor, or its memory as a tensor of a type that gohvd can move between ranks."""
    if t.dtype in _DTYPES:
        return t
    if t.is_complex():
        # A conjugated or negated view has the original elements in its memory.
        return torch.view_as_real(_settled(t))
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
        self._calls: dict[int, Call[Tensor]] = {}

    def add(self, call: Call[Tensor]) -> int:
        """Adds an operation and returns its number."""
        number = next(self._numbers)
        self._calls[number] = call
        return number

    def poll(self, number: int) -> bool:
        call = self._calls.get(number)
        if call is None:
            raise ValueError(f"handle {number} does not exist, or was already synchronized")
        return call.done()

    def in_flight(self, number: int) -> bool:
        call = self._calls.get(number)
        return call is not None and not call.poll()

    def take(self, number: int) -> Any:
        call = self._calls.get(number)
        if call is None:
            return None
        try:
            result = call.wait()
        except BaseException as e:
            if e is call.error:
                self._calls.pop(number, None)
            raise  # after an exception of a signal handler, the handle can be synchronized again
        self._calls.pop(number, None)
        return result

    def forget(self, number: int) -> None:
        """Discards a handle. Its name becomes free when its operation is done."""
        self._calls.pop(number, None)

    def reset(self) -> None:
        self._numbers = itertools.count(1)
        self._calls = {}


_handles = _Handles()
_engine.engine.at_shutdown.append(_handles.reset)


def poll(handle: int) -> bool:
    """Returns whether the operation is done, so that ``synchronize`` returns at once."""
    return _handles.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits until an operation is done and returns its result.

    The result is a tensor. For a group it is a list of tensors, for an alltoall a tensor and the received splits. If
    the handle is unknown or was synchronized before, the result is None. Raises HorovodInternalError if the operation
    has failed. If a signal handler ends the wait with an exception, the handle can be synchronized again.
    """
    return _handles.take(handle)


def forget(handle: int | SparseSum) -> None:
    """Discards a handle that will not be synchronized. Its names become free when its operations are done."""
    for number in _numbers_of(handle):
        _handles.forget(number)


def in_flight(handle: int | SparseSum) -> bool:
    """Returns whether a handle has operations that are not done."""
    return any([_handles.in_flight(number) for number in _numbers_of(handle)])


def _numbers_of(handle: int | SparseSum) -> tuple[int, ...]:
    return (handle.indices, handle.values) if isinstance(handle, SparseSum) else (handle,)


def _none(call: Call[Tensor]) -> None:
    call.results()


def _at_root(root: int) -> Callable[[Call[Tensor]], None] | None:
    """Returns the function that returns the result of an operation that has one only at the root."""
    return None if root == rank() else _none


def _all(call: Call[Tensor]) -> list[Tensor]:
    return list(call.results())


def _sender(call: Call[Tensor]) -> int:
    call.results()
    return call.source


def _with_splits(call: Call[Tensor]) -> tuple[Tensor, Tensor]:
    output = call.results()[0]
    dtype = torch.int32 if max(call.received) < 1 << 31 else torch.int64
    return output, torch.tensor(call.received, dtype=dtype, device="cpu")


def _reduction(op: int | None, average: bool | None) -> int:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` is deprecated: use `op`, hvd.Average or hvd.Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else op


def _wants_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


# Allreduce.


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins an ``allreduce`` without autograd, and returns a handle. Its result is a new tensor.

    The program must not write to the tensor until the handle is synchronized.
    """
    how = operation(ALLREDUCE, _reduction(op, average), prescale_factor, postscale_factor)
    return _handles.add(_call(_torch, how, name, process_set, tensor))


class HorovodAllreduce(torch.autograd.Function):
    """An allreduce whose gradient is the same allreduce of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, op: int, pre: float, post: float, ps: ProcessSet) -> Tensor:
        ctx.how = op, pre, post, ps
        how = operation(ALLREDUCE, op, pre, post)
        return _call(_torch, how, SYNC_NAME if name is None else name, ps, tensor, wait=True)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        op, pre, post, ps = ctx.how
        grad = allreduce(
            grad_output.contiguous(), op=op, prescale_factor=pre, postscale_factor=post, process_set=ps
        )
        return grad, None, None, None, None, None


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
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
        how = operation(ALLREDUCE, op, prescale_factor, postscale_factor)
        out = _call(_torch, how, SYNC_NAME if name is None else name, process_set, compressed, wait=True)
    return compression.decompress(out, ctx)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins an ``allreduce_`` and returns a handle. The program must not read or write the tensor until the handle is
    synchronized.
    """
    how = operation(ALLREDUCE, _reduction(op, average), prescale_factor, postscale_factor)
    return _handles.add(_call(_torch, how, name, process_set, tensor, tensor))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor in place as ``allreduce`` does, without autograd."""
    how = operation(ALLREDUCE, _reduction(op, average), prescale_factor, postscale_factor)
    return _call(_torch, how, SYNC_NAME if name is None else name, process_set, tensor, tensor, wait=True)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a ``grouped_allreduce`` without autograd, and returns a handle."""
    how = operation(ALLREDUCE, _reduction(op, average), prescale_factor, postscale_factor, grouped=True)
    return _handles.add(_call(_torch, how, name, process_set, tensors, take=_all))


class HorovodGroupedAllreduce(torch.autograd.Function):
    """A grouped allreduce whose gradient is the same grouped allreduce of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, pre: float, post: float, ps: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how = op, pre, post, ps
        how = operation(ALLREDUCE, op, pre, post, grouped=True)
        return tuple(_call(_torch, how, name, ps, tensors, take=_all, wait=True))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        op, pre, post, ps = ctx.how
        grads = grouped_allreduce(
            [g.contiguous() for g in grad_output], op=op, prescale_factor=pre, postscale_factor=post, process_set=ps
        )
        return (None, None, None, None, None, *grads)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces tensors as ``allreduce`` does, and returns a list of new tensors. Either all tensors are reduced or none
    is.
    """
    op = _reduction(op, average)
    pairs = [compression.compress(t) for t in tensors]
    compressed = [p[0] for p in pairs]
    if any([_wants_grad(t) for t in compressed]):
        out = HorovodGroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, process_set, *compressed)
    else:
        how = operation(ALLREDUCE, op, prescale_factor, postscale_factor, grouped=True)
        out = _call(_torch, how, name, process_set, compressed, take=_all, wait=True)
    return [compression.decompress(t, p[1]) for t, p in zip(out, pairs)]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a ``grouped_allreduce_`` and returns a handle."""
    how = operation(ALLREDUCE, _reduction(op, average), prescale_factor, postscale_factor, grouped=True)
    return _handles.add(_call(_torch, how, name, process_set, tensors, tensors, take=_all))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces tensors in place as ``grouped_allreduce`` does, without autograd, and returns them."""
    how = operation(ALLREDUCE, _reduction(op, average), prescale_factor, postscale_factor, grouped=True)
    return _call(_torch, how, name, process_set, tensors, tensors, take=_all, wait=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> SparseSum:
    """Begins the sum or the average of sparse tensors, by two allgathers of their indices and values.

    Returns a callable that waits for the result and returns it as a sparse tensor that is not coalesced.
    """
    return SparseSum(tensor, name, op, process_set)


class SparseSum:
    """A sparse allreduce in flight. Calling the object waits for the result and returns it.

    If or_dense is true, the allgather of the values has the name of an allreduce with the same name. So it fails at all
    ranks, with a MismatchError, if another rank has begun an allreduce of a dense tensor instead.
    """

    def __init__(
        self, tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet, or_dense: bool = False
    ) -> None:
        self._op = Average if op is None else op
        if self._op not in (Average, Sum):
            raise ValueError(f"sparse allreduce: got op {op!r}, want Average or Sum")
        self._tensor, self._name, self._process_set, self._or_dense = tensor, name, process_set, or_dense
        # The indices are transposed, so that each element has a row: allgather concatenates rows.
        indices = tensor._indices().transpose(0, 1).contiguous()
        self._rows = tensor._values().contiguous()
        self.indices = self.values = 0
        of_indices: list[_engine.Slot] = []
        of_values: list[_engine.Slot] = []
        try:
            name = None if name is None else f"{name}.indices"
            self.indices = _handles.add(_call(_torch, operation(ALLGATHER), name, process_set, indices, used=of_indices))
            self.send_values(of_values)
        except BaseException:
            # If it is the exception of a signal handler, the other ranks send both, and their values must not meet the next
            # operation of this rank.
            if _engine.submitted(of_indices) and not _engine.submitted(of_values):
                with contextlib.suppress(ValueError):
                    self.send_values()
            forget(self)
            raise

    def sparse_dim(self) -> int:
        """Returns the number of sparse dimensions of the tensor."""
        return self._tensor.sparse_dim()

    def send_values(self, used: list[_engine.Slot] | None = None) -> None:
        """Begins the allgather of the values. used is an argument of Engine.call."""
        how = operation(ALLGATHER, any_kind=self._or_dense)
        name = None if self._name is None else f"allreduce.{self._name}" if self._or_dense else f"{self._name}.values"
        self.values = _handles.add(_call(_torch, how, name, self._process_set, self._rows, used=used))

    def __call__(self) -> Tensor:
        try:
            return self.result()
        finally:
            forget(self)  # if the first operation has failed, this discards the second

    def result(self) -> Tensor:
        """Waits for the result and returns it. If the values have failed, the indices can still be waited for."""
        all_values, all_indices = synchronize(self.values), synchronize(self.indices)
        if self._op == Average:
            all_values = all_values / self._process_set.size()
        like = self._tensor
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1), all_values, like.size(), dtype=like.dtype, device=like.device
        )


# Allgather.


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins an ``allgather`` without autograd, and returns a handle."""
    return _handles.add(_call(_torch, operation(ALLGATHER), name, process_set, tensor))


def _gathered_rows(rows: list[int], process_set: ProcessSet) -> list[tuple[int, int]]:
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
    def forward(ctx: Any, tensor: Tensor, name: str | None, ps: ProcessSet, shape: Shape | None) -> Tensor:
        ctx.rows, ctx.ps = tensor.shape[0] if tensor.dim() else 0, ps
        return allgather_of(shape, tensor, name, ps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.ps)
        begin, rows = _gathered_rows([ctx.rows], ctx.ps)[0]
        return grad.narrow(0, begin, rows), None, None, None


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns the tensors of all ranks, concatenated along the first dimension. Their sizes may differ in this
    dimension.
    """
    return allgather_of(None, tensor, name, process_set)


def allgather_of(
    shape: Shape | None, tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Gathers a tensor as ``allgather`` does. shape is the shape of the result, or None if the caller does not know it."""
    if _wants_grad(tensor):
        return HorovodAllgather.apply(tensor, name, process_set, shape)
    outputs = None if shape is None else (shape,)
    label = SYNC_NAME if name is None else name
    return _call(_torch, operation(ALLGATHER), label, process_set, tensor, wait=True, outputs=outputs)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a ``grouped_allgather`` without autograd, and returns a handle."""
    how = operation(ALLGATHER, grouped=True)
    return _handles.add(_call(_torch, how, name, process_set, tensors, take=_all))


class HorovodGroupedAllgather(torch.autograd.Function):
    """A grouped allgather. The gradient of each tensor is that of HorovodAllgather."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, ps: ProcessSet, shapes: tuple[Shape, ...] | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.ps = [t.shape[0] if t.dim() else 0 for t in tensors], ps
        how = operation(ALLGATHER, grouped=True)
        return tuple(_call(_torch, how, name, ps, tensors, take=_all, wait=True, outputs=shapes))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        # Outputs of other types have no gradients. Autograd passes zeros of their type, which may have no average.
        have = [i for i, g in enumerate(grad_output) if g.is_floating_point()]
        grads = grouped_allreduce([grad_output[i].contiguous() for i in have], op=Average, process_set=ctx.ps)
        places = _gathered_rows(ctx.rows, ctx.ps)
        own = {i: g.narrow(0, *places[i]) for i, g in zip(have, grads)}
        return (None, None, None, *[own.get(i) for i in range(len(grad_output))])


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gathers tensors as ``allgather`` does, and returns the results. Either all tensors are gathered or none is."""
    return _grouped_allgather_of(None, tensors, name, process_set)


def _grouped_allgather_of(
    shapes: tuple[Shape, ...] | None, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    """Gathers tensors as ``grouped_allgather`` does. shapes are those of the results, or None if they are not known."""
    if any([_wants_grad(t) for t in tensors]):
        return list(HorovodGroupedAllgather.apply(name, process_set, shapes, *tensors))
    how = operation(ALLGATHER, grouped=True)
    return _call(_torch, how, name, process_set, tensors, take=_all, wait=True, outputs=shapes)


# Broadcast.


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a ``broadcast`` without autograd, and returns a handle."""
    _engine.check_root(root_rank, process_set)
    return _handles.add(_call(_torch, operation(BROADCAST, root=root_rank), name, process_set, tensor))


class HorovodBroadcast(torch.autograd.Function):
    """A broadcast. Its gradient is the average of all ranks' gradients at the root, and zero at other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, ps: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.ps = root_rank, ps
        _engine.check_root(root_rank, ps)
        return _call(_torch, operation(BROADCAST, root=root_rank), name, ps, tensor, wait=True)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.ps)
        if rank() != ctx.root_rank:
            # Zeros with a graph: in a second backward pass, all ranks run the allreduce of their gradients.
            grad = grad.masked_fill(torch.ones((), dtype=torch.bool, device=grad.device), 0)
        return grad, None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the tensor of rank root_rank. root_rank is a rank of the job even if process_set is given.

    The tensor must have the same shape and type at all ranks.
    """
    if _wants_grad(tensor):
        return HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    _engine.check_root(root_rank, process_set)
    return _call(_torch, operation(BROADCAST, root=root_rank), name, process_set, tensor, wait=True)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a ``broadcast_`` and returns a handle."""
    _engine.check_root(root_rank, process_set)
    how = operation(BROADCAST, root=root_rank)
    return _handles.add(_call(_torch, how, name, process_set, tensor, tensor))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrites a tensor with the tensor of rank root_rank, without autograd, and returns it."""
    _engine.check_root(root_rank, process_set)
    return _call(_torch, operation(BROADCAST, root=root_rank), name, process_set, tensor, tensor, wait=True)


# Reduce.


def reduce_async(
    tensor: Tensor,
    root_rank: int,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a ``reduce`` and returns a handle."""
    _engine.check_root(root_rank, process_set, REDUCE)
    how = operation(REDUCE, op, prescale_factor, postscale_factor, root_rank)
    return _handles.add(_call(_torch, how, name, process_set, tensor, take=_at_root(root_rank)))


def reduce(
    tensor: Tensor,
    root_rank: int,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor | None:
    """Reduces a tensor as ``allreduce`` does, without autograd. Returns the result at rank root_rank, and None at the
    other ranks. root_rank is a rank of the job even if process_set is given.
    """
    _engine.check_root(root_rank, process_set, REDUCE)
    how = operation(REDUCE, op, prescale_factor, postscale_factor, root_rank)
    return _call(_torch, how, name, process_set, tensor, take=_at_root(root_rank), wait=True)


# Gather and scatter.


def gather_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a ``gather`` and returns a handle."""
    _engine.check_root(root_rank, process_set, GATHER)
    how, take = operation(GATHER, root=root_rank), _at_root(root_rank)
    return _handles.add(_call(_torch, how, name, process_set, tensor, take=take))


def gather(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor | None:
    """Returns the tensors of all ranks at rank root_rank, concatenated along the first dimension, and None at the other
    ranks. Their sizes may differ in this dimension. Gradients do not flow through a gather.
    """
    _engine.check_root(root_rank, process_set, GATHER)
    how, take = operation(GATHER, root=root_rank), _at_root(root_rank)
    return _call(_torch, how, name, process_set, tensor, take=take, wait=True)


def scatter_async(
    tensor: Tensor,
    root_rank: int,
    splits: None | Tensor | Sequence[int] = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a ``scatter`` and returns a handle."""
    how, tensor = _scattered(tensor, root_rank, splits, process_set)
    return _handles.add(_call(_torch, how, name, process_set, tensor))


def _scattered(
    tensor: Tensor, root: int, splits: None | Tensor | Sequence[int], process_set: ProcessSet
) -> tuple[_engine.Operation, Tensor]:
    """Returns a scatter and its tensor, which is empty at the other ranks."""
    _engine.check_root(root, process_set, SCATTER)
    if _engine.engine.initialized() and root != rank():
        return operation(SCATTER, root=root), tensor.new_empty(0)
    return operation(SCATTER, root=root, splits=_splits(splits, tensor, process_set, SCATTER)), tensor


def scatter(
    tensor: Tensor,
    root_rank: int,
    splits: None | Tensor | Sequence[int] = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns this rank's rows of the tensor of rank root_rank: splits[i] rows go to member i. If splits is None, each
    member gets the same number of rows. Gradients do not flow through a scatter.

    At the other ranks splits is ignored, and only the type of the tensor counts, which may be empty.
    """
    how, tensor = _scattered(tensor, root_rank, splits, process_set)
    return _call(_torch, how, name, process_set, tensor, wait=True)


# Alltoall.

_Splits = None | Tensor | Sequence[int]


def _splits(
    splits: _Splits, tensor: Tensor, process_set: ProcessSet, kind: int = ALLTOALL
) -> tuple[int, ...]:
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.dtype != torch.int32:
            raise ValueError(f"{KIND_NAMES[kind]}: splits are {splits.dtype} of shape {tuple(splits.shape)}, want int32 of one dimension")
        splits = splits.tolist()
    return _engine.check_splits(splits, tensor.shape, process_set, kind)


def alltoall_async(
    tensor: Tensor, splits: _Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins an ``alltoall`` without autograd, and returns a handle. ``synchronize`` returns the tensor and the
    received splits, whether or not splits are given here.
    """
    how = operation(ALLTOALL, splits=_splits(splits, tensor, process_set))
    return _handles.add(_call(_torch, how, name, process_set, tensor, take=_with_splits))


class HorovodAlltoall(torch.autograd.Function):
    """An alltoall. Its gradient is the alltoall that sends the rows of the gradient back to their senders."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: _Splits, name: str | None, ps: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        given = _splits(splits, tensor, ps)
        how = operation(ALLTOALL, splits=given)
        output, received = _call(_torch, how, name, ps, tensor, take=_with_splits, wait=True)
        ctx.received, ctx.ps, ctx.rows = received, ps, tensor.shape[0]
        ctx.sent = sum(given) if given else ctx.rows
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> Any:
        shape = (ctx.sent,) + tuple(grad_output.shape[1:])
        gradient = grad_output.contiguous()
        received = ctx.received.tolist()
        if _wants_grad(gradient):
            grad, _ = HorovodAlltoall.apply(gradient, received, None, ctx.ps)
        else:
            how = operation(ALLTOALL, splits=_splits(received, gradient, ctx.ps))
            grad = _call(_torch, how, None, ctx.ps, gradient, wait=True, outputs=(shape,))
        if grad.shape[0] < ctx.rows:
            # The rows after the last split were not sent to any rank, so their gradient is zero.
            rest = (ctx.rows - grad.shape[0],) + tuple(grad.shape[1:])
            grad = torch.cat([grad, grad.new_zeros(rest)])
        return grad, None, None, None


def alltoall(
    tensor: Tensor, splits: _Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends rows to all members: splits[i] rows to member i. If splits is None, each member gets the same number of
    rows.

    Returns the received rows, in the order of the members. If splits are given, it also returns the number of rows
    received from each member, as an int32 tensor, or as an int64 tensor if a number is 2^31 or more.
    """
    if _wants_grad(tensor):
        output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)
    else:
        how = operation(ALLTOALL, splits=_splits(splits, tensor, process_set))
        output, received = _call(_torch, how, name, process_set, tensor, take=_with_splits, wait=True)
    return output if splits is None else (output, received)


# Reducescatter.


def _scattered_by(op: int) -> int:
    if op not in (Average, Sum):
        # Horovod raises this exception for other reductions, and so does this module. gohvd.numpy supports them.
        raise HorovodInternalError(f"reducescatter: got op {op!r}, want Average or Sum")
    return op


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a ``reducescatter`` without autograd, and returns a handle."""
    how = operation(REDUCESCATTER, _scattered_by(op), prescale_factor, postscale_factor)
    return _handles.add(_call(_torch, how, name, process_set, tensor))


def _scatter_scale(op: int, pre: float, post: float, ps: ProcessSet) -> float:
    """Returns the factor by which the gathered gradients of a reducescatter must be multiplied."""
    members = ps.size()
    assert members is not None
    return pre * post * (members if op == Sum else 1)


class HorovodReducescatter(torch.autograd.Function):
    """A reducescatter whose gradient is the allgather of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, op: int, ps: ProcessSet, pre: float, post: float) -> Tensor:
        ctx.how, ctx.shape = (op, pre, post, ps), tuple(tensor.shape)
        return _call(_torch, operation(REDUCESCATTER, _scattered_by(op), pre, post), name, ps, tensor, wait=True)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        op, pre, post, ps = ctx.how
        scale = _scatter_scale(op, pre, post, ps)
        grad = allgather_of(ctx.shape, grad_output.contiguous(), process_set=ps)
        return grad if scale == 1 else grad * scale, None, None, None, None, None


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
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
        how = operation(REDUCESCATTER, _scattered_by(op), prescale_factor, postscale_factor)
        out = _call(_torch, how, name, process_set, compressed, wait=True)
    return compression.decompress(out, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a ``grouped_reducescatter`` without autograd, and returns a handle."""
    how = operation(REDUCESCATTER, _scattered_by(op), prescale_factor, postscale_factor, grouped=True)
    return _handles.add(_call(_torch, how, name, process_set, tensors, take=_all))


class HorovodGroupedReducescatter(torch.autograd.Function):
    """A grouped reducescatter. The gradient of each tensor is that of HorovodReducescatter."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, ps: ProcessSet, pre: float, post: float, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how, ctx.shapes = (op, pre, post, ps), tuple([tuple(t.shape) for t in tensors])
        how = operation(REDUCESCATTER, _scattered_by(op), pre, post, grouped=True)
        return tuple(_call(_torch, how, name, ps, tensors, take=_all, wait=True))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        op, pre, post, ps = ctx.how
        scale = _scatter_scale(op, pre, post, ps)
        grads = _grouped_allgather_of(ctx.shapes, [g.contiguous() for g in grad_output], None, ps)
        return (None, None, None, None, None, *[g if scale == 1 else g * scale for g in grads])


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduces and scatters tensors as ``reducescatter`` does, and returns the results. Either all tensors are reduced
    or none is.
    """
    pairs = [compression.compress(t) for t in tensors]
    compressed = [p[0] for p in pairs]
    if any([_wants_grad(t) for t in compressed]):
        out = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *compressed)
    else:
        how = operation(REDUCESCATTER, _scattered_by(op), prescale_factor, postscale_factor, grouped=True)
        out = _call(_torch, how, name, process_set, compressed, take=_all, wait=True)
    return [compression.decompress(t, p[1]) for t, p in zip(out, pairs)]


# Messages.


def send_async(
    tensor: Tensor,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> int:
    """Begins a ``send`` and returns a handle. Its result is None."""
    how = _engine.message(SEND, dst, tag, process_set, timeout)
    return _handles.add(_call(_torch, how, None, process_set, tensor, take=_none))


def send(
    tensor: Tensor,
    dst: int,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> None:
    """Sends a tensor to the rank dst, which must receive it by ``recv`` with the same tag, into a tensor of the same
    type and size. dst is a rank of the job even if process_set is given. No other rank takes part. Large tensors are
    sent when dst receives them. If the send takes longer than the timeout, in seconds, the job ends. By default
    HVD_OPERATION_TIMEOUT_SECONDS applies.
    """
    how = _engine.message(SEND, dst, tag, process_set, timeout)
    _call(_torch, how, None, process_set, tensor, take=_none, wait=True)


def recv_async(
    tensor: Tensor,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> int:
    """Begins a ``recv`` and returns a handle. Its result is the rank that has sent the tensor."""
    how = _engine.message(RECV, src, tag, process_set, timeout)
    return _handles.add(_call(_torch, how, None, process_set, tensor, tensor, take=_sender))


def recv(
    tensor: Tensor,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> int:
    """Receives a tensor that the rank src has sent by ``send`` with the same tag. If src is None, receives from any
    rank. Writes the elements to the tensor and returns the rank that has sent them. src is a rank of the job even if
    process_set is given. If it takes longer than the timeout, in seconds, the job ends. By default
    HVD_OPERATION_TIMEOUT_SECONDS applies.
    """
    how = _engine.message(RECV, src, tag, process_set, timeout)
    return _call(_torch, how, None, process_set, tensor, tensor, take=_sender, wait=True)


# Operations without tensors.


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, waits until all ranks have joined, and returns the rank that joined
    last.

    While it waits, this rank takes part in the allreduces of the other ranks. device is an argument of Horovod and has
    no effect here.
    """
    return _engine.engine.simple(JOIN, global_process_set).last_joined


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all members of the process set have called barrier."""
    _engine.engine.simple(BARRIER, process_set)
