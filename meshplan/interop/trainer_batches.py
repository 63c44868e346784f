"""Batches of a Trainer under a plan, and the samples that only fill up the last one.

accelerate gives each data rank as many samples in the last batch as in the others: it repeats
some from the beginning. In one process the last batch is smaller instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshplan.errors import ApplyError, Problem
from meshplan.interop.trainer_loss import cut_rows
from meshplan.runtime.apply.loss.loss_weights import IGNORED


def prepared(loader: Any, accelerator: Any, ranks: int, index: int) -> Any:
    """Let accelerate split the batches of a loader over the data ranks only.

    Args:
        loader: The DataLoader of the Trainer.
        accelerator: Its Accelerator.
        ranks: Number of data ranks.
        index: This one among them.
    """
    from accelerate.data_loader import prepare_data_loader
    from transformers.trainer_utils import seed_worker

    from meshplan.interop.trainer_stream import keep_last

    if getattr(loader.worker_init_fn, "func", None) is seed_worker:
        # Workers of ranks along tp and pp draw the same augmentations.
        seeding: Any = seed_worker
        loader.worker_init_fn = partial(seeding, num_workers=loader.num_workers, rank=index)
    made = prepare_data_loader(
        loader, accelerator.device, num_processes=ranks, process_index=index,
        split_batches=accelerator.split_batches, put_on_device=True,
        rng_types=accelerator.rng_types.copy(), dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
    )  # fmt: skip
    keep_last(made)
    return made


@dataclass(frozen=True)
class Rest:
    """The last batch of a loader, if it is filled up.

    Args:
        left: Its samples on all data ranks that are not repeated ones.
        size: The samples of each data rank, repeated ones included.
        ranks: Number of data ranks.
        index: This one among them.
    """

    left: int
    size: int
    ranks: int
    index: int

    @property
    def own(self) -> int:
        """Number of samples that count on this rank."""
        return min(self.size, max(0, self.left - self.index * self.size))

    @property
    def ranks_with_samples(self) -> int:
        """Number of data ranks that have samples that count; they come first."""
        return -(-self.left // self.size)


def rest_of(loader: Any, ranks: int, index: int) -> Rest | None:
    """Return what is known of a loader's last batch; None if it is full.

    Args:
        loader: A loader that accelerate has prepared for the data ranks, at its last batch.
        ranks: Number of data ranks.
        index: This one among them.
    """
    drawn, size = _drawn(loader)
    left = drawn % (size * ranks) if size and ranks > 1 else 0
    return Rest(left, size, ranks, index) if left else None


def smaller_batch(loader: Any) -> int | None:
    """Return the number of samples of the last batch of one data rank; None if it is full."""
    drawn, size = _drawn(loader)
    return (drawn % size or None) if size else None


def _drawn(loader: Any) -> tuple[int, int]:
    """Return how many samples an epoch has on all ranks, and a batch of one; 0 if not known."""
    dataset, batches = loader.dataset, loader.batch_sampler
    count = getattr(dataset, "count", None)
    if isinstance(count, torch.Tensor):
        # Several workers read other parts of the dataset each, and each fills up its own.
        is_known = loader.num_workers < 2 and not dataset.drop_last
        return int(count) if is_known else 0, dataset.batch_size
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    size = getattr(batches, "batch_size", None)
    # A sampler may draw more samples than there are, or fewer.
    is_known = size is not None and not batches.drop_last
    return len(getattr(batches, "sampler", dataset)) if is_known else 0, size or 0


@dataclass(frozen=True)
class LastBatch:
    """The last batch of an epoch, if it is filled up.

    Args:
        batch: The batch as the loop passes it on.
        own: The same with the samples that count on this rank; with all of them if none does.
        counted: The samples that count.
        share: The weight of their mean in the mean of all data ranks' means.
        rest: What is known of the batch.
    """

    batch: Any
    own: dict[str, Any]
    counted: dict[str, Any]
    share: float
    rest: Rest


def warn_of_repeated(rest: Rest, why: str) -> None:
    """Warn that samples which only fill up a batch are trained on."""
    repeated = rest.size * rest.ranks - rest.left
    what = f"the last batch of the epoch is filled up with {repeated} repeated samples, which are "
    fix = "say dataloader_drop_last=True, or choose batch sizes that divide the samples"
    warnings.warn(str(Problem(f"{what}trained on: {why}", fix=fix)), stacklevel=2)


def last_batch(batch: Any, rest: Rest, anew: Callable[[int], Any]) -> LastBatch | None:
    """Return a filled-up batch of this data rank; None if its samples cannot be told apart.

    Args:
        batch: The batch.
        rest: What is known of it.
        anew: Returns a batch of so many of its samples, the first ones; None if it cannot.
    """
    own, size = rest.own, rest.size
    if not isinstance(batch, Mapping):
        return None
    counted = cut_rows(batch, size, own)
    if counted is None:
        # A sample may be a pair of rows, or all samples one row.
        made = anew(max(own, 1))
        if made is None:
            return None
        counted = dict(made) if own else without_rows(batch)
    return LastBatch(
        batch, counted if own else dict(batch), counted, own * rest.ranks / rest.left, rest
    )


def without_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of no samples."""
    return {k: v[:0] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in batch.items()}


