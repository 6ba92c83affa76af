"""The exceptions that operations and queries raise: Horovod's, and subclasses of Horovod's.

Misuse by this rank raises ``ValueError``, as in Horovod. A failure between ranks raises ``HorovodInternalError``,
which elastic training catches.
"""

from __future__ import annotations

from typing import Sequence


class HorovodInternalError(RuntimeError):
    """Raised if an operation has failed: ranks disagree, some have died, or the job was shut down."""


class MismatchError(HorovodInternalError):
    """Raised at all ranks if ranks have requested different operations under the same name. The job goes on."""


class PeerError(HorovodInternalError):
    """Raised if ranks have failed. The job is over. ``ranks`` has the failed ranks, or is empty if unknown."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class SidecarError(HorovodInternalError):
    """Raised if the sidecar of this rank has ended, cannot be started, or does not respond as it should."""


class NotInitializedError(HorovodInternalError, ValueError):
    """Raised if this process is not in a job: ``init`` was not called, or ``shutdown`` was called.

    In this case Horovod raises ``ValueError`` from queries and ``HorovodInternalError`` from operations. So this class
    derives from both.
    """

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class InitError(HorovodInternalError, ValueError):
    """Raised if ``init`` could not join this process to its job. ``init`` may be called again. It derives from
    ``ValueError``, because Horovod raises that.
    """


class HostsUpdatedInterrupt(Exception):
    """Raised by a program if hosts were added or removed. If ``skip_sync`` is true, the state need not be sent to the
    other ranks.
    """

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
