"""Tests of gohvd.ray on a Ray cluster of two nodes on this machine: ``python -m unittest ray_jobs`` (make test-ray).

The nodes have network namespaces of their own, and two CPUs each. The tests must run in a network namespace of their own.
RayLongTest (make test-ray-train) also needs torch.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

import gohvd._engine
import gohvd.elastic
import gohvd.numpy as hvd
import gohvd.ray
from gohvd import basics
from gohvd.exceptions import HorovodInternalError, PeerError
from gohvd.ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery
from cluster_jobs import ELEMENTS, HOSTS, ISOLATED, place, sum_of_ranks, two_hosts, without_secret
from programs import Bounded

_FOLDER = pathlib.Path(__file__).resolve().parent
_LIMIT_SECONDS = 300.0


def fail_at(rank: int, how: str) -> Any:
    hvd.init()
    if hvd.rank() == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"no data at rank {hvd.rank()}")
    return hvd.allreduce(np.ones(4))


def sum_of(value: float, failing: int = -1, joined: bool = False) -> float:
    """Returns the sum of value over the ranks. A failing rank raises an exception before it joins the job, or after the
    sum, when the other ranks do not need it any more.
    """
    fails = int(os.environ["HOROVOD_RANK"]) == failing
    if fails and not joined:
        raise ValueError("no data")
    hvd.init()
    total = hvd.allreduce(np.full(1, value), op=hvd.Sum, name="value")
    if fails:
        raise ValueError("no data")
    return float(total[0])


def fail_to_leave() -> None:
    def shutdown() -> None:
        raise ValueError(f"no way out of rank {hvd.rank()}")

    hvd.init()
    gohvd._engine.engine.shutdown = shutdown  # type: ignore[method-assign]


def facts() -> tuple[tuple[int, ...], str, str | None]:
    """Returns the place in the job, which the process then leaves, and variables of the process."""
    mine = place()
    hvd.shutdown()
    return mine[:2], os.environ["OMP_NUM_THREADS"], os.environ.get("LD_LIBRARY_PATH")


@ray.remote(num_cpus=0)
def in_a_group(workers: int) -> list[Any]:
    settings = RayExecutor.create_settings(timeout_s=_LIMIT_SECONDS, placement_group_timeout_s=60 if workers == 4 else 3)
    executor = RayExecutor(settings, num_workers=workers)
    executor.start()
    try:
        return executor.run(place)
    finally:
        executor.shutdown()


def end_without_result() -> int:
    """Trains, and then ends the process of rank 1."""
    hvd.init()
    gohvd.elastic.run(gohvd.elastic.State.commit)(gohvd.elastic.ObjectState(lambda values: values, hvd.rank))
    rank = hvd.rank()
    hvd.shutdown()
    if rank == 1:
        os._exit(0)
    return rank


def left_behind(pids: str) -> bool:
    """Returns whether the folder of an agent is left that runs run_until_killed(pids)."""
    for job in pathlib.Path(tempfile.gettempdir()).glob("gohvd*/job"):
        with contextlib.suppress(FileNotFoundError):
            if pids.encode() in job.read_bytes():
                return True
    return False


@ray.remote(num_cpus=1)
class Other:
    """Holds a CPU."""

    def ready(self) -> None:
        pass


def run_until_killed(pids: str) -> None:
    hvd.init()
    pathlib.Path(pids, str(os.getpid())).touch()
    while True:
        hvd.allreduce(np.ones(4), name="x")


def train_elastic(folder: str) -> tuple[int, list[int]]:
    """Trains until there have been four ranks three times: first, after rank 3 has been killed, and after the second node
    was away. Returns the rank and the numbers of ranks in their order.
    """
    hvd.init()

    @gohvd.elastic.run
    def train(state: Any) -> None:
        deadline = time.monotonic() + 2 * _LIMIT_SECONDS
        while state.sizes[-1:] != [4] or state.sizes.count(4) < 3:
            if time.monotonic() > deadline:
                raise TimeoutError(f"there have been {state.sizes} ranks")
            hvd.allreduce(np.ones(4), name="step")
            if state.sizes[-1:] != [hvd.size()]:
                state.sizes.append(hvd.size())
            state.commit()
            if state.sizes == [4] or state.sizes == [2, 4]:
                if hvd.rank() == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            if state.sizes.count(4) == 2:
                pathlib.Path(folder, "first").touch()
                if hvd.size() == 2:
                    pathlib.Path(folder, "dead").touch()
            time.sleep(0.01)

    def broadcast(values: dict[str, Any], root_rank: int = 0) -> dict[str, Any]:
        got = hvd.broadcast(np.array(values["sizes"] + [0] * (20 - len(values["sizes"]))), root_rank, name="state")
        return {"sizes": [int(size) for size in got if size]}

    state = gohvd.elastic.ObjectState(broadcast, hvd.rank, sizes=[])
    train(state)
    return hvd.rank(), state.sizes


def children(pid: int) -> list[str]:
    """Returns the processes that a process has started, such as hvdrun or a raylet."""
    files = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [child for file in files for child in file.read_text().split()]


def ray_start(address: str) -> list[str]:
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", address, "--num-cpus", "2",
        "--object-store-memory", "100000000", "--disable-usage-stats",
    ]  # fmt: skip


@contextlib.contextmanager
def daemon(*command: str) -> Any:
    """Is a context in which a command runs."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()  # it ends the node's processes, which are not all in its group
        try:
            process.wait(_LIMIT_SECONDS)
        finally:
            process.kill()
            process.wait()


