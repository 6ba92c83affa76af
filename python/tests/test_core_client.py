"""Tests the connection to the sidecar: connecting, closing, threads, signals and forks. Other tests are about sidecars
that die or violate the protocol.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import mmap
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
import unittest.mock
from typing import Callable, List, Tuple

import programs

import gohvd.numpy as hvd
from gohvd import _client
from gohvd import _wire as wire
from gohvd._sidecar import find_sidecar, proof
from gohvd.exceptions import HorovodInternalError, SidecarError

_LIMIT_SECONDS = 100


class Bounded(unittest.TestCase):
    def setUp(self) -> None:
        faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)


class InTheJob(Bounded):
    """Tests that all ranks of the job run together."""

    def test_again_and_again(self) -> None:
        """A process joins a job, runs operations and leaves the job 120 times. It starts only one sidecar, its
        number of descriptors does not grow, and no request stays pending.
        """
        hvd.init()
        client = hvd._engine.engine.client()
        pid = client.pid
        counts: List[int] = []
        for i in range(120):
            hvd.init()
            got = hvd.allreduce([float(hvd.rank()), float(i)], op=hvd.Sum)
            self.assertEqual(list(got), [hvd.size() * (hvd.size() - 1) / 2, float(i * hvd.size())])
            self.assertEqual(len(hvd.allgather([hvd.rank()])), hvd.size())
            hvd.shutdown()
            self.assertFalse(hvd.is_initialized())
            counts.append(len(os.listdir("/proc/self/fd")))
        self.assertEqual(max(counts[10:]), counts[10], "descriptors")
        self.assertEqual(hvd._engine.engine.client().pid, pid)
        self.assertEqual(client._pending, {})

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
        """Several threads wait for operations at the same time. One of them reads from the socket for all, and each
        gets its result.
        """
        hvd.init()
        failures: List[BaseException] = []

        def work(k: int) -> None:
            try:
                for i in range(200):
                    got = hvd.allreduce([float(k), float(i)], op=hvd.Sum, name=f"thread{k}")
                    assert list(got) == [k * hvd.size(), i * hvd.size()], got
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(5)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])

    def test_the_next_reads(self) -> None:
        """The operation of the reader is done before those of the other waiting threads. Then another waiting thread
        becomes the reader.
        """
        hvd.init()
        client = hvd._engine.engine.client()
        for _ in range(20):
            never = _client.Pending()
            self.assertTrue(client._enter_reader())
            waiting = threading.Thread(target=client.wait, args=(never,))
            waiting.start()
            while not client._waiting:
                os.sched_yield()
            with client._mutex:
                pass  # from here on the thread waits, or checks once more before it waits
            client._leave_reader()
            while client._enter_reader():
                client._leave_reader()
                os.sched_yield()
            never.done = True
            client.call(wire.status)  # the answer of this call wakes the thread
            waiting.join(20)
            self.assertFalse(waiting.is_alive())

    def test_interrupted_readers(self) -> None:
        """A signal handler raises an exception at several points of a wait. Other threads can still become the reader
        afterwards.
        """
        hvd.init()
        client = hvd._engine.engine.client()

        class Signal(BaseException):
            pass

        def interrupted(name: str, after: bool, call: int = 1, at: Callable[[], object] = lambda: None) -> None:
            """Waits for an answer. Raises Signal before or after the given call of a method."""
            method, calls = getattr(client, name), 0

            def play(*args):
                nonlocal calls
                calls += 1
                if calls != call:
                    return method(*args)
                at()
                if after:
                    self.assertIsNot(method(*args), False)
                raise Signal

            answered = client.request(wire.status)
            setattr(client, name, play)
            try:
                with self.assertRaises(Signal):
                    client.wait(answered)
            finally:
                delattr(client, name)
            got: List[bool] = []
            other = threading.Thread(target=lambda: (got.append(client._enter_reader()), client._release_reader()))
            other.start()
            other.join(20)
            self.assertEqual(got, [True], f"{name} {after} {call}")
            client.wait(answered)

        for name in ("_enter_reader", "_may_sleep", "_read", "_leave_reader", "_release_reader"):
            for after in (False, True):
                interrupted(name, after)
        # In these cases this thread waits while another thread is the reader, and the other thread stops reading.
        for name, call in (("_enter_reader", 2), ("_release_reader", 1)):
            for after in (False, True):
                reading, end = threading.Event(), threading.Event()
                reader = threading.Thread(
                    target=lambda: (client._reader.acquire(), reading.set(), end.wait(20), client._reader.release())
                )
                reader.start()
                reading.wait(20)
                interrupted(name, after, call, lambda: (end.set(), reader.join(20)))

    def test_taken_twice(self) -> None:
        """A signal handler raises an exception after an answer was taken from the ring and before this was recorded.
        The answer is taken once more, and this is not an error.
        """
        hvd.init()
        client = hvd._engine.engine.client()
        for _ in range(4):
            hvd.allreduce([1.0], name="taken")
        client.poll_all()
        before = client._words[_client._SEEN]
        self.assertGreater(before, 0, "the ring is used")
        client._words[_client._SEEN] = before - 1
        client._state = (wire.frame(b"\x08" + wire.varint(client._just_answered)), 0, (), [], 0)
        client.poll_all()
        self.assertFalse(client.over)
        self.assertEqual(client._words[_client._SEEN], before)
        self.assertEqual(list(hvd.allreduce([1.0], op=hvd.Sum, name="taken")), [hvd.size()])

    def test_many_in_flight(self) -> None:
        """More operations are in flight than the ring has entries. The ranks submit them in different orders and wait
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
        client = hvd._engine.engine.client()
        for see in (lambda h: h.wait(), lambda h: [None for _ in iter(h.done, True)]):
            for turn in range(3):
                first = hvd.allreduce_async([1.0], name="seen")
                hvd.barrier()  # after this barrier, the operation is done
                client.poll_all()
                with self.assertRaisesRegex(ValueError, "seen"):
                    hvd.allreduce_async([1.0], name="seen")
                with self.assertRaisesRegex(ValueError, "seen"):
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

    def test_names_of_no_use(self) -> None:
        """Unnamed operations for which the program does not wait do not occupy names. The client drops names that are
        not in use.
        """
        hvd.init()
        client = hvd._engine.engine.client()
        unseen = hvd.allreduce_async([1.0], name="unseen")
        with unittest.mock.patch.object(_client, "_MIN_NAMES", 16):
            client._most_names = 16
            for i in range(100):
                hvd.allreduce_async([1.0])
                hvd.allreduce([1.0], name=f"once{i}")
                self.assertLessEqual(len(client._names), 16)
        with self.assertRaises(ValueError):
            hvd.allreduce_async([1.0], name="unseen")
        unseen.wait()

    def test_two_clients_know_the_same_sets(self) -> None:
        """Two clients use the same sidecar. The second client finds the process sets that the first has added. It
        cannot use a set that was removed.
        """
        if not programs.alone:
            self.skipTest("runs at one rank")
        script = """
            import os, subprocess, sys, time
            from gohvd._sidecar import find_sidecar
            path = sys.argv[1] + os.environ["HOROVOD_RANK"]
            daemon = subprocess.Popen([find_sidecar(), "--socket", path])
            while not os.path.exists(path):
                os.sched_yield()
            os.environ["HVD_SIDECAR"] = "unix://" + path
            import gohvd.numpy as hvd
            from gohvd import _engine, _wire
            from gohvd.process_sets import ProcessSet, global_process_set
            other = _engine.Engine()
            other.global_set = ProcessSet(None)
            other.global_set.process_set_id = 0
            hvd.init()
            other.init([], {})
            added = hvd.add_process_set([0])
            same = ProcessSet([0])
            other.init([same], {})
            assert same.process_set_id == added.process_set_id == 1, same
            assert other.set_ranks() == {0: [0, 1], 1: [0]}, other.set_ranks()
            if hvd.rank() == 0:
                other.simple(_wire.BARRIER, same)
            hvd.barrier()
            hvd.remove_process_set(added)
            assert other.set_ranks() == {0: [0, 1]}, other.set_ranks()
            try:
                other.init([ProcessSet([0])], {})
            except ValueError as e:
                print("gone:", e)
            if hvd.rank() == 0:
                try:
                    other.simple(_wire.BARRIER, same)
                except ValueError as e:
                    print("no barrier:", e)
            hvd.barrier()
            other.close()
            daemon.terminate()
            daemon.wait(20)
            """
        with tempfile.TemporaryDirectory() as top:
            out = programs.run(
                script, os.path.join(top, "s"), interpreter=(os.environ["HVD_RUN"], "-np", "2", sys.executable), HVD_SECRET="x" * 32
            )
            self.assertEqual(out.returncode, 0, out.stdout + out.stderr)
        self.assertEqual(out.stdout.count("gone:"), 2, out.stdout)
        self.assertEqual(out.stdout.count("no barrier:"), 1, out.stdout)

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

    def test_a_part_of_the_job(self) -> None:
        hvd.init(comm=list(range(hvd.size())) if hvd.is_initialized() else None)
        if hvd.size() > 1:
            with self.assertRaisesRegex(ValueError, "process_sets"):
                hvd.init(comm=[0])
        hvd.shutdown()
        with self.assertRaisesRegex(ValueError, "entry number 1 is a duplicate"):
            hvd.init(process_sets=[[0], [0]])
        with self.assertRaisesRegex(ValueError, "static"):
            hvd.init(process_sets="static")
        hvd.init()


