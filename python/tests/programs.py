"""Runs programs as jobs of one rank, for tests that would disturb the job in which they run."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import textwrap
import unittest
from collections.abc import Sequence

_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI", "PMIX_", "SLURM_", "MASTER_", "TORCHELASTIC_", "GROUP_", "FLUX_")
_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HVD_SECRET", "HVD_SECRET_FILE", "HVD_SIDECAR")

# Whether the job has one rank. Tests that need no other ranks run only in this case. In a larger job each rank would
# repeat them.
alone = os.environ.get("HOROVOD_SIZE", "1") == "1"


# Whether tests run longer, with more rounds (make stress).
stress = os.environ.get("STRESS", "") == "1"

# The time limits of a test and of a program that it runs, in seconds.
_TEST_SECONDS = 1000 if stress else 300
_PROGRAM_SECONDS = 600 if stress else 200


class Bounded(unittest.TestCase):
    """A test case with a time limit. If a test takes longer, the process ends and prints where each thread waits."""

    seconds = _TEST_SECONDS

    def setUp(self) -> None:
        faulthandler.dump_traceback_later(self.seconds, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)


class Programs(Bounded):
    """A test case that runs programs of one rank. Each program is a new process."""

    def run_program(self, script: str, *args: str, status: int = 0, **env: str) -> str:
        """Runs a program, checks its exit status, and returns what it has printed."""
        got = run(script, *args, **env)
        self.assertEqual(got.returncode, status, f"{got.stdout}\n{got.stderr}")
        return got.stdout + got.stderr


def environment(**env: str) -> dict[str, str]:
    """Returns the environment of this process with the variables in env, and without the variables of the launcher.
    With the launcher's variables, a program would become a rank of the launcher's job.
    """
    out = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(_LAUNCHERS) and k not in _OTHERS and not k.startswith(("HVD_JOB", "HVD_RENDEZVOUS"))
    }
    out.update(env)
    return out


def run(script: str, *args: str, interpreter: Sequence[str] = (sys.executable, "-X", "faulthandler"), **env: str):
    """Runs a script for a limited time, and returns the finished process with its exit status and output."""
    return subprocess.run(
        [*interpreter, "-c", textwrap.dedent(script), *args],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=_PROGRAM_SECONDS,
    )