def node(command: Sequence[str], joined: Callable[[], bool]) -> tuple[contextlib.ExitStack, subprocess.Popen[bytes]]:
    """Starts a node, and again if it ends before it has joined the cluster, because Ray has time limits for its own parts."""
    deadline = time.monotonic() + 2 * _LIMIT_SECONDS
    while True:
        with contextlib.ExitStack() as context:
            process = context.enter_context(daemon(*command))
            while process.poll() is None:
                if joined():
                    return context.pop_all(), process
                assert time.monotonic() < deadline, f"the node has not started: {command}"
                time.sleep(0.05)


class Trainer:
    """The class of Horovod's examples for ``start(executable_cls=...)``."""

    def __init__(self, base: int, step: int = 1) -> None:
        hvd.init()
        self.value = base + step * hvd.rank()

    def train(self) -> int:
        return self.value


class RayCluster(Bounded):
    """The tests of a class share one cluster. Each makes its own executors."""

    seconds = 1200  # on a busy machine, nodes and workers take minutes to start

    @classmethod
    def setUpClass(cls) -> None:
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        home = stack.enter_context(tempfile.TemporaryDirectory())  # for Ray's token
        stack.enter_context(unittest.mock.patch.dict(os.environ, HOME=home))
        os.environ.pop("OMP_NUM_THREADS", None)  # so that Ray sets it
        inside = stack.enter_context(two_hosts())
        cls.address = f"{HOSTS[0]}:6399"
        cls.start_node = (*inside, *ray_start(HOSTS[1]), "--address", cls.address)  # type: ignore[attr-defined]

        def connected() -> bool:
            with contextlib.suppress(ConnectionError):
                ray.init(address=cls.address, _node_ip_address=HOSTS[0], log_to_driver=False)
                return True
            return False

        head = *ray_start(HOSTS[0]), "--head", "--port", "6399", "--include-dashboard=false"
        stack.enter_context(node(head, connected)[0])
        stack.callback(ray.shutdown)
        cls.node = stack.enter_context(contextlib.ExitStack())
        cls.start_second()

    @classmethod
    def start_second(cls) -> None:
        context, cls.node_process = node(cls.start_node, lambda: len(RayHostDiscovery().find_available_hosts_and_slots()) == 2)
        cls.node.enter_context(context)

    def executor(self, start: dict[str, Any] | None = None, **args: Any) -> RayExecutor:
        made = RayExecutor(RayExecutor.create_settings(timeout_s=_LIMIT_SECONDS), **args)
        self.addCleanup(made.shutdown)
        made.start(**(start or {}))
        return made

    def elastic(self, *args: Any, timeout_s: float = _LIMIT_SECONDS, **settings: Any) -> ElasticRayExecutor:
        return ElasticRayExecutor(ElasticRayExecutor.create_settings(*args, timeout_s=timeout_s, **settings))

    def wait_until(self, condition: Any, message: str) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not condition():
            self.assertLess(time.monotonic(), deadline, message)
            time.sleep(0.05)


