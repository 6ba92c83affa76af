"""The names of horovod.common.elastic, for a job of fixed size (gohvd.torch.elastic)."""

from __future__ import annotations

from typing import Any, Callable

from gohvd.torch.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """As horovod.torch.elastic.run. reset would bring the job up again, which nothing asks for in a job of fixed size."""
    return run(func)


class _NotificationManager:
    """Tells nobody of anything: hosts do not change."""

    def init(self) -> None:
        pass

    def register_listener(self, listener: Any) -> None:
        pass

    def remove_listener(self, listener: Any) -> None:
        pass


notification_manager = _NotificationManager()
