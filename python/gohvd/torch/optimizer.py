"""DistributedOptimizer: an optimizer that steps on the gradients of all ranks."""

from __future__ import annotations

import contextlib
import numbers
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import gohvd
from gohvd import _engine
from gohvd.basics import is_initialized
from gohvd.exceptions import MismatchError
from gohvd.process_sets import ProcessSet, global_process_set
from gohvd.timeline import stepped
from gohvd.torch.compression import Compression, Compressor
from gohvd.torch.functions import broadcast_object, in_place
from gohvd.torch.mpi_ops import (
    Adasum,
    Average,
    Max,
    SparseSum,
    Sum,
    alloc_tensor,
    allreduce,
    allreduce_async_,
    forget,
    grouped_allreduce_async_,
    in_flight,
    rocm_built,
    size,
    synchronize,
)

_Named = Iterable[tuple[str, torch.Tensor]]
_Groups = None | int | list[list[torch.Tensor]]

# How many optimizers of this job have a parameter with a name, by the number of the process set and the name.
_names_given: dict[tuple[int, str], int] = {}
_engine.engine.at_shutdown.append(_names_given.clear)

# Those of the optimizers that were made before the training function of an elastic job. They keep their names when the
# ranks change. New ranks make them too, but have not made those that were made in the function before the change.
_names_before: dict[tuple[int, str], int] = {}


def _keep_names() -> None:
    _names_before.clear()
    _names_before.update(_names_given)


def _give_names_again() -> None:
    for key, times in _names_before.items():
        _names_given.setdefault(key, times)


_engine.engine.before_training.append(_keep_names)
_engine.engine.before_again.append(_give_names_again)

_living: weakref.WeakSet[_Distributed] = weakref.WeakSet()


def _forget_all() -> None:
    """Discards the step in progress of all optimizers. If the job has failed, its operations have ended with an error."""
    for optimizer in list(_living):
        optimizer._forget()


_engine.engine.at_shutdown.append(_forget_all)


def _discard_gradients() -> None:
    """Discards the gradients of all optimizers. Those of a step that was not made would be added to the next ones."""
    for optimizer in list(_living):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


_engine.engine.before_again.append(_discard_gradients)

# Compressors that only cast to another type. _compress does their work itself, in shared memory.
_CASTS = (Compression.fp16, Compression.bf16)

# Returns a step method that also runs the step hooks of the program. torch has these since version 2.0.
_runs_hooks: Callable[[Any], Any] | None = getattr(torch.optim.Optimizer, "profile_hook_step", None)

_HAS_POST_HOOK = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")


