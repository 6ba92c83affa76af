"""Tests of gohvd.torch on CUDA devices: hvdrun -np 2 python3 torch_device_ranks.py [TEST...].

HOROVOD_GPU_OPERATIONS must be nccl. If there are fewer devices than ranks, the ranks share them. scripts/gpu-check.sh runs the
tests. Other tests need no GPU, because they do not use torch (device_ranks.py). If GOHVD_TEST_DEVICE is cpu, the tests use
tensors on the CPU, to check the tests themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import sys
import time
import unittest
from collections.abc import Callable, Iterator

import devices
import torch

import gohvd.torch as hvd
from gohvd._engine import engine

_LIMIT_SECONDS = 120
_CPU = os.environ.get("GOHVD_TEST_DEVICE") == "cpu"

DEVICE = torch.device("cpu") if _CPU else torch.device("cuda", devices.share(torch.cuda.device_count()))
if not _CPU:
    torch.cuda.set_device(DEVICE)


class Ranks(unittest.TestCase):
    def setUp(self) -> None:
        faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)
        hvd.init()
        engine._warned.clear()
        self.rank, self.size = hvd.rank(), hvd.size()

    def equal(self, got: torch.Tensor, want: torch.Tensor) -> None:
        self.assertEqual(got.device, DEVICE)
        self.assertTrue(torch.equal(got.cpu(), want.cpu()), f"got {got}, want {want}")

    def in_place(self) -> None:
        """Asserts that no tensor was copied through host memory."""
        self.assertEqual(engine._warned, set())


class InPlace(Ranks):
    """Operations on the memory of torch."""

    def test_operations(self) -> None:
        n, total = self.size, sum(range(self.size))
        whole = torch.zeros(10000, device=DEVICE)
        x = whole[1000:1003]
        for i in range(5):
            x.copy_(torch.tensor([self.rank, 1.0, i]))
            self.equal(hvd.allreduce(x, op=hvd.Sum, name="x"), torch.tensor([total, n, float(i * n)]))
            hvd.allreduce_(x, op=hvd.Sum, name="x_")
            self.equal(x, torch.tensor([total, n, float(i * n)]))
        self.assertEqual(whole[:1000].abs().sum() + whole[1003:].abs().sum(), 0)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
            self.equal(hvd.allreduce(torch.full((7,), 2, dtype=dtype, device=DEVICE), op=hvd.Max), torch.full((7,), 2, dtype=dtype))
        self.equal(hvd.broadcast(torch.tensor([float(self.rank)], device=DEVICE), n - 1), torch.tensor([n - 1.0]))
        rows = torch.full((n, 3), float(self.rank), device=DEVICE)
        self.equal(hvd.reducescatter(rows, op=hvd.Sum), torch.full((1, 3), float(total)))
        ones = torch.ones(2 * n, 3, device=DEVICE, requires_grad=True)
        (hvd.reducescatter(ones, op=hvd.Sum) * (self.rank + 1)).sum().backward()
        self.equal(ones.grad, torch.arange(1, n + 1).repeat_interleave(6).view(2 * n, 3) * float(n))
        bn = hvd.SyncBatchNorm(2).to(DEVICE)(torch.tensor([[float(self.rank), 1], [float(-self.rank), 2]], device=DEVICE))
        self.assertEqual(bn.shape, (2, 2))
        a, b = hvd.grouped_allreduce([x * 0 + 1, torch.ones(4, dtype=torch.int32, device=DEVICE)], op=hvd.Sum)
        self.equal(a, torch.full((3,), float(n)))
        self.equal(b, torch.full((4,), n, dtype=torch.int32))
        self.in_place()

    def test_unknown_sizes(self) -> None:
        """The other ranks determine the sizes of the results."""
        n = self.size
        for _ in range(2):
            x = torch.full((self.rank + 1, 2), float(self.rank), device=DEVICE, requires_grad=True)
            y = hvd.allgather(x, name="rows")
            self.equal(y, torch.cat([torch.full((r + 1, 2), float(r)) for r in range(n)]))
            y += 1
            y.sum().backward()
            self.equal(x.grad, torch.ones(self.rank + 1, 2))
            splits = torch.tensor([1] * (n - 1) + [2], dtype=torch.int32)
            y, received = hvd.alltoall(torch.arange(n + 1, device=DEVICE), splits, name="parts")
            last = self.rank == n - 1
            self.equal(y, torch.tensor([n - 1, n] * n if last else [self.rank] * n))
            self.assertEqual(received.tolist(), [2 if last else 1] * n)
            sparse = torch.sparse_coo_tensor([[self.rank]], [1.0], (n,), device=DEVICE)
            self.equal(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense(), torch.ones(n))
        self.in_place()

    @unittest.skipIf(_CPU, "the CPU has no streams")
    def test_streams(self) -> None:
        """The stream on which an operation is begun is still busy, and another stream uses the result."""
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        m = torch.randn(2048, 2048, device=DEVICE)
        torch.cuda.synchronize()
        for i in range(5):
            with torch.cuda.stream(side):
                x = torch.zeros(1 << 20, device=DEVICE)
                for _ in range(20):
                    m = (m @ m).clamp(-1, 1)
                x.fill_(i + self.rank)
                handle = hvd.allreduce_async_(x, op=hvd.Sum, name="streams")
            with torch.cuda.stream(other):
                y = hvd.synchronize(handle) * 2
            other.synchronize()
            self.equal(y, torch.full((1 << 20,), 2.0 * (self.size * i + sum(range(self.size)))))
        self.in_place()

    def test_optimizer(self) -> None:
        """A training on the device has the same weights at all ranks, and those of a training on the CPU."""
        results: list[torch.Tensor] = []
        for device in (DEVICE, torch.device("cpu")):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
            )
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            torch.manual_seed(10 + self.rank)
            for _ in range(20):
                optimizer.zero_grad()
                x = torch.randn(4, 8)
                loss = (model(x.to(device)) - x.sum(1, keepdim=True).to(device)).square().mean()
                loss.backward()
                optimizer.step()
            results.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
        self.assertTrue(torch.allclose(*results, rtol=1e-3, atol=1e-4), results)
        first = hvd.broadcast(results[0].to(DEVICE), 0)
        self.equal(first, results[0])
        self.in_place()

    def test_empty_cache(self) -> None:
        """Torch gives memory back to CUDA and allocates again, so addresses have other allocations."""
        for i in range(10):
            x = torch.full(((i % 3 + 1) << 22,), float(i), device=DEVICE)
            self.equal(hvd.allreduce(x, op=hvd.Sum, name=f"cache {i % 3}")[:3], torch.full((3,), float(i * self.size)))
            del x
            if not _CPU:
                torch.cuda.empty_cache()
        self.in_place()

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Makes the default group of torch.distributed, over gohvd."""
        try:
            import gohvd.torch.distributed  # noqa: F401
        except ImportError as e:
            self.skipTest(str(e))
        import torch.distributed as dist

        store = dist.HashStore() if self.size == 1 else None
        if store is None:
            port = hvd.broadcast_object(_free_port(), 0)
            store = dist.TCPStore("127.0.0.1", port, self.size, self.rank == 0)
        dist.init_process_group("gohvd", store=store, rank=self.rank, world_size=self.size)
        try:
            yield
        finally:
            dist.destroy_process_group()
        self.in_place()

    def test_distributed(self) -> None:
        import torch.distributed as dist

        with self.group():
            n = self.size
            x = torch.full((5,), float(self.rank), device=DEVICE)
            dist.all_reduce(x)
            self.equal(x, torch.full((5,), float(sum(range(n)))))
            whole = torch.zeros(2 * n, device=DEVICE)
            mine = whole[2 * self.rank : 2 * self.rank + 2]
            mine.fill_(self.rank)
            dist.all_gather_into_tensor(whole, mine)
            self.equal(whole, torch.arange(n).repeat_interleave(2).float())
            part = torch.empty(2, device=DEVICE)
            dist.reduce_scatter_tensor(part, whole)
            self.equal(part, torch.full((2,), float(n * self.rank)))
            parts = [torch.empty(1, device=DEVICE) for _ in range(n)]
            dist.all_gather(parts, torch.full((1,), self.rank + 0.5, device=DEVICE))
            self.equal(torch.cat(parts), torch.arange(n) + 0.5)
            out = torch.empty(n, device=DEVICE)
            dist.all_to_all_single(out, torch.arange(n, device=DEVICE).float() + 10 * self.rank)
            self.equal(out, 10.0 * torch.arange(n) + self.rank)
            torch.manual_seed(1)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1).to(DEVICE))
            model(torch.full((2, 3), float(self.rank), device=DEVICE)).sum().backward()
            self.equal(model.module.weight.grad, torch.full((1, 3), 2.0 * sum(range(n)) / n))
            works = [dist.all_reduce(torch.full((1 << 20,), float(i), device=DEVICE), async_op=True) for i in range(20)]
            for i, work in enumerate(works):
                work.wait()
                self.equal(work.result()[0][-2:], torch.full((2,), float(i * n)))

    def test_sharded(self) -> None:
        """A training with FSDP2 has the weights of a training with the batches of all ranks."""
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError as e:
            self.skipTest(str(e))
        from torch.distributed.device_mesh import init_device_mesh

        def layers() -> torch.nn.Module:
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5)).to(DEVICE)

        with self.group():
            alone, sharded = layers(), layers()
            mesh = init_device_mesh(DEVICE.type, (self.size,))
            for layer in (sharded[0], sharded[2], sharded):
                fully_shard(layer, mesh=mesh)
            batches = [torch.randn(4, 6).to(DEVICE) for _ in range(self.size)]
            optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, sharded)]
            for _ in range(5):
                (sum(alone(b).square().mean() for b in batches) / self.size).backward()
                sharded(batches[self.rank]).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for want, got in zip(alone.parameters(), sharded.parameters()):
                self.assertTrue(torch.allclose(got.full_tensor(), want, rtol=1e-3, atol=1e-4), f"got {got}, want {want}")


