"""Functions that start and stop the timeline, and that mark in it what the program does. The timeline is a file with this
rank's operations, which Perfetto and chrome://tracing can show.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from . import _engine, _library


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


def mark_step(number: int) -> None:
    """Says that the program now begins the training step with the given number, which lasts until the next mark.

    The timeline shows the marks, and the metric hvd_steps_total counts them. All ranks should mark the same steps, with
    growing numbers. If a program does not call mark_step, its optimizers mark the steps. After the first call they mark
    none any more. Outside of a job, and with a sidecar, mark_step does nothing. Raises ValueError if the number is
    negative.
    """
    if number < 0:
        raise ValueError(f"mark_step: got the step {number}, want 0 or more")
    _marks.by_program = True
    _library.quick.hvd_mark_step(number)


class mark_range:
    """Is a context to which the program gives a name, such as "data", "forward" or "checkpoint".

        with gohvd.mark_range("forward"):
            loss = model(batch)

    The timeline shows these ranges, and ``hvdrun timeline`` says in which of them a late rank was. Ranges may be inside of
    each other, and threads may have ranges at the same time. Without a timeline, outside of a job and with a sidecar,
    nothing is recorded.
    """

    def __init__(self, name: str) -> None:
        self._name = _library.whole(name.encode())

    def __enter__(self) -> None:
        self._begun = _library.quick.hvd_begin_range()

    def __exit__(self, *_: object) -> None:
        if self._begun:
            _library.quick.hvd_end_range(self._name, self._begun)


class _Marks:
    """Marks the steps of a program that does not call mark_step. A program may have several optimizers, such as those of
    a generator and a discriminator. The one that steps first marks the steps, as long as it exists.
    """

    def __init__(self) -> None:
        self.by_program = False
        self.reset()

    def reset(self) -> None:
        self._optimizer: Callable[[], Any] = lambda: None
        self._steps = 0

    def stepped(self, optimizer: Any) -> None:
        """Marks the beginning of the next step, because an optimizer has stepped. The first step has the number 0."""
        if self.by_program or not _engine.engine.initialized():
            return
        first = self._optimizer()
        if first is None:
            self._optimizer = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._steps += 1
        _library.quick.hvd_mark_step(self._steps)


_marks = _Marks()
_engine.engine.at_shutdown.append(_marks.reset)


def stepped(optimizer: Any) -> None:
    """Marks the beginning of the next step, because an optimizer has stepped (_Marks)."""
    _marks.stepped(optimizer)
