"""The interface of horovod.torch.elastic, for a job of fixed size.

Scripts for elastic training run, but no rank is added or replaced while they run. If a rank fails, the job ends.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Sized, TypeVar

import torch

from gohvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from gohvd.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from gohvd.torch.mpi_ops import rank, size

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

_T = TypeVar("_T")


def run(func: Callable[..., _T]) -> Callable[..., _T]:
    """Decorates a training function. The first argument of the function is a State. Before each call the wrapper sets
    the State at all ranks to that of rank 0.

    The wrapper does not catch HorovodInternalError, because a job of fixed size cannot go on after it.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _T:
        state.sync()
        return func(state, *args, **kwargs)

    return wrapper


class State:
    """The state of training, which is the same at all ranks between steps."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: List[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Registers functions that on_reset calls. In a job of fixed size on_reset is never called."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, for restore."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing, because the hosts of the job do not change."""

    def reset(self) -> None:
        """Adapts the state to a change of the job's ranks. Subclasses may override it."""

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError


class ObjectState(State):
    """A State that consists of values that can be pickled. Each keyword argument becomes an attribute."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = list(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Saves the values for restore."""
        self._saved = {name: copy.deepcopy(self._content(getattr(self, name))) for name in self._names}

    def restore(self) -> None:
        """Restores the saved values."""
        for name, content in self._saved.items():
            self._fill(name, copy.deepcopy(content))

    def sync(self) -> None:
        """Sets the values at all ranks to those of rank 0, and saves them."""
        plain = {name: getattr(self, name) for name in self._names if not _has_state(getattr(self, name))}
        for name, value in self._bcast_object(plain).items():
            setattr(self, name, value)
        self.save()

    @staticmethod
    def _content(value: Any) -> Any:
        return value.state_dict() if _has_state(value) else value

    def _fill(self, name: str, content: Any) -> None:
        value = getattr(self, name)
        if _has_state(value):
            value.load_state_dict(content)
        else:
            setattr(self, name, content)


class TorchState(ObjectState):
    """A State that consists of a model, an optimizer and other values. For models, optimizers and samplers it saves
    their state_dict, for other values a copy.
    """

    def __init__(
        self, model: Optional[torch.nn.Module] = None, optimizer: Optional[torch.optim.Optimizer] = None, **kwargs: Any
    ) -> None:
        for name, value in (("model", model), ("optimizer", optimizer)):
            if value is not None:
                kwargs[name] = value
        super().__init__(broadcast_object, rank, **kwargs)

    def sync(self) -> None:
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            elif isinstance(value, ElasticSampler):
                value.load_state_dict(self._bcast_object(value.state_dict()))
        super().sync()

    def reset(self) -> None:
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, ElasticSampler):
                value.reset()


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """Distributes the samples of a data set among the ranks, except those that were processed in this epoch already.

    All ranks get the same number of samples. If the samples do not divide evenly, the first ones are used twice.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: all samples count as not processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has processed one batch of batch_size samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> Dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Dict[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distributes the samples that have not been processed in this epoch."""
        self.rank, self.num_replicas = rank(), size()
        left = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(left)
        self.remaining_indices = left[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        left, total = self.remaining_indices, self.num_samples * self.num_replicas
        return iter([left[i % len(left)] for i in range(self.rank, total, self.num_replicas)])

    def __len__(self) -> int:
        return self.num_samples


def _has_state(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, ElasticSampler))
