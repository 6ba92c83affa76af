"""Programs that are a job of one rank, for tests of what must not happen to the job that the tests run in."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Dict, Sequence

_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI", "PMIX_", "SLURM_", "MASTER_", "TORCHELASTIC_", "GROUP_")
_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HVD_SECRET", "HVD_SECRET_FILE", "HVD_SIDECAR")

# What has nothing to do with other ranks runs at one rank: more would do the same, as often as there are numbers of ranks.
alone = os.environ.get("HOROVOD_SIZE", "1") == "1"


def environment(**env: str) -> Dict[str, str]:
    """The environment without the launcher, which would make the program a rank of its job."""
    out = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(_LAUNCHERS) and k not in _OTHERS and not k.startswith(("HVD_JOB", "HVD_RENDEZVOUS"))
    }
    out.update(env)
    return out


def run(script: str, *args: str, interpreter: Sequence[str] = (sys.executable, "-X", "faulthandler"), **env: str):
    """Runs a script to its end, a minute at most."""
    return subprocess.run(
        [*interpreter, "-c", textwrap.dedent(script), *args],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
