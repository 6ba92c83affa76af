"""Functions that send parameters, optimizer state and objects from one rank to all ranks, or from each to all.

Objects are sent as pickles, made by cloudpickle if it is installed. Unpickling can run any code. So pickles are
accepted only from ranks of the job, which have proved to each other that they know the job's secret.
"""

from __future__ import annotations

import collections.abc
import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from gohvd import _library
from gohvd.process_sets import ProcessSet, global_process_set
from gohvd.torch.mpi_ops import (
    allgather, alltoall_async, broadcast_, broadcast_async_, forget, moved, rank, size, synchronize,
)  # fmt: skip

try:
    import cloudpickle as _pickler
except ImportError:
    _pickler = pickle


class Route(NamedTuple):
    """From which ranks the others get tensors: from root, or each rank from the first rank of pair. Then it sends them to the
    second one. A rank of pair that is -1 does not exist.
    """

    root: int
    pair: tuple[int, int] | None = None

    def ends_here(self) -> bool:
        """Returns whether this rank gets the tensors."""
        return self.pair[0] >= 0 if self.pair else rank() != self.root


def broadcast_parameters(
    params: Mapping[str, torch.Tensor | None] | Iterable[Any], root_rank: int
) -> None:
    """Overwrites the tensors in params, at all ranks, with the values of rank root_rank.

    params is the result of model.state_dict(), or a sequence of parameters or of pairs (name, parameter). All ranks
    must pass the same parameters. They are changed in place, and all are in flight at the same time. Raises ValueError
    if params has another form.
    """
    send_parameters(params, Route(root_rank))


def send_parameters(params: Mapping[str, torch.Tensor | None] | Iterable[Any], route: Route) -> None:
    """Is broadcast_parameters by any route."""
    named: list[tuple[str | None, Any]]
    if isinstance(params, collections.abc.Mapping):
        named = sorted(params.items())
    elif isinstance(params, collections.abc.Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    named = [(name, tensor) for name, tensor in named if tensor is not None]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"invalid params: {name!r} is of type {type(tensor)}, want a tensor")
    # The operations need contiguous tensors. Weights in channels_last order are not contiguous.
    wires = [tensor.detach().contiguous() for _, tensor in named]
    _send_all(wires, route, [name for name, _ in named])
    for (_, tensor), wire in zip(named, wires):
        if tensor.data_ptr() != wire.data_ptr():
            tensor.detach().copy_(wire)


def _send_all(tensors: list[torch.Tensor], route: Route, names: list[str | None]) -> None:
    """Overwrites contiguous tensors with their values at other ranks. All operations are in flight at the same time. If one
    fails, _send_all raises its error and does not wait for the others.
    """
    handles: list[int] = []
    try:
        for tensor, name in zip(tensors, names):
            wire = moved(tensor)
            if route.pair is None:
                handles.append(broadcast_async_(wire, route.root, name))
                continue
            wire, splits = wire.reshape(-1), [0] * size()
            if route.pair[1] >= 0:
                splits[route.pair[1]] = wire.numel()
            else:
                wire = wire[:0]
            handles.append(alltoall_async(wire, splits, name))
        for tensor, handle in zip(tensors, handles):
            result = synchronize(handle)
            if route.pair and route.ends_here():
                wire = moved(tensor)
                wire.copy_(result[0].reshape(wire.shape))
    finally:
        for handle in handles:
            forget(handle)


class _Slot(NamedTuple):
    """A placeholder for a tensor in a pickled tree. The tensor itself is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _take_out(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns a copy of tree with a slot in place of each tensor, and appends the tensors to the list."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return _Slot(tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return {key: _take_out(value, tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_take_out(value, tensors) for value in tree)
    return tree


def _put_in(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Returns a copy of tree in which each slot is replaced by the next tensor of the argument tensors. It reverses
    _take_out.
    """
    if isinstance(tree, _Slot):
        return next(tensors)
    if isinstance(tree, dict):
        return {key: _put_in(value, tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_put_in(value, tensors) for value in tree)
    return tree


def _empty(tree: Any) -> list[torch.Tensor]:
    """Returns a new tensor for each slot of tree, in the order of _take_out."""
    if isinstance(tree, _Slot):
        return [torch.empty(tree.shape, dtype=tree.dtype, device="cpu")]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in _empty(value)]
    if type(tree) in (list, tuple):
        return [tensor for value in tree for tensor in _empty(value)]
    return []


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copies the options and the state of root_rank's optimizer to every rank.

    It has the effect of the optimizer's load_state_dict, but keeps the existing param groups. The ranks may have
    different state before the call. If root_rank's optimizer has not stepped yet and has no state, no rank has state
    afterwards. (Horovod creates state by a step on gradients of zero. Adam counts that step, and weight decay applies
    in it.) As in Horovod, if an optimizer has no state, its missing gradients become zeros, except for parameters with
    sparse gradients, which are found in model. Raises ValueError for LBFGS, which has one state for all parameters.
    """
    send_optimizer_state(optimizer, Route(root_rank), model)


# Outside of torch.inference_mode, because the optimizer keeps the tensors that this function makes.
@torch.inference_mode(False)
def send_optimizer_state(optimizer: torch.optim.Optimizer, route: Route, model: torch.nn.Module | None = None) -> None:
    """Is broadcast_optimizer_state by any route."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    tensors: list[torch.Tensor] = []
    sent = optimizer.state_dict()
    tree = _take_out(sent, tensors)
    if not tree["state"] and not isinstance(optimizer, torch.optim.SparseAdam):
        sparse = _sparse_parameters(model)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.grad is None and p not in sparse:
                    p.grad = torch.zeros_like(p)
    tree = broadcast_object(tree, route.root, "optimizer_state")
    ends_here = route.ends_here()
    wires = _empty(tree) if ends_here else [tensor.detach().cpu().contiguous() for tensor in tensors]
    _send_all(wires, route, [f"optimizer_state.{i}" for i in range(len(wires))])
    if ends_here:
        with in_place(optimizer):
            optimizer.load_state_dict(_put_in(tree, iter(wires)))
        sent = _put_in(tree, iter(wires))
    _make_alike(optimizer, sent)


