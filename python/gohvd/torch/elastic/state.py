"""The state of training of a script for elastic training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from gohvd.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from gohvd.torch.mpi_ops import rank

from .sampler import ElasticSampler


class State:
    """The state of training, which is the same at all ranks between steps."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

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
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
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


def _has_state(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, ElasticSampler))
