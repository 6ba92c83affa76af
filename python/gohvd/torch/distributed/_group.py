"""torch's ProcessGroup over the operations of gohvd.

The calls of a group are matched by their order, as torch requires. Each call has a number, and its operation has the
name of the group and the number. So ranks that make different calls get a mismatch error. The numbers repeat after
``_CALLS`` calls, so that the names stay in the response cache. A call waits if the call with the same number is still
in flight.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import _engine
from ..._engine import Call, operation
from ..._library import (
    ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST, GATHER, RECV, REDUCE, REDUCESCATTER, SCATTER, SEND,
)  # fmt: skip
from ...exceptions import MismatchError
from ...process_sets import global_process_set
from ..mpi_ops import alloc_tensor, moved, write
from . import _job
from ._tensors import LISTS, Parts, dense, reduction
from ._work import DONE, Operation, Work

Tensor = torch.Tensor

# Training often repeats the same calls. With a number that has many divisors, each name then often has the same type
# and shape again, and the response cache finds it.
_CALLS = 240

DEVICES = ["cpu", "cuda"]

# The longest pause between two looks of a rank that waits in a monitored barrier.
_LOOK_SECONDS = 0.05

# The outcome of a monitored barrier that all ranks have called. Other outcomes are the text of an error.
_PASSED = "passed"

_NO_TIMEOUT = timedelta(0)

_HAS_BACKENDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


class Calls:
    """The functions that torch calls in a process group, for a subclass of one of torch's classes.

    ranks has the ranks of the group in the default group, or is None for the default group.
    """

    _at_end = False
    """Whether operations are done only when the device has done them."""
    _life = 0
    """How many groups this rank has made at the store."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, group_id: str, ranks: list[int] | None
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._ranks = ranks
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._label = group_id
        self._names = [f"torch.{group_id}.{i + 1}" for i in range(_CALLS)]
        self._lock = threading.Lock()  # held while a call gets its number and is submitted
        self._begin_job()

    def _begin_job(self) -> None:
        """Joins the members of a new group to a job, unless they are in one already."""
        # A store may outlive a group, so the ranks count the groups at this store.
        if _job.has_store(self._store):
            self._life = self._store.add(f"gohvd/lives of {self._rank}", 1)
        self._use(_job.enter(self._store, self._rank, self._size, self._ranks, self._timeout))

    def _use(self, job: _job.Job) -> None:
        """Makes the members of the group in a job communicate through it."""
        self._calls = 0
        self._coalesced: list[Operation] | None = None
        # The last call with each name. A weak reference does not keep the tensors of a call that is done.
        self._last: list[Callable[[], Call | None] | None] = [None] * _CALLS
        self._barriers = 0
        self._set, self._members = job.process_set(self._ranks, self._label, self._timeout)
        # The rank in the group of each member of the process set, whose members are in ascending order. It is empty if
        # the group has the same order, as it has unless the program has called new_group with sort_ranks=False.
        order = sorted(range(self._size), key=self._members.__getitem__)
        self._order = order if order != list(range(self._size)) else []
        self._why_invalid = ""
        job.groups.add(self)

    # What torch asks of a group.

    def getBackendName(self) -> str:
        return "gohvd"

    name = getBackendName

    def __repr__(self) -> str:
        return f"<gohvd process group {self._label}: rank {self._rank} of {self._size}>"

    supports_splitting = True

    def _part(self, ranks: Sequence[int], name: str, store: Any, timeout: timedelta | None) -> Any:
        """Returns a new group of some ranks of this group, or None if this rank is not one of them."""
        if self._rank not in ranks:
            return None
        members = [r if self._ranks is None else self._ranks[r] for r in ranks]
        kind = Backend if isinstance(self, Backend) else ProcessGroup  # a part of an elastic group is not elastic
        return kind(store, ranks.index(self._rank), len(ranks), timeout or self._timeout, name, members)

    # torch calls these functions if init_process_group has got a device_id and the group supports splitting. A new group
    # needs nothing from the ranks that are not its members.

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass

    def perform_nocolor_split(self, device: torch.device) -> None:
        pass

    def supports_tensor_alloc(self, device: Any) -> bool:
        # If torch asks in C++, it passes the index of the device, and it could not call allocate_tensor, because it cannot
        # convert the arguments.
        return isinstance(device, torch.device) and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a tensor that operations do not copy. FSDP asks for it if the program has called
        ``set_allocate_memory_from_process_group_for_comm``.
        """
        return alloc_tensor((size,), dtype)

    def get_group_store(self) -> Any:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        pass  # the ranks count the calls themselves

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def errored(self) -> Exception | None:
        """Returns the error that has ended the job of the group, or None while it runs."""
        if self._why_invalid:
            return RuntimeError(f"torch.distributed: process group {self._label} {self._why_invalid}")
        return _engine.engine.failure()

    def invalidate(self, why: str = "was destroyed") -> None:
        """Makes all later calls fail."""
        self._why_invalid = self._why_invalid or why

    def shutdown(self) -> None:
        self.invalidate()
        _job.leave(self, self._set)

    def abort(self) -> None:
        """Ends the job of the group. Operations in flight fail at all ranks, with an error that names this rank. An
        elastic group can be reconfigured afterwards. If it is being reconfigured in another thread, that ends too.
        """
        self.invalidate("was aborted")
        _engine.engine.fail(f"its program has aborted process group {self._label}")
        _job.leave_all()

    # Calls.

    def _begin(
        self, what: str, kind: int, source: Any, opts: Any, target: Any = None, reduce_op: int = _engine.Sum,
        root: int = 0, splits: tuple[int, ...] = (), used: list[_engine.Slot] | None = None,
    ) -> tuple[int, Call]:  # fmt: skip
        """Begins an operation as the next call of the group. Returns the number of the call, and the engine's call. source
        and target are a tensor or Parts, or None for a barrier. A target that is a tensor is the source itself. used is an
        argument of Engine.call.
        """
        if self._why_invalid:
            self._check_valid(what)
        launched = 0 if self._at_end else _engine.APART if getattr(opts, "asyncOp", True) else _engine.AT_LAUNCH
        how = _how(kind, reduce_op, root, splits, getattr(opts, "timeout", None), self._timeout, launched)
        outputs = None if target is None or target is source else (target.shape,)
        with self._lock:
            slot = self._free_name()
            number = self._calls + 1
            used = [] if used is None else used
            try:
                call = _engine.engine.call(
                    LISTS, how, self._names[slot], self._set, source, target, outputs=outputs, used=used
                )
                self._calls = number
                self._last[slot] = weakref.ref(call)
            except BaseException:
                if _engine.submitted(used):  # otherwise the call has failed before other ranks knew of it
                    self._calls = number
                raise
        return number, call

    def _free_name(self) -> int:
        """Returns the index of the name of the next call. No operation with this name is in flight."""
        slot = self._calls % _CALLS
        last = self._last[slot]
        before = None if last is None else last()
        if before is not None:
            before.settle()
        return slot

    def _operation(
        self, what: str, number: int, calls: list[Call], result: Any, after: Callable[[], None] | None = None
    ) -> Operation:
        """Returns the operation that is the call of the group with this number."""
        return Operation(f"{what} (call {number} of group {self._label})", calls, result, after)

    def _check_valid(self, what: str) -> None:
        if self._why_invalid:
            raise RuntimeError(f"torch.distributed.{what}: process group {self._label} {self._why_invalid}")

    def _work(self, operation: Operation, source: Callable[[], int] | None = None) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(operation)
            operation.part = True
        return Work(operation, source)

    def _one(
        self, what: str, kind: int, source: Any, target: Any, result: Any, opts: Any, reduce_op: int = _engine.Sum,
        root: int = 0,
    ) -> dist.Work:  # fmt: skip
        """Begins an operation with one input and at most one output, and returns its work. If torch waits for the
        operation anyway, it waits here. That crosses into the library once instead of twice, and needs no new work.
        """
        if self._coalesced is not None or getattr(opts, "asyncOp", True):
            number, call = self._begin(what, kind, source, opts, target, reduce_op, root)
            return self._work(self._operation(what, number, [call], result))
        if self._why_invalid:
            self._check_valid(what)
        how = _how(kind, reduce_op, root, (), opts.timeout, self._timeout, 0 if self._at_end else _engine.AT_LAUNCH)
        outputs = None if target is None or target is source else (target.shape,)
        number = -1
        begun: list[Call | None] = []
        take = Call.results if target is None else None  # an operation without a target has no result
        try:
            with self._lock:
                slot = self._free_name()
                number = self._calls + 1
                self._calls = number
                self._last[slot] = None
            _engine.engine.call(LISTS, how, self._names[slot], self._set, source, target, take, True, outputs, begun)
            return DONE
        except BaseException as e:
            if not begun:  # other ranks do not know of the call
                with self._lock:
                    if self._calls == number:
                        self._calls -= 1
            elif begun[0] is not None:
                self._last[slot] = lambda: begun[0]
            elif isinstance(e, RuntimeError):  # of the library, or of the copy of the result
                failed = Call(None, 0, None)
                failed.error = e
                return self._work(self._operation(what, number, [failed], result))
            raise

    def _root(self, opts: Any) -> int:
        """Returns the rank of the root in the job."""
        return self._members[opts.rootRank]

    def _in_order_of_set(self, parts: list[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        """Returns the parts of the ranks in the order of the process set. parts has a tensor for each rank in the order of
        the group, or one tensor with the parts of all ranks. counts has the numbers of elements of the parts if they are
        not equal.
        """
        if not self._order:
            return parts
        if len(parts) == 1:
            (whole,) = parts
            counts = counts or [whole.numel() // self._size] * self._size
            with contextlib.suppress(RuntimeError):  # as a transposed tensor has no such view
                whole = whole.view(-1)
            row = math.prod(whole.shape[1:])
            if any([n % row for n in counts]):
                raise ValueError(
                    f"got a tensor of shape {tuple(whole.shape)} that is not contiguous, and {self._size} parts that do not "
                    "have whole rows: use contiguous()"
                )
            parts = list(whole.split([n // row for n in counts]))
        return [parts[r] for r in self._order]

    # Collectives on one tensor.

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.AllreduceOptions)
        if isinstance(tensors, list) and len(tensors) == 1 and tensors[0].is_sparse:
            return self._allreduce_sparse(tensors[0], opts)
        (t,) = given = dense(tensors, 1)
        op, flat = reduction(opts.reduceOp, t)
        return self._one("all_reduce", ALLREDUCE, flat, flat, given, opts, op)

    def _allreduce_sparse(self, t: Tensor, opts: Any) -> dist.Work:
        """Adds sparse tensors: it gathers the indices and the values of all ranks, in two calls of the group."""
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise ValueError(f"all_reduce: got {opts.reduceOp.op} of sparse tensors, want ReduceOp.SUM")
        if t.is_complex():
            raise ValueError(f"all_reduce: sparse tensors of type {t.dtype} are not supported")
        mine = t.coalesce()
        both = [mine.indices().t().contiguous(), mine.values().contiguous()]
        both = [dense([reduction(opts.reduceOp, rows)[1]], 1)[0] for rows in both]
        calls = []
        used: tuple[list[_engine.Slot], list[_engine.Slot]] = [], []
        try:
            for rows, slots in zip(both, used):
                parts = Parts((rows,), tuple(rows.shape))
                number, call = self._begin("all_reduce", ALLGATHER, parts, opts, used=slots)
                calls.append(call)
        except BaseException:
            # If it is the exception of a signal handler, the other ranks make both calls, so this one makes the second.
            if _engine.submitted(used[0]) and not _engine.submitted(used[1]):
                with contextlib.suppress(ValueError):
                    self._begin("all_reduce", ALLGATHER, Parts((both[1],), tuple(both[1].shape)), opts)
            raise

        stream = calls[0].stream  # the operation is complete on it

        def add() -> None:
            with contextlib.nullcontext() if stream is None else LISTS.using(stream):
                (indices,), (values,) = calls[0].results(), calls[1].results()
                total = torch.sparse_coo_tensor(indices.t(), values, t.shape, device=t.device, check_invariants=True)
                total = total.coalesce()
                if t.requires_grad:
                    with torch.no_grad():  # write would change only the detached tensor, which gets memory of its own
                        t.copy_(total)
                else:
                    write(t, total)

        return self._work(self._operation("all_reduce", number, calls, [t], add))

    allreduce_sparse = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.BroadcastOptions)
        (t,) = given = dense(tensors, 1)
        flat = moved(t)
        return self._one("broadcast", BROADCAST, flat, flat, given, opts, root=self._root(opts))

    # Collectives whose result has a part for each rank. A row of gohvd's operation is all that a rank contributes, so
    # ranks whose tensors have different numbers of elements get a mismatch error.

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> dist.Work:
        (t,) = dense(inputs, 1)
        (outputs,) = _lists(output_lists, 1, self._size)
        _same(outputs, t)
        return self._gather_all("all_gather", outputs, t, output_lists, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        dense([output, input])
        if output.numel() != input.numel() * self._size:
            raise ValueError(
                f"the output has {output.numel()} elements, want {self._size} times the {input.numel()} of the input"
            )
        return self._gather_all("all_gather_into_tensor", [output], input, output, opts)

    def _gather_all(self, what: str, outputs: list[Tensor], t: Tensor, result: Any, opts: Any) -> dist.Work:
        flat, n = moved(t), moved(t).numel()
        target = Parts([moved(o) for o in self._in_order_of_set(outputs)], (self._size, n))
        return self._one(what, ALLGATHER, Parts((flat,), (1, n)), target, result, opts)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> dist.Work:
        (output,) = dense(outputs, 1)
        (inputs,) = _lists(input_lists, 1, self._size)
        _same(inputs, output)
        return self._scatter_sum("reduce_scatter", output, inputs, outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        dense([output, input])
        if input.numel() != output.numel() * self._size:
            raise ValueError(
                f"the input has {input.numel()} elements, want {self._size} times the {output.numel()} of the output"
            )
        return self._scatter_sum("reduce_scatter_tensor", output, [input], output, opts)

    def _scatter_sum(self, what: str, output: Tensor, inputs: list[Tensor], result: Any, opts: Any) -> dist.Work:
        opts = _options(opts, dist.ReduceScatterOptions)
        op, flat = reduction(opts.reduceOp, output)
        n = flat.numel()
        source = Parts([reduction(opts.reduceOp, t)[1] for t in self._in_order_of_set(inputs)], (self._size, n))
        return self._one(what, REDUCESCATTER, source, Parts((flat,), (1, n)), result, opts, reduce_op=op)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        outputs, inputs = dense(outputs, self._size), dense(inputs, self._size)
        dense(outputs + inputs)
        return self._exchange("all_to_all", outputs, inputs, [t.numel() for t in outputs], [t.numel() for t in inputs], opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        dense([output, input])
        sent, received = self._splits("input", input, input_splits), self._splits("output", output, output_splits)
        return self._exchange("all_to_all_single", [output], [input], received, sent, opts)

    def _splits(self, which: str, t: Tensor, splits: Sequence[int]) -> list[int]:
        """Returns the number of elements of each rank's part of a tensor that is split by rows."""
        rows = t.shape[0] if t.dim() else 1
        if not len(splits):
            if rows % self._size:
                raise ValueError(f"the {which} has {rows} rows, want a multiple of {self._size}, or splits")
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(
                f"got {which} splits {list(splits)}, want {self._size} numbers of rows with the sum {rows}, none negative"
            )
        each = math.prod(t.shape[1:])
        return [n * each for n in splits]

    def _exchange(
        self, what: str, outputs: list[Tensor], inputs: list[Tensor], received: list[int], sent: list[int], opts: Any
    ) -> dist.Work:
        order = self._order or list(range(self._size))
        source = Parts(list(map(moved, self._in_order_of_set(inputs, sent))))
        target = Parts(list(map(moved, self._in_order_of_set(outputs, received))))
        first = source.tensors[0]
        scale = first.element_size() and inputs[0].element_size() // first.element_size()
        splits = tuple([sent[r] * scale for r in order])
        number, call = self._begin(what, ALLTOALL, source, opts, target, splits=splits)

        def expected() -> str:
            return f"the output of this rank, rank {self._rank} of the group, has {received} elements for the ranks"

        def check() -> None:
            wrong = [
                f"{n // scale} elements from rank {r} of the group, want {received[r]}"
                for r, n in sorted(zip(order, call.received))
                if n != received[r] * scale
            ]
            if wrong:
                raise MismatchError(f"got {'; '.join(wrong)}")

        operation = self._operation(what, number, [call], outputs, check)
        operation.expected = expected
        return self._work(operation)

    # Collectives with a root.

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.ReduceOptions)
        (t,) = given = dense(tensors, 1)
        op, flat = reduction(opts.reduceOp, t)
        target = flat if opts.rootRank == self._rank else None
        return self._one("reduce", REDUCE, flat, target, given, opts, reduce_op=op, root=self._root(opts))

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.GatherOptions)
        (t,) = dense(inputs, 1)
        flat = moved(t)
        target = Parts((flat.new_empty(0),), (0, flat.numel()))
        if opts.rootRank == self._rank:
            (outputs,) = _lists(output_lists, 1, self._size)
            _same(outputs, t)
            target = Parts(list(map(moved, self._in_order_of_set(outputs))), (self._size, flat.numel()))
        elif output_lists:
            raise ValueError(f"got output tensors at rank {self._rank}, want them only at the root, rank {opts.rootRank}")
        source = Parts((flat,), (1, flat.numel()))
        return self._one("gather", GATHER, source, target, output_lists, opts, root=self._root(opts))

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, dist.ScatterOptions)
        (output,) = dense(outputs, 1)
        flat = moved(output)
        source = Parts((flat.new_empty(0),), (0, flat.numel()))
        if opts.rootRank == self._rank:
            (inputs,) = _lists(input_lists, 1, self._size)
            _same(inputs, output)
            source = Parts(list(map(moved, self._in_order_of_set(inputs))), (self._size, flat.numel()))
        elif input_lists:
            raise ValueError(f"got input tensors at rank {self._rank}, want them only at the root, rank {opts.rootRank}")
        target = Parts((flat,), (1, flat.numel()))
        return self._one("scatter", SCATTER, source, target, outputs, opts, root=self._root(opts))

    # Messages. They are matched by sender and tag, and do not count as calls of the group.

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        return self._message("send", SEND, tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        return self._message("recv", RECV, tensors, rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._message("recv", RECV, tensors, None, tag)

    recvAnysource = recv_anysource

    def _message(self, what: str, kind: int, tensors: Any, rank: int | None, tag: int) -> dist.Work:
        self._check_valid(what)
        (t,) = given = dense(tensors, 1)
        flat = moved(t)
        ranks = self._members
        if rank is not None and not 0 <= rank < self._size:
            raise ValueError(f"{what}: got rank {rank}, want 0 to {self._size - 1}")
        peer = _engine.check_message(None if rank is None else ranks[rank], tag, self._set, kind)
        how = operation(kind, peer=peer, tag=tag)
        call = _engine.engine.call(LISTS, how, None, self._set, flat, flat if kind == RECV else None)
        label = f"{what} ({'any rank' if rank is None else f'rank {rank}'} and tag {tag} of group {self._label})"
        message = Operation(label, [call], given)
        message.limit = self._timeout
        return self._work(message, lambda: ranks.index(call.source))

    # Several operations that torch makes in one call.

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._together("all_reduce_coalesced", tensors, [lambda t=t: self.allreduce([t], opts) for t in tensors])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> dist.Work:
        # The outputs are a list for each rank, which has a tensor for each input.
        for outputs in output_lists:
            _pairs(outputs, inputs)
        each = list(zip(*output_lists))
        return self._together(
            "all_gather_coalesced", output_lists,
            [lambda o=o, t=t: self.allgather([list(o)], [t], opts) for o, t in _pairs(each, inputs)],
        )  # fmt: skip

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._together(
            "all_gather_into_tensor_coalesced", outputs,
            [lambda o=o, t=t: self._allgather_base(o, t, opts) for o, t in _pairs(outputs, inputs)],
        )  # fmt: skip

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._together(
            "reduce_scatter_tensor_coalesced", outputs,
            [lambda o=o, t=t: self._reduce_scatter_base(o, t, opts) for o, t in _pairs(outputs, inputs)],
        )  # fmt: skip

    def _together(self, what: str, result: Any, begins: list[Callable[[], dist.Work]]) -> dist.Work:
        """Begins several operations and returns one work for all of them."""
        outer = self._coalesced
        self.start_coalescing()
        try:
            for begin in begins:
                begin()
            operations = self._coalesced or []
        finally:
            self._coalesced = outer
        return self._work(Operation.of(f"{what} (of group {self._label})", operations, result))

    def start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def end_coalescing(self, device: Any = None) -> dist.Work:
        operations, self._coalesced = self._coalesced or [], None
        return Work(
            Operation.of(f"coalesced operations (of group {self._label})", operations, [o.result for o in operations])
        )

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # torch 2.12 has renamed these functions.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # Barriers.

    def barrier(self, opts: Any = None) -> dist.Work:
        number, call = self._begin("barrier", BARRIER, None, opts)
        return self._work(self._operation("barrier", number, [call], []))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called it. If some have not when the timeout of the first rank passes, all ranks
        that have called it raise RuntimeError with the numbers of the missing ranks, or of the first of them unless
        wait_all_ranks is true. The group can still be used afterwards.

        The ranks meet in torch's store, so a rank that hangs in another operation is found, also if it is rank 0. If a
        rank dies, the others raise the error that names it within about a second.
        """
        if isinstance(timeout, timedelta) or timeout is None:
            limit = self._timeout if timeout is None else timeout
        else:
            limit = _limit(getattr(timeout, "timeout", None), self._timeout)
        self._barriers += 1
        prefix = f"gohvd/monitored barrier {self._life}.{self._barriers}"
        self._store.add(f"{prefix}/{self._rank}", 1)
        if self._rank == 0:
            outcome = self._decide(prefix, self._missing(prefix, limit, wait_all_ranks))
        elif self._has([f"{prefix}/outcome"], limit):
            outcome = self._store.get(f"{prefix}/outcome").decode()
        else:
            outcome = self._decide(prefix, self._late(prefix, limit, wait_all_ranks))
        if outcome == _PASSED:
            return
        if self._rank != 0:
            # This is what gloo says. It is followed by the reason.
            outcome = (
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {outcome}"
            )
        raise RuntimeError(f"torch.distributed.monitored_barrier: {outcome}")

    def _decide(self, prefix: str, outcome: str) -> str:
        """Ends a monitored barrier with an outcome, unless another rank has ended it. Returns the outcome that counts."""
        # A compare_set does not wake the ranks that wait for its key at servers of some versions of torch.
        decided = self._store.compare_set(f"{prefix}/decided", "", outcome).decode()
        self._store.set(f"{prefix}/outcome", decided)
        return decided

    def _has(self, keys: list[str], limit: timedelta) -> bool:
        """Returns whether the store gets all keys within the limit. If the job fails meanwhile, it raises the error that
        has ended the job, because the rank that has failed will never set its key.
        """
        end, pause = time.monotonic() + limit.total_seconds(), 0.001
        # A wait at the store does not end when the job fails, and torch logs a warning for each wait that times out.
        while not self._store.check(keys):
            failure, left = _engine.engine.failure(), end - time.monotonic()
            if failure is not None:
                failure.args = (f"torch.distributed.monitored_barrier: {failure}", *failure.args[1:])
                raise failure
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LOOK_SECONDS)
        return True

    def _missing(self, prefix: str, limit: timedelta, wait_all_ranks: bool) -> str:
        """Returns the outcome of a monitored barrier at rank 0, which waits for all other ranks."""
        if limit <= timedelta(0):
            return f"Rank 0 timed out in monitoredBarrier after {limit.total_seconds() * 1000:g} ms"
        if self._has([f"{prefix}/{r}" for r in range(1, self._size)], limit):
            return _PASSED
        return self._late(prefix, limit, wait_all_ranks)

    def _late(self, prefix: str, limit: timedelta, wait_all_ranks: bool) -> str:
        """Returns the outcome of a monitored barrier whose limit has passed."""
        missing = [r for r in range(self._size) if self._store.add(f"{prefix}/{r}", 0) == 0]
        if not missing:
            return _PASSED
        named = missing if wait_all_ranks else missing[:1]
        return (
            f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))} failed to pass monitoredBarrier in "
            f"{limit.total_seconds() * 1000:g} ms"
        )


class ProcessGroup(Calls, dist.ProcessGroup):
    """A process group of the backend gohvd alone. Torch calls it directly, also for tensors of all devices."""

    _description = ""

    def getGroupName(self) -> str:
        return self._label

    def setGroupName(self, name: str) -> None:
        pass  # create got the name already

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    _device_types = [torch.device(kind) for kind in DEVICES]

    def _get_backend(self, device: Any) -> ProcessGroup:
        """Returns the group itself, because a group that is written in Python has no other backend."""
        return self

    def split_group(
        self, ranks: list[int], timeout: timedelta | None = None, opts: Any = None, group_name: str = "",
        group_desc: str | None = None, device_types: Any = None,
    ) -> ProcessGroup | None:  # fmt: skip
        group = self._part(ranks, group_name, dist.PrefixStore(f"{group_name}/", self._store), timeout)
        if group is not None:
            group.setGroupDesc(group_desc or "")
        return group


class ElasticProcessGroup(ProcessGroup):
    """A process group whose members change while its processes live (docs/elastic.md). It has no members at first.

    Torch makes one for ``init_process_group("gohvd", enable_reconfigure=True)``. A program makes one for the Manager of
    torchft. timeout limits each operation, and how long the members wait for each other when they change.
    """

    # The program decides by the errors of its operations whether it repeats a step with other members.
    _at_end = True
    _why_invalid = "has no members yet: call reconfigure"
    _handle = ""
    _set, _members = global_process_set, []

    def __init__(
        self, store: Any = None, rank: int = 0, size: int = 1, timeout: timedelta = timedelta(seconds=60),
        group_id: str = "elastic", ranks: list[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(store, rank, size, timeout, group_id, ranks)

    def _begin_job(self) -> None:
        pass  # reconfigure does it

    # Torch calls the first two in Python, and the others in C++.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        """Returns a text by which other processes make a group with this one. It is valid for one reconfigure. Any process
        that has it can join the group.
        """
        if not self._handle:
            self._handle = _engine.engine.new_unique_id()
        return self._handle

    def reconfigure(self, opts: Any) -> dist.Work:
        """Makes the processes whose handles are in opts the members of the group, and waits for them. All of them must
        call it with the same handles. They are ranked in the order of a list of handles.
        """
        handles = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        if self._handle not in handles:
            raise ValueError(
                "reconfigure: the handle of this process is not one of the handles, or it was used before: "
                "get the handles of all processes again"
            )
        rank = handles.index(self._handle)
        if rank == 0:
            self._handle = ""  # the others meet by it, and it serves one meeting
        timeout = self._timeout if opts.timeout is None else opts.timeout
        self._change(rank, len(handles), lambda: _job.join(handles[0], rank, len(handles), timeout))
        return DONE

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *_: Any) -> None:
        """Does as reconfigure does. The processes meet through torch's store. torchft 0.2 calls it."""
        address, _, prefix = store_addr.partition("/")
        host, _, port = address.rpartition(":")

        def meet() -> _job.Job:
            store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
            return _job.enter(dist.PrefixStore(prefix, store), rank, world_size, None, self._timeout, limited=True)

        self._change(rank, world_size, meet)

    def _change(self, rank: int, size: int, join: Callable[[], _job.Job]) -> None:
        """Leaves the job of the group, and joins the one of its new members."""
        _job.leave_for(self)
        self._why_invalid = f"could not be reconfigured to {size} members"
        self._rank, self._size = rank, size
        self._use(join())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        raise RuntimeError(
            "torch.distributed.monitored_barrier: an elastic group has no store for its present members: call barrier, whose "
            "error names the missing ranks too"
        )

    def get_error(self) -> Any:
        """Returns whether the job of the group has failed, as backends of torch do."""
        from torch._C._distributed_c10d import ErrorType  # older versions do not have it, and do not ask

        return ErrorType.SUCCESS if self.errored() is None else ErrorType.COMM_ERROR


# Since torch 2.15, a backend can be written in Python. Then a group can have other backends for other devices.
_Backend: Any = dist.distributed_c10d.C10DBackend if _HAS_BACKENDS else object


class Backend(Calls, _Backend):
    """The backend of a group that has other backends too. Torch calls it through a group in C++."""

    @property
    def options(self) -> Any:
        return _Backend.Options("gohvd", self._timeout)

    def split(self, store: Any, ranks: list[int], opts: Any) -> Backend:
        group = self._part(ranks, opts.group_name, store, opts._timeout)
        if group is None:
            # Torch 2.15 would read the missing backend, and crash.
            raise RuntimeError(
                f"split_group: rank {self._rank} is in none of the new groups: call new_group instead, "
                "because torch cannot split groups with several backends like this"
            )
        return group


def create(options: Any, backend_options: Any) -> Calls:
    """Makes a process group, or a backend of it if the group has other backends too. Torch calls it at all members of the
    group, with a store that belongs to the group.
    """
    if backend_options is not None:
        warnings.warn(
            "gohvd: pg_options has no effect: the backend has no options; set the variables of docs/settings.md instead",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
    kind = Backend if _shared(options) else ProcessGroup
    if getattr(options, "enable_reconfigure", False):
        if kind is Backend:
            raise ValueError("init_process_group: enable_reconfigure needs a group whose only backend is gohvd")
        kind = ElasticProcessGroup
    return kind(
        options.store, options.group_rank, options.group_size, options.timeout, options.group_id,
        list(options.global_ranks_in_group) or None,
    )  # fmt: skip


def _shared(options: Any) -> bool:
    """Returns whether the group for which torch creates a backend has others: one that torch has created before this one,
    or one that is the default backend.
    """
    group = options.process_group if _HAS_BACKENDS else None
    return group is not None and (bool(group._device_types) or group.name() != "custom")


def _limit(timeout: timedelta | None, default: timedelta) -> timedelta:
    """Returns the timeout of a call: that of its options, or that of its group."""
    return timeout if timeout is not None and timeout > _NO_TIMEOUT else default


@functools.lru_cache(maxsize=4096)
def _how(
    kind: int, reduce_op: int, root: int, splits: tuple[int, ...], timeout: timedelta | None, default: timedelta,
    launched: int,
) -> _engine.Operation:  # fmt: skip
    """Returns what a call does. The timeouts are those of _limit."""
    seconds = _limit(timeout, default).total_seconds()
    return operation(kind, reduce_op, root=root, splits=splits, timeout=seconds, any_kind=True, launched=launched)


def _options(opts: Any, kind: Any) -> Any:
    """Returns the options of a call. A program that calls the group itself may pass none, or a ReduceOp."""
    if isinstance(opts, kind) or hasattr(opts, "timeout"):
        return opts
    made = kind()
    if opts is not None:
        made.reduceOp = opts
    return made


def _lists(lists: Any, want: int, size: int) -> list[list[Tensor]]:
    if len(lists) != want:
        raise ValueError(f"got {len(lists)} lists of tensors, want {want}")
    return [dense(tensors, size) for tensors in lists]


def _pairs(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
    if len(outputs) != len(inputs):
        raise ValueError(f"got outputs for {len(outputs)} tensors, want outputs for the {len(inputs)} inputs")
    return list(zip(outputs, inputs))


def _same(tensors: list[Tensor], t: Tensor) -> None:
    for i, other in enumerate(tensors):
        if other.numel() != t.numel() or other.dtype != t.dtype or other.device != t.device:
            raise ValueError(
                f"tensor {i} of the list is {other.dtype} of shape {tuple(other.shape)} on {other.device}, "
                f"want {t.dtype} with the {t.numel()} elements of shape {tuple(t.shape)} on {t.device}"
            )
