"""The samples that a rank reads of each epoch, each with random numbers of its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate, get_worker_info

from meshplan.runtime.base.mesh import device_type
from meshplan.runtime.train.sample_order import Share, StepSamples, order_of

Sample = tuple[int, int]
"""(place in the epoch's order, index in the dataset)."""


class EpochReader:
    """Reads this rank's samples of an epoch, in this process or in workers.

    Args:
        dataset: The dataset.
        length: Its number of samples; None for an iterable dataset.
        shares: {epoch: the samples of each step on this rank from this epoch on}.
        shuffles: If True, each epoch has an order of its own.
        seed: Seed of orders and of the samples' random numbers.
        num_workers: Number of processes that read samples.
        collate: Makes a batch of a list of samples; None for torch's function.
    """

    def __init__(
        self,
        dataset: Any,
        length: int | None,
        shares: Mapping[int, Share],
        shuffles: bool,
        seed: int,
        num_workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.length, self._shares = length, dict(shares)
        self._dataset, self._shuffles, self._seed = dataset, shuffles, seed
        self._workers, self._collate = num_workers, collate or default_collate
        every = shares.values()
        self.pads = any(not each.drops_last and not each.divides(length) for each in every)

    def share_of(self, epoch: int) -> Share:
        """Return the samples of each step of an epoch on this rank."""
        return self._shares[max(begin for begin in self._shares if begin <= epoch)]

    def identity(self) -> dict[str, Any]:
        """Return what a position depends on beside the numbers of epoch and samples."""
        return {"length": self.length, "shuffle": self._shuffles, "seed": self._seed}

    def batches(self, epoch: int, start: int) -> Iterator[tuple[StepSamples, Any]]:
        """Yield the batches of an epoch from a position on, each with its place."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        common: dict[str, Any] = {
            "num_workers": self._workers,
            "pin_memory": device_type() != "cpu",
            # Otherwise torch draws a seed for its workers from the generator of the program.
            "generator": torch.Generator(),
        }
        share = self.share_of(epoch)
        if self.length is None:
            stream = _IterableBatches(self._dataset, share, self._seed, epoch, start, self._collate)
            yield from DataLoader(stream, batch_size=None, **common)
            return
        order = order_of(self.length, self._seed, epoch, shuffles=self._shuffles)
        blocks, ahead = itertools.tee(share.blocks(start, self.length))
        places = ([(p, int(order[p % len(order)])) for p in block.places] for block in ahead)
        samples: Any = _SeededDataset(self._dataset, self._seed, epoch)
        loader = DataLoader(samples, batch_sampler=places, collate_fn=self._collate, **common)
        yield from zip(blocks, loader, strict=True)


class _SeededDataset:
    """A map-style dataset of which each sample is read with random numbers of its own."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset, self._seeds = dataset, (seed, epoch)
        inner = dataset
        while isinstance(inner, Subset):
            inner = inner.dataset
        self._reads_lists = hasattr(inner, "__getitems__")

    def __getitem__(self, sample: Sample) -> Any:
        place, index = sample
        _draw_from(*self._seeds, place)
        return self._dataset[index]

    def __getitems__(self, samples: Sequence[Sample]) -> list[Any]:
        if not self._reads_lists:
            return [self[sample] for sample in samples]
        _draw_from(*self._seeds, samples[0][0])
        found: list[Any] = self._dataset.__getitems__([index for _, index in samples])
        return found


class _IterableBatches(IterableDataset[Any]):
    """This rank's batches of an iterable dataset.

    Every worker reads the whole dataset and makes every `num_workers`-th batch, because an iterable
    cannot be entered in the middle.
    """

    def __init__(
        self,
        dataset: Any,
        share: Share,
        seed: int,
        epoch: int,
        start: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._dataset, self._share, self._seeds = dataset, share, (seed, epoch)
        self._start, self._collate = start, collate

    def __iter__(self) -> Iterator[tuple[StepSamples, Any]]:
        worker, share, start = get_worker_info(), self._share, self._start
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        samples = itertools.islice(self._numbered(), start, None)
        for turn in itertools.count():
            step = list(itertools.islice(samples, share.batch_size))
            if not step or (len(step) < share.batch_size and share.drops_last):
                return
            block = share.block(start, start + len(step))
            if turn % count == number:
                own = [step[(place - start) % len(step)] for place in block.places]
                yield block, self._collate(own)
            start = block.end

    def _numbered(self) -> Iterator[Any]:
        """Yield the samples; each is made with random numbers of its own."""
        _draw_from(*self._seeds, 0)
        samples = iter(self._dataset)
        for place in itertools.count():
            _draw_from(*self._seeds, place)
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample


def _draw_from(*numbers: int) -> None:
    """Let Python, NumPy and torch draw random numbers that follow from `numbers`."""
    (state,) = np.random.SeedSequence(numbers).generate_state(1)
    random.seed(int(state))
    np.random.seed(int(state))
    torch.default_generator.manual_seed(int(state))
