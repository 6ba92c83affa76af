"""Programs for jobs whose ranks change, without torch, whose import takes longer than the rest of them
(internal/pythontest/elastic_test.go): ``elastic_numpy_ranks.py NAME ARGUMENT...``.

Each prints what the test looks for. The first process at a slot is the one whose HVD_MEMBER ends with /1.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pathlib
import pickle
import signal
import sys
import time

import numpy as np

import gohvd.numpy as hvd
from gohvd import elastic
from gohvd.exceptions import MismatchError

FIRST = os.environ["HVD_MEMBER"].endswith("/1")
LIMIT_SECONDS = 120  # a wait for a child fails after this time


def say(*words: object) -> None:
    print(*words, flush=True)


def broadcast_object(value: object, root_rank: int = 0) -> object:
    data = pickle.dumps(value) if hvd.rank() == root_rank else b""
    size = hvd.broadcast(np.array([len(data)]), root_rank, name="size of object")[0]
    content = np.frombuffer(data, np.uint8) if data else np.empty(size, np.uint8)
    return pickle.loads(hvd.broadcast(content, root_rank, name="object").tobytes())


State = functools.partial(elastic.ObjectState, broadcast_object, hvd.rank)


def build(folder: str) -> None:
    """Rank 1 dies. The process that takes its place cannot make its model before the others have made many steps, and
    it cannot use operations before it is a rank.
    """
    building, go_on = pathlib.Path(folder, "building"), pathlib.Path(folder, "pipe")
    hvd.init()
    place = hvd.rank(), hvd.size(), hvd.local_rank()
    if not FIRST:
        assert hvd.is_initialized() and place == (2, 3, 1), place
        try:
            hvd.allreduce(np.ones(1))
            raise AssertionError("a process that is not a rank yet has used an operation")
        except ValueError as e:
            assert "not a rank of the elastic job yet" in str(e), e
        building.touch()
        say("goes on after", go_on.read_text(), "steps")
    state = State(weights=np.random.rand(3), step=0, fewer=0, again=0)
    resets: list[int] = []

    def reset() -> None:
        assert state.step > 0, "the callback does not see the values of the commit"
        resets.append(hvd.size())
        state.step += 1000 * (not FIRST)  # that would be a difference to the other ranks

    state.register_reset_callbacks([reset])

    @elastic.run
    def run(state) -> None:
        theirs = hvd.allgather(np.array([[state.step, *state.weights]]))
        assert theirs.tolist() == [[state.step, *state.weights]] * hvd.size(), theirs
        while state.again < 20:
            if FIRST and hvd.rank() == 1 and hvd.size() == 3 and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(state.weights)
            state.step += 1
            state.fewer += hvd.size() == 2 and building.exists()
            state.again += state.fewer > 0 and hvd.size() == 3
            if hvd.rank() == 0 and state.fewer == 300:
                go_on.write_text("300")
            state.commit()

    run(state)
    assert resets == ([2, 3] if FIRST else [3]), resets
    say("done", state.fewer > 300)


def catches_sigterm() -> bool:
    """Returns whether this process has a handler for SIGTERM. signal.getsignal knows only those of Python."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)
    raise AssertionError("/proc/self/status has no SigCgt")


def leave() -> None:
    """The first process with the local rank 1 gets SIGTERM in step 5, and leaves. The others lose no step. SIGTERM
    ends the forked child of a rank.
    """
    hvd.init()
    state = State(step=0)
    steps = 0

    @elastic.run
    def run(state) -> None:
        nonlocal steps
        while state.step < 40 or hvd.size() == 3:
            assert catches_sigterm()
            if state.step == 3:
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
                child.start()
                child.terminate()
                child.join(LIMIT_SECONDS)
                assert child.exitcode == -signal.SIGTERM, child.exitcode
            if hvd.local_rank() == 1 and state.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            hvd.allreduce(np.ones(1))
            state.step += 1
            steps += 1
            state.commit()

    run(state)
    assert steps == state.step, (steps, state.step)
    assert not catches_sigterm()
    say("done after", hvd.size())


def twice() -> None:
    """The first process with the local rank 1 dies in the second of two trainings."""
    hvd.init()

    @elastic.run
    def run(state, end: int) -> None:
        while state.step < end:
            if hvd.local_rank() == 1 and state.step == 105:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(np.ones(1))
            state.step += 1
            state.commit()

    first, second = State(step=0), State(step=100)
    run(first, 10)
    run(second, 110)
    say("done", first.step, second.step, hvd.size())


def own() -> None:
    """The rank with the local rank 1 has an error of its own, and then all ranks contradict each other. Both errors leave the wrapper."""
    hvd.init()
    state = State(step=0)

    @elastic.run
    def run(state) -> None:
        while state.step < 40 or hvd.size() < 3:
            hvd.allreduce(np.ones(1))
            state.step += 1
            if FIRST and hvd.local_rank() == 1 and state.step == 5:
                raise KeyError("mine")
            state.commit()
            time.sleep(0.01)
        hvd.allreduce(np.ones(2 + hvd.rank()), name="x")

    try:
        run(state)
    except KeyError as e:
        assert not catches_sigterm()
        say("left with", repr(e))
        raise
    except MismatchError as e:
        assert not catches_sigterm()
        say("left with MismatchError")
        sys.exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
