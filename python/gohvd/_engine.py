"""The engine of one rank: its sidecar, its process sets, and what the interfaces for numpy and torch have in common.

An operation runs on memory in an arena. If the data of the program is elsewhere, it is copied into a *staging* block in
an arena, and the result is copied back. A ``Plan`` is an encoded operation with its staging blocks. A plan that has run
is kept for the next operation with the same name, type, shape and memory. That operation allocates nothing and is
submitted by its slot number in the ring.

A tensor on a CUDA device needs neither if the sidecar can open its memory: see ``_cuda`` and ``OnDevice``.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import math
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Dict, Generic, List, Optional, Sequence, Set, Tuple, TypeVar

from . import _exit, _wire as wire
from ._arena import Block, Extent
from ._client import Client, Operation, Pending
from ._cuda import Event, Unshareable
from ._timeline_signal import TimelineSignal
from .exceptions import HorovodInternalError, InitError, NotInitializedError, SidecarError

if TYPE_CHECKING:
    from .process_sets import ProcessSet

A = TypeVar("A")
Shape = Tuple[int, ...]
Code = Tuple[int, int]
"""An element type: its number in the protocol, and its size in bytes."""

# The reductions. All except AverageActive have the same names and numbers as in Horovod.
Average, Sum, Adasum, Min, Max, Product, AverageActive = range(7)
_ON_WIRE = {Average: 1, Sum: 2, Min: 3, Max: 4, Product: 5, Adasum: 6, AverageActive: 7}

# Limits for the plans that are kept to be used again: the number of plans, and the bytes of their staging blocks.
_MAX_PLANS = 32768
_MAX_IDLE_BYTES = 512 << 20

_KEPT_FROM_ENVIRONMENT = ("HOROVOD_", "HVD_")
_NOT_SETTINGS = ("HVD_SIDECAR", "HVD_SIDECAR_BINARY", "HVD_SECRET", "HVD_SECRET_FILE", "HVD_RUN")

# The name that a blocking operation gets if the program gives it none. The sidecar names all other unnamed operations
# noname.1, noname.2 and so on.
_SYNC_NAME = "noname.0"

# As this many bytes counts an event of a plan, so that at most 2048 events are kept for idle plans.
_EVENT_BYTES = _MAX_IDLE_BYTES // 2048

# Operations whose result, if there is one, has the shape of the tensor.
_OUTPUT_LIKE_INPUT = (wire.ALLREDUCE, wire.BROADCAST, wire.REDUCE, wire.SEND, wire.RECV)


class Framework(Generic[A]):
    """The functions of a framework, numpy or torch, that the engine needs to handle arrays."""

    def address(self, x: A) -> int:
        """Returns the address of x's elements, or 0 if operations cannot work on them in place."""
        raise NotImplementedError

    def wrap(self, view: memoryview, dtype: Any, shape: Shape) -> A:
        """Returns an array whose elements are the memory of view."""
        raise NotImplementedError

    def copy(self, target: A, source: A) -> None:
        raise NotImplementedError

    def clone(self, x: A, like: A) -> A:
        """Returns a new array with the elements of x, on the same device as like."""
        raise NotImplementedError

    def fresh(self, data: memoryview, shape: Shape, like: A) -> A:
        """Returns a new array with a copy of data. The array has the given shape, and the element type and device of
        like.

        Raises ValueError if data does not have the right size for the shape.
        """
        raise NotImplementedError

    def device(self, x: A) -> int:
        """Returns the number of the CUDA device that has x, or -1 if x is elsewhere. A framework without such arrays
        does not implement the following methods.
        """
        return -1

    def pointer(self, x: A) -> int:
        """Returns the address of x's elements on its device, or 0 if operations cannot work on them in place."""
        raise NotImplementedError

    def empty(self, shape: Shape, like: A) -> A:
        """Returns a new contiguous array with the element type and the device of like, and undefined elements."""
        raise NotImplementedError

    def stream(self, device: int) -> Any:
        """Returns the current stream of a device."""
        raise NotImplementedError

    def handle(self, stream: Any) -> int:
        """Returns the cudaStream_t of a stream."""
        raise NotImplementedError

    def using(self, stream: Any) -> ContextManager[Any]:
        """Returns a context in which stream is the current stream of its device."""
        raise NotImplementedError

    def follow(self, stream: Any) -> None:
        """Makes the current stream of the device wait for the work that is on stream now."""
        raise NotImplementedError


class Plan(Generic[A]):
    """An encoded operation with its staging blocks. It can run any number of times, but only once at a time. When a
    plan is garbage-collected, it gives back its slot and its memory.
    """

    __slots__ = ("key", "operation", "client", "extents", "nbytes", "inputs", "outputs", "event", "job")

    def __init__(self, key: tuple, client: Client, job: int) -> None:
        self.key = key
        self.job = job
        """The number of the job, counted in this process. A plan is not reused in a later job, because a process set
        with the same number may have other ranks there.
        """
        self.client = client
        self.extents: List[Extent] = []
        self.nbytes = 0
        self.operation: Optional[Operation] = None
        self.inputs: List[Optional[A]] = []
        """The staging array of each tensor, or None for a tensor that is in an arena itself."""
        self.outputs: List[Optional[A]] = []
        """The staging array of each result. It is None if the result overwrites the tensor, or if its size is not known
        before the operation runs.
        """
        self.event: Optional[Event] = None
        """The event that orders an operation on a CUDA device after and before the work of the program."""

    def __del__(self) -> None:
        # If an exception of a signal handler has ended __init__ early, the attribute does not exist.
        operation = getattr(self, "operation", None)
        if operation is not None:
            self.client.forget(operation)
        for extent in getattr(self, "extents", ()):
            self.client.arena.give(extent)
        event = getattr(self, "event", None)
        if event is not None:
            self.client.exports.give_event(event)


