"""Memory that the sidecar and the other ranks of the host read in place: chunks of sealed shared memory, and an
allocator of blocks in them.

A chunk has 64 MiB, or the size of the block if the block is larger. A chunk is a memfd, allocated in full and sealed
against shrinking and growing, as docs/sidecar.md requires. Blocks begin at multiples of 64 bytes. ``Arena.find`` finds
the chunk that contains an address. So the engine recognises memory in a chunk, whichever framework made the tensor.

Locks: no other lock is taken while ``Arena._lock`` is held.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import errno
import fcntl
import mmap
import os
import random
import threading
import weakref
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from ._limits import lacking

CHUNK_BYTES = 64 << 20
ALIGNMENT = 64
PAGE = mmap.PAGESIZE

# The size of a block of at least this many bytes is rounded up to whole pages, so that a later block of nearly the same
# size can reuse its memory.
_PAGED_FROM = 16 << 10


def new_number() -> int:
    """Returns a number for an arena. It must be unique among all clients of a sidecar. It is random, because a client
    does not know the numbers of the others.
    """
    return random.SystemRandom().randrange(1, 1 << 31)


class Chunk:
    """A memfd that is mapped for reading and writing, and the allocator of the memory in it."""

    __slots__ = (
        "number", "size", "map", "view", "address", "fd", "announcement", "mapped", "live", "dropped", "_offsets",
        "_sizes", "_bins",
    )  # fmt: skip

    def __init__(self, size: int) -> None:
        self.fd = -1
        lack = lacking(size)
        if lack is not None:
            raise MemoryError(f"cannot allocate {size} bytes of shared memory: {lack}")
        fd = os.memfd_create("gohvd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as e:
                if e.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
                    raise MemoryError(f"cannot allocate {size} bytes of shared memory: {e.strerror}") from e
                raise
            self.map = mmap.mmap(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.number = new_number()
        self.size = size
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.announcement: Any = None
        """The request that sent the chunk to the sidecar. It stays set after the answer, and is None before the
        request.
        """
        self.mapped = False
        """Whether the sidecar has mapped the chunk. If it has, the chunk belongs to this connection only."""
        self.dropped = False
        self.live = 0
        self.reset()

    def reset(self) -> None:
        """Marks all memory of the chunk as free."""
        self._offsets = [0]
        self._sizes = [self.size]
        self._bins: Dict[int, List[int]] = {}

    def close_fd(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):  # a signal handler may have raised before fd was set
            self.close_fd()

    def take(self, size: int) -> int:
        """Allocates size bytes and returns their offset, or -1 if there is no room.

        It prefers memory of exactly this size that was freed before. Otherwise it uses the first free memory that is
        large enough.
        """
        same = self._bins.get(size)
        if same:
            self.live += 1
            return same.pop()
        at = self._first_fit(size)
        if at < 0 and self._bins:
            self._sweep()
            at = self._first_fit(size)
        if at >= 0:
            self.live += 1
        return at

    def _first_fit(self, size: int) -> int:
        for i, free in enumerate(self._sizes):
            if free >= size:
                at = self._offsets[i]
                if free == size:
                    del self._offsets[i], self._sizes[i]
                else:
                    self._offsets[i] += size
                    self._sizes[i] -= size
                return at
        return -1

    def give(self, offset: int, size: int) -> None:
        self.live -= 1
        if self.live == 0:
            self.reset()
        else:
            self._bins.setdefault(size, []).append(offset)

    def _sweep(self) -> None:
        """Empties the bins. It joins the memory in them with free memory beside it, so that larger blocks fit."""
        free = list(zip(self._offsets, self._sizes))
        for size, offsets in self._bins.items():
            free += [(offset, size) for offset in offsets]
        self._bins = {}
        self._offsets, self._sizes = [], []
        for offset, size in sorted(free):
            if self._offsets and self._offsets[-1] + self._sizes[-1] == offset:
                self._sizes[-1] += size
            else:
                self._offsets.append(offset)
                self._sizes.append(size)


Extent = Tuple[Chunk, int, int]
"""Memory that was taken: the chunk, the offset in the chunk, and the number of bytes."""


class Block:
    """Memory that operations read and write in place.

    ``free`` frees the memory, and the view must not be used afterwards. If ``free`` is not called, the memory is freed
    when the block and all objects made of its view (slices, numpy arrays, tensors) are gone.
    """

    __slots__ = ("nbytes", "view", "_finalizer", "__weakref__")

    def __init__(self, nbytes: int, view: memoryview, finalizer: weakref.finalize) -> None:
        self.nbytes = nbytes
        self.view = view
        """The bytes of the block, which the program may write. In a new block they are zero."""
        self._finalizer = finalizer

    def free(self) -> None:
        """Frees the memory. No operation on the block may be in flight. A further call does nothing."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"<gohvd.Block of {self.nbytes} bytes>"


