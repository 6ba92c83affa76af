"""Process sets: sets of ranks that run collectives of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _engine


class ProcessSet:
    """A set of ranks of the job. It can be used after ``init(process_sets=...)`` or ``add_process_set`` has registered
    it.

    Two sets compare equal only if they are the same object.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        """Makes a set that is not registered. ranks_or_comm defines the members: it is a list of ranks of the job in
        any order, or an mpi4py communicator.
        """
        self.process_set_id: int | None = None
        """The number of the set: 0 for the set of all ranks, 1 or more for others, None if the set is not registered.
        """
        self.ranks: list[int] | None = None
        """The ranks of the members in the job, in ascending order."""
        self.members_only: bool = False
        """Whether only the members have registered the set, so that only they remove it."""
        self.mpi_comm: Any = None
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
        elif ranks_or_comm is not None:
            self.ranks = sorted({_rank(r) for r in ranks_or_comm})

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """Returns the number of members, or None if the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """Returns this process's position among the members. Returns None if this process is not a member or the set is
        not registered.
        """
        if self.process_set_id is None or self.ranks is None or not self.included():
            return None
        return self.ranks.index(_engine.engine.place().rank)

    def included(self) -> bool | None:
        """Returns whether this process is a member, or None if the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return _engine.engine.place().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        """A copy or a loaded pickle of a registered set is the registered set with these ranks."""
        if self.process_set_id is None:
            return ProcessSet, (self.mpi_comm if self.ranks is None else self.ranks,)
        return _registered, (self.process_set_id, None if self.process_set_id == 0 else self.ranks)


def _rank(r: Any) -> int:
    if int(r) != r or r < 0:
        raise ValueError(f"process set: got rank {r!r}, want a whole number of at least 0")
    return int(r)


def _registered(number: int, ranks: list[int] | None) -> ProcessSet:
    """Returns the registered set of these ranks, if possible the one with this number. number is 0 for the set of all
    ranks. Returns a new set if there is none to return.
    """
    if number == 0:
        return global_process_set
    registered = _engine.engine.registered_sets(ranks)
    return registered.get(number) or next(iter(registered.values()), None) or ProcessSet(ranks)


global_process_set = ProcessSet(None)
global_process_set.process_set_id = 0
_engine.engine.global_set = global_process_set


def add_process_set(
    process_set: ProcessSet | Sequence[int],
    members_only: bool = False,
    name: str | None = None,
    timeout: float | None = None,
) -> ProcessSet:
    """Registers a process set while the job runs, and returns the set.

    All ranks of the job must call it with the same set, including the ranks that are not members. It returns when all
    ranks have called it. Raises ValueError if a set with the same members is already registered.

    With members_only, only the members call it, and it returns when all members have called it. Sets with the same
    members may be registered, and each call registers another set. Raises ValueError if this rank is not a member.

    Several threads may register sets at the same time if the calls have different names. The default name depends only
    on the members with members_only, and is the same for all other calls. Raises ValueError if a call of the same name
    is in flight at this rank. Calls of the same name belong together at all ranks of the job: if ranks name different
    members, the call fails at all these ranks and says which rank named which members.

    If the call takes longer than the timeout, in seconds, the job ends. By default HVD_OPERATION_TIMEOUT_SECONDS
    applies.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _engine.engine.add_set(process_set, members_only, name or "", timeout)
    return process_set


def remove_process_set(process_set: ProcessSet, timeout: float | None = None) -> bool:
    """Removes a process set and returns whether the set was removed.

    All ranks of the job must call it, or all members if the set was registered with members_only, and it returns when
    all these ranks have called it or ``shutdown``. It returns False if the set is not registered or is the set of all ranks. Operations
    of the set that the coordinator has granted still run to their end. The other operations of the set fail. timeout
    has the same meaning as in ``add_process_set``.
    """
    return _engine.engine.remove_set(process_set, timeout)


def get_process_set_ids_and_ranks() -> "dict[int, list[int]]":
    """Returns the members of all registered process sets. The keys are the numbers of the sets."""
    return _engine.engine.set_ranks()
