"""Counts of the work of tape ops, and their separation into costs per sample and fixed costs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import NamedTuple

from meshplan.cost.types import Sent, Tally


class WorkCounts(NamedTuple):
    """Work of some ops in forward or in backward, for a given number of samples.

    The fields are those of `Tally` and `Sent`, with bytes and FLOPs of all samples together.
    """

    kernels: float = 0.0
    flops: float = 0.0
    attention_flops: float = 0.0
    product_bytes: float = 0.0
    moved_bytes: float = 0.0
    weight_bytes: float = 0.0
    all_reduces: float = 0.0
    all_reduce_bytes: float = 0.0
    gathers: float = 0.0
    gather_bytes: float = 0.0
    all_to_alls: float = 0.0
    all_to_all_bytes: float = 0.0
    overlapped: tuple[tuple[float, float], ...] = ()

    def plus(self, other: WorkCounts) -> WorkCounts:
        """Return the sum of two counts, field by field."""
        numbers = map(operator.add, self[:-1], other[:-1])
        return WorkCounts._make((*numbers, self.overlapped + other.overlapped))


def summed(counts: Iterable[WorkCounts]) -> WorkCounts:
    """Return the sum of counts, field by field."""
    columns = list(zip(*counts, strict=True))
    if not columns:
        return WorkCounts()
    return WorkCounts._make((*map(sum, columns[:-1]), tuple(itertools.chain(*columns[-1]))))


def tally(one: WorkCounts, two: WorkCounts) -> Tally:
    """Return the work per sample and the fixed work, from counts for one sample and for two."""
    return Tally(
        kernels=one.kernels,
        flops=two.flops - one.flops,
        attention_flops=two.attention_flops - one.attention_flops,
        product_bytes=two.product_bytes - one.product_bytes,
        moved_bytes=two.moved_bytes - one.moved_bytes,
        weight_bytes=one.weight_bytes + 2 * one.moved_bytes - two.moved_bytes,
    )


def sent(one: WorkCounts, two: WorkCounts) -> Sent:
    """Return the communication of tp and ep per sample, from counts for one sample and for two."""
    return Sent(
        all_reduces=int(one.all_reduces),
        all_reduce_bytes=two.all_reduce_bytes - one.all_reduce_bytes,
        gathers=int(one.gathers),
        gather_bytes=two.gather_bytes - one.gather_bytes,
        overlapped=tuple(
            (bytes_two - bytes_one, flops_two - flops_one)
            for (bytes_one, flops_one), (bytes_two, flops_two) in zip(
                one.overlapped, two.overlapped, strict=True
            )
        ),
        all_to_alls=int(one.all_to_alls),
        all_to_all_bytes=two.all_to_all_bytes - one.all_to_all_bytes,
        all_to_all_once_bytes=2 * one.all_to_all_bytes - two.all_to_all_bytes,
    )