class _Distributed(torch.optim.Optimizer):
    """The common part of the two distributed optimizers. It names parameters, installs hooks, and finds when a gradient
    is complete.

    DistributedOptimizer makes a class for each instance, which derives from a subclass of this class and from the class
    of the replaced optimizer. The instance shares the param groups and the state of the replaced optimizer.
    """

    # These attributes are declared for readers and type checkers. _take_over sets them.
    process_set: ProcessSet
    backward_passes_per_step: int
    _compression: type[Compressor]
    _parameter_names: dict[torch.Tensor, str]
    # The parameters that are reduced, an ordered set: those that have hooks, and those that had them in the optimizer of which
    # this one is a copy, because other ranks may have made no copy.
    _requires_update: dict[torch.Tensor, None]
    _frozen: list[torch.Tensor]  # the parameters that required no gradient when they were last looked at
    _allreduce_delay: dict[torch.Tensor, int]  # by parameter: how many backward passes its gradient still waits for
    # The handle and the decompression context of each operation in flight. The key is a parameter, or for a group the
    # tuple of its parameters.
    _handles: dict[Any, tuple[Any, Any]]
    _wires: dict[torch.Tensor, torch.Tensor]  # by parameter: shared memory for the compressed tensor
    _not_replaced: set[str]  # the names of the attributes that the replaced optimizer does not have

    def _take_over(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        compression: type[Compressor],
        backward_passes_per_step: int,
        process_set: ProcessSet,
    ) -> None:
        # Attributes that replace a method of the class are not copied: a learning rate scheduler sets such a step
        # method, which calls the old optimizer.
        own = {k: v for k, v in vars(optimizer).items() if not (callable(v) and callable(getattr(type(optimizer), k, None)))}
        vars(self).update(own)
        self.param_groups = list(optimizer.param_groups)
        self._replaced = weakref.ref(optimizer)
        self._parameter_names = names
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.process_set = process_set
        self._requires_update = {}
        self._frozen = []
        self._allreduce_delay = {}
        self._handles = {}
        weakref.finalize(self, _forget, self._handles).atexit = False
        _living.add(self)
        self._wires = {}
        self._grad_accs: list[Any] = []
        self._hooked = bool(process_set.included()) and not _always_alone()
        if self._hooked:
            for group in self.param_groups:
                for p in group["params"]:
                    self._hook(p)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for i, p in enumerate(self.param_groups[number]["params"]):
            if p not in self._parameter_names:
                self._parameter_names[p] = _unique(f"allreduce.noname.{number}.{i}", self.process_set)
            if self._hooked:
                self._hook(p)

    def _hook_thawed(self) -> None:
        """Installs the hooks of parameters that have begun to require gradients."""
        if self._frozen:
            frozen, self._frozen = self._frozen, []
            for p in frozen:
                self._hook(p)

    def _hook(self, p: torch.Tensor) -> None:
        """Installs a hook that calls _ready whenever a backward pass has added to p.grad. If p requires no gradient, the
        hook is installed when the first gradients have been computed after it does.
        """
        if not p.requires_grad:
            self._frozen.append(p)
            return
        self._requires_update[p] = None
        self._allreduce_delay[p] = self.backward_passes_per_step
        # The hooks refer to this optimizer weakly. Otherwise they would keep it alive, and it would go on reducing
        # after the program has made another optimizer over the same parameters.
        this = weakref.ref(self)

        def ready(p: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._ready(p)

        if _HAS_POST_HOOK:
            hook = p.register_post_accumulate_grad_hook(ready)
            weakref.finalize(self, hook.remove).atexit = False
        else:
            # _grad_accs keeps the node that accumulates into p.grad alive: autograd refers to the node only weakly.
            accumulate = p.expand_as(p).grad_fn.next_functions[0][0]
            accumulate.register_hook(lambda *_: ready(p))
            self._grad_accs.append(accumulate)

    def _ready(self, p: torch.Tensor) -> None:
        passes = self._allreduce_delay[p] - 1
        if passes < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        # p.grad may be None: before torch 2.1 the hook also runs if a backward pass computes no gradient for p.
        grad = p.grad
        if grad is not None and grad.requires_grad:
            raise AssertionError("cannot reduce gradients that themselves require gradients, as after backward(create_graph=True)")
        self._allreduce_delay[p] = passes
        self._accumulated(p, passes == 0)

    def _accumulated(self, p: torch.Tensor, last: bool) -> None:
        """Handles a backward pass that has added to p.grad. last is true if it is the last pass of the step."""
        raise NotImplementedError

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes after which gradients are reduced. It applies from now on."""
        self.backward_passes_per_step = passes
        self._reset_delays()

    def _reset_delays(self) -> None:
        for p in self._allreduce_delay:
            self._allreduce_delay[p] = self.backward_passes_per_step

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        with in_place(self):
            super().load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles consist of the replaced optimizer and the arguments of DistributedOptimizer, because the
        class of this optimizer cannot be pickled.
        """
        if self._handles or any(n != self.backward_passes_per_step for n in self._allreduce_delay.values()):
            raise AssertionError(
                "the optimizer was copied or pickled after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited, because the copy would lose the gradients."
            )
        replaced = object.__new__(type(self).__bases__[1])
        vars(replaced).update({k: v for k, v in vars(self).items() if k not in self._not_replaced})
        return _again, (replaced, self._arguments())

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments with which _again makes a copy of this optimizer."""
        return {
            "names": self._parameter_names,
            "reduced": list(self._requires_update),
            "compression": self._compression,
            "backward_passes_per_step": self.backward_passes_per_step,
            "process_set": self.process_set,
        }

    def _forget(self) -> None:
        """Discards the state of the current step. Operations in flight go on, but their results are not used."""
        abandoned = _forget(self._handles)
        for p in abandoned:
            self._abandon(p)
        self._reset_delays()
        _replace_grads(abandoned)

    def _abandon(self, p: torch.Tensor) -> None:
        """Drops the memory that an operation in flight on parameter p may use. The next one uses other memory."""
        self._wires.pop(p, None)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. If these gradients are not "
                "needed, as those of a discriminator after the backward pass of the generator's loss, call "
                "optimizer.synchronize() before optimizer.zero_grad()."
            )
        super().zero_grad(*args, **kwargs)

    @staticmethod
    def _vote(closure: Callable[[], Any] | None, op: int) -> None:
        """Waits until all ranks have the gradients of a step, if each step is a commit (elastic.run)."""
        if _engine.engine.before_step is None:
            return
        if closure is not None:
            raise ValueError("elastic.run(step=True) needs gradients before optimizer.step(): call it without a closure")
        if op == Adasum:
            raise ValueError("elastic.run(step=True) does not support op=Adasum, whose results are steps already")
        _engine.engine.before_step()

    def _tell_schedulers(self) -> None:
        """Records a step at the replaced optimizer too. A scheduler that was made for it warns if it steps first."""
        replaced = self._replaced()
        if replaced is not None:
            replaced._opt_called = True  # since torch 2.4
            replaced._step_count = getattr(replaced, "_step_count", 0) + 1  # before

    def _compress(self, p: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Compresses tensor, which belongs to parameter p. Returns the tensor to transmit and the context for
        decompress.
        """
        if self._compression not in _CASTS or not tensor.dtype.is_floating_point or not _can_be_shared(tensor):
            return self._compression.compress(tensor)
        wire = self._wires.get(p)
        # The shape changes if the program changes the memory order of p, because _flat depends on that order.
        if wire is None or wire.shape != tensor.shape:
            wire = self._wires[p] = alloc_tensor(tuple(tensor.shape), self._compression.wire_dtype)
        return wire.copy_(tensor), tensor.dtype

    @torch.no_grad()
    def _drain(self, done: Callable[[Any, Any, Any], None]) -> None:
        """Waits for all operations in flight and calls done with the result of each. If operations fail, it raises the
        first error after all have ended.
        """
        try:
            errors = self._take(list(self._handles), done)
            if errors:
                again = self._submit_again(errors)
                errors.update(self._take(again, done))
            if not errors:
                self._handles.clear()
        finally:
            self._forget()
        for error in errors.values():
            raise error

    def _take(self, keys: list[Any], done: Callable[[Any, Any, Any], None]) -> dict[Any, Exception]:
        """Waits for operations in flight and calls done with the result of each. Returns the errors."""
        errors: dict[Any, Exception] = {}
        for key in keys:
            handle, ctx = self._handles[key]
            try:
                done(key, handle.result() if isinstance(handle, SparseSum) else synchronize(handle), ctx)
            except Exception as e:
                errors[key] = e
        return errors

    def _submit_again(self, errors: dict[Any, Exception]) -> list[Any]:
        """Begins operations that have failed again, if that can help. Returns their keys and removes their errors."""
        return []


def _forget(handles: dict[Any, tuple[Any, Any]]) -> list[torch.Tensor]:
    """Discards the handles of an optimizer, so that other operations can use their names. Returns the parameters whose
    operation is still in flight. It may work on p.grad.
    """
    abandoned: list[torch.Tensor] = []
    for key, (handle, _) in handles.items():
        if in_flight(handle):
            abandoned += key if isinstance(key, tuple) else (key,)
        forget(handle)
    handles.clear()
    return abandoned


def _replace_grads(parameters: list[torch.Tensor]) -> None:
    """Puts a copy in place of p.grad. If there is no memory for that, p.grad is None for the others."""
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    for p, grad in zip(parameters, grads):
        if grad is not None:
            p.grad = grad.clone()


class _Memory:
    """Shared memory for the successive gradients of a parameter. A new gradient reuses the memory of the previous one
    if nothing refers to the previous one any more.
    """

    def __init__(self) -> None:
        self.address = 0
        self._block: Any = None
        self._last: Callable[[], memoryview | None] = lambda: None

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with the size, type and memory layout of like, for which _can_be_shared is true. Gradients have
        the layout of their parameter, because autograd and fused optimizers require this.
        """
        count = like.numel()
        if count == 0:
            return torch.empty_like(like)
        nbytes = count * like.element_size()
        if self._block is None or self._block.nbytes != nbytes or self._last() is not None:
            self._block = gohvd.alloc(nbytes)
        # The storage of the tensor refers to this buffer, and all views of the tensor share the storage. So the weak
        # reference is dead when neither the tensor nor a view is left.
        buffer = self._block.view[:]
        self._last = weakref.ref(buffer)
        flat = torch.frombuffer(buffer, dtype=like.dtype)
        self.address = flat.data_ptr()
        return flat.as_strided(like.size(), like.stride()) if _is_channels_last(like) else flat.view(like.shape)


class _DistributedOptimizer(_Distributed):
    """A distributed optimizer that reduces the gradients over all ranks, and then steps on the result."""

    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool

    def _begin(
        self, op: int, gradient_predivide_factor: float, groups: _Groups, sparse_as_dense: bool, views: bool
    ) -> None:
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        # Gradients are moved into shared memory only without compression, because a compressed gradient is not reduced
        # in place.
        self._views = views and self._compression is Compression.none
        self._memory: dict[torch.Tensor, _Memory] = {}  # by parameter: the shared memory of its gradients
        # Maps each parameter with sparse gradients to the number of sparse dimensions of these gradients.
        self._was_sparse: dict[torch.Tensor, int] = {}
        self._synchronized = False
        self._should_synchronize = True
        self._p_to_group: dict[torch.Tensor, tuple[torch.Tensor, ...]] = {}
        self._group_counts: dict[tuple[torch.Tensor, ...], int] = {}  # by group: how many gradients are complete
        if groups and self._hooked:
            self._form_groups(groups)

    def _forget(self) -> None:
        self._synchronized = False
        self._group_counts = dict.fromkeys(self._group_counts, 0)
        super()._forget()

    def _form_groups(self, groups: int | list[list[torch.Tensor]]) -> None:
        # All ranks must form the same groups, but their optimizers may list the parameters in different orders. So the
        # first rank's order decides.
        # In an elastic job, a new rank makes its optimizer while the others train, so the lists must be equal.
        names = [self._parameter_names[p] for p in self._requires_update]
        if os.environ.get("HOROVOD_ELASTIC") != "1":
            names = broadcast_object(names, self.process_set.ranks[0], "optimizer_groups", self.process_set)
        order = {name: i for i, name in enumerate(names)}
        params = sorted(self._requires_update, key=lambda p: order[self._parameter_names[p]])
        if isinstance(groups, int):
            each, more = divmod(len(params), groups)
            ends = [i * each + min(i, more) for i in range(groups + 1)]
            self._set_groups([params[a:b] for a, b in zip(ends, ends[1:])])
        else:
            # Parameters that are in none of the groups are reduced one by one.
            self._set_groups([[p for p in params if any(p is q for q in group)] for group in groups])

    def _set_groups(self, groups: Iterable[Iterable[torch.Tensor]]) -> None:
        for group in map(tuple, groups):
            self._group_counts[group] = 0
            self._p_to_group.update(dict.fromkeys(group, group))

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "op": self.op,
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "groups": list(self._group_counts),
            "was_sparse": dict(self._was_sparse),
            "sparse_as_dense": self.sparse_as_dense,
            "gradient_as_arena_view": self._views,
        }

    def _accumulated(self, p: torch.Tensor, last: bool) -> None:
        group = self._p_to_group.get(p)
        if last and group is None:
            self._submit(p)
            return
        if p.grad is not None:
            self._share_gradient(p)
        if not last:
            return
        self._group_counts[group] += 1
        if self._group_counts[group] == len(group):
            self._submit_group(group)

    def _share_gradient(self, p: torch.Tensor) -> torch.Tensor:
        """Moves p.grad into shared memory, which the ranks of the host reduce in place, and returns it. A gradient that
        is in shared memory already is not moved.

        If zero_grad has set p.grad to None, references to the old gradient keep its values.
        """
        grad = p.grad
        if grad is None:
            # SparseAdam refuses dense gradients.
            dims = self._was_sparse.get(p, 1 if isinstance(self, torch.optim.SparseAdam) else None)
            if dims is not None:
                p.grad = torch.zeros_like(p).to_sparse(dims)
            elif self._views and _can_be_shared(p):
                p.grad = self._memory_of(p).tensor(p).zero_()
            else:
                p.grad = torch.zeros_like(p)
        elif grad.is_sparse:
            self._was_sparse[p] = grad.sparse_dim()
        elif self._views:
            memory = self._memory.get(p)
            if (memory is None or grad.data_ptr() != memory.address) and _can_be_shared(grad):
                p.grad = self._memory_of(p).tensor(grad).copy_(grad)
        return p.grad

    def _memory_of(self, p: torch.Tensor) -> _Memory:
        memory = self._memory.get(p)
        if memory is None:
            memory = self._memory[p] = _Memory()
        return memory

    def _factors(self) -> tuple[float, float]:
        # With Average the operation itself also divides by the number of ranks.
        f = self.gradient_predivide_factor
        return (1.0 / f, f) if self.op == Average else (1.0, 1.0)

    def _submit(self, p: torch.Tensor) -> None:
        """Begins to reduce p's gradient."""
        grad = self._share_gradient(p)
        name = self._parameter_names[p]
        if grad.is_sparse and not self.sparse_as_dense:
            self._handles[p] = (SparseSum(grad, name, self.op, self.process_set, or_dense=True), None)
            return
        wire, ctx = self._compress(p, _flat(p, grad))
        before, after = self._factors()
        handle = allreduce_async_(wire, None, name, self.op, before, after, self.process_set)
        self._handles[p] = (handle, ctx)

    def _submit_group(self, group: tuple[torch.Tensor, ...]) -> None:
        if len(group) == 1:
            self._submit(group[0])
            return
        name = self._parameter_names[group[0]]
        dense = []
        for p in group:
            if self._share_gradient(p).is_sparse and not self.sparse_as_dense:
                self._submit(p)
            else:
                dense.append(p)
        if not dense:
            return
        wires = [self._compress(p, _flat(p, p.grad)) for p in dense]
        before, after = self._factors()
        handle = grouped_allreduce_async_(
            [wire for wire, _ in wires],
            name=name,
            op=self.op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self.process_set,
        )
        self._handles[tuple(dense)] = (handle, [ctx for _, ctx in wires])

    def synchronize(self) -> None:
        """Waits until the gradients of all parameters are reduced over all ranks. A gradient that this rank has not
        computed counts as zeros.
        """
        if self._hooked:
            self._hook_thawed()
            # An optimizer changes the parameters that have a gradient, even if it is zero. So a parameter that is frozen
            # again must have none afterwards. It is reduced all the same, because other ranks may have a gradient.
            frozen = [p for p in self._requires_update if not p.requires_grad and p.grad is None]
            submitted = {p for key in self._handles if isinstance(key, tuple) for p in key}
            for p in self._requires_update:
                if p in self._handles or p in submitted:
                    continue
                group = self._p_to_group.get(p)
                if group is None:
                    self._submit(p)
                else:
                    self._submit_group(group)
                    submitted.update(group)
            self._group_counts = dict.fromkeys(self._group_counts, 0)
            self._drain(self._done)
            for p in frozen:
                if p.grad is not None and not p.grad.is_sparse and not p.grad.any():
                    p.grad = None
        elif is_initialized() and size() > 1 and self.process_set.included():
            raise RuntimeError(
                "the optimizer was made when this process reduced with no other rank, so it cannot reduce gradients "
                f"over {size()} ranks: call DistributedOptimizer again"
            )
        self._synchronized = True

    def _submit_again(self, errors: dict[Any, Exception]) -> list[Any]:
        """If a rank has sent a dense gradient, because it did not know that the parameter gets sparse ones, and others
        have sent a sparse gradient, the operation has failed at all ranks. So they exchange how many sparse dimensions
        the gradients have, and then all of them send a sparse gradient.
        """
        failed = [key for key, e in errors.items() if isinstance(e, MismatchError) and not isinstance(key, tuple)]
        if not failed or self.sparse_as_dense:
            return []
        failed.sort(key=self._parameter_names.__getitem__)  # all ranks have the same errors
        # The submitted gradients count, because the program may have changed or removed p.grad meanwhile.
        sent = [self._handles[p][0] for p in failed]
        mine = torch.tensor([h.sparse_dim() if isinstance(h, SparseSum) else 0 for h in sent], device="cpu")
        name = f"{self._parameter_names[failed[0]]}.sparse_dim"
        again = []
        all_dims = allreduce(mine, name=name, op=Max, process_set=self.process_set).tolist()
        for p, dims, handle in zip(failed, all_dims, sent):
            if not dims:
                continue
            if isinstance(handle, SparseSum):
                handle.send_values()  # the indices are still in flight
            else:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad, self._was_sparse[p] = grad.detach().to_sparse(dims), dims
                self._submit(p)
            del errors[p]
            again.append(p)
        return again

    def _done(self, key: Any, output: Any, ctx: Any) -> None:
        if not isinstance(key, tuple):
            self._receive(key, output, ctx)
            return
        for p, part, c in zip(key, output, ctx):
            self._receive(p, part, c)

    def _receive(self, p: torch.Tensor, output: torch.Tensor, ctx: Any) -> None:
        """Sets p.grad to the result of the reduction."""
        # A result in the memory of _wires needs no decompression, because copy_ below converts its type.
        if ctx is None or output is not self._wires.get(p):
            output = self._compression.decompress(output, ctx)
        grad = p.grad
        if grad is None:
            p.grad = torch.empty_like(p).copy_(_unflat(output, p.shape))
        elif grad.is_sparse:
            # The values are written to the existing gradient, as for dense gradients, because the program may refer to
            # this object.
            grad.zero_().add_(output if output.is_sparse else output.to_sparse(grad.sparse_dim()))
            # Without a gradient, as of a table that no rank has used, it makes no step of p, as in torch.
            if isinstance(self, torch.optim.SparseAdam) and not grad._nnz():
                p.grad = None
        elif grad.data_ptr() != output.data_ptr():
            grad.copy_(_unflat(output, grad.shape))

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Is a context in which step() does not synchronize, for programs that have called synchronize() themselves.

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
                )
            # With a closure, it waits for the operations that are in flight already.
            if closure is None or self._handles:
                self.synchronize()
        if closure is not None:
            closure = self._over_all_ranks(closure, self._should_synchronize)
        self._synchronized = False
        self._vote(closure, self.op)
        self._tell_schedulers()
        loss = super().step() if closure is None else super().step(closure)
        stepped(self)
        return loss

    # This mark keeps torch from wrapping the step of this class, which it otherwise does at the latest in
    # load_state_dict. Then step hooks would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def _over_all_ranks(self, closure: Callable[[], Any], synchronizes: bool) -> Callable[[], Any]:
        """Returns a function that calls closure, waits until the gradients are reduced over all ranks if synchronizes is
        true, and returns the loss. The loss of LBFGS, which decides by it, is reduced in any case.
        """

        def over_all_ranks() -> Any:
            loss = closure()
            if synchronizes:
                self.synchronize()
            self._synchronized = False
            return self._reduce_loss(loss) if self._hooked and isinstance(self, torch.optim.LBFGS) else loss

        return over_all_ranks

    def _reduce_loss(self, loss: Any) -> Any:
        """Returns the loss of all ranks: their sum with Sum, or else their average."""
        is_tensor = isinstance(loss, torch.Tensor)
        mine = torch.tensor(loss.item() if is_tensor else loss, dtype=torch.float64, device="cpu")
        name = f"{min(self._parameter_names.values())}.loss"  # the order of the parameters may differ between ranks
        op = Sum if self.op == Sum else Average
        everyones = allreduce(mine, name=name, op=op, process_set=self.process_set)
        return everyones.to(loss).reshape(loss.shape) if is_tensor else everyones.item()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._synchronized = False
        self._should_synchronize = True
        self._group_counts = dict.fromkeys(self._group_counts, 0)
        super().load_state_dict(*args, **kwargs)