@unittest.skipUnless(programs.alone, "it has nothing to do with other ranks")
class Alone(Bounded):
    """Tests that run programs of one rank. Each program is a new process."""

    def run_program(self, script: str, *args: str, status: int = 0, **env: str) -> str:
        """Runs a program, checks its exit status, and returns what it has printed."""
        got = programs.run(script, *args, **env)
        self.assertEqual(got.returncode, status, f"{got.stdout}\n{got.stderr}")
        return got.stdout + got.stderr

    def test_the_sidecar_is_killed(self) -> None:
        out = self.run_program(
            """
            import os, signal, threading
            import gohvd.numpy as hvd
            from gohvd._engine import engine
            hvd.init()
            hvd.allreduce([1.0])
            pid = engine.client().pid
            block = hvd.alloc(4)
            block[:] = 3
            hvd.allreduce(block, out=block)
            # This thread waits for an answer that never comes while a timer kills the sidecar.
            pending = engine.client()
            def work():
                p = _client.Pending()
                pending.wait(p)
            import gohvd._client as _client
            p = _client.Pending()
            pending._pending[1 << 40] = p
            threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
            try:
                pending.wait(p)
            except hvd.HorovodInternalError as e:
                print("waiting:", e)
            for f in (lambda: hvd.allreduce([1.0]), hvd.barrier, lambda: pending.call(print)):
                try:
                    f()
                except hvd.HorovodInternalError as e:
                    print("later:", str(e) == str(p.error()))
            hvd.shutdown()
            hvd.init()
            print("new:", engine.client().pid != pid, hvd.allreduce([1.0], op=hvd.Sum))
            # The block is in an arena of the old client, so the new one copies it through an arena of its
            # own.
            print("old memory:", hvd.allreduce(block, op=hvd.Sum, out=block), block is not None)
            """
        )
        self.assertIn("was killed by SIGKILL", out)
        self.assertEqual(out.count("later: True"), 3, out)
        self.assertIn("new: True [1.]", out)
        self.assertIn("old memory: [3. 3. 3. 3.]", out)
        self.assertIn("waiting: ", out)

    def test_end_of_log(self) -> None:
        with tempfile.TemporaryDirectory() as top:
            fake = os.path.join(top, "hvdd")
            with open(fake, "w") as f:
                f.write("#!/bin/sh\necho out of cheese >&2\nexit 3\n")
            os.chmod(fake, 0o700)
            out = self.run_program(
                """
                import gohvd.numpy as hvd
                try:
                    hvd.init()
                except hvd.HorovodInternalError as e:
                    print("error:", str(e).replace(chr(10), " "))
                """,
                HVD_SIDECAR_BINARY=fake,
            )
        self.assertRegex(out, "error: .*exited with status 3.*the end of its log: out of cheese")
        self.assertEqual(out.count("out of cheese"), 2, "it is passed on as well")

    def test_where_it_is(self) -> None:
        script = """
            from gohvd._sidecar import find_sidecar
            try:
                print("found", find_sidecar())
            except RuntimeError as e:
                print(e)
            """
        binary = find_sidecar()
        self.assertIn(f"found {binary}", self.run_program(script, HVD_SIDECAR_BINARY=binary))
        self.assertIn("'/nowhere', want the path of an executable file", self.run_program(script, HVD_SIDECAR_BINARY="/nowhere"))
        with tempfile.TemporaryDirectory() as top:
            out = self.run_program(script, HVD_SIDECAR_BINARY="", PATH=top)
            for part in ("HVD_SIDECAR_BINARY", os.path.join("gohvd", "bin", "hvdd"), "PATH", "go build ./cmd/hvdd"):
                self.assertIn(part, out)
            os.symlink(binary, os.path.join(top, "hvdd"))
            self.assertIn(f"found {top}/hvdd", self.run_program(script, HVD_SIDECAR_BINARY="", PATH=top))
            package = os.path.join(top, "gohvd")
            shutil.copytree(os.path.dirname(_client.__file__), package)
            os.makedirs(os.path.join(package, "bin"))
            os.symlink(binary, os.path.join(package, "bin", "hvdd"))
            out = self.run_program(script, HVD_SIDECAR_BINARY="", PATH=top, PYTHONPATH=top)
            self.assertIn(f"found {package}/bin/hvdd", out)

    def test_a_launcher_that_speaks_pmi(self) -> None:
        """PMI_FD is passed to the sidecar only if it is the number of a socket and the launcher has set PMI_RANK.
        Otherwise init ignores it.
        """
        script = """
            import os, socket, sys
            what = sys.argv[1]
            if what == "file":
                fd = os.open("/dev/null", os.O_RDONLY)
            elif what == "closed":
                # The next descriptor that is opened gets the same number.
                fd = os.open("/dev/null", os.O_RDONLY)
                os.close(fd)
            elif what == "socket":
                a, b = socket.socketpair()
                fd = a.fileno()
            else:
                fd = int(what)
            os.environ["PMI_FD"] = str(fd)
            import gohvd.numpy as hvd
            try:
                hvd.init()
                print("size", hvd.size())
            except hvd.HorovodInternalError as e:
                print("error:", str(e).replace(chr(10), " "))
            """
        for what in ("file", "closed", "socket", "77", "99999999999999999999"):
            self.assertIn("size 1", self.run_program(script, what), what)
        with tempfile.TemporaryDirectory() as top:
            fake = os.path.join(top, "hvdd")
            with open(fake, "w") as f:
                f.write('#!/bin/sh\necho "it has ${PMI_FD:-none}:" >&2\nreadlink /proc/$$/fd/$PMI_FD >&2\nexit 3\n')
            os.chmod(fake, 0o700)
            for what, want in (("file", "it has none"), ("closed", "it has none"), ("socket", r"it has \d+: socket:")):
                out = self.run_program(script, what, HVD_SIDECAR_BINARY=fake, PMI_RANK="0", PMI_SIZE="2")
                self.assertRegex(out, "error: .*" + want)
            out = self.run_program(script, "socket", HVD_SIDECAR_BINARY=fake)
            self.assertRegex(out, "error: .*it has none")

    def test_timeline_signal(self) -> None:
        """A signal to hvdrun starts the timelines of all ranks, and a second signal stops them. The ranks have forked
        processes, which do not react to the signals.
        """
        script = """
            import os, signal, sys, time
            import gohvd.numpy as hvd
            os.chdir(sys.argv[1])
            before = signal.getsignal(signal.SIGUSR2)
            hvd.init()
            worker = os.fork()
            if worker == 0:
                while True:
                    signal.pause()
            print("ready", flush=True)
            while not hvd.allreduce([float(os.path.exists("stop"))], name="work", op=hvd.Max)[0]:
                time.sleep(0.01)  # a step takes some time, so that the file stays short
            os.kill(worker, 0)
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            hvd.shutdown()
            print("as before:", signal.getsignal(signal.SIGUSR2) == before, flush=True)
            """
        with tempfile.TemporaryDirectory() as top:
            files = [os.path.join(top, name) for name in ("hvd-timeline.json", "hvd-timeline.rank1.json")]
            job = subprocess.Popen(
                [os.environ["HVD_RUN"], "-np", "2", sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script), top],
                env=programs.environment(HOROVOD_TIMELINE="DYNAMIC", HVD_TIMELINE_SIGNAL="SIGUSR2"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.addCleanup(job.wait)
            self.addCleanup(job.kill)
            assert job.stdout is not None
            self.addCleanup(job.stdout.close)
            out = ""

            def until(so: Callable[[], bool], what: str) -> None:
                deadline = time.monotonic() + 60
                while not so():
                    self.assertLess(time.monotonic(), deadline, f"{what}: {out}")
                    self.assertIsNone(job.poll(), f"{what}: {out}{job.stdout.read() if job.poll() is not None else ''}")
                    time.sleep(0.01)

            def says(file: str, what: str) -> bool:
                with open(file, encoding="utf-8") as f:
                    return what in f.read()

            while out.count("ready") < 2:
                line = job.stdout.readline()
                self.assertTrue(line, out)
                out += line
            job.send_signal(signal.SIGUSR2)
            until(lambda: all(os.path.exists(f) and says(f, "ALLREDUCE") for f in files), "the timeline starts")
            job.send_signal(signal.SIGUSR2)
            until(lambda: all(says(f, "hvd_end") for f in files), "the timeline stops")
            open(os.path.join(top, "stop"), "w").close()
            out += job.stdout.read()
            self.assertEqual(job.wait(30), 0, out)
            self.assertEqual(out.count("as before: True"), 2, out)
            # If a rank received a signal twice, there would be a second timeline.
            self.assertEqual(sorted(os.listdir(top)), ["hvd-timeline.json", "hvd-timeline.rank1.json", "stop"])

    def test_handler_of_the_timeline_signal(self) -> None:
        out = self.run_program(
            """
            import faulthandler, os, signal, threading, warnings
            warnings.simplefilter("always")
            import gohvd.numpy as hvd
            from gohvd._engine import engine

            def inits(what, setting="sigusr1"):
                os.environ["HVD_TIMELINE_SIGNAL"] = setting
                engine._timeline_signal._warned = False
                before = signal.getsignal(signal.SIGUSR1)
                with warnings.catch_warnings(record=True) as caught:
                    for _ in range(2):
                        hvd.init()
                        ours = signal.getsignal(signal.SIGUSR1) == engine._timeline_signal._handle
                        hvd.shutdown()
                same = signal.getsignal(signal.SIGUSR1) == before
                # The warning names a line of this program.
                print(what, ours, same, [f"{w.category.__name__} {w.message}" for w in caught if w.filename == "<string>"])

            inits("default")
            inits("not set", "")
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            inits("ignored")
            signal.signal(signal.SIGUSR1, print)
            inits("own")
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            faulthandler.register(signal.SIGUSR1)
            inits("of C")
            faulthandler.unregister(signal.SIGUSR1)
            thread = threading.Thread(target=inits, args=("thread",))
            thread.start()
            thread.join()

            # A handler that the program sets after init stays.
            hvd.init()
            signal.signal(signal.SIGUSR1, print)
            hvd.shutdown()
            print("kept", signal.getsignal(signal.SIGUSR1) is print)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)

            # Shutdown restores the handler even if the sidecar has died.
            hvd.init()
            os.kill(engine.client().pid, signal.SIGKILL)
            try:
                hvd.barrier()
            except hvd.HorovodInternalError:
                pass
            os.kill(os.getpid(), signal.SIGUSR1)
            print("lives")
            """
        )
        for what, want in (
            ("default", "True True []"),
            ("not set", "False True []"),
            ("ignored", "True True []"),
            ("own", "False True ['RuntimeWarning gohvd: HVD_TIMELINE_SIGNAL has no effect: the program already has a handler"),
            ("of C", "False True ['RuntimeWarning gohvd: HVD_TIMELINE_SIGNAL has no effect: the program already has a handler"),
            ("thread", "False True ['RuntimeWarning gohvd: HVD_TIMELINE_SIGNAL has no effect: init was called outside"),
            ("kept", "True"),
            ("lives", ""),
        ):
            self.assertIn(f"{what} {want}".strip(), out)
        self.assertEqual(out.count("has no effect"), 3, out)

    def test_the_sidecar_ends_with_the_program(self) -> None:
        for end in ("", "os._exit(0)", "os.kill(os.getpid(), 9)", "raise SystemExit"):
            got = programs.run(
                f"""
                import os
                import gohvd.numpy as hvd
                from gohvd._engine import engine
                hvd.init()
                print(engine.client().pid, flush=True)
                {end}
                """
            )
            pid = int(got.stdout)
            deadline = time.monotonic() + 60
            while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
                os.sched_yield()
            self.assertFalse(os.path.exists(f"/proc/{pid}"), f"sidecar {pid} lives after {end!r}\n{got.stderr}")

    def test_interrupt(self) -> None:
        """Ctrl-C ends a wait at any point. The connection is still usable afterwards."""
        out = self.run_program(
            """
            import os, signal, threading, time
            import gohvd.numpy as hvd
            from gohvd import _client
            from gohvd._engine import engine
            hvd.init()
            client = engine.client()
            never = _client.Pending()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            never.held = True
            try:
                client.wait(never)
            except KeyboardInterrupt:
                print("interrupted once", never.held)
            # A second thread is the reader, so this one waits for it.
            reader = threading.Thread(target=client.wait, args=(never,), daemon=True)
            reader.start()
            while client._reader.acquire(False):
                client._reader.release()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                client.wait(_client.Pending())
            except KeyboardInterrupt:
                print("interrupted again")
            never.done = True
            for i in range(20):
                hvd.allreduce([1.0])  # each answer wakes the reader, which then sees that it is done
            reader.join(10)

            class Tick(Exception):
                pass
            def tick(*_):
                raise Tick
            signal.signal(signal.SIGALRM, tick)
            ticks, steps, i = 0, 0, 0
            end = time.monotonic() + 3
            while time.monotonic() < end or ticks <= 20 and time.monotonic() < end + 40:
                i += 1
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.00002 + (i % 97) * 0.000003)
                    got = hvd.allreduce([float(i)], op=hvd.Sum)
                    got = hvd.allgather([float(i)])
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    steps += got[0] == i
                except Tick:
                    ticks += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            print("ticks", ticks > 20, ticks, "steps", steps)
            print("after", hvd.allreduce([5.0])[0])
            """
        )
        self.assertIn("interrupted once False", out)
        self.assertIn("interrupted again", out)
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
            from gohvd import _client
            client = hvd._engine.engine.client()
            waiting = client._pending[1 << 40] = _client.Pending()
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
                        client.wait(waiting)
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
            print("waiting", waiting.done, hvd.allreduce(block))
            """
        )
        for end in ("exit", "_exit", "shutdown"):
            self.assertIn(f"{end} child: 0 1 process ME was forked from a rank of the job and is not a rank itself", out)
            self.assertIn(f"{end} waiting child: True", out)
            self.assertIn(f"{end} status 0 2.0", out)
        self.assertIn("waiting False [0. 0. 0. 0.]", out)
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

    def test_a_sidecar_of_others(self) -> None:
        """A sidecar listens at a path and requires the job's secret. Clients with the secret can use it, and clients
        without it are refused.
        """
        with tempfile.TemporaryDirectory() as top:
            path = os.path.join(top, "s")
            daemon = subprocess.Popen(
                [find_sidecar(), "--socket", path], env=programs.environment(HVD_SECRET="the secret of this job"), stderr=subprocess.PIPE
            )
            try:
                deadline = time.monotonic() + 20
                while not os.path.exists(path) and time.monotonic() < deadline:
                    os.sched_yield()
                script = """
                    import gohvd.numpy as hvd
                    try:
                        hvd.init()
                    except hvd.HorovodInternalError as e:
                        print("refused:", e)
                        raise SystemExit
                    print("sum", hvd.allreduce([4.0], op=hvd.Sum), hvd.allgather([1]))
                    """
                for _ in range(2):
                    out = self.run_program(script, HVD_SIDECAR="unix://" + path, HVD_SECRET=" the secret of this job\n")
                    self.assertIn("sum [4.] [1]", out)
                with open(os.path.join(top, "secret"), "w") as f:
                    f.write("the secret of this job\n")
                out = self.run_program(
                    script, HVD_SIDECAR="unix://" + path, HVD_SECRET_FILE=os.path.join(top, "secret")
                )
                self.assertIn("sum [4.] [1]", out)
                for secret in ("", "another secret, not this"):
                    out = self.run_program(script, HVD_SIDECAR="unix://" + path, HVD_SECRET=secret)
                    self.assertIn("refused:", out)
            finally:
                daemon.terminate()
                daemon.communicate(timeout=20)
        self.assertIn("refused: cannot connect to the sidecar at", self.run_program(script, HVD_SIDECAR="unix:///nowhere/s"))

    @unittest.skipUnless(os.geteuid() == 0, "only root can run a program as another user")
    def test_a_sidecar_of_another_user(self) -> None:
        """A process of another user listens at the path of the sidecar. The client sends it nothing."""
        listen = """if True:
            import socket, sys
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(sys.argv[1])
            listener.listen(1)
            print("listening", flush=True)
            print("received", listener.accept()[0].recv(100))
            """
        with tempfile.TemporaryDirectory() as top:
            os.chmod(top, 0o777)
            path = os.path.join(top, "s")
            with subprocess.Popen(
                [sys.executable, "-c", listen, path], user=65534, cwd="/", stdout=subprocess.PIPE
            ) as other:
                assert other.stdout is not None
                self.assertEqual(other.stdout.readline(), b"listening\n")
                out = self.run_program(
                    """
                    import gohvd.numpy as hvd
                    try:
                        hvd.init()
                    except hvd.HorovodInternalError as e:
                        print("refused:", e)
                    """,
                    HVD_SIDECAR="unix://" + path,
                )
                self.assertIn("runs as user 65534, want user 0", out)
                self.assertEqual(other.communicate(timeout=20)[0], b"received b''\n")


class Fake:
    """A fake sidecar in this process. It exchanges greetings, maps the ring and then calls script."""

    def __init__(self, top: str, script: Callable[["Fake"], None], greet: bytes = b"GHVD\0\0\0\2") -> None:
        self.path = os.path.join(top, "fake")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(1)
        self.greet = greet
        self.script = script
        self.error: List[BaseException] = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.sock, _ = self.listener.accept()
            self.sock.settimeout(20)
            with self.sock:
                self.sock.recv(8)
                self.sock.sendall(self.greet)
                if self.greet != b"GHVD\0\0\0\2":
                    return
                _, fds, _, _ = socket.recv_fds(self.sock, 100, 1)
                self.ring = fds[0]
                self.send(b"\x08\x01")
                try:
                    self.script(self)
                finally:
                    os.close(self.ring)
        except BaseException as e:
            self.error.append(e)

    def send(self, reply: bytes) -> None:
        self.sock.sendall(wire.varint(len(reply)) + reply)

    def until_closed(self) -> None:
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass

    def close(self) -> None:
        self.thread.join(20)
        self.listener.close()


class WithFake(Bounded):
    def meet(self, script: Callable[[Fake], None], use: Callable[[_client.Client], None], **kw: bytes) -> None:
        with tempfile.TemporaryDirectory() as top:
            fake = Fake(top, script, **kw)
            os.environ["HVD_SIDECAR"] = "unix://" + fake.path
            secret = {k: os.environ.pop(k) for k in ("HVD_SECRET", "HVD_SECRET_FILE") if k in os.environ}
            try:
                client = _client.Client()
                try:
                    use(client)
                finally:
                    client.close()
            finally:
                del os.environ["HVD_SIDECAR"]
                os.environ.update(secret)
                fake.close()
            self.assertEqual(fake.error, [])


@unittest.skipUnless(programs.alone, "it has nothing to do with other ranks")
class Ring(WithFake):
    """Tests when the client sends doorbells, and after which completion it requests a doorbell from the sidecar."""

    class Sidecar:
        """The end of the ring that belongs to the sidecar."""

        def __init__(self, fake: Fake) -> None:
            self.fake = fake
            self.map = mmap.mmap(fake.ring, 0)
            self.words = memoryview(self.map).cast("Q")
            self.completed = 0

        def complete(self, *idents: int) -> None:
            for ident in idents:
                struct.pack_into("<QI", self.map, 4096 + 16 * (_client._RING_ENTRIES + self.completed), ident, 0)
                self.completed += 1
            self.words[_client._COMPLETED] = self.completed

        def notify(self) -> None:
            # A client that polls the ring may have seen the completion and closed the connection before this doorbell.
            with contextlib.suppress(BrokenPipeError):
                self.fake.sock.sendall(b"\0")

        def until(self, word: int, *values: int) -> None:
            """Waits until a word of the ring has one of the given values, which the client sets."""
            end = time.monotonic() + 20
            while self.words[word] not in values:
                assert time.monotonic() < end, (word, self.words[word], values)
                os.sched_yield()

        def doorbell_came(self) -> bool:
            """Returns whether the client has sent a doorbell that the fake sidecar has not read."""
            return bool(select.select([self.fake.sock], [], [], 0)[0])

        def expect_doorbell(self, often: bool = False) -> None:
            got = self.fake.sock.recv(100)
            assert got == b"\0" or often and not got.strip(b"\0"), got
            self.words[_client._TAKEN] = self.words[_client._SUBMITTED]

    def meet_ring(self, script: Callable[[Ring.Sidecar], None], use: Callable[[_client.Client], None]) -> None:
        def play(fake: Fake) -> None:
            sidecar = Ring.Sidecar(fake)
            script(sidecar)
            fake.until_closed()

        self.meet(play, use)

    def operation(self, slot: int) -> _client.Operation:
        op = _client.Operation(b"", f"operation {slot}")
        op.slot = slot
        return op

    def five(self, client: _client.Client) -> Tuple[List[_client.Pending], threading.Thread]:
        """Submits five operations. Starts a thread that waits for the first operation and then for the others."""
        every = [client.submit(self.operation(i), later=True) for i in range(5)]
        first = threading.Thread(target=client.wait, args=(every[0], every[1:]))
        first.start()
        return every, first

    def test_deferred_notification(self) -> None:
        step = threading.Barrier(2, timeout=20)

        def script(s: Ring.Sidecar) -> None:
            step.wait()  # the client has made three submissions and deferred the notification
            assert s.words[_client._SUBMITTED] == 3 and not s.doorbell_came()
            step.wait()
            s.expect_doorbell()  # two calls of notify_now send one doorbell in total
            step.wait()  # the client has made one more submission and deferred the notification
            assert not s.doorbell_came()
            step.wait()
            s.expect_doorbell()  # for a submission whose notification is not deferred
            step.wait()
            s.expect_doorbell()  # a wait sends the doorbell for a deferred submission
            s.complete(2, 3, 4, 5, 6, 7)
            s.notify()
            step.wait()  # a signal has interrupted the submission before the doorbell
            assert not s.doorbell_came()
            step.wait()
            s.expect_doorbell()  # the wait for this operation sends the doorbell
            s.complete(8)
            s.notify()

        def use(client: _client.Client) -> None:
            all_of_them = [client.submit(self.operation(i), later=True) for i in range(3)]
            step.wait()
            step.wait()
            client.notify_now()
            client.notify_now()
            all_of_them.append(client.submit(self.operation(3), later=True))
            step.wait()
            step.wait()
            all_of_them.append(client.submit(self.operation(4)))
            step.wait()
            all_of_them.append(client.submit(self.operation(5), later=True))
            for p in all_of_them:
                client.wait(p)

            class Signal(BaseException):
                pass

            def interrupt(when: int) -> None:
                raise Signal

            client._notify = interrupt  # type: ignore[method-assign]
            with self.assertRaises(Signal):
                client.submit(self.operation(6))
            del client._notify  # type: ignore[method-assign]
            step.wait()
            step.wait()
            (p,) = client._pending.values()
            client.wait(p)

        self.meet_ring(script, use)

    def test_doorbell_after_a_frame(self) -> None:
        """A signal has interrupted the client after it sent a frame, and the frame is still in the outbox. The client
        sends the doorbell nevertheless.
        """

        def script(s: Ring.Sidecar) -> None:
            s.expect_doorbell()
            s.complete(2)
            s.notify()

        def use(client: _client.Client) -> None:
            frame = _client._OutgoingFrame(b"sent")
            frame.sent = [len(frame.data)]
            client._outbox.append(frame)
            client.wait(client.submit(self.operation(0)))

        self.meet_ring(script, use)

    def test_no_doorbell_for_a_sidecar_that_looks(self) -> None:
        step = threading.Barrier(2, timeout=20)

        def script(s: Ring.Sidecar) -> None:
            s.words[_client._LOOKING] = 1
            step.wait()
            step.wait()
            assert not s.doorbell_came()
            s.complete(2)
            s.notify()

        def use(client: _client.Client) -> None:
            step.wait()
            p = client.submit(self.operation(0))
            step.wait()
            client.wait(p)

        self.meet_ring(script, use)

    def test_one_doorbell_until_it_wakes(self) -> None:
        """A sleeping sidecar has got a doorbell. It gets no second one before it has taken a submission."""
        step = threading.Barrier(2, timeout=20)

        def script(s: Ring.Sidecar) -> None:
            step.wait()
            s.expect_doorbell()  # three submissions send one doorbell
            step.wait()
            step.wait()
            s.expect_doorbell()  # one more submission sends a doorbell
            step.wait()

        def use(client: _client.Client) -> None:
            for i in range(3):
                client.submit(self.operation(i))
            client.notify_now()
            step.wait()
            step.wait()
            client.submit(self.operation(3))
            step.wait()
            step.wait()

        self.meet_ring(script, use)

    def test_wait_for_what_is_done(self) -> None:
        """The client waits for an operation that is already done. Afterwards the ring says that no thread waits."""

        def script(s: Ring.Sidecar) -> None:
            s.expect_doorbell()
            s.complete(2)
            s.notify()

        def use(client: _client.Client) -> None:
            p = client.submit(self.operation(0))
            client.wait(p)
            client.wait(p)
            self.assertEqual(client._words[_client._WANTED], _client._NEVER)

        self.meet_ring(script, use)

    def test_sidecar_that_looks_soon(self) -> None:
        """The sidecar looks at the ring every millisecond. It gets a doorbell only for a wait, and only if it has not
        taken all submissions.
        """
        step = threading.Barrier(2, timeout=20)

        def script(s: Ring.Sidecar) -> None:
            s.words[_client._LOOKING] = _client._SOON
            step.wait()
            step.wait()
            assert not s.doorbell_came()
            s.words[_client._TAKEN] = 1
            step.wait()
            step.wait()  # the client has called notify_now
            assert not s.doorbell_came()
            step.wait()
            s.expect_doorbell()
            s.complete(2, 3)
            s.notify()

        def use(client: _client.Client) -> None:
            step.wait()
            first = client.submit(self.operation(0))
            step.wait()
            step.wait()
            client.notify_now()
            step.wait()
            step.wait()
            client.wait(client.submit(self.operation(1)))
            client.wait(first)

        self.meet_ring(script, use)

    def test_sleeps_until_half_is_done(self) -> None:
        def script(s: Ring.Sidecar) -> None:
            s.expect_doorbell()
            s.until(_client._WANTED, 5)  # the client waits for the first operation and for half of the other eight
            s.complete(3, 4, 5, 6)  # these completions send no doorbell
            time.sleep(0.05)  # long enough for a client that polls the ring to see the completions
            assert s.words[_client._SEEN] == 0, s.words[_client._SEEN]
            s.complete(7)
            s.notify()
            s.until(_client._SEEN, 5)
            s.until(_client._WANTED, 6)  # the first operation is not among the completed ones
            s.complete(2)
            s.notify()
            s.until(_client._WANTED, 8)  # the next operation and half of the other two that are not done
            s.complete(8, 9, 10)
            s.notify()

        def use(client: _client.Client) -> None:
            every = [client.submit(self.operation(i), later=True) for i in range(9)]
            frames = [_client.Pending(), _client.Pending()]  # frames answer these requests, not the ring
            client.wait(every[0], [*every[1:], *frames])
            self.assertEqual([p.done for p in every], 6 * [True] + 3 * [False])
            client.wait(every[6], every[7:])
            for p in every:
                client.wait(p)

        self.meet_ring(script, use)

    def test_two_that_wait(self) -> None:
        """One thread is the reader, and a second thread waits too. The reader then wakes up for each completion, so
        that the second thread learns of its own completion immediately.
        """
        both = threading.Event()

        def script(s: Ring.Sidecar) -> None:
            s.expect_doorbell()
            s.until(_client._WANTED, 3)
            s.complete(5)
            both.set()
            s.expect_doorbell()  # the wait of the second thread sends a doorbell
            s.notify()
            s.until(_client._SEEN, 1)
            s.until(_client._WANTED, 2)  # without the second thread, the first thread would wait for more completions
            s.complete(6)
            s.notify()
            s.until(_client._SEEN, 2)
            s.complete(2, 3, 4)
            s.notify()

        def use(client: _client.Client) -> None:
            every, first = self.five(client)
            self.assertTrue(both.wait(20))
            client.wait(every[4])
            first.join(20)
            self.assertTrue(every[0].done)

        self.meet_ring(script, use)

    def test_another_reads_first(self) -> None:
        """A thread counts the completions to wait for. Before it sleeps, an operation completes. The thread does not
        wait for one completion too many.
        """
        step = threading.Barrier(2, timeout=20)

        def script(s: Ring.Sidecar) -> None:
            s.expect_doorbell()
            step.wait()
            s.complete(3, 4, 5, 6, 7, 8, 9)
            step.wait()
            end = time.monotonic() + 20
            while s.words[_client._SEEN] < 7 or s.words[_client._WANTED] > 10:
                assert time.monotonic() < end, list(s.words[40:41])
                os.sched_yield()
            s.complete(2, 10, 11)
            s.notify()

        def use(client: _client.Client) -> None:
            every = [client.submit(self.operation(i), later=True) for i in range(10)]
            enter = client._enter_reader

            def late() -> bool:
                del client._enter_reader  # type: ignore[method-assign]
                step.wait()
                step.wait()
                client.poll_all()
                return enter()

            client._enter_reader = late  # type: ignore[method-assign]
            client.wait(every[0], every[1:])
            self.assertTrue(every[0].done)

        self.meet_ring(script, use)

    def test_poll_while_another_sleeps(self) -> None:
        polling = threading.Event()

        def script(s: Ring.Sidecar) -> None:
            s.expect_doorbell()
            s.until(_client._WANTED, 3)
            s.complete(6)
            polling.set()
            s.expect_doorbell(often=True)
            s.notify()
            s.until(_client._SEEN, 1)
            s.complete(2, 3, 4, 5)
            s.notify()

        def use(client: _client.Client) -> None:
            every, first = self.five(client)
            self.assertTrue(polling.wait(20))
            end = time.monotonic() + 20
            while not client.poll(every[4]):
                self.assertLess(time.monotonic(), end)
            first.join(20)
            self.assertTrue(every[0].done)

        self.meet_ring(script, use)

    def test_what_a_signal_left(self) -> None:
        """Because of a signal, messages were read and not handled. The next wait handles them first."""

        def use(client: _client.Client) -> None:
            whole = wire.frame(b"\x08" + wire.varint(77))
            for state in (
                (whole, 0, (), [], 0),
                (b"\0" + whole + whole[:1], 1, (), [], 0),
                (b"", 0, (), [(whole, [], 0, None)], 0),
                (whole[:1], 0, (), [(b"", [], 0, None), (whole[1:], [], 0, None)], 1),
            ):
                p = client._pending[77] = _client.Pending()
                client._state = state
                client.wait(p)
                rest = client._state
                self.assertEqual(rest[1:], (0, (), [], 0))
            client._state = (b"", 0, (), [], 0)

        self.meet_ring(lambda s: None, use)

    def test_polling(self) -> None:
        """A thread waits for the only operation in flight. It polls the ring for a while, and asks for no doorbell
        during this time.
        """

        def script(s: Ring.Sidecar) -> None:
            s.expect_doorbell()
            s.until(_client._WANTED, _client._POLLING)
            s.complete(2)
            s.expect_doorbell()
            s.until(_client._WANTED, 2)  # the client has stopped polling
            s.complete(3)
            s.notify()

        def use(client: _client.Client) -> None:
            before = _client._POLL_SECONDS
            try:
                _client._POLL_SECONDS = 20.0
                client.wait(client.submit(self.operation(0)))
                _client._POLL_SECONDS = 0.01
                client.wait(client.submit(self.operation(1)))
            finally:
                _client._POLL_SECONDS = before

        self.meet_ring(script, use)


@unittest.skipUnless(programs.alone, "it has nothing to do with other ranks")
class Nonsense(WithFake):
    """Tests with sidecars that violate the protocol. The client raises an error instead of waiting forever."""

    def refuses(self, text: str, script: Callable[[Fake], None]) -> None:
        def use(client: _client.Client) -> None:
            with self.assertRaisesRegex(SidecarError, text):
                client.call(wire.status)
            self.assertTrue(client.over)
            with self.assertRaisesRegex(SidecarError, text):
                client.call(wire.status)

        def play(fake: Fake) -> None:
            fake.sock.recv(100)
            script(fake)
            fake.until_closed()

        self.meet(play, use)

    def test_frames(self) -> None:
        self.refuses("malformed frame", lambda f: f.send(b"\x0b"))
        too_long = wire.varint((16 << 20) + 1)
        self.refuses("malformed frame from the sidecar: got 16777217 bytes, want at most", lambda f: f.sock.sendall(too_long))
        self.refuses("malformed frame from the sidecar: got a varint", lambda f: f.sock.sendall(b"\xff" * 11))
        self.refuses("request 77, which is not pending", lambda f: f.send(b"\x08\x4d"))
        self.refuses("closed the connection", lambda f: f.sock.shutdown(socket.SHUT_WR))
        self.refuses("closed the connection", lambda f: (f.sock.sendall(b"\x05\x08"), f.sock.shutdown(socket.SHUT_WR)))

    def test_arenas(self) -> None:
        def news(number: int, size: int) -> bytes:
            body = b"\x08" + wire.varint(number) + b"\x10" + wire.varint(size)
            reply = wire.varint(7 << 3 | 2) + wire.varint(len(body)) + body
            return wire.varint(len(reply)) + reply

        fd = os.memfd_create("small")
        os.ftruncate(fd, 4096)
        self.refuses("arena 2147483648 without a file descriptor", lambda f: f.sock.sendall(news(1 << 31, 4096)))
        self.refuses("got 4096 bytes, want at least 8192", lambda f: socket.send_fds(f.sock, [news(1 << 31, 8192)], [fd]))
        self.refuses("arena 7 of 4096", lambda f: socket.send_fds(f.sock, [news(7, 4096)], [fd]))
        self.refuses("arena 2147483648 of 5", lambda f: socket.send_fds(f.sock, [news(1 << 31, 5)], [fd]))

        # The sidecar announces two valid arenas, and sends the first announcement byte by byte. Then it sends places of
        # results, some within the arenas and some beyond their ends.
        def good(f: Fake) -> None:
            frame = news(1 << 31, 4096)
            socket.send_fds(f.sock, [frame[:1]], [fd])
            for i in range(1, len(frame)):
                f.sock.sendall(frame[i : i + 1])
            socket.send_fds(f.sock, [news((1 << 31) + 1, 4096)], [fd])
            f.sock.recv(100)
            f.send(b"\x08\x02")
            f.sock.recv(100)
            f.send(b"\x4a\x06\x08" + wire.varint(1 << 31))
            f.send(b"\x08\x03")
            f.until_closed()

        def use(client: _client.Client) -> None:
            os.pwrite(fd, b"hello", 100)
            client.call(wire.status)
            self.assertEqual(bytes(client.result((1 << 31, 100, 5))), b"hello")
            self.assertEqual(bytes(client.result(((1 << 31) + 1, 4095, 1))), b"\0")
            for place in ((1 << 31, 4095, 2), (1 << 31, 5000, 1), ((1 << 31) + 2, 0, 1)):
                with self.assertRaises(SidecarError):
                    client.result(place)
            client.call(wire.status)  # the sidecar drops the first arena before it answers
            with self.assertRaises(SidecarError):
                client.result((1 << 31, 100, 5))

        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        self.meet(good, use)
        gc.collect()  # unmaps the ring
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)
        os.close(fd)

    def test_ring(self) -> None:
        def complete(f: Fake, completed: int, ident: int, status: int = 0) -> None:
            os.pwrite(f.ring, struct.pack("<QI", ident, status), 4096 + 16 * _client._RING_ENTRIES)
            os.pwrite(f.ring, struct.pack("<Q", completed), 192)
            f.sock.sendall(b"\0")

        self.refuses("operation 99, which is not in flight", lambda f: complete(f, 1, 99))
        self.refuses("got completion counter 70000, want 0 to 65536", lambda f: complete(f, 70000, 2))

        # A completion in the ring says that its answer is in a frame. The frame arrives later, and the client waits for
        # it.
        def script(f: Fake) -> None:
            f.sock.recv(100)
            complete(f, 1, 2, status=1)
            f.send(b"\x08\x02\x12" + wire.varint(4) + b"\x08\x03" + b"\x12\x00")
            f.until_closed()

        def use(client: _client.Client) -> None:
            with self.assertRaises(HorovodInternalError):
                client.call(wire.status)
            self.assertFalse(client.over)

        self.meet(script, use)

    def test_greeting(self) -> None:
        with self.assertRaisesRegex(SidecarError, "got greeting"):
            self.meet(lambda f: None, lambda c: None, greet=b"GHVD\0\0\0\3")
        with self.assertRaisesRegex(SidecarError, "did not answer the greeting"):
            self.meet(lambda f: None, lambda c: None, greet=b"")

    def test_one_that_does_not_read(self) -> None:
        """The sidecar writes all its answers before it reads again. The client reads while it waits for room to send,
        so that neither blocks forever.
        """

        def script(f: Fake) -> None:
            f.sock.recv(1)
            # The sidecar sends more answers than a socket holds, and only then reads the rest.
            text = b"\x12" + wire.varint(4000) + bytes(4000)
            for i in range(2, 202):
                body = b"\x08" + wire.varint(i) + b"\x12" + wire.varint(len(text) + 2) + b"\x08\x03" + text
                f.send(body)
            f.until_closed()

        def use(client: _client.Client) -> None:
            pending = [client._pending.setdefault(i, _client.Pending()) for i in range(2, 202)]
            client._ids = iter(range(1000, 1 << 20))  # type: ignore[assignment]
            for _ in range(50):
                with client._lock:
                    client._send_frame(wire.prepare(5, 0, bytes(40000)))
            for p in pending:
                with self.assertRaises(HorovodInternalError):
                    client.wait(p)

        # The sidecar does not read again before it has written all answers.
        self.meet(script, use)

    def test_proof(self) -> None:
        """The proof of the secret equals a proof that the test computes by hashlib and hmac."""
        import hashlib
        import hmac

        key = hashlib.sha256(b"gohvd secret\0abc").digest()
        message = b"\x0cgohvd client\x04GHVD\x20" + b"c" * 32 + b"\x20" + b"s" * 32
        want = hmac.new(key, message, "sha256").digest()
        self.assertEqual(proof(key, b"gohvd client", b"c" * 32, b"s" * 32), want)


if __name__ == "__main__":
    unittest.main()
