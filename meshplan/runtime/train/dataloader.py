"""`dataloader`: the samples of each rank, in an order that no number of ranks changes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

from meshplan.errors import ApplyError, Problem, StateError
from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.context.batch import sequence_of_rank
from meshplan.runtime.apply.loss.loss_weights import IGNORED, token_targets
from meshplan.runtime.apply.wrap import applied, set_accumulate
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.digest import mark
from meshplan.runtime.base.mesh import device, gathered
from meshplan.runtime.trace.side_effects import randomness_kept
from meshplan.runtime.train.epoch_reader import EpochReader
from meshplan.runtime.train.fast_dev_run import DevBatches, num_dev_batches
from meshplan.runtime.train.sample_order import Share
from meshplan.runtime.watch.guard import guarded

_LABELS: Final = "labels"
"""Name of the targets in a batch that is a mapping, as Hugging Face's models call them."""


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
    accumulate: Mapping[int, int] | None = None,
) -> StatefulLoader:
    """Return a loader of this rank's part of every batch of a dataset.

    Which samples a step takes depends on the dataset, `batch_size`, `seed` and the number of the
    epoch, and not on the number of ranks. Ranks along tp, pp and cp get the same samples. Each
    sample is read with the random numbers of its own place in the epoch, so that random
    augmentations are the same under any plan, with any number of workers and after a restart. A
    dataset that reads lists (`__getitems__`) draws once for each list, which depends on the ranks.

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
        accumulate: {epoch: microbatches over which each step accumulates gradients from this epoch
            on}, such as `{0: 8, 4: 4, 8: 1}`, in place of the plan's `batch.accumulate`.
            `batch_size` is for the plan's number; a microbatch has as many samples under any.

    Raises:
        ApplyError: The batch does not divide over data ranks and microbatches, the dataset has less
            than one batch, the last batch cannot be filled up, or ranks pass different arguments.
    """
    plan = applied(model).given
    if seed < 0:
        raise ApplyError(Problem(f"seed is {seed}, but cannot be negative"))
    share = share_of_rank(plan, batch_size, drop_last=drop_last)
    length = length_of(dataset)
    shares = _shares(share, plan, accumulate or {})
    for each in shares.values():
        _check_length(dataset, length, each, plan, shuffles=shuffle)
    check_ranks({"dataset": length, "batch_size": share.batch_size, "shuffle": shuffle,
                  "seed": seed, "drop_last": drop_last, "accumulate": accumulate})  # fmt: skip
    read = EpochReader(dataset, length, shares, shuffle, seed, num_workers, collate_fn)
    return StatefulLoader(read, model)


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

    def __init__(self, read: EpochReader, model: nn.Module) -> None:
        self.epoch = 0
        self.samples = 0
        self._read, self._plan, self._model = read, applied(model).given, weakref.ref(model)
        self._loops = 0
        self._dev = DevBatches()

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch in which the loader stands."""
        length = self._read.length
        if length is None:
            raise TypeError("the number of batches of an iterable dataset is not known")
        num_batches = self._read.share_of(self.epoch).num_steps(length)
        return min(num_batches, num_dev_batches() or num_batches)

    def __iter__(self) -> Iterator[Any]:
        most = self._dev.begin()
        if most is None:
            yield from self._whole_loop()
            return
        before, epoch = self._num_steps(), self.epoch
        try:
            yield from itertools.islice(self._whole_loop(), most)
            self.epoch, self.samples = epoch + 1, 0
        finally:
            self._dev.end(has_trained=self._num_steps() != before)

    def _num_steps(self) -> int:
        """Return the number of steps of `train_step` that the model has taken."""
        model = self._model()
        return 0 if model is None else applied(model).history.steps

    def _whole_loop(self) -> Iterator[Any]:
        self._loops += 1
        loop, begun_at = self._loops, self.samples
        is_empty = yield from self._rest_of_epoch(loop)
        if is_empty and begun_at:
            # The state was saved behind the last batch of an iterable dataset, before its end was
            # known.
            is_empty = yield from self._rest_of_epoch(loop)
        if is_empty:
            size = self._read.share_of(self.epoch).batch_size
            what = f"the dataset gave less than one batch of {size} samples"
            fix = (
                "use a smaller batch_size; or make __iter__ of the dataset start from the beginning"
            )
            raise ApplyError(Problem(what, fix=fix))

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
            model = self._model()
            if model is not None:  # Another loader may have set another number.
                unit = self._plan.num_microbatches // self._plan.accumulate
                set_accumulate(model, self._read.share_of(epoch).microbatches // unit)
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
        length, share = self._read.length, self._read.share_of(epoch)
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
            what = f"the state of the data has an invalid position (epoch, samples): {counts}"
            raise StateError(Problem(what, fix="load a state that the loader saved"))
        return counts


def on_this_rank(batch: Any, plan: Plan) -> Any:
    """Return the samples of a data rank on its device, under cp with its part of the sequence."""
    batch, whole = sequence_of_rank(plan, batch)
    where = device()
    is_split = whole is not None or plan.num_data_ranks > 1

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to(where, non_blocking=True)
        return mark(own, whole) if is_split else own

    return mapped(batch, placed)


def targets_of(batch: Any) -> Any:
    """Return the targets in a batch: the second of a pair, or `labels` of a mapping; else None."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[1]
    return batch.get(_LABELS) if isinstance(batch, Mapping) else None


def _without_targets(batch: Any, padded: int) -> Any:
    """Return a batch in which the targets of the last `padded` samples are -100.

    Raises:
        ApplyError: The batch shows no targets that can be ignored.
    """
    targets = targets_of(batch)
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


def share_of_rank(plan: Plan, batch_size: int | None, *, drop_last: bool) -> Share:
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


def _shares(share: Share, plan: Plan, accumulate: Mapping[int, int]) -> dict[int, Share]:
    """Return {epoch: the samples of each step from this epoch on}.

    Raises:
        ApplyError: An epoch or a number of microbatches is out of range.
    """
    for epoch, count in accumulate.items():
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ApplyError(Problem(f"accumulate names the epoch {epoch!r}", fix="use 0, 1, ..."))
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            what = f"accumulate has {count!r} microbatches from epoch {epoch} on"
            raise ApplyError(Problem(what, fix="use a number from 1"))
    samples = share.batch_size // plan.accumulate
    others = share.microbatches // plan.accumulate
    changed = {
        epoch: replace(share, batch_size=samples * count, microbatches=others * count)
        for epoch, count in accumulate.items()
    }
    return {0: share, **changed}


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
    every = gathered(dict(facts))
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
