"""The state of training with torch, for jobs whose ranks change."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from gohvd.elastic import ObjectState, State, is_ours
from gohvd.torch.functions import Route, broadcast_object, send_optimizer_state, send_parameters
from gohvd.torch.mpi_ops import rank

from .sampler import ElasticSampler

__all__ = [
    "ModelStateHandler", "ObjectState", "OptimizerStateHandler", "SamplerStateHandler", "State", "StateHandler",
    "TorchState", "get_handler_registry", "set_handler_registry",
]  # fmt: skip


class StateHandler:
    """Saves, restores and synchronises a value of a TorchState. A program may define its own (set_handler_registry)."""

    route = Route(0)
    """From which ranks sync gets the state. Only the handlers of this module use it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replaces the value, and saves its state."""
        self.value = value
        self.save()


class _ByStateDict(StateHandler):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        # TorchState copies handlers, so that the state before must not change.
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Optimizers and schedulers keep parts of the argument, and change them later.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.route.root))


class ModelStateHandler(_ByStateDict):
    def restore(self) -> None:
        self.value.load_state_dict(self._saved)  # which copies the tensors

    def sync(self) -> None:
        """Raises ValueError at a rank whose model has other tensors than that of the root. Otherwise it would get part of
        them, or all ranks would wait for operations that only some of them have.
        """
        state = self.value.state_dict()
        ours = [(n, tuple(x.shape), x.dtype) for n, x in sorted(state.items()) if isinstance(x, torch.Tensor)]
        theirs = broadcast_object(ours, self.route.root)
        if ours != theirs:
            here, there = next((a, b) for a, b in itertools.zip_longest(ours, theirs) if a != b)
            raise ValueError(
                f"TorchState: the model of this rank has other tensors than that of rank {self.route.root}: {here} is here, "
                f"and {there} is there: make the same model in all processes"
            )
        send_parameters(state, self.route)


class OptimizerStateHandler(_ByStateDict):
    def sync(self) -> None:
        send_optimizer_state(self.value, self.route)


class SamplerStateHandler(_ByStateDict):
    """Is the handler of Horovod's name. What it does is right for all small states."""


_Registry = list[tuple[type, type[StateHandler]]]
_handler_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """Returns the pairs of a type and the handler for its values. The first pair that fits a value is used."""
    return _handler_registry


def set_handler_registry(registry: _Registry) -> None:
    """Replaces the pairs, for states that are made later."""
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class _Kept:
    """Stands for a value with state_dict and load_state_dict that no handler fits, where it is saved and sent. An example
    is a learning rate scheduler, whose copy would belong to a copy of the optimizer. In this process it keeps the value.
    """

    def __init__(self, value: Any, state: Any) -> None:
        self.value, self.state = value, state

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept(self.value, copy.deepcopy(self.state, memo))

    def __reduce__(self) -> Any:
        return _Kept, (None, self.state)


def _has_state(value: Any) -> bool:
    return hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


class TorchState(ObjectState):
    """A State that consists of a model, an optimizer and other values. Each keyword argument becomes an attribute.

    Of a value whose class has state_dict and load_state_dict, such as a model, an optimizer, a sampler, a learning rate
    scheduler or a GradScaler, the state_dict is saved and sent, and the value itself remains. Of another value a copy is
    saved and sent, which takes the place of the value. So pass each scheduler as an argument, not in a list.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = _handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                super().__setattr__(name, value)
                self._handlers[name] = handler
        super().__init__(broadcast_object, rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        # The first attribute that is set is _handlers.
        if name != "_handlers" and name in self._handlers:
            self._handlers[name].set_value(value)
            self._is_commit = False
        super().__setattr__(name, value)

    def _values(self) -> dict[str, Any]:
        return {name: _Kept(x, x.state_dict()) if _has_state(x) else x for name, x in super()._values().items()}

    def _set_values(self, values: dict[str, Any]) -> None:
        kept = {name: x for name, x in values.items() if isinstance(x, _Kept)}
        super()._set_values({name: x for name, x in values.items() if name not in kept})
        for name, x in kept.items():
            value = getattr(self, name) if x.value is None else x.value
            if not _has_state(value):
                raise ValueError(
                    f"TorchState: {name} is {value!r} at this rank, and other ranks have an object with a state: make the "
                    "object before the training function is called"
                )
            setattr(self, name, value)
            value.load_state_dict(x.state)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.route = Route(self._root, self._pair)
            handler.sync()
        super().sync()

    def _sync_values(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, OptimizerStateHandler):  # a scheduler changes the groups after a step
                groups = handler.value.param_groups
                values = [{k: v for k, v in group.items() if k != "params"} for group in groups]
                for group, ours in zip(groups, broadcast_object(values, self._root)):
                    group.update(ours)
            elif isinstance(handler, SamplerStateHandler):
                handler.route = Route(self._root)
                handler.sync()
        super()._sync_values()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def _saved(self) -> Any:
        return super()._saved(), {name: copy.copy(handler) for name, handler in self._handlers.items()}

    def _put_back(self, saved: Any) -> None:
        values, self._handlers = saved
        super()._put_back(values)

    def _loose(self) -> bool:
        return super()._loose() or not all(is_ours(type(handler)) for handler in self._handlers.values())
