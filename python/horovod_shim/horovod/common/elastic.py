"""The names of horovod.common.elastic, for a job of fixed size (gohvd.torch.elastic)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gohvd.torch.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Decorates a training function as horovod.torch.elastic.run does. reset would start the job again. It is never
    called in a job of fixed size.
    """
    return run(func)


class _NotificationManager:
    """Accepts listeners and never notifies them, because the hosts of the job do not change."""

    def init(self) -> None:
        pass

    def register_listener(self, listener: Any) -> None:
        pass

    def remove_listener(self, listener: Any) -> None:
        pass


notification_manager = _NotificationManager()
