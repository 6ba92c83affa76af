"""The interface of horovod.torch.elastic, for a job of fixed size.

Scripts for elastic training run, but no rank is added or replaced while they run. If a rank fails, the job ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from gohvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from .sampler import ElasticSampler
from .state import ObjectState, State, TorchState

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
