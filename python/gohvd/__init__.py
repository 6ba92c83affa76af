"""gohvd: collective communication for distributed training, with Horovod's interface.

``gohvd.torch`` is the interface for PyTorch, and ``gohvd.numpy`` is the interface for numpy. ``init`` starts a process,
the sidecar ``hvdd``, which runs the operations of this rank.
"""

from __future__ import annotations

from . import _engine
from ._arena import Block
from .exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__version__ = "0.6.0"

__all__ = ["Block", "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "alloc"]


def alloc(nbytes: int) -> Block:
    """Allocates a block of nbytes bytes of memory that operations work on without copying. The bytes are zero.

    The program uses the ``view`` of the returned ``Block``, or arrays and tensors over this view. alloc may be called
    before ``init``: it starts the sidecar if necessary. The block remains usable after ``shutdown``. Raises MemoryError
    if there is not enough memory.
    """
    return _engine.engine.alloc(nbytes)
