"""Tensors and sequences of tensors as one array of the engine, and the element types and reductions of torch.

For torch, the tensors of the ranks must have the same number of elements, but need not have the same shape. So a tensor is
an array with one dimension. Other operations of torch work on lists of tensors, and gohvd's on one array. ``Parts`` stands
for the elements of all tensors of a list, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import _engine
from ..._engine import Shape
from ..mpi_ops import _DTYPES, _Torch, moved

Tensor = torch.Tensor


class Parts:
    """Tensors that have the same element type and device. An operation reads or writes the elements of all of them, as
    one array that has one dimension unless a shape is given.
    """

    __slots__ = ("tensors", "shape", "dtype")

    def __init__(self, tensors: Sequence[Tensor], shape: Shape | None = None) -> None:
        self.tensors = tensors
        self.shape = (sum([t.numel() for t in tensors]),) if shape is None else shape
        self.dtype = tensors[0].dtype


class _Lists(_Torch):
    """The engine's arrays are tensors and Parts."""

    def operands(self, op: _engine.Operation, x: Any, target: Any) -> tuple[Any, Any]:
        if x is None:
            return (), None  # a barrier has none
        arrays = [x]
        return arrays, None if target is None else arrays if target is x else [target]

    def shape(self, x: Any) -> Shape:
        return x.shape if isinstance(x, Parts) else (x.numel(),)

    def address(self, x: Any) -> int:
        if isinstance(x, Parts):
            if len(x.tensors) > 1:
                return 0
            x = x.tensors[0]
        return super().address(x) if x.is_contiguous() else 0

    def copy(self, target: Any, source: Any) -> None:
        if isinstance(source, Parts):
            for t, piece in zip(source.tensors, _pieces(target, source)):
                super().copy(piece, t)
        elif isinstance(target, Parts):
            for t, piece in zip(target.tensors, _pieces(source, target)):
                super().copy(t, piece)
        else:
            super().copy(target, source)

    def wrap(self, memory: Any, shape: Shape, like: Any) -> Tensor:
        return super().wrap(memory, shape, like.tensors[0])

    def device(self, x: Any) -> int:
        return super().device(x.tensors[0] if isinstance(x, Parts) else x)

    def hold(self, x: Any, stream: Any) -> None:
        for t in x.tensors if isinstance(x, Parts) else (x,):
            super().hold(t, stream)

    def empty(self, shape: Shape, like: Any, in_memory: bool = False) -> Tensor:
        if isinstance(like, Parts):
            return super().empty(shape, like.tensors[0], in_memory)
        # An operation whose results have another shape than its input works on Parts, so this shape stands for like's.
        return super().empty(like.shape, like, in_memory)


def _pieces(staged: Tensor, parts: Parts) -> Sequence[Tensor]:
    """Returns views of a staging array, one for each of the parts and with its shape."""
    if len(parts.tensors) == 1:
        shape = parts.tensors[0].shape
        # A view takes longer than the copy of a small tensor.
        return (staged if staged.shape == shape else staged.view(shape),)
    pieces = staged.view(-1).split([t.numel() for t in parts.tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, parts.tensors)]


LISTS = _Lists()


def _by_hash(numbers: dict[Any, int]) -> dict[int, tuple[str, int]]:
    """Returns the names and the numbers of reductions. torch returns each ReduceOp as a new object, which has the hash of
    its kind. It takes much longer to compare it with others.
    """
    return {hash(op): (op.name, number) for op, number in numbers.items()}


_OPS = _by_hash({
    dist.ReduceOp.SUM: _engine.Sum, dist.ReduceOp.AVG: _engine.Average, dist.ReduceOp.PRODUCT: _engine.Product,
    dist.ReduceOp.MIN: _engine.Min, dist.ReduceOp.MAX: _engine.Max,
})  # fmt: skip
# A reduction of bools is the reduction of the numbers 0 and 1, where all numbers except 0 are true.
_OPS_OF_BOOLS = _by_hash({
    dist.ReduceOp.SUM: _engine.Max, dist.ReduceOp.PRODUCT: _engine.Min, dist.ReduceOp.MIN: _engine.Min,
    dist.ReduceOp.MAX: _engine.Max,
})  # fmt: skip
_OPS_OF_COMPLEX = _by_hash({dist.ReduceOp.SUM: _engine.Sum, dist.ReduceOp.AVG: _engine.Average})


def _ops_of(dtype: torch.dtype) -> dict[int, tuple[str, int]]:
    return _OPS_OF_BOOLS if dtype is torch.bool else _OPS_OF_COMPLEX if dtype.is_complex else _OPS


# The number of each reduction that the library has for an element type, by the hash of the ReduceOp and the type.
_REDUCTIONS = {(op, dtype): number for dtype in _DTYPES for op, (_, number) in _ops_of(dtype).items()}


def reduction(op: Any, t: Tensor) -> tuple[int, Tensor]:
    """Returns the reduction of gohvd that computes the torch.distributed.ReduceOp op of the tensor t, and the tensor on
    which it works.
    """
    dtype = t.dtype
    number = _REDUCTIONS.get((hash(op), dtype))
    if number is not None:
        return number, t
    known = _ops_of(dtype)
    found = known.get(hash(op))
    if found is None:
        kind = getattr(op, "op", op)
        name, wanted = getattr(kind, "name", kind), ", ".join([f"ReduceOp.{name}" for name, _ in known.values()])
        raise ValueError(f"ReduceOp.{name} of {dtype} tensors is not supported: want one of {wanted}")
    if dtype.is_complex:
        return found[1], moved(t)
    raise TypeError(f"reductions of {dtype} tensors are not supported")


def dense(tensors: Sequence[Tensor], want: int = 0) -> list[Tensor]:
    """Returns the tensors as a list. Raises TypeError or ValueError unless they are dense tensors of one type on one
    device, and there are as many as wanted, or any number from 1 if want is 0.
    """
    given = list(tensors) if type(tensors) is list or not isinstance(tensors, Tensor) else [tensors]
    if want and len(given) != want or not given:
        raise ValueError(f"got {len(given)} tensors, want {want or 'at least 1'}")
    first = given[0]
    for t in given:
        if not isinstance(t, Tensor):
            raise TypeError(f"got {type(t).__name__}, want a tensor")
        if t.layout is not torch.strided:
            raise ValueError(f"got a tensor with layout {t.layout}, want {torch.strided}")
        if not (t.is_cpu or t.is_cuda):
            raise ValueError(f"got a tensor on device {t.device}, want one in memory or on a CUDA device")
        if t is first:
            continue
        if t.dtype != first.dtype:
            raise ValueError(f"got tensors of types {first.dtype} and {t.dtype}, want one type")
        if t.device != first.device:
            raise ValueError(f"got tensors on {first.device} and {t.device}, want one device")
    return given
