"""gohvd: collective communication for distributed training, with Horovod's interface.

``gohvd.torch`` is the interface for PyTorch, and ``gohvd.numpy`` is the interface for numpy. The library
libgohvd runs the operations of this rank in this process (docs/c-api.md).
"""

from __future__ import annotations

from typing import Any

from . import _engine
from ._engine import Block
from .exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
from .timeline import mark_range, mark_step

__version__ = "0.7.0"

__all__ = [
    "Block", "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "alloc", "dump", "mark_range",
    "mark_step",
]  # fmt: skip


def alloc(nbytes: int) -> Block:
    """Allocates a block of nbytes bytes that the other ranks of the host can read. Large operations on it are faster
    (docs/execution.md). The bytes are zero.

    The program uses the ``view`` of the returned ``Block``, or arrays and tensors over this view. alloc may be called
    before ``init``. The block remains usable after ``shutdown``. Raises MemoryError
    if there is not enough memory.
    """
    return Block(nbytes)


def dump() -> dict[str, Any]:
    """Returns the operations that this rank waits for and its last operations, as the flight recorder has them. The
    fields are those of the files of HVD_DUMP_DIR (docs/troubleshooting.md).

    The function may be called from any thread, also while operations run, hang or have failed. It takes a few
    milliseconds. Raises ValueError before ``init`` and if the rank runs in a sidecar.
    """
    return _engine.engine.dump()
