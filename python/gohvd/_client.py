"""A connection to a sidecar, and the sidecar's process if this process started it. docs/sidecar.md describes the
protocol.

There is no thread that only reads. One of the threads that wait for operations is the *reader*, which reads the answers
for all of them. Each other thread waits until its own answer has arrived. If the reader finishes before that, one of
the waiting threads becomes the reader.

Invariants:

1. The reader holds ``_reader``. A thread that sends or submits holds ``_lock``. ``_lock`` may be taken while
   ``_reader`` is held. A thread that holds ``_lock`` may take ``_reader`` only by ``_reader.acquire(False)``, which
   does not wait. ``_mapping_lock`` is taken before both. No thread waits for an answer while it holds ``_lock``.
2. Data that was read is stored in ``_state`` before any Python code runs. It is removed from ``_state`` in steps that
   can be repeated. So no data is lost if a signal handler (Ctrl-C) raises an exception between two steps. The same
   holds for the data to send, which is in ``_outbox``.
3. A submission is in ``_pending`` before the sidecar can see it.
"""

from __future__ import annotations

import array
import collections
import fcntl
import functools
import itertools
import mmap
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple, Union

from . import _wire as wire
from ._arena import PAGE, Arena, Chunk, Extent
from ._cuda import Exports
from ._sidecar import GREETING_SECONDS, Child, connect, receive
from .exceptions import HorovodInternalError, MismatchError, NotInitializedError, PeerError, SidecarError

_GREETING = struct.pack(">4sI", b"GHVD", 2)
_EXIT_SECONDS = 15.0  # how long the sidecar may take to exit; it waits up to 10 s for other ranks

_MAX_IN_FLIGHT = 65536
_RING_ENTRIES = _MAX_IN_FLIGHT
_RING_BYTES = 4096 + 32 * _RING_ENTRIES
_MASK = _RING_ENTRIES - 1
# The indexes of the counters and flags in the ring's header, counted in words of 8 bytes.
_SUBMITTED, _TAKEN, _COMPLETED, _SEEN, _WANTED, _LOOKING = 64 // 8, 128 // 8, 192 // 8, 256 // 8, 320 // 8, 384 // 8
# The values of the word _LOOKING. _NOW means that the sidecar polls the ring. _SOON means that it looks at the ring
# within a millisecond. 0 means that it looks only after a doorbell.
_NOW, _SOON = 1, 2
# The values of the word _WANTED with which the sidecar sends no doorbell. _NEVER means that no thread waits. _POLLING
# means that a thread waits and polls the ring.
_NEVER, _POLLING = (1 << 64) - 1, (1 << 64) - 2
# How long a thread polls the ring before it sleeps, if it waits for the only operation in flight.
_POLL_SECONDS = 50e-6
_SLOTS = 131072
_MIN_NAMES = 4096

_DOORBELL = b"\0"
_READ_BYTES = 1 << 16
# Arguments of recvmsg. Each is in a tuple of one element, because _read passes the tuples to map.
_SIZES, _SPACES = (_READ_BYTES,), (socket.CMSG_SPACE(4 * 4),)
_WAITING = (int(socket.MSG_CMSG_CLOEXEC),)
_NOT_WAITING = (int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT),)
_SEND_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

_submission = struct.Struct("<QII").pack_into
_completion = struct.Struct("<QI").unpack_from


class Operation:
    """An encoded operation. It can be submitted any number of times, by the number of its slot.

    ``body`` is an encoded ``Operation`` of sidecar.proto. ``key`` consists of the process set and the name. Two
    operations that are in use must not have the same key.
    """

    __slots__ = ("body", "key", "label", "slot")

    def __init__(self, body: bytes, label: str, key: Optional[Tuple[int, str]] = None) -> None:
        self.body = body
        self.label = label
        """The kind and name of the operation, as error texts show them."""
        self.key = key
        self.slot = -1


class _OutgoingFrame:
    """A frame to send, and how much of it has been sent."""

    __slots__ = ("data", "fd", "sent")

    def __init__(self, message: bytes, fd: int = -1) -> None:
        self.data = memoryview(wire.frame(message))
        self.fd = fd
        self.sent: List[int] = []
        """The results of the system calls that sent the frame: the number of bytes that each of them sent."""


