"""The sampler of a data set for jobs whose ranks change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Sized

import torch

from gohvd.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """Distributes the samples of a data set among the ranks, except those that were processed in this epoch already.

    All ranks get the same number of samples. If the samples do not divide evenly, the first ones are used again.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: all samples count as not processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has processed one batch of batch_size samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distributes the samples that have not been processed in this epoch."""
        self.rank, self.num_replicas = rank(), size()
        left = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(left)
        self.remaining_indices = left[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        return iter([left[i % len(left)] for i in range(self.rank, self.total_size, self.num_replicas)])

    def __len__(self) -> int:
        return self.num_samples
