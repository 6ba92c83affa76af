"""Finds, starts and ends the programs of gohvd. A wheel installs functions of this module as commands.

A wheel contains the programs in ``gohvd/bin``. A checkout does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_END_SECONDS = 30.0  # hvdrun gives its ranks 5 s to end, and then some time to disappear

_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


def in_package(name: str) -> str | None:
    """Returns the path of the program in this package, or None if the package does not contain it."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", name)
    return path if os.access(path, os.X_OK) and not os.path.isdir(path) else None


def find(name: str) -> str | None:
    """Returns the path of the program in this package, or else on PATH, or None if neither has it."""
    return in_package(name) or shutil.which(name)


def path_of_hvdrun() -> str:
    """Returns the path of hvdrun: HVD_RUN, or else what ``find`` returns. Raises RuntimeError if there is none."""
    name = os.environ.get("HVD_RUN")
    path = shutil.which(name) if name else find("hvdrun")
    if path is None:
        raise RuntimeError(
            f"gohvd: HVD_RUN is {name}, which is not the path of an executable file" if name else
            "gohvd: found no hvdrun: HVD_RUN is not set, and hvdrun is neither in the package gohvd nor on PATH"
        )  # fmt: skip
    return path


def with_parent(words: Sequence[str]) -> list[str]:
    """Returns the words of a command that runs the command words, and gets SIGTERM when the thread that has started it
    ends, also if this process is killed.
    """
    return [sys.executable, "-S", "-c", _WITH_PARENT, str(os.getpid()), *words]


def end(process: subprocess.Popen[Any], number: int = signal.SIGTERM) -> None:
    """Sends a process a signal, waits for its end, and kills it if this takes long or is interrupted. If it has a process
    group of its own, all of the group get the signals: hvdrun may be the child of a shell script.
    """

    def send(number: int) -> None:
        if process.poll() is None:
            (os.killpg if os.getpgid(process.pid) == process.pid else os.kill)(process.pid, number)

    try:
        send(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    finally:
        send(signal.SIGKILL)
        process.wait()


def execute(name: str, *args: str) -> NoReturn:
    """Replaces this process by the program of this package.

    It does not look for the program on PATH, because the command that calls this function may be found there.
    """
    path = in_package(name)
    if path is None:
        sys.exit(
            f"{name}: {os.path.dirname(os.path.abspath(__file__))} does not contain bin/{name}: install gohvd from a "
            f"wheel, or build the program in a checkout with `go build ./cmd/{name}`"
        )
    os.execv(path, [name, *args])


def hvdbench() -> NoReturn:
    """Runs the command hvdbench."""
    execute("hvdbench", *sys.argv[1:])


def hvdd() -> NoReturn:
    """Runs the command hvdd."""
    execute("hvdd", *sys.argv[1:])


def hvdrun() -> NoReturn:
    """Runs the command hvdrun, or horovodrun, which has the same flags."""
    execute("hvdrun", *sys.argv[1:])
