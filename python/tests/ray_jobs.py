"""Tests of gohvd.ray on a Ray cluster of two nodes on this machine: ``python -m unittest ray_jobs`` (make test-ray).

The nodes are the loopback addresses 127.0.0.1 and 127.0.0.2, with two CPUs each. The tests must run in a network
namespace of their own. Without torch, the tests that need it are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

import gohvd.numpy as hvd
import gohvd.ray
from gohvd import basics
from gohvd.exceptions import PeerError
from gohvd.ray import RayExecutor
from cluster_jobs import ELEMENTS, place, sum_of_ranks
from programs import Bounded

_FOLDER = pathlib.Path(__file__).resolve().parent
_LIMIT_SECONDS = 60.0


def fail_at(rank: int, how: str) -> Any:
    hvd.init()
    if hvd.rank() == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"no data at rank {hvd.rank()}")
    return hvd.allreduce(np.ones(4))


def run_until_killed(pids: str) -> None:
    hvd.init()
    pathlib.Path(pids, str(os.getpid())).touch()
    while True:
        hvd.allreduce(np.ones(4), name="x")


class Trainer:
    """The class of Horovod's examples for ``start(executable_cls=...)``."""

    def __init__(self, base: int, step: int = 1) -> None:
        hvd.init()
        self.value = base + step * hvd.rank()

    def train(self) -> int:
        return self.value