class _DistributedAdasumOptimizer(_Distributed):
    """A distributed optimizer that combines the ranks' steps. When a gradient is complete, it computes the step that
    this rank alone would make. Then it adds the Adasum of all ranks' steps to the weights.
    """

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "op": Adasum}

    def _begin(self) -> None:
        self._deltas: dict[torch.Tensor, torch.Tensor] = {}
        self._starts: dict[torch.Tensor, torch.Tensor] = {}

    def _accumulated(self, p: torch.Tensor, last: bool) -> None:
        if last:
            self._submit(p)

    @torch.no_grad()
    def _submit(self, p: torch.Tensor) -> None:
        if p not in self._deltas:
            shared = p.is_cpu and p.layout is torch.strided
            self._deltas[p] = alloc_tensor(tuple(p.shape), p.dtype) if shared else torch.empty_like(
                p, memory_format=torch.contiguous_format
            )
            self._starts[p] = torch.empty_like(p)
        start, delta = self._starts[p], self._deltas[p]
        start.copy_(p)
        self._step_on(p)
        torch.sub(p, start, out=delta)
        # The weights get their old values back, because they must not change before step().
        p.copy_(start)
        wire, ctx = self._compress(p, delta)
        handle = allreduce_async_(wire, name=self._parameter_names[p], op=Adasum, process_set=self.process_set)
        self._handles[p] = (handle, ctx)

    def _abandon(self, p: torch.Tensor) -> None:
        super()._abandon(p)
        self._deltas.pop(p, None)

    def _step_on(self, p: torch.Tensor) -> None:
        """Makes the replaced optimizer's step, for parameter p only."""
        params = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [p] if any(p is q for q in group["params"]) else []
            self._plain_step()
        finally:
            for group, all_of_it in zip(self.param_groups, params):
                group["params"] = all_of_it

    def _plain_step(self, *args: Any) -> Any:
        """Makes the replaced optimizer's step without the step hooks of the program, which run once in step()."""
        step = super().step.__func__
        return (step.__wrapped__ if _runs_hooks is not None and getattr(step, "hooked", False) else step)(self, *args)

    def synchronize(self) -> None:
        """Does nothing, because the ranks exchange steps, not gradients, and step() waits for them."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._vote(closure, Adasum)
        if not self._hooked:
            self._tell_schedulers()
            loss = self._plain_step(closure)
            stepped(self)
            return loss
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._tell_schedulers()
        self._hook_thawed()
        for p in self._requires_update:
            if p not in self._handles:
                self._submit(p)
        self._drain(self._done)
        stepped(self)
        return loss

    if _runs_hooks is not None:
        step = _runs_hooks(step)
    step.hooked = True  # type: ignore[attr-defined]

    def _done(self, p: torch.Tensor, output: torch.Tensor, ctx: Any) -> None:
        p.add_(self._compression.decompress(output, ctx))


def _always_alone() -> bool:
    """Returns whether there is one rank and never another one."""
    return size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"


def _can_be_shared(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can be in shared memory: it is dense, on the CPU, and in an order that _Memory keeps."""
    return tensor.is_cpu and tensor.layout is torch.strided and (tensor.is_contiguous() or _is_channels_last(tensor))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor have no gaps in memory and are in channels_last order."""
    return not tensor.is_contiguous() and (
        tensor.is_contiguous(memory_format=torch.channels_last)
        if tensor.dim() == 4
        else tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )


def _flat(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns p's gradient as a contiguous tensor that can be sent. Its elements are in the memory order of p.

    All ranks must send the elements in the same order. They have the memory order of p in common, but their gradients
    may have different orders. A dense gradient in the memory order of p is not copied.
    """
    if grad.is_sparse:
        grad = grad.to_dense()
    if not _is_channels_last(p):
        return grad.contiguous()
    order = torch.channels_last if p.dim() == 4 else torch.channels_last_3d
    return grad.contiguous(memory_format=order).as_strided((grad.numel(),), (1,))


