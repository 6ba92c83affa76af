"""Runs jobs on a Ray cluster (docs/clusters.md): ``RayExecutor`` for functions that call ``hvd.init()``,
``ElasticRayExecutor`` for functions that train in ``hvd.elastic.run``, and ``TorchConfig`` for Ray Train. Needs the extra
``gohvd[ray]``.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import (
    get_current_placement_group, placement_group, placement_group_table, remove_placement_group,
)  # fmt: skip
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .. import __version__, _engine, _exit, _meeting
from ..exceptions import HorovodInternalError, PeerError
from .elastic import ElasticRayExecutor, RayHostDiscovery, joined

__all__ = ["ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "TorchConfig"]

# If ranks fail because another rank has failed, the error of that rank is waited for.
_CAUSE_SECONDS = 10.0
# How long the workers may take to leave their job when the executor shuts down.
_LEAVE_SECONDS = 10.0


def __getattr__(name: str) -> Any:
    if name == "TorchConfig":  # it needs torch, RayExecutor does not
        from .train import TorchConfig

        return TorchConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _addresses(nodes: list[str]) -> list[str]:
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [address[node] for node in nodes]


@dataclasses.dataclass
class Settings:
    """The settings of an executor (``RayExecutor.create_settings``)."""

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: str = ""


class _Worker:
    """The Ray actor that is one rank. Its methods run one after the other in the main thread of its process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executable: Any = None

    def __repr__(self) -> str:
        return self._name  # Ray prints it before the output of the process and in its errors

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def version(self) -> str:
        return __version__

    def gpus(self) -> list[str]:
        # CUDA_VISIBLE_DEVICES is no source: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES tells Ray not to set it.
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def set_environment(self, env: dict[str, str]) -> None:
        os.environ.update(env)

    def start_executable(self, cls: type, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._executable = cls(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> tuple[None, Any]:
        return self.run(fn, (self._executable,), {})

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[None, Any]:
        """Calls fn. The first result only says that the call has ended, also if the second one is large."""
        try:
            return None, fn(*args, **kwargs)
        except Exception as e:
            # The process goes on, so without this the other ranks would wait for this rank.
            _engine.engine.fail(_exit.raised(e))
            raise

    def leave(self) -> None:
        _engine.engine.shutdown()


class RayExecutor:
    """Runs functions at all ranks of a job whose ranks are actors on a Ray cluster.

    Give either num_workers, and Ray places them on as few nodes as possible, or num_hosts, and each of so many nodes
    gets num_workers_per_host. With use_gpu each worker has gpus_per_worker GPUs, by default one, and
    ``torch.cuda.set_device(hvd.local_rank())`` selects its first if there is one for each.

    In a task or an actor with a placement group, such as a trial of Ray Tune, num_workers workers are placed in this
    group, unless use_current_placement_group is False.
    """

    @staticmethod
    def create_settings(
        timeout_s: float = 30, ssh_identity_file: str | None = None, ssh_str: str | None = None,
        placement_group_timeout_s: float = 100, nics: str | Iterable[str] | None = None,
    ) -> Settings:  # fmt: skip
        """Returns settings. All ranks must have joined timeout_s seconds after the first ``hvd.init()``, or it raises an
        InitError. timeout_s is HOROVOD_GLOO_TIMEOUT_SECONDS of the workers, also if their node has another value. The
        cluster must have found places for the workers within placement_group_timeout_s, or ``start`` raises a
        TimeoutError. nics are network interfaces, as for HOROVOD_GLOO_IFACE. Nothing uses ssh.
        """
        return Settings(timeout_s, placement_group_timeout_s, joined(nics))

    def __init__(
        self, settings: Settings | None = None, num_workers: int | None = None, num_hosts: int | None = None,
        num_workers_per_host: int = 1, cpus_per_worker: int = 1, use_gpu: bool = False, gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True, min_workers: int | None = None,
    ) -> None:  # fmt: skip
        if min_workers is not None:
            raise ValueError(f"got min_workers {min_workers}: for an elastic job, use gohvd.ray.ElasticRayExecutor")
        if (num_workers is None) == (num_hosts is None):
            raise ValueError(f"got num_workers {num_workers} and num_hosts {num_hosts}, want one of them")
        if gpus_per_worker and not use_gpu:
            raise ValueError(f"got gpus_per_worker {gpus_per_worker}, but use_gpu is False")
        self._settings = settings or Settings()
        self._per_bundle = 1 if num_hosts is None else num_workers_per_host
        self.num_workers: int = num_workers if num_hosts is None else num_hosts * num_workers_per_host  # type: ignore[assignment]
        if self.num_workers < 1 or self._per_bundle < 1:
            raise ValueError(f"got {self.num_workers} workers, want at least 1")
        self._strategy = "PACK" if num_hosts is None else "STRICT_SPREAD"
        self._resources = {"CPU": cpus_per_worker, "GPU": (gpus_per_worker or 1) if use_gpu else 0}
        self._use_current = use_current_placement_group and num_hosts is None
        self._group: Any = None
        self._store: _meeting.Store | None = None
        self._workers: list[Any] = []
        self._hosts: list[str] = []
        # References that say how calls have ended, without those that are known to have succeeded.
        self._ends: list[Any] = []

    def start(
        self, executable_cls: type | None = None, executable_args: Sequence[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None, extra_env_vars: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Starts the workers. Each gets the variables in extra_env_vars, and makes an object of executable_cls for
        ``execute``. Raises TimeoutError if the workers have no places, or have not started, within
        placement_group_timeout_s.
        """
        if self._workers:
            raise RuntimeError("gohvd: the executor is already started: call shutdown() first")
        try:
            self._place()
            self._join(extra_env_vars or {})
            if executable_cls is not None:
                args, kwargs = executable_args or (), executable_kwargs or {}
                self._collect([w.start_executable.remote(executable_cls, args, kwargs) for w in self._workers])
        except BaseException:
            self.shutdown()
            raise

    def _place(self) -> None:
        if ray.util.client.ray.is_connected():
            raise RuntimeError(
                "gohvd: the workers cannot reach a driver that uses Ray Client: submit the program with ray job submit, or "
                "make the executor in a remote function with num_cpus=0"
            )
        current = get_current_placement_group() if self._use_current else None
        if current is not None:
            self._place_in(current)
            return
        bundle = {kind: n * self._per_bundle for kind, n in self._resources.items() if n}
        bundles = [bundle] * (self.num_workers // self._per_bundle)
        self._group = placement_group(bundles, strategy=self._strategy)
        limit = self._settings.placement_group_timeout_s
        if not self._group.wait(limit):
            raise TimeoutError(
                f"gohvd: Ray found no places for {self.num_workers} workers within {limit} s: they need {len(bundles)} times "
                f"{bundle} ({self._strategy}), the cluster has {ray.cluster_resources()} and of these available "
                f"{ray.available_resources()}"
            )
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        order = _meeting.by_host([nodes[i] for i in range(len(bundles))])
        places = [i for i in order for _ in range(self._per_bundle)]
        self._hosts = _addresses([nodes[i] for i in places])
        self._workers = [
            self._worker(f"rank {rank} of {self.num_workers}", self._group, i) for rank, i in enumerate(places)
        ]

    def _place_in(self, group: Any) -> None:
        """Places the workers in a group of which other actors may have parts, so Ray chooses the bundles."""
        n = self.num_workers
        self._workers = [self._worker(f"worker {i} of {n}", group, -1) for i in range(n)]  # not the rank
        nodes = [w.node.remote() for w in self._workers]
        limit = self._settings.placement_group_timeout_s
        done, late = ray.wait(nodes, num_returns=len(nodes), timeout=limit)
        if late:
            raise TimeoutError(
                f"gohvd: the current placement group had places for {len(done)} workers within {limit} s, want "
                f"{len(nodes)}, each with {self._resources}: its bundles are {group.bundle_specs}. To place them outside it, "
                "set use_current_placement_group=False"
            )
        found = ray.get(nodes)
        order = _meeting.by_host(found)
        self._workers = [self._workers[i] for i in order]
        self._hosts = _addresses([found[i] for i in order])

    def _worker(self, name: str, group: Any, bundle: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, bundle)
        cpus, gpus = self._resources["CPU"], self._resources["GPU"]
        return ray.remote(_Worker).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy).remote(name)

    def _join(self, extra: dict[str, str]) -> None:
        """Tells the workers of which job they are. The secret is an argument of a method, which Ray does not show. The
        arguments of the actors and their environment are in Ray's tables.
        """
        versions = [w.version.remote() for w in self._workers]
        limit = self._settings.placement_group_timeout_s
        _, late = ray.wait(versions, num_returns=len(versions), timeout=limit)
        if late:
            ranks = [rank for rank, ref in enumerate(versions) if ref in late]
            raise TimeoutError(f"gohvd: the workers of ranks {ranks} have not started within {limit} s: see Ray's logs")
        _meeting.check_versions(__version__, self._collect(versions), self._hosts)
        gpus = self._collect([w.gpus.remote() for w in self._workers])
        self._store = _meeting.Store(ray.util.get_node_ip_address())
        calls = []
        for rank, (worker, host) in enumerate(zip(self._workers, self._hosts)):
            env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(self._settings.timeout_s)}
            if self._settings.nics:
                env["HOROVOD_GLOO_IFACE"] = self._settings.nics
            if gpus[rank]:  # NCCL connects GPUs of a host that all its processes see
                here = (gpu for g, h in zip(gpus, self._hosts) if h == host for gpu in g)
                env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(here))
            env |= extra | _meeting.environment(self._store.place, rank, self._hosts)
            calls.append(worker.set_environment.remote(env))
        self._collect(calls)

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Calls fn(*args, **kwargs) at each rank, and returns the results by rank.

        If ranks fail, raises the exception of the rank that failed first, with the worker's traceback. Raises PeerError,
        which names the rank, if its process has ended. Raises TimeoutError, and calls nothing, if an earlier call has
        failed and ranks have not ended it timeout_s and 10 s later.
        """
        return self._collect(self.run_remote(fn, args, kwargs))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Calls fn(*args, **kwargs) at each rank, and returns the object references of the results by rank. Raises
        TimeoutError as ``run`` does.
        """
        return self._call(self._started(), "run", fn, args or (), kwargs or {})

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Calls fn with the worker's object of executable_cls at each rank, and returns the results by rank. It raises
        the exceptions of ``run``.
        """
        return self._collect(self._call(self._started(), "execute", fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls fn with the worker's object of executable_cls at rank 0, and returns the result. It raises the exceptions
        of ``run``.
        """
        return self._collect(self._call(self._started()[:1], "execute", fn))[0]

    def shutdown(self) -> None:
        """Ends the workers, and frees their places. The executor may be started again."""
        if self._workers and self._store is not None:
            self._leave(_LEAVE_SECONDS)
            self._has_failed()
        for w in self._workers:
            ray.kill(w)
        if self._group is not None:
            remove_placement_group(self._group)
        if self._store is not None:
            self._store.close()
        self._workers, self._group, self._store, self._ends = [], None, None, []

    def _started(self) -> list[Any]:
        if not self._workers:
            raise RuntimeError("gohvd: the executor is not started: call start() first")
        return self._workers

    def _call(self, workers: list[Any], method: str, *args: Any) -> list[Any]:
        """Calls a method of workers, and returns the references of the results."""
        self._leave_failed_job()
        pairs = [getattr(w, method).options(num_returns=2).remote(*args) for w in workers]
        self._ends += [end for end, _ in pairs]
        return [result for _, result in pairs]

    def _leave_failed_job(self) -> None:
        """If an earlier call has failed, waits until all workers have ended it, and lets them leave the job. Otherwise the
        next call could begin at some ranks while others are still in the failed one, and in its job.
        """
        if self._has_failed():
            limit = self._settings.timeout_s + _CAUSE_SECONDS
            ranks = self._leave(limit)  # after the calls that a worker has got before
            if ranks:
                raise TimeoutError(
                    f"gohvd: a call has failed, but ranks {ranks} have not ended it after another {limit:g} s: try again "
                    "later, or call shutdown() and start()"
                )
            self._ends = []

    def _leave(self, limit: float) -> list[int]:
        """Lets all workers leave their job, and prints their errors. Returns the ranks that have not left in time."""
        return await_left([w.leave.remote() for w in self._workers], limit)

    def _has_failed(self) -> bool:
        """Returns whether a call has failed since the workers have started or have left a failed job."""
        ended, running = ray.wait(self._ends, num_returns=len(self._ends), timeout=0, fetch_local=False)
        failed = [end for end in ended if _failed(end)]  # Ray prints errors that nobody has got
        self._ends = running + failed
        return bool(failed)

    def _collect(self, refs: list[Any]) -> list[Any]:
        """Returns the values of references, one of each rank. Raises the error of the rank that failed first."""
        pending = dict(zip(refs, range(len(refs))))
        failure: BaseException | None = None
        deadline = None
        while pending:
            limit = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(pending), timeout=limit)
            if not done:
                break
            rank = pending.pop(done[0])
            try:
                ray.get(done[0])
            except ray.exceptions.RayActorError as e:
                raise PeerError(f"gohvd: rank {rank} on {self._hosts[rank]} has failed: {e}", [rank]) from e
            except HorovodInternalError as e:
                if failure is None:
                    failure, deadline = e, time.monotonic() + _CAUSE_SECONDS
        if failure is not None:
            raise failure
        return ray.get(refs)


def await_left(refs: list[Any], limit: float) -> list[int]:
    """Waits until workers have left their job, and prints their errors. The references are those of the calls, by rank.
    Returns the ranks that have not left in time.
    """
    _, late = ray.wait(refs, num_returns=len(refs), timeout=limit)
    for rank, ref in enumerate(refs):
        if ref in late:
            continue
        try:
            ray.get(ref)
        except ray.exceptions.RayActorError:
            pass  # a call of a function raises it
        except Exception as e:
            print(f"gohvd: rank {rank} has left its job with an error: {e}", file=sys.stderr)
    return [rank for rank, ref in enumerate(refs) if ref in late]


def _failed(ref: Any) -> bool:
    try:
        ray.get(ref)
    except Exception:
        return True
    return False
