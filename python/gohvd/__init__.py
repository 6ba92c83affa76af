"""gohvd: collective communication for distributed training, with Horovod's interface.

``gohvd.torch`` is for PyTorch, ``gohvd.numpy`` for numpy. The work is done by a sidecar process, hvdd, which ``init`` starts.
"""

from __future__ import annotations

from . import _engine
from ._arena import Block
from .exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__version__ = "0.6.0"

__all__ = ["Block", "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "alloc"]


def alloc(nbytes: int) -> Block:
    """Memory of nbytes zeros that operations work on without copying: its ``view``, or arrays and tensors over that.

    It starts the sidecar if there is none yet, may come before ``init``, and outlives ``shutdown``. MemoryError if there is
    none.
    """
    return _engine.engine.alloc(nbytes)