class OnDevice(Generic[A]):
    """The memory of an operation that the sidecar runs on a CUDA device, and the stream of the program there."""

    __slots__ = ("device", "stream", "inputs", "outputs", "shapes", "where", "where_out")

    def __init__(self, device: int, stream: Any) -> None:
        self.device = device
        self.stream = stream
        """The stream that was the current stream of the device when the operation was begun."""
        self.inputs: List[A] = []
        """The arrays of the operation, or contiguous copies of them."""
        self.outputs: List[A] = []
        """The arrays to which the sidecar writes."""
        self.shapes: Optional[Tuple[Shape, ...]] = None
        """The shapes of the outputs, or None if the operation is in place."""
        self.where: Tuple[Optional[Tuple[int, int]], ...] = ()
        self.where_out: Tuple[Optional[Tuple[int, int]], ...] = ()
        """The arenas of the inputs and of the outputs, and the offsets there."""


class Call(Generic[A]):
    """An operation in flight. Until the operation is done, the sidecar may use the memory of the plan and of the
    arrays.
    """

    __slots__ = (
        "engine", "framework", "plan", "arrays", "targets", "on", "pending", "received", "source", "_results"
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        framework: Framework[A],
        plan: Plan[A],
        arrays: Sequence[A],
        targets: Optional[Sequence[A]],
        on: Optional[OnDevice[A]],
    ) -> None:
        self.engine = engine
        self.framework = framework
        self.plan: Optional[Plan[A]] = plan
        self.arrays = arrays
        self.targets = targets
        self.on = on
        """The memory of an operation on a CUDA device. It is None if the operation is in memory of the host."""
        self.pending: Optional[Pending] = None
        self.received: List[int] = []
        """The number of rows that were received from each member. It is set when an alltoall is done."""
        self.source = wire.ANY_SOURCE
        """The sender of a message. It is known from the beginning unless the message may come from any rank."""
        self._results: Optional[List[A]] = None

    def done(self) -> bool:
        """Returns whether the operation is done. If it is done without an error, the results have been written to the
        targets.
        """
        pending = self.pending
        if pending is None:
            return True
        plan = self.plan
        if plan is not None and not plan.client.poll(pending):
            return False
        self.release_name()
        if pending.error is None:
            self.results()
        return True

    def release_name(self) -> None:
        """Makes the name free as soon as the operation is done, even if the program does not wait for the operation."""
        if self.pending is not None:
            self.pending.held = False

    def known(self) -> bool:
        """Returns whether the operation is done, according to the completions that have been read. It does not read any
        further completions.
        """
        return self.pending is None or self.pending.done

    def settle(self, others: Sequence[Call[A]]) -> None:
        """Waits until the operation is done, with or without an error. The argument others has the operations for which
        the caller waits next.
        """
        pending, plan = self.pending, self.plan
        if pending is None or plan is None:
            return
        try:
            plan.client.wait(pending, [call.pending for call in others if call.pending is not None])
        except Exception:
            if not pending.done or pending.error is None:
                raise  # a signal handler has raised the exception, not the operation

    def results(self) -> List[A]:
        """Waits for the operation and returns its results, which are the targets or new arrays. If the operation
        failed, raises its error.
        """
        pending, plan = self.pending, self.plan
        if self._results is None and plan is not None and pending is not None:
            plan.client.wait(pending)
            self._finish(plan, pending)
        if self._results is None:
            if pending is not None and pending.error is not None:
                raise pending.error()
            raise HorovodInternalError(
                "the results of this operation were lost, because a call that fetched them was interrupted"
            )
        if self.on is not None:
            self.framework.follow(self.on.stream)
        return self._results

    def _finish(self, plan: Plan[A], pending: Pending) -> None:
        fw, targets = self.framework, self.targets
        reply, completion = pending.reply, None
        if reply is not None and reply.completion is not None:
            self.source = reply.completion.source
            if plan.key[0] not in _OUTPUT_LIKE_INPUT:
                completion = reply.completion
                self.received = completion.received_splits
        out: List[A] = [] if self.on is None else self._results_on(plan, self.on)
        for i, x in enumerate(self.arrays if self.on is None else ()):
            local = plan.outputs[i]
            if local is not None:
                if targets is None:
                    out.append(fw.clone(local, x))
                else:
                    fw.copy(targets[i], local)
                    out.append(targets[i])
            elif targets is not None:
                out.append(targets[i])  # the sidecar has written the result to the target
            elif plan.key[0] in _OUTPUT_LIKE_INPUT:
                out.append(x)
            else:
                if completion is None or i >= len(completion.results):
                    raise HorovodInternalError(
                        f"{wire.KIND_NAMES[plan.key[0]]}: the sidecar's answer has no result for tensor {i}"
                    )
                place, shape = completion.results[i]
                out.append(fw.fresh(plan.client.result(place), shape, x))
        self._results = out
        self.plan = None
        self.arrays = ()
        if self.on is not None:
            self.on.inputs, self.on.outputs = [], []
        while completion is not None and completion.results:
            plan.client.free_result(completion.results.pop()[0])
        self.engine.keep(plan)

    def _results_on(self, plan: Plan[A], on: OnDevice[A]) -> List[A]:
        """Returns the results on a CUDA device, which are complete on the stream of on."""
        fw, targets = self.framework, self.targets
        assert plan.event is not None
        # The arrays are kept alive until here. So if their memory is used again, it is after the operation: the sidecar
        # has answered when the device had done it, and the streams that continue from here follow the event.
        plan.event.make_wait(fw.handle(on.stream))
        out = []
        for i, made in enumerate(on.outputs):
            if targets is not None and targets[i] is not made:
                with fw.using(on.stream):
                    fw.copy(targets[i], made)
                made = targets[i]
            out.append(made)
        return out

    def __del__(self) -> None:
        plan, pending = getattr(self, "plan", None), getattr(self, "pending", None)
        if plan is not None and pending is not None and pending.reply is not None:
            completion = pending.reply.completion
            while completion is not None and completion.results:
                plan.client.discard_result(completion.results.pop()[0])


