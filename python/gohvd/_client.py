"""A connection to a sidecar, and the sidecar's process if it is this one's own. docs/sidecar.md is the protocol.

There is no thread that reads: a thread that waits for an operation reads for all of them. The others wait until it has their
answer, or is done and one of them takes its place.

Invariants:

1. Who reads holds ``_reader``; who sends or submits holds ``_lock``. ``_lock`` may be taken while ``_reader`` is held, not
   the other way round, but for ``_reader.acquire(False)``, which does not wait. ``_placing`` comes before both. Nobody waits
   for an answer with ``_lock`` held.
2. What was read is in ``_state`` before any Python code runs, and is taken out step by step, each of which can be done
   again: an exception of a signal handler (Ctrl-C) between any two of them loses nothing. So it is with what is sent, in
   ``_outbox``.
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
_EXIT_SECONDS = 15.0  # of a sidecar that was told to go; it waits ten seconds for other ranks at most

_MAX_IN_FLIGHT = 65536
_RING_ENTRIES = _MAX_IN_FLIGHT
_RING_BYTES = 4096 + 32 * _RING_ENTRIES
_MASK = _RING_ENTRIES - 1
# Words.
_SUBMITTED, _TAKEN, _COMPLETED, _SEEN, _WANTED, _LOOKING = 64 // 8, 128 // 8, 192 // 8, 256 // 8, 320 // 8, 384 // 8
# Values of _LOOKING but for 0, when the sidecar looks at the ring only after a doorbell: it looks now, or within a millisecond.
_NOW, _SOON = 1, 2
# Values of _WANTED: nobody waits, or a thread does and looks by itself.
_NEVER, _WATCHING = (1 << 64) - 1, (1 << 64) - 2
# How long the sidecar's answer to the only operation is looked for before the process sleeps.
_WATCH_SECONDS = 50e-6
_SLOTS = 131072
_MIN_NAMES = 4096

_DOORBELL = b"\0"
_READ_BYTES = 1 << 16
# Arguments of recvmsg, as what map wants.
_SIZES, _SPACES = (_READ_BYTES,), (socket.CMSG_SPACE(4 * 4),)
_WAITING = (int(socket.MSG_CMSG_CLOEXEC),)
_NOT_WAITING = (int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT),)
_AT_ONCE = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

_submission = struct.Struct("<QII").pack_into
_completion = struct.Struct("<QI").unpack_from


class Operation:
    """An operation that can be submitted again and again, for which it gets a slot of the ring.

    ``body`` is an encoded ``Operation`` of sidecar.proto. ``key`` is what may be in use only once: the process set and the name.
    """

    __slots__ = ("body", "key", "label", "slot")

    def __init__(self, body: bytes, label: str, key: Optional[Tuple[int, str]] = None) -> None:
        self.body = body
        self.label = label
        """For errors: its kind and name."""
        self.key = key
        self.slot = -1


class _Letter:
    """A frame on its way."""

    __slots__ = ("data", "fd", "sent")

    def __init__(self, message: bytes, fd: int = -1) -> None:
        self.data = memoryview(wire.frame(message))
        self.fd = fd
        self.sent: List[int] = []
        """The bytes that each system call has taken."""


class Pending:
    """A request that was sent. done is set last."""

    __slots__ = ("done", "held", "in_ring", "reply", "error", "keep")

    def __init__(self, held: bool = False, keep: object = None, in_ring: bool = False) -> None:
        self.done = False
        self.held = held
        """Its name stays in use when it is done, until the program has seen that."""
        self.in_ring = in_ring
        """Its end is told of there."""
        self.reply: Optional[wire.Reply] = None
        """None after an operation whose results are in its outputs."""
        self.error: Optional[Callable[[], Exception]] = None
        self.keep = keep
        """What must live until it is done, like the memory that the sidecar works on."""

    def in_use(self) -> bool:
        """Whether its name is."""
        return self.held or not self.done


# data that is not parsed yet, how far it is, descriptors that no frame has named yet, what was read, how much of that is in
# data. It is replaced as one.
_State = Tuple[bytes, int, Tuple[int, ...], List[Tuple[bytes, list, int, object]], int]


def to_exception(e: wire.Error) -> Exception:
    """The exception for an error of the sidecar: classes 1 and 2 are ValueErrors, as in Horovod."""
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
    """One connection. It is made whole or not at all; after an error it is over, and every call says why."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reader = threading.RLock()
        # Of _cond. It is taken by itself: a signal may come in Condition.__exit__, before that gives it back.
        self._mutex = threading.Lock()
        self._cond = threading.Condition(self._mutex)
        self._waiting: Set[int] = set()  # threads that do while another reads
        self._fence = threading.Lock()  # it guards nothing: see _order
        # There may be submissions in the ring of which the sidecar was not told.
        self._unheard = False
        self._rung = -1  # how many submissions were taken at the last doorbell for one
        self._ids = itertools.count(1)
        self._pending: Dict[int, Pending] = {}
        # The last operation of each name. Those that are not in use are dropped when there are many.
        self._names: Dict[Tuple[int, str], Pending] = {}
        self._most_names = _MIN_NAMES
        # The answer and the completion that were taken last: they may be there once more after a signal.
        self._just_answered = self._just_completed = 0
        self._over: Optional[Callable[[], Exception]] = None
        self._maps: Dict[int, Tuple[mmap.mmap, memoryview]] = {}
        self._outbox: Deque[_Letter] = collections.deque()
        self._unwanted: Deque[wire.Place] = collections.deque()
        self._placing = threading.Lock()
        self._next_slot = 0
        self._free_slots: List[int] = []
        self._state: _State = (b"", 0, (), [], 0)
        self._child: Optional[Child] = None
        self.arena = Arena(self._drop_chunk)
        address = os.environ.get("HVD_SIDECAR", "")
        if address:
            self._sock = connect(address)
            self._who = f"the sidecar at {address}"
        else:
            self._child = Child()
            self._sock = self._child.sock
            self._who = f"this process's sidecar (hvdd, process {self._child.process.pid})"
        self._recvmsg = self._sock.recvmsg
        _clients.add(self)
        try:
            self._greet()
            self._make_ring()
        except BaseException:
            self.close()
            raise

    # Beginning and end.

    def _greet(self) -> None:
        self._sock.settimeout(GREETING_SECONDS)
        try:
            self._sock.sendall(_GREETING, socket.MSG_NOSIGNAL)
            got = receive(self._sock, len(_GREETING))
        except (OSError, EOFError) as e:
            self._fail(f"it did not answer the greeting: {e}")
            raise self._over_error() from e
        if got != _GREETING:
            self._fail(f"it has greeted with {got!r}, want {_GREETING!r}: another version?")
            raise self._over_error()
        self._sock.settimeout(None)

    def _make_ring(self) -> None:
        fd = os.memfd_create("gohvd ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, _RING_BYTES)
            self._ring = mmap.mmap(fd, _RING_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            struct.pack_into("<III", self._ring, 0, 0x52564847, 2, _RING_ENTRIES)
            # In 8-byte units, for these are read and written as one by memoryview, not byte by byte.
            self._words = memoryview(self._ring).cast("Q")
            self._words[_WANTED] = _NEVER
            self.wait(self.request(lambda i: wire.ring(i, _RING_BYTES), fd))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Leaves. An own sidecar ends, and is waited for. Closing again does nothing."""
        with self._lock:
            if self._over is None:
                try:
                    self._sock.send(wire.frame(wire.bye(next(self._ids))), _AT_ONCE)
                except OSError:
                    pass  # it is gone, or does not read: it will see the end of the connection
            self._end(lambda: SidecarError(f"{self._who} was left"))
        self._sock.close()
        self._maps = {}
        if self._child is not None:
            self._child.end(_EXIT_SECONDS)

    def _end(self, why: Callable[[], Exception]) -> None:
        """Closes the connection and answers everything with why. With _lock held."""
        if self._over is not None:
            return
        self._over = why
        try:
            # Another thread may be reading: that does not end by close.
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
        """The sidecar has gone, or makes no sense."""
        try:
            # Before the lock is taken, for its holder may be waiting until the socket takes more.
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        with self._lock:
            if self._over is not None:
                return
            # One that has closed its connection is about to exit, for another reason than this.
            text = f"{self._who} {self._child.obituary(reason)}" if self._child is not None else f"{self._who}: {reason}"
            self._end(lambda: SidecarError(text))

    def _over_error(self) -> Exception:
        assert self._over is not None
        return self._over()

    @property
    def over(self) -> bool:
        """Every call would raise."""
        return self._over is not None

    @property
    def pid(self) -> int:
        """The process of an own sidecar, else 0."""
        return self._child.process.pid if self._child is not None else 0

    def signal(self, number: int) -> None:
        """Sends a signal to an own sidecar. For signal handlers: it takes no lock."""
        child = self._child
        if child is not None:
            child.signal(number)

    def after_fork(self) -> None:
        """In a forked process: the connection is the parent's alone."""
        self._lock = threading.RLock()
        self._reader = threading.RLock()
        self._mutex = threading.Lock()
        self._cond = threading.Condition(self._mutex)
        self._waiting = set()
        self._placing = threading.Lock()
        self._fence = threading.Lock()
        self.arena.after_fork()
        if self._child is not None:
            self._child.after_fork()
        # Not shut down, which would end the parent's.
        self._sock.close()
        if self._over is None:
            self._over = lambda: HorovodInternalError(
                f"process {os.getpid()} was forked from a rank of the job and is none itself: "
                "only the process that called hvd.init can communicate"
            )
        for p in self._pending.values():
            p.error = self._over
            p.done = True
        self._pending = {}
        self._names = {}

    # Sending. With _lock held.

    def _send_frame(self, message: bytes, fd: int = -1) -> None:
        self._post(_Letter(message, fd))

    def _post(self, letter: _Letter) -> None:
        self._outbox.append(letter)
        self._flush()

    def _flush(self) -> None:
        """Sends what is to be sent. Where it is interrupted the next goes on: see invariant 2."""
        try:
            while self._outbox:
                letter = self._outbox[0]
                sent = sum(letter.sent)
                if sent == len(letter.data):
                    self._outbox.popleft()
                    continue
                data = letter.data[sent:]
                try:
                    if letter.fd >= 0 and not sent:
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [letter.fd]))]
                        letter.sent.extend(map(self._sock.sendmsg, ([data],), (rights,), (_AT_ONCE,)))
                    else:
                        letter.sent.extend(map(self._sock.send, (data,), (_AT_ONCE,)))
                except BlockingIOError:
                    self._make_room()
        except OSError as e:
            self._fail(f"it cannot be spoken to: {e.strerror}")
            raise self._over_error() from None

    def _make_room(self) -> None:
        """Waits until the socket takes more. A sidecar stops reading while its replies are not read: so they are."""
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT | select.POLLIN)
        events = poller.poll()[0][1]
        if events & select.POLLOUT:
            return
        if not self._take_turn(_NOT_WAITING):
            poller.modify(self._sock, select.POLLOUT)
            poller.poll(10)  # another thread is reading
        if self._over is not None:
            raise self._over_error()

    def hurry(self) -> None:
        """Has the sidecar see what was submitted to be told of later."""
        if self._unheard:
            with self._lock:
                if self._over is None:
                    self._tell(_NOW)

    def _tell(self, when: int) -> None:
        """Has the sidecar see the ring: _NOW, or _SOON, for which no doorbell is needed while submissions follow each other. With
        _lock held."""
        words = self._words
        # It says what it does before it looks, and looks once more after it has said that it does less.
        self._order()
        state = words[_LOOKING]
        if state > when or not state:
            self._order()
            taken = words[_TAKEN]
            # One that sleeps and has taken nothing since the last doorbell has not woken yet.
            if taken != words[_SUBMITTED] and (state or taken != self._rung):
                self._doorbell()
                self._rung = taken  # a signal may come between the two: then it hears another one
        self._unheard = state == when == _SOON

    def _doorbell(self) -> None:
        if self._outbox:
            # Not instead of the doorbell: what is left there may have been sent before.
            self._flush()
        try:
            self._sock.send(_DOORBELL, _AT_ONCE)
        except BlockingIOError:
            pass  # it has frames to read, and looks at the ring after each
        except OSError as e:
            self._fail(f"it cannot be spoken to: {e.strerror}")
            raise self._over_error() from None

    def _order(self) -> None:
        """What stands before it in the program happens before what comes after it, for the memory that the sidecar sees:
        to release a lock and then acquire it orders all accesses on every machine that the sidecar is built for."""
        with self._fence:
            pass
        with self._fence:
            pass

    # Requests.

    def request(self, encode: Callable[[int], bytes], fd: int = -1) -> Pending:
        """Sends what encode makes of a new number, with a descriptor if there is one."""
        with self._lock:
            if self._over is not None:
                raise self._over_error()
            ident = next(self._ids)
            p = self._pending[ident] = Pending()
            self._send_frame(encode(ident), fd)
            return p

    def call(self, encode: Callable[[int], bytes], fd: int = -1) -> wire.Reply:
        """Sends a request and waits for the answer. Errors are raised."""
        p = self.request(encode, fd)
        self.wait(p)
        assert p.reply is not None
        return p.reply

    def submit(self, op: Operation, keep: object = None, later: bool = False, held: bool = False) -> Pending:
        """Begins an operation. keep lives until it is done. The sidecar hears of it within a millisecond, or with later perhaps not
        before hurry, another submission, or a wait. A ValueError if the name of op.key is in use: that of an operation is until it
        is done and, with held, until wait has ended or its Pending's held is False. What op uses must not be touched until it is
        done."""
        key = op.key
        p = Pending(held, keep, True)
        with self._lock:
            if self._over is not None:
                raise self._over_error()
            while self._unwanted:
                self.free_result(self._unwanted.popleft())
            if key is not None:
                self._check_name(key, op.label)
            if len(self._pending) >= _MAX_IN_FLIGHT - 1:
                self.poll_all()
                if len(self._pending) >= _MAX_IN_FLIGHT - 1:
                    raise ValueError(f"{op.label}: {len(self._pending)} operations are in flight; synchronize some first")
            words = self._words
            n = words[_SUBMITTED]
            ident = next(self._ids)
            try:
                if op.slot < 0:
                    self._prepare(op)
                elif self._outbox:
                    self._flush()  # it may be what prepares the slot, if a signal came
                self._pending[ident] = p
                if key is not None:
                    self._names[key] = p
                _submission(self._ring, 4096 + 16 * (n & _MASK), ident, op.slot, 0)
                self._order()
                self._unheard = True
                words[_SUBMITTED] = n + 1
                if not later:
                    self._tell(_SOON)
            except BaseException:
                # Interrupted. What the sidecar will not see ends here; anything else goes on, and keeps its memory.
                if words[_SUBMITTED] == n:
                    self._pending.pop(ident, None)
                    p.done = True
                p.held = False  # nobody has it
                raise
        return p

    def _check_name(self, key: Tuple[int, str], label: str) -> None:
        """A ValueError if a name is in use. With _lock held."""
        p = self._names.get(key)
        if p is None:
            if len(self._names) >= self._most_names:
                for k, q in list(self._names.items()):
                    if not q.in_use():
                        self._names.pop(k, None)
                self._most_names = max(_MIN_NAMES, 2 * len(self._names))
            return
        if not p.held and not p.done:
            self.poll_all()  # it may be done, and nobody has looked
        if p.in_use():
            raise ValueError(
                f"{label or key[1]}: a tensor with the same name as another tensor that is currently being processed, or whose "
                "handle was not synchronized; use another name, or synchronize first"
            )

    def let_go(self) -> None:
        """Frees all names, each as soon as its operation is done: the program has left the job."""
        with self._lock:
            for p in list(self._names.values()):
                p.held = False

    def in_use(self, key: Tuple[int, str]) -> bool:
        """Whether a name is, as far as is known without looking at the socket."""
        p = self._names.get(key)
        return p is not None and p.in_use()

    def _prepare(self, op: Operation) -> None:
        """Gives op a slot. The sidecar reads that before any submission that is written later. With _lock held."""
        if self._free_slots:
            slot = self._free_slots.pop()  # with _lock held nobody else takes one
        elif self._next_slot < _SLOTS:
            slot = self._next_slot
            self._next_slot += 1
        else:
            raise ValueError(f"{op.label}: {_SLOTS} operations were begun and not synchronized; synchronize some first")
        self._outbox.append(_Letter(wire.prepare(next(self._ids), slot, op.body)))
        op.slot = slot
        self._flush()

    def forget(self, op: Operation) -> None:
        """Gives back what op has of the ring. It must not be in flight, nor be submitted again. A finalizer may call it."""
        slot, op.slot = op.slot, -1
        if slot >= 0:
            self._free_slots.append(slot)

    def place(self, chunk: Chunk) -> None:
        """Sees to it that the sidecar has a chunk of the arena."""
        if chunk.placed:
            return
        with self._placing:
            if chunk.told is None:
                chunk.told = self.request(lambda i: wire.arena(i, chunk.number, chunk.size), chunk.fd)
            self.wait(chunk.told)
            chunk.placed = True
            chunk.close_fd()

    def take(self, nbytes: int) -> Extent:
        """Room for nbytes in memory that the sidecar has."""
        extent = self.arena.take(nbytes)
        try:
            self.place(extent[0])
        except BaseException:
            self.arena.give(extent)
            raise
        return extent

    def _drop_chunk(self, chunk: Chunk) -> None:
        if chunk.placed and self._over is None:
            # Nobody waits for the answer: if the sidecar keeps it, it is only memory.
            self.request(lambda i: wire.drop_arena(i, chunk.number))

    # Results in the sidecar's memory.

    def result(self, place: wire.Place) -> memoryview:
        """The bytes of a result, to read."""
        number, offset, nbytes = place
        if nbytes == 0:
            return memoryview(b"")
        known = self._maps.get(number)
        if known is None:
            raise SidecarError(f"{self._who} has a result in arena {number}, which it has not given")
        view = known[1]
        if offset > len(view) or nbytes > len(view) - offset:
            raise SidecarError(f"{self._who} has a result at {offset}, {nbytes} bytes, of arena {number}, {len(view)} bytes")
        return view[offset : offset + nbytes]

    def free_result(self, place: wire.Place) -> None:
        """Gives a result back to the sidecar. Its bytes must not be read any more."""
        if place[0] >> 31 == 0:
            return
        with self._lock:
            if self._over is None:
                self._send_frame(wire.free(next(self._ids), place[0], place[1]))

    def discard_result(self, place: wire.Place) -> None:
        """free_result, later, for a finalizer."""
        self._unwanted.append(place)

    # Waiting.

    def wait(self, p: Pending, others: Sequence[Pending] = ()) -> None:
        """Waits until p is done, and raises its error; its name is free then. others are what the caller will wait for next: it
        sleeps until half of them may be done too. An exception of a signal handler ends the wait; the name is then free when p
        is done, for the caller may have lost p."""
        try:
            self._wait(p, others)
        finally:
            p.held = False
        self._raise(p)

    def _wait(self, p: Pending, others: Sequence[Pending]) -> None:
        words, me = self._words, threading.get_ident()
        while not p.done:
            if words[_WANTED] == _NEVER:
                # Before the sidecar looks. A thread that reads and set another value is told below, and who reads next takes it back.
                words[_WANTED] = _WATCHING
            self.hurry()
            # First what was seen, then what is not done: other threads may read meanwhile, and so many must be able to come.
            until = words[_SEEN] + 1
            until += len([True for q in others if q.in_ring and not q.done]) // 2
            if self._take_turn(_WAITING, p, until):
                break
            self._waiting.add(me)
            try:
                self._rouse_reader()
                with self._mutex:
                    # Who reads sets done and then looks for who waits, and releases _reader before it does so once more.
                    while not p.done and not self._no_reader():
                        self._cond.wait()
            finally:
                self._waiting.discard(me)

    def _rouse_reader(self) -> None:
        """Has the thread that reads hear of every completion from now on, and of those that it has not heard of."""
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
        """Whether p is done. It does not wait."""
        if not p.done:
            self.poll_all()
        return p.done

    def poll_all(self) -> None:
        """Takes what has come, or has the thread do it that reads."""
        self.hurry()
        if not self._take_turn(_NOT_WAITING):
            self._rouse_reader()

    def _take_turn(self, flags: Tuple[int, ...], p: Optional[Pending] = None, until: int = 0) -> bool:
        """Reads once, or until p is done, without waking up before so many completions. False if another thread reads."""
        # An exception of a signal handler may come between any two steps, also between the taking of _reader and the next
        # one, and in the first finally: whichever way this is left, _reader is free for the threads that wait for it.
        turn = leave = True
        try:
            try:
                turn = leave = self._enter_reader()
                if turn and p is None:
                    self._read(flags)
                while turn and p is not None and not p.done:
                    if p.in_ring and len(self._pending) == 1:
                        self._watch()
                    if self._sleepy(until):
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
        """Whether no other thread reads. Interrupted as _take_turn may be."""
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
        """Takes _reader if no other thread has it."""
        if self._reader._is_owned():  # type: ignore[attr-defined]
            # Nothing that holds it comes here: an exception of a signal handler came before it could be released.
            self._reader.release()
        return self._reader.acquire(False)

    def _leave_reader(self) -> None:
        """Gives _reader back, and tells who waits."""
        self._words[_WANTED] = _NEVER
        self._release_reader()
        if self._waiting:
            with self._mutex:
                self._cond.notify_all()

    def _release_reader(self) -> None:
        """Gives _reader back if this thread has it."""
        if self._reader._is_owned():  # type: ignore[attr-defined]
            self._reader.release()

    def _watch(self) -> None:
        """Waits a little for a completion, of which the sidecar need not tell. With _reader held."""
        words = self._words
        words[_WANTED] = _WATCHING
        seen = words[_SEEN]
        stop = time.perf_counter() + _WATCH_SECONDS
        while words[_COMPLETED] == seen and time.perf_counter() < stop:
            os.sched_yield()

    def _sleepy(self, until: int) -> bool:
        """Has the sidecar ring when there are so many completions, or one that was not seen before. If there is one already,
        takes what there is, and the thread must not sleep: False. With _reader held."""
        words = self._words
        seen = words[_SEEN]
        words[_WANTED] = max(until, seen + 1)
        self._order()
        if self._waiting:  # who comes to wait says so first, and then has the sidecar ring
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
        """Takes what was read when a signal came, and whether there was any."""
        data, at, _, inbox, _ = self._state
        if not data and not inbox:
            return False
        return self._take() and (bool(inbox) or len(self._state[0]) < len(data) - at)

    def _read(self, flags: Tuple[int, ...]) -> None:
        """Reads once and takes what has come. With _reader held."""
        data, at, fds, inbox, taken = self._state
        try:
            # In one go, for the interpreter runs no signal handler between the two: see invariant 2.
            inbox.extend(map(self._recvmsg, _SIZES, _SPACES, flags))
        except BlockingIOError:
            pass
        except OSError as e:
            if self._over is None:
                self._fail(f"the connection has broken: {e.strerror}")
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
        """_parse, where what is no message ends the connection too."""
        try:
            return self._parse()
        except wire.WireError as e:
            self._fail(f"it has sent what is no message: {e}")
            return False

    def _parse(self) -> bool:
        """Takes the frames that have come. False if the connection is over."""
        while True:
            data, at, fds, inbox, taken = self._state
            while at < len(data):
                size, start = wire.take_varint(data, at, len(data))
                if size > wire.MAX_FRAME_BYTES:
                    raise wire.WireError(f"a frame of {size} bytes")
                if start < 0 or start + size > len(data):
                    break
                if size:
                    reply = wire.decode_reply(data, start, start + size)
                    if reply.arena is not None:
                        if not fds:
                            raise wire.WireError(f"arena {reply.arena[0]} without its descriptor")
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
                self._fail("it has closed the connection")
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
            raise wire.WireError(f"an answer to request {reply.id}, which was not made")
        p.reply = reply
        if reply.error is not None:
            error = reply.error
            p.error = lambda: to_exception(error)
        self._just_answered = reply.id
        self._finish(reply.id, p)

    def _look(self) -> None:
        """Takes the completions of the ring."""
        words = self._words
        completed = words[_COMPLETED]
        seen = words[_SEEN]
        if completed == seen:
            return
        if not 0 < completed - seen <= _RING_ENTRIES:
            self._fail(f"it has {completed} completions in the ring, of which {seen} are seen")
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
                    self._fail(f"it has completed {ident}, which was not submitted")
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
            return  # mapped before a signal came
        if number >> 31 != 1 or size <= 0 or size % PAGE:
            raise wire.WireError(f"arena {number} of {size} bytes")
        got = os.fstat(fd).st_size
        if got < size:
            raise wire.WireError(f"arena {number} has {got} bytes, not {size}")
        m = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._maps[number] = m, memoryview(m)


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
