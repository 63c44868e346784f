"""Which samples a data rank reads, in which order: functions of seed, epoch and position alone.

An epoch puts all samples in an order that does not depend on the number of ranks. A step takes the
next `batch_size` samples of that order, and data rank i takes the i-th of as many equal blocks of
them. So a position is one number, the samples of the epoch that earlier steps took, and means the
same under any plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StepSamples(NamedTuple):
    """The samples of one step on one data rank.

    Attributes:
        places: Positions in the epoch's order.
        padded: How many places at the end only fill up a batch that is too short.
        end: Samples that the epoch's steps have taken after this one.
    """

    places: range
    padded: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """Divides the steps of an epoch between data ranks.

    Args:
        batch_size: Samples of one step on all data ranks: a multiple of `ranks * microbatches`.
        ranks: Number of data ranks.
        index: Number of this data rank.
        microbatches: Parts into which a rank cuts its samples of one step.
        drops_last: If True, a last batch with fewer samples is left out; else it is filled up.
    """

    batch_size: int
    ranks: int
    index: int
    microbatches: int
    drops_last: bool

    def block(self, start: int, end: int) -> StepSamples:
        """Return this rank's part of the step that takes the samples from `start` to `end`.

        A step of fewer samples than `batch_size` is filled up to the next number of samples that
        divides over ranks and microbatches. Places from `end` on are those that fill up.
        """
        unit = self.ranks * self.microbatches
        size = -(-(end - start) // unit) * self.microbatches
        first = start + self.index * size
        places = range(first, first + size)
        return StepSamples(places, min(size, max(0, places.stop - end)), end)

    def blocks(self, start: int, length: int) -> Iterator[StepSamples]:
        """Yield this rank's part of every step of an epoch of `length` samples, from `start` on."""
        while start < length:
            end = min(start + self.batch_size, length)
            if end - start < self.batch_size and self.drops_last:
                return
            yield self.block(start, end)
            start = end

    def divides(self, length: int | None) -> bool:
        """Return True if the last batch of `length` samples divides over ranks and microbatches."""
        return length is not None and not length % (self.ranks * self.microbatches)

    def num_steps(self, samples: int) -> int:
        """Return the number of steps that `samples` samples are enough for."""
        whole, rest = divmod(samples, self.batch_size)
        return whole + (0 if self.drops_last else rest > 0)


def order_of(length: int, seed: int, epoch: int, *, shuffles: bool) -> NDArray[np.int64] | range:
    """Return the index of the sample at each place of an epoch.

    The shuffled order is the same on every platform and under every version of NumPy, which
    promises that `SeedSequence` and `RandomState` keep their streams (NEP 19).
    """
    if not shuffles:
        return range(length)
    stream = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(stream).permutation(length).astype(np.int64)
