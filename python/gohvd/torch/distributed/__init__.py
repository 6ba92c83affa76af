"""The backend ``gohvd`` of torch.distributed: ``import gohvd.torch.distributed``, then
``torch.distributed.init_process_group("gohvd")``.

The import registers the backend for tensors on the CPU and on CUDA devices. If the job uses NCCL, tensors on devices are
not copied to the host. The ranks meet through torch's store, so the backend works with every launcher and init method of torch.
"""

from __future__ import annotations

import re

import torch

_OLDEST = (2, 1)

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _OLDEST:
    raise ImportError(
        f"gohvd.torch.distributed needs torch 2.1 or newer, but torch {torch.__version__} is installed; "
        "gohvd.torch, with Horovod's interface, also works with older versions"
    )

import torch.distributed as dist  # noqa: E402

if not dist.is_available():
    raise ImportError("gohvd.torch.distributed needs a torch that was built with torch.distributed")

from torch.distributed.rendezvous import register_rendezvous_handler  # noqa: E402
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook  # noqa: E402

from ..._engine import engine  # noqa: E402
from ...timeline import stepped  # noqa: E402
from ..optimizer import _Distributed  # noqa: E402
from . import _job  # noqa: E402
from ._ddp import DistributedDataParallel  # noqa: E402
from ._group import DEVICES, ElasticProcessGroup, ProcessGroup, create  # noqa: E402

__all__ = ["DistributedDataParallel", "ElasticProcessGroup", "ProcessGroup"]

dist.Backend.register_backend("gohvd", create, extended_api=True, devices=DEVICES)

register_rendezvous_handler("gohvd", _job.rendezvous)
engine.before_again.append(_job.end_generation)

# From torch 2.15 on, this keeps torch from recording the operations of a group, which fails for groups that are written in
# Python. gohvd has a flight recorder of its own.
getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("gohvd")


def _mark_step(optimizer: Optimizer, *_: object) -> None:
    # A DistributedOptimizer marks its steps itself, also with versions of torch that have no such hook.
    if not isinstance(optimizer, _Distributed):
        stepped(optimizer)


# Whatever reduces the gradients, such as DistributedDataParallel, a training step ends with that of an optimizer.
register_optimizer_step_post_hook(_mark_step)
