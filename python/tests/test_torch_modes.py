"""Tests of the modes of the caller's thread, and of the layouts of tensors, over every operation of gohvd.torch.

A table has a call of each function. A further function of the module without an entry in the table fails a test.
"""

from __future__ import annotations

import contextlib
import re
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks import RanksTest

import gohvd.torch as hvd
from gohvd.torch import mpi_ops

Tensor = torch.Tensor

# The functions of the module that do not communicate, or that other entries of the table call.
_OTHERS = {
    "add_process_set", "alloc_tensor", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built",
    "gloo_enabled", "init", "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "poll", "rank", "remove_process_set", "rocm_built", "shutdown", "size",
    "start_timeline", "stop_timeline", "synchronize",
}  # fmt: skip


def _wait(begin: Callable[..., int], *args: Any, **kw: Any) -> Any:
    return hvd.synchronize(begin(*args, **kw))


def _in_place(function: Callable[..., Any], t: Tensor, *args: Any, **kw: Any) -> list[Any]:
    """Returns the result of a function and the tensor to which it has written."""
    return [function(t, *args, **kw), t]


def _message(t: Tensor, wait: bool) -> Any:
    """Sends a small tensor to the next rank and receives one from the previous one. A job of one rank sends nothing."""
    if hvd.size() == 1:
        return t
    to, source = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
    sent = mpi_ops.send(t, to) if wait else mpi_ops.send_async(t, to)
    got = torch.zeros(t.shape, dtype=t.dtype, device="cpu")
    begun = mpi_ops.recv(got, source) if wait else mpi_ops.recv_async(got, source)
    if not wait:
        hvd.synchronize(sent)
        hvd.synchronize(begun)
    return got


def _sparse(t: Tensor) -> Tensor:
    rows = torch.arange(t.shape[0], device="cpu").unsqueeze(0)
    sparse = torch.sparse_coo_tensor(rows, t.detach().clone(), t.shape, device="cpu")
    return mpi_ops.sparse_allreduce_async(sparse, None, hvd.Sum)().to_dense()


# What each function returns for a tensor whose rows are a multiple of the number of ranks.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "allreduce": lambda t: hvd.allreduce(t, op=hvd.Sum),
    "allreduce_async": lambda t: _wait(hvd.allreduce_async, t, op=hvd.Sum),
    "allreduce_": lambda t: _in_place(hvd.allreduce_, t, op=hvd.Sum),
    "allreduce_async_": lambda t: _in_place(lambda t: _wait(hvd.allreduce_async_, t, op=hvd.Sum), t),
    "grouped_allreduce": lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum),
    "grouped_allreduce_async": lambda t: _wait(hvd.grouped_allreduce_async, [t, t], op=hvd.Sum),
    "grouped_allreduce_": lambda t: _in_place(lambda t: hvd.grouped_allreduce_([t], op=hvd.Sum), t),
    "grouped_allreduce_async_": lambda t: _in_place(lambda t: _wait(hvd.grouped_allreduce_async_, [t], op=hvd.Sum), t),
    "sparse_allreduce_async": _sparse,
    "allgather": hvd.allgather,
    "allgather_async": lambda t: _wait(hvd.allgather_async, t),
    "grouped_allgather": lambda t: hvd.grouped_allgather([t, t]),
    "grouped_allgather_async": lambda t: _wait(hvd.grouped_allgather_async, [t, t]),
    "broadcast": lambda t: hvd.broadcast(t, 0),
    "broadcast_async": lambda t: _wait(hvd.broadcast_async, t, 0),
    "broadcast_": lambda t: _in_place(hvd.broadcast_, t, 0),
    "broadcast_async_": lambda t: _in_place(lambda t: _wait(hvd.broadcast_async_, t, 0), t),
    "reduce": lambda t: mpi_ops.reduce(t, 0),
    "reduce_async": lambda t: _wait(mpi_ops.reduce_async, t, 0),
    "gather": lambda t: mpi_ops.gather(t, 0),
    "gather_async": lambda t: _wait(mpi_ops.gather_async, t, 0),
    "scatter": lambda t: mpi_ops.scatter(t, 0),
    "scatter_async": lambda t: _wait(mpi_ops.scatter_async, t, 0),
    "alltoall": lambda t: hvd.alltoall(t, [t.shape[0] // hvd.size()] * hvd.size() if t.dim() else None),
    "alltoall_async": lambda t: _wait(hvd.alltoall_async, t),
    "reducescatter": lambda t: hvd.reducescatter(t, op=hvd.Sum),
    "reducescatter_async": lambda t: _wait(hvd.reducescatter_async, t, op=hvd.Sum),
    "grouped_reducescatter": lambda t: hvd.grouped_reducescatter([t, t], op=hvd.Sum),
    "grouped_reducescatter_async": lambda t: _wait(hvd.grouped_reducescatter_async, [t, t], op=hvd.Sum),
    "send": lambda t: _message(t, True),
    "send_async": lambda t: _message(t, False),
    "recv": lambda t: _message(t, True),
    "recv_async": lambda t: _message(t, False),
    "barrier": lambda t: hvd.barrier(),
    "join": lambda t: [hvd.join(), None][1],  # the rank that joined last differs from call to call
}

# Functions of gohvd.torch that are made of the operations above.
COMPOSED: dict[str, Callable[[Tensor], Any]] = {
    "broadcast_object": lambda t: hvd.broadcast_object(t.tolist()),
    "allgather_object": lambda t: hvd.allgather_object(t.tolist()),
    "broadcast_parameters": lambda t: _in_place(lambda t: hvd.broadcast_parameters([t, t.clone()], 0), t),
    "compression": lambda t: hvd.allreduce(t, op=hvd.Sum, compression=hvd.Compression.fp16),
}


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": _default_dtype,
}
if hasattr(torch, "set_default_device"):  # since torch 2.0
    MODES["default device"] = lambda: torch.device("meta")

