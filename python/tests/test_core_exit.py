"""Tests what a process sends as its reason and prints as its traceback when it exits."""

from __future__ import annotations

import os
import sys
import traceback
import unittest
from typing import Any
from unittest import mock

from gohvd import _exit
from gohvd.exceptions import PeerError

INSIDE = os.path.join(os.path.dirname(_exit.__file__), "inside.py")


def fail_inside(frames: int) -> None:
    """Raises a PeerError while it handles another exception. The last frames of the traceback are frames of the
    package, and frames is their number.
    """
    body = "def f(n):\n  if n > 1: f(n - 1)\n  try: {}[0]\n  except KeyError: raise error\n"
    space: dict = {"error": PeerError("rank 1 failed", [1])}
    exec(compile(body, INSIDE, "exec"), space)
    space["f"](frames)


class Tracebacks(unittest.TestCase):
    def printed(self, e: BaseException) -> list[str]:
        lines: list[str] = []
        hook = _exit.ExceptHook()

        def last(kind: Any, value: BaseException, tb: Any) -> None:
            lines.extend("".join(traceback.format_exception(kind, value, tb)).splitlines())

        with mock.patch.object(sys, "excepthook", last):
            hook.install()
            hook.install()
            sys.excepthook(type(e), e, e.__traceback__)
        return lines

    def test_ends_at_the_line_of_the_program(self) -> None:
        try:
            fail_inside(3)
        except PeerError as e:
            lines = self.printed(e)
        self.assertEqual(lines[0], "Traceback (most recent call last):")
        self.assertEqual(lines[-1], "gohvd.exceptions.PeerError: rank 1 failed")
        files = [line for line in lines if line.startswith("  File ")]
        self.assertEqual(len(files), 2, lines)  # only the frame of this test and the frame of fail_inside are left
        self.assertIn("in fail_inside", files[-1])

    def test_other_errors_are_whole(self) -> None:
        try:
            exec(compile("def f(): raise ValueError('x')\nf()", INSIDE, "exec"), {})
        except ValueError as e:
            lines = self.printed(e)
        self.assertIn("inside.py", "".join(lines))


class Reasons(unittest.TestCase):
    def test_exit_with_an_uncaught_exception(self) -> None:
        for name in ("last_exc", "last_value"):
            with mock.patch.object(sys, name, KeyError("k"), create=True), mock.patch.object(
                sys, "last_value" if name == "last_exc" else "last_exc", None, create=True
            ):
                self.assertEqual(_exit.of_exit(), ("its program raised KeyError: 'k'", True))
                with mock.patch.object(sys, "ps1", ">>> ", create=True):
                    self.assertEqual(_exit.of_exit(), ("", False))
        with mock.patch.object(sys, "last_exc", None, create=True), mock.patch.object(sys, "last_value", None, create=True):
            self.assertEqual(_exit.of_exit(), ("", False))

    def test_shutdown_while_an_exception_is_handled(self) -> None:
        self.assertEqual(_exit.of_shutdown(), ("", False))
        try:
            raise ValueError("x" * 5000)
        except ValueError:
            reason, failed = _exit.of_shutdown()
        self.assertTrue(reason.startswith("while handling ValueError: xxx") and len(reason) < 1100, reason)
        self.assertFalse(failed)

    def test_null_character(self) -> None:
        """The library would cut the reason at a null character."""
        self.assertEqual(_exit.raised(ValueError("a\0b")), "its program raised ValueError: a\\x00b")
