"""`dataloader`: the samples of each rank, in an order that no number of ranks changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate, get_worker_info

from meshplan.errors import ApplyError, Problem, StateError
from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.context.batch import sequence_of_rank
from meshplan.runtime.apply.loss.loss_weights import IGNORED, token_targets
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.digest import mark
from meshplan.runtime.base.mesh import device, device_type
from meshplan.runtime.train.sample_order import Share, StepSamples, order_of
from meshplan.runtime.watch.guard import guarded

_LABELS: Final = "labels"
"""Name of the targets in a batch that is a mapping, as Hugging Face's models call them."""

Sample = tuple[int, int]
"""(place in the epoch's order, index in the dataset)."""


@guarded("dataloader")
def dataloader(
    dataset: Any,
    model: nn.Module,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> StatefulLoader:
    """Return a loader of this rank's part of every batch of a dataset.

    Which samples a step takes depends on the dataset, `batch_size`, `seed` and the number of the
    epoch, and not on the number of ranks. Ranks along tp, pp and cp get the same samples. Each
    sample is read with the random numbers of its own place in the epoch, so that random
    augmentations are the same under any plan, with any number of workers and after a restart.

    Args:
        dataset: A map-style dataset (`__len__` and `__getitem__`), or an iterable one, which every
            rank reads as a whole in the same order. Its `set_epoch` is called, if it has one.
        model: The module that `parallelize` returned.
        batch_size: Samples of one optimizer step on all ranks; None for the plan's `batch`.
        shuffle: If True, each epoch has an order of its own, drawn from `seed` and its number.
        seed: Seed of orders and of the samples' random numbers.
        drop_last: If True, samples at the end of an epoch that do not fill a batch are left out of
            it. If False, the last batch is filled up with other samples, whose targets are replaced
            by -100, so that they count for nothing: the plan must state `loss: tokens`.
        num_workers: Number of processes that read samples.
        collate_fn: Makes a batch of a list of samples; None for torch's.

    Raises:
        ApplyError: The batch does not divide over data ranks and microbatches, the dataset has less
            than one batch, the last batch cannot be filled up, or ranks pass different arguments.
    """
    plan = applied(model).plan
    if seed < 0:
        raise ApplyError(Problem(f"seed is {seed}, but cannot be negative"))
    share = share_of(plan, batch_size, drop_last=drop_last)
    length = length_of(dataset)
    _check_length(dataset, length, share, plan, shuffles=shuffle)
    check_ranks({"dataset": length, "batch_size": share.batch_size, "shuffle": shuffle,
                  "seed": seed, "drop_last": drop_last})  # fmt: skip
    read = EpochReader(dataset, length, share, shuffle, seed, num_workers, collate_fn)
    return StatefulLoader(read, plan)


class StatefulLoader:
    """An iterable over this rank's batches, whose position is part of a training state.

    `for batch in loader` runs to the end of the epoch, from where the loader stands: at its
    beginning, where an earlier loop ended, or where `load_state_dict` put it. Pass the loader to
    `meshplan.save` and `meshplan.load` as `data`. A batch is what `collate_fn` makes, on this
    rank's device; under cp it has this rank's part of the sequence.

    Attributes:
        epoch: Number of the epoch of the next batch, from 0.
        samples: Samples of that epoch that earlier batches of all ranks together took.

    `dataloader` makes it.
    """

    def __init__(self, read: EpochReader, plan: Plan) -> None:
        self.epoch = 0
        self.samples = 0
        self._read, self._plan = read, plan
        self._loops = 0

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        length = self._read.length
        if length is None:
            raise TypeError("the number of batches of an iterable dataset is not known")
        return self._read.share.num_steps(length)

    def __iter__(self) -> Iterator[Any]:
        self._loops += 1
        loop, begun_at = self._loops, self.samples
        is_empty = yield from self._rest_of_epoch(loop)
        if is_empty and begun_at:
            # The state was saved behind the last batch of an iterable dataset, before its end was
            # known.
            is_empty = yield from self._rest_of_epoch(loop)
        if is_empty:
            what = f"the dataset gave less than one batch of {self._read.share.batch_size} samples"
            raise ApplyError(
                Problem(what, fix="use a smaller batch_size; or let __iter__ begin anew")
            )

    def _rest_of_epoch(self, loop: int) -> Generator[Any, None, bool]:
        """Yield the batches up to the end of the epoch; return True if there was none."""
        epoch, is_empty = self.epoch, True
        batches = self._read.batches(epoch, self.samples)
        while True:
            with guarded(), randomness_kept():
                block, batch = next(batches, (None, None))
            if block is None:
                break
            is_empty = False
            if loop != self._loops:
                raise ApplyError(
                    Problem(
                        "the loader was moved while a loop over it ran",
                        fix="call load before the loop, and run one loop over a loader at a time",
                    )
                )
            self._pass(epoch, block.end)
            yield self._placed(batch, block.padded)
        if loop == self._loops and self.epoch == epoch:
            self.epoch, self.samples = epoch + 1, 0
        return is_empty

    def _pass(self, epoch: int, end: int) -> None:
        """Move behind a step, into the next epoch if it was the last one of its own."""
        length, share = self._read.length, self._read.share
        self.epoch, self.samples = epoch, end
        if length is not None and not share.num_steps(length - end):
            self.epoch, self.samples = epoch + 1, 0

    def _placed(self, batch: Any, padded: int) -> Any:
        """Return a batch on this rank's device, under cp with its part of the sequence."""
        if self._read.pads:
            batch = _without_targets(batch, padded)
        return on_this_rank(batch, self._plan)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what gives it its meaning, as JSON can express it."""
        return {"epoch": self.epoch, "samples": self.samples, **self._read.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, on any number of ranks and with any batch size.

        Raises:
            StateError: The position is one in another dataset or another order.
        """
        epoch, samples = self.check_state(state)
        self._loops += 1
        self.epoch, self.samples = epoch, samples
        if self._read.length is not None:
            self._pass(epoch, samples)

    def check_state(self, state: Any) -> tuple[int, int]:
        """Return the (epoch, samples) of a state, and raise what `load_state_dict` raises."""
        own = self._read.identity()
        known = {"epoch", "samples", *own}
        if not isinstance(state, Mapping) or state.keys() != known:
            what = "the state of the data was not saved by a loader of meshplan.dataloader"
            raise StateError(Problem(what, fix="pass the loader to save and load as data="))
        for key, value in own.items():
            if state[key] != value:
                raise StateError(
                    Problem(
                        f"the state of the data has {key} {state[key]}, but the loader {value}",
                        fix="make the loader with the dataset, shuffle and seed it was saved with, "
                        "or load without data=",
                    )
                )
        counts = state["epoch"], state["samples"]
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in counts):
            raise StateError(Problem(f"the state of the data has no position: {counts}"))
        return counts


