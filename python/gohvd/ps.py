"""The parameter server (docs/ps.md): workers push values to servers and pull values from them, each at its own pace.

Every process of the job calls ``start``. ``hvdrun --servers 2 --workers 4 python3 program.py`` starts all of them::

    with gohvd.ps.start() as node:
        if node.role == "server":
            node.serve(0, "float32", "adagrad", 0.1, 1e-8)
        if node.role == "worker":
            weights = node.worker(0, "float32")
            weights.push(keys, gradients).wait()
            values = weights.pull(keys).wait()

The node runs in the sidecar ``hvdd``. Keys and values go to it through shared memory. Keys are arrays of 64-bit
integers, sorted and unique. Values are numpy arrays or torch tensors of the worker's element type. Numpy arrays of
bfloat16 have the type uint16.
"""

from __future__ import annotations

import operator
from types import TracebackType
from typing import Any, Dict, Optional, Type

import numpy as np

from . import _wire as wire
from ._client import Client, Pending
from .exceptions import HorovodInternalError

SCHEDULER, SERVERS, WORKERS, ALL = 1, 2, 4, 7
"""The groups of nodes. A sum of groups is their union."""

INIT = -1
"""The command with which a push sets values, whatever the handler does with other pushes."""

MAX_KEY = (1 << 64) - 2
"""The greatest key."""


class _Memory:
    """Memory that the sidecar has mapped. It is given back when the object is gone."""

    def __init__(self, client: Client, nbytes: int) -> None:
        self._arena = client.arena
        self._extent = client.take(nbytes)
        chunk, offset, _ = self._extent
        self.place: wire.Place = (chunk.number, offset, nbytes)
        self.array = np.frombuffer(chunk.view, dtype=np.uint8, count=nbytes, offset=offset)

    def __del__(self) -> None:
        if hasattr(self, "_extent"):
            self._arena.give(self._extent)


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
    """Returns the keys as an array of uint64. Raises an error if they are not integers from 0 to MAX_KEY."""
    if hasattr(keys, "dtype"):
        array = _array(keys)
        if array.dtype.kind not in "iu":
            raise ValueError(f"got keys of type {array.dtype}, want integers")
    else:
        array = np.array([operator.index(key) for key in keys], dtype=object)
    if array.dtype.kind != "u" and array.size and not 0 <= int(array.min()) <= int(array.max()) <= MAX_KEY:
        raise ValueError(f"got keys from {array.min()} to {array.max()}, want 0 to {MAX_KEY}")
    return array.astype(np.uint64, copy=False)


class Request:
    """A push or pull in flight."""

    def __init__(self, client: Client, pending: Pending, results: Optional[_Memory], dtype: Any, out: Any) -> None:
        self._client, self._pending, self._results = client, pending, results
        self._dtype, self._out = dtype, out

    def done(self) -> bool:
        """Returns whether the request has completed or failed. It does not block."""
        return self._client.poll(self._pending)

    def wait(self) -> Any:
        """Waits until the request has completed. Returns the pulled values: ``out``, or a new numpy array. A push
        returns None. Raises the error of the request.
        """
        self._client.wait(self._pending)
        if self._results is None:
            return None
        values = self._results.array.view(self._dtype)
        if self._out is None:
            return values.copy()
        target = _numpy(self._out)
        target[...] = values.reshape(target.shape)
        return self._out


class Worker:
    """Pushes values of an app to the servers, and pulls values from them."""

    def __init__(self, client: Client, app: int, dtype: str) -> None:
        self._client, self._app = client, app
        self._number, self._size = wire.DTYPES[dtype]
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
        width = _array(values).size // max(len(keys), 1)
        return self._exchange(keys, values, out, width, command, priority)

    def _exchange(self, keys: Any, values: Any, out: Any, width: int, command: int, priority: int) -> Request:
        key_memory = self._copy(_keys(keys))
        value_memory = results = None
        if values is not None:
            array = _array(values)
            if array.dtype != self._dtype:
                raise ValueError(f"push: got values of type {array.dtype}, want {self._dtype}")
            value_memory = self._copy(array)
        if width:
            count = width * len(keys)
            if out is not None and (tuple(out.shape) and np.prod(out.shape) != count or _array(out).dtype != self._dtype):
                raise ValueError(f"pull: got out with {np.prod(out.shape)} values, want {count} of type {self._dtype}")
            results = _Memory(self._client, count * self._size)
        places = [None if m is None else m.place for m in (key_memory, value_memory, results)]
        pending = self._client.request(
            lambda i: wire.exchange(i, self._app, self._number, places, command, priority)
        )
        pending.keep = (key_memory, value_memory, results)
        return Request(self._client, pending, results, self._dtype, out)

    def _copy(self, array: np.ndarray) -> _Memory:
        m = _Memory(self._client, array.nbytes)
        m.array[...] = array.reshape(-1).view(np.uint8)
        return m


class Node:
    """This process's place in the job. With ``with``, the node leaves the job at the end of the block."""

    def __init__(self, client: Client, node: wire.Node) -> None:
        self._client = client
        self.role = node.role
        """The role: scheduler, server or worker."""
        self.rank = node.rank
        """The rank among the nodes of the role."""
        self.num_workers = node.num_workers
        self.num_servers = node.num_servers

    def serve(self, app: int, dtype: str, handler: str = "sum", *parameters: float) -> None:
        """Makes this server keep the values of an app. handler and parameters are sum, assign, sgd(rate),
        momentum(rate, momentum), adagrad(rate, epsilon) or adam(rate, beta1, beta2, epsilon).
        """
        number = wire.DTYPES[dtype][0]
        self._client.call(lambda i: wire.serve(i, app, number, handler, parameters))

    def worker(self, app: int, dtype: str) -> Worker:
        """Returns the worker of an app. The element type must be that of the servers."""
        return Worker(self._client, app, dtype)

    def clock(self) -> None:
        """Ends an iteration of this worker, and waits as HVD_STALENESS says. Raises the error of a failed push."""
        self._client.call(wire.clock)

    def barrier(self, group: int = WORKERS) -> None:
        """Waits until all nodes of the group have called barrier."""
        self._client.call(lambda i: wire.node_barrier(i, group))

    def finalize(self, barrier: bool = True) -> None:
        """Leaves the job. Unless barrier is False, waits until all nodes have called finalize."""
        try:
            self._client.call(lambda i: wire.finalize(i, barrier))
        finally:
            self._client.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self._client.close()  # the sidecar ends, and the other nodes learn that this one has failed


def start(settings: Optional[Dict[str, str]] = None) -> Node:
    """Joins the job that the environment describes (DMLC_ROLE and others), and waits for all other nodes. settings
    override the environment.
    """
    client = Client()
    try:
        reply = client.call(lambda i: wire.start_node(i, settings or {}))
        if reply.node is None:
            raise HorovodInternalError("start: the sidecar's answer does not describe the node")
        return Node(client, reply.node)
    except BaseException:
        client.close()
        raise
