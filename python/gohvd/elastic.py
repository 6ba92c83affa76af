"""The interface of horovod.common.elastic: training goes on when ranks die, leave or are added (docs/elastic.md).

The library decides with which commit the ranks go on (``hvd_elastic`` in gohvd.h). A ``State`` keeps the states. In a
job that is not elastic, a decorated function is called once, and its errors are those of the job.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from . import _engine, _library
from .exceptions import HorovodInternalError, HostsUpdatedInterrupt, PeerError

__all__ = [
    "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "notification_manager", "run", "run_fn",
]  # fmt: skip

_T = TypeVar("_T")
_engine_ = _engine.engine
_synced = False
"""Whether the library knows a commit of a training function of this process. It is not that of the next function."""


def _progress() -> _library.Elastic:
    """Returns what the library says of this process in an elastic job."""
    e = _library.Elastic(ctypes.sizeof(_library.Elastic))
    _library.check(_library.quick.hvd_elastic(e))
    return e


def _vote(flags: int) -> None:
    """Waits for all ranks."""
    handle = _library.Handle()  # new_handle takes longer than the rest of this function
    try:
        status = _library.waiting.hvd_elastic_vote(flags, _library.SLICE, handle)
        if status == _library.PENDING:
            _library.wait(handle)
        elif status:
            _library.check(status)
    except BaseException:
        _library.quick.hvd_release(handle.value)
        raise


class _NotificationManager:
    """Tells its listeners that the launcher has changed the ranks. It asks the library when a listener asks for news."""

    def __init__(self) -> None:
        self._listeners: list[Any] = []
        self._told = 0  # the generation whose end the listeners know

    def init(self) -> None:
        """Does nothing, because the library is always connected to the launcher of an elastic job."""

    def register_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        self._listeners.remove(listener)

    def poll(self) -> None:
        """Calls on_hosts_updated of the listeners, once in a generation, if its ranks are to change."""
        if not _engine_.initialized():
            return
        e = _progress()
        if e.pending and self._told != e.generation:
            self._told = e.generation
            for listener in self._listeners:
                listener.on_hosts_updated(time.time(), e.pending)


notification_manager = _NotificationManager()


class _Messages(queue.Queue):  # type: ignore[type-arg]
    """The changes of the ranks of which a state has been told: pairs of the time and the kind of the change."""

    def empty(self) -> bool:
        notification_manager.poll()
        return super().empty()


class State:
    """The state of training, which is the same at all ranks between steps.

    A subclass defines save, restore and sync. After a change of the ranks, all of them get the state of the first rank
    by sync, because only the states of this package can be set back to the commit before the last one.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = _Messages()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._by_steps = False
        """Whether each step of an optimizer is a commit, so that the present state is the last one (run)."""
        self._begin(0, False)

    def _begin(self, root: int, is_commit: bool, pair: tuple[int, int] | None = None) -> None:
        self._root = root
        """The rank from which sync gets the state."""
        self._pair = pair
        """If not None, sync may get large parts of the state from the first of these ranks, and sends them to the second. A
        rank that is -1 does not exist."""
        self._voting = False
        """Whether the next vote is about a commit."""
        self._before: Any = None
        """What restore needs for the commit before the last one, while the last one is not granted."""
        self._undecided = False
        """Whether a rank has failed in the vote of a commit. Other ranks may know that all have saved it, or may not."""
        self._is_commit = is_commit
        """Whether what save has saved last, or _before if there is one, is a commit that was granted."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Registers functions that on_reset calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapts the state to other ranks. It is called after they have joined the job, and before sync. In a new rank it
        is called after sync, and its changes to the state are undone, because that of the other ranks has them.
        """
        self._host_messages = _Messages()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Is told that the launcher has removed ranks (1), added some (2), or both (3)."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state, and waits until all ranks have saved it. Then check_host_updates follows. If each step is a
        commit anyway (``run``), only check_host_updates follows.
        """
        if self._by_steps:
            return self.check_host_updates()
        if not self._undecided:  # restore may need both commits, also if the program commits again in a handler
            self._before, was_commit = self._saved(), self._is_commit
            self.save()
            self._is_commit, self._voting = was_commit, True
        try:
            self.check_host_updates()
        except PeerError:
            self._undecided = True
            raise

    def check_host_updates(self) -> None:
        """Waits for all ranks, and raises HostsUpdatedInterrupt at all of them if their number is to change. All ranks
        must call it equally often.
        """
        asked, last = 0, self._last_updated_timestamp
        while not self._host_messages.empty():
            timestamp, kind = self._host_messages.get()
            if timestamp > last:
                self._last_updated_timestamp = max(self._last_updated_timestamp, timestamp)
                asked |= kind
        if _engine_.initialized():
            _vote((_library.SAVED if self._voting else 0) | asked)
            asked = _progress().changes
        if self._voting:
            self._is_commit, self._voting, self._before = True, False, None
        if asked:
            raise HostsUpdatedInterrupt(asked == _library.REMOVED)

    def _vote_for_step(self) -> None:
        """Waits until all ranks have the gradients of a step. Then the caller makes the step. If the ranks are to change,
        no rank makes it, because the program changes its values only after the step, which would be too late.
        """
        _vote(_library.STEP)
        self._is_commit = True
        changes = _progress().changes
        if changes:
            raise HostsUpdatedInterrupt(changes == _library.REMOVED)

    def _sync_values(self) -> None:
        """Sets the values at all ranks that the program changes outside of the steps of an optimizer."""
        self.sync()

    def reset(self) -> None:
        """Adapts the state to a change of the ranks. Subclasses may override it."""

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def _saved(self) -> Any:
        """Returns what _put_back needs."""

    def _put_back(self, saved: Any) -> None:
        """Undoes the saves since _saved has returned saved."""

    def _loose(self) -> bool:
        """Returns whether the state may not have the commit of which the library knows."""
        return True


class ObjectState(State):
    """A State that consists of values that can be copied and pickled. Each keyword argument becomes an attribute."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)

    def save(self) -> None:
        """Saves copies of the values for restore."""
        self._saved_state = copy.deepcopy(self._values())
        self._is_commit = False

    def restore(self) -> None:
        """Restores the saved values."""
        self._set_values(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Sets the values at all ranks to those of one rank, usually rank 0."""
        root = {"root_rank": self._root} if self._root else {}  # the function of a program may have no such argument
        self._set_values(self._bcast_object(self._values(), **root))

    def _values(self) -> dict[str, Any]:
        """Returns the values, as they are saved and sent."""
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_values(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _sync_values(self) -> None:
        ObjectState.sync(self)

    def _saved(self) -> Any:
        return self._saved_state

    def _put_back(self, saved: Any) -> None:
        self._saved_state = saved

    def _loose(self) -> bool:
        return not self._is_commit or not all(is_ours(getattr(type(self), name)) for name in ("save", "restore", "sync"))


def is_ours(x: Any) -> bool:
    """Returns whether this package defines a class or a function."""
    return x.__module__.partition(".")[0] == __name__.partition(".")[0]


def run_fn(func: Callable[..., _T], reset: Callable[[], None], step: bool = False) -> Callable[..., _T]:
    """Decorates a training function, whose first argument is a State. The wrapper makes the state equal at all ranks and
    calls the function, until it returns.

    If ranks have failed, or commit has raised HostsUpdatedInterrupt, the wrapper calls reset, which leaves the job and
    joins it again, and begins again with the state of the last commit, or with the present state after an interrupt.
    All other errors leave the wrapper, also a MismatchError, and one of ranks that have failed three times in a row
    without a commit, each time within 60 s, though they did not become fewer. If the launcher has removed this process,
    the wrapper ends it.
    All ranks may call several such functions, one after the other. After the first one, no process is added.

    If step is set, each step of a DistributedOptimizer is a commit, without a copy of the state (docs/elastic.md).
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _T:
        notification_manager.init()
        notification_manager.register_listener(state)
        state._by_steps = step
        _engine_.before_step = state._vote_for_step if step else None
        try:
            for f in _engine_.before_training:
                f()
            was_rank = reset_before = False
            while True:
                try:
                    _start(state, was_rank, reset_before)
                    was_rank = True
                    result = func(state, *args, **kwargs)
                    _library.call(_library.waiting.hvd_elastic_end, _library.TRAINING_DONE)
                    return result
                except HostsUpdatedInterrupt:
                    if not step:
                        state.save()  # also after commit, because the program may have changed the state since then
                    _library.call(_library.waiting.hvd_elastic_end, _library.TRAINING_CHANGED)
                    state._is_commit = True
                except RuntimeError as e:
                    _failed(e)
                reset()
                for f in _engine_.before_again:
                    f()
                reset_before = True
        except BaseException as e:
            _abandon()
            if isinstance(e, HorovodInternalError) and _progress().removed:
                _end()
            raise
        finally:
            _engine_.before_step = None
            notification_manager.remove_listener(state)

    return wrapper


def run(func: Callable[..., _T] | None = None, *, step: bool = False) -> Any:
    """Is run_fn with the usual reset: ``@run``, or ``@run(step=True)``."""
    if func is None:
        return functools.partial(run, step=step)
    return run_fn(func, _engine_.rejoin, step)


def _start(state: State, was_rank: bool, reset_before: bool) -> None:
    """Makes the state equal at all ranks. was_rank says that this process has had the state before, and reset_before that
    it has joined the job again. A new process of a job that trains becomes a rank only here.
    """
    global _synced
    loose = state._loose() if was_rank else _synced
    _library.call(_library.waiting.hvd_elastic_join, _library.LOOSE if loose else 0)
    reset_before |= _engine_.find_place()
    e = _progress()
    if e.held == _library.HELD_GRANTED and state._before is not None:
        state._put_back(state._before)
    granted = e.held in (_library.HELD_GRANTED, _library.HELD_SAVED)
    pair = (e.source, e.receiver) if e.pairs else None
    state._begin(e.root, granted or state._by_steps and state._is_commit, pair)
    if e.restore and not state._by_steps:
        state.restore()
    late_reset = reset_before and not was_rank and e.root != _library.quick.hvd_rank()
    if reset_before and not late_reset:
        state.on_reset()
    if e.missing or not was_rank:
        _sync(state, undo=state._by_steps and was_rank and e.held == _library.HELD_NOTHING)
        state._pair = None  # a sync that the program calls later is one of all ranks
        if pair and state._by_steps:
            state._sync_values()
        if late_reset or not state._by_steps:
            state.save()
        if late_reset:
            state.on_reset()
            state.restore()
    elif state._by_steps:
        state._sync_values()
    _library.call(_library.waiting.hvd_elastic_synced)
    state._is_commit = _synced = True


def _sync(state: State, undo: bool) -> None:
    """Gets the state from other ranks. undo says that the present state is needed again if the others die meanwhile, so it
    must not be changed in part. It is a commit then if it was one before.
    """
    is_commit = state._is_commit
    if undo:
        state.save()
    try:
        state.sync()
    except PeerError:
        if undo:
            state.restore()
            state._is_commit = is_commit
        raise


def _failed(e: RuntimeError) -> None:
    """Raises e, or an error because of it, unless the training goes on after ranks have failed. Code in C++ that waits for
    an operation, such as torch's DistributedDataParallel, passes on only the text of a PeerError. The engine knows of the
    end of the job before the operation ends.
    """
    by_text = not isinstance(e, HorovodInternalError) and "PeerError: " in str(e)
    if not _engine_.initialized() or not isinstance(_engine_.failure() if by_text else e, PeerError):
        raise e
    if not _progress().generation:
        raise e
    try:
        _library.call(_library.waiting.hvd_elastic_end, _library.TRAINING_FAILED)
    except HorovodInternalError as final:
        raise final from e


def _abandon() -> None:
    """Makes SIGTERM have its usual effect again after an error that leaves the wrapper."""
    if _engine_.initialized():
        with contextlib.suppress(HorovodInternalError):  # this process may be a fork of the rank
            _library.call(_library.waiting.hvd_elastic_end, _library.TRAINING_ABANDONED)


def _end() -> NoReturn:
    """Ends this process, which the launcher has removed."""
    host, place = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(), _engine_.last_place
    print(f"{host}[{place.local_rank if place else 0}] has been removed from elastic job", file=sys.stderr)
    sys.exit(0)
