"""Sequences of tensors as one array of the engine, and the element types and reductions of torch.

torch's operations work on lists of tensors, and gohvd's operations on one array. ``Parts`` stands for the elements of
all tensors of a list, one after the other.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

import torch

from ... import _engine
from ..._engine import Shape
from ..mpi_ops import _DTYPES, _torch

Tensor = torch.Tensor


class Parts(NamedTuple):
    """Tensors that have the same element type and device. An operation reads or writes the elements of all of them."""

    tensors: Tuple[Tensor, ...]

    def numel(self) -> int:
        return sum([t.numel() for t in self.tensors])


class _Lists(_engine.Framework[Union[Tensor, Parts]]):
    """The engine's arrays are Parts, except its staging arrays, which are tensors."""

    def address(self, x: Any) -> int:
        first = x.tensors[0]
        return _torch.address(first) if len(x.tensors) == 1 and first.is_contiguous() else 0

    def wrap(self, view: memoryview, dtype: Any, shape: Shape) -> Tensor:
        return _torch.wrap(view, dtype, shape)

    def copy(self, target: Any, source: Any) -> None:
        parts = source if isinstance(source, Parts) else target
        staged = target if parts is source else source
        for t, piece in zip(parts.tensors, _pieces(staged, parts)):
            if parts is source:
                _torch.copy(piece, t)
            else:
                _torch.copy(t, piece)

    def fresh(self, data: memoryview, shape: Shape, like: Any) -> Tensor:
        return _torch.fresh(data, shape, like.tensors[0])


def _pieces(staged: Tensor, parts: Parts) -> List[Tensor]:
    """Returns views of a staging array, one for each of the parts and with its shape."""
    if len(parts.tensors) == 1:
        return [staged.view(parts.tensors[0].shape)]
    pieces = staged.view(-1).split([t.numel() for t in parts.tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, parts.tensors)]


LISTS = _Lists()

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


class Reduction(NamedTuple):
    """A reduction of gohvd and the tensor on which it works."""

    op: int
    tensor: Tensor


_OPS: Dict[str, int] = {
    "SUM": _engine.Sum, "AVG": _engine.Average, "PRODUCT": _engine.Product, "MIN": _engine.Min, "MAX": _engine.Max
}  # fmt: skip
# A reduction of bools is the reduction of the numbers 0 and 1, where all numbers except 0 are true.
_OPS_OF_BOOLS = {"SUM": _engine.Max, "PRODUCT": _engine.Min, "MIN": _engine.Min, "MAX": _engine.Max}


def reduction(op: Any, t: Tensor) -> Reduction:
    """Returns the reduction that computes the torch.distributed.ReduceOp op of the tensor t."""
    kind = getattr(op, "op", op)
    name = getattr(kind, "name", str(kind))
    known = _OPS_OF_BOOLS if t.dtype == torch.bool else _OPS
    if name not in known:
        raise ValueError(
            f"ReduceOp.{name} of {t.dtype} tensors is not supported: want one of {', '.join(f'ReduceOp.{k}' for k in known)}"
        )
    if t.is_complex():
        if name not in ("SUM", "AVG"):
            raise ValueError(f"ReduceOp.{name} of {t.dtype} tensors is not supported: want ReduceOp.SUM or ReduceOp.AVG")
        return Reduction(known[name], moved(t))
    if t.dtype not in _DTYPES:
        raise TypeError(f"reductions of {t.dtype} tensors are not supported")
    return Reduction(known[name], t)


def code(t: Tensor) -> _engine.Code:
    return _DTYPES[t.dtype]


def dense(tensors: Sequence[Tensor], want: int = 0) -> List[Tensor]:
    """Returns the tensors as a list. Raises TypeError or ValueError unless they are dense tensors of one type, and there
    are as many as wanted, or any number from 1 if want is 0.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if want and len(given) != want or not given:
        raise ValueError(f"got {len(given)} tensors, want {want or 'at least 1'}")
    for t in given:
        if not isinstance(t, Tensor):
            raise TypeError(f"got {type(t).__name__}, want a tensor")
        if t.layout is not torch.strided:
            raise ValueError(f"got a tensor with layout {t.layout}, want {torch.strided}")
        if t.device.type not in ("cpu", "cuda"):
            raise ValueError(f"got a tensor on device {t.device}, want one in memory or on a CUDA device")
        if t.dtype != given[0].dtype:
            raise ValueError(f"got tensors of types {given[0].dtype} and {t.dtype}, want one type")
    return given
