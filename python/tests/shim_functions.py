"""The functions that test_shim runs with horovod.run. They do without torch, because each rank imports this module, and the
import of torch takes longer than all tests of horovod.run.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time

import numpy as np

import gohvd.numpy as hvd
from gohvd import elastic


def place(offset: int, factor: int = 1) -> tuple[int, int, int]:
    """Returns a value that depends on the rank and the arguments."""
    hvd.init()
    total = hvd.allreduce(np.array([hvd.rank() * factor]), op=hvd.Sum)
    return hvd.rank() + offset, hvd.size(), int(total[0])


def save_at_interrupt(folder: str) -> None:
    """Makes a file with the name of this process, and at SIGINT writes to it, after some time, and ends."""
    file = pathlib.Path(folder, str(os.getpid()))

    def save(*_: object) -> None:
        time.sleep(0.3)  # longer than 0.25 s, the limit after a second signal
        file.write_text("saved")
        os._exit(0)

    signal.signal(signal.SIGINT, save)
    file.touch()
    while True:
        signal.pause()


def fail() -> None:
    raise KeyError("on purpose")


def survive(steps: int) -> tuple[int, int]:
    """Trains for some steps. The first process at the slot 1 dies in the middle."""

    def broadcast(values: dict[str, int], root_rank: int = 0) -> dict[str, int]:
        return {name: int(hvd.broadcast(np.array([value]), root_rank)[0]) for name, value in values.items()}

    hvd.init()

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        while state.step < steps:
            hvd.allreduce(np.ones(1))
            state.step += 1
            if os.environ["HVD_MEMBER"].endswith(":1/1") and state.step == steps // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            state.commit()

    state = elastic.ObjectState(broadcast, hvd.rank, step=0)
    train(state)
    rank = hvd.rank()
    hvd.shutdown()
    return rank, state.step
