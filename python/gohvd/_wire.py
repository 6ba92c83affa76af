"""Encodes and decodes the messages between client and sidecar, without a protobuf library. docs/sidecar.md and
sidecar.proto define the messages.

An encoder returns the bytes of a ``Request`` without the length prefix, which ``frame`` adds. ``decode_reply`` decodes
a ``Reply`` and checks every length against the available bytes. It skips unknown fields, as protobuf requires, and
raises ``WireError`` if the data is not valid.
"""

from __future__ import annotations

import struct
from typing import Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

MAX_FRAME_BYTES = 16 << 20

Buffer = Union[bytes, bytearray, memoryview]
Place = Tuple[int, int, int]
"""A range of memory: the number of the arena, the offset in the arena, and the size in bytes."""


class WireError(Exception):
    """Raised if data from the sidecar is not a valid message."""


# The kinds of operations.
ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, JOIN = range(1, 8)
REDUCE, GATHER, SCATTER = range(10, 13)
SEND, RECV = range(14, 16)

ANY_SOURCE = -1
"""The peer of a recv that takes a message of any rank."""

KIND_NAMES = {
    ALLREDUCE: "allreduce",
    ALLGATHER: "allgather",
    BROADCAST: "broadcast",
    ALLTOALL: "alltoall",
    REDUCESCATTER: "reducescatter",
    BARRIER: "barrier",
    JOIN: "join",
    REDUCE: "reduce",
    GATHER: "gather",
    SCATTER: "scatter",
    SEND: "send",
    RECV: "recv",
}

# The number and the size in bytes of each element type. The keys are the names of the types in numpy and torch.
DTYPES: Dict[str, Tuple[int, int]] = {
    "uint8": (1, 1),
    "int8": (2, 1),
    "uint16": (3, 2),
    "int16": (4, 2),
    "int32": (5, 4),
    "int64": (6, 8),
    "float16": (7, 2),
    "bfloat16": (8, 2),
    "float32": (9, 4),
    "float64": (10, 8),
    "bool": (11, 1),
}

# The field numbers of the oneof Request.what.
_INIT, _SHUTDOWN, _ARENA, _DROP_ARENA, _RING, _PREPARE = range(2, 8)
_FREE, _ADD_SET, _REMOVE_SET, _STATUS, _BYE, _START_TIMELINE, _STOP_TIMELINE, _NEW_UNIQUE_ID = range(9, 17)
_START_NODE, _SERVE, _EXCHANGE, _CLOCK, _NODE_BARRIER, _FINALIZE, _DEVICE_ARENA = range(17, 24)


def varint(n: int) -> bytes:
    """Returns n as a varint. n must be from 0 to 2^64-1."""
    if n < 0x80:
        return bytes((n,))
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def frame(message: bytes) -> bytes:
    """Returns a message with its length prefix. Raises ValueError if the message is too long or empty. It must not be
    empty, because an empty frame is a doorbell.
    """
    if not 0 < len(message) <= MAX_FRAME_BYTES:
        raise ValueError(f"got a frame of {len(message)} bytes, want 1 to {MAX_FRAME_BYTES}")
    return varint(len(message)) + message


def _uint(number: int, value: int) -> bytes:
    """Returns a field of type uint32, uint64, int32, int64 or bool. Returns no bytes if the value is 0. A negative
    number takes ten bytes.
    """
    return varint(number << 3) + varint(value & 0xFFFFFFFFFFFFFFFF) if value else b""


