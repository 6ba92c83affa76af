"""Tests start_timeline and stop_timeline."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import unittest
from typing import Any
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import gohvd
import torch
from gohvd import timeline
from ranks import RanksTest, hvd


class Timeline(RanksTest):
    def setUp(self) -> None:
        super().setUp()
        enabled = mock.patch.dict(os.environ, {"HOROVOD_TIMELINE": "DYNAMIC"})
        enabled.start()
        self.addCleanup(enabled.stop)
        self.folder = hvd.broadcast_object(tempfile.mkdtemp() if self.rank == 0 else None)

    def file(self, name: str) -> str:
        return os.path.join(self.folder, name + (f".rank{self.rank}" if self.rank else "") + ".json")

    def events(self, name: str) -> list[Any]:
        with open(self.file(name), encoding="utf-8") as f:
            return list(json.load(f))

    def allreduce(self, name: str) -> None:
        self.equal(hvd.allreduce(torch.ones(4), name=name, op=hvd.Sum), torch.full((4,), float(self.size)))

    def test_what_is_between_start_and_stop(self) -> None:
        self.allreduce("before")
        hvd.barrier()
        hvd.start_timeline(os.path.join(self.folder, "t.json"), mark_cycles=True)
        hvd.barrier()
        self.allreduce("within")
        hvd.barrier()
        hvd.stop_timeline()
        self.allreduce("after")
        text = json.dumps(self.events("t"))
        self.assertIn("within", text)
        self.assertNotIn('before"', text)
        self.assertNotIn('after"', text)
        self.assertIn("NEGOTIATE_ALLREDUCE", text)
        if self.rank == 0:
            self.assertIn("CYCLE_START", text)
        hvd.stop_timeline()  # has no effect, because no timeline is being written

    def test_another_file(self) -> None:
        """A relative path is relative to the working directory of this process, also if a sidecar has another one."""
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        os.chdir(self.folder)
        hvd.start_timeline("a.json")
        hvd.barrier()
        self.allreduce("first")
        hvd.barrier()
        hvd.start_timeline("b.json")
        hvd.barrier()
        self.allreduce("second")
        hvd.barrier()
        hvd.stop_timeline()
        first, second = json.dumps(self.events("a")), json.dumps(self.events("b"))
        self.assertIn("first", first)
        self.assertNotIn("second", first)
        self.assertIn("second", second)
        self.assertNotIn("first", second)
        self.assertNotIn("CYCLE_START", second)

    def test_waits_and_ranges(self) -> None:
        """The timeline shows waits and ranges of the program."""
        hvd.start_timeline(os.path.join(self.folder, "waits.json"))
        for i in range(50):
            with gohvd.mark_range("outer é"), gohvd.mark_range("inner"):
                self.allreduce(f"for {i}")
            hvd.synchronize(hvd.allreduce_async(torch.ones(4), name=f"async {i}"))
        hvd.stop_timeline()
        ranges = [e["name"] for e in self.events("waits") if e.get("cat") == "range"]
        waits = {e["args"]["tensor"].split()[0] for e in self.events("waits") if e.get("cat") == "wait"}
        if os.environ.get("HVD_SIDECAR"):
            self.assertEqual((waits, ranges), (set(), []))
            return
        self.assertEqual(ranges, 50 * ["inner", "outer é"])
        if self.size > 1:
            self.assertEqual(waits, {"allreduce.for", "allreduce.async"})

    def steps(self, name: str) -> list[int]:
        return [e["args"]["step"] for e in self.events(name) if e.get("name") == "hvd_step"]

    def test_optimizers_mark_steps(self) -> None:
        """Of several optimizers, only the first one marks the steps. The program may mark them itself."""
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([w], lr=0.1), [(f"marks.{i}", w)], op=op)
                      for i, (w, op) in enumerate(zip(weights, [hvd.Average, hvd.Average, hvd.Adasum]))]  # fmt: skip

        def step(first: int) -> None:
            for w, optimizer in list(zip(weights, optimizers))[first:]:
                optimizer.zero_grad()
                w.sum().backward()
                optimizer.step()

        with mock.patch.object(timeline, "_marks", timeline._Marks()):
            hvd.start_timeline(os.path.join(self.folder, "marks.json"))
            step(0)
            step(0)
            step(2)  # the first optimizer does not step
            del optimizers[0], weights[0]
            gc.collect()
            step(0)
            step(1)  # the Adasum optimizer alone
            gohvd.mark_step(17)
            step(0)
            hvd.barrier()
            hvd.stop_timeline()
        with self.assertRaisesRegex(ValueError, "-1"):
            gohvd.mark_step(-1)
        self.assertEqual(self.steps("marks"), [] if os.environ.get("HVD_SIDECAR") else [1, 2, 3, 17])

    def test_errors(self) -> None:
        with self.assertRaisesRegex(ValueError, "start timeline: .*no-such-folder"):
            hvd.start_timeline(os.path.join(self.folder, "no-such-folder", "t.json"))
        with mock.patch.dict(os.environ):
            del os.environ["HOROVOD_TIMELINE"]
            for call in (lambda: hvd.start_timeline(os.path.join(self.folder, "t.json")), hvd.stop_timeline):
                with self.assertRaisesRegex(ValueError, "set HOROVOD_TIMELINE"):
                    call()
        self.assertFalse(os.path.exists(self.file("t")))
        hvd.shutdown()
        try:
            for call in (lambda: hvd.start_timeline("t.json"), hvd.stop_timeline):
                with self.assertRaisesRegex(ValueError, "init"):
                    call()
        finally:
            hvd.init()


if __name__ == "__main__":
    unittest.main()
