"""Elastic training. The names of horovod.torch.elastic are here; what they do comes later."""

from __future__ import annotations

from typing import Any, Callable, NoReturn, TypeVar

from gohvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

_F = TypeVar("_F", bound=Callable[..., Any])


def _absent(name: str) -> NoReturn:
    raise NotImplementedError(f"gohvd: elastic.{name}: this version has no elastic training")


def run(func: _F) -> _F:
    """Decorates a training function. A script can be imported; calling the function raises NotImplementedError."""

    def wrapper(*args: Any, **kwargs: Any) -> NoReturn:
        _absent("run")

    wrapper.__wrapped__ = func  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


class State:
    """Raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _absent(type(self).__name__)


class ObjectState(State):
    """Raises NotImplementedError."""


class TorchState(ObjectState):
    """Raises NotImplementedError."""


class ElasticSampler:
    """Raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _absent(type(self).__name__)