# Makes a tensor of each layout from a contiguous one of 4 dimensions.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "sliced": lambda t: torch.cat([t, t], 3)[..., ::2],
    "rows of another tensor": lambda t: torch.cat([t, t])[t.shape[0] :],
    "expanded": lambda t: t[:1].expand_as(t),
    "0-d": lambda t: t[0, 0, 0, 0].clone(),
    "empty": lambda t: t[:0].clone(),
    "in an arena": lambda t: hvd.alloc_tensor(tuple(t.shape)).copy_(t),
    "requires gradient": lambda t: t.clone().requires_grad_(),
}


def _plain(result: Any) -> Any:
    """Returns a result as lists and numbers, with the type and device of each tensor."""
    if isinstance(result, Tensor):
        return [str(result.dtype), str(result.device), result.detach().tolist()]
    return [_plain(r) for r in result] if isinstance(result, (list, tuple)) else result


class TestModes(RanksTest):
    def rows(self, *shape: int) -> Tensor:
        """Returns a tensor of small integers that differ between ranks and rows. Its first dimension is a multiple of
        the number of ranks.
        """
        whole = (2 * self.size, *shape)
        count = int(torch.Size(whole).numel())
        t = torch.arange(count, dtype=torch.float32, device="cpu") % 7 + self.rank
        return t.reshape(whole)

    def test_the_table_has_all_operations(self) -> None:
        self.assertEqual(
            [], sorted({n for n in mpi_ops.__all__ if n[0].islower() and n != "global_process_set"} - _OTHERS - set(CALLS))
        )

    def test_modes(self) -> None:
        """A function has the same result in each mode and outside of it, in all orders: nothing that it keeps for later
        calls depends on the mode.
        """
        for number, (mode, context) in enumerate(MODES.items()):
            for name, call in {**CALLS, **COMPOSED}.items():
                with self.subTest(mode=mode, function=name):
                    shape = (3 + number,)  # the first call in each mode is the first with this shape
                    results = []
                    for inside in (True, False, True, False):
                        with context() if inside else contextlib.nullcontext():
                            results.append(_plain(call(self.rows(*shape))))
                    self.assertEqual(results, results[:1] * 4)

    def test_begun_inside_and_ended_outside(self) -> None:
        for mode, context in MODES.items():
            for name in ("allreduce_async_", "broadcast_async_", "grouped_allreduce_async_"):
                with self.subTest(mode=mode, function=name):
                    with context():
                        t = torch.full((5,), self.rank + 1.0, dtype=torch.float32, device="cpu")
                        args: list[Any] = [[t] if name.startswith("grouped") else t]
                        args += [0] if name.startswith("broadcast") else []
                        kw = {} if name.startswith("broadcast") else {"op": hvd.Sum}
                        handle = getattr(hvd, name)(*args, **kw)
                    hvd.synchronize(handle)
                    want = 1.0 if name.startswith("broadcast") else self.size * (self.size + 1) / 2
                    self.assertEqual(t.tolist(), [want] * 5)

    def test_training_around_modes(self) -> None:
        for mode, context in MODES.items():
            with self.subTest(mode=mode):
                torch.manual_seed(3)
                model = torch.nn.Sequential(torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1))
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1 * (self.rank + 1), momentum=0.9),
                    named_parameters=model.named_parameters(),
                )
                for step in range(3):
                    with context():
                        if step < 2:
                            hvd.broadcast_parameters(model.state_dict(), 0)
                            hvd.broadcast_optimizer_state(optimizer, 0)
                        if mode != "default dtype":
                            model(torch.ones(4, 3, dtype=torch.float32, device="cpu"))
                    optimizer.zero_grad()
                    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(self.rank))).sum().backward()
                    optimizer.step()
                for p in model.parameters():
                    everywhere = hvd.allgather(p.detach().reshape(1, -1))
                    self.equal(everywhere, everywhere[:1].expand_as(everywhere))

    def test_layouts(self) -> None:
        """A function gives for each layout what it gives for a contiguous copy. It refuses a tensor that is not
        contiguous before other ranks know of the call.
        """
        for layout, make in LAYOUTS.items():
            for name, call in {**CALLS, "broadcast_parameters": COMPOSED["broadcast_parameters"]}.items():
                t = make(self.rows(3, 2, 2))
                if name.startswith("scatter") and not (t.is_contiguous() and t.dim()):
                    continue  # only the root would refuse its tensor: the tensors of the others do not count
                with self.subTest(layout=layout, function=name):
                    outcomes = []
                    for t in (t, make(self.rows(3, 2, 2)).detach().clone(memory_format=torch.contiguous_format)):
                        try:
                            outcomes.append(_plain(call(t)))
                        except (ValueError, RuntimeError, IndexError) as e:
                            outcomes.append((type(e), re.sub(r"\d+", "N", str(e))))
                    if outcomes[0] != outcomes[1]:
                        self.assertFalse(make(self.rows(3, 2, 2)).is_contiguous(), outcomes)
                        # broadcast_parameters, which copies, refuses only to write to an expanded tensor, as torch does.
                        self.assertIn(outcomes[0][0], (ValueError, RuntimeError), outcomes[0])
                        self.assertRegex(outcomes[0][1], "contiguous|single memory location")


if __name__ == "__main__":
    unittest.main()
