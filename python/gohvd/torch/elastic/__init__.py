"""The interface of horovod.torch.elastic: training goes on when ranks die, leave or are added (docs/elastic.md)."""

from __future__ import annotations

from gohvd.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, run

from .sampler import ElasticSampler
from .state import TorchState

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