def _double(number: int, value: float) -> bytes:
    """Returns a field of type optional double. The field is present even if the value is 0."""
    return varint(number << 3 | 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    """Returns a field that is a message, a string or packed numbers. The field is present even if the value is empty.
    """
    return varint(number << 3 | 2) + varint(len(value)) + value


def _packed(number: int, values: Iterable[int]) -> bytes:
    body = b"".join([varint(v & 0xFFFFFFFFFFFFFFFF) for v in values])
    return _bytes(number, body) if body else b""


def _string(number: int, value: str) -> bytes:
    return _bytes(number, value.encode()) if value else b""


def _request(ident: int, number: int, body: bytes = b"") -> bytes:
    return b"\x08" + varint(ident) + _bytes(number, body)


def init(ident: int, settings: Dict[str, str], process_sets: Sequence[Sequence[int]]) -> bytes:
    return _request(ident, _INIT, _settings(settings) + b"".join([_bytes(2, _packed(1, ranks)) for ranks in process_sets]))


def _settings(settings: Dict[str, str]) -> bytes:
    return b"".join([_bytes(1, _string(1, k) + _string(2, v)) for k, v in sorted(settings.items())])


def new_unique_id(ident: int, settings: Dict[str, str]) -> bytes:
    return _request(ident, _NEW_UNIQUE_ID, _settings(settings))


def start_node(ident: int, settings: Dict[str, str]) -> bytes:
    return _request(ident, _START_NODE, _settings(settings))


def serve(ident: int, app: int, dtype: int, handler: str, parameters: Sequence[float]) -> bytes:
    body = _uint(1, app) + _uint(2, dtype) + _string(3, handler)
    return _request(ident, _SERVE, body + _bytes(4, struct.pack(f"<{len(parameters)}d", *parameters)))


def exchange(
    ident: int, app: int, dtype: int, places: Sequence[Optional[Place]], command: int, priority: int
) -> bytes:
    """Encodes a push or pull. places are those of the keys, of the values to push and of the pulled values."""
    keys, values, results = [b"" if p is None else _place(p) for p in places]
    body = _uint(1, app) + _uint(2, dtype) + _bytes(3, keys)
    body += _uint(4, int(places[1] is not None)) + _uint(5, int(places[2] is not None))
    body += _bytes(6, values) + _bytes(7, results)
    return _request(ident, _EXCHANGE, body + _uint(8, command) + _uint(9, priority))


def clock(ident: int) -> bytes:
    return _request(ident, _CLOCK)


def node_barrier(ident: int, group: int) -> bytes:
    return _request(ident, _NODE_BARRIER, _uint(1, group))


def finalize(ident: int, barrier: bool) -> bytes:
    return _request(ident, _FINALIZE, _uint(1, int(barrier)))


def shutdown(ident: int, reason: str = "", failed: bool = False) -> bytes:
    return _request(ident, _SHUTDOWN, _string(1, reason) + _uint(2, int(failed)))


def arena(ident: int, number: int, size: int) -> bytes:
    return _request(ident, _ARENA, _uint(1, number) + _uint(2, size))


def device_arena(
    ident: int, number: int, bus_id: str, size: int = 0, *, memory: bytes = b"", event: bytes = b""
) -> bytes:
    """Encodes a DeviceArena with the handle of an allocation of size bytes, or with the handle of an event."""
    body = _uint(1, number) + _string(2, bus_id)
    return _request(ident, _DEVICE_ARENA, body + (_bytes(5, event) if event else _bytes(3, memory) + _uint(4, size)))


def drop_arena(ident: int, number: int) -> bytes:
    return _request(ident, _DROP_ARENA, _uint(1, number))


def ring(ident: int, size: int) -> bytes:
    return _request(ident, _RING, _uint(1, size))


def prepare(ident: int, slot: int, operation: bytes) -> bytes:
    return _request(ident, _PREPARE, _uint(1, slot) + _bytes(2, operation))


def free(ident: int, arena_number: int, offset: int) -> bytes:
    return _request(ident, _FREE, _uint(1, arena_number) + _uint(2, offset))


def add_process_set(
    ident: int, ranks: Sequence[int], members_only: bool = False, name: str = "", timeout: float = 0.0
) -> bytes:
    body = _packed(1, ranks) + _timeout(2, timeout) + _uint(3, int(members_only)) + _string(4, name)
    return _request(ident, _ADD_SET, body)


def remove_process_set(ident: int, set_id: int, timeout: float = 0.0) -> bytes:
    return _request(ident, _REMOVE_SET, _uint(1, set_id) + _timeout(2, timeout))


def start_timeline(ident: int, path: str, mark_cycles: bool) -> bytes:
    return _request(ident, _START_TIMELINE, _string(1, path) + _uint(2, mark_cycles))


def stop_timeline(ident: int) -> bytes:
    return _request(ident, _STOP_TIMELINE)


def status(ident: int) -> bytes:
    return _request(ident, _STATUS)


def bye(ident: int) -> bytes:
    return _request(ident, _BYE)


def operation_name(name: str) -> bytes:
    """Returns the name field of an ``Operation``. It may be put before or after the other fields."""
    return _string(2, name)


def operation(
    kind: int,
    *,
    dtype: int = 0,
    reduce_op: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root_rank: int = 0,
    process_set: int = 0,
    timeout: float = 0.0,
    grouped: bool = False,
    tensors: Sequence[Tuple[Sequence[int], Optional[Place], Optional[Place], int]] = (),
    splits: Sequence[int] = (),
    peer: int = 0,
    tag: int = 0,
    event: int = 0,
    stream: int = 0,
) -> bytes:
    """Returns an ``Operation`` without its name.

    Each tensor is a tuple of shape, input, output and element type. Input and output may be None. If the element type
    is 0 or equal to dtype, the message does not contain it. The timeout is in seconds; 0 means the timeout of the
    settings. event is the number of an event if the tensors are on a CUDA device, and stream is a number of the stream on
    which it is recorded, or 0.
    """
    parts = [
        _uint(1, kind),
        _uint(3, dtype),
        _uint(4, reduce_op),
        _scale(5, prescale),
        _scale(6, postscale),
        _uint(7, root_rank),
        _uint(8, process_set),
        _timeout(12, timeout),
        _uint(13, grouped),
    ]
    for shape, source, target, its_dtype in tensors:
        body = _packed(1, shape)
        if source is not None:
            body += _bytes(2, _place(source))
        if target is not None:
            body += _bytes(3, _place(target))
        if its_dtype != dtype:
            body += _uint(4, its_dtype)
        parts.append(_bytes(14, body))
    parts += [_packed(15, splits), _uint(16, peer), _uint(17, tag), _uint(18, event), _uint(19, stream)]
    return b"".join(parts)


def _timeout(number: int, seconds: float) -> bytes:
    """Returns the field for a timeout. Returns no bytes if it is 0, which means the timeout of the settings."""
    return _double(number, seconds) if seconds else b""


def _scale(number: int, factor: float) -> bytes:
    """Returns the field for a factor. Returns no bytes if the factor is 1."""
    return b"" if factor == 1.0 else _double(number, factor)


def _place(place: Place) -> bytes:
    return _uint(1, place[0]) + _uint(2, place[1]) + _uint(3, place[2])


# Decoding.


def take_varint(data: Buffer, at: int, end: int) -> Tuple[int, int]:
    """Returns the varint at the beginning of data[at:end], and the position after the varint. If the varint is not
    complete, the position is -1.
    """
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise WireError("got a varint of more than 64 bits")
            return value, at
        shift += 7
        if shift >= 70:
            raise WireError("got a varint of more than 10 bytes")
    return 0, -1


def _varint_at(data: Buffer, at: int, end: int) -> Tuple[int, int]:
    value, at = take_varint(data, at, end)
    if at < 0:
        raise WireError("the frame ends within a varint")
    return value, at


def _fields(data: Buffer, at: int, end: int) -> Iterator[Tuple[int, int, int, int]]:
    """Yields the fields of data[at:end] as tuples of four numbers: field number, wire type, a and b. If the field is a
    varint, a is its value and b is 0. Otherwise the bytes of the field are data[a:b].
    """
    while at < end:
        key, at = _varint_at(data, at, end)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint_at(data, at, end)
            yield number, wire, value, 0
            continue
        if wire == 2:
            length, at = _varint_at(data, at, end)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise WireError(f"field {number} has unknown wire type {wire}")
        if length > end - at:
            raise WireError(f"field {number} has {length} bytes, but only {end - at} are left")
        yield number, wire, at, at + length
        at += length


def _signed(value: int) -> int:
    """Returns the value of a varint as an int32 or int64. Both types are encoded as 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _ints(into: List[int], data: Buffer, wire: int, a: int, b: int) -> None:
    """Appends the numbers of a repeated field to a list. A packed field has any number of them, and any other field has
    one.
    """
    if wire == 0:
        into.append(_signed(a))
        return
    if wire != 2:
        raise WireError(f"got a repeated number with wire type {wire}, want 0 or 2")
    while a < b:
        value, a = _varint_at(data, a, b)
        into.append(_signed(value))


def _text(data: Buffer, a: int, b: int) -> str:
    return bytes(data[a:b]).decode("utf-8", "replace")


class Error:
    """The reason why a request failed or why the job is over."""

    __slots__ = ("kind", "text", "operation", "tensor", "ranks")

    def __init__(self) -> None:
        self.kind = 0
        self.text = self.operation = self.tensor = ""
        self.ranks: List[int] = []


class Ready:
    """This rank's place in the job: its rank, the size and so on."""

    __slots__ = (
        "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "epoch", "process_sets", "homogeneous",
        "devices",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rank = self.size = self.local_rank = self.local_size = self.cross_rank = self.cross_size = self.epoch = 0
        self.process_sets: List[Tuple[int, List[int]]] = []
        self.homogeneous = False
        self.devices = False
        """Whether operations on tensors on CUDA devices are possible."""


class Completion:
    """The outcome of an operation. Each element of results is a pair of place and shape."""

    __slots__ = ("results", "received_splits", "last_joined", "source")

    def __init__(self) -> None:
        self.results: List[Tuple[Place, Tuple[int, ...]]] = []
        self.received_splits: List[int] = []
        self.last_joined = self.source = 0


class Status:
    """The status of the sidecar."""

    __slots__ = ("version", "pid", "state", "clients", "operations", "in_flight")

    def __init__(self) -> None:
        self.version = self.state = ""
        self.pid = self.clients = self.operations = self.in_flight = 0


class Node:
    """The place of a node of a parameter server."""

    __slots__ = ("role", "rank", "num_workers", "num_servers")

    def __init__(self) -> None:
        self.role = ""
        self.rank = self.num_workers = self.num_servers = 0


class Reply:
    """A message from the sidecar. At most one of the attributes ready, completion, process_set, status, unique_id,
    node, arena, dropped and ended is set.
    """

    __slots__ = (
        "id", "error", "ready", "completion", "process_set", "status", "unique_id", "node", "arena", "dropped", "ended"
    )  # fmt: skip

    def __init__(self) -> None:
        self.id = 0
        self.error: Optional[Error] = None
        self.ready: Optional[Ready] = None
        self.completion: Optional[Completion] = None
        self.process_set: Optional[Tuple[int, List[int]]] = None
        self.status: Optional[Status] = None
        self.unique_id = ""
        self.node: Optional[Node] = None
        self.arena: Optional[Tuple[int, int]] = None
        """The number and the size in bytes of a new arena in the sidecar's memory."""
        self.dropped = 0
        """The number of an arena in the sidecar's memory that no longer exists. It is 0 in other messages."""
        self.ended = False
        """Whether the job is over. error says why, unless the job was shut down."""


def decode_reply(data: Buffer, at: int, end: int) -> Reply:
    """Returns the Reply that is encoded in data[at:end]."""
    r = Reply()
    for number, wire, a, b in _fields(data, at, end):
        if number == 1 and wire == 0:
            r.id = a
        elif wire != 2:
            continue
        elif number == 2:
            r.error = _error(data, a, b)
        elif number == 3:
            r.ready = _ready(data, a, b)
        elif number == 4:
            r.completion = _completion(data, a, b)
        elif number == 5:
            r.process_set = _process_set(data, a, b)
        elif number == 6:
            r.status = _status(data, a, b)
        elif number == 7:
            place = _numbers(data, a, b)
            r.arena = place.get(1, 0), place.get(2, 0)
        elif number == 8:
            r.ended = True
            for n, w, c, d in _fields(data, a, b):
                if n == 1 and w == 2:
                    r.error = _error(data, c, d)
        elif number == 9:
            r.dropped = _numbers(data, a, b).get(1, 0)
        elif number == 10:
            for n, w, c, d in _fields(data, a, b):
                if n == 1 and w == 2:
                    r.unique_id = _text(data, c, d)
        elif number == 11:
            r.node = _node(data, a, b)
    return r


def _node(data: Buffer, at: int, end: int) -> Node:
    n = Node()
    for number, wire, a, b in _fields(data, at, end):
        if number == 1 and wire == 2:
            n.role = _text(data, a, b)
        elif number == 2 and wire == 0:
            n.rank = _signed(a)
        elif number == 3 and wire == 0:
            n.num_workers = _signed(a)
        elif number == 4 and wire == 0:
            n.num_servers = _signed(a)
    return n


def _numbers(data: Buffer, at: int, end: int) -> Dict[int, int]:
    """Returns the varint fields of a message. The keys are the field numbers."""
    return {number: a for number, wire, a, _ in _fields(data, at, end) if wire == 0}


def _error(data: Buffer, at: int, end: int) -> Error:
    e = Error()
    for number, wire, a, b in _fields(data, at, end):
        if number == 1 and wire == 0:
            e.kind = a
        elif number == 5:
            _ints(e.ranks, data, wire, a, b)
        elif wire != 2:
            continue
        elif number == 2:
            e.text = _text(data, a, b)
        elif number == 3:
            e.operation = _text(data, a, b)
        elif number == 4:
            e.tensor = _text(data, a, b)
    return e


def _ready(data: Buffer, at: int, end: int) -> Ready:
    r = Ready()
    names = {1: "rank", 2: "size", 3: "local_rank", 4: "local_size", 5: "cross_rank", 6: "cross_size", 7: "epoch"}
    for number, wire, a, b in _fields(data, at, end):
        if number == 8 and wire == 2:
            r.process_sets.append(_process_set(data, a, b))
        elif number == 9 and wire == 0:
            r.homogeneous = bool(a)
        elif number == 10 and wire == 0:
            r.devices = bool(a)
        elif number in names and wire == 0:
            setattr(r, names[number], _signed(a))
    return r


def _process_set(data: Buffer, at: int, end: int) -> Tuple[int, List[int]]:
    ident, ranks = 0, []  # type: int, List[int]
    for number, wire, a, b in _fields(data, at, end):
        if number == 1 and wire == 0:
            ident = _signed(a)
        elif number == 2:
            _ints(ranks, data, wire, a, b)
    return ident, ranks


def _completion(data: Buffer, at: int, end: int) -> Completion:
    c = Completion()
    for number, wire, a, b in _fields(data, at, end):
        if number == 1 and wire == 2:
            c.results.append(_result(data, a, b))
        elif number == 2:
            _ints(c.received_splits, data, wire, a, b)
        elif number == 3 and wire == 0:
            c.last_joined = _signed(a)
        elif number == 4 and wire == 0:
            c.source = _signed(a)
    return c


def _result(data: Buffer, at: int, end: int) -> Tuple[Place, Tuple[int, ...]]:
    place: Place = (0, 0, 0)
    shape: List[int] = []
    for number, wire, a, b in _fields(data, at, end):
        if number == 1 and wire == 2:
            n = _numbers(data, a, b)
            place = n.get(1, 0), n.get(2, 0), n.get(3, 0)
        elif number == 2:
            _ints(shape, data, wire, a, b)
    if any(d < 0 for d in shape):
        raise WireError(f"got a result with shape {shape}, want no negative dimension")
    return place, tuple(shape)


def _status(data: Buffer, at: int, end: int) -> Status:
    s = Status()
    names = {2: "pid", 4: "clients", 5: "operations", 6: "in_flight"}
    for number, wire, a, b in _fields(data, at, end):
        if number in names and wire == 0:
            setattr(s, names[number], a)
        elif number == 1 and wire == 2:
            s.version = _text(data, a, b)
        elif number == 3 and wire == 2:
            s.state = _text(data, a, b)
    return s