class Pending:
    """A request that was sent. When its answer arrives, done is set after all other attributes."""

    __slots__ = ("done", "held", "in_ring", "reply", "error", "keep")

    def __init__(self, held: bool = False, keep: object = None, in_ring: bool = False) -> None:
        self.done = False
        self.held = held
        """Whether the name stays in use after the request is done, until the program has learned that the request is
        done.
        """
        self.in_ring = in_ring
        """Whether the ring reports the completion of the request."""
        self.reply: Optional[wire.Reply] = None
        """The answer to the request. It is None if the request was an operation whose results are all in its outputs.
        """
        self.error: Optional[Callable[[], Exception]] = None
        self.keep = keep
        """An object to keep alive until the request is done, such as the memory that the sidecar works on."""

    def in_use(self) -> bool:
        """Returns whether the name of the request is still in use."""
        return self.held or not self.done


class AnyOf:
    """Stands for several pending requests in a wait. It is done when one of them is done or when there are none. Other
    threads may append requests during the wait.
    """

    in_ring = False

    def __init__(self, requests: List[Pending]) -> None:
        self.requests = requests

    @property
    def done(self) -> bool:
        return not self.requests or any([p.done for p in self.requests])


# The state of reading. Its elements are the data that is not fully parsed, the number of parsed bytes in it, the
# descriptors that no frame has named yet, the results of recvmsg, and the number of these results that have been added
# to the data. The tuple is only replaced as a whole.
_State = Tuple[bytes, int, Tuple[int, ...], List[Tuple[bytes, list, int, object]], int]


def to_exception(e: wire.Error) -> Exception:
    """Returns the exception for an error that the sidecar sent. For kinds 1 and 2 it is a ValueError, as in Horovod."""
    if e.kind in (1, 2):
        return ValueError(e.text)
    if e.kind == 3:
        return MismatchError(e.text)
    if e.kind == 4:
        return PeerError(e.text, e.ranks)
    if e.kind == 7:
        return NotInitializedError()
    return HorovodInternalError(e.text)


