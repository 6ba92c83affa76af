"""The job of this process, and how its ranks meet through torch's store.

The rank that comes first makes a unique id and puts it into the store. The other ranks read it there. If all ranks are
already in a job of gohvd with the same numbers, because the program has called ``hvd.init()``, the groups use that job.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ... import _engine
from ...basics import init
from ...exceptions import HorovodInternalError
from ...process_sets import ProcessSet, add_process_set, global_process_set
from ._work import kept

_engine_ = _engine.engine


class Job:
    """The job in which this process is a rank, and the numbers that torch has given to its ranks."""

    def __init__(self, ranks: list[int] | None, ours: bool) -> None:
        self.ranks = ranks
        """The ranks in torch's default group that are the ranks of the job. It is None if they have the same numbers in
        both.
        """
        self.ours = ours
        """Whether a group has begun the job. If not, the program has."""
        self.by_url = False
        """Whether torch's default group was made with gohvd://."""
        # It holds the groups until they leave. Torch does not hold a backend that it calls through its debug wrapper.
        self.groups: set[Any] = set()

    def process_set(self, ranks: list[int] | None, name: str, timeout: timedelta) -> tuple[ProcessSet, list[int]]:
        """Returns a new process set for the group with the given name, and the ranks of its members in the job, in the
        order of the group. ranks has its ranks in the default group, or is None for the default group. The members of
        the group, and only they, must call it. If it takes longer than the timeout, the job ends.
        """
        if ranks is None or ranks == self.ranks:
            return global_process_set, list(range(_engine_.place().size))
        known = list(range(_engine_.place().size)) if self.ranks is None else self.ranks
        outside = [r for r in ranks if r not in known]
        if outside:
            raise ValueError(
                f"new group: ranks {outside} are not in the job, which has ranks {known}: the first group of the backend "
                "gohvd must have the ranks of all others"
            )
        members = [known.index(r) for r in ranks]
        # torch may give one name to groups that have no rank in common. The name of a set belongs to the whole job.
        label = f"torch.{name} from rank {min(members)}"
        return add_process_set(members, members_only=True, name=label, timeout=timeout.total_seconds() or None), members


class _NoStore(dist.Store):
    """The store of the groups that are made with gohvd://, whose ranks meet without one. Everything that needs a store
    fails.
    """

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(
            "torch.distributed: groups of the init method gohvd:// have no store, which other backends, monitored_barrier "
            "and TORCH_DIST_INIT_BARRIER need: use another init method, or barrier, whose error names the missing ranks too"
        )

    set = get = add = check = wait = compare_set = delete_key = num_keys = _refuse


_NO_STORE = _NoStore()

_job: Job | None = None

# The settings of the time limit of Init allow only these seconds.
_LIMITS = 0.001, 1e6

# How long a member of a group that is reconfigured serves the others, which may have operations in flight.
_LEAVE_SECONDS = 5

# How long the first rank of a group may take to make a unique id. Only if it dies or hangs, this time passes.
_LONGEST_START = timedelta(minutes=1)


def _after_fork_in_child() -> None:
    # A thread of the parent may have held the lock of a group.
    if _job is not None:
        for group in _job.groups:
            group.invalidate(f"belongs to process {os.getppid()}, from which this process was forked")


os.register_at_fork(after_in_child=_after_fork_in_child)


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Is torch's init method ``gohvd://``: the ranks of the job of ``hvd.init()`` have the same numbers in the group. They
    need no store to meet.
    """
    init()
    place = _engine_.place()
    if (rank, world_size) not in ((-1, -1), (place.rank, place.size)):
        raise ValueError(f"{url}: got rank {rank} of {world_size}, want rank {place.rank} of {place.size}, as in hvd.init()")
    yield _NO_STORE, place.rank, place.size


def has_store(store: Any) -> bool:
    """Returns whether the ranks can use the store of a group, which those of the init method gohvd:// cannot."""
    return getattr(store, "_underlying_non_prefix_store", store) is not _NO_STORE


def enter(
    store: Any, rank: int, size: int, ranks: list[int] | None, timeout: timedelta, limited: bool = False
) -> Job:
    """Returns the job of this process. If there is none, joins the ranks of a new group to a job. ranks has the ranks of
    the new group in the default group, or is None for a new default group. limited says that the timeout limits how long
    they wait for each other.
    """
    global _job
    if ranks is None and _job is not None:
        leave_all()  # torch versions before 2.3 do not tell a group that it is destroyed
    if _job is None or not _engine_.initialized():
        by_url = not has_store(store)
        ours = not by_url and _meet(store, rank, size, ranks, timeout, limited)
        _job = Job(ranks, ours)
        _job.by_url = by_url
    return _job


