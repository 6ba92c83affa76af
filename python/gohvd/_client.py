"""A connection to a sidecar, and the sidecar's process if this process started it. docs/sidecar.md describes the
protocol.

No thread only reads. Of the threads that wait for operations, one is the *reader*, which reads the answers for all of
them. Each other thread waits until its own answer has come, or until the reader has finished and a waiting thread
becomes the reader.

Invariants:

1. The reader holds ``_reader``. A thread that sends or submits holds ``_lock``. ``_lock`` may be taken while
   ``_reader`` is held. A thread that holds ``_lock`` may take ``_reader`` only by ``_reader.acquire(False)``, which
   does not wait. ``_mapping_lock`` is taken before both. No thread waits for an answer while it holds ``_lock``.
2. Data that was read is in ``_state`` before any Python code runs. It is taken out of ``_state`` in steps that can be
   repeated. So no data is lost if a signal handler (Ctrl-C) raises an exception between two steps. The same holds
   for the data to send, in ``_outbox``.
3. A submission is in ``_pending`` before the sidecar can see it.
"""

from __future__ import annotations

import array
import collections
import fcntl
import itertools
import mmap
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple

from . import _wire as wire
from ._arena import PAGE, Arena, Chunk, Extent
from ._sidecar import GREETING_SECONDS, Child, connect, receive
from .exceptions import HorovodInternalError, MismatchError, NotInitializedError, PeerError, SidecarError

_GREETING = struct.pack(">4sI", b"GHVD", 2)
_EXIT_SECONDS = 15.0  # how long the sidecar may take to exit: it waits up to 10 s for other ranks

_MAX_IN_FLIGHT = 65536
_RING_ENTRIES = _MAX_IN_FLIGHT
_RING_BYTES = 4096 + 32 * _RING_ENTRIES
_MASK = _RING_ENTRIES - 1
# Indexes of the counters and flags in the ring's header, in words of 8 bytes.
_SUBMITTED, _TAKEN, _COMPLETED, _SEEN, _WANTED, _LOOKING = 64 // 8, 128 // 8, 192 // 8, 256 // 8, 320 // 8, 384 // 8
# Values of the word _LOOKING. _NOW: the sidecar looks at the ring all the time. _SOON: it looks within a
# millisecond. 0: it looks only after a doorbell.
_NOW, _SOON = 1, 2
# Values of the word _WANTED that ask for no doorbell. _NEVER: no thread waits. _POLLING: a thread waits and polls the
# ring itself.
_NEVER, _POLLING = (1 << 64) - 1, (1 << 64) - 2
# How long a thread that waits for the only operation in flight polls the ring before it sleeps.
_POLL_SECONDS = 50e-6
_SLOTS = 131072
_MIN_NAMES = 4096

_DOORBELL = b"\0"
_READ_BYTES = 1 << 16
# Arguments of recvmsg. Each is a sequence of one element, because _read passes them to map.
_SIZES, _SPACES = (_READ_BYTES,), (socket.CMSG_SPACE(4 * 4),)
_WAITING = (int(socket.MSG_CMSG_CLOEXEC),)
_NOT_WAITING = (int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT),)
_SEND_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

_submission = struct.Struct("<QII").pack_into
_completion = struct.Struct("<QI").unpack_from


class Operation:
    """An encoded operation that can be submitted any number of times, by the number of its slot.

    ``body`` is an encoded ``Operation`` of sidecar.proto. ``key`` is the process set and the name. Only one operation
    in use may have a given key.
    """

    __slots__ = ("body", "key", "label", "slot")

    def __init__(self, body: bytes, label: str, key: Optional[Tuple[int, str]] = None) -> None:
        self.body = body
        self.label = label
        """The kind and name of the operation, for error texts."""
        self.key = key
        self.slot = -1


class _OutgoingFrame:
    """A frame to send, and the progress of sending it."""

    __slots__ = ("data", "fd", "sent")

    def __init__(self, message: bytes, fd: int = -1) -> None:
        self.data = memoryview(wire.frame(message))
        self.fd = fd
        self.sent: List[int] = []
        """The number of bytes that each system call has sent."""


