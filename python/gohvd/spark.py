"""Runs a function at all ranks of a job on a Spark cluster (docs/clusters.md). Needs the extra ``gohvd[spark]``.

The ranks are the tasks of one stage in Spark's barrier execution mode. Spark starts them together, and if one fails,
starts all of them again, as a new job.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from py4j.protocol import Py4JJavaError
from pyspark import BarrierTaskContext, SparkContext

from . import __version__, _engine, _exit, _meeting, _output, basics
from .exceptions import HorovodInternalError

__all__ = ["run"]

# A rank that fails because another rank has failed keeps its error back for so long. Spark reports the first error of a
# stage, and then ends its other tasks.
_CAUSE_SECONDS = 10.0
_POLL_SECONDS = 0.5


def run(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, num_proc: int | None = None,
    start_timeout: float | None = None, env: dict[str, str] | None = None, stdout: IO[str] | None = None,
    stderr: IO[str] | None = None, verbose: int = 1, prefix_output_with_timestamp: bool = False,
) -> list[Any]:  # fmt: skip
    """Calls fn(*args, **kwargs) at each of num_proc ranks, and returns the results by rank.

    num_proc is by default Spark's default parallelism. env has variables for the ranks. The output of the ranks is
    written to the streams stdout and stderr, by default those of this process, with the rank before each line. If
    verbose is 2 or more, the ranks log at level debug.

    Raises TimeoutError if the cluster has no free slots for all ranks for start_timeout seconds, by default
    HOROVOD_SPARK_START_TIMEOUT or 600. Raises RuntimeError with the traceback of the rank that failed first if the job
    has failed as often as Spark starts a barrier stage (spark.stage.maxConsecutiveAttempts).
    """
    context = SparkContext.getOrCreate()
    ranks = context.defaultParallelism if num_proc is None else num_proc
    if ranks < 1:
        raise ValueError(f"got num_proc {num_proc}, want at least 1")
    dynamic = context.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true"
    if dynamic and not context.master.startswith("local"):  # it may have no executors before a job, and then refuses it
        raise RuntimeError("gohvd: Spark's barrier mode needs spark.dynamicAllocation.enabled=false, but it is true")
    limit = float(os.environ.get("HOROVOD_SPARK_START_TIMEOUT", 600) if start_timeout is None else start_timeout)
    _wait_for_slots(context, ranks, limit)
    variables = ({"HOROVOD_LOG_LEVEL": "debug"} if verbose >= 2 else {}) | (env or {})
    host = context.getConf().get("spark.driver.host", "localhost")
    bind = context.getConf().get("spark.driver.bindAddress", host)
    receiver = _output.Receiver(host, bind, stdout or sys.stdout, stderr or sys.stderr, prefix_output_with_timestamp)
    with receiver, _Watch(context, ranks, limit) as watch:
        task = functools.partial(_task, __version__, fn, tuple(args), dict(kwargs or {}), variables, receiver.place)
        tasks = context.parallelize(range(ranks), ranks).barrier().mapPartitions(task)
        try:
            # Spark starts a barrier stage again only if a shuffle follows it.
            results = dict(tasks.partitionBy(1).collect())
        except Py4JJavaError as e:
            if watch.late:
                raise TimeoutError(
                    f"gohvd: the {ranks} tasks of the job did not run all together for {limit:g} s: other jobs use the slots, "
                    "or executors have ended"
                ) from None
            raise RuntimeError(f"gohvd: the job on Spark has failed: {_text_of(e)}") from None
    return [results[rank] for rank in range(ranks)]


def _task(version: str, *job: Any) -> Iterator[tuple[int, Any]]:
    """Is the task of one rank. job has what another version may have in another form."""
    _meeting.check_versions(version, [__version__], [_hostname()])
    yield _rank(*job)


def _hostname() -> str:
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def _rank(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], env: dict[str, str], driver: _output.Place,
    _: Iterator[Any],
) -> tuple[int, Any]:
    """Joins the job and calls the function. Returns the rank and the result.

    The first task serves the store. Spark passes the secret to the tasks of this attempt.
    """
    context = BarrierTaskContext.get()
    mine = context.partitionId()
    with contextlib.ExitStack() as stack:
        store = None
        if mine == 0:
            address = context.getTaskInfos()[0].address  # HOST:PORT of the executor
            store = stack.enter_context(contextlib.closing(_meeting.Store(address.rpartition(":")[0] or address)))
        told = [json.loads(text) for text in context.allGather(json.dumps([_hostname(), store and store.place]))]
        hosts, place = [host for host, _ in told], told[0][1]
        order = _meeting.by_host(hosts)
        rank, hosts = order.index(mine), [hosts[i] for i in order]
        stack.callback(_restore, dict(os.environ))  # another job may use this process later
        os.environ.update(env | _meeting.environment(place, rank, hosts))
        stack.enter_context(_output.sent(driver, rank))
        try:
            result = fn(*args, **kwargs)
        except Exception as e:
            _engine.engine.fail(_exit.raised(e))
            if isinstance(e, HorovodInternalError):
                time.sleep(_CAUSE_SECONDS)
            raise RuntimeError(f"rank {rank} on {hosts[rank]} has failed: {e}") from e
        basics.shutdown()
        context.barrier()  # as long as ranks may still meet, the first task serves the store
    return rank, result


def _restore(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _wait_for_slots(context: SparkContext, ranks: int, limit: float) -> None:
    """Waits until the executors have as many slots as the job has ranks. Spark itself would wait for ten minutes."""
    scheduler = context._jsc.sc()
    profile = scheduler.resourceProfileManager().defaultResourceProfile()
    deadline = time.monotonic() + limit
    while (slots := scheduler.maxNumConcurrentTasks(profile)) < ranks:
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"gohvd: the executors have slots for {slots} tasks, the job needs {ranks}: give Spark more executors or "
                f"cores, or lower num_proc (waited {limit:g} s)"
            )
        time.sleep(min(_POLL_SECONDS, limit))


class _Watch:
    """A context in which this thread runs the barrier stage of a job. If not all tasks of the stage run for limit
    seconds, it cancels the job. After a failure, Spark waits without limit for the slots of the next attempt.
    """

    def __init__(self, context: SparkContext, ranks: int, limit: float) -> None:
        self.late = False
        self._context, self._ranks, self._limit = context, ranks, limit
        self._group = f"gohvd {uuid.uuid4()}"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gohvd.spark", daemon=True)

    def __enter__(self) -> _Watch:
        keys = "spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"  # those that setJobGroup sets
        self._before = [(key, self._context.getLocalProperty(key)) for key in keys]
        self._context.setJobGroup(self._group, f"gohvd: {self._ranks} ranks")
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        if kind is not None:
            self._context.cancelJobGroup(self._group)
        for key, value in self._before:
            self._context.setLocalProperty(key, value)

    def _run(self) -> None:
        status = self._context.statusTracker()
        deadline = time.monotonic() + self._limit
        while not self._done.wait(_POLL_SECONDS):
            jobs = map(status.getJobInfo, status.getJobIdsForGroup(self._group))
            stages = [status.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
            if any(stage and stage.numActiveTasks + stage.numCompletedTasks >= self._ranks for stage in stages):
                deadline = time.monotonic() + self._limit
            elif time.monotonic() >= deadline:
                self.late = True
                self._context.cancelJobGroup(self._group)
                return


def _text_of(e: Py4JJavaError) -> str:
    """Returns the message of an exception of Spark without the frames of the JVM."""
    lines = str(e.java_exception.getMessage()).splitlines()
    return "\n".join(line for line in lines if not line.startswith("\tat "))
