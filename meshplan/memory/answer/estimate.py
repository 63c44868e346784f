"""The estimate of a plan's memory: the bytes that a step needs on every GPU, and if they fit.

A `MemoryEstimate` combines summaries of the event logs of one rank of each class.
`runtime.estimate.estimate` and `memory.analytic.estimate` make these logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple, Self

from meshplan.memory.answer.hosts import Host
from meshplan.memory.answer.reserved import PeakLocation, RankSummary
from meshplan.memory.log.device_overheads import Band
from meshplan.memory.log.events import EventLog, Term
from meshplan.shown import shown, view
from meshplan.units import format_bytes, format_gib

RESERVED_ERROR: Final = 0.02
"""Fraction by which the allocator may reserve more than predicted. [Empirical]: on an H200 it
reserved at most 1.7 % more than predicted from a trace in 42 of 46 runs, and 2.9 to 5.9 % more in
four, of which two use workspaces whose size cuDNN chooses (docs/evidence/h200.json)."""


class Tier(StrEnum):
    """The method of an estimate.

    REPLAY composes the step by rules; WHOLE traces a step of the whole model on fake tensors.
    """

    REPLAY = "1"
    WHOLE = "3"

    @classmethod
    def asked(cls, number: int | None) -> Self | None:
        """Return the tier with this number; None for None.

        The former tier 2 traced a model with few of its blocks. Tier 1 yields the same bytes in
        less time, so 2 now stands for `WHOLE`.
        """
        return None if number is None else cls("3" if number == 2 else str(number))


class PeakBytes(NamedTuple):
    """Peak memory of one rank, as different tools count it.

    Attributes:
        requested_bytes: Bytes that tensors ask for.
        allocated_bytes: Bytes of the allocator's blocks, as `torch.cuda.max_memory_allocated`
            reports; at least `requested_bytes`.
        reserved_bytes: Bytes of the allocator's segments, as `torch.cuda.max_memory_reserved`
            reports; at least `allocated_bytes`.
        driver_bytes: Expected bytes outside of torch's allocator.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    driver_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that `nvidia-smi` would show."""
        return self.reserved_bytes + self.driver_bytes


@shown
@dataclass(frozen=True, slots=True)
class ModuleBytes:
    """Bytes at the peak that belong to one module, or to the same module of all repeated blocks.

    Args:
        module: Fqn of the module, with a star in place of the number of a repeated block; "" for
            storages of no module.
        count: Number of modules that share this name.
        terms: Bytes by category; they add up to `num_bytes`.
    """

    module: str
    count: int
    terms: Mapping[Term, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all categories."""
        return sum(self.terms.values())


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """A class of equal ranks and the memory that each of them needs.

    Args:
        ranks: The ranks, in ascending order.
        stages: Pipeline stages of each rank; () without a pipeline.
        peak: Peak memory of one rank.
        band: (lower end, upper end) of one rank's total bytes, driver memory included.
        at: When and where the requested bytes peak.
        terms: Requested bytes at the peak by category; they add up to `peak.requested_bytes`.
        fits: True if the upper end of the range is within the limit; None without a limit.
        host_bytes: Peak bytes of one rank's tensors in host memory, in addition to the device's.
        packed_bytes: Bytes that would be reserved with expandable segments. Only set for the worst
            group of a plan that does not fit, else None.
        modules: Requested bytes at the peak by module, largest first; they also add up to
            `peak.requested_bytes`. () if they were not asked for.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...] = ()
    peak: PeakBytes
    band: tuple[int, int]
    at: PeakLocation
    terms: Mapping[Term, int]
    fits: bool | None
    host_bytes: int = 0
    packed_bytes: int | None = None
    modules: tuple[ModuleBytes, ...] = ()