class Pending:
    """A request that was sent. When its answer has come, done is set after all other attributes."""

    __slots__ = ("done", "held", "in_ring", "reply", "error", "keep")

    def __init__(self, held: bool = False, keep: object = None, in_ring: bool = False) -> None:
        self.done = False
        self.held = held
        """Whether the name stays in use after the request is done, until the program has learned that it is done."""
        self.in_ring = in_ring
        """Whether the completion of the request comes through the ring."""
        self.reply: Optional[wire.Reply] = None
        """The answer. It is None if the request was an operation and all results are in the operation's outputs."""
        self.error: Optional[Callable[[], Exception]] = None
        self.keep = keep
        """An object that is kept alive until the request is done, such as the memory that the sidecar works on."""

    def in_use(self) -> bool:
        """Returns whether the name of the request is in use."""
        return self.held or not self.done


# The state of reading: the data that is not fully parsed, how many bytes of it are parsed, the descriptors that no
# frame has named yet, the results of recvmsg, and how many of these results are in the data already. The tuple is
# replaced as a whole.
_State = Tuple[bytes, int, Tuple[int, ...], List[Tuple[bytes, list, int, object]], int]


def to_exception(e: wire.Error) -> Exception:
    """Returns the exception for an error that the sidecar sent. Kinds 1 and 2 become ValueErrors, as in Horovod."""
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
    """A connection to a sidecar. The constructor connects completely, or raises. After an error the connection is
    over, and every call raises this error.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reader = threading.RLock()
        # The lock of _cond. It is taken directly, because a signal may arrive in Condition.__exit__ before the lock
        # is released there.
        self._mutex = threading.Lock()
        self._cond = threading.Condition(self._mutex)
        self._waiting: Set[int] = set()  # threads that wait while another one reads
        self._fence = threading.Lock()  # protects no data: _order uses it as a memory barrier
        # Whether the ring may have submissions of which the sidecar has not been notified.
        self._notification_deferred = False
        # How many submissions the sidecar had taken when the last doorbell for a submission was sent.
        self._taken_at_doorbell = -1
        self._ids = itertools.count(1)
        self._pending: Dict[int, Pending] = {}
        # The last operation of each name. Names that are not in use are dropped when there are many.
        self._names: Dict[Tuple[int, str], Pending] = {}
        self._most_names = _MIN_NAMES
        # The numbers of the last answer and of the last completion that were taken. If a signal interrupts the
        # taking, the same answer or completion may be taken once more.
        self._just_answered = self._just_completed = 0
        self._over: Optional[Callable[[], Exception]] = None
        self._maps: Dict[int, Tuple[mmap.mmap, memoryview]] = {}
        self._outbox: Deque[_OutgoingFrame] = collections.deque()
        self._discarded: Deque[wire.Place] = collections.deque()
        self._mapping_lock = threading.Lock()
        self._next_slot = 0
        self._free_slots: List[int] = []
        self._state: _State = (b"", 0, (), [], 0)
        self._child: Optional[Child] = None
        self.arena = Arena(self._drop_chunk)
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
            self._fail(f"no answer to the greeting: {e}")
            raise self._over_error() from e
        if got != _GREETING:
            self._fail(f"got greeting {got!r}, want {_GREETING!r}: sidecar and package may be of different versions")
            raise self._over_error()
        self._sock.settimeout(None)

    def _make_ring(self) -> None:
        fd = os.memfd_create("gohvd ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, _RING_BYTES)
            self._ring = mmap.mmap(fd, _RING_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            struct.pack_into("<III", self._ring, 0, 0x52564847, 2, _RING_ENTRIES)
            # A memoryview of 8-byte items reads and writes each item in one memory access, not byte by byte.
            self._words = memoryview(self._ring).cast("Q")
            self._words[_WANTED] = _NEVER
            self.wait(self.request(lambda i: wire.ring(i, _RING_BYTES), fd))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the connection. If this process started the sidecar, the sidecar exits, and close waits for its
        exit. Closing again does nothing.
        """
        with self._lock:
            if self._over is None:
                try:
                    self._sock.send(wire.frame(wire.bye(next(self._ids))), _SEND_FLAGS)
                except OSError:
                    pass  # the sidecar has exited or does not read: then the end of the connection stands for the bye
            self._end(lambda: SidecarError(f"{self._sidecar_name}: this process has closed the connection"))
        self._sock.close()
        self._maps = {}
        if self._child is not None:
            self._child.end(_EXIT_SECONDS)

    def _end(self, why: Callable[[], Exception]) -> None:
        """Closes the connection and ends all pending requests with the error why. The caller holds _lock."""
        if self._over is not None:
            return
        self._over = why
        try:
            # Another thread may be blocked in recvmsg. shutdown wakes it, close would not.
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
        """Ends the connection because the sidecar has exited or violates the protocol."""
        try:
            # shutdown comes before the lock is taken, because the holder of the lock may be waiting for room in the
            # socket, and shutdown wakes it.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with self._lock:
            if self._over is not None:
                return
            # A sidecar that has closed the connection is about to exit. If it is our child, its exit status and log
            # explain more than reason does.
            child = self._child
            name = self._sidecar_name
            text = f"{name}: {reason}" if child is None else f"{name} {child.describe_exit(reason)}"
            self._end(lambda: SidecarError(text))

    def _over_error(self) -> Exception:
        assert self._over is not None
        return self._over()

    @property
    def over(self) -> bool:
        """Whether the connection is over, so that every call raises."""
        return self._over is not None

    @property
    def pid(self) -> int:
        """The process ID of the sidecar if this process started it, else 0."""
        return self._child.process.pid if self._child is not None else 0

    def signal(self, number: int) -> None:
        """Sends a signal to the sidecar if this process started it. Signal handlers may call this method, because it
        takes no lock.
        """
        child = self._child
        if child is not None:
            child.signal(number)

    def after_fork(self) -> None:
        """Ends the connection in a forked process, because the connection belongs to the parent."""
        self._lock = threading.RLock()
        self._reader = threading.RLock()
        self._mutex = threading.Lock()
        self._cond = threading.Condition(self._mutex)
        self._waiting = set()
        self._mapping_lock = threading.Lock()
        self._fence = threading.Lock()
        self.arena.after_fork()
        if self._child is not None:
            self._child.after_fork()
        # close without shutdown, because a shutdown would end the parent's connection too.
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

    # Sending. The caller holds _lock.

    def _send_frame(self, message: bytes, fd: int = -1) -> None:
        self._outbox.append(_OutgoingFrame(message, fd))
        self._flush()

    def _flush(self) -> None:
        """Sends the frames in the outbox. If a signal interrupts it, the next call continues: see invariant 2."""
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
        """Waits until the socket has room for more data. It also reads meanwhile, because a sidecar whose replies are
        not read stops reading.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT | select.POLLIN)
        events = poller.poll()[0][1]
        if events & select.POLLOUT:
            return
        if not self._take_turn(_NOT_WAITING):
            poller.modify(self._sock, select.POLLOUT)
            poller.poll(10)  # another thread reads
        if self._over is not None:
            raise self._over_error()

    def notify_now(self) -> None:
        """Notifies the sidecar now of submissions for which the notification was deferred."""
        if self._notification_deferred:
            with self._lock:
                if self._over is None:
                    self._notify(_NOW)

    def _notify(self, when: int) -> None:
        """Makes sure that the sidecar looks at the ring at once (when is _NOW) or within a millisecond (_SOON).

        With _SOON no doorbell is sent while submissions follow each other closely. The caller holds _lock.
        """
        words = self._words
        # No submission is missed: the sidecar sets _LOOKING before it looks at the ring, and looks once more after it
        # has set _LOOKING to a value with which clients must send doorbells.
        self._order()
        state = words[_LOOKING]
        if state > when or not state:
            self._order()
            taken = words[_TAKEN]
            # If a sleeping sidecar has taken nothing since the last doorbell, it has not woken yet and needs no second
            # doorbell.
            if taken != words[_SUBMITTED] and (state or taken != self._taken_at_doorbell):
                self._doorbell()
                # If a signal comes before this line, the sidecar gets a second doorbell, which is harmless.
                self._taken_at_doorbell = taken
        self._notification_deferred = state == when == _SOON

    def _doorbell(self) -> None:
        if self._outbox:
            # The doorbell is still needed: a signal may have interrupted an earlier _flush, so that these frames were
            # sent before the submission but are still in the outbox.
            self._flush()
        try:
            self._sock.send(_DOORBELL, _SEND_FLAGS)
        except BlockingIOError:
            pass  # the socket is full: the sidecar has frames to read, and looks at the ring after each frame
        except OSError as e:
            self._fail(f"sending failed: {e.strerror}")
            raise self._over_error() from None

    def _order(self) -> None:
        """Is a memory barrier for the memory shared with the sidecar: accesses before the call take effect before
        accesses after it.

        On every machine that the sidecar is built for, releasing a lock and acquiring it again has this effect.
        """
        with self._fence:
            pass
        with self._fence:
            pass

    # Requests.

    def request(self, encode: Callable[[int], bytes], fd: int = -1) -> Pending:
        """Sends a request and returns it as pending. encode gets the number of the request and returns the message.
        Unless fd is -1, this descriptor is sent with the message.
        """
        with self._lock:
            if self._over is not None:
                raise self._over_error()
            ident = next(self._ids)
            p = self._pending[ident] = Pending()
            self._send_frame(encode(ident), fd)
            return p

    def call(self, encode: Callable[[int], bytes], fd: int = -1) -> wire.Reply:
        """Sends a request, waits for the answer and returns it. Raises the error that the answer has, if any."""
        p = self.request(encode, fd)
        self.wait(p)
        assert p.reply is not None
        return p.reply

    def submit(self, op: Operation, keep: object = None, later: bool = False, held: bool = False) -> Pending:
        """Begins an operation and returns it as a pending request.

        keep is kept alive until the operation is done. The sidecar sees the submission within a millisecond. If later
        is true, it may see the submission only at the next notify_now, submission or wait. The memory that op uses
        must not be touched until the operation is done.

        Raises ValueError if the name of op.key is in use. A name is in use until its operation is done. If held is
        true, the name stays in use until wait has ended or the returned Pending's held is set to False.
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
                        "synchronize some first"
                    )
            words = self._words
            n = words[_SUBMITTED]
            ident = next(self._ids)
            try:
                if op.slot < 0:
                    self._prepare(op)
                elif self._outbox:
                    self._flush()  # if a signal interrupted _prepare, the frame of the slot may still be in the outbox
                self._pending[ident] = p
                if key is not None:
                    self._names[key] = p
                _submission(self._ring, 4096 + 16 * (n & _MASK), ident, op.slot, 0)
                self._order()
                self._notification_deferred = True
                words[_SUBMITTED] = n + 1
                if not later:
                    self._notify(_SOON)
            except BaseException:
                # A signal handler has raised an exception. If the sidecar cannot see the submission, the operation
                # counts as done. Otherwise it goes on and its memory stays in use.
                if words[_SUBMITTED] == n:
                    self._pending.pop(ident, None)
                    p.done = True
                p.held = False  # the caller does not get p, so it could never release the name
                raise
        return p

    def _check_name(self, key: Tuple[int, str], label: str) -> None:
        """Raises ValueError if a name is in use. The caller holds _lock."""
        p = self._names.get(key)
        if p is None:
            if len(self._names) >= self._most_names:
                for k, q in list(self._names.items()):
                    if not q.in_use():
                        self._names.pop(k, None)
                self._most_names = max(_MIN_NAMES, 2 * len(self._names))
            return
        if not p.held and not p.done:
            self.poll_all()  # the operation may be done, but no thread has read its completion yet
        if p.in_use():
            raise ValueError(
                f"{label or key[1]}: a tensor with the same name as another tensor that is currently being processed, or whose "
                "handle was not synchronized; use another name, or synchronize first"
            )

    def release_names(self) -> None:
        """Frees each name as soon as its operation is done, waited for or not. It is called when the program leaves
        the job.
        """
        with self._lock:
            for p in list(self._names.values()):
                p.held = False

    def in_use(self, key: Tuple[int, str]) -> bool:
        """Returns whether a name is in use, from the completions read so far. It reads nothing."""
        p = self._names.get(key)
        return p is not None and p.in_use()

    def _prepare(self, op: Operation) -> None:
        """Assigns a free slot to op and sends the description of op for this slot. The sidecar reads the description
        before any later submission. The caller holds _lock.
        """
        if self._free_slots:
            slot = self._free_slots.pop()  # not empty: other threads only add slots while _lock is held here
        elif self._next_slot < _SLOTS:
            slot = self._next_slot
            self._next_slot += 1
        else:
            raise ValueError(f"{op.label}: {_SLOTS} operations have not been synchronized; synchronize some first")
        self._outbox.append(_OutgoingFrame(wire.prepare(next(self._ids), slot, op.body)))
        op.slot = slot
        self._flush()

    def forget(self, op: Operation) -> None:
        """Frees the slot of op. op must not be in flight, and must not be submitted again. Finalizers may call it."""
        slot, op.slot = op.slot, -1
        if slot >= 0:
            self._free_slots.append(slot)

    def ensure_mapped(self, chunk: Chunk) -> None:
        """Makes sure that the sidecar has mapped a chunk of the arena."""
        if chunk.mapped:
            return
        with self._mapping_lock:
            if chunk.announcement is None:
                chunk.announcement = self.request(lambda i: wire.arena(i, chunk.number, chunk.size), chunk.fd)
            self.wait(chunk.announcement)
            chunk.mapped = True
            chunk.close_fd()

    def take(self, nbytes: int) -> Extent:
        """Takes nbytes of memory that the sidecar has mapped, and returns their place."""
        extent = self.arena.take(nbytes)
        try:
            self.ensure_mapped(extent[0])
        except BaseException:
            self.arena.give(extent)
            raise
        return extent

    def _drop_chunk(self, chunk: Chunk) -> None:
        if chunk.mapped and self._over is None:
            # No thread waits for the answer, because a refusal would only mean that the sidecar keeps some memory.
            self.request(lambda i: wire.drop_arena(i, chunk.number))

    # Results in the sidecar's memory.

    def result(self, place: wire.Place) -> memoryview:
        """Returns the bytes of a result, read-only."""
        number, offset, nbytes = place
        if nbytes == 0:
            return memoryview(b"")
        known = self._maps.get(number)
        if known is None:
            raise SidecarError(f"{self._sidecar_name}: result in arena {number}, which the sidecar has not announced")
        view = known[1]
        if offset > len(view) or nbytes > len(view) - offset:
            raise SidecarError(
                f"{self._sidecar_name}: result of {nbytes} bytes at offset {offset} is not in arena {number}, "
                f"which has {len(view)} bytes"
            )
        return view[offset : offset + nbytes]

    def free_result(self, place: wire.Place) -> None:
        """Gives a result back to the sidecar. Its bytes must not be read any more."""
        if place[0] >> 31 == 0:
            return
        with self._lock:
            if self._over is None:
                self._send_frame(wire.free(next(self._ids), place[0], place[1]))

    def discard_result(self, place: wire.Place) -> None:
        """Frees a result as free_result does, but only at the next submission. Finalizers may call it."""
        self._discarded.append(place)

    # Waiting.

    def wait(self, p: Pending, others: Sequence[Pending] = ()) -> None:
        """Waits until p is done, and raises the error of p if there is one. Then the name of p is free.

        others are the requests for which the caller waits next. The thread may sleep until half of them are done too.
        An exception of a signal handler ends the wait. Then the name becomes free when p is done, because the caller
        may have lost p.
        """
        try:
            self._wait(p, others)
        finally:
            p.held = False
        self._raise(p)

    def _wait(self, p: Pending, others: Sequence[Pending]) -> None:
        words, me = self._words, threading.get_ident()
        while not p.done:
            if words[_WANTED] == _NEVER:
                # This is set before the sidecar looks at the ring, so that it sends no doorbell for the completion. If
                # it overwrites the value of a reader, _wake_reader repairs that. A later reader sets its own value.
                words[_WANTED] = _POLLING
            self.notify_now()
            # _SEEN is read before the done flags, because other threads may take completions in between: until must
            # not exceed the number of completions that can come.
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
        """Makes the reader wake for every completion from now on, and for the completions that it has not taken yet.
        """
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
        """Returns whether p is done. It does not wait."""
        if not p.done:
            self.poll_all()
        return p.done

    def poll_all(self) -> None:
        """Takes the completions and answers that have come. If another thread is the reader, it wakes that thread to
        do so.
        """
        self.notify_now()
        if not self._take_turn(_NOT_WAITING):
            self._wake_reader()

    def _take_turn(self, flags: Tuple[int, ...], p: Optional[Pending] = None, until: int = 0) -> bool:
        """Makes this thread the reader, which reads until p is done, or once if p is None. While it sleeps, it is
        woken when the ring has had until completions. Returns False if another thread is the reader.
        """
        # A signal handler may raise an exception between any two steps: also right after _reader is taken, and in the
        # first finally. The nested finally blocks release _reader in each of these cases, so that other threads can
        # take it.
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
        between any two steps.
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
        """Takes _reader unless another thread holds it, and returns whether this thread holds it now."""
        if self._reader._is_owned():  # type: ignore[attr-defined]
            # No caller holds _reader. So this thread took it before, and an exception of a signal handler prevented
            # its release.
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
        """Polls the ring for a completion, for at most _POLL_SECONDS. Meanwhile the sidecar sends no doorbell. The
        caller holds _reader.
        """
        words = self._words
        words[_WANTED] = _POLLING
        seen = words[_SEEN]
        stop = time.perf_counter() + _POLL_SECONDS
        while words[_COMPLETED] == seen and time.perf_counter() < stop:
            os.sched_yield()

    def _may_sleep(self, until: int) -> bool:
        """Asks the sidecar for a doorbell when the ring has had until completions, and returns whether the thread may
        sleep.

        If another thread waits, it asks for a doorbell at the next completion. If a new completion or unread data is
        there already, _may_sleep takes it and returns False. The caller holds _reader.
        """
        words = self._words
        seen = words[_SEEN]
        words[_WANTED] = max(until, seen + 1)
        self._order()
        if self._waiting:  # complete, because a waiting thread adds itself before it asks for doorbells
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
        """Takes data that was read but not taken because of a signal. Returns whether there was such data."""
        data, at, _, inbox, _ = self._state
        if not data and not inbox:
            return False
        return self._take() and (bool(inbox) or len(self._state[0]) < len(data) - at)

    def _read(self, flags: Tuple[int, ...]) -> None:
        """Reads from the socket once and takes the data that has come. The caller holds _reader."""
        data, at, fds, inbox, taken = self._state
        try:
            # Reading and storing is one call into C, so that no signal handler runs in between: see invariant 2.
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
        """Calls _parse and returns its result. If the data is not a valid message, it ends the connection and returns
        False.
        """
        try:
            return self._parse()
        except wire.WireError as e:
            self._fail(f"malformed frame from the sidecar: {e}")
            return False

    def _parse(self) -> bool:
        """Decodes and handles the complete frames that have come. Returns False if the connection is over."""
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
                            raise wire.WireError(f"arena {reply.arena[0]} without a file descriptor")
                        self._map(reply.arena, fds[0])
                        fd, fds = fds[0], fds[1:]
                        self._state = data, start + size, fds, inbox, taken
                        os.close(fd)
                    elif reply.id:
                        self._answer(reply)
                    elif reply.dropped:
                        self._maps.pop(reply.dropped, None)
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
            raise wire.WireError(f"answer to request {reply.id}, which is not pending")
        p.reply = reply
        if reply.error is not None:
            error = reply.error
            p.error = lambda: to_exception(error)
        self._just_answered = reply.id
        self._finish(reply.id, p)

    def _look(self) -> None:
        """Takes the new completions from the ring."""
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
                    self._fail(f"invalid ring: completion of operation {ident}, which is not in flight")
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
            return  # a signal interrupted this function after it had mapped the arena, and it is called again
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