class RayTest(RayCluster):
    def test_ranks_of_a_node_share_memory(self) -> None:
        executor = self.executor(num_workers=4)
        self.assertEqual(
            executor.run(place), [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
        )
        results = executor.run(sum_of_ranks)
        self.assertEqual([total for total, _ in results], [6.0] * 4)
        # Each host sends all elements once. Without shared memory, its ranks would send three times as much.
        nbytes = 4 * ELEMENTS
        for _, sent in results:
            self.assertGreater(sent, nbytes * 0.9)
            self.assertLess(sent, nbytes * 1.5)

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

    def test_call_after_a_failed_one(self) -> None:
        """The ranks of a call meet only each other, although those of a failed one are in its job or wait for it."""
        # A rank waits in init for all of timeout_s. The ranks of the other calls must meet within it.
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
        self.addCleanup(executor.shutdown)
        executor.start()
        for joined, run in (True, executor.run), (False, lambda *job: ray.get(executor.run_remote(*job))):
            with self.subTest(joined=joined), self.assertRaisesRegex(ValueError, "no data"):
                run(sum_of, [1.0, 1, joined])
            self.assertEqual(executor.run(sum_of, [10.0]), [20.0, 20.0])
            executor.run(hvd.shutdown)

    def test_error_of_leaving(self) -> None:
        executor = self.executor(num_workers=2)
        executor.run(fail_to_leave)
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            executor.shutdown()
        for rank in range(2):
            self.assertRegex(printed.getvalue(), rf"(?s)rank {rank} has left its job with an error: .*no way out of rank {rank}")

    def test_killed_worker(self) -> None:
        executor = self.executor(num_workers=3)
        with self.assertRaisesRegex(PeerError, r"rank 2 on 192\.0\.2\.\d has failed: ") as caught:
            executor.run(fail_at, [2, "kill"])
        self.assertEqual(caught.exception.ranks, [2])

    def test_more_workers_than_slots(self) -> None:
        for args in {"num_workers": 5}, {"num_hosts": 3}, {"num_workers": 1, "use_gpu": True}:
            executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), **args)
            with self.assertRaisesRegex(TimeoutError, r"Ray found no places for \d workers within 1 s: they need "):
                executor.start()
        self.executor(num_workers=4)  # nothing holds the places

    def test_current_placement_group(self) -> None:
        """The program is a task in a group that holds all CPUs."""
        group = ray.util.placement_group([{"CPU": 1}] * 4)
        self.addCleanup(ray.util.remove_placement_group, group)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        for workers in 4, 5:
            ref = in_a_group.options(scheduling_strategy=strategy).remote(workers)
            if workers == 4:
                self.assertEqual([r[:4] for r in ray.get(ref)], [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)])
                continue
            with self.assertRaisesRegex(TimeoutError, r"placement group had places for \d workers within 3 s, want 5"):
                ray.get(ref)

    def test_horovods_module(self) -> None:
        import horovod.ray

        from horovod.ray.elastic import RayHostDiscovery as found

        self.assertIs(horovod.ray.RayExecutor, RayExecutor)
        self.assertIs(found, RayHostDiscovery)
        self.assertEqual(found(cpus_per_slot=2).find_available_hosts_and_slots(), dict.fromkeys(HOSTS, 1))

    def test_arguments(self) -> None:
        for create_settings in RayExecutor.create_settings, ElasticRayExecutor.create_settings:
            self.assertEqual(create_settings(nics="eth0"), create_settings(nics=["eth0"]))
        bad = {"num_workers": 1, "min_workers": 1}
        for args in {}, {"num_workers": 1, "num_hosts": 1}, {"num_workers": 0}, {"num_workers": 1, "gpus_per_worker": 1}, bad:
            self.assertRaises(ValueError, RayExecutor, None, **args)

    def test_other_version(self) -> None:
        with unittest.mock.patch.object(gohvd.ray, "__version__", "0.0.1"):
            with self.assertRaisesRegex(RuntimeError, r"driver has version 0\.0\.1, but workers have .* on 192\.0\.2"):
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

    def test_no_route_between_ranks(self) -> None:
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=5, nics=ISOLATED), num_hosts=2)
        self.addCleanup(executor.shutdown)
        executor.start()
        with self.assertRaisesRegex(HorovodInternalError, r"198\.51\.100\.|waiting for rank 1"):
            executor.run(place)

    def test_missing_secret(self) -> None:
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=5), num_workers=2)
        self.addCleanup(executor.shutdown)
        executor.start()
        with self.assertRaisesRegex(HorovodInternalError, "HVD_SECRET"):
            executor.run(without_secret)

    def test_driver_that_ends(self) -> None:
        script = (
            "import ray, sys, ray_jobs, gohvd.ray\n"
            "ray.init(address=sys.argv[1], log_to_driver=False)\n"
            "executor = gohvd.ray.RayExecutor(gohvd.ray.RayExecutor.create_settings(timeout_s=300), num_workers=2)\n"
            "executor.start()\n"
            "open(sys.argv[2] + '/' + str(executor._store._process.pid), 'w').close()\n"
            "executor.run(ray_jobs.run_until_killed, [sys.argv[2]])\n"
        )
        elastic = (
            "import functools, ray, sys, ray_jobs, gohvd.ray\n"
            "ray.init(address=sys.argv[1], log_to_driver=False)\n"
            "executor = gohvd.ray.ElasticRayExecutor(gohvd.ray.ElasticRayExecutor.create_settings(3, 3, timeout_s=300))\n"
            "executor.run(functools.partial(ray_jobs.run_until_killed, sys.argv[2]))\n"
        )
        for text in script, elastic:
            for number in signal.SIGINT, signal.SIGKILL:
                with self.subTest(number, elastic=text == elastic), tempfile.TemporaryDirectory() as pids:
                    command = [sys.executable, "-c", text, self.address, pids]
                    driver = subprocess.Popen(command, cwd=_FOLDER, stderr=subprocess.PIPE, text=True, process_group=0)
                    self.addCleanup(driver.stderr.close)
                    self.addCleanup(driver.kill)
                    self.wait_until(lambda: len(os.listdir(pids)) == 3, "the job has not started")
                    processes = set(os.listdir(pids)) | set(children(driver.pid))
                    # A terminal sends SIGINT to the whole group.
                    (os.killpg if number == signal.SIGINT else os.kill)(driver.pid, number)
                    _, error = driver.communicate(timeout=_LIMIT_SECONDS)
                    self.assertEqual("KeyboardInterrupt" in error, number == signal.SIGINT, error)
                    self.wait_until(
                        lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in processes),
                        "processes of the job are left",
                    )
                    self.wait_until(lambda: not left_behind(pids), "the folder of an agent is left")

    def test_elastic_exception(self) -> None:
        with self.assertRaisesRegex(RuntimeError, r"(?s)exit status \d+\): hvdrun: all ranks .*\nTraceback.*in fail_at.*no data at rank 0"):
            self.elastic(2, 2).run(functools.partial(fail_at, 0, "raise"))

    def test_elastic_results(self) -> None:
        with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
            folder = pathlib.Path(top, "a folder " + "x" * 100)
            folder.mkdir()
            stack.enter_context(unittest.mock.patch.object(tempfile, "tempdir", str(folder)))
            stack.enter_context(unittest.mock.patch.dict(os.environ, LD_LIBRARY_PATH="/of/the/program"))
            self.assertEqual(self.elastic(4, 4).run(facts), [((rank, 4), "1", None) for rank in range(4)])

    def test_elastic_missing_result(self) -> None:
        with self.assertRaisesRegex(RuntimeError, r"got results only from ranks \[0\] of 2: processes have ended without one"):
            self.elastic(2, 2).run(end_without_result)
        with self.assertRaisesRegex(RuntimeError, "the function has not called hvd.init"):
            self.elastic(1, 1).run(os.getpid)

    def test_elastic_beside_another_actor(self) -> None:
        """Two CPUs of one node and one of the other are free."""
        other = Other.remote()
        self.addCleanup(ray.kill, other)
        ray.get(other.ready.remote())
        self.assertEqual([result[:2] for result in self.elastic(3).run(place)], [(rank, 3) for rank in range(3)])

    def test_elastic_second_agent(self) -> None:
        executor, answer = self.elastic(), io.BytesIO()
        executor._hosts[HOSTS[0]] = gohvd.ray.elastic._Host(None, None, 1, 0.0, busy=True)
        executor._serve([f"ray@{HOSTS[0]}", "hvdrun"], None, answer)
        self.assertIn(b"the last agent on this node has not ended", answer.getvalue())

    def test_elastic_trouble_with_ray(self) -> None:
        with unittest.mock.patch.object(ray, "nodes", side_effect=ConnectionError("no route\nto Ray")):
            with self.assertRaisesRegex(RuntimeError, "asking Ray for its nodes: ConnectionError: no route to Ray"):
                self.elastic().run(place)

    def test_elastic_bad_input(self) -> None:
        with self.assertRaisesRegex(RuntimeError, r"waiting for slots: got \d, want at least 5, after 2s"):
            self.elastic(5, elastic_timeout=2).run(place)
        with unittest.mock.patch.object(gohvd.ray.elastic, "__version__", "0.0.1"):
            with self.assertRaisesRegex(RuntimeError, r"driver has version 0\.0\.1, but workers have .* on 192"):
                self.elastic().run(place)
        for args in (0,), (2, 1):
            self.assertRaises(ValueError, self.elastic, *args)
        self.executor(num_workers=4)  # nothing holds the places


