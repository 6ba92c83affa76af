"""The parameter server (docs/ps.md): workers push values to servers and pull values from them, each at its own pace.

Every process of the job calls ``start``. ``hvdrun --servers 2 --workers 4 python3 program.py`` starts all of them::

    with gohvd.ps.start() as node:
        if node.role == "server":
            node.serve(0, "float32", "adagrad", 0.1, 1e-8)
        if node.role == "worker":
            weights = node.worker(0, "float32")
            weights.push(keys, gradients).wait()
            values = weights.pull(keys).wait()

The node runs in this process. Keys are arrays of 64-bit integers, sorted and unique. Values are numpy arrays or torch tensors of the worker's element type. Numpy arrays of
bfloat16 have the type uint16.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import operator
import sys
import threading
from types import TracebackType
from typing import Any

import numpy as np

from . import _exit, _library
from ._library import NO_HANDLE, PENDING, SLICE, SUCCESS, check, quick, waiting
from .exceptions import HorovodInternalError

SCHEDULER, SERVERS, WORKERS, ALL = 1, 2, 4, 7
"""The groups of nodes. A sum of groups is their union."""

_ROLES = {SCHEDULER: "scheduler", SERVERS: "server", WORKERS: "worker"}

INIT = -1
"""The command with which a push sets values, whatever the handler does with other pushes."""

MAX_KEY = (1 << 64) - 2
"""The greatest key."""


def _numpy(values: Any) -> Any:
    """Returns a torch tensor as a numpy array, and anything else as it is. If the tensor is on the CPU, the array has the
    same memory. Elements of type bfloat16, which numpy does not have, become uint16.
    """
    if not hasattr(values, "detach"):
        return values
    values = values.detach().cpu()
    if str(values.dtype) != "torch.bfloat16":
        return values.numpy()
    import torch

    return values.view(torch.int16).numpy().view(np.uint16)


def _array(values: Any) -> np.ndarray:
    """Returns values as a contiguous numpy array."""
    return np.ascontiguousarray(_numpy(values))


def _keys(keys: Any) -> np.ndarray:
    """Returns the keys as an array of uint64. Raises an error if they are not integers from 0 to MAX_KEY, or have more than
    one dimension.
    """
    if hasattr(keys, "dtype"):
        array = _array(keys)
        if array.dtype.kind not in "iu":
            raise ValueError(f"got keys of type {array.dtype}, want integers")
    else:
        array = np.array([operator.index(key) for key in keys], dtype=object)
    if array.ndim != 1:
        raise ValueError(f"got keys of shape {array.shape}, want one dimension")
    if array.dtype.kind != "u" and array.size and not 0 <= int(array.min()) <= int(array.max()) <= MAX_KEY:
        raise ValueError(f"got keys from {array.min()} to {array.max()}, want 0 to {MAX_KEY}")
    return array.astype(np.uint64, copy=False)


def _number(dtype: str) -> int:
    """Returns the number of an element type. Raises ValueError if values cannot have it."""
    types = [name for name in _library.DTYPES if name != "bool"]
    if dtype not in types:
        raise ValueError(f"got the element type {dtype!r}, want one of {', '.join(types)}")
    return _library.DTYPES[dtype][0]


class Request:
    """A push or pull in flight. If the program drops a push without a wait, its error is printed when the node has left,
    unless ``clock`` has raised an error since.
    """

    def __init__(self, exchange: _library.Exchange, arrays: Any, results: np.ndarray | None, out: Any) -> None:
        self._arrays, self._results, self._out = arrays, results, out
        self._lock = threading.RLock()  # held by a thread that waits
        self._error: Exception | None = None
        self._handle = _library.Handle()
        _reap()
        status = PENDING
        while status == PENDING:  # too many requests are not answered
            status = waiting.hvd_ps_exchange(exchange, self._handle)
        check(status)

    def done(self) -> bool:
        """Returns whether the request has completed or failed. It does not block."""
        done = ctypes.c_int32()
        return not self._handle or quick.hvd_poll(self._handle.value, ctypes.byref(done)) != SUCCESS or done.value != 0

    def wait(self) -> Any:
        """Waits until the request has completed. Returns the pulled values: ``out``, or a new numpy array. A push
        returns None. Only the first call writes to ``out``. Raises the error of the request. If a signal handler ends
        the wait with an exception, wait can be called again.
        """
        with self._lock:
            while self._handle:
                status = waiting.hvd_finish(self._handle.value, SLICE, None)
                if status == PENDING:
                    continue
                # With NO_HANDLE, the exception of a signal handler has followed an earlier hvd_finish that succeeded, or
                # the release.
                if status not in (SUCCESS, NO_HANDLE):
                    self._error = _library.error(status)
                    quick.hvd_release(self._handle.value)
                self._handle, self._arrays = _library.Handle(), None
            if self._error is not None:
                raise self._error
            if self._out is None:
                return self._results
            if self._results is not None:  # only once, because the program may change out later
                target = _numpy(self._out)
                target[...] = self._results.reshape(target.shape)
                self._results = None
            return self._out

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle and not sys.is_finalizing():
            _dropped.append((handle.value, self._arrays))


_dropped: collections.deque[tuple[int, Any]] = collections.deque()
"""The handles of requests that the program has dropped in flight, and their arrays. Finalizers may append, without a lock.
"""

_failed: dict[str, int] = {}
"""The errors of dropped pushes, at most _MOST_FAILED different ones, with the number of pushes that had each. Errors before
one that clock has raised are not in it.
"""

_MOST_FAILED = 16


def _reap(seconds: float | ctypes.c_double = 0.0) -> None:
    """Forgets the dropped requests that are done. It waits so many seconds for each, and notes the errors of pushes."""
    for _ in range(len(_dropped)):
        try:
            handle, arrays = _dropped.popleft()
        except IndexError:
            return  # another thread has taken the last one
        status = (waiting if seconds else quick).hvd_wait(handle, seconds, None)
        if status == PENDING:
            _dropped.append((handle, arrays))
        elif status not in (SUCCESS, NO_HANDLE) and arrays[1] is not None:
            text = str(_library.error(status))
            if text in _failed or len(_failed) < _MOST_FAILED:
                _failed[text] = _failed.get(text, 0) + 1


def _report() -> None:
    """Prints the errors of dropped pushes, of which the program has not learned. The node has left the job."""
    _reap(SLICE)
    for text, count in list(_failed.items()):
        what = "a push failed and the program did not wait for it"
        if count > 1:
            what = f"{count} pushes failed and the program did not wait for them"
        print(f"gohvd: {what}: {text}", file=sys.stderr)
    _failed.clear()


class Worker:
    """Pushes values of an app to the servers, and pulls values from them."""

    def __init__(self, app: int, dtype: str) -> None:
        self._app = app
        self._number = _number(dtype)
        self._dtype = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)

    def push(self, keys: Any, values: Any, command: int = 0, priority: int = 0) -> Request:
        """Sends values to the servers. Each key has the same number of values. The values are copied before push
        returns.
        """
        return self._exchange(keys, values, None, 0, command, priority)

    def pull(self, keys: Any, width: int = 1, out: Any = None, priority: int = 0) -> Request:
        """Gets the values of the keys, width for each. If out is given, wait writes them there: to a numpy array or to a
        torch tensor on the CPU.
        """
        return self._exchange(keys, None, out, width, 0, priority)

    def pushpull(self, keys: Any, values: Any, out: Any = None, command: int = 0, priority: int = 0) -> Request:
        """Sends values to the servers, and then gets the values of the same keys."""
        keys = _keys(keys)
        width = _array(values).size // max(len(keys), 1)
        return self._exchange(keys, values, out, width, command, priority)

    def _exchange(self, keys: Any, values: Any, out: Any, width: int, command: int, priority: int) -> Request:
        key_array = np.array(_keys(keys), order="C")
        value_array = results = None
        if values is not None:
            array = _array(values)
            if array.dtype != self._dtype:
                raise ValueError(f"push: got values of type {array.dtype}, want {self._dtype}")
            value_array = np.array(array, order="C")
        if width:
            count = width * len(key_array)
            if out is not None:
                self._check_out(out, count)
            results = np.empty(count, self._dtype)
        x = _library.Exchange(ctypes.sizeof(_library.Exchange), self._app, self._number)
        x.flags = _library.IN_SLICES
        x.keys, x.num_keys = key_array.ctypes.data, len(key_array)
        if value_array is not None:
            x.flags |= _library.PUSH
            x.values, x.values_bytes = value_array.ctypes.data, value_array.nbytes
        if results is not None:
            x.flags |= _library.PULL
            x.results, x.results_bytes = results.ctypes.data, results.nbytes
        x.command, x.priority = command, priority
        return Request(x, (key_array, value_array, results), results, out)

    def _check_out(self, out: Any, count: int) -> None:
        """Raises ValueError if count pulled values cannot be written to out."""
        device = str(getattr(out, "device", "cpu"))
        if device != "cpu":
            raise ValueError(f"pull: got out on device {device}, want an array or a tensor on the CPU")
        target = _numpy(out)
        if target.size != count or target.dtype != self._dtype:
            raise ValueError(
                f"pull: got out with {target.size} values of type {target.dtype}, want {count} of type {self._dtype}"
            )
        if not target.flags.writeable:
            raise ValueError("pull: got out that is read-only, want an array that can be written")


class Node:
    """This process's place in the job. With ``with``, the node leaves the job at the end of the block. If an exception
    ends the block, or the process ends without ``finalize``, the other nodes learn at once that this one has failed.
    """

    def __init__(self, node: _library.Node) -> None:
        self.role = _ROLES[node.role]
        """The role: scheduler, server or worker."""
        self.rank = node.rank
        """The rank among the nodes of the role."""
        self.num_workers = node.num_workers
        self.num_servers = node.num_servers

    def serve(self, app: int, dtype: str, handler: str = "sum", *parameters: float) -> None:
        """Makes this server keep the values of an app. handler and parameters are sum, assign, sgd(rate),
        momentum(rate, momentum), adagrad(rate, epsilon) or adam(rate, beta1, beta2, epsilon).
        """
        numbers = (ctypes.c_double * len(parameters))(*parameters)
        check(waiting.hvd_ps_serve(app, _number(dtype), _library.whole(handler.encode()), numbers, len(parameters)))

    def worker(self, app: int, dtype: str) -> Worker:
        """Returns the worker of an app. The element type must be that of the servers."""
        return Worker(app, dtype)

    def clock(self) -> None:
        """Ends an iteration of this worker, and waits as HVD_STALENESS says. Raises the error of a failed push."""
        try:
            _library.call(quick.hvd_ps_clock)
        except HorovodInternalError:
            _reap()
            _failed.clear()
            raise

    def barrier(self, group: int = WORKERS) -> None:
        """Waits until all nodes of the group have called barrier."""
        _library.call(quick.hvd_ps_barrier, group)

    def finalize(self, barrier: bool = True) -> None:
        """Leaves the job. Unless barrier is False, waits until all nodes have called finalize."""
        try:
            _library.call(quick.hvd_ps_finalize, barrier)
        finally:
            _report()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finalize()
        else:
            _fail(_exit.raised(error))


def _fail(reason: str) -> None:
    """Leaves the job as a node that has failed. Outside of a job it does nothing."""
    try:
        _library.call(quick.hvd_ps_fail, reason.encode())
    except (HorovodInternalError, ValueError):
        return  # this process is no node, or was forked from one, or its sidecar is gone
    _report()


def _at_exit() -> None:
    _fail(_exit.of_exit()[0] or "its program has ended without finalize")


@functools.lru_cache(maxsize=None)
def _register_exit() -> None:
    atexit.register(_at_exit)


def start(settings: dict[str, str] | None = None) -> Node:
    """Joins the job that the environment describes (DMLC_ROLE and others), and waits for all other nodes. settings
    override the environment. If an exception, such as that of Ctrl-C, has ended an earlier start with the same settings,
    this one goes on with it.
    """
    given = settings or {}
    _register_exit()
    _library.call(quick.hvd_ps_start, _library.settings(given), len(given))
    node = _library.Node(ctypes.sizeof(_library.Node))
    check(quick.hvd_ps_node(node))
    return Node(node)
