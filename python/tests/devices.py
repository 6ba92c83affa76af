"""What the tests on CUDA devices have in common."""

from __future__ import annotations

import os


def share(devices: int) -> int:
    """Returns the number of this rank's device. If there are fewer devices than ranks, the ranks share them, and share
    makes each look to NCCL like a host of its own, because NCCL refuses two ranks of a host on one device.
    """
    rank = int(os.environ["HOROVOD_RANK"])
    if devices < int(os.environ["HOROVOD_SIZE"]):
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
            NCCL_NET="Socket", NCCL_RAS_ENABLE="0", NCCL_NVLS_ENABLE="0", NCCL_CUMEM_ENABLE="0", NCCL_MAX_NCHANNELS="2",
            NCCL_BUFFSIZE="1048576",
        )  # fmt: skip
    return rank % devices
