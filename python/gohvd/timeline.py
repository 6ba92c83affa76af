"""Functions for the timeline of operations: a file that Perfetto and chrome://tracing show."""

from __future__ import annotations

import os

from . import _engine


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to record what this rank does, and returns when the file exists.

    Rank 0 writes to file_path, rank r to a file beside it, with .rank<r> before the extension. mark_cycles marks
    the beginnings of negotiation cycles. A timeline that is written to another file ends; if it is written to this
    file already, nothing changes.

    Raises ValueError before ``init``, if the file cannot be made, and, as in Horovod, if HOROVOD_TIMELINE is not
    set: set it to the first file, or to DYNAMIC.
    """
    path = os.path.abspath(os.fspath(file_path))  # the sidecar's working directory may be another one
    _ready("start_timeline")
    _engine.engine.start_timeline(path, bool(mark_cycles))


def stop_timeline() -> None:
    """Ends the timeline, and returns when its file is complete. Without a timeline it does nothing.

    Raises ValueError like ``start_timeline``.
    """
    _ready("stop_timeline")
    _engine.engine.stop_timeline()


def _ready(what: str) -> None:
    _engine.engine.place()  # raises ValueError before init
    # The sidecar reads files of settings, which may also set HOROVOD_TIMELINE.
    if not os.environ.get("HOROVOD_TIMELINE") and not os.environ.get("HVD_CONFIG_FILE"):
        raise ValueError(f"gohvd: {what}: set HOROVOD_TIMELINE to a file, or to DYNAMIC, before the program starts")
