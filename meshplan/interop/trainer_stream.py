"""Samples that a Trainer's loader reads: the number of samples, and those of the last batch.

It imports accelerate: `trainer_batches` imports it once there is a loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

from meshplan.interop.trainer_call import drawing_nothing


def keep_last(loader: Any) -> None:
    """Let a loader that accelerate has prepared keep which samples its last batch has."""
    if type(loader.dataset) is IterableDatasetShard:
        count_samples(loader.dataset)
    if type(loader.batch_sampler) is BatchSamplerShard:
        loader.batch_sampler.__class__ = KeptBatches


def collated_anew(loader: Any, number: int) -> Any:
    """Return a batch of the first samples of a loader's last one; None if they are not known.

    Args:
        loader: A loader of `keep_last`, at its last batch.
        number: How many samples.
    """
    batches, dataset = loader.batch_sampler, loader.dataset
    while not isinstance(batches, KeptBatches) and hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler  # A loader that goes on skips batches.
    with drawing_nothing():
        if isinstance(dataset, CountedShard):
            samples = list(dataset.last)[:number]
        elif isinstance(batches, KeptBatches):
            samples = [dataset[index] for index in batches.last[:number]]
        else:
            return None
        # Of an iterable dataset that a worker reads, no samples are seen here.
        return loader.collate_fn(samples) if samples else None


class KeptBatches(BatchSamplerShard):
    """Accelerate's part of the batches, which keeps the places of the last one."""

    last: list[int]

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.last = batch
            yield batch


def count_samples(shard: IterableDatasetShard) -> None:
    """Let accelerate's part of an iterable dataset count the samples of an epoch in `count`.

    Args:
        shard: A part of the dataset, of which each rank reads all samples and keeps its own.
    """
    shard.__class__ = CountedShard
    # In shared memory, because a worker may read the dataset.
    shard.count = torch.zeros((), dtype=torch.int64).share_memory_()
    shard.last = deque(maxlen=shard.batch_size)


class CountedShard(IterableDatasetShard):
    """Accelerate's part of an iterable dataset, which counts the samples of all ranks.

    Attributes:
        count: Their number in this epoch.
        last: This rank's samples that were read last, of one batch.
    """

    count: torch.Tensor
    last: deque[Any]
    dataset: Any

    def __iter__(self) -> Iterator[Any]:
        self.count.zero_()
        whole = self.dataset
        self.dataset = _Counting(whole, self.count)
        try:
            for sample in super().__iter__():
                self.last.append(sample)
                yield sample
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
