"""Tests the horovod package that is built on gohvd: its modules, a program written for Horovod, and horovod.run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import programs
import torch
from gohvd import _programs, basics
from ranks import RanksTest, hvd
from shim_functions import fail, place, survive

# The example program from Horovod's documentation, changed only to generate its data.
PROGRAM = '''
import torch
import torch.nn.functional as F
import torch.utils.data
import torch.utils.data.distributed
import horovod.torch as hvd
from horovod.torch.mpi_ops import Average, allreduce_async_, synchronize

hvd.init()
torch.manual_seed(42)

x = torch.randn(48, 4)
dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)

model = torch.nn.Linear(4, 2)
scaler = hvd.size() if not hvd.nccl_built() else hvd.local_size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * scaler, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average,
    gradient_predivide_factor=1.0)

def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val), name=name).item()

for epoch in range(4):
    model.train()
    sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(model(data), dim=1), target)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        with optimizer.skip_synchronize():
            optimizer.step()

accuracy = metric_average(float((model(x).argmax(1) == (x.sum(1) > 0)).float().mean()), 'avg_accuracy')
'''


MAIN = '''
import horovod

def more(n):
    import horovod.torch as hvd
    hvd.init()
    return hvd.rank() + n

if __name__ == "__main__":
    print(horovod.run(more, (1,), num_proc=2))
'''


class Modules(RanksTest):
    def test_they_are_gohvds(self) -> None:
        for name in ("", ".mpi_ops", ".functions", ".optimizer", ".compression", ".sync_batch_norm", ".elastic", ".elastic.state", ".elastic.sampler"):
            theirs, ours = importlib.import_module("horovod.torch" + name), importlib.import_module("gohvd.torch" + name)
            self.assertIs(theirs, ours, name)
        import horovod.torch

        self.assertIs(horovod.torch, hvd)
        self.assertIs(horovod.torch.mpi_ops, hvd.mpi_ops)
        from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
        from horovod.common.process_sets import ProcessSet, global_process_set

        self.assertIs(HorovodInternalError, hvd.HorovodInternalError)
        self.assertIs(ProcessSet, hvd.ProcessSet)
        self.assertIs(global_process_set, hvd.global_process_set)
        self.assertTrue(issubclass(HorovodVersionMismatchError, ImportError))
        self.assertTrue(HostsUpdatedInterrupt(True).skip_sync)
        self.assertIsInstance(horovod.__version__, str)

    def test_all_of_horovods_names(self) -> None:
        import horovod.torch

        for name in """
            init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
            mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built
            rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product
            HorovodInternalError allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce
            grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather
            allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_async broadcast_
            broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter
            grouped_reducescatter_async join barrier poll synchronize broadcast_parameters broadcast_optimizer_state
            broadcast_object allgather_object DistributedOptimizer SyncBatchNorm Compression elastic
        """.split():
            self.assertTrue(hasattr(horovod.torch, name), name)

    def test_basics(self) -> None:
        from horovod.common.basics import HorovodBasics

        basics = HorovodBasics(__file__, "mpi_lib_v2")
        self.assertEqual((basics.rank(), basics.size()), (self.rank, self.size))
        self.assertTrue(basics.gloo_built())
        with self.assertRaises(AttributeError):
            basics.nothing_of_this_name

    def test_elastic(self) -> None:
        from horovod.common.elastic import ObjectState, State, notification_manager, run_fn

        self.assertTrue(issubclass(ObjectState, State))
        notification_manager.init()
        state = ObjectState(lambda value: value, lambda: self.rank, epoch=1)
        self.assertEqual(run_fn(lambda state, n: state.epoch + n, lambda: None)(state, 2), 3)

    def test_imports_of_other_libraries(self) -> None:
        import horovod.torch.elastic.state as state
        from horovod.torch.elastic.sampler import ElasticSampler

        self.assertIs(state.TorchState, hvd.elastic.TorchState)
        self.assertIs(ElasticSampler, hvd.elastic.ElasticSampler)

    def test_data(self) -> None:
        from horovod.data import AsyncDataLoaderMixin, BaseDataLoader

        class Loader(BaseDataLoader):
            def __len__(self) -> int:
                return 5

            def _iterate(self):
                for i in range(len(self)):
                    if i == self.fails_at:
                        raise KeyError(i)
                    yield i

            def _process_batch(self, batch: int) -> int:
                return batch * 10

            fails_at = -1

        class Ahead(AsyncDataLoaderMixin, Loader):
            pass

        self.assertEqual(list(Loader()), [0, 10, 20, 30, 40])
        for size in (0, 1, 2, 64):
            loader = Ahead(async_loader_queue_size=size)
            for _ in range(2):
                self.assertEqual(list(loader), [0, 10, 20, 30, 40])
            begun = iter(loader)
            self.assertEqual(next(begun), 0)
            loader.close_async_loader()
            self.assertEqual(list(begun) == [10, 20, 30, 40], size == 0)
            loader.fails_at = 3
            with self.assertRaises(KeyError):
                list(loader)

    def test_hosts(self) -> None:
        from horovod.runner.common.util import hosts

        made = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:3"), 2, 4)
        self.assertEqual(
            [(s.hostname, s.rank, s.local_rank, s.cross_rank, s.size, s.local_size, s.cross_size) for s in made],
            [("a", 0, 0, 0, 4, 2, 2), ("a", 1, 1, 0, 4, 2, 2), ("b", 2, 0, 1, 4, 2, 2), ("b", 3, 1, 1, 4, 2, 2)],
        )
        self.assertEqual(hosts.SlotInfo.from_response_string(made[3].to_response_string()).cross_size, 2)
        with self.assertRaisesRegex(ValueError, "got hosts with 5 slots, want at least 6"):
            hosts.get_host_assignments(hosts.parse_hosts("a:2,b:3"), 6)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("a slots=2 # first\n\nb slots = 3 max_slots=4\nc\n")
            file.flush()
            self.assertEqual(hosts.parse_host_files(file.name), "a:2,b:3,c:1")

    def test_absent_modules(self) -> None:
        for name, want in (
            ("tensorflow", "gohvd supports PyTorch"),
            ("keras", "gohvd supports PyTorch"),
            ("mxnet", "gohvd supports PyTorch"),
        ):
            # As with a Horovod that was built without this framework, the module is found but cannot be imported.
            self.assertIsNotNone(importlib.util.find_spec("horovod." + name))
            # Code that handles a missing package handles this error too.
            with self.assertRaisesRegex(ModuleNotFoundError, f"no module horovod.{name}: .*{want}"):
                importlib.import_module("horovod." + name)
            with self.assertRaisesRegex(ImportError, f"no module horovod.{name}: .*{want}"):
                exec(f"from horovod import {name}")
        with self.assertRaisesRegex(ImportError, "no module horovod.tensorflow: "):
            importlib.import_module("horovod.tensorflow.keras")
        self.assertIsNone(importlib.util.find_spec("horovod.no_such_module"))

    def test_spark(self) -> None:
        """The arguments of horovod.spark.run have Horovod's order."""
        with mock.patch("gohvd.spark", create=True) as spark, mock.patch.dict(sys.modules, {"gohvd.spark": spark}):
            from horovod.spark import run

            env = {"A": "b"}
            run(max, (1,), {}, 2, 3.0, False, True, None, env, sys.stdout, sys.stderr, 2, {"eth0"}, True)
            spark.run.assert_called_once_with(
                max, (1,), {}, 2, 3.0, {"HOROVOD_GLOO_IFACE": "eth0", "A": "b"}, sys.stdout, sys.stderr, 2, True
            )
            with self.assertRaisesRegex(ValueError, "omit use_mpi"):
                run(max, use_mpi=True)
            with self.assertRaisesRegex(ValueError, "PYSPARK_PYTHON"):
                run(max, executable=sys.executable)

    def test_threads(self) -> None:
        from horovod.runner.util import threads

        done: list = []
        threads.in_thread(done.append, (1,), name="named").join(30)
        threads.in_thread(fail, silent=True).join(30)
        with self.assertRaises(ValueError):
            threads.in_thread(done.append, [1])
        event, stop = threading.Event(), threading.Event()
        waiting = threads.on_event(event, done.append, (2,))
        stopped = threads.on_event(threading.Event(), done.append, (3,), stop=stop, check_stop_interval_s=0.001)
        self.assertTrue(waiting.daemon and waiting.is_alive())
        event.set()
        stop.set()
        waiting.join(30)
        stopped.join(30)
        self.assertEqual(done, [1, 2])

        multiply = threads.execute_function_multithreaded
        self.assertEqual(multiply(lambda a, b: a * b, [[1, 2], [3, 4], [5, 6]], max_concurrent_executions=2), {0: 2, 1: 12, 2: 30})
        self.assertEqual(multiply(fail, []), {})
        with self.assertRaises(RuntimeError):
            multiply(fail, [[]])
        called = threading.Event()
        self.assertIsNone(multiply(called.set, [[]], block_until_all_done=False))
        self.assertTrue(called.wait(30))

    def test_util(self) -> None:
        from horovod.common import util
        from horovod.common.exceptions import HorovodVersionMismatchError

        os.environ["GOHVD_TEST_A"] = "before"
        with util.env(GOHVD_TEST_A="1", GOHVD_TEST_B=2):
            self.assertEqual((os.environ["GOHVD_TEST_A"], os.environ["GOHVD_TEST_B"]), ("1", "2"))
            with util.env(GOHVD_TEST_A=None):
                self.assertNotIn("GOHVD_TEST_A", os.environ)
        self.assertEqual(os.environ.pop("GOHVD_TEST_A"), "before")
        self.assertNotIn("GOHVD_TEST_B", os.environ)

        self.assertEqual(util.split_list([1, 2, 3, 4, 5], 3), [[1, 2], [3, 4], [5]])
        self.assertEqual(util.split_list([1], 2), [[1], []])
        self.assertEqual([n for n in range(9) if util.num_rank_is_power_2(n)], [1, 2, 4, 8])
        self.assertEqual([util.is_iterable(x) for x in ([], "a", 1, None)], [True, True, False, False])
        for version, target, want in (
            ("2.1.0", "2.1.0", True),
            ("2.10.0+cpu", "2.9.1", True),
            ("1.13.0a0", "2.0.0", False),
        ):
            self.assertEqual(util.is_version_greater_equal_than(version, target), want, version)
        with self.assertRaises(ValueError):
            util.is_version_greater_equal_than("1.0.0", "1.0")
        self.assertTrue(util.extension_available("torch"))
        self.assertFalse(util.extension_available("tensorflow"))
        self.assertTrue(util.gloo_built())
        self.assertFalse(util.ddl_built() or util.ccl_built())
        self.assertEqual(util.mpi_built(), bool(hvd.mpi_built()))
        for controller in ("MPI", "gloo"):
            with mock.patch.dict(os.environ, HOROVOD_CONTROLLER=controller):
                self.assertEqual(hvd.mpi_enabled(), controller == "MPI")
        for nccl, cuda, want in (
            ({"code": 22809, "error": ""}, {"error": ""}, (22809, True)),
            ({"code": 2703, "error": "too old"}, {"error": ""}, (0, True)),
            ({"code": 0, "error": "not found"}, {"error": "not found"}, (0, False)),
        ):
            found = {"built": True, "nccl": nccl, "cuda": cuda}
            with mock.patch("gohvd.basics._gpu_libraries", return_value=found):
                self.assertEqual((hvd.nccl_built(), hvd.cuda_built()), want)
        self.assertEqual((util.nccl_built(), util.gpu_available("torch")), (bool(hvd.nccl_built()), hvd.cuda_built()))
        util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
        with self.assertRaises(ImportError):
            util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)
        util.check_installed_version("torch", torch.__version__)
        with self.assertRaises(HorovodVersionMismatchError):
            util.check_installed_version("torch", "0.0.1")
        calls = []
        cached = util._cache(lambda x: calls.append(x))
        cached(1), cached(1), cached(2)
        self.assertEqual(calls, [1, 2])

    def test_a_program(self) -> None:
        names = {"__name__": "__main__"}
        exec(compile(PROGRAM, "program.py", "exec"), names)
        self.assertGreater(names["accuracy"], 0.8)
        weights = hvd.allgather(names["model"].weight.detach().unsqueeze(0))
        for other in weights:
            self.equal(other, weights[0])