class EpochReader:
    """Reads this rank's samples of an epoch, in this process or in workers.

    Args:
        dataset: The dataset.
        length: Its number of samples; None for an iterable dataset.
        share: The samples of each step on this rank.
        shuffles: If True, each epoch has an order of its own.
        seed: Seed of orders and of the samples' random numbers.
        num_workers: Number of processes that read samples.
        collate: Makes a batch of a list of samples; None for torch's function.
    """

    def __init__(
        self,
        dataset: Any,
        length: int | None,
        share: Share,
        shuffles: bool,
        seed: int,
        num_workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.length, self.share = length, share
        self._dataset, self._shuffles, self._seed = dataset, shuffles, seed
        self._workers, self._collate = num_workers, collate or default_collate
        self.pads = not share.drops_last and not share.divides(length)

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
        if self.length is None:
            stream = _IterableBatches(
                self._dataset, self.share, self._seed, epoch, start, self._collate
            )
            yield from DataLoader(stream, batch_size=None, **common)
            return
        order = order_of(self.length, self._seed, epoch, shuffles=self._shuffles)
        blocks, ahead = itertools.tee(self.share.blocks(start, self.length))
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


@contextmanager
def randomness_kept() -> Iterator[None]:
    """Put the random number generators of this process back as they were."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def on_this_rank(batch: Any, plan: Plan) -> Any:
    """Return the samples of a data rank on its device, under cp with its part of the sequence."""
    batch, whole = sequence_of_rank(plan, batch)
    where = device()
    is_split = whole is not None or plan.num_data_ranks > 1

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to(where, non_blocking=True)
        return mark(own, whole) if is_split else own

    return mapped(batch, placed)


def _without_targets(batch: Any, padded: int) -> Any:
    """Return a batch in which the targets of the last `padded` samples are -100.

    Raises:
        ApplyError: The batch shows no targets that can be ignored.
    """
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    targets = batch[1] if is_pair else batch.get(_LABELS) if isinstance(batch, Mapping) else None
    if not token_targets(targets):
        raise ApplyError(
            Problem(
                "the last batch of an epoch is filled up with samples that must not count, but the "
                "batch has no class indices that could be replaced by -100",
                fix="let samples be (inputs, targets), or mappings with labels, whose targets are "
                "integers; or leave drop_last as it is",
            )
        )
    replaced = {id(tensor) for tensor in token_targets(targets)}

    def ignored(tensor: torch.Tensor) -> torch.Tensor:
        if not padded or id(tensor) not in replaced:
            return tensor
        own = tensor.clone()  # `collate_fn` may have returned a view of the dataset's memory.
        own[len(own) - padded :] = IGNORED
        return own

    return mapped(batch, ignored)


def share_of(plan: Plan, batch_size: int | None, *, drop_last: bool) -> Share:
    """Return the samples of each step on this rank."""
    ranks, microbatches = plan.num_data_ranks, plan.num_microbatches
    unit = ranks * microbatches
    origin = plan.spec.origin("batch")
    if batch_size is None:
        if plan.micro is None:
            fix = f"pass batch_size, a multiple of {unit}, or add batch: {{micro: 1}} to the plan"
            raise ApplyError(Problem("the plan does not state a batch size", origin, fix))
        batch_size = plan.micro * unit
    if batch_size < 1 or batch_size % unit:
        what = f"batch_size {batch_size} does not divide over {ranks} data ranks"
        more = f" with {microbatches} microbatches each" if microbatches > 1 else ""
        raise ApplyError(Problem(what + more, origin, f"use a multiple of {unit}"))
    index = plan.mesh.index(dist.get_rank(), DATA_AXES)
    return Share(batch_size, ranks, index, microbatches, drop_last)


def length_of(dataset: Any) -> int | None:
    """Return the number of samples of a dataset; None for an iterable one."""
    if isinstance(dataset, IterableDataset):
        return None
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ApplyError(
            Problem(
                f"a {type(dataset).__name__} is no dataset: it needs __len__ and __getitem__",
                fix="let it be a torch.utils.data.IterableDataset if it can only be iterated over",
            )
        )
    num_samples: int = len(dataset)
    return num_samples


def _check_length(
    dataset: Any, length: int | None, share: Share, plan: Plan, *, shuffles: bool
) -> None:
    """Raise if the dataset has not one batch, or its last one can neither be cut nor filled up."""
    if length is None and shuffles:
        what = f"shuffle needs the length of the dataset, but {type(dataset).__name__} is iterable"
        raise ApplyError(Problem(what, fix="shuffle in the dataset, by the epoch of set_epoch"))
    if length is not None and not share.num_steps(length):
        rest = "" if share.drops_last else " at all"
        what = f"the dataset has {length} samples, and no batch of {share.batch_size}{rest}"
        fix = "use a smaller batch_size, or fewer data ranks"
        raise ApplyError(Problem(what, fix=fix))
    if share.drops_last or share.divides(length) or plan.spec.loss == "tokens":
        return
    rest = "" if length is None else f" of {length % share.batch_size} samples"
    raise ApplyError(
        Problem(
            f"the last batch{rest} does not divide over {share.ranks} data ranks with "
            f"{share.microbatches} microbatches each, and cannot be filled up: a mean over samples "
            "would count those that fill it up",
            plan.spec.origin("loss"),
            "leave drop_last as it is, or state loss: tokens in the plan",
        )
    )


def check_ranks(facts: Mapping[str, Any]) -> None:
    """Raise on every rank if ranks make loaders of different datasets or orders."""
    if dist.get_world_size() == 1:
        return
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(facts))
    for rank, other in enumerate(every):
        for key, value in other.items():
            if value != every[0][key]:
                what = "samples in its dataset" if key == "dataset" else key
                raise ApplyError(
                    Problem(
                        f"rank {rank} has {what} {value}, but rank 0 {every[0][key]}",
                        fix="make the loader from the same arguments on every rank",
                    )
                )
