"""gohvd: collective communication for distributed training, with Horovod's interface.

``gohvd.torch`` is for PyTorch, ``gohvd.numpy`` for numpy. ``init`` starts a sidecar process, hvdd, which runs the
operations.
"""

from __future__ import annotations

from . import _engine
from ._arena import Block
from .exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__version__ = "0.6.0"

__all__ = ["Block", "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "alloc"]


def alloc(nbytes: int) -> Block:
    """Allocates nbytes zeros of memory that operations work on without copying.

    The program uses the ``view`` of the returned ``Block``, or arrays and tensors over this view. alloc starts the
    sidecar if it is not running yet. It may be called before ``init``, and the block outlives ``shutdown``. Raises
    MemoryError if there is not enough memory.
    """
    return _engine.engine.alloc(nbytes)
