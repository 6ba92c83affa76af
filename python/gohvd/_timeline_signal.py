"""Forwards the timeline signal (HVD_TIMELINE_SIGNAL) to the sidecar.

Launchers and users send this signal to the program. The sidecar writes the timeline, but runs in a session of its own,
so that the signal does not reach it.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from typing import Any, Callable

_SIGNALS = {"SIGUSR1": int(signal.SIGUSR1), "SIGUSR2": int(signal.SIGUSR2)}


class TimelineSignal:
    """Forwards the signal if HVD_TIMELINE_SIGNAL is set and the program has no handler for the signal."""

    def __init__(self, forward: Callable[[int], None]) -> None:
        self._forward = forward
        self._number = 0
        """The number of the signal that is forwarded, or 0 if no signal is forwarded."""
        self._before: Any = signal.SIG_DFL
        """The handler that the signal had before listen was called."""
        self._warned = False

    def listen(self) -> None:
        number = _SIGNALS.get(os.environ.get("HVD_TIMELINE_SIGNAL", "").upper(), 0)
        if number == self._number:
            return
        self.stop()
        if number == 0:
            return
        if threading.current_thread() is not threading.main_thread():
            self._warn("init was called outside of the main thread, and Python sets signal handlers only in the main thread")
        elif _has_handler(number):
            self._warn("the program already has a handler for this signal")
        else:
            self._before = signal.signal(number, self._handle) or signal.SIG_DFL
            self._number = number

    def stop(self) -> None:
        """Restores the previous handler of the signal, unless the program has set another handler in the meantime.

        Outside of the main thread it does nothing, because Python sets handlers only in the main thread.
        """
        number = self._number
        if number == 0 or threading.current_thread() is not threading.main_thread():
            return
        self._number = 0
        if signal.getsignal(number) == self._handle:
            signal.signal(number, self._before)

    def _handle(self, number: int, frame: Any) -> None:
        self._forward(number)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"gohvd: HVD_TIMELINE_SIGNAL has no effect: {why}", RuntimeWarning, stacklevel=5)


def _has_handler(number: int) -> bool:
    """Returns whether the process has a handler for the signal. It reads /proc, because signal.getsignal does not
    report handlers that were installed by C code, such as faulthandler's.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as f:
        for line in f:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