class Client:
    """A connection to a sidecar. The constructor returns when the connection is established, or raises an exception.
    After an error the connection is over, and every call raises this error.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reader = threading.RLock()
        # The lock of _cond. It is taken without Condition.__enter__ and __exit__, because a signal may arrive in
        # Condition.__exit__ before the lock is released there.
        self._mutex = threading.Lock()
        self._cond = threading.Condition(self._mutex)
        self._waiting: Set[int] = set()  # threads that wait while another thread reads
        self._fence = threading.Lock()  # _order uses this lock as a memory barrier; the lock protects no data
        # Whether the ring may have submissions about which the sidecar has not been notified.
        self._notification_deferred = False
        # The number of submissions that the sidecar had taken when it was last sent a doorbell for a submission.
        self._taken_at_doorbell = -1
        self._ids = itertools.count(1)
        self._pending: Dict[int, Pending] = {}
        # The last request with each name. If there are many names, the names that are not in use are dropped.
        self._names: Dict[Tuple[int, str], Pending] = {}
        self._most_names = _MIN_NAMES
        # The number of the answer and of the completion that were handled last. If a signal interrupts the handling,
        # the same answer or completion may be handled again.
        self._just_answered = self._just_completed = 0
        self._over: Optional[Callable[[], Exception]] = None
        self.job_over: Optional[Callable[[], Exception]] = None
        """Makes the error that has ended the job, if the sidecar has reported one. Init sets it to None."""
        self._maps: Dict[int, Tuple[mmap.mmap, memoryview]] = {}
        self._outbox: Deque[_OutgoingFrame] = collections.deque()
        self._discarded: Deque[wire.Place] = collections.deque()
        self._mapping_lock = threading.Lock()
        self._next_slot = 0
        self._free_slots: List[int] = []
        self._state: _State = (b"", 0, (), [], 0)
        self._child: Optional[Child] = None
        self.arena = Arena(self._drop_chunk)
        self.exports = Exports(self)
        address = os.environ.get("HVD_SIDECAR", "")
        if address:
            self._sock = connect(address)
            self._sidecar_name = f"the sidecar at {address}"
        else:
            self._child = Child()
            self._sock = self._child.sock
            self._sidecar_name = f"this process's sidecar (hvdd, process {self._child.process.pid})"
        self._recvmsg = self._sock.recvmsg
        _clients.add(self)
        try:
            self._greet()
            self._make_ring()
        except BaseException:
            self.close()
            raise

    # Connecting and closing.

    def _greet(self) -> None:
        self._sock.settimeout(GREETING_SECONDS)
        try:
            self._sock.sendall(_GREETING, socket.MSG_NOSIGNAL)
            got = receive(self._sock, len(_GREETING))
        except (OSError, EOFError) as e:
            self._fail(f"the sidecar did not answer the greeting: {e}")
            raise self._over_error() from e
        if got != _GREETING:
            self._fail(f"got greeting {got!r}, want {_GREETING!r}: the versions of the sidecar and this package may differ")
            raise self._over_error()
        self._sock.settimeout(None)

    def _make_ring(self) -> None:
        fd = os.memfd_create("gohvd ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, _RING_BYTES)
            self._ring = mmap.mmap(fd, _RING_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            struct.pack_into("<III", self._ring, 0, 0x52564847, 2, _RING_ENTRIES)
            # A memoryview of 8-byte items accesses each item by one memory access, not byte by byte.
            self._words = memoryview(self._ring).cast("Q")
            self._words[_WANTED] = _NEVER
            self.wait(self.request(lambda i: wire.ring(i, _RING_BYTES), fd))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the connection. If this process started the sidecar, the sidecar then exits, and close waits for its
        exit. A further call does nothing.
        """
        with self._lock:
            if self._over is None:
                try:
                    self._sock.send(wire.frame(wire.bye(next(self._ids))), _SEND_FLAGS)
                except OSError:
                    pass  # the sidecar has exited or does not read; the end of the connection replaces the bye
            self._end(lambda: SidecarError(f"{self._sidecar_name}: this process has closed the connection"))
        self._sock.close()
        self._maps = {}
        if self._child is not None:
            self._child.end(_EXIT_SECONDS)

    def _end(self, why: Callable[[], Exception]) -> None:
        """Closes the connection. All pending requests end with the error that the function why returns. The caller
        holds _lock.
        """
        if self._over is not None:
            return
        self._over = why
        try:
            # shutdown is called because another thread may be blocked in recvmsg. shutdown wakes that thread, close
            # does not.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        pending, self._pending = self._pending, {}
        self._names.clear()
        for p in pending.values():
            p.error = why
            p.done = True
        with self._mutex:
            self._cond.notify_all()

    def _fail(self, reason: str) -> None:
        """Ends the connection after the sidecar has exited or violated the protocol."""
        try:
            # shutdown is called before the lock is taken. The thread that holds the lock may be waiting for room in the
            # socket, and shutdown wakes this thread.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with self._lock:
            if self._over is not None:
                return
            # A sidecar that has closed the connection is about to exit. If this process started it, the exit status and
            # the log explain more than the reason does.
            child = self._child
            name = self._sidecar_name
            text = f"{name}: {reason}" if child is None else f"{name} {child.describe_exit(reason)}"
            self._end(lambda: SidecarError(text))

    def _over_error(self) -> Exception:
        assert self._over is not None
        return self._over()

    @property
    def over(self) -> bool:
        """Whether the connection is over. If it is, every call raises an error."""
        return self._over is not None

    @property
    def pid(self) -> int:
        """The process ID of the sidecar if this process started it, and 0 otherwise."""
        return self._child.process.pid if self._child is not None else 0

    def signal(self, number: int) -> None:
        """Sends a signal to the sidecar, if this process started it. A signal handler may call this method, because it
        takes no lock.
        """
        child = self._child
        if child is not None:
            child.signal(number)

    def after_fork(self) -> None:
        """Ends the connection in a forked process, because the connection belongs to the parent process."""
        self._lock = threading.RLock()
        self._reader = threading.RLock()
        self._mutex = threading.Lock()
        self._cond = threading.Condition(self._mutex)
        self._waiting = set()
        self._mapping_lock = threading.Lock()
        self._fence = threading.Lock()
        self.arena.after_fork()
        self.exports.after_fork()
        if self._child is not None:
            self._child.after_fork()
        # shutdown is not called, because it would end the parent's connection too.
        self._sock.close()
        if self._over is None:
            self._over = lambda: HorovodInternalError(
                f"process {os.getpid()} was forked from a rank of the job and is not a rank itself: "
                "only the process that called hvd.init can communicate"
            )
        for p in self._pending.values():
            p.error = self._over
            p.done = True
        self._pending = {}
        self._names = {}

    # Sending. The caller of these methods holds _lock.

    def _send_frame(self, message: bytes, fd: int = -1) -> None:
        self._outbox.append(_OutgoingFrame(message, fd))
        self._flush()

    def _flush(self) -> None:
        """Sends the frames in the outbox. If a signal interrupts it, the next call continues (see invariant 2)."""
        try:
            while self._outbox:
                frame = self._outbox[0]
                sent = sum(frame.sent)
                if sent == len(frame.data):
                    self._outbox.popleft()
                    continue
                data = frame.data[sent:]
                try:
                    if frame.fd >= 0 and not sent:
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [frame.fd]))]
                        frame.sent.extend(map(self._sock.sendmsg, ([data],), (rights,), (_SEND_FLAGS,)))
                    else:
                        frame.sent.extend(map(self._sock.send, (data,), (_SEND_FLAGS,)))
                except BlockingIOError:
                    self._make_room()
        except OSError as e:
            self._fail(f"sending failed: {e.strerror}")
            raise self._over_error() from None

    def _make_room(self) -> None:
        """Waits until the socket has room for more data. In the meantime it reads, because a sidecar stops reading if
        its replies are not read.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT | select.POLLIN)
        events = poller.poll()[0][1]
        if events & select.POLLOUT:
            return
        if not self._take_turn(_NOT_WAITING):
            poller.modify(self._sock, select.POLLOUT)
            poller.poll(10)  # another thread is the reader
        if self._over is not None:
            raise self._over_error()

    def notify_now(self) -> None:
        """Notifies the sidecar of submissions for which the notification was deferred, if there are any."""
        if self._notification_deferred:
            with self._lock:
                if self._over is None:
                    self._notify(_NOW)

    def _notify(self, when: int) -> None:
        """Makes sure that the sidecar looks at the ring. If the argument when is _NOW, the sidecar looks immediately.
        If it is _SOON, the sidecar looks within a millisecond, and while submissions follow each other closely no
        doorbell is sent. The caller holds _lock.
        """
        words = self._words
        # No submission is missed, because the sidecar sets _LOOKING before it looks at the ring. If the new value
        # requires doorbells from clients, the sidecar looks once more after it has set the value.
        self._order()
        state = words[_LOOKING]
        if state > when or not state:
            self._order()
            taken = words[_TAKEN]
            # If a sleeping sidecar has taken no submission since the last doorbell, it has not woken up yet and needs
            # no second doorbell.
            if taken != words[_SUBMITTED] and (state or taken != self._taken_at_doorbell):
                self._doorbell()
                # If a signal arrives before the assignment, the sidecar gets a second doorbell, which is harmless.
                self._taken_at_doorbell = taken
        self._notification_deferred = state == when == _SOON

    def _doorbell(self) -> None:
        if self._outbox:
            # The doorbell is needed even after frames were sent here. A signal may have interrupted an earlier _flush,
            # which sent these frames before the submission and left them in the outbox.
            self._flush()
        try:
            self._sock.send(_DOORBELL, _SEND_FLAGS)
        except BlockingIOError:
            pass  # the socket is full; the sidecar looks at the ring after each frame that it reads
        except OSError as e:
            self._fail(f"sending failed: {e.strerror}")
            raise self._over_error() from None

    def _order(self) -> None:
        """Is a memory barrier for the memory that is shared with the sidecar. Accesses before the call take effect
        before accesses after the call.

        Releasing a lock and acquiring it again has this effect on every machine that the sidecar is built for.
        """
        with self._fence:
            pass
        with self._fence:
            pass

    # Requests.

    def request(self, encode: Callable[[int], bytes], fd: int = -1) -> Pending:
        """Sends a request and returns it as a pending request. encode is called with the number of the request and
        returns the message. Unless fd is -1, this descriptor is sent with the message.
        """
        with self._lock:
            if self._over is not None:
                raise self._over_error()
            ident = next(self._ids)
            p = self._pending[ident] = Pending()
            self._send_frame(encode(ident), fd)
            return p

    def call(self, encode: Callable[[int], bytes], fd: int = -1) -> wire.Reply:
        """Sends a request, waits for the answer and returns it. If the answer is an error, raises the error."""
        p = self.request(encode, fd)
        self.wait(p)
        assert p.reply is not None
        return p.reply

    def submit(
        self, op: Operation, keep: object = None, later: bool = False, held: bool = False, call: int = 0,
        record: Optional[Callable[[], None]] = None,
    ) -> Pending:  # fmt: skip
        """Begins an operation and returns it as a pending request.

        If call is not 0, the sidecar appends this number to the name of the operation. The object keep is kept alive
        until the operation is done. The sidecar sees the submission within a millisecond. If the argument later is
        true, the sidecar may not see the submission before the next notify_now, submission or wait. The memory that op
        uses must not be touched until the operation is done. The argument record is called before the submission. The
        calls of all threads are in the order of the submissions.

        Raises ValueError if the name in op.key is in use. A name is in use until its operation is done. If held is
        true, the name stays in use until wait has ended or the attribute held of the returned request is set to False.
        """
        key = op.key
        p = Pending(held, keep, True)
        with self._lock:
            if self._over is not None:
                raise self._over_error()
            while self._discarded:
                self.free_result(self._discarded.popleft())
            if key is not None:
                self._check_name(key, op.label)
            if len(self._pending) >= _MAX_IN_FLIGHT - 1:
                self.poll_all()
                if len(self._pending) >= _MAX_IN_FLIGHT - 1:
                    raise ValueError(
                        f"{op.label}: {len(self._pending)} operations are in flight, want at most {_MAX_IN_FLIGHT - 1}; "
                        "synchronize some of them first"
                    )
            words = self._words
            n = words[_SUBMITTED]
            ident = next(self._ids)
            try:
                if op.slot < 0:
                    self._prepare(op)
                elif self._outbox:
                    self._flush()  # a signal may have interrupted _prepare and left the frame of the slot in the outbox
                self._pending[ident] = p
                if key is not None:
                    self._names[key] = p
                if record is not None:
                    record()
                _submission(self._ring, 4096 + 16 * (n & _MASK), ident, op.slot, call)
                self._order()
                self._notification_deferred = True
                words[_SUBMITTED] = n + 1
                if not later:
                    self._notify(_SOON)
            except BaseException:
                # A signal handler has raised an exception. If the sidecar cannot see the submission, the operation
                # counts as done. Otherwise the operation goes on, and its memory stays in use.
                if words[_SUBMITTED] == n:
                    self._pending.pop(ident, None)
                    p.done = True
                p.held = False  # the caller does not get p, so it cannot release the name
                raise
        return p

    def _check_name(self, key: Tuple[int, str], label: str) -> None:
        """Raises ValueError if the name is in use. The caller holds _lock."""
        p = self._names.get(key)
        if p is None:
            if len(self._names) >= self._most_names:
                for k, q in list(self._names.items()):
                    if not q.in_use():
                        self._names.pop(k, None)
                self._most_names = max(_MIN_NAMES, 2 * len(self._names))
            return
        if not p.held and not p.done:
            self.poll_all()  # the operation may be done without any thread having read its completion
        if p.in_use():
            raise ValueError(
                f"{label or key[1]}: a tensor with the same name as another tensor that is currently being processed, or whose "
                "handle was not synchronized; use another name, or synchronize first"
            )

    def release_names(self) -> None:
        """Frees the name of each operation as soon as the operation is done, even if the program does not wait for it.
        This method is called when the program leaves the job.
        """
        with self._lock:
            for p in list(self._names.values()):
                p.held = False

    def in_use(self, key: Tuple[int, str]) -> bool:
        """Returns whether the name is in use, according to the completions that have been read. It does not read any
        further completions.
        """
        p = self._names.get(key)
        return p is not None and p.in_use()

    def _prepare(self, op: Operation) -> None:
        """Assigns a free slot to op and sends the description of op with the number of the slot. The sidecar reads the
        description before any later submission. The caller holds _lock.
        """
        if self._free_slots:
            slot = self._free_slots.pop()  # not empty: no other thread takes slots while _lock is held
        elif self._next_slot < _SLOTS:
            slot = self._next_slot
            self._next_slot += 1
        else:
            raise ValueError(f"{op.label}: {_SLOTS} operations have not been synchronized; synchronize some of them first")
        self._outbox.append(_OutgoingFrame(wire.prepare(next(self._ids), slot, op.body)))
        op.slot = slot
        self._flush()

    def forget(self, op: Operation) -> None:
        """Frees the slot of op. op must not be in flight and must not be submitted again. A finalizer may call forget.
        """
        slot, op.slot = op.slot, -1
        if slot >= 0:
            self._free_slots.append(slot)

    def ensure_mapped(self, chunk: Chunk) -> None:
        """Makes sure that the sidecar has mapped the chunk, which belongs to the arena."""
        if chunk.mapped:
            return
        with self._mapping_lock:
            if chunk.announcement is None:
                chunk.announcement = self.request(lambda i: wire.arena(i, chunk.number, chunk.size), chunk.fd)
            self.wait(chunk.announcement)
            chunk.mapped = True
            chunk.close_fd()

    def take(self, nbytes: int) -> Extent:
        """Allocates nbytes bytes of memory that the sidecar has mapped, and returns their place."""
        extent = self.arena.take(nbytes)
        try:
            self.ensure_mapped(extent[0])
        except BaseException:
            self.arena.give(extent)
            raise
        return extent

    def _drop_chunk(self, chunk: Chunk) -> None:
        if chunk.mapped and self._over is None:
            # No thread waits for the answer. An error would only mean that the sidecar keeps some memory.
            self.request(lambda i: wire.drop_arena(i, chunk.number))

    # Results that are in the sidecar's memory.

    def result(self, place: wire.Place) -> memoryview:
        """Returns the bytes of a result as a read-only view."""
        number, offset, nbytes = place
        if nbytes == 0:
            return memoryview(b"")
        known = self._maps.get(number)
        if known is None:
            raise SidecarError(f"{self._sidecar_name}: got a result in arena {number}, which the sidecar has not announced")
        view = known[1]
        if offset > len(view) or nbytes > len(view) - offset:
            raise SidecarError(
                f"{self._sidecar_name}: got a result of {nbytes} bytes at offset {offset} of arena {number}, "
                f"which has only {len(view)} bytes"
            )
        return view[offset : offset + nbytes]

    def free_result(self, place: wire.Place) -> None:
        """Hands the memory of a result back to the sidecar. The bytes must not be read any more."""
        if place[0] >> 31 == 0:
            return
        with self._lock:
            if self._over is None:
                self._send_frame(wire.free(next(self._ids), place[0], place[1]))

    def discard_result(self, place: wire.Place) -> None:
        """Frees a result as free_result does, but not before the next submission. A finalizer may call discard_result.
        """
        self._discarded.append(place)

    # Waiting.

    def wait(self, p: Pending, others: Sequence[Pending] = ()) -> None:
        """Waits until p is done, and raises the error of p if there is one. Afterwards the name of p is free.

        The argument others has the requests for which the caller waits next. To save wake-ups, the thread may sleep
        until half of them are done too. An exception of a signal handler ends the wait. In that case the name becomes
        free as soon as p is done, because the caller may have lost p.
        """
        try:
            self._wait(p, others)
        finally:
            p.held = False
        self._raise(p)

    def wait_any(self, requests: List[Pending]) -> None:
        """Waits until one of the requests is done. Other threads may append requests during the wait. They must check
        afterwards that the appended request is not done yet, because only later completions end the wait.
        """
        self._wait(AnyOf(requests), ())

    def _wait(self, p: Union[Pending, AnyOf], others: Sequence[Pending]) -> None:
        words, me = self._words, threading.get_ident()
        while not p.done:
            if words[_WANTED] == _NEVER:
                # The word is set before the sidecar looks at the ring, so that the sidecar sends no doorbell for the
                # completion. If this overwrites the value that a reader has set, _wake_reader corrects it. A later
                # reader sets a value of its own.
                words[_WANTED] = _POLLING
            self.notify_now()
            # _SEEN is read before the done flags, because other threads may handle completions between the two.
            # Otherwise the value of until could exceed the number of completions that can come.
            until = words[_SEEN] + 1
            until += len([True for q in others if q.in_ring and not q.done]) // 2
            if self._take_turn(_WAITING, p, until):
                break
            self._waiting.add(me)
            try:
                self._wake_reader()
                with self._mutex:
                    # No wake-up is lost, because the reader checks _waiting after it has set done, and again after it
                    # has released _reader.
                    while not p.done and not self._no_reader():
                        self._cond.wait()
            finally:
                self._waiting.discard(me)

    def _wake_reader(self) -> None:
        """Makes the reader wake up for each further completion, and for the completions that it has not handled yet."""
        words = self._words
        words[_WANTED] = 0
        self._order()
        if words[_COMPLETED] != words[_SEEN]:
            with self._lock:
                if self._over is None:
                    self._doorbell()

    def _raise(self, p: Pending) -> None:
        if p.error is not None:
            raise p.error()

    def poll(self, p: Pending) -> bool:
        """Returns whether p is done. It does not block."""
        if not p.done:
            self.poll_all()
        return p.done

    def failure(self) -> Optional[Exception]:
        """Returns the error that has ended the connection or the job, or None if there is no such error. It does not
        block.
        """
        self.poll_all()
        why = self._over or self.job_over
        return None if why is None else why()

    def poll_all(self) -> None:
        """Handles the completions and answers that have arrived. If another thread is the reader, it wakes that thread,
        which then handles them.
        """
        self.notify_now()
        if not self._take_turn(_NOT_WAITING):
            self._wake_reader()

    def _take_turn(self, flags: Tuple[int, ...], p: Union[Pending, AnyOf, None] = None, until: int = 0) -> bool:
        """Makes this thread the reader and reads until p is done, or reads once if p is None. While the thread sleeps,
        the sidecar wakes it when the number of completions in the ring reaches the value of until. Returns False if
        another thread is the reader.
        """
        # A signal handler may raise an exception between any two steps, even right after _reader was taken or in the
        # first finally block. The nested finally blocks release _reader in each of these cases, so that other threads
        # can take it.
        turn = leave = True
        try:
            try:
                turn = leave = self._enter_reader()
                if turn and p is None:
                    self._read(flags)
                while turn and p is not None and not p.done:
                    if p.in_ring and len(self._pending) == 1:
                        self._poll_ring()
                    if self._may_sleep(until):
                        self._read(flags)
            finally:
                if leave:
                    self._leave_reader()
                    leave = False
        finally:
            if leave:
                self._leave_reader()
        return turn

    def _no_reader(self) -> bool:
        """Returns whether no other thread is the reader. As in _take_turn, a signal handler may raise an exception
        between any two steps, and _reader must then be released.
        """
        free = True
        try:
            try:
                free = self._enter_reader()
            finally:
                self._release_reader()
        finally:
            self._release_reader()
        return free

    def _enter_reader(self) -> bool:
        """Takes _reader unless another thread holds it. Returns whether this thread holds it now."""
        if self._reader._is_owned():  # type: ignore[attr-defined]
            # No caller of this method holds _reader. So this thread has taken it earlier, and an exception of a signal
            # handler has prevented its release.
            self._reader.release()
        return self._reader.acquire(False)

    def _leave_reader(self) -> None:
        """Releases _reader and notifies the waiting threads."""
        self._words[_WANTED] = _NEVER
        self._release_reader()
        if self._waiting:
            with self._mutex:
                self._cond.notify_all()

    def _release_reader(self) -> None:
        """Releases _reader if this thread holds it."""
        if self._reader._is_owned():  # type: ignore[attr-defined]
            self._reader.release()

    def _poll_ring(self) -> None:
        """Polls the ring for a completion, for at most _POLL_SECONDS. During this time the sidecar sends no doorbell.
        The caller holds _reader.
        """
        words = self._words
        words[_WANTED] = _POLLING
        seen = words[_SEEN]
        stop = time.perf_counter() + _POLL_SECONDS
        while words[_COMPLETED] == seen and time.perf_counter() < stop:
            os.sched_yield()

    def _may_sleep(self, until: int) -> bool:
        """Asks the sidecar for a doorbell when the number of completions in the ring reaches the value of until.
        Returns whether the thread may sleep.

        If another thread waits, the doorbell is for the next completion. If there is a new completion or unread data
        already, _may_sleep handles it and returns False. The caller holds _reader.
        """
        words = self._words
        seen = words[_SEEN]
        words[_WANTED] = max(until, seen + 1)
        self._order()
        if self._waiting:  # no thread is missing, because a waiting thread adds itself before it asks for doorbells
            words[_WANTED] = seen + 1
            self._order()
        if words[_COMPLETED] == seen:
            return not self._take_rest()
        self._look()
        if self._waiting:
            with self._mutex:
                self._cond.notify_all()
        return False

    def _take_rest(self) -> bool:
        """Handles data that was read but, because of a signal, not handled. Returns whether there was such data."""
        data, at, _, inbox, _ = self._state
        if not data and not inbox:
            return False
        return self._take() and (bool(inbox) or len(self._state[0]) < len(data) - at)

    def _read(self, flags: Tuple[int, ...]) -> None:
        """Reads from the socket once and handles the data that has arrived. The caller holds _reader."""
        data, at, fds, inbox, taken = self._state
        try:
            # One call into C reads and stores the data, so that no signal handler runs between the two (see invariant
            # 2).
            inbox.extend(map(self._recvmsg, _SIZES, _SPACES, flags))
        except BlockingIOError:
            pass
        except OSError as e:
            if self._over is None:
                self._fail(f"receiving failed: {e.strerror}")
            return
        if self._over is not None:
            return
        if len(inbox) == 1 and not taken and not data and inbox[0][0] == _DOORBELL:
            self._state = b"", 0, fds, [], 0
        elif not self._take():
            return
        self._look()
        if self._waiting:
            with self._mutex:
                self._cond.notify_all()

    def _take(self) -> bool:
        """Calls _parse and returns its result. If the data is not a valid message, ends the connection and returns
        False.
        """
        try:
            return self._parse()
        except wire.WireError as e:
            self._fail(f"malformed frame from the sidecar: {e}")
            return False

    def _parse(self) -> bool:
        """Decodes and handles the complete frames that have arrived. Returns False if the connection is over."""
        while True:
            data, at, fds, inbox, taken = self._state
            while at < len(data):
                size, start = wire.take_varint(data, at, len(data))
                if size > wire.MAX_FRAME_BYTES:
                    raise wire.WireError(f"got {size} bytes, want at most {wire.MAX_FRAME_BYTES}")
                if start < 0 or start + size > len(data):
                    break
                if size:
                    reply = wire.decode_reply(data, start, start + size)
                    if reply.arena is not None:
                        if not fds:
                            raise wire.WireError(f"got arena {reply.arena[0]} without a file descriptor")
                        self._map(reply.arena, fds[0])
                        fd, fds = fds[0], fds[1:]
                        self._state = data, start + size, fds, inbox, taken
                        os.close(fd)
                    elif reply.id:
                        self._answer(reply)
                    elif reply.dropped:
                        self._maps.pop(reply.dropped, None)
                    elif reply.ended and reply.error is not None:
                        self.job_over = functools.partial(to_exception, reply.error)
                at = start + size
                self._state = data, at, fds, inbox, taken
            if taken == len(inbox):
                self._state = data[at:], 0, fds, [], 0
                return True
            more, ancillary = inbox[taken][:2]
            if not more:
                self._fail("the sidecar closed the connection")
                return False
            for level, kind, body in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(body[: len(body) - len(body) % numbers.itemsize])
                    fds += tuple(numbers)
            self._state = data[at:] + more, 0, fds, inbox, taken + 1

    def _answer(self, reply: wire.Reply) -> None:
        p = self._pending.get(reply.id)
        if p is None:
            if reply.id == self._just_answered:
                return
            raise wire.WireError(f"got an answer to request {reply.id}, which is not pending")
        p.reply = reply
        if reply.error is not None:
            error = reply.error
            p.error = lambda: to_exception(error)
        self._just_answered = reply.id
        self._finish(reply.id, p)

    def _look(self) -> None:
        """Handles the new completions in the ring."""
        words = self._words
        completed = words[_COMPLETED]
        seen = words[_SEEN]
        if completed == seen:
            return
        if not 0 < completed - seen <= _RING_ENTRIES:
            self._fail(f"invalid ring: got completion counter {completed}, want {seen} to {seen + _RING_ENTRIES}")
            return
        self._order()
        while seen != completed:
            ident, status = _completion(self._ring, 4096 + 16 * (_RING_ENTRIES + (seen & _MASK)))
            if status == 0:
                p = self._pending.get(ident)
                if p is not None:
                    self._just_completed = ident
                    self._finish(ident, p)
                elif ident != self._just_completed:
                    self._fail(f"invalid ring: got a completion of operation {ident}, which is not in flight")
                    return
            seen += 1
            words[_SEEN] = seen

    def _finish(self, ident: int, p: Pending) -> None:
        p.keep = None
        p.done = True
        self._pending.pop(ident, None)

    def _map(self, arena: Tuple[int, int], fd: int) -> None:
        number, size = arena
        if number in self._maps:
            return  # a signal has interrupted an earlier call after it had mapped the arena
        if number >> 31 != 1 or size <= 0 or size % PAGE:
            raise wire.WireError(
                f"arena {number} of {size} bytes: want a number from {1 << 31} to {(1 << 32) - 1} "
                f"and a positive multiple of {PAGE} bytes"
            )
        got = os.fstat(fd).st_size
        if got < size:
            raise wire.WireError(f"file of arena {number}: got {got} bytes, want at least {size}")
        m = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._maps[number] = m, memoryview(m)


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