def rounded(nbytes: int) -> int:
    """Returns how many bytes of a chunk a block of nbytes bytes occupies."""
    unit = PAGE if nbytes >= _PAGED_FROM else ALIGNMENT
    return max(-(-nbytes // unit), 1) * unit


class Arena:
    """The chunks of a connection to the sidecar. All methods may be called from any thread."""

    def __init__(self, on_drop: Callable[[Chunk], None]) -> None:
        """Makes an arena without chunks. When the arena no longer uses a chunk, it passes the chunk to on_drop. It
        holds no lock during this call.
        """
        self._lock = threading.Lock()
        self._on_drop = on_drop
        self._chunks: List[Chunk] = []  # sorted by address
        self._addresses: List[int] = []
        # A finalizer can run at any point, even while its own thread holds the lock. So it only appends the memory of
        # its block here. The next take or collect frees the memory.
        self._returned: Deque[Extent] = collections.deque()

    def take(self, nbytes: int) -> Extent:
        """Allocates nbytes bytes and returns their place. The memory is not zeroed. Raises MemoryError if there is not
        enough memory.
        """
        size = rounded(nbytes)
        dropped: List[Chunk] = []
        try:
            with self._lock:
                self._collect(dropped)
                for chunk in self._chunks:
                    at = chunk.take(size)
                    if at >= 0:
                        return chunk, at, size
                chunk = Chunk(max(CHUNK_BYTES, -(-size // PAGE) * PAGE))
                i = bisect.bisect(self._addresses, chunk.address)
                self._chunks.insert(i, chunk)
                self._addresses.insert(i, chunk.address)
                return chunk, chunk.take(size), size
        finally:
            for chunk in dropped:
                self._on_drop(chunk)

    def give(self, extent: Extent) -> None:
        """Gives back memory that take has returned. Finalizers may call give, because it takes no lock. The next take
        or collect frees the memory.
        """
        self._returned.append(extent)

    def collect(self) -> None:
        """Frees the memory that was given back, and drops chunks in which no memory is in use any more."""
        dropped: List[Chunk] = []
        with self._lock:
            self._collect(dropped)
        for chunk in dropped:
            self._on_drop(chunk)

    def _collect(self, dropped: List[Chunk]) -> None:
        while self._returned:
            chunk, offset, size = self._returned.popleft()
            chunk.give(offset, size)
            if chunk.live or chunk.dropped:
                continue
            # Keep one empty chunk of the usual size for later blocks.
            others = any(c.live == 0 for c in self._chunks if c is not chunk)
            if others or chunk.size > CHUNK_BYTES:
                self._remove(chunk)
                dropped.append(chunk)

    def _remove(self, chunk: Chunk) -> None:
        i = self._chunks.index(chunk)
        del self._chunks[i], self._addresses[i]
        chunk.dropped = True

    def alloc(self, nbytes: int) -> Block:
        """Returns a block of nbytes zeros for the user."""
        if nbytes < 0:
            raise ValueError(f"alloc: got {nbytes} bytes, want 0 or more")
        extent = self.take(nbytes)
        chunk, offset, size = extent
        # Every buffer made from the block refers to this ctypes array. So the finalizer of the array runs when the last
        # of these buffers is gone.
        root = (ctypes.c_ubyte * max(nbytes, 1)).from_buffer(chunk.map, offset)
        ctypes.memset(root, 0, max(nbytes, 1))
        finalizer = weakref.finalize(root, self.give, extent)
        finalizer.atexit = False
        return Block(nbytes, memoryview(root).cast("B")[:nbytes], finalizer)

    def find(self, address: int) -> Optional[Tuple[Chunk, int]]:
        """Returns the chunk that contains the address, and the offset of the address in this chunk. Returns None if no
        chunk contains the address.
        """
        i = bisect.bisect(self._addresses, address) - 1
        if i < 0:
            return None
        try:
            chunk = self._chunks[i]
        except IndexError:  # another thread has dropped a chunk since the search
            return None
        offset = address - chunk.address
        return (chunk, offset) if 0 <= offset < chunk.size else None

    def after_fork(self) -> None:
        """Makes the arena usable in a forked process. It replaces the lock, because no thread exists there that could
        release the old one.
        """
        self._lock = threading.Lock()
