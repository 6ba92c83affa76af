"""Tests what the library does to the process of the program, and what the program may do in it: signals, crashes, other
libraries, threads, and the end of the process.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

import programs

# Prints the handlers of all signals before and after init, unless they are equal or the Go runtime needs the signal.
_HANDLERS = """
import ctypes, faulthandler, signal
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]
libc = ctypes.CDLL(None)
def handlers():
    found = {}
    for number in set(range(1, 65)) - {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGPIPE, signal.SIGURG}:
        a = Action()
        if libc.sigaction(number, None, ctypes.byref(a)) == 0:
            found[number] = a.handler, a.flags, a.mask[0]
    return found
own = [signal.SIGTERM, signal.SIGCHLD, signal.SIGPROF, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGUSR2]
for number in own:
    signal.signal(number, lambda *_: None)
faulthandler.register(signal.SIGUSR1)
before = handlers()
import gohvd.numpy as hvd
for _ in range(2):
    hvd.init()
    hvd.allreduce([1.0])
    during = handlers()
    hvd.shutdown()
    for after in (during, handlers()):
        print("changed:", [number for number in before if before[number] != after[number]])
print(len(before), "signals, default handler of Ctrl-C:", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""

# Crashes as the second argument says. faulthandler is enabled before or after init, as the first argument says.
_CRASH = """
import ctypes, faulthandler, os, signal, sys, threading, time
import gohvd.numpy as hvd
order, how = sys.argv[1:]
if order == "before":
    faulthandler.enable()
hvd.init()
def work():
    while True:
        hvd.allreduce([1.0], name="work")
threading.Thread(target=work, daemon=True).start()
hvd.allreduce([1.0])
if order == "after":
    faulthandler.enable()
def crash_here():
    if how == "read":
        ctypes.string_at(1)
    signal.raise_signal(int(how))
crash_here()
"""


@unittest.skipUnless(programs.alone, "it has nothing to do with other ranks")
class Process(programs.Programs):
    def test_signal_handlers(self) -> None:
        out = self.run_program(_HANDLERS)
        self.assertEqual(out.count("changed: []\n"), 4, out)
        self.assertRegex(out, r"\d\d signals, default handler of Ctrl-C: True")

    def test_crashes(self) -> None:
        """A crash in C code ends the process by the signal, and faulthandler prints the traceback."""
        for order, how, number in (
            ("before", "read", signal.SIGSEGV), ("after", "read", signal.SIGSEGV), ("never", "read", signal.SIGSEGV),
            ("before", str(int(signal.SIGFPE)), signal.SIGFPE), ("after", str(int(signal.SIGABRT)), signal.SIGABRT),
        ):  # fmt: skip
            with self.subTest(order=order, how=how):
                got = programs.run(_CRASH, order, how, interpreter=[sys.executable])
                self.assertEqual(got.returncode, -number, got.stderr)
                self.assertEqual("in crash_here" in got.stderr and "in work" in got.stderr, order != "never", got.stderr)

    def test_dump_traceback_later(self) -> None:
        """faulthandler prints where a thread waits for an operation, and goes on or ends the process."""
        script = """
            import faulthandler, os, sys, threading
            import gohvd.numpy as hvd
            from gohvd import _library
            hvd.init()
            gate = _library.Gate()
            def here():
                gate.wait([])
            read, write = os.pipe()
            ends = sys.argv[1] == "ends"
            thread = threading.Thread(target=here)
            thread.start()
            faulthandler.dump_traceback_later(0.2, repeat=True, exit=ends, file=sys.stderr if ends else write)
            text = b""
            while b"in here" not in text:
                text += os.read(read, 1 << 16)
            faulthandler.cancel_dump_traceback_later()
            gate.open()
            thread.join()
            print("done", hvd.allreduce([3.0]))
            """
        self.assertIn("done [3.]", self.run_program(script, "goes on"))
        self.assertIn("in here", self.run_program(script, "ends", status=1))

    def test_limit_of_open_files(self) -> None:
        """The soft limit of open files stays as it is, also for children, unless the job may need more."""
        out = self.run_program(
            """
            import resource, subprocess
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
            import gohvd
            import gohvd.numpy as hvd
            gohvd.alloc(1)
            print("loaded", resource.getrlimit(resource.RLIMIT_NOFILE) == (512, hard))
            for soft in 512, 64:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                hvd.init()
                hvd.allreduce([1.0])
                child = subprocess.check_output(["sh", "-c", "ulimit -Sn"], text=True).strip()
                print(soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0] in (hard, hard - 1), child)
                hvd.shutdown()
            """
        )
        self.assertIn("loaded True\n512 False 512\n64 True ", out)

    def test_closed_pipe(self) -> None:
        """A program whose standard error nobody reads any more is not killed by a line of the log."""
        out = self.run_program(
            """
            import os
            read, write = os.pipe()
            os.dup2(write, 2)
            os.close(read)
            os.close(write)
            import gohvd.numpy as hvd
            hvd.init()
            hvd.allreduce([1.0])
            hvd.shutdown()
            try:
                os.write(2, b"x")
            except BrokenPipeError:
                print("as in Python")
            """,
            HOROVOD_LOG_LEVEL="trace",
        )
        self.assertIn("as in Python", out)

    def test_signals_during_operations(self) -> None:
        """The signals of a profiler's timer and of children that end arrive while threads run operations."""
        out = self.run_program(
            """
            import os, signal, subprocess, threading
            import gohvd.numpy as hvd
            seen = dict.fromkeys((signal.SIGPROF, signal.SIGCHLD), 0)
            def handler(number, _):
                seen[number] += 1
            for number in seen:
                signal.signal(number, handler)
            signal.setitimer(signal.ITIMER_PROF, 0.0005, 0.0005)
            hvd.init()
            stop = threading.Event()
            def work(k):
                i = 0
                while not stop.is_set():
                    assert hvd.allreduce([float(i)], name=f"work{k}")[0] == i
                    i += 1
            threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
            for t in threads:
                t.start()
            for i in range(20):
                children = [subprocess.Popen(["sh", "-c", "echo hello; exit 3"], stdout=subprocess.PIPE) for _ in range(2)]
                for child in children:
                    assert child.communicate()[0] == b"hello\\n" and child.returncode == 3, child.returncode
            while not all(seen.values()):
                pass
            stop.set()
            for t in threads:
                t.join()
            signal.setitimer(signal.ITIMER_PROF, 0)
            print("done", hvd.allreduce([2.0]))
            """
        )
        self.assertIn("done [2.]", out)

    def test_interrupted_init(self) -> None:
        """Ctrl-C ends an init that waits for other ranks, and the start of a node that waits for its scheduler."""
        script = """
            import os, signal, sys, threading
            import gohvd.numpy as hvd
            import gohvd.ps as ps
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                (hvd.init if sys.argv[1] == "init" else ps.start)()
            except KeyboardInterrupt:
                print("interrupted", hvd.is_initialized())
            """
        limit = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1000"}  # longer than that of a program
        with tempfile.TemporaryDirectory() as top:
            out = self.run_program(
                script, "init", HOROVOD_RANK="0", HOROVOD_SIZE="2", HVD_INIT_METHOD=f"file://{top}/job", **limit
            )
            self.assertIn("interrupted False", out)
        out = self.run_program(
            script, "ps", DMLC_ROLE="worker", DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", DMLC_PS_ROOT_URI="127.0.0.1",
            DMLC_PS_ROOT_PORT="1", DMLC_NODE_HOST="127.0.0.1", **limit,
        )  # fmt: skip
        self.assertIn("interrupted False", out)

    def test_places_of_the_first_call(self) -> None:
        """The thread that loads the library ends, and a subinterpreter uses the same library."""
        out = self.run_program(
            """
            import sys, threading
            import gohvd.numpy as hvd
            try:
                import _interpreters as interpreters
            except ImportError:
                import _xxsubinterpreters as interpreters
            thread = threading.Thread(target=hvd.init)
            thread.start()
            thread.join()
            for i in range(100):
                assert hvd.allreduce([float(i)])[0] == i
            inner = interpreters.create()
            interpreters.run_string(inner, "import sys; sys.path[:] = %r\\nfrom gohvd import _library\\n"
                "print('inner', _library.quick.hvd_rank(), flush=True)" % sys.path)
            interpreters.destroy(inner)
            print("outer", hvd.allreduce([4.0]))
            """
        )
        self.assertIn("inner 0", out)
        self.assertIn("outer [4.]", out)

    def test_dropped_handles(self) -> None:
        """The program drops handles of operations in flight, also in cycles of garbage. Nothing stays behind."""
        out = self.run_program(
            """
            import gc
            import numpy as np
            import gohvd.numpy as hvd
            from gohvd import _library
            class Node:
                pass
            hvd.init()
            for i in range(2000):
                node = Node()
                node.itself = node
                node.handles = [hvd.allreduce_async(np.ones(1000), name=f"dropped{i}"), hvd.allgather_async([1.0])]
                del node
                if i % 100 == 99:
                    gc.collect()
            gc.collect()
            hvd.barrier()
            while _library.abandoned:
                hvd.allreduce([1.0])
            print("names are free:", hvd.allreduce([5.0], name="dropped7"))
            """
        )
        self.assertIn("names are free: [5.]", out)

    def test_forked(self) -> None:
        """A forked process cannot allocate memory or join a job of its own."""
        out = self.run_program(
            """
            import os, sys
            import gohvd.numpy as hvd
            from gohvd import _engine
            hvd.init()
            _engine.engine._launched = True  # as if an operation on a GPU were done at its launch
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            print("status", os.waitpid(pid, 0)[1])
            pid = os.fork()
            if pid == 0:
                for call in (lambda: hvd.alloc(3), hvd.barrier, hvd.init):
                    if call is hvd.init:
                        hvd.shutdown()
                    try:
                        call()
                    except hvd.HorovodInternalError as e:
                        print("refused", "was forked" in str(e), flush=True)
                sys.exit(0)
            os.waitpid(pid, 0)
            print("parent", hvd.allreduce([6.0]))
            """
        )
        self.assertEqual(out.count("refused True\n"), 3, out)
        self.assertIn("status 0\n", out)
        self.assertIn("parent [6.]", out)

    def test_forked_from_a_client(self) -> None:
        """A forked process does not keep the connection to the sidecar, which notices its end when the parent dies."""
        out = self.run_program(
            """
            import os, stat, sys
            import gohvd.numpy as hvd
            def sockets():
                return [fd for fd in range(3, 1000) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)]
            before = len(sockets())
            hvd.init()
            print("in the parent:", len(sockets()) - before, flush=True)
            if os.fork() == 0:
                print("in the child:", len(sockets()) - before, flush=True)
                os._exit(0)
            os.wait()
            print("reduced", hvd.allreduce([7.0])[0])
            """,
            HVD_SIDECAR="spawn",
        )
        self.assertIn("in the parent: 1\nin the child: 0\nreduced 7.0", out)

    def test_submission_to_a_sidecar(self) -> None:
        """Other threads run while a submission waits for the sidecar, which must map new memory first."""
        out = self.run_program(
            """
            import glob, os, signal, sys, threading
            import gohvd.numpy as hvd
            hvd.init()
            sidecar, = [int(pid) for file in glob.glob("/proc/self/task/*/children") for pid in open(file).read().split()]
            x, handles = hvd.alloc(1000, "float32"), []
            x[:] = 7
            sys.setswitchinterval(1000)  # the thread runs until it waits
            os.kill(sidecar, signal.SIGSTOP)
            thread = threading.Thread(target=lambda: handles.append(hvd.allreduce_async(x)))
            thread.start()
            os.kill(sidecar, signal.SIGCONT)
            thread.join()
            print("reduced", handles[0].wait().mean())
            """,
            HVD_SIDECAR="spawn",
        )
        self.assertIn("reduced 7.0", out)

    def test_threads_of_the_library(self) -> None:
        """The library has few threads of its own even if many threads of the program wait. GOMAXPROCS counts as it is
        when the library is loaded.
        """
        script = """
            import os, threading
            import gohvd.numpy as hvd
            os.environ["GOMAXPROCS"] = "1"  # after the import
            hvd.init()
            received = []
            if hvd.rank() == 0:
                import numpy as np
                def receive(k):
                    x = np.zeros(1)
                    hvd.recv(x, 1, tag=k)
                    received.append(x[0])
                threads = [threading.Thread(target=receive, args=(k,)) for k in range(64)]
                for t in threads:
                    t.start()
                hvd.barrier()
                print("more:", len(os.listdir("/proc/self/task")) - threading.active_count(), flush=True)
                hvd.barrier()
                for t in threads:
                    t.join()
                assert sorted(received) == list(range(64)), received
            else:
                hvd.barrier()
                hvd.barrier()
                for k in range(64):
                    hvd.send([float(k)], 0, tag=k)
            """
        job = subprocess.run(
            [os.environ["HVD_RUN"], "-np", "2", sys.executable, "-c", textwrap.dedent(script)],
            env=programs.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90,
        )  # fmt: skip
        self.assertEqual(job.returncode, 0, job.stdout)
        self.assertRegex(job.stdout, r"more: 1?\d\n")

    @unittest.skipUnless(programs.stress, "it imports torch seven times; make stress runs it")
    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not here")
    def test_data_loaders(self) -> None:
        """Each start method of a DataLoader's workers works, whether torch is imported before or after init."""
        script = """
            import sys, threading
            start, order = sys.argv[1:]
            if __name__ == "__main__" and order == "after":
                import gohvd.numpy
                gohvd.numpy.init()
            import torch, torch.utils.data
            import gohvd.torch as hvd
            class Squares(torch.utils.data.Dataset):
                def __len__(self): return 32
                def __getitem__(self, i): return torch.tensor([float(i * i)])
            def main():
                hvd.init()
                def work():
                    for _ in range(1000):
                        hvd.allreduce(torch.ones(10), name="work")
                thread = threading.Thread(target=work)
                thread.start()
                for persistent in (False, True):
                    loader = torch.utils.data.DataLoader(
                        Squares(), batch_size=4, num_workers=2, multiprocessing_context=start, persistent_workers=persistent)
                    print("total", sum(float(hvd.allreduce(batch, name="b").sum()) for batch in loader))
                thread.join()
            if __name__ == "__main__":
                main()
            """
        with tempfile.TemporaryDirectory() as top:
            file = os.path.join(top, "loaders.py")
            with open(file, "w", encoding="ascii") as f:
                f.write(textwrap.dedent(script))
            for start in ("fork", "forkserver", "spawn"):
                for order in ("before", "after"):
                    with self.subTest(start=start, order=order):
                        got = subprocess.run(
                            [sys.executable, file, start, order],
                            env=programs.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
                        )  # fmt: skip
                        self.assertEqual(got.returncode, 0, got.stdout)
                        self.assertEqual(got.stdout.count(f"total {float(sum(i * i for i in range(32)))}"), 2, got.stdout)


if __name__ == "__main__":
    unittest.main()
