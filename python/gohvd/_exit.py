"""This module finds the reason that a process sends to the other ranks when it leaves the job. It also shortens the
traceback that is printed if an operation has failed.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType
from typing import Any

from .exceptions import HorovodInternalError

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MOST_CHARACTERS = 1000  # a longer reason is cut to this length


def _describe(e: BaseException) -> str:
    text = "".join(traceback.format_exception_only(type(e), e)).strip()
    # A file name may contain surrogates, which cannot be encoded in a message. The library cuts a text at a null character.
    text = text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def of_shutdown() -> tuple[str, bool]:
    """Returns the reason to send with an explicit shutdown, and whether the shutdown is a failure. An explicit shutdown
    is never a failure. Even if it follows an exception, the program may have handled the exception.
    """
    e = sys.exc_info()[1]
    return (f"while handling {_describe(e)}" if e is not None else "", False)


def of_exit() -> tuple[str, bool]:
    """Returns the reason why this process exits, and whether the exit is a failure. The exit is a failure if it follows
    an uncaught exception.
    """
    e: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if e is None or hasattr(sys, "ps1"):  # in an interactive interpreter, an exception does not end the process
        return "", False
    return raised(e), True


def raised(e: BaseException) -> str:
    """Returns the reason of a process that leaves the job because of an exception."""
    return f"its program raised {_describe(e)}"


class _Failed:
    """The standard error of a process whose end has failed. Python exits with status 120 if it cannot flush it at the end.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("the job has failed")


def fail(e: Exception) -> None:
    """Prints an error at the exit of the process, and makes its exit status 120 after the other functions of atexit."""
    print(f"gohvd: the job has failed, so results of this process may be undefined: {e}", file=sys.stderr)
    sys.stderr = _Failed(sys.stderr)


class ExceptHook:
    """An exception hook that removes the frames of this package from the traceback of a failed operation, so that the
    traceback ends at a line of the program.
    """

    def __init__(self) -> None:
        self._next: Any = None

    def install(self) -> None:
        """Installs the hook, which also calls the previous hook. A further call does nothing."""
        if self._next is None:
            self._next = sys.excepthook
            sys.excepthook = self

    def __call__(self, kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        if isinstance(value, HorovodInternalError):
            tb = _of_program(tb)
            value = value.with_traceback(tb)
            if value.__cause__ is None:
                value.__suppress_context__ = True
        self._next(kind, value, tb)


def _of_program(tb: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the frames of this package at its end. If all frames belong to this package,
    returns the whole traceback.
    """
    frames = []
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    kept = list(frames)
    while kept and kept[-1].tb_frame.f_code.co_filename.startswith(_PACKAGE):
        kept.pop()
    if not kept:
        return frames[0] if frames else None
    last: TracebackType | None = None
    for f in reversed(kept):
        last = TracebackType(last, f.tb_frame, f.tb_lasti, f.tb_lineno)
    return last
