"""torch's DistributedDataParallel with gradient buckets in an arena, where operations work on them without copying."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..mpi_ops import _DTYPES, alloc_tensor


class _EmptyInArena(TorchDispatchMode):
    """While this mode is active, ``torch.empty`` in memory makes tensors in an arena, also for callers in C++."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and _fits(**kwargs):
            return alloc_tensor(args[0], kwargs["dtype"])
        return func(*args, **kwargs)


def _fits(dtype: Any = None, device: Any = None, layout: Any = None, **other: Any) -> bool:
    return (
        dtype in _DTYPES and (device is None or device.type == "cpu") and layout in (None, torch.strided)
        and not any(other.values())
    )  # fmt: skip


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's class of this name, with its buckets in an arena. A bucket that is all-reduced is then not copied.

    Unless gradient_as_bucket_view is set to False, the gradients of the parameters are views of the buckets, so that
    they are not copied either.
    """

    # torch allocates the buckets with torch.empty, when the object is made and once more before the second forward pass.

    def __init__(self, *args: Any, gradient_as_bucket_view: bool = True, **kwargs: Any) -> None:
        with _EmptyInArena():
            super().__init__(*args, gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        with _EmptyInArena():
            return super()._pre_forward(*args, **kwargs)