@shown
@dataclass(frozen=True, slots=True)
class ReconcileStep:
    """One step of the reconciliation of the textbook's figure with the estimate.

    Args:
        name: Name of the bytes that this step adds or subtracts.
        delta_bytes: Bytes by which the figure changes.
        total_bytes: The figure after this step, in bytes.
        why: The reason for the change; "" if none is given.
    """

    name: str
    delta_bytes: int
    total_bytes: int
    why: str = ""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change to the plan, or two together, and the effect.

    Args:
        change: The change in words.
        settings: The change as settings of plan.yaml, such as "strategy: full_shard".
        total_bytes: Upper end of the range of the worst ranks after the change, in bytes.
        fits: True if `total_bytes` is within the limit.
    """

    change: str
    settings: tuple[str, ...]
    total_bytes: int
    fits: bool

    @property
    def setting(self) -> str:
        """The settings in one line."""
        return "; ".join(self.settings)


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The answer to "does it fit?".

    Args:
        groups: The classes of equal ranks; every rank is in exactly one.
        tier: The tier of estimation that found the answer.
        certified: A sentence on how exact the figures are known to be.
        limit_bytes: Memory limit of one GPU in bytes; None if unknown.
        reconciliation: Steps from the textbook's figure to the total of the worst group.
        assumed: Assumptions about what the plan does not state, as (subject, assumption) pairs.
        fixes: Changes to the plan that would make it fit, cheapest first; () if the plan fits or if
            no fixes were requested.
        bound: A sentence that says why the figures are only an upper bound; "" if they are not.
        notes: Sentences to show to the reader.
        host: Host memory of the node whose ranks use the most; None if nothing is offloaded.
        log: The step of the first rank of `worst`, if a trace ran all of it; else None.
    """

    groups: tuple[RankGroup, ...]
    tier: Tier
    certified: str
    limit_bytes: int | None = None
    reconciliation: tuple[ReconcileStep, ...] = ()
    assumed: tuple[tuple[str, str], ...] = ()
    fixes: tuple[Fix, ...] = ()
    bound: str = ""
    notes: tuple[str, ...] = ()
    host: Host | None = None
    log: EventLog | None = field(default=None, repr=False, compare=False)

    def _repr_html_(self) -> str:
        html: str = view("memory_html")(self)
        return html

    @property
    def worst(self) -> RankGroup:
        """The group with the highest upper end of its range; the first one on a tie."""
        return max(self.groups, key=lambda group: group.band[1])

    @property
    def high_bytes(self) -> int:
        """Upper end of the largest peak in bytes, which decides whether the plan fits."""
        return self.worst.band[1]

    @property
    def size(self) -> str:
        """Memory of the worst ranks in words, from `size_in_words`."""
        expected_bytes = None if self.bound else self.worst.peak.total_bytes
        return size_in_words(self.high_bytes, self.limit_bytes, expected_bytes)

    @property
    def size_and_left(self) -> str:
        """The `size`, and the bytes left of the limit or over it."""
        left = left_in_words(self.high_bytes, self.limit_bytes)
        return self.size + (f": {left}" if left else "")

    @property
    def fits(self) -> bool | None:
        """True if all ranks are within the limit; None without a limit.

        Also False if the ranks of a node need more host memory than the plan states. An assumed
        capacity of the host is not checked.
        """
        if self.host is not None and self.host.is_over and self.host.is_stated:
            return False
        return None if self.limit_bytes is None else all(group.fits for group in self.groups)


def size_in_words(high_bytes: int, limit_bytes: int | None, expected_bytes: int | None) -> str:
    """Return how much of a GPU's memory is needed, in the words that all commands use.

    Args:
        high_bytes: Upper end of the range in bytes, which decides whether the plan fits.
        limit_bytes: Memory limit of the GPU in bytes; None if unknown.
        expected_bytes: Expected bytes; None if only an upper bound is known.

    >>> size_in_words(84_503_000_000, 84_944_000_000, 79_994_000_000)
    'expected 74.5, at most 78.7, of 79.1 GiB'
    """
    sizes = [("expected", expected_bytes), ("at most", high_bytes), ("of", limit_bytes)]
    known = [(word, format_gib(size)) for word, size in sizes if size is not None]
    return ", ".join(f"{word} {size.removesuffix(' GiB')}" for word, size in known) + " GiB"


def left_in_words(high_bytes: int, limit_bytes: int | None) -> str:
    """Return a phrase with the bytes left, or with the bytes over the limit; "" without a limit."""
    if limit_bytes is None:
        return ""
    left = limit_bytes - high_bytes
    return f"{format_bytes(left)} left" if left >= 0 else f"OVER by {format_bytes(-left)}"


def margin(reserved_bytes: int) -> int:
    """Return the maximum that the allocator may reserve if `reserved_bytes` are predicted."""
    return reserved_bytes + int(RESERVED_ERROR * reserved_bytes)


def group_of(
    figures: RankSummary,
    ranks: Sequence[int],
    *,
    driver: Band,
    limit_bytes: int | None,
    stages: Sequence[int] = (),
    error: float = 0.0,
    least: int | None = None,
) -> RankGroup:
    """Return the class of ranks whose summary is `figures`, with the range of its total bytes.

    Args:
        figures: Peak, categories and reserved bytes of one rank of the class.
        ranks: The ranks of the class, in ascending order.
        driver: Range of the bytes outside of torch's allocator.
        limit_bytes: Memory limit of one GPU in bytes; None if unknown.
        stages: Pipeline stages of each rank; () without a pipeline.
        error: Possible relative error of the figures.
        least: Lower bound on the allocated bytes if the figures are an upper bound; None if they
            are not.
    """
    found = figures.reserve
    peak = PeakBytes(
        found.requested_bytes, found.allocated_bytes, found.reserved_bytes, driver.expected
    )
    # The allocator reserves at least the allocated bytes, and at most the prediction with a margin.
    allocated = found.allocated_bytes if least is None else least
    low = int(allocated * (1 - error)) + driver.low
    high = int(margin(found.reserved_bytes) * (1 + error)) + driver.high
    fits = None if limit_bytes is None else high <= limit_bytes
    return RankGroup(
        ranks=tuple(ranks),
        stages=tuple(stages),
        peak=peak,
        band=(low, high),
        at=figures.at,
        terms=MappingProxyType(figures.terms),
        fits=fits,
        host_bytes=figures.host_bytes,
    )