def without_labels(batch: Mapping[str, Any], own: int) -> dict[str, torch.Tensor]:
    """Return the labels of a batch by name, of which those after the first `own` do not count."""
    found = {name: batch.get(name) for name in ("labels", "shift_labels")}
    labels = {k: v.clone() for k, v in found.items() if isinstance(v, torch.Tensor) and v.ndim}
    for each in labels.values():
        each[own:] = IGNORED
    return labels


def evaluated(batch: Any, rest: Rest, anew: Callable[[int], Any]) -> tuple[Any, int, int]:
    """Return a filled-up batch of an evaluation with what counts, its rows, and those of all of it.

    Args:
        batch: The batch.
        rest: What is known of it.
        anew: Returns a batch of so many of its samples, the first ones; None if it cannot.

    Raises:
        ApplyError: The samples that count cannot be told from the others.
    """
    from transformers.trainer_pt_utils import find_batch_size

    own, size = rest.own, rest.size
    rows = find_batch_size(batch) or 0
    labels = without_labels(batch, own if rows == size else 0)
    cut = cut_rows(batch, size, own) if rows == size else None
    if cut is None and (made := anew(max(own, 1))) is not None:
        return (made, find_batch_size(made), rows) if own else ({**batch, **labels}, rows, rows)
    if rows != size:
        raise _filled_up(
            f"its {size} samples are in {rows} row{'s' if rows > 1 else ''}, so they cannot be "
            "told from those that fill it"
        )
    if cut is None and any(each.is_floating_point() for each in labels.values()):
        # A loss of classes ignores the label -100; one of numbers does not.
        raise _filled_up(
            "not all of its values have a row for each sample, and no value of float labels says "
            "that it does not count"
        )
    return ({**batch, **labels}, size, size) if cut is None or not own else (cut, own, size)


def _filled_up(why: str) -> ApplyError:
    """Return the error of a last batch whose samples cannot be told from those that fill it."""
    fix = "choose per_device_eval_batch_size so that all ranks together divide the samples"
    return ApplyError(Problem(f"the last batch of the evaluation is filled up, and {why}", fix=fix))


def in_one_order(sampler: Any, ranks: int) -> Any:
    """Return a sampler that groups samples by length as it does in one process."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if isinstance(sampler, LengthGroupedSampler):
        sampler.batch_size *= ranks
    return sampler


def collected(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """Yield so many batches, or those that there are."""
    for _ in range(number):
        try:
            yield next(batches)
        except StopIteration:
            return
