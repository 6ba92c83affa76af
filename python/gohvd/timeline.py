"""Functions that start and stop the timeline. The timeline is a file with this rank's operations, which Perfetto and
chrome://tracing can show.
"""

from __future__ import annotations

import os

from . import _engine


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to record this rank's operations, and returns when the file exists.

    Rank 0 writes to file_path. Rank r writes to a file beside it, whose name has .rank<r> before the extension. If
    mark_cycles is true, the timeline also marks the beginning of each negotiation cycle. If a timeline is being written
    to another file, that timeline ends. If it is already being written to this file, nothing changes.

    Raises ValueError before ``init`` and if the file cannot be created. As in Horovod, it also raises ValueError if
    HOROVOD_TIMELINE is not set. Set the variable to the path of the first file, or to DYNAMIC.
    """
    path = os.path.abspath(os.fspath(file_path))  # a sidecar may have another working directory
    _ready("start_timeline")
    _engine.engine.start_timeline(path, bool(mark_cycles))


def stop_timeline() -> None:
    """Ends the timeline and returns when its file is complete. If no timeline is being written, the function does
    nothing.

    Raises ValueError before ``init`` and if HOROVOD_TIMELINE is not set.
    """
    _ready("stop_timeline")
    _engine.engine.stop_timeline()


def _ready(what: str) -> None:
    _engine.engine.place()  # raises ValueError before init
    # The engine also reads the file in HVD_CONFIG_FILE, which may set HOROVOD_TIMELINE.
    if not os.environ.get("HOROVOD_TIMELINE") and not os.environ.get("HVD_CONFIG_FILE"):
        raise ValueError(f"gohvd: {what}: set HOROVOD_TIMELINE to a file, or to DYNAMIC, before the program starts")
