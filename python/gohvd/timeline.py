"""The timeline of operations: a file that Perfetto and chrome://tracing show."""

from __future__ import annotations

import os

from . import _engine


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes what this rank does from now on: rank 0 to file_path, rank r beside it, with .rank<r> before the extension.
    mark_cycles marks when negotiation cycles begin. A timeline that goes to another file ends; if it goes to this one
    already nothing changes. It returns when the file is there.

    A ValueError before ``init``, if the file cannot be made, and, as in Horovod, if HOROVOD_TIMELINE is not set: give that
    a file to begin with, or DYNAMIC.
    """
    path = os.path.abspath(os.fspath(file_path))  # the sidecar may be in another directory
    _ready("start_timeline")
    _engine.engine.start_timeline(path, bool(mark_cycles))


def stop_timeline() -> None:
    """Ends the timeline, and returns when its file is complete. Without one it does nothing. A ValueError as of
    ``start_timeline``."""
    _ready("stop_timeline")
    _engine.engine.stop_timeline()


def _ready(what: str) -> None:
    _engine.engine.place()  # a ValueError before init
    # A file of settings may have it too, which is the sidecar's to read.
    if not os.environ.get("HOROVOD_TIMELINE") and not os.environ.get("HVD_CONFIG_FILE"):
        raise ValueError(f"gohvd: {what}: set HOROVOD_TIMELINE to a file, or to DYNAMIC, before the program starts")
