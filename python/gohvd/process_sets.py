"""Process sets: groups of ranks among which operations can run."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Union

from . import _engine


class ProcessSet:
    """A set of ranks of the job. It can be used once ``init(process_sets=...)`` or ``add_process_set`` has
    registered it.

    Two sets are equal if they are the same object.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        """Makes a set that is not registered. ranks_or_comm is ranks of the job, in any order, or a communicator of
        mpi4py, whose ranks are the members.
        """
        self.process_set_id: Optional[int] = None
        """0 for that of all ranks, then 1, 2, ...; None if it is not registered."""
        self.ranks: Optional[List[int]] = None
        """Ascending."""
        self.mpi_comm: Any = None
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
        elif ranks_or_comm is not None:
            self.ranks = sorted({_rank(r) for r in ranks_or_comm})

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> Optional[int]:
        """Returns the number of members, or None if the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> Optional[int]:
        """Returns this process's position among the members, or None if it is not a member or the set is not
        registered.
        """
        if self.process_set_id is None or self.ranks is None or not self.included():
            return None
        return self.ranks.index(_engine.engine.place().rank)

    def included(self) -> Optional[bool]:
        """Returns whether this process is a member, or None if the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return _engine.engine.place().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __str__ = __repr__


def _rank(r: Any) -> int:
    if int(r) != r or r < 0:
        raise ValueError(f"process set: got rank {r!r}, want a whole number of at least 0")
    return int(r)


global_process_set = ProcessSet(None)
global_process_set.process_set_id = 0
_engine.engine.global_set = global_process_set


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Registers a process set while the job runs, and returns it.

    All ranks must call it with the same ranks, whether they are members or not; it returns when all have called it.
    Raises ValueError if a set of these ranks is registered already.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _engine.engine.add_set(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set, and returns whether it did.

    All ranks must call it; it returns when all have called it. It returns False if the set is not registered or is
    the set of all ranks. Operations that were granted in the set finish, others fail.
    """
    return _engine.engine.remove_set(process_set)


def get_process_set_ids_and_ranks() -> "dict[int, list[int]]":
    """Returns the ranks of all registered process sets, by number."""
    return _engine.engine.set_ranks()