def _unflat(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Converts a tensor that _flat has returned back to its original shape."""
    if tensor.shape == shape:
        return tensor
    return tensor.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def _names(param_groups: list[dict[str, Any]], named: _Named | None) -> dict[torch.Tensor, str]:
    """Returns the names of all parameters. Raises ValueError if named is malformed, has a name twice, or lacks a
    parameter.
    """
    if named is None:
        return {
            p: f"allreduce.noname.{number}.{i}"
            for number, group in enumerate(param_groups)
            for i, p in enumerate(group["params"])
        }
    named = list(named)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    seen: dict[str, int] = {}
    for name, _ in named:
        seen[name] = seen.get(name, 0) + 1
    duplicates = [name for name, times in seen.items() if times > 1]
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(map(str, duplicates))
        )
    names = {p: name for name, p in named}
    unnamed = [id(p) for group in param_groups for p in group["params"] if p not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            + ", ".join(map(str, unnamed))
        )
    return names


def _unique(name: str, process_set: ProcessSet) -> str:
    """Returns the name of an optimizer's parameter in operations: the given name or, if k other optimizers of this job
    have used it before, NAME#k+1, because gradients of two optimizers may be in flight at the same time. All ranks
    make their optimizers in the same order, so the names are the same at all ranks.
    """
    key = process_set.process_set_id or 0, name
    times = _names_given[key] = _names_given.get(key, 0) + 1
    return name if times == 1 else f"{name}#{times}"


def _check_groups(groups: _Groups) -> None:
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    if not isinstance(groups, list):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen = set()
    for group in groups:
        if not isinstance(group, list) or any(not isinstance(p, torch.Tensor) for p in group):
            raise ValueError("groups should consist of list of torch.Tensor.")
        for p in group:
            if p in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(p)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: _Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: _Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    gradient_as_arena_view: bool = True,
) -> Any:
    """Returns an optimizer that replaces the given optimizer and steps on the gradients of all ranks.

    Its class derives from the class of the given optimizer. It also has the methods synchronize(), skip_synchronize()
    and set_backward_passes_per_step(). Gradients are reduced while backward runs. If no processor is free for that,
    they are reduced when backward ends. step() waits until all gradients are reduced. Call zero_grad after step() or
    synchronize(), before the next backward.

    named_parameters: model.named_parameters(). It must name all parameters of the optimizer, with the same names at all
        ranks. If it is None, the parameters are named by their positions. If an earlier optimizer of the job has a
        parameter with the same name, #2 is added to the name, then #3 and so on. So all ranks must make their
        optimizers in the same order.
    compression: the compressor of the gradients.
    backward_passes_per_step: the number of backward passes whose gradients are added up before they are reduced. The
        sum is not divided by this number.
    op: the reduction, such as Average or Sum. With Adasum each rank computes its own step, and the steps are combined.
    gradient_predivide_factor: with Average, each rank divides its gradients by this factor before the sum. Afterwards
        the sum is multiplied by this factor and divided by the number of ranks.
    groups: lists of parameters whose gradients are reduced together, or the number of groups to divide all parameters
        into. num_groups is the old name of this argument. If gradients in a group of several parameters are sparse,
        every rank must have them in every step, or pass sparse_as_dense.
    sparse_as_dense: if true, sparse gradients are sent as dense tensors.
    process_set: the ranks that reduce their gradients. Other ranks send nothing.
    gradient_as_arena_view: if true, dense gradients on the CPU that are contiguous or in channels_last order are moved
        into shared memory when they first appear. p.grad stays there and is reduced without a copy. After
        zero_grad(set_to_none=True) the next gradient is moved again. If the process forks, parent and child share the
        gradients.

    The optimizer can be copied and pickled, except between backward and step. A pickle can only be loaded in a job.

    If step is called with a closure, the optimizer synchronizes after each call of the closure. LBFGS also gets the average
    of the ranks' losses, or their sum with op=Sum. If another optimizer decides by the loss, the closure must return the
    same value at all ranks.

    Raises ValueError if arguments are invalid or contradict each other. backward, synchronize and step raise the errors
    of the operations.
    """
    if not isinstance(gradient_predivide_factor, numbers.Real):
        kind = type(gradient_predivide_factor).__name__
        raise ValueError(f"got a gradient_predivide_factor of type {kind}, want a number: use float(factor)")
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        if groups is None:
            groups = num_groups
    _check_groups(groups)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if process_set.process_set_id is None:
        raise ValueError(
            f"process set {process_set.ranks} is not registered: pass it to init() or add_process_set() first"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is already a DistributedOptimizer")

    names = {p: _unique(name, process_set) for p, name in _names(optimizer.param_groups, named_parameters).items()}
    return _distribute(
        optimizer, names, compression, backward_passes_per_step, op, gradient_predivide_factor, groups, sparse_as_dense,
        process_set, gradient_as_arena_view,
    )  # fmt: skip


def _distribute(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    compression: type[Compressor],
    backward_passes_per_step: int,
    op: int,
    gradient_predivide_factor: float = 1.0,
    groups: _Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient_as_arena_view: bool = True,
) -> Any:
    """Does the work of DistributedOptimizer, whose other arguments it has. names has the names of the operations."""
    adasum = op == Adasum and not _always_alone()
    base = _DistributedAdasumOptimizer if adasum else _DistributedOptimizer
    kind = type(optimizer)
    distributed = object.__new__(type(kind.__name__, (base, kind), {"__doc__": kind.__doc__}))
    replaced = set(vars(optimizer))
    distributed._take_over(optimizer, names, compression, backward_passes_per_step, process_set)
    if adasum:
        distributed._begin()
    else:
        distributed._begin(op, gradient_predivide_factor, groups, sparse_as_dense, gradient_as_arena_view)
    distributed._not_replaced = {"_not_replaced", *vars(distributed)} - replaced
    return distributed


def _again(optimizer: torch.optim.Optimizer, arguments: dict[str, Any]) -> Any:
    """Returns a DistributedOptimizer for a copied or pickled one. optimizer is a copy of the optimizer that it had
    replaced. It does not communicate, so that one rank can load a checkpoint.
    """
    if not is_initialized():
        raise RuntimeError(
            "a pickled DistributedOptimizer can only be loaded in a job: call hvd.init() first. To load it elsewhere, "
            "save optimizer.state_dict() instead of the optimizer"
        )
    groups, was_sparse, reduced = arguments.pop("groups", []), arguments.pop("was_sparse", {}), arguments.pop("reduced", [])
    distributed = _distribute(optimizer, **arguments)
    if distributed._hooked:
        distributed._requires_update.update(dict.fromkeys(reduced))
    if isinstance(distributed, _DistributedOptimizer):
        distributed._was_sparse.update(was_sparse)
        if distributed._hooked:
            distributed._set_groups(groups)
    return distributed
