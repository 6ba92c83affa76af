"""Tests of gohvd.spark on a Spark cluster of two workers on this machine: ``python -m unittest spark_jobs`` (make
test-spark). The workers have two cores each, and network namespaces of their own. The tests must run in a network namespace
of their own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest.mock
from typing import Any

import numpy as np
import pyspark
from pyspark.sql import SparkSession

import gohvd.numpy as hvd
import gohvd.spark
from gohvd import _meeting, _output
from cluster_jobs import ELEMENTS, HOSTS, ISOLATED, place, sum_of_ranks, two_hosts, without_secret
from programs import Bounded

_LIMIT_SECONDS = 300.0
_HOME = pathlib.Path(pyspark.__file__).parent


def executor_process() -> int:
    """Returns the process of the executor in which this task runs."""
    pid = os.getpid()
    while b"CoarseGrainedExecutorBackend" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def fail_once(how: str, folder: str) -> tuple[int, int, float]:
    """Fails at rank 1 in the first attempt. Returns the rank, the number of the attempt and a sum over the ranks."""
    hvd.init()
    attempt = len(list(pathlib.Path(folder).glob(f"{hvd.rank()}.*")))
    pathlib.Path(folder, f"{hvd.rank()}.{attempt}").touch()
    hvd.barrier()
    if attempt == 0 and hvd.rank() == 1:
        if how == "raise":
            raise ValueError("in the first attempt")
        os.kill(executor_process() if how == "executor" else os.getpid(), signal.SIGKILL)
        signal.pause()  # until the executor's death ends this process
    return hvd.rank(), attempt, float(hvd.allreduce(np.ones(4), op=hvd.Sum)[0])


def fail_always(rank: int) -> Any:
    hvd.init()
    if hvd.rank() == rank:
        raise ValueError(f"no data at rank {hvd.rank()}")
    return hvd.allreduce(np.ones(4))


def speak() -> str:
    hvd.init()
    print("first line\nsecond", hvd.rank(), flush=True)
    os.system("echo a child >&2")
    return os.environ.get("GREETING", "")


class SparkTest(Bounded):
    """The tests share one cluster."""

    seconds = 1200  # on a busy machine, executors take minutes to start

    @classmethod
    def setUpClass(cls) -> None:
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        env = {
            "SPARK_LOCAL_IP": HOSTS[0], "SPARK_HOME": str(_HOME), "PYSPARK_PYTHON": sys.executable,
            # The executors run in folders of their own, and import this module and cluster_jobs.
            "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        stack.enter_context(unittest.mock.patch.dict(os.environ, env))
        log = stack.enter_context(open(pathlib.Path(folder, "log"), "w+"))

        there = stack.enter_context(two_hosts())

        def daemon(name: str, *args: str, inside: tuple[str, ...] = (), **variables: str) -> None:
            command = [*inside, str(_HOME / "bin" / "spark-class"), "org.apache.spark.deploy." + name, *args]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)

        master = f"spark://{HOSTS[0]}:7077"
        daemon("master.Master", "--host", HOSTS[0], "--port", "7077", "--webui-port", "0")
        for host, address, inside in zip("ab", HOSTS, ((), there)):
            daemon(
                "worker.Worker", "--host", address, "--cores", "2", "--memory", "1g", "--webui-port", "0",
                "--work-dir", f"{folder}/{host}", master, inside=inside, HOROVOD_HOSTNAME=host, SPARK_LOCAL_IP=address,
            )  # fmt: skip
        cls.work = pathlib.Path(folder)
        cls.session = (
            SparkSession.builder.master(master).config("spark.ui.enabled", "false")
            .config("spark.executor.memory", "512m").config("spark.stage.maxConsecutiveAttempts", "2")
            .config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", folder)
            .config("spark.eventLog.compress", "false").getOrCreate()
        )  # fmt: skip
        stack.callback(cls.session.stop)

    def test_ranks_of_a_host_share_memory(self) -> None:
        self.assertEqual(
            gohvd.spark.run(place, num_proc=4),
            [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)],
        )
        results = gohvd.spark.run(sum_of_ranks, num_proc=4)
        self.assertEqual([total for total, _ in results], [6.0] * 4)
        # Each host sends all elements once. Without shared memory, its ranks would send three times as much.
        nbytes = 4 * ELEMENTS
        for _, sent in results:
            self.assertGreater(sent, nbytes * 0.9)
            self.assertLess(sent, nbytes * 1.5)

    def test_output_and_arguments(self) -> None:
        out, err = io.StringIO(), io.StringIO()
        found = gohvd.spark.run(
            speak, num_proc=2, env={"GREETING": "hello"}, stdout=out, stderr=err, prefix_output_with_timestamp=True
        )
        self.assertEqual(found, ["hello"] * 2)
        clock = r"\w{3} \w{3} \d\d \d\d:\d\d:\d\d \d{4}"
        for rank in range(2):
            self.assertRegex(out.getvalue(), rf"(?m)^{clock}\[{rank}\]<stdout>:second {rank}$")
            self.assertRegex(err.getvalue(), rf"(?m)^{clock}\[{rank}\]<stderr>:a child$")
        context = self.session.sparkContext
        context.setJobGroup("mine", "", interruptOnCancel=True)
        self.assertEqual(gohvd.spark.run(lambda a, b: (a, b), (1,), {"b": 2}, num_proc=2), [(1, 2)] * 2)
        self.assertEqual(context.getLocalProperty("spark.job.interruptOnCancel"), "true")
        self.assertEqual(gohvd.spark.run(os.getenv, ("GREETING",), num_proc=4), [None] * 4)  # nothing is left

    def test_attempts(self) -> None:
        for how in "raise", "worker", "executor":
            with self.subTest(how), tempfile.TemporaryDirectory() as folder:
                self.assertEqual(
                    gohvd.spark.run(fail_once, (how, folder), num_proc=4), [(rank, 1, 4.0) for rank in range(4)]
                )

    def test_exception(self) -> None:
        with self.assertRaisesRegex(RuntimeError, r"rank 2 on [ab] has failed: no data at rank 2") as caught:
            gohvd.spark.run(fail_always, (2,), num_proc=4)
        self.assertIn("in fail_always", str(caught.exception))
        self.assertNotIn("PeerError", str(caught.exception))

    def test_two_jobs_at_once(self) -> None:
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = [pool.submit(gohvd.spark.run, beside, (folder, name), num_proc=2) for name in ("x", "y")]
            for job in jobs:
                self.assertEqual(job.result(), [(0, 2), (1, 2)])

    def test_more_ranks_than_slots(self) -> None:
        gohvd.spark.run(place, num_proc=4)  # all executors are there
        with self.assertRaisesRegex(TimeoutError, "have slots for 4 tasks, the job needs 5"):
            gohvd.spark.run(place, num_proc=5, start_timeout=1)
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor() as pool:
            end = pathlib.Path(folder, "end")
            first = pool.submit(gohvd.spark.run, wait_for, (str(end),), num_proc=1)
            wait_until(lambda: list(end.parent.iterdir()))
            with self.assertRaisesRegex(TimeoutError, "the 4 tasks of the job did not run all together for 2 s"):
                gohvd.spark.run(place, num_proc=4, start_timeout=2)
            end.touch()
            self.assertEqual(first.result(), [None])
        self.assertEqual(len(gohvd.spark.run(place, num_proc=4)), 4)

    def test_dynamic_allocation(self) -> None:
        context = self.session.sparkContext
        conf = context.getConf().set("spark.dynamicAllocation.enabled", "true")
        with unittest.mock.patch.object(context, "getConf", return_value=conf):
            with self.assertRaisesRegex(RuntimeError, "spark.dynamicAllocation.enabled=false"):
                gohvd.spark.run(place, num_proc=1)

    def test_other_version(self) -> None:
        with unittest.mock.patch.object(gohvd.spark, "__version__", "0.0.1"):
            with self.assertRaisesRegex(RuntimeError, r"driver has version 0\.0\.1, but workers have .* on [ab]: "):
                gohvd.spark.run(place, num_proc=1)

    def test_no_route_between_ranks(self) -> None:
        env = {"HOROVOD_GLOO_IFACE": ISOLATED, "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
        with self.assertRaisesRegex(RuntimeError, r"rank \d on [ab] has failed: .*198\.51\.100\."):
            gohvd.spark.run(place, num_proc=4, env=env)

    def test_missing_secret(self) -> None:
        with self.assertRaisesRegex(RuntimeError, r"rank 0 on [ab] has failed: .*HVD_SECRET"):
            gohvd.spark.run(without_secret, num_proc=2, env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"})

    def test_secret_is_not_published(self) -> None:
        secrets = set(gohvd.spark.run(os.getenv, ("HVD_SECRET",), num_proc=2))
        self.assertEqual(len(secrets), 1)
        secret = secrets.pop().encode()
        files = [f for f in self.work.rglob("*") if f.is_file()]
        self.assertTrue(any(b"SparkListenerJobStart" in f.read_bytes() for f in files))
        for file in files:
            self.assertNotIn(secret, file.read_bytes(), file)

    def test_horovods_module(self) -> None:
        import horovod.spark

        self.assertEqual(horovod.spark.run(os.getenv, ("HOROVOD_GLOO_IFACE",), nics=["lo"], num_proc=1), ["lo"])
        with self.assertRaisesRegex(ModuleNotFoundError, "no module horovod.spark.torch: .*gohvd.spark.run"):
            import horovod.spark.torch
        with self.assertRaisesRegex(ImportError, "no run_elastic, because .*: use run, "):
            from horovod.spark import run_elastic  # noqa: F401
        with self.assertRaisesRegex(AttributeError, "no run_elastic, because "):  # an error for which hasattr is False
            horovod.spark.run_elastic


class PortsTest(Bounded):
    """Tests of the ports of a job without Spark, which writes IPv6 addresses with brackets."""

    def test_store(self) -> None:
        with contextlib.closing(_meeting.Store("[::1]")) as store:
            self.assertEqual(store.place["HOROVOD_GLOO_RENDEZVOUS_ADDR"], "::1")

    def test_only_with_the_key(self) -> None:
        out = io.StringIO()
        script = (
            "import ast, os, sys; from gohvd import _output\n"
            "with _output.sent(ast.literal_eval(sys.argv[1]), 3): os.write(1, b'a line without end')\n"
        )
        with _output.Receiver("[::1]", "[::1]", out, io.StringIO(), timestamps=False) as receiver:
            host, port, key = receiver.place
            with socket.create_connection((host, port), _LIMIT_SECONDS) as silent:  # the others do not wait for it
                for place in (host, port, b"?" * 32), (host, port, key), (host, 1, key):
                    done = subprocess.run(
                        [sys.executable, "-c", script, repr(place)], capture_output=True, text=True, timeout=_LIMIT_SECONDS
                    )
                    self.assertEqual((done.returncode, done.stdout), (0, "a line without end"), done.stderr)
                self.assertIn("cannot reach the driver at", done.stderr)
                silent.close()
        self.assertEqual(out.getvalue(), "[3]<stdout>:a line without end\n")


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def wait_for(file: str) -> None:
    pathlib.Path(file + ".started").touch()
    wait_until(lambda: os.path.exists(file))


def beside(folder: str, name: str) -> tuple[int, ...]:
    """Waits until two jobs run at the same time."""
    pathlib.Path(folder, name).touch()
    wait_until(lambda: len(os.listdir(folder)) == 2)
    return place()[:2]