def _make_alike(optimizer: torch.optim.Optimizer, sent: dict[str, Any]) -> None:
    """Gives the tensors in the state of each parameter the types that were sent, because load_state_dict has cast them to
    the type of the parameter. Those of its shape get its strides, also at the ranks that keep their state, which may have
    others after a checkpoint was loaded. Fused optimizers do not look at strides.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in sent["param_groups"] for number in group["params"]]
    for p, number in zip(params, numbers):
        if number not in sent["state"]:
            continue
        state, wires = optimizer.state[p], sent["state"][number]
        if not isinstance(state, dict) or not isinstance(wires, dict):
            continue
        for key, value in state.items():
            wire = wires.get(key)
            if not isinstance(value, torch.Tensor) or not isinstance(wire, torch.Tensor) or value.shape != wire.shape:
                continue
            like = p if value.shape == p.shape else value
            if value.dtype != wire.dtype or value.stride() != like.stride():
                state[key] = torch.empty_like(like, dtype=wire.dtype, device=value.device).copy_(wire)


@contextlib.contextmanager
def in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Is a context in which optimizer.load_state_dict writes to the existing param groups and state. Otherwise torch
    makes new ones.

    The existing ones must be kept, because the optimizer that a distributed one replaces shares them, and so do the
    learning rate schedulers that were made for the replaced optimizer.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    loaded = optimizer.param_groups
    if loaded is not groups and len(loaded) == len(groups):
        for group, new in zip(groups, loaded):
            _become(group, new)
        optimizer.param_groups = groups
    if isinstance(state, dict) and optimizer.state is not state:
        _become(state, optimizer.state)
        optimizer.state = state


def _become(old: dict[Any, Any], new: Mapping[Any, Any]) -> None:
    if new is not old:
        entries = dict(new)
        old.clear()
        old.update(entries)


def _sparse_parameters(model: torch.nn.Module | None) -> set[torch.Tensor]:
    """Returns the weights of model that get sparse gradients, such as those of a sparse embedding."""
    if model is None:
        return set()
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the object that root_rank passes as obj, at all members of process_set. The argument obj of the other
    ranks is ignored.

    root_rank is a rank of the job. The root gets its own object back, and the other ranks get a copy. broadcast_object
    makes two broadcasts: one of the length, then one of the bytes.
    """
    # The name does not depend on obj. Horovod names the operation after the type of obj, and waits forever if the other
    # ranks pass None.
    name = "broadcast_object" if name is None else name
    at_root = rank() == root_rank
    data = _dumps(obj) if at_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = broadcast_(_number(data.numel()), root_rank, f"{name}.sz", process_set)
    if not at_root:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if at_root else _loads(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns a list of the objects of all ranks, in the order of the ranks. It makes two allgathers: one of the
    lengths, then one of the bytes.
    """
    name = "allgather_object" if name is None else name
    data = _dumps(obj)
    lengths = allgather(_number(data.numel()), f"{name}.sz").tolist()
    return [_loads(part) for part in torch.split(allgather(data, f"{name}.t"), lengths)]


def _number(n: int) -> torch.Tensor:
    return torch.tensor([n], dtype=torch.int64, device="cpu")


def _dumps(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(_pickler.dumps(obj)), dtype=torch.uint8)


def _loads(data: torch.Tensor) -> Any:
    # The bytes are read by address, because without numpy torch can only return the elements of a tensor one by one.
    return pickle.loads(_library.memory_at(data.data_ptr(), data.numel()))
