"""Horovod's functions to join and leave the job, to query the place of this process in the job, and to query what is
built in.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from . import _engine, _library
from .process_sets import ProcessSet

Average = _engine.Average
Sum = _engine.Sum
Adasum = _engine.Adasum
Min = _engine.Min
Max = _engine.Max
Product = _engine.Product

_engine_ = _engine.engine


def init(
    comm: Any = None, process_sets: str | Sequence[ProcessSet | Sequence[int]] | None = None
) -> None:
    """Joins this process to its job and waits until all ranks have joined. If this process is already in a job, init
    does nothing.

    init finds the job by its launcher (hvdrun, mpirun, srun, torchrun and others), or by the variables RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If there is none of these, or if HVD_SIZE=1, this process is the only rank
    of its job. If a launcher has started this process as one of several, but does not say enough to join their job,
    init fails.
    comm is None, a list of all ranks of the job, or an mpi4py communicator. If the library of gohvd was built with MPI
    (docs/mpi.md), the processes of the communicator are the ranks of the job, in its order. Otherwise it must have all
    ranks of the job. To use only some ranks, use process sets. process_sets are the sets to register, and all ranks must
    pass the same sets in the same order. Pass "dynamic" if sets are only added later. Raises ValueError if two of the
    sets are equal.

    In a new process of an elastic job that trains already, init does not wait. Until the function decorated with
    ``elastic.run`` is called, rank() and size() return what is to be expected, and operations raise ValueError.
    """
    mpi_comm: Any = None
    ranks: list[int] = []
    if not hasattr(comm, "Get_rank"):
        ranks = sorted(comm or ())
    elif mpi_built():
        mpi_comm = comm
    else:
        ranks = _engine.ranks_of(comm)
    sets: list[ProcessSet] = []
    settings: dict[str, str] = {}
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is {process_sets!r}, want a list, None or "dynamic"')
        settings["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    elif process_sets is not None:
        for k, given in enumerate(process_sets):
            s = given if isinstance(given, ProcessSet) else ProcessSet(given)
            if s.ranks is None:
                s.ranks = _engine.ranks_of(s.mpi_comm, mpi_comm)
            if any(s.ranks == other.ranks for other in sets):
                raise ValueError(f"process_sets entry number {k} is a duplicate: {s}")
            sets.append(s)
    joined = not _engine_.initialized()
    _engine_.init(sets, settings, mpi_comm)
    if ranks:
        size = _engine_.place().size
        if ranks != list(range(size)):
            if joined:
                _engine_.shutdown()
            raise ValueError(f"comm has ranks {ranks}, want all {size} ranks: use process_sets for a part of the job")


def shutdown() -> None:
    """Leaves the job. After this call, this rank submits no more operations.

    Other ranks can still use process sets that do not include this rank. If another rank waits, now or later, for an
    operation that this rank has not submitted, that other rank gets a ``PeerError`` that names this rank. Rank 0 serves
    the other ranks until they have left too. After shutdown, ``init`` may be called again. When the process exits,
    shutdown runs automatically. If an uncaught exception ends the process, this rank counts as failed.
    """
    _engine_.shutdown()


def is_initialized() -> bool:
    """Returns whether this process is in a job: ``init`` has succeeded, and ``shutdown`` has not been called since."""
    return _engine_.initialized()


def rank() -> int:
    """Returns this process's rank, from 0 to size()-1. Before ``init``, this and all other queries raise ValueError."""
    return _engine_.place().rank


def size() -> int:
    """Returns the number of processes in the job."""
    return _engine_.place().size


def local_rank() -> int:
    """Returns this process's rank among the processes of the job on its host."""
    return _engine_.place().local_rank


def local_size() -> int:
    """Returns the number of processes of the job on this host."""
    return _engine_.place().local_size


def cross_rank() -> int:
    """Returns the index of this host among the hosts that have a process with the same local rank as this process."""
    return _engine_.place().cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have a process with the same local rank as this process."""
    return _engine_.place().cross_size


def is_homogeneous() -> bool:
    """Returns whether every host has the same number of ranks."""
    return _engine_.place().homogeneous


# Horovod's queries for the libraries that it was built with. gohvd reports its own transport, which is always built in,
# as Gloo. Some builds contain MPI or NCCL.


def mpi_threads_supported() -> bool:
    _engine_.place()
    return False


def mpi_enabled() -> bool:
    """Returns whether the environment, or the communicator that was passed to ``init``, chooses MPI for the controller."""
    return _engine_.mpi_comm is not None or os.environ.get("HOROVOD_CONTROLLER", "").lower() == "mpi"


def mpi_built() -> bool:
    """Returns whether the library was built with MPI."""
    return _library.mpi_built()


def gloo_enabled() -> bool:
    return True


def gloo_built() -> bool:
    return True


@functools.lru_cache(maxsize=None)
def _gpu_libraries() -> dict[str, Any]:
    return _library.gpu_libraries(count_devices=False)


def nccl_built() -> int:
    """Returns the number of the version of NCCL that the library loads, such as 22809 for 2.28.9. Returns 0 if the
    library was built without NCCL, or if it cannot load NCCL.
    """
    found = _gpu_libraries()["nccl"]
    return 0 if found["error"] else found["code"]


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    """Returns whether the library was built with CUDA, and can load its runtime library."""
    found = _gpu_libraries()
    return found["built"] and not found["cuda"]["error"]


def rocm_built() -> bool:
    return False
