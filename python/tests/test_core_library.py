"""Tests the engine of a rank in this process: joining and leaving jobs, threads, names, signals, fork, and the library
that cannot be used.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
import unittest.mock
from collections.abc import Callable
from typing import Any

import numpy as np

import gohvd
import gohvd.numpy as hvd
import programs
from gohvd import _engine, _library, ps
from gohvd.exceptions import HorovodInternalError

_JOBS, _ROUNDS = (500, 10000) if programs.stress else (120, 100)


def _memory() -> int:
    """Returns the number of bytes of resident memory of this process, without mapped files."""
    with open("/proc/self/status", encoding="ascii") as f:
        sizes = dict(line.split(":", 1) for line in f)
    return sum(int(sizes[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


class InTheJob(programs.Bounded):
    """Tests that all ranks of the job run together."""

    def test_again_and_again(self) -> None:
        """A process joins a job, runs operations and leaves the job many times. Its numbers of
        descriptors and of threads and its memory do not grow.
        """
        hvd.init()
        counts: list[int] = []
        threads: list[int] = []
        memory: list[int] = []
        large = np.ones(1 << 16)
        for i in range(_JOBS):
            hvd.init()
            self.assertEqual(hvd.allreduce(large, op=hvd.Sum)[-1], hvd.size())
            got = hvd.allreduce([float(hvd.rank()), float(i)], op=hvd.Sum)
            self.assertEqual(list(got), [hvd.size() * (hvd.size() - 1) / 2, float(i * hvd.size())])
            self.assertEqual(len(hvd.allgather([hvd.rank()])), hvd.size())
            hvd.shutdown()
            self.assertFalse(hvd.is_initialized())
            counts.append(len(os.listdir("/proc/self/fd")))
            threads.append(len(os.listdir("/proc/self/task")))
            memory.append(_memory())
        self.assertEqual(max(counts[10:]), counts[10], "descriptors")
        self.assertLess(threads[-1], threads[10] + 10, "threads")
        self.assertLess(memory[-1], max(memory[:20]) + (12 << 20), "bytes of memory")

    def test_before_init(self) -> None:
        hvd.init()
        hvd.shutdown()
        hvd.shutdown()
        for query in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_homogeneous):
            with self.assertRaisesRegex(ValueError, "Horovod has not been initialized; use hvd.init()."):
                query()
        with self.assertRaises(HorovodInternalError):
            hvd.allreduce([1.0])
        with self.assertRaises(HorovodInternalError):
            hvd.barrier()
        with self.assertRaises(ValueError):
            hvd.add_process_set([0])

    def test_threads(self) -> None:
        """Several threads submit operations and wait for them at the same time, and each gets its results.
        """
        hvd.init()
        failures: list[BaseException] = []

        def work(k: int) -> None:
            try:
                for i in range(_ROUNDS):
                    first = hvd.allreduce_async([float(k), float(i)], op=hvd.Sum, name=f"first{k}")
                    second = hvd.allgather_async([float(i)], name=f"second{k}")
                    got = hvd.allreduce([float(i)], op=hvd.Sum, name=f"thread{k}")
                    second.done()
                    assert list(second.wait()) == [i] * hvd.size(), second.wait()
                    assert [*first.wait(), *got] == [k * hvd.size(), i * hvd.size(), i * hvd.size()], (first.wait(), got)
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])

    def test_unnamed_in_threads(self) -> None:
        """Rank 0 runs its unnamed operations in other threads than the other ranks. Some take longer than a SLICE. A thread
        calls the library only once for each.
        """
        hvd.init()
        results: list[float] = []
        submitted: list[None] = []
        run = _library.waiting.hvd_run

        def work() -> None:
            for _ in range(40):
                if len(results) == 20 and hvd.rank() > 0:
                    time.sleep(1.5)  # a thread of rank 0 waits for this rank, and the others wait for that thread
                results.append(float(hvd.allreduce([1.0], op=hvd.Sum)[0]))

        def counted(*args: Any) -> int:
            submitted.append(None)
            return run(*args)

        threads = [threading.Thread(target=work) for _ in range(4)]
        with unittest.mock.patch.object(_library.waiting, "hvd_run", counted):
            for t in threads:
                if hvd.rank() == 0:
                    t.start()
                else:
                    work()
            for t in threads if hvd.rank() == 0 else []:
                t.join()
        self.assertEqual(results, [float(hvd.size())] * 160)
        self.assertEqual(len(submitted), 160)

    def test_unnamed_in_signal_handlers(self) -> None:
        """A signal handler runs an unnamed operation while its thread waits for one, or for the one of another thread. Then
        an exception of a handler ends the wait for that thread.
        """
        hvd.init()
        results: list[float] = []

        def run(*_: Any) -> None:
            results.append(float(hvd.allreduce([1.0], op=hvd.Sum)[0]))

        def fail(*_: Any) -> None:
            raise InterruptedError

        other = threading.Thread(target=run)
        before = signal.signal(signal.SIGALRM, run)
        for turn in range(2):
            if hvd.rank() == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                if turn:
                    other.start()
                run()
                while len(results) < 2 + turn * 3:  # the operations may be done before the signal comes
                    time.sleep(0.01)
            else:
                time.sleep(0.5)
                for _ in range(2 + turn):
                    run()
        signal.signal(signal.SIGALRM, fail)
        if hvd.rank() == 0 and hvd.size() > 1:
            begun, call = threading.Event(), _library.waiting.hvd_run
            other = threading.Thread(target=run)
            with unittest.mock.patch.object(_library.waiting, "hvd_run", lambda *args: begun.set() or call(*args)):
                other.start()
                begun.wait()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            self.assertRaises(InterruptedError, run)
            hvd.barrier()
            other.join()
        else:
            hvd.barrier()
            run()
        run()
        signal.signal(signal.SIGALRM, before)
        self.assertEqual(results, [float(hvd.size())] * 7)

    def outcomes(self, wait: Callable[[Any], None]) -> None:
        """Calls wait for operations that succeed and one that fails. Afterwards their outcomes must be known."""
        n = hvd.size()
        for turn in range(3):
            x = np.full(3, float(turn))
            handle = hvd.allreduce_async(x, op=hvd.Sum, name="outcome", out=x)
            wait(handle)
            self.assertIs(handle.wait(), x)
            self.assertEqual(list(x), [turn * n] * 3)
            handle = hvd.allgather_async(x, name="outcome")
            wait(handle)
            self.assertEqual(list(handle.wait()), list(x) * n)
            if n > 1:
                handle = hvd.allreduce_async(np.zeros(2 + hvd.rank()), name="outcome")
                wait(handle)
                for _ in range(2):
                    with self.assertRaisesRegex(HorovodInternalError, "rank 1"):
                        handle.wait()

    def test_threads_that_wait_for_one_operation(self) -> None:
        hvd.init()

        def wait(handle: Any) -> None:
            outcomes: list[Any] = []

            def one() -> None:
                try:
                    outcomes.append(handle.wait())
                except HorovodInternalError as e:
                    outcomes.append(str(e))

            threads = [threading.Thread(target=one) for _ in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            self.assertEqual(len(outcomes), 4)
            for outcome in outcomes:
                self.assertEqual(str(outcome), str(outcomes[0]))

        self.outcomes(wait)

    def test_outcomes_that_are_not_seen(self) -> None:
        """The exception of a signal handler comes just after the library has returned an outcome."""
        hvd.init()
        plain = _library.waiting.hvd_finish

        def cut(*args: Any) -> int:
            while plain(*args) == _library.PENDING:
                pass
            raise InterruptedError

        def wait(handle: Any) -> None:
            for _ in range(2):
                with unittest.mock.patch.object(_library.waiting, "hvd_finish", cut):
                    with self.assertRaises(InterruptedError):
                        handle.wait()

        self.outcomes(wait)

    def test_many_in_flight(self) -> None:
        """Many operations are in flight. The ranks submit them in different orders and wait
        for them in yet another order. All results are right.
        """
        hvd.init()
        for turn in range(3):
            order = range(3000) if hvd.rank() % 2 else range(2999, -1, -1)
            handles = {i: hvd.allreduce_async([float(i)], op=hvd.Sum, name=f"many{i}") for i in order}
            for i in range(3000):
                self.assertEqual(handles[i].wait()[0], i * hvd.size())

    def test_names_in_use(self) -> None:
        """A name stays in use until the program has learned that its operation is done. This is true even if the
        operation was done long before.
        """
        hvd.init()
        if hvd.size() > 1:
            if hvd.rank() == 0:
                first = hvd.allreduce_async([1.0], name="late")
                with self.assertRaisesRegex(ValueError, "late.*same name.*not synchronized"):
                    hvd.allreduce_async([1.0], name="late")
                self.assertFalse(first.done())
                hvd.barrier()
                first.wait()
            else:
                hvd.barrier()
                hvd.allreduce([1.0], name="late")
        # As hvd_check does when the job has ended, it replaces the details of the last error.
        ended = unittest.mock.patch.object(_library.quick, "hvd_check", lambda: _library.quick.hvd_wait(12345, 0.0, None))

        for see in (lambda h: h.wait(), lambda h: [None for _ in iter(h.done, True)]):
            for turn in range(3):
                first = hvd.allreduce_async([1.0], name="seen")
                hvd.barrier()  # after this barrier, the operation is done
                with self.assertRaisesRegex(ValueError, "seen"):
                    hvd.allreduce_async([1.0], name="seen")
                with ended, unittest.mock.patch.object(_library, "told", False):
                    with self.assertRaisesRegex(ValueError, 'allreduce "allreduce.seen"'):
                        hvd.allreduce([1.0], name="seen")
                see(first)
                second = hvd.allreduce_async([1.0], name="seen")
                first.wait()  # a second wait does not free the name, which another operation uses now
                with self.assertRaisesRegex(ValueError, "seen"):
                    hvd.allreduce_async([1.0], name="seen")
                see(second)

    def test_names_of_an_earlier_job(self) -> None:
        """The program does not wait for an operation. The name is in use until shutdown, and is free in the next job.
        """
        hvd.init()
        hvd.allreduce_async([1.0], name="left")
        hvd.shutdown()
        hvd.init()
        self.assertEqual(list(hvd.allreduce([1.0], name="left")), [1.0])

    def test_environment_of_a_later_init(self) -> None:
        hvd.init()
        hvd.shutdown()
        os.environ["HOROVOD_CACHE_CAPACITY"] = "none"
        try:
            with self.assertRaisesRegex((ValueError, HorovodInternalError), "HOROVOD_CACHE_CAPACITY"):
                hvd.init()
        finally:
            del os.environ["HOROVOD_CACHE_CAPACITY"]
        hvd.init()

    def test_dump(self) -> None:
        hvd.init()
        if os.environ.get("HVD_SIDECAR"):
            with self.assertRaisesRegex(ValueError, "sidecar"):
                gohvd.dump()
            return
        hvd.allreduce([1.0, 2.0], name="done")
        # Rank 0 submits the operation only when the others have looked, so they wait for it.
        waits = None if hvd.rank() == 0 else hvd.broadcast_async([1.0], 0, name="waits")
        dump = gohvd.dump()
        self.assertEqual(dump["rank"], hvd.rank())
        last = dump["operations"][-1]
        self.assertEqual((last["kind"], last["shape"]), ("allreduce", [2]))
        self.assertIn("done", last["name"])
        self.assertEqual([p["kind"] for p in dump["pending"]], ["broadcast"] if waits else [])
        hvd.barrier()
        (waits or hvd.broadcast_async([1.0], 0, name="waits")).wait()
        hvd.shutdown()
        with self.assertRaisesRegex(ValueError, "init"):
            gohvd.dump()
        hvd.init()

    def test_null_characters(self) -> None:
        """A text with a null character, at which the library would cut it, is refused."""
        hvd.init()
        calls: list[Callable[[str], Any]] = [
            lambda text: hvd.allreduce([1.0], name=text),
            lambda text: hvd.grouped_allreduce([[1.0]], name=text),
            lambda text: hvd.add_process_set([0], name=text),
            lambda text: ps.start({"DMLC_ROLE": text}),
            gohvd.mark_range,
            lambda text: _engine.engine.start_timeline(text, False),
        ]
        for call in calls:
            with self.assertRaisesRegex(ValueError, r"same\\x00not' has a null character"):
                call("same\0not")
        self.assertEqual(hvd.allreduce([1.0], op=hvd.Sum, name="same"), hvd.size())

    def test_a_part_of_the_job(self) -> None:
        hvd.init(comm=list(range(hvd.size())) if hvd.is_initialized() else None)
        if hvd.size() > 1:
            with self.assertRaisesRegex(ValueError, "process_sets"):
                hvd.init(comm=[0])
            self.assertTrue(hvd.is_initialized())  # this process stays in the job that it was in
            hvd.shutdown()
            with self.assertRaisesRegex(ValueError, "process_sets"):
                hvd.init(comm=[0])
            self.assertFalse(hvd.is_initialized())
        hvd.shutdown()
        with self.assertRaisesRegex(ValueError, "entry number 1 is a duplicate"):
            hvd.init(process_sets=[[0], [0]])
        with self.assertRaisesRegex(ValueError, "static"):
            hvd.init(process_sets="static")
        hvd.init()

    def test_ctrl_c(self) -> None:
        """Ctrl-C ends a wait within a moment. The operation goes on, and a later wait gets its result."""
        hvd.init()
        if hvd.size() == 1:
            self.skipTest("needs another rank")
        if hvd.rank() == 0:
            for begin in (lambda: hvd.allreduce([1.0], op=hvd.Sum, name="c"), hvd.allreduce_async([1.0], op=hvd.Sum, name="d").wait):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                with self.assertRaises(KeyboardInterrupt):
                    begin()
            again = threading.Thread(target=begin)
            again.start()
            hvd.barrier()
            again.join()
            self.assertEqual(list(begin()), [hvd.size()])
        else:
            hvd.barrier()
            for name in "cd":
                hvd.allreduce([1.0], op=hvd.Sum, name=name)
        hvd.barrier()


@unittest.skipUnless(programs.alone, "it has nothing to do with other ranks")
class Alone(programs.Programs):
    """Tests that run programs of one rank."""

    def test_no_library(self) -> None:
        script = """
            import gohvd.numpy as hvd
            try:
                hvd.init()
            except hvd.HorovodInternalError as e:
                print(type(e).__name__, e)
            """
        self.assertIn("LibraryError cannot load the library of gohvd: /no/such", self.run_program(script, HVD_LIBRARY="/no/such"))
        with tempfile.TemporaryDirectory() as top:
            other = os.path.join(top, "other.c")
            with open(other, "w", encoding="ascii") as f:
                f.write("int hvd_abi_version(void) { return 77; }")
            library = os.path.join(top, "libother.so")
            try:
                subprocess.run(["cc", "-shared", "-o", library, other], check=True)
            except FileNotFoundError:
                self.skipTest("needs a C compiler")
            out = self.run_program(script, HVD_LIBRARY=library)
        self.assertIn("LibraryError " + library + " has version 77 of its interface, and this package needs version 1", out)

    def test_import_loads_nothing(self) -> None:
        """A process that is forked after the import, and not after init, can be a rank."""
        out = self.run_program(
            """
            import os, sys
            import gohvd.numpy as hvd
            for _ in range(2):
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    hvd.init()
                    print("child", hvd.allreduce([3.0])[0], flush=True)
                    sys.exit(0)
                print("status", os.waitpid(pid, 0)[1])
            """
        )
        self.assertEqual(out.count("child 3.0"), 2, out)
        self.assertEqual(out.count("status 0"), 2, out)

    def test_interrupt(self) -> None:
        """A signal handler raises exceptions at any point of operations. Later operations work, and a wait that was
        interrupted can be made again.
        """
        out = self.run_program(
            """
            import os, signal, threading, time
            import gohvd.numpy as hvd
            hvd.init()
            handle = None

            class Tick(Exception):
                pass
            def tick(*_):
                raise Tick
            signal.signal(signal.SIGALRM, tick)
            ticks, steps, i, left = 0, 0, 0, []
            end = time.monotonic() + 3
            while time.monotonic() < end or ticks <= 20 and time.monotonic() < end + 40:
                i += 1
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.00002 + (i % 97) * 0.000003)
                    got = hvd.allreduce([float(i)], op=hvd.Sum)
                    gathered = hvd.allgather([float(i)])
                    handle = hvd.allreduce_async([float(i)], op=hvd.Sum)
                    again = handle.wait()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    steps += got[0] == gathered[0] == again[0] == i
                except Tick:
                    ticks += 1
                    if handle is not None:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        handle.wait()  # what the exception has interrupted can be done again
                handle = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            print("ticks", ticks > 20, ticks, "steps", steps)
            print("after", hvd.allreduce([5.0])[0])
            """
        )
        self.assertIn("ticks True", out)
        self.assertIn("after 5.0", out)

    def test_fork(self) -> None:
        """A forked process can query rank and size, and its operations raise an error. It does not disturb its parent,
        however it ends.
        """
        out = self.run_program(
            """
            import os, sys, threading, warnings
            warnings.simplefilter("error")
            import gohvd.numpy as hvd
            hvd.init()
            block = hvd.alloc(4)
            waiting = hvd.allreduce_async([7.0], name="waiting")
            stop = threading.Event()
            def work():
                while not stop.is_set():
                    hvd.allreduce([1.0], name="busy")
            thread = threading.Thread(target=work)
            thread.start()
            for end in ("exit", "_exit", "shutdown"):
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    try:
                        hvd.allreduce([1.0])
                    except hvd.HorovodInternalError as e:
                        print(end, "child:", hvd.rank(), hvd.size(), str(e).split(":")[0].replace(str(os.getpid()), "ME"), flush=True)
                    try:
                        waiting.wait()
                    except hvd.HorovodInternalError as e:
                        print(end, "waiting child:", "forked" in str(e), flush=True)
                    del block
                    if end == "_exit":
                        os._exit(0)
                    if end == "shutdown":
                        hvd.shutdown()
                    sys.exit(0)
                print(end, "status", os.waitpid(pid, 0)[1], hvd.allreduce([2.0])[0])
            stop.set()
            thread.join()
            print("waiting", waiting.wait(), hvd.allreduce(block))
            """
        )
        for end in ("exit", "_exit", "shutdown"):
            self.assertIn(f"{end} child: 0 1 process ME was forked from a rank of the job and is not a rank itself", out)
            self.assertIn(f"{end} waiting child: True", out)
            self.assertIn(f"{end} status 0 2.0", out)
        self.assertIn("waiting [7.] [0. 0. 0. 0.]", out)
        self.assertNotIn("Warning", out)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not here")
    def test_data_loader(self) -> None:
        out = self.run_program(
            """
            import torch, torch.utils.data
            import gohvd.torch as hvd
            class Squares(torch.utils.data.Dataset):
                def __len__(self): return 64
                def __getitem__(self, i): return torch.tensor([float(i * i), float(hvd.rank())])
            hvd.init()
            for epoch in range(2):
                loader = torch.utils.data.DataLoader(
                    Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=epoch == 1)
                total = sum(float(hvd.allreduce(batch, op=hvd.Sum, name="b").sum()) for batch in loader)
                print("total", total)
            """
        )
        self.assertEqual(out.count(f"total {float(sum(i * i for i in range(64)))}"), 2, out)


if __name__ == "__main__":
    unittest.main()
