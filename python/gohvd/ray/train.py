"""The backend of Ray Train that trains with the backend gohvd of torch.distributed."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import ray
import ray.train.torch
from ray.train.torch.config import _TorchBackend

from .. import __version__, _meeting, basics
from . import _LEAVE_SECONDS, await_left


@dataclasses.dataclass
class TorchConfig(ray.train.torch.TorchConfig):
    """The argument torch_config of ``ray.train.torch.TorchTrainer``. The workers are the ranks of a job of gohvd, and
    the default group of torch.distributed has the backend gohvd.
    """

    backend: str | None = "gohvd"

    @property
    def backend_cls(self) -> type:
        return _Backend


class _Backend(_TorchBackend):
    """Ray Train makes it in its controller, calls on_start when the workers have started, also after a failure, and
    on_shutdown before it ends them.
    """

    _store: _meeting.Store | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        self._close()
        hosts = worker_group.execute(ray.util.get_node_ip_address)
        _meeting.check_versions(__version__, worker_group.execute(_version), hosts)
        self._store = _meeting.Store(ray.util.get_node_ip_address())
        ray.get([
            worker_group.execute_single_async(rank, _join, _meeting.environment(self._store.place, rank, hosts))
            for rank in range(len(hosts))
        ])  # fmt: skip
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        try:
            super().on_shutdown(worker_group, backend_config)
        finally:
            try:
                await_left(worker_group.execute_async(basics.shutdown), _LEAVE_SECONDS)
            finally:
                self._close()

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None


def _version() -> str:
    return __version__


def _join(env: dict[str, str]) -> None:
    import gohvd.torch.distributed  # noqa: F401 # it registers the backend

    os.environ.update(env)
    basics.init()