class RayTest(Bounded):
    """The tests share one cluster. Each makes its own executors."""

    @classmethod
    def setUpClass(cls) -> None:
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        home = stack.enter_context(tempfile.TemporaryDirectory())  # for Ray's token
        stack.enter_context(unittest.mock.patch.dict(os.environ, HOME=home))
        cls.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": "127.0.0.1"})
        stack.callback(cls.cluster.shutdown)
        cls.cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
        ray.init(address=cls.cluster.address, log_to_driver=False)
        stack.callback(ray.shutdown)

    def executor(self, start: dict[str, Any] | None = None, **args: Any) -> RayExecutor:
        made = RayExecutor(RayExecutor.create_settings(timeout_s=120), **args)
        self.addCleanup(made.shutdown)
        made.start(**(start or {}))
        return made

    def test_ranks_of_a_node_share_memory(self) -> None:
        executor = self.executor(num_workers=4)
        self.assertEqual(
            executor.run(place), [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
        )
        results = executor.run(sum_of_ranks)
        self.assertEqual([total for total, _ in results], [6.0] * 4)
        # Between two hosts, each sends all elements once. Without shared memory, four ranks would send six times as much.
        nbytes = 4 * ELEMENTS
        for _, sent in results:
            self.assertGreater(sent, nbytes)
            self.assertLess(sent, 3 * nbytes)

    def test_ranks_of_one_node(self) -> None:
        executor = self.executor(num_workers=2)
        self.assertEqual(executor.run(place), [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)])
        for total, sent in executor.run(sum_of_ranks):
            self.assertEqual(total, 1.0)
            self.assertLess(sent, ELEMENTS)

    def test_examples_of_horovod(self) -> None:
        start = {"executable_cls": Trainer, "executable_args": [10], "executable_kwargs": {"step": 5}}
        start["extra_env_vars"] = {"GREETING": "hello"}
        executor = self.executor(start, num_hosts=2, num_workers_per_host=2, cpus_per_worker=1)
        self.assertEqual(executor.execute(lambda trainer: trainer.train()), [10, 15, 20, 25])
        self.assertEqual(executor.execute_single(lambda trainer: trainer.train()), 10)
        self.assertEqual(executor.run(lambda a, b: (basics.rank(), a, b), [1], {"b": 2}), [(r, 1, 2) for r in range(4)])
        self.assertEqual(ray.get(executor.run_remote(os.getenv, ["GREETING"])), ["hello"] * 4)
        executor.shutdown()
        self.assertRaisesRegex(RuntimeError, r"call start\(\) first", executor.run, place)
        executor.start()
        self.assertEqual([r[0] for r in executor.run(place)], [0, 1, 2, 3])

    def test_exception(self) -> None:
        executor = self.executor(num_workers=3)
        with self.assertRaisesRegex(ValueError, "no data at rank 1") as caught:
            executor.run(fail_at, [1, "raise"])
        self.assertIn("in fail_at", str(caught.exception))
        self.assertIn("rank 1 of 3", str(caught.exception))
        self.assertEqual([r[0] for r in executor.run(place)], [0, 1, 2])  # a new job of the same workers

    def test_killed_worker(self) -> None:
        executor = self.executor(num_workers=3)
        with self.assertRaisesRegex(PeerError, r"rank 2 on 127\.0\.0\.\d has failed: ") as caught:
            executor.run(fail_at, [2, "kill"])
        self.assertEqual(caught.exception.ranks, [2])

    def test_more_workers_than_slots(self) -> None:
        for args in {"num_workers": 5}, {"num_hosts": 3}, {"num_workers": 1, "use_gpu": True}:
            executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), **args)
            with self.assertRaisesRegex(TimeoutError, r"Ray found no places for \d workers within 1 s: they need "):
                executor.start()
        self.executor(num_workers=4)  # nothing holds the places

    def test_horovods_module(self) -> None:
        import horovod.ray

        self.assertIs(horovod.ray.RayExecutor, RayExecutor)

    def test_arguments(self) -> None:
        for args in {}, {"num_workers": 1, "num_hosts": 1}, {"num_workers": 0}, {"num_workers": 1, "gpus_per_worker": 1}:
            self.assertRaises(ValueError, RayExecutor, None, **args)

    def test_other_version(self) -> None:
        with unittest.mock.patch.object(gohvd.ray, "__version__", "0.0.1"):
            with self.assertRaisesRegex(RuntimeError, r"driver has version 0\.0\.1, but workers have .* on 127\.0\.0"):
                self.executor(num_workers=2)

    def test_secret_is_not_published(self) -> None:
        executor = self.executor(num_workers=2)
        executor.run(place)
        secret = executor._store.place["HVD_SECRET"].encode()
        self.assertNotIn(secret.decode(), repr(ray._private.state.actors()))
        session = pathlib.Path(ray._private.worker.global_worker.node.get_session_dir_path())
        files = [f for f in session.rglob("*") if f.is_file()]
        self.assertGreater(len(files), 10)
        files += [f for pid in pathlib.Path("/proc").glob("[0-9]*") for f in (pid / "cmdline", pid / "environ")]
        for file in files:
            with contextlib.suppress(OSError):
                self.assertNotIn(secret, file.read_bytes(), file)

    def test_driver_that_ends(self) -> None:
        script = (
            "import ray, sys, ray_jobs, gohvd.ray\n"
            "ray.init(address=sys.argv[1], log_to_driver=False)\n"
            "executor = gohvd.ray.RayExecutor(num_workers=2)\n"
            "executor.start()\n"
            "open(sys.argv[2] + '/' + str(executor._store._process.pid), 'w').close()\n"
            "executor.run(ray_jobs.run_until_killed, [sys.argv[2]])\n"
        )
        for number in signal.SIGINT, signal.SIGKILL:
            with self.subTest(number), tempfile.TemporaryDirectory() as pids:
                command = [sys.executable, "-c", script, self.cluster.address, pids]
                driver = subprocess.Popen(command, cwd=_FOLDER, stderr=subprocess.PIPE, text=True)
                self.addCleanup(driver.stderr.close)
                self.addCleanup(driver.kill)
                self.wait_until(lambda: len(os.listdir(pids)) == 3, "the job has not started")
                driver.send_signal(number)
                _, error = driver.communicate(timeout=_LIMIT_SECONDS)
                self.assertEqual("KeyboardInterrupt" in error, number == signal.SIGINT, error)
                self.wait_until(
                    lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in os.listdir(pids)),
                    "processes of the job are left",
                )

    def wait_until(self, condition: Any, message: str) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not condition():
            self.assertLess(time.monotonic(), deadline, message)
            time.sleep(0.05)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_ray_train(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        with tempfile.TemporaryDirectory() as folder:
            TorchTrainer(
                train, train_loop_config={"folder": folder}, torch_config=gohvd.ray.TorchConfig(),
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
            ).fit()  # fmt: skip
            weights = [pathlib.Path(folder, f"weights.{rank}").read_text() for rank in range(2)]
        self.assertEqual(weights[0], weights[1])


def train(config: dict[str, str]) -> None:
    """Trains with DDP on data that differ between ranks, and writes the weights to a file. In the first attempt, rank 1
    is killed in the middle.
    """
    import ray.train.torch
    import torch
    import torch.distributed as dist

    assert dist.get_backend() == "gohvd"
    assert (dist.get_rank(), dist.get_world_size()) == place()[:2]
    torch.manual_seed(hvd.rank())
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    first = pathlib.Path(config["folder"], f"first.{hvd.rank()}")
    killed = hvd.rank() == 1 and not first.exists()
    first.touch()
    for step in range(20):
        if killed and step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(16, 8)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    pathlib.Path(config["folder"], f"weights.{hvd.rank()}").write_text(repr([p.tolist() for p in model.parameters()]))


if __name__ == "__main__":
    unittest.main()