class RayLongTest(RayCluster):
    def test_elastic(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first_life, dead = pathlib.Path(folder, "first"), pathlib.Path(folder, "dead")

            def lose_node() -> None:
                self.wait_until(first_life.exists, "there is no rank in place of the killed one")
                for pid in children(self.node_process.pid):
                    os.kill(int(pid), signal.SIGKILL)
                self.node.close()
                self.wait_until(dead.exists, "the ranks have not gone on without the node")
                self.start_second()

            thread = threading.Thread(target=lose_node)
            thread.start()
            results = self.elastic(2, 4).run(functools.partial(train_elastic, folder))
            thread.join()
        self.assertEqual([rank for rank, _ in results], [0, 1, 2, 3])
        sizes = results[0][1]
        self.assertTrue(all(result[1] == sizes for result in results), results)
        rest = iter(sizes)
        self.assertTrue(all(size in rest for size in (4, 3, 4, 2, 4)), sizes)

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

    def test_ray_train_errors_of_leaving(self) -> None:
        """The workers leave their job also if torch does not leave it without an error, and their errors are printed."""
        import gohvd.ray.train

        group = unittest.mock.MagicMock()
        group.execute_async = lambda f, **_: [raise_error.remote("no way out" if f is basics.shutdown else "torch failed")]
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            with self.assertRaisesRegex(ray.exceptions.RayTaskError, "torch failed"):
                gohvd.ray.train._Backend().on_shutdown(group, None)
        self.assertRegex(printed.getvalue(), "(?s)rank 0 has left its job with an error: .*no way out")


@ray.remote
def raise_error(text: str) -> None:
    raise ValueError(text)


def train(config: dict[str, str]) -> None:
    """Trains on the images of digits of the examples with DDP, and writes the weights to a file. In the first attempt,
    rank 1 is killed in the middle.
    """
    import ray.train.torch
    import torch
    import torch.distributed as dist

    sys.path.append(str(_FOLDER.parent.parent / "examples"))
    from pytorch_digits import load_images

    assert dist.get_backend() == "gohvd"
    assert (dist.get_rank(), dist.get_world_size()) == place()[:2]
    pixels, digits, test_pixels, test_digits = load_images(seed=1)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 10))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = pathlib.Path(config["folder"], f"first.{hvd.rank()}")
    killed = hvd.rank() == 1 and not first.exists()
    first.touch()
    for epoch in range(5):
        for step, images in enumerate(torch.randperm(len(pixels), generator=torch.Generator().manual_seed(epoch)).split(64)):
            if killed and (epoch, step) == (1, 10):
                os.kill(os.getpid(), signal.SIGKILL)
            mine = images[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[mine]), digits[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(test_pixels).argmax(1) == test_digits).float().mean().item()
    assert accuracy > 0.9, accuracy
    pathlib.Path(config["folder"], f"weights.{hvd.rank()}").write_text(repr([p.tolist() for p in model.parameters()]))


if __name__ == "__main__":
    unittest.main()
