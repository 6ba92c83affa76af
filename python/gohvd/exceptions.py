"""The exceptions of operations and queries: those of Horovod, and subclasses of them.

Misuse by this rank raises ``ValueError``, as in Horovod. A failure between ranks raises ``HorovodInternalError``,
which elastic training catches.
"""

from __future__ import annotations

from typing import Sequence


class HorovodInternalError(RuntimeError):
    """Raised if an operation has failed: ranks disagree, some have died, or the job was shut down."""


class MismatchError(HorovodInternalError):
    """Raised at all ranks if they have requested different operations under one name. The job goes on."""


class PeerError(HorovodInternalError):
    """Raised if ranks have failed; the job is over. ``ranks`` names them, if they are known."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class SidecarError(HorovodInternalError):
    """Raised if the sidecar of this rank has ended, cannot be started, or does not respond as it should."""


class NotInitializedError(HorovodInternalError, ValueError):
    """Raised if ``init`` was not called.

    Horovod raises ``ValueError`` for queries and ``HorovodInternalError`` for operations; this class is both.
    """

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class InitError(HorovodInternalError, ValueError):
    """Raised if ``init`` could not join this process to its job; it may be called again. Horovod raises
    ``ValueError``.
    """


class HostsUpdatedInterrupt(Exception):
    """Raised if hosts were added or removed. ``skip_sync`` means that the state need not be sent to other ranks."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Raised if the installed framework has another version than expected."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"Framework {name} installed with version {installed_version} but found version {version}."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
