"""The results of operations: torch's Work and Future over calls of the engine.

The thread that calls ``wait`` waits for the operation itself. Only if the program asks for a future, a thread of this
module, the *finisher*, waits for the operation too.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import _library
from ..._engine import Call
from ...exceptions import HorovodInternalError, MismatchError
from ._tensors import LISTS

_NO_TIMEOUT = timedelta(0)

# How long the callbacks of a future may run before another thread finishes the other operations.
_PATIENCE_SECONDS = 0.1

# After how many looks without an operation in flight the watcher ends. A look comes each _PATIENCE_SECONDS.
_IDLE_LOOKS = 10

# Stands for this process. A forked process has another one.
_process = object()


class Operation:
    """One call of torch.distributed: the calls of the engine that carry it out, and its outcome."""

    # Most operations need only what __init__ sets.
    done = False
    error: BaseException | None = None
    part = False
    """Whether the operation is a part of another one, which finishes it."""
    limit = _NO_TIMEOUT
    """How long a wait without a timeout may take, if the engine does not limit the time of the operation itself."""
    expected: Callable[[], str] | None = None
    """Says what this rank has expected, for the text of a MismatchError."""
    _future: torch.futures.Future | None = None
    _public: torch.futures.Future | None = None

    def __init__(
        self, what: str, calls: Sequence[Call], result: Any, after: Callable[[], None] | None = None
    ) -> None:
        self.what = what
        """The function of torch that was called, and the number of the call, for errors."""
        self.calls = calls
        self.result = result
        """The output tensors, which is what a future returns."""
        self.streams = [call.stream for call in calls if call.stream is not None]
        """The streams of CUDA devices on which the results are complete, perhaps later than the operation is done."""
        self.apart = [call.stream for call in calls if call.apart] if self.streams else []
        """Those of them on which the program puts no work."""
        self._process = _process
        self._after = after
        self._lock = threading.Lock()

    @classmethod
    def of(cls, what: str, parts: Sequence[Operation], result: Any) -> Operation:
        """Returns an operation that consists of other operations."""
        for part in parts:
            part.part = True
        whole = cls(what, [call for part in parts for call in part.calls], result, lambda: _finish_all(parts))
        whole.limit = max([part.limit for part in parts], default=_NO_TIMEOUT)
        return whole

    def finish(self, end: float | None = None, follows: bool = False) -> bool:
        """Waits for the operation, at most until the time end of the clock time.monotonic, if it is given, and writes its
        results to the output tensors. Returns whether the operation is done. It does not raise the operation's error.
        follows says that the caller keeps the calls until it has called follow.
        """
        if self._process is not _process:
            self.after_fork()
        if self.done:
            return True
        for call in self.calls:
            if not call.settle(end):
                return False
        with self._lock:
            if self.done:
                return True
            try:
                self._write()
            except Exception as e:
                more = f": {self.expected()}" if self.expected is not None and isinstance(e, MismatchError) else ""
                e.args = (f"torch.distributed.{self.what}: {e}{more}", *e.args[1:])
                self.error = e.with_traceback(None)
            if not follows or self.error is not None:
                for call in self.calls:
                    call.hold()
            self.calls, self._after, self.expected = (), None, None
            self.done = True
        if self._future is not None:
            self._future.set_result(None)
        return True

    def after_fork(self) -> None:
        """Ends the operation with an error, because this process was forked after the operation had begun. A thread
        that does not exist in this process may have held the lock.
        """
        self._process, self._lock = _process, threading.Lock()
        # No thread of this process completes a future that the parent has made.
        self._future = self._public = None
        if not self.done:
            self.error = HorovodInternalError(
                f"torch.distributed.{self.what}: process {os.getpid()} was forked after the operation had begun: "
                "only the process that has begun it can wait for it"
            )
            self.calls, self._after, self.done = (), None, True

    def _write(self) -> None:
        for call in self.calls:
            call.written()
        if self._after is not None:
            self._after()

    def poll(self) -> bool:
        """Returns whether the operation is done, also on the device if a stream of its own waits for it: the program's
        streams may have other work. If it is, its results have been written.
        """
        if self._process is not _process:
            self.after_fork()
        if not self.done and self.ended():
            self.finish()
        return self.done and (self.error is not None or all([stream.query() for stream in self.apart]))

    def ended(self) -> bool:
        """Returns whether finish does not wait."""
        return self.done or all([call.poll() for call in self.calls])

    def handles(self) -> list[int]:
        """Returns the handles of the calls in flight."""
        return [h for h in [call.handle() for call in self.calls] if h]

    def future(self, devices: list[torch.device]) -> torch.futures.Future:
        """Returns the future of the operation. All calls return the same future."""
        if self._process is not _process:
            self.after_fork()
        with self._lock:
            if self._public is not None:
                return self._public
            # The error is raised in a callback, because only then code in C++ that waits for the future gets it.
            first: torch.futures.Future = torch.futures.Future(devices=devices)
            self._public = public = first.then(self._outcome)
            done = self.done
            self._future = None if done else first
        if done:
            first.set_result(None)
        else:
            _finisher.add(self)
        return public

    def _outcome(self, _: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.follow()
        return self.result

    def follow(self) -> None:
        """Makes the current streams of the devices wait for the results. Another thread, with other current streams, may
        have finished the operation.
        """
        for stream in self.streams:
            LISTS.follow(stream)


class _Finisher:
    """A thread that finishes operations as soon as they are done, in any order.

    The thread also runs the callbacks of their futures. A callback may wait for the future of another operation, which
    the thread cannot finish then. So another thread takes its place if a callback adds an operation, or if it runs for
    longer than _PATIENCE_SECONDS.
    """

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._operations: list[Operation] = []
        self._gate: _library.Gate | None = None
        """What ends the wait of the thread for its operations, so that it learns of a new one."""
        self._thread: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._finishing: Operation | None = None
        """The operation that the thread finishes now."""

    def add(self, operation: Operation) -> None:
        with self._cond:
            self._operations.append(operation)
            thread = self._thread
            if thread is None or thread is threading.current_thread() or not thread.is_alive():
                self._replace()
            if self._watcher is None:
                self._watcher = self._start(self._watch)
            self._cond.notify()
            if self._gate is not None:
                self._gate.open()
                self._gate = None

    @staticmethod
    def _start(run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="gohvd futures", daemon=True)
        thread.start()
        return thread

    def _replace(self) -> None:
        """Starts a thread in place of the present one, which ends when its callback returns. The caller holds _cond."""
        self._finishing = None
        self._thread = self._start(self._run)

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._cond:
                if self._thread is not me:
                    return
                self._finishing = None
                while not self._operations:
                    self._cond.wait()
                # An operation whose handles are missing, because another thread has settled its calls, has ended.
                handles: list[int] = []
                at = -1
                for i, operation in enumerate(self._operations):
                    handles += operation.handles()
                    if operation.ended():
                        at = i
                        break
                if at < 0:
                    gate = self._gate = _library.Gate()
                else:
                    operation = self._finishing = self._operations.pop(at)
            if at >= 0:
                operation.finish()
            else:
                gate.wait(handles)

    def _watch(self) -> None:
        """Replaces the thread if it has not finished an operation in the time from one look to the next. Ends when no
        other operation has been in flight for _IDLE_LOOKS looks, so that it is not started again and again.
        """
        seen: Operation | None = None
        idle = 0
        while idle < _IDLE_LOOKS:
            time.sleep(_PATIENCE_SECONDS)
            with self._cond:
                idle = 0 if self._operations else idle + 1
                if idle == _IDLE_LOOKS:
                    self._watcher = None
                elif idle == 0 and seen is not None and seen is self._finishing:
                    self._replace()
                seen = self._finishing


def _finish_all(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.finish()
    for operation in operations:
        if operation.error is not None:
            raise operation.error


_finisher = _Finisher()


def _after_fork_in_child() -> None:
    global _process, _finisher
    _process, _finisher = object(), _Finisher()  # the threads of the finisher do not exist in the child


os.register_at_fork(after_in_child=_after_fork_in_child)


# A work that is in use in C++ must keep its Python object, because otherwise a wait there never returns. But C++ does not
# keep it if the program passes a work to code in C++, as DistributedDataParallel.join does, or before torch 2.7 if that
# code itself has called the group. So the last works that were dropped and never waited for are kept here, until the
# groups are destroyed.
_MOST_KEPT = 256
_MOST_KEPT_BYTES = 64 << 20
kept: collections.deque[tuple[Work, int]] = collections.deque()


def _keep(work: Work) -> None:
    # Works may be dropped in any thread, also while this function runs. So it takes no lock.
    kept.append((work, _nbytes(work._operation.result)))
    while len(kept) > _MOST_KEPT or len(kept) > 1 and sum([n for _, n in list(kept)]) > _MOST_KEPT_BYTES:
        kept.popleft()


class Work(dist.Work):
    """The handle of an asynchronous operation, as ``torch.distributed`` returns it."""

    def __init__(self, operation: Operation, source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._operation = operation
        self._source = source
        self._used = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits until the operation is done, and raises its error. Raises RuntimeError if the timeout passes before; the
        operation goes on then.
        """
        operation, self._used = self._operation, True
        calls = operation.calls  # they keep the tensors
        limit = timeout if timeout > _NO_TIMEOUT else operation.limit
        if limit > _NO_TIMEOUT:
            if not operation.finish(time.monotonic() + limit.total_seconds(), follows=True):
                raise RuntimeError(
                    f"torch.distributed.{operation.what}: timed out after {limit.total_seconds():g} s, "
                    "waiting for the other ranks; the operation goes on, wait again for its result"
                )
        else:
            operation.finish(follows=True)
        if operation.error is not None:
            raise operation.error
        if operation.streams:
            operation.follow()
        del calls
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._operation.poll()

    def is_success(self) -> bool:
        return self._operation.poll() and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def result(self) -> Any:
        self.wait()
        return self._operation.result

    def source_rank(self) -> int:
        """Returns the rank in the group that has sent the message that was received."""
        if self._source is None:
            raise RuntimeError(f"torch.distributed.{self._operation.what}: only a recv has a source rank")
        self.wait()
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        self._used = True
        return self._operation.future(_devices(self._operation.result))

    def __del__(self) -> None:
        # The results must be written even if the program never waits.
        operation = getattr(self, "_operation", None)
        if operation is None or operation.part or sys.is_finalizing():
            return
        if operation._process is not _process:
            operation.after_fork()
        if not operation.done:
            _finisher.add(operation)
        if not self._used:
            _keep(self)


class _Done(Work):
    """The work of operations that are done, for which a wait calls no other function."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True


DONE = _Done(Operation("an operation", [], []))
"""The work of operations that are done before torch gets it, and whose result is not asked for."""
DONE._operation.finish()


def _nbytes(result: Any) -> int:
    if isinstance(result, torch.Tensor):
        return result.numel() * result.element_size()
    return sum([_nbytes(item) for item in result])


def _devices(result: Any) -> list[torch.device]:
    if isinstance(result, torch.Tensor):
        return [] if result.is_cpu else [result.device]
    found: list[torch.device] = []
    for item in result:
        found += [d for d in _devices(item) if d not in found]
    return found