def join(unique_id: str, rank: int, size: int, timeout: timedelta) -> Job:
    """Joins this process to a new job, whose ranks meet by a unique id."""
    global _job
    _engine_.init([], {**_by_id(unique_id, rank, size), **_limit(timeout)})
    _job = Job(None, True)
    return _job


def leave_for(group: Any) -> None:
    """Leaves the job that a group has begun, so that the group can begin another one. A member that hangs does not keep
    this process in the job.
    """
    if _job is not None and group in _job.groups and _job.ours:
        return leave_all(_LEAVE_SECONDS)
    if _engine_.initialized():
        raise ValueError(
            "reconfigure: this process is already in a job of gohvd, "
            + ("of another process group" if _job is not None and _job.ours else "because it has called hvd.init()")
            + ", and it can be in one job at a time"
        )


def leave(group: Any, its_set: ProcessSet) -> None:
    """Removes a group and its process set from the job. It does not wait for the other members of the group. The last
    group leaves the job, unless the program has begun the job.
    """
    job = _job
    if job is not None and group in job.groups:
        job.groups.discard(group)
        try:
            _engine_.remove_set(its_set, wait=False)
        except HorovodInternalError:
            pass  # the job is over, and so are its process sets
        if not job.groups:
            leave_all()


def end_generation() -> None:
    """Destroys the process groups of a generation that is over (docs/elastic.md), so that the training makes new ones."""
    if _job is not None and dist.is_initialized() and (_job.by_url or dist.group.WORLD in _job.groups):
        dist.destroy_process_group()


def leave_all(limit: float = math.inf) -> None:
    global _job
    job, _job = _job, None
    if job is not None:
        for group in list(job.groups):
            group.invalidate()
        kept.clear()
        if job.ours:
            _engine_.shutdown(limit)


def _meet(store: Any, rank: int, size: int, ranks: list[int] | None, timeout: timedelta, limited: bool) -> bool:
    """Joins this process to the job of a group. Returns whether the job is new. All ranks of the group must call it. ranks
    and limited are those of enter.

    The rank that calls it first says how the ranks meet. So no rank waits here for one that never comes: ranks that are
    missing are missing in Init, which names them.
    """
    # A store may outlive a group, so the ranks count their meetings at this store.
    key = f"gohvd/meeting {store.add(f'gohvd/meetings of {rank}', 1)}"
    running = _engine_.place() if _engine_.initialized() else None
    same = running is not None and (running.rank, running.size) == (rank, size)
    mine = f"this process is rank {rank} of {size} of the new group"
    if running is not None:
        mine += f", and it is already rank {running.rank} of {running.size} of a job, because it has called hvd.init()"
    first = int(store.compare_set(f"{key}/first", "", str(rank)))
    if rank == first:
        try:
            if running is not None and not same:
                raise ValueError(f"{mine}: call hvd.shutdown() first, or use the same ranks in both")
            word = "running" if same else "id " + _engine_.new_unique_id()
        except Exception as e:
            store.set(key, f"error {e}")
            raise
        store.set(key, word)
    else:
        try:
            store.wait([key], min(timeout, _LONGEST_START))
        except RuntimeError as e:
            raise RuntimeError(f"{mine}, and rank {first} has begun to make it and not gone on: {e}") from e
        word = store.get(key).decode()
    kind, _, rest = word.partition(" ")
    if kind == "error":
        raise RuntimeError(f"rank {first} of the new group could not begin a job: {rest}")
    if kind == "running":
        if not same:
            raise ValueError(
                f"{mine}, but rank {first} of the group is already in a job of {size} ranks: all ranks must call hvd.init(), or none"
            )
        return False
    if running is not None:
        raise ValueError(f"{mine}, but rank {first} of the group has not: all ranks must call hvd.init(), or none")
    settings = {**_by_id(rest, rank, size), **(_limit(timeout) if limited else {})}
    if ranks is not None:
        # torch numbers the processes as hvdrun does. A group of all of them is the job that hvdrun knows.
        world = dist.get_world_size()
        if ranks != list(range(world)) and os.environ.get("HOROVOD_SIZE") == str(world):
            settings["HVD_LAUNCHER_RANKS"] = ",".join(map(str, ranks))
    _engine_.init([], settings)
    return True


def _limit(timeout: timedelta) -> dict[str, str]:
    """Returns the setting that limits how long the ranks of a job wait for each other in Init. It must be equal at all of
    them.
    """
    return {"HOROVOD_GLOO_TIMEOUT_SECONDS": f"{min(max(timeout.total_seconds(), _LIMITS[0]), _LIMITS[1]):g}"}


def _by_id(unique_id: str, rank: int, size: int) -> dict[str, str]:
    return {"HVD_UNIQUE_ID": unique_id, "HVD_INIT_METHOD": "", "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)}
