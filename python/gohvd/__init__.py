"""gohvd: collective communication for distributed training, with Horovod's interface.

``gohvd.torch`` is for PyTorch, ``gohvd.numpy`` for numpy. A sidecar process, hvdd, does the work; ``init`` starts
it.
"""

from __future__ import annotations

from . import _engine
from ._arena import Block
from .exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__version__ = "0.6.0"

__all__ = ["Block", "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "alloc"]


def alloc(nbytes: int) -> Block:
    """Allocates nbytes zeros of memory that operations work on without copying.

    Use the ``view`` of the ``Block`` that it returns, or arrays and tensors over that. The call starts the sidecar
    if there is none yet. It may come before ``init``, and the block outlives ``shutdown``. Raises MemoryError if
    there is no memory.
    """
    return _engine.engine.alloc(nbytes)
