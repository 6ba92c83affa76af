"""Tests the allocator of memory that a sidecar can map. The tests need no sidecar."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import tempfile
import threading
import unittest
from typing import Dict, List

from gohvd import _arena
from gohvd._arena import ALIGNMENT, CHUNK_BYTES, Arena, Chunk, Extent
from gohvd._limits import lacking


class Limits(unittest.TestCase):
    def lacking(self, need: int, files: Dict[str, str]) -> str:
        with tempfile.TemporaryDirectory() as top:
            for name, text in files.items():
                path = os.path.join(top, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as f:
                    f.write(text)
            return lacking(need, *[os.path.join(top, name) for name in ("meminfo", "own", "cg")]) or ""

    def test_machine(self) -> None:
        files = {"meminfo": "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:  50 kB\nSwapFree: 10 kB\n"}
        self.assertEqual(self.lacking(60 << 10, files), "")
        self.assertIn(f"the machine has only {60 << 10} bytes of memory and swap left", self.lacking((60 << 10) + 1, files))
        self.assertEqual(self.lacking(1 << 50, {"meminfo": "MemTotal: 100 kB\n"}), "")
        self.assertEqual(self.lacking(1 << 50, {}), "")

    def test_cgroups(self) -> None:
        limit, used, stat = "memory.max", "memory.current", "memory.stat"
        two = {"own": "0::/a/b\n", "cg/a/b/" + limit: "1000\n", "cg/a/b/" + used: "400\n"}
        one = "cg/memory/c/memory."
        for left, files in [
            (600, two),
            (700, {**two, "cg/a/b/" + stat: "inactive_file 70\nactive_file 30\nanon 300\n"}),
            (90, {**two, "cg/a/" + limit: "90", "cg/a/" + used: "0"}),
            (600, {**two, "cg/a/" + limit: "max", "cg/a/" + used: "0"}),
            (0, {**two, "cg/" + limit: "5", "cg/" + used: "9"}),
            (7, {"own": "4:cpu,memory:/c\n", one + "limit_in_bytes": "10", one + "usage_in_bytes": "3"}),
            (5, {"own": "0::/\n", "cg/unified/" + limit: "8", "cg/unified/" + used: "3"}),
        ]:
            self.assertEqual(self.lacking(left, files), "", files)
            self.assertIn(f"the cgroup has only {left} bytes left", self.lacking(left + 1, files), files)
        self.assertEqual(self.lacking(1 << 50, {"own": "4:cpu:/c\nnonsense\n"}), "")


class Allocator(unittest.TestCase):
    def setUp(self) -> None:
        self.dropped: List[Chunk] = []
        self.arena = Arena(self.dropped.append)

    def test_blocks_are_apart(self) -> None:
        """take and give are called in random order. Blocks in use do not overlap and keep their content. Freed memory
        is used again.
        """
        rnd = random.Random(3)
        living: Dict[int, Extent] = {}
        chunks = set()
        for i in range(4000):
            if living and rnd.random() < 0.49:
                key = rnd.choice(list(living))
                chunk, offset, size = living.pop(key)
                self.assertEqual(bytes(chunk.view[offset : offset + 4]), key.to_bytes(4, "little"))
                self.assertEqual(bytes(chunk.view[offset + size - 4 : offset + size]), key.to_bytes(4, "little"))
                self.arena.give((chunk, offset, size))
                continue
            nbytes = rnd.choice([1, 4, 64, 65, 1000, 4096, 20000, 300000])
            chunk, offset, size = self.arena.take(nbytes)
            self.assertGreaterEqual(size, nbytes)
            self.assertEqual(offset % ALIGNMENT, 0)
            chunks.add(chunk.number)
            mark = i.to_bytes(4, "little")
            chunk.view[offset : offset + 4] = mark
            chunk.view[offset + size - 4 : offset + size] = mark
            living[i] = chunk, offset, size
        self.assertEqual(len(chunks), 1, "some 160 blocks of 48 KB on average fit into one chunk")
        spans = sorted((offset, size) for _, offset, size in living.values())
        for (a, size), (b, _) in zip(spans, spans[1:]):
            self.assertLessEqual(a + size, b)

    def test_neighbours_are_joined(self) -> None:
        half = CHUNK_BYTES // 2
        small = [self.arena.take(CHUNK_BYTES // 8) for _ in range(8)]
        for extent in small[:4]:
            self.arena.give(extent)
        chunk, offset, _ = self.arena.take(half)
        self.assertIs(chunk, small[0][0])
        self.assertEqual(offset, 0)

    def test_large_and_empty_chunks_go(self) -> None:
        big = self.arena.take(CHUNK_BYTES + 1)
        self.assertEqual(big[0].size, CHUNK_BYTES + _arena.PAGE)
        self.arena.give(big)
        self.arena.collect()
        self.assertEqual(self.dropped, [big[0]])
        extents = [self.arena.take(CHUNK_BYTES) for _ in range(3)]
        for extent in extents:
            self.arena.give(extent)
        self.arena.collect()
        self.assertEqual(len(self.dropped), 3, "one empty chunk is kept")

    def test_sealed(self) -> None:
        chunk = self.arena.take(1)[0]
        seals = fcntl.fcntl(chunk.fd, fcntl.F_GET_SEALS)
        self.assertEqual(seals, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.assertGreaterEqual(os.fstat(chunk.fd).st_blocks * 512, CHUNK_BYTES)

    def test_no_memory(self) -> None:
        with self.assertRaisesRegex(MemoryError, str(1 << 50)):
            self.arena.take(1 << 50)

    def test_block_lives_as_long_as_what_is_made_of_it(self) -> None:
        block = self.arena.alloc(100)
        self.assertEqual((block.nbytes, len(block.view), bytes(block.view)), (100, 100, bytes(100)))
        block.view[:5] = b"hello"
        piece = block.view[1:5]
        chunk = self.arena.take(1)[0]
        before = chunk.live
        del block
        gc.collect()
        self.arena.collect()
        self.assertEqual(chunk.live, before)
        self.assertEqual(bytes(piece), b"ello")
        del piece
        gc.collect()
        self.arena.collect()
        self.assertEqual(chunk.live, before - 1)

    def test_free(self) -> None:
        block = self.arena.alloc(10)
        chunk = self.arena.take(1)[0]
        block.free()
        block.free()
        del block
        gc.collect()
        self.arena.collect()
        self.assertEqual(chunk.live, 1)
        again = self.arena.alloc(10)
        self.assertEqual(bytes(again.view), bytes(10))
        with self.assertRaises(ValueError):
            self.arena.alloc(-1)
        self.assertEqual(len(self.arena.alloc(0).view), 0)

    def test_used_memory_is_zeroed_for_users(self) -> None:
        extent = self.arena.take(100)
        self.arena.take(100)
        extent[0].view[extent[1] : extent[1] + 100] = b"x" * 100
        self.arena.give(extent)
        block = self.arena.alloc(100)
        self.assertEqual(bytes(block.view), bytes(100))

    def test_found_by_address(self) -> None:
        chunk, offset, _ = self.arena.take(1000)
        other = self.arena.take(CHUNK_BYTES)[0]
        self.assertEqual(self.arena.find(chunk.address + offset + 5), (chunk, offset + 5))
        self.assertEqual(self.arena.find(other.address), (other, 0))
        for address in (1, min(chunk.address, other.address) - 1, max(chunk.address, other.address) + CHUNK_BYTES):
            self.assertIsNone(self.arena.find(address))

    def test_threads(self) -> None:
        failures: List[str] = []

        def work(mark: int) -> None:
            rnd = random.Random(mark)
            for _ in range(300):
                chunk, offset, size = self.arena.take(rnd.randrange(1, 5000))
                chunk.view[offset : offset + size] = bytes((mark,)) * size
                if bytes(chunk.view[offset : offset + size]) != bytes((mark,)) * size:
                    failures.append(f"{offset} {size}")
                self.arena.give((chunk, offset, size))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])


if __name__ == "__main__":
    unittest.main()