class Allocators(Ranks):
    """PYTORCH_CUDA_ALLOC_CONF chooses how torch gets its memory from CUDA."""

    def test_in_place(self) -> None:
        for i in range(3):
            x = torch.full((1000,), float(self.rank + i), device=DEVICE)
            self.equal(hvd.allreduce(x, op=hvd.Sum), torch.full((1000,), float(sum(range(self.size)) + i * self.size)))
        self.in_place()


class Figures(Ranks):
    """Prints how long an allreduce of one rank takes, with gohvd and with torch's own NCCL, and a copy on the device."""

    def test_figures(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo" if _CPU else "nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            print(f"# {'bytes':>11} {'gohvd.torch':>14} {'torch nccl':>14} {'copy':>14} (median us of 20 calls)")
            for count in (2, 1 << 10, 1 << 18, 1 << 22, 1 << 25):
                x = torch.zeros(count, device=DEVICE)
                y = torch.empty_like(x)
                ways = lambda: hvd.allreduce_(x, name="figures"), lambda: dist.all_reduce(x), lambda: y.copy_(x)
                print(f"  {4 * count:11} " + " ".join([f"{self._micros(way):14.1f}" for way in ways]), flush=True)
        finally:
            dist.destroy_process_group()
        self.in_place()

    def _micros(self, way: Callable[[], object]) -> float:
        times = []
        for _ in range(25):
            begin = time.perf_counter()
            way()
            if not _CPU:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times[5:])


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *(sys.argv[1:] or ["InPlace"])])