class _Caller(threading.local):
    waits = False


_caller = _Caller()


def begin_and_wait(begin: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Calls begin, which starts an asynchronous operation, and returns the handle. The caller must wait for the handle
    next.

    begin sends no doorbell, because the wait will notify the sidecar. A wait tells the sidecar that the program is
    idle, so that the sidecar serves this rank immediately. After a doorbell without a wait, the sidecar would leave the
    processor to the program.
    """
    _caller.waits = True
    try:
        return begin(*args, **kw)
    finally:
        _caller.waits = False


class Engine:
    """This process as a rank of a job. There is only one instance, the variable ``engine``."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held while the process joins or leaves the job
        self._main_thread = threading.main_thread().ident
        self._client: Optional[Client] = None
        self._environment: Dict[str, str] = {}
        self._place: Optional[wire.Ready] = None
        self._sets: Dict[int, ProcessSet] = {}
        self._registered: List[ProcessSet] = []  # several objects may stand for one process set of the job
        self._plans: "collections.OrderedDict[tuple, List[Plan]]" = collections.OrderedDict()
        self._plans_lock = threading.Lock()
        self._idle = self._idle_bytes = 0
        self._warned: Set[str] = set()  # the kinds of the Unshareable errors that were shown
        self._simple: Dict[Tuple[int, int], Operation] = {}
        self._job = 0
        self._exit_registered = False
        self._except_hook = _exit.ExceptHook()
        self._timeline_signal = TimelineSignal(self._forward_signal)
        self.at_shutdown: List[Callable[[], None]] = []
        """Functions that are called when this process leaves the job."""
        # The object that users know as global_process_set. The module process_sets assigns it.
        self.global_set: Any = None

    # Joining and leaving the job.

    def client(self) -> Client:
        """Returns the connection to the sidecar. Starts the sidecar if necessary."""
        with self._lock:
            if self._client is None or self._client.over and self._place is None:
                if self._client is not None:
                    self._client.close()
                    self._clear_plans()
                self._client = Client()
                self._environment = _settings()
                if not self._exit_registered:
                    atexit.register(self.close)
                    self._exit_registered = True
                    self._except_hook.install()
            return self._client

    def init(self, process_sets: Sequence[ProcessSet], settings: Dict[str, str]) -> None:
        """Joins the job. If this process is already in a job, process_sets must be registered in that job, and settings
        has no effect.
        """
        with self._lock:
            if self._place is None:
                client = self.client()
                changed = self._changed_settings()
                changed.update(settings)
                ranks = [s.ranks or [] for s in process_sets]
                client.job_over = None
                try:
                    reply = client.call(lambda i: wire.init(i, changed, ranks))
                except SidecarError:
                    raise
                except HorovodInternalError as e:
                    raise InitError(str(e)) from None  # the other error has the same text
                if reply.ready is None:
                    raise HorovodInternalError("init: the sidecar's answer does not say which rank this is")
                self._place = reply.ready
                self._sets = {0: self.global_set}
                self.global_set.ranks = list(range(reply.ready.size))
                if client.pid:  # only a sidecar that this process started needs the signals
                    self._timeline_signal.listen()
            elif any([not self._registered_in_job(s) for s in process_sets]):
                # Another client of the sidecar may have added these process sets.
                self._refresh()
            for k, s in enumerate(process_sets):
                if s.ranks == self.global_set.ranks:
                    raise ValueError(f"process_sets entry number {k} is a duplicate: {s} has all ranks of the job")
                s.process_set_id = self._id_of(s)

    def _changed_settings(self) -> Dict[str, str]:
        """Returns the settings that have changed in the environment since the sidecar was started."""
        now = _settings()
        changed = {k: v for k, v in now.items() if self._environment.get(k) != v}
        changed.update({k: "" for k in self._environment if k not in now})
        return changed

    def new_unique_id(self) -> str:
        """Makes a unique id, with which all ranks can join one job. The sidecar of this process serves the job's store.
        """
        client = self.client()
        return client.call(lambda i: wire.new_unique_id(i, self._changed_settings())).unique_id

    def _registered_in_job(self, s: ProcessSet) -> bool:
        return any([sorted(ranks) == s.ranks for _, ranks in self._sets_of_all()])

    def _sets_of_all(self) -> List[Tuple[int, List[int]]]:
        """Returns the numbers and ranks of the process sets that all ranks know, except the set of all ranks."""
        alone = {ident for ident, s in self._sets.items() if s.members_only}
        return [p for p in self.place().process_sets if p[0] not in alone]

    def _refresh(self) -> None:
        """Updates the list of the job's process sets. It sends Init, because within a job the sidecar answers Init with
        the current state of the job.
        """
        reply = self._call(lambda i: wire.init(i, {}, []))
        if reply.ready is not None:
            self._place = reply.ready

    def _id_of(self, s: ProcessSet) -> int:
        """Returns the number of the registered set that has the same ranks as s, and registers s as a further object
        for this set.

        Raises ValueError if no registered set has these ranks.
        """
        assert s.ranks is not None
        for ident, ranks in self._sets_of_all():
            if sorted(ranks) == s.ranks:
                self._sets[ident] = s
                self._registered.append(s)
                return ident
        raise ValueError(
            f"process set {s.ranks} is not registered: the job was started without it. Pass it to the first init() of this "
            "process, or call add_process_set()"
        )

    def shutdown(self) -> None:
        """Leaves the job, and keeps the sidecar for the next job. Outside a job this has no effect."""
        self._leave(*_exit.of_shutdown())

    def fail(self, reason: str) -> None:
        """Leaves the job as a failed rank, so that the operations of the other ranks end with an error."""
        self._leave(reason, True)

    def _leave(self, reason: str, failed: bool) -> None:
        with self._lock:
            if self._place is None:
                return
            try:
                if self._client is not None and not self._client.over:
                    self._client.call(lambda i: wire.shutdown(i, reason, failed))
            except (HorovodInternalError, ValueError):
                pass  # the job has failed, and the operations in flight have raised its error
            finally:
                self._place = None
                self._timeline_signal.stop()
                for s in self._registered:
                    s._invalidate()
                self._registered = []
                self._sets = {}
                for f in self.at_shutdown:
                    f()
                self._clear_plans()
                if self._client is not None:
                    self._client.release_names()
                    if self._client.over:
                        self._client.close()
                        self._client = None

    def close(self) -> None:
        """Leaves the job and closes the connection to the sidecar. It runs when the process exits."""
        with self._lock:
            self._leave(*_exit.of_exit())
            if self._client is not None:
                self._client.close()
                self._client = None
                self._clear_plans()

    def after_fork(self) -> None:
        """Makes the engine usable in a forked process. It replaces the locks, because no thread exists there that could
        release the old ones.
        """
        self._lock = threading.RLock()
        self._main_thread = threading.get_ident()
        self._plans_lock = threading.Lock()

    def _forward_signal(self, number: int) -> None:
        """Sends to the sidecar a signal that this process has received. A signal handler calls this method."""
        client = self._client
        if client is not None:
            client.signal(number)

    def initialized(self) -> bool:
        return self._place is not None

    def place(self) -> wire.Ready:
        """Returns this rank's place in the job: its rank, the size and so on. Raises NotInitializedError outside a job.
        """
        if self._place is None:
            raise NotInitializedError()
        return self._place

    # Process sets.

    def set_ranks(self) -> Dict[int, List[int]]:
        """Returns the ranks of all process sets of the job. The keys are the numbers of the sets."""
        self.place()
        with self._lock:
            self._refresh()
            ranks = {ident: sorted(members) for ident, members in sorted(self.place().process_sets)}
        return {0: list(self.global_set.ranks), **ranks}

    def registered_sets(self, ranks: Optional[List[int]]) -> Dict[int, ProcessSet]:
        """Returns the registered process sets with these ranks. The keys are the numbers of the sets."""
        with self._lock:
            return {number: s for number, s in self._sets.items() if number and s.ranks == ranks}

    def add_set(self, s: ProcessSet, members_only: bool, name: str, timeout: Optional[float]) -> None:
        self.place()
        if s.ranks is None:
            s.ranks = ranks_of(s.mpi_comm)
        if s.process_set_id is not None:
            raise ValueError(f"{s} is already registered")
        if not members_only:
            for other in list(self._sets.values()):
                if other.ranks == s.ranks and not other.members_only:
                    raise ValueError(f"a process set with these ranks is already registered: {other}")
        limit = check_timeout(timeout, "add_process_set")
        reply = self._call(lambda i: wire.add_process_set(i, s.ranks or [], members_only, name, limit))
        if reply.process_set is None:
            raise HorovodInternalError(f"add_process_set: the sidecar's answer has no number for {s}")
        number = reply.process_set[0]
        with self._lock:
            self._sets[number] = s
            self._registered.append(s)
            self.place().process_sets.append((number, list(s.ranks)))
            s.members_only, s.process_set_id = members_only, number

    def remove_set(self, s: ProcessSet, timeout: Optional[float] = None, wait: bool = True) -> bool:
        """Removes a process set and returns whether it was registered. If wait is false, it does not wait until the
        other ranks have removed the set.
        """
        self.place()
        ident, client = s.process_set_id, self._client
        if not ident or ident not in self._sets or client is None:
            return False
        number: int = ident
        limit = check_timeout(timeout, "remove_process_set")
        request = client.request(lambda i: wire.remove_process_set(i, number, limit))
        if wait:
            client.wait(request)
        with self._lock:
            self._sets.pop(number, None)
            place = self.place()
            place.process_sets = [p for p in place.process_sets if p[0] != number]
            for other in [r for r in self._registered if r.process_set_id == number]:
                other._invalidate()
                self._registered.remove(other)
        return True

    # The timeline.

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        self._call(lambda i: wire.start_timeline(i, path, mark_cycles))

    def stop_timeline(self) -> None:
        self._call(wire.stop_timeline)

    def _call(self, encode: Callable[[int], bytes]) -> wire.Reply:
        client = self._client
        if client is None:
            raise NotInitializedError()
        return client.call(encode)

    def set_id(self, s: ProcessSet, what: str) -> int:
        """Returns the number of a process set. Raises ValueError if the set is not registered or this rank is not a
        member.
        """
        ident = s.process_set_id
        if ident == 0:
            return 0
        if ident is None or ident not in self._sets:
            raise ValueError(f"{what}: process set {s.ranks} does not exist, or has not been registered")
        rank = self.place().rank
        if rank not in (s.ranks or ()):
            raise ValueError(f"{what}: rank {rank} is not a member of process set {ident} with ranks {s.ranks}")
        return ident

    # Operations.

    def begin(
        self,
        framework: Framework[A],
        kind: int,
        arrays: Sequence[A],
        shapes: Tuple[Shape, ...],
        dtype: Any,
        code: Code,
        process_set: ProcessSet,
        name: Optional[str],
        *,
        targets: Optional[Sequence[A]] = None,
        reduce_op: int = Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: Tuple[int, ...] = (),
        peer: int = 0,
        tag: int = 0,
        grouped: bool = False,
        at_once: bool = False,
        later: bool = False,
        types: Optional[Tuple[Tuple[Any, Code], ...]] = None,
        outputs: Optional[Tuple[Shape, ...]] = None,
        timeout: float = 0.0,
        number: int = 0,
    ) -> Call[A]:
        """Begins an operation on contiguous arrays and returns it as a Call. If grouped is false, there must be one
        array, or none for a barrier.

        dtype is the element type of the arrays, and code is the number and size of this type. If the arrays of a group
        have different types, types has the type and the code of each array. An allreduce, a broadcast, a recv, and a
        reduce at its root write their results to the targets, which may be the arrays themselves. Any other operation
        has targets only if outputs has the shapes of the results. Without targets, a caller that knows these shapes
        gives them because otherwise an operation on a CUDA device is copied through host memory. If a result turns out
        to have another size, the operation fails. timeout is in seconds; 0 means the timeout of the settings.

        If number is not 0, the operation is named by the given name, a point and the number, without its kind. So ranks
        that call different operations get a mismatch error. The caller makes sure that no earlier operation with this
        name is in flight. at_once says that the caller waits for the operation immediately after this call. later says
        that the caller will soon call notify_now, begin another operation, or wait.
        """
        client = self._client
        if self._place is None or client is None:
            raise NotInitializedError()
        set_id = self.set_id(process_set, wire.KIND_NAMES[kind])
        if name is None and at_once and threading.get_ident() == self._main_thread:
            # The main thread of each rank has at most one such operation in flight. So these operations share a name,
            # which stays in the response cache. There is one exception: if a signal has interrupted the wait for the
            # last such operation, that operation may still be in flight and hold the name.
            if not client.in_use((set_id, _full_name(kind, _SYNC_NAME, grouped))):
                name = _SYNC_NAME
        in_place = targets is arrays
        device = framework.device(arrays[0]) if arrays else -1
        on: Optional[OnDevice[A]] = None
        where_out: Tuple[Optional[Tuple[int, int]], ...] = ()
        if device >= 0:
            sizes = [code[1]] * len(arrays) if types is None else [its[1] for _, its in types]
            try:
                on = self._place_on(client, framework, device, kind, arrays, shapes, sizes, targets, outputs, root, process_set)
            except Unshareable as e:
                self._warn(e)
        if on is not None:
            where, where_out, outputs = on.where, on.where_out, on.shapes
        elif types is None:
            where = tuple([self._where(client, framework.address(x), code[1]) for x in arrays])
        else:
            where = tuple([self._where(client, framework.address(x), its[1]) for x, (_, its) in zip(arrays, types)])
        if on is None and outputs is not None and targets is None:
            where_out = (None,) * len(outputs)
        elif on is None and outputs is not None and targets is not None:
            where_out = tuple([self._where(client, framework.address(x), code[1]) for x in targets])
            where, where_out = _apart(where, shapes, where_out, outputs, code[1])
        key = (
            kind, framework, name, set_id, code, types, shapes, where, in_place, reduce_op, prescale, postscale, root,
            splits, peer, tag, grouped, outputs, where_out, timeout, number != 0, -1 if on is None else device,
            0 if on is None else _stream_number(framework.handle(on.stream)),
        )  # fmt: skip
        plan = self._take(key)
        if plan is None:
            plan = self._plan(key, client, framework, dtype, process_set)
        record: Optional[Callable[[], None]] = None
        if on is not None:
            assert plan.event is not None
            record = functools.partial(plan.event.record, framework.handle(on.stream))
        elif kind != wire.RECV and (kind != wire.BROADCAST or root == self._place.rank):
            for local, x in zip(plan.inputs, arrays):
                if local is not None:
                    framework.copy(local, x)
        call: Call[A] = Call(self, framework, plan, arrays, targets, on)
        call.source = peer
        operation = plan.operation
        assert operation is not None
        # The name is held only if the program has given it. For an operation without a name, the sidecar makes a new
        # name each time.
        later = later or at_once or _caller.waits
        held = name is not None and not at_once and not number
        call.pending = client.submit(operation, call, later, held, number, record)
        return call

    def _place_on(
        self, client: Client, fw: Framework[A], device: int, kind: int, arrays: Sequence[A], shapes: Tuple[Shape, ...],
        sizes: List[int], targets: Optional[Sequence[A]], outputs: Optional[Tuple[Shape, ...]], root: int,
        process_set: ProcessSet,
    ) -> OnDevice[A]:  # fmt: skip
        """Returns the memory of an operation on arrays of a CUDA device. sizes has the sizes of their elements, and
        outputs the shapes of the targets if the caller of begin has given them. Raises Unshareable if the sidecar
        cannot run the operation there, and then has written to none of the arrays.
        """
        if not self.place().devices:
            raise Unshareable("job", "the job uses no CUDA devices; set HOROVOD_GPU_OPERATIONS=nccl for all ranks")
        client.exports.ready(device)
        on: OnDevice[A] = OnDevice(device, fw.stream(device))
        here = targets is arrays or kind == wire.REDUCE and root != self.place().rank
        on.shapes = None if here else outputs if outputs is not None else _result_shapes(kind, shapes, process_set)
        nbytes = [math.prod(shape) * size for shape, size in zip(shapes, sizes)]
        on.inputs = list(arrays)
        on.where = tuple(map(functools.partial(_export, client, fw, device), arrays, nbytes, sizes))
        if on.shapes is not None:
            given = on.shapes
            out_bytes = [math.prod(shape) * size for shape, size in zip(given, sizes)]
            on.outputs = [fw.empty(s, x) for s, x in zip(given, arrays)] if targets is None else list(targets)
            on.where_out = tuple(map(functools.partial(_export, client, fw, device), on.outputs, out_bytes, sizes))
            on.where, on.where_out = _apart(on.where, shapes, on.where_out, given, sizes[0])
            if None in on.where_out:
                on.outputs = [fw.empty(s, x) if at is None else x for s, x, at in zip(given, on.outputs, on.where_out)]
                on.where_out = tuple(map(functools.partial(_export, client, fw, device), on.outputs, out_bytes, sizes))
        if None in on.where:
            on.inputs = [fw.empty(s, x) if at is None else x for s, x, at in zip(shapes, arrays, on.where)]
            on.where = tuple(map(functools.partial(_export, client, fw, device), on.inputs, nbytes, sizes))
            for made, x in zip(on.inputs, arrays):
                if made is not x:
                    fw.copy(made, x)
        if here:
            on.outputs = on.inputs if targets is not None else list(arrays)
        return on

    def _warn(self, e: Unshareable) -> None:
        """Shows why tensors on CUDA devices are copied through host memory, once for each reason."""
        if e.kind not in self._warned:
            self._warned.add(e.kind)
            warnings.warn(f"tensors on CUDA devices are copied through host memory: {e}", RuntimeWarning, stacklevel=4)

    def notify_now(self) -> None:
        """Notifies the sidecar of the operations that were begun with the argument later=True."""
        client = self._client
        if client is not None:
            client.notify_now()

    def _where(self, client: Client, address: int, alignment: int) -> Optional[Tuple[int, int]]:
        """Returns the number of the arena that has the memory at the address, and the offset in this arena. Returns
        None if the sidecar cannot work on the memory in place.
        """
        found = client.arena.find(address) if address else None
        if found is None or found[1] % alignment:
            return None
        client.ensure_mapped(found[0])
        return found[0].number, found[1]

    def _plan(self, key: tuple, client: Client, fw: Framework[A], dtype: Any, process_set: ProcessSet) -> Plan[A]:
        (
            kind, _, name, set_id, code, types, shapes, where, in_place, reduce_op, pre, post, root, splits, peer, tag,
            grouped, outputs, where_out, timeout, numbered, device, stream,
        ) = key  # fmt: skip
        plan: Plan[A] = Plan(key, client, self._job)
        if device >= 0:
            plan.event = client.exports.take_event(device)
            plan.nbytes = _EVENT_BYTES
        tensors: List[Tuple[Shape, Optional[wire.Place], Optional[wire.Place], int]] = []
        number, size = code
        for i, (shape, at) in enumerate(zip(shapes, where)):
            if types is not None:
                dtype, (number, size) = types[i]
            nbytes = math.prod(shape) * size
            source: Optional[wire.Place] = None
            if at is not None:
                source = at[0], at[1], nbytes
                plan.inputs.append(None)
            else:
                source = self._stage(plan, plan.inputs, fw, dtype, shape, nbytes)
            target: Optional[wire.Place] = None
            if kind == wire.SEND or kind == wire.REDUCE and root != self.place().rank:
                target = 0, 0, 0
                plan.outputs.append(None)
            elif outputs is not None:
                nbytes = math.prod(outputs[i]) * size
                if where_out[i] is not None:
                    target = where_out[i][0], where_out[i][1], nbytes
                    plan.outputs.append(None)
                else:
                    target = self._stage(plan, plan.outputs, fw, dtype, outputs[i], nbytes)
            elif kind in _OUTPUT_LIKE_INPUT:
                if at is None:
                    target = source
                    plan.outputs.append(plan.inputs[-1])
                elif in_place:
                    target = source
                    plan.outputs.append(None)
                else:
                    target = self._stage(plan, plan.outputs, fw, dtype, shape, nbytes)
            elif kind == wire.REDUCESCATTER and shape:
                mine = (_rows(shape[0], process_set),) + shape[1:]
                target = self._stage(plan, plan.outputs, fw, dtype, mine, math.prod(mine) * size)
            else:
                plan.outputs.append(None)
            tensors.append((shape, source, target, number))
        body = wire.operation(
            kind,
            dtype=code[0],
            reduce_op=_ON_WIRE[reduce_op] if kind in (wire.ALLREDUCE, wire.REDUCE, wire.REDUCESCATTER) else 0,
            prescale=pre,
            postscale=post,
            root_rank=root,
            process_set=set_id,
            timeout=timeout,
            grouped=grouped,
            tensors=tensors,
            splits=splits,
            peer=peer,
            tag=tag,
            event=0 if plan.event is None else plan.event.number,
            stream=stream,
        )
        if numbered:
            plan.operation = Operation(body + wire.operation_name(name), f'{wire.KIND_NAMES[kind]} "{name}"')
        elif name is None:
            plan.operation = Operation(body, wire.KIND_NAMES[kind])
        else:
            full = _full_name(kind, name, grouped)
            label = f'{wire.KIND_NAMES[kind]} "{full}"'
            plan.operation = Operation(body + wire.operation_name(full), label, (set_id, full))
        return plan

    def _stage(
        self, plan: Plan[A], into: List[Optional[A]], fw: Framework[A], dtype: Any, shape: Shape, nbytes: int
    ) -> wire.Place:
        extent = plan.client.take(nbytes)
        plan.extents.append(extent)
        plan.nbytes += extent[2]
        chunk, offset, _ = extent
        into.append(fw.wrap(chunk.view[offset : offset + nbytes], dtype, shape))
        return chunk.number, offset, nbytes

    def simple(self, kind: int, process_set: ProcessSet) -> wire.Completion:
        """Runs a barrier or a join, waits until it is done, and returns its completion."""
        client = self._client
        if self._place is None or client is None:
            raise NotInitializedError()
        set_id = self.set_id(process_set, wire.KIND_NAMES[kind])
        operation = self._simple.get((kind, set_id))
        if operation is None:
            operation = Operation(wire.operation(kind, process_set=set_id), wire.KIND_NAMES[kind])
            self._simple[kind, set_id] = operation
        pending = client.submit(operation, later=True)
        client.wait(pending)
        if pending.reply is None or pending.reply.completion is None:
            return wire.Completion()
        return pending.reply.completion

    def alloc(self, nbytes: int) -> Block:
        return self.client().arena.alloc(nbytes)

    # Plans that are kept to be used again.

    def _take(self, key: tuple) -> Optional[Plan]:
        with self._plans_lock:
            idle = self._plans.get(key)
            if not idle:
                return None
            plan = idle.pop()
            self._idle -= 1
            self._idle_bytes -= plan.nbytes
            return plan

    def keep(self, plan: Plan) -> None:
        """Keeps a plan that has run. If there are too many plans, drops the least recently used ones."""
        dropped: List[object] = []  # kept alive until the lock is released, so that no finalizer runs before
        with self._plans_lock:
            if plan.job != self._job:
                return
            self._plans.setdefault(plan.key, []).append(plan)
            self._plans.move_to_end(plan.key)
            self._idle += 1
            self._idle_bytes += plan.nbytes
            while (self._idle > _MAX_PLANS or self._idle_bytes > _MAX_IDLE_BYTES) and len(self._plans) > 1:
                _, idle = self._plans.popitem(last=False)
                self._idle -= len(idle)
                self._idle_bytes -= sum([p.nbytes for p in idle])
                dropped.append(idle)
        if dropped:
            del idle
            dropped.clear()
            plan.client.arena.collect()

    def _clear_plans(self) -> None:
        with self._plans_lock:
            plans, self._plans = self._plans, collections.OrderedDict()
            self._idle = self._idle_bytes = 0
            self._simple = {}
            self._job += 1
        del plans


def _full_name(kind: int, name: str, grouped: bool) -> str:
    """Returns the name by which the ranks match an operation. It begins with the kind, so that the program may use the
    same name for operations of different kinds.
    """
    return f"grouped_{wire.KIND_NAMES[kind]}.{name}" if grouped else f"{wire.KIND_NAMES[kind]}.{name}"


def _spans(
    places: Sequence[Optional[Tuple[int, int]]], shapes: Sequence[Shape], size: int
) -> List[Tuple[int, int, int]]:
    """Returns the arena, the begin and the end of each array of elements of the given size that is in an arena."""
    return [(at[0], at[1], at[1] + math.prod(shape) * size) for at, shape in zip(places, shapes) if at is not None]


def _overlap(spans: Sequence[Tuple[int, int, int]], others: Sequence[Tuple[int, int, int]]) -> bool:
    return any([a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in spans for b in others])


def _apart(
    where: Tuple[Optional[Tuple[int, int]], ...], shapes: Sequence[Shape],
    where_out: Tuple[Optional[Tuple[int, int]], ...], outputs: Sequence[Shape], size: int,
) -> Tuple[Tuple[Optional[Tuple[int, int]], ...], Tuple[Optional[Tuple[int, int]], ...]]:  # fmt: skip
    """Returns the places of the arrays and of the targets. If a target overlaps an array, which the sidecar refuses, the
    places of the smaller ones are None instead, so that they are copied.
    """
    if _overlap(_spans(where, shapes, size), _spans(where_out, outputs, size)):
        if sum(map(math.prod, outputs)) > sum(map(math.prod, shapes)):
            return (None,) * len(where), where_out
        return where, (None,) * len(where_out)
    return where, where_out


def _result_shapes(kind: int, shapes: Tuple[Shape, ...], process_set: ProcessSet) -> Tuple[Shape, ...]:
    """Returns the shapes of the results of an operation. Raises Unshareable if they are not known before it."""
    if kind in (wire.ALLREDUCE, wire.BROADCAST, wire.REDUCE):
        return shapes
    if kind == wire.REDUCESCATTER:
        return tuple([(_rows(s[0], process_set),) + tuple(s[1:]) if s else s for s in shapes])
    name = wire.KIND_NAMES[kind]
    if kind in (wire.SEND, wire.RECV):
        raise Unshareable(name, f"a {name} is a message, which NCCL does not send for gohvd")
    raise Unshareable(name, f"the program does not know the size of the result of this operation, {name}, before it")


def _stream_number(handle: int) -> int:
    """Returns the number of a cudaStream_t for the sidecar. 0 means that two operations with this handle may be on
    different streams.
    """
    if handle == 2:  # cudaStreamPerThread
        return 0
    return handle or 1  # 1 is cudaStreamLegacy, the same stream as 0


def _export(
    client: Client, fw: Framework[A], device: int, x: A, nbytes: int, alignment: int
) -> Optional[Tuple[int, int]]:
    """Returns the arena of an array on a CUDA device and the offset there, or None if the sidecar cannot work on it in
    place. An array without elements has no arena.
    """
    if nbytes == 0:
        return 0, 0
    address = fw.pointer(x)
    return None if address % alignment or not address else client.exports.place(device, address)


def memory_at(address: int, nbytes: int) -> memoryview:
    """Returns a writable view of nbytes bytes at the address. The memory must stay valid as long as the view exists."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def check_root(root: int, process_set: ProcessSet, kind: int = wire.BROADCAST) -> None:
    """Raises ValueError if the rank root is not a member of the set. Before init, the function does nothing, because
    the operation raises the error then.
    """
    if engine.initialized() and process_set.ranks is not None and root not in process_set.ranks:
        raise ValueError(f"{wire.KIND_NAMES[kind]}: root rank {root} is not in process set {process_set.ranks}")


def check_message(peer: Optional[int], tag: int, process_set: ProcessSet, kind: int) -> int:
    """Returns the peer of a send or a recv on the wire, which is ANY_SOURCE for None. Raises ValueError if the peer is
    not another member of the set, or if the tag is not valid. Before init, the function checks only the tag, because
    the operation raises the error then.
    """
    what = wire.KIND_NAMES[kind]
    if not 0 <= tag < 1 << 31:
        raise ValueError(f"{what}: got tag {tag}, want 0 to 2147483647")
    if peer is None:
        return wire.ANY_SOURCE
    ranks = process_set.ranks
    if engine.initialized() and ranks is not None and (peer not in ranks or peer == engine.place().rank):
        raise ValueError(f"{what}: got rank {peer}, want another rank of process set {ranks}")
    return peer


def check_timeout(timeout: Optional[float], what: str) -> float:
    """Returns a timeout on the wire, which is 0 for None. Raises ValueError if the timeout is not positive."""
    if timeout is None:
        return 0.0
    if not timeout > 0:
        raise ValueError(f"{what}: got a timeout of {timeout} s, want more than 0 s")
    return timeout


def check_splits(
    splits: Optional[Sequence[int]], shape: Shape, process_set: ProcessSet, kind: int = wire.ALLTOALL
) -> Tuple[int, ...]:
    """Returns splits as a tuple, which is empty if splits is None. Raises ValueError if splits does not fit the process
    set and the shape of the tensor.
    """
    n, what = len(process_set.ranks or ()), wire.KIND_NAMES[kind]
    if not engine.initialized() or not shape:
        return ()
    if splits is None or len(splits) == 0:
        if n and shape[0] % n:
            raise ValueError(f"{what}: got {shape[0]} rows and no splits, want a multiple of {n} rows or {n} splits")
        return ()
    given = tuple([int(s) for s in splits])
    if len(given) != n or min(given) < 0 or sum(given) > shape[0]:
        raise ValueError(
            f"{what}: got splits {list(given)}, want one for each of {n} members, none negative, "
            f"with a sum of at most {shape[0]} rows"
        )
    return given


def _rows(rows: int, process_set: ProcessSet) -> int:
    """Returns the number of rows that this rank gets in a reducescatter. If the rows do not divide evenly, each of the
    first ranks gets one row more.
    """
    members = process_set.ranks or [0]
    me = members.index(engine.place().rank)
    return rows // len(members) + (1 if me < rows % len(members) else 0)


def _settings() -> Dict[str, str]:
    """Returns the job settings in the environment. They are read at each init, because the program may have changed
    them.
    """
    return {
        k: v for k, v in os.environ.items() if k.startswith(_KEPT_FROM_ENVIRONMENT) and k not in _NOT_SETTINGS
    }  # fmt: skip


def ranks_of(comm: Any) -> List[int]:
    """Returns the ranks of the job that are members of an mpi4py communicator. The rank of a process in the job is its
    rank in MPI.COMM_WORLD. Raises ValueError if the settings choose MPI, because only one process of a rank can use it.
    """
    if any(os.environ.get(f"HOROVOD_{name}", "").lower() == "mpi" for name in ("CONTROLLER", "CPU_OPERATIONS")):
        raise ValueError("got an mpi4py communicator, but the sidecar uses MPI, so this process cannot: pass the ranks")
    from mpi4py import MPI

    world, group = MPI.COMM_WORLD.Get_group(), comm.Get_group()
    return sorted(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world))


engine = Engine()

os.register_at_fork(after_in_child=engine.after_fork)