class BesideHorovod(RanksTest):
    """Tests a folder in which the distribution Horovod is installed."""

    def test_import(self) -> None:
        if self.size > 1:
            self.skipTest("runs at one rank")
        import horovod

        with tempfile.TemporaryDirectory() as theirs, tempfile.TemporaryDirectory() as ours:
            for top in (theirs, ours):
                shutil.copytree(os.path.dirname(horovod.__file__), os.path.join(top, "horovod"))
            os.mkdir(os.path.join(theirs, "horovod-0.28.1.dist-info"))
            with open(os.path.join(theirs, "horovod-0.28.1.dist-info", "METADATA"), "w") as f:
                f.write("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
            for path, want in (((theirs, ours), f"both installed in {theirs}, "), ((ours, theirs), "0.28.1 of gohvd")):
                script = "import horovod; print(horovod.__version__, 'of gohvd')"
                ran = programs.run(script, PYTHONPATH=os.pathsep.join([*path, *sys.path]))
                self.assertIn(want, ran.stdout + ran.stderr)


class Run(RanksTest):
    """Tests that start jobs. They run only in the job with one rank, because they need no other ranks."""

    def setUp(self) -> None:
        super().setUp()
        if self.size > 1:
            self.skipTest("runs at one rank")
        if not os.environ.get("HVD_RUN") and not shutil.which("hvdrun"):
            if os.environ.get("CI"):
                self.fail("HVD_RUN is not set, and hvdrun is not on PATH")
            self.skipTest("HVD_RUN is not set, and hvdrun is not on PATH")

    def test_results_by_rank(self) -> None:
        import horovod

        self.assertEqual(horovod.run(place, (10,), {"factor": 2}, num_proc=3), [(r + 10, 3, 6) for r in range(3)])
        self.assertEqual(horovod.run(place, args=(0,)), [(0, 1, 0)])
        self.assertEqual(horovod.run(place, args=(0,), hosts="localhost:2", np=2), [(0, 2, 1), (1, 2, 1)])

    def test_results_of_generations(self) -> None:
        from gohvd import _results

        old, last = [(3, 1, 2, "left early")], [(5, 0, 2, "a"), (5, 1, 2, "b")]
        for outcomes in (old + last, last + old, [(6, 1, 3, "not all"), *last]):
            self.assertEqual(_results.by_rank(outcomes, "hint"), ["a", "b"])
        with self.assertRaisesRegex(RuntimeError, r"results only from ranks \[0, 2\] of 3: hint"):
            _results.by_rank([(1, 2, 3, ""), (1, 0, 3, "")], "hint")
        with self.assertRaisesRegex(RuntimeError, "no results: hint"):
            _results.by_rank([], "hint")

    def test_a_function_of_the_main_module(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "main.py")
            with open(path, "w") as f:
                f.write(MAIN)
            run = subprocess.run([sys.executable, path], stdout=subprocess.PIPE, timeout=200, env={
                **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)
            })
        self.assertEqual((run.returncode, run.stdout.decode().splitlines()[-1]), (0, "[1, 2]"))

    def test_program_that_ends(self) -> None:
        """The job ends with its program. After Ctrl-C, the ranks have time to save their state."""
        script = "import horovod, shim_functions as f, sys; horovod.run(f.save_at_interrupt, sys.argv[1:], num_proc=2)"

        def wait_until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 100
            while not condition():
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)

        for number in signal.SIGINT, signal.SIGKILL:
            with self.subTest(number), tempfile.TemporaryDirectory() as top, tempfile.TemporaryDirectory() as bin:
                env = programs.environment(PYTHONPATH=os.pathsep.join(sys.path))
                if number == signal.SIGINT:  # a shell that does not exec hvdrun
                    env["HVD_RUN"] = os.path.join(bin, "script")
                    pathlib.Path(env["HVD_RUN"]).write_text(f'#!/bin/sh\n{_programs.path_of_hvdrun()} "$@"\nexit $?\n')
                    os.chmod(env["HVD_RUN"], 0o700)
                command = [sys.executable, "-c", script, top]
                program = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True)
                self.addCleanup(program.kill)
                wait_until(lambda: len(os.listdir(top)) == 2)
                # A terminal sends SIGINT to the whole group.
                (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
                program.wait(100)
                files = list(pathlib.Path(top).iterdir())
                wait_until(lambda: not any(os.path.exists(f"/proc/{file.name}/exe") for file in files))
                texts = [file.read_text() for file in files]
                self.assertEqual(texts, ["saved" if number == signal.SIGINT else ""] * 2)

    def test_elastic(self) -> None:
        import horovod

        for options in (dict(hosts="localhost:2"), dict(host_discovery_script="echo localhost:2", max_num_proc=2)):
            got = horovod.run(survive, (20,), num_proc=2, min_num_proc=1, cooldown_range=(1, 1), **options)
            self.assertEqual(got, [(rank, 20) for rank in range(len(got))])
        with self.assertRaisesRegex(RuntimeError, ":[01]/1: (.|\n)*the function has not called hvd.init"):
            horovod.run(os.getpid, num_proc=2, min_num_proc=1)
        for options in (dict(min_num_proc=2, max_num_proc=2), dict(max_num_proc=4)):  # not elastic
            self.assertEqual(len(horovod.run(os.getpid, num_proc=2, **options)), 2)

    def test_options(self) -> None:
        """The arguments become those of hvdrun."""
        import horovod

        with tempfile.TemporaryDirectory() as top:
            program, said = os.path.join(top, "hvdrun"), os.path.join(top, "said")
            with open(program, "w") as f:
                f.write(f'#!/bin/sh\necho "$@" > {said}\nexit 3\n')
            os.chmod(program, 0o700)
            for options, want in (
                (dict(num_proc=2, use_mpi=True, mpi_args="--verbose --mca a b"), "--num-proc 2 --mpi-args --verbose --mca a b --mpi "),
                (dict(np=4, min_np=2, max_np=6, slots=2, reset_limit=3, cooldown_range=[1, 60], host_discovery_script="./find"),
                 "--num-proc 4 --min-num-proc 2 --max-num-proc 6 --slots-per-host 2 --reset-limit 3 "
                 "--blacklist-cooldown-range 1,60 --host-discovery-script ./find "),
                (dict(host_discovery_script="./find"), "--host-discovery-script ./find "),
            ):  # fmt: skip
                with mock.patch.dict(os.environ, HVD_RUN=program), self.assertRaises(RuntimeError):
                    horovod.run(place, (0,), **options)
                with open(said) as f:
                    self.assertEqual(f.read().partition(sys.executable)[0], want)

    def test_errors(self) -> None:
        import horovod

        with self.assertRaisesRegex(RuntimeError, "rank [01]: (.|\n)*KeyError: 'on purpose'"):
            horovod.run(fail, num_proc=2)
        from horovod.common.util import env

        with env(HVD_RUN=__file__), self.assertRaisesRegex(RuntimeError, f"HVD_RUN is {__file__}, which is not"):
            horovod.run(fail)
        with env(HVD_RUN=None, PATH="/nonexistent"), self.assertRaisesRegex(RuntimeError, "hvdrun"):
            horovod.run(place, (0,))


if __name__ == "__main__":
    unittest.main()
