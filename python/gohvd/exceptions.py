"""The exceptions that operations and queries raise. They are Horovod's exceptions and subclasses of them.

Misuse by this rank raises ``ValueError``, as in Horovod. A failure between ranks raises ``HorovodInternalError``, which
elastic training handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class HorovodInternalError(RuntimeError):
    """Raised if an operation has failed, because ranks disagree, ranks have failed, or the job was shut down."""


class MismatchError(HorovodInternalError):
    """Raised at all ranks if ranks have requested different operations with the same name. The job goes on."""


class PeerError(HorovodInternalError):
    """Raised if ranks have failed. The job is over. ``ranks`` has the failed ranks, and is empty if they are unknown.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class LibraryError(HorovodInternalError):
    """Raised if the library libgohvd cannot be found or loaded."""


class NotInitializedError(HorovodInternalError, ValueError):
    """Raised if this process is not in a job, because ``init`` was not called or ``shutdown`` was called.

    In this case Horovod's queries raise ``ValueError``, and its operations raise ``HorovodInternalError``. So this
    class derives from both.
    """

    def __init__(self, text: str = "Horovod has not been initialized; use hvd.init().") -> None:
        super().__init__(text)


class InitError(HorovodInternalError, ValueError):
    """Raised if ``init`` could not join this process to its job. ``init`` may be called again. The class derives from
    ``ValueError``, because Horovod raises ``ValueError`` in this case.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Raised in an elastic job by commit and check_host_updates if the ranks are to change. skip_sync says that ranks are
    only removed.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the ranks of the job are to change; hvd.elastic.run must see this exception")
        self.skip_sync = skip_sync

    def __reduce__(self) -> Any:
        return type(self), (self.skip_sync,)


class HorovodVersionMismatchError(ImportError):
    """Raised if the version of the installed framework is not the expected one."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"Framework {name} installed with version {installed_version} but found version {version}."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> Any:
        return type(self), (self.name, self.version, self.installed_version)
