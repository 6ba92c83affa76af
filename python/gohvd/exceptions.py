"""The exceptions of operations and queries: Horovod's, and finer ones below them.

What a rank should not have asked for is a ``ValueError``, as in Horovod. What goes wrong between ranks is a
``HorovodInternalError``, which elastic training catches.
"""

from __future__ import annotations

from typing import Sequence


class HorovodInternalError(RuntimeError):
    """An operation has failed: ranks contradict each other, or some have died, or the job was shut down."""


class MismatchError(HorovodInternalError):
    """The ranks have asked for different things under one name. All of them get this, and the job goes on."""


class PeerError(HorovodInternalError):
    """Ranks have failed, and the job is over. ``ranks`` says which, if it is known."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class SidecarError(HorovodInternalError):
    """The sidecar of this rank has ended, or cannot be started or spoken to."""


class NotInitializedError(HorovodInternalError, ValueError):
    """``init`` was not called. Horovod gives a ``ValueError`` for queries and a ``HorovodInternalError`` for operations;
    this is both."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class InitError(HorovodInternalError, ValueError):
    """``init`` could not bring this process into its job; it may be called again. Horovod gives a ``ValueError``."""


class HostsUpdatedInterrupt(Exception):
    """Hosts have come or gone; ``skip_sync`` says that the state need not be sent to anybody."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The framework that is there has another version than the one that was expected."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"Framework {name} installed with version {installed_version} but found version {version}."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
