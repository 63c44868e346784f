"""An iterable dataset of a Trainer, of which the samples are counted while they are read.

It imports accelerate: `trainer_batches` imports it once there is such a dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard


def count_samples(shard: IterableDatasetShard) -> None:
    """Let accelerate's part of an iterable dataset count the samples of an epoch in `count`.

    Args:
        shard: A part of the dataset, of which each rank reads all samples and keeps its own.
    """
    shard.__class__ = CountedShard
    # In shared memory, because a worker may read the dataset.
    shard.count = torch.zeros((), dtype=torch.int64).share_memory_()


class CountedShard(IterableDatasetShard):
    """Accelerate's part of an iterable dataset, which counts the samples of all ranks."""

    count: torch.Tensor
    dataset: Any

    def __iter__(self) -> Iterator[Any]:
        self.count.zero_()
        whole = self.dataset
        self.dataset = _Counting(whole, self.count)
        try:
            yield from super().__iter__()
        finally:
            self.dataset = whole


class _Counting:
    """A dataset that counts the samples that are read of it."""

    def __init__(self, dataset: Any, count: torch.Tensor) -> None:
        self._dataset, self._count = dataset, count

    def __iter__(self) -> Iterator[Any]:
        for sample in self._dataset:
            self._count += 1
            yield sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)
