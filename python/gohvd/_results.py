"""Puts the results of a function that all ranks of a job call into the order of the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from . import _engine, elastic


def place() -> tuple[int, int, int]:
    """Returns the generation, the rank of this process in it, and the number of its ranks. In an elastic job they are those
    at the end, also after shutdown.
    """
    if "HOROVOD_RANK" in os.environ:
        return 0, int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    last = _engine.engine.last_place
    if last is None:
        raise RuntimeError("the function has not called hvd.init(): in an elastic job, every process must become a rank")
    return elastic._progress().generation, last.rank, last.size


def by_rank(outcomes: Iterable[tuple[int, int, int, Any]], hint: str) -> list[Any]:
    """Returns the results of the newest generation of which all ranks have a result. outcomes are tuples of what place has
    returned and the result. In an elastic job a rank may have returned sooner than the others.

    Raises RuntimeError with the hint if there is no such generation.
    """
    found: dict[tuple[int, int], dict[int, Any]] = {}
    for generation, rank, size, result in outcomes:
        found.setdefault((generation, size), {})[rank] = result
    newest = sorted(found, reverse=True)
    for generation, size in newest:
        results = found[generation, size]
        if len(results) == size:
            return [results[rank] for rank in range(size)]
    got = f"results only from ranks {sorted(found[newest[0]])} of {newest[0][1]}" if found else "no results"
    raise RuntimeError(f"gohvd: got {got}: {hint}")
