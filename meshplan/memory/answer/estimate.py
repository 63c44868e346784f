"""What a step takes of every GPU, at its worst, and whether that fits.

Reads event logs of the ranks that differ. Refuses to know where they come from
(`runtime.estimate.estimate`) and what would make them smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from meshplan.memory.answer.hosts import Host
from meshplan.memory.answer.reserved import PeakLocation, RankSummary
from meshplan.memory.log.device_overheads import Band
from meshplan.memory.log.events import Term
from meshplan.shown import view
from meshplan.units import format_bytes, format_gib

RESERVED_ERROR: Final = 0.02
"""How much more than predicted the allocator may reserve, as a share. [Empirical]: of six published
runs on H100 (torchtitan, FSDP2) the worst reserved 1.1 % more than predicted from a trace."""


class Tier(StrEnum):
    """How an answer was found."""

    REPLAY = "1"
    FEW_BLOCKS = "2"
    WHOLE = "3"


class PeakBytes(NamedTuple):
    """The most at once, by who counts; each is at least the one before, but for the driver's.

    Attributes:
        requested_bytes: What tensors ask for.
        allocated_bytes: As `torch.cuda.max_memory_allocated`.
        reserved_bytes: As `torch.cuda.max_memory_reserved`.
        driver_bytes: What lies outside of torch's allocator, as expected.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    driver_bytes: int

    @property
    def total_bytes(self) -> int:
        """What `nvidia-smi` would show."""
        return self.reserved_bytes + self.driver_bytes


@dataclass(frozen=True, slots=True)
class ModuleBytes:
    """What is of one module at the peak, or of modules that are alike.

    Args:
        module: Its fqn, with a star for the number of a block that repeats; "" for none.
        count: How many modules that are.
        terms: What their bytes are; they add up.
    """

    module: str
    count: int
    terms: Mapping[Term, int]

    @property
    def num_bytes(self) -> int:
        """Of all terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that are alike.

    Args:
        ranks: In order.
        stages: Of the pipeline, that they hold; () without one.
        peak: What each of them needs.
        band: The least and the most that it may really be, the driver's bytes included.
        at: Of the requested bytes.
        terms: What the requested bytes are at the peak; they add up.
        fits: Whether the upper end of the band does; None without a limit.
        host_bytes: What its tensors hold in the host's memory at the most, beside all that.
        packed_bytes: Where it does not, of the worst group: what would be reserved with expandable
            segments.
        modules: The requested bytes at the peak once more, by module, those with most first; empty
            where nobody asked. They add up to the peak too.
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


@dataclass(frozen=True, slots=True)
class ReconcileStep:
    """One step of a reconciliation.

    Args:
        name: What changes.
        delta_bytes: By how much.
        total_bytes: What it has become.
        why: The reason.
    """

    name: str
    delta_bytes: int
    total_bytes: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A single change to the plan, and what became of it.

    Args:
        change: As words.
        setting: As it would stand in the plan; "" where it is none of the plan's.
        total_bytes: The upper end of the band of the worst ranks.
        fits: Whether that is below the limit.
    """

    change: str
    setting: str
    total_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The answer to "does it fit?".

    Args:
        groups: Every rank is in one.
        tier: How it was found.
        certified: How that is known to be right.
        limit_bytes: What a GPU may hold; None where nothing says.
        reconciliation: From the textbook's figure to the total of the worst group.
        assumed: What the plan does not say, and what was taken for it: (what, value).
        fixes: What would fit, cheapest first; empty where it fits or nobody asked.
        bound: Why this is an upper bound and not the figure itself; "" where it is the figure.
        notes: What a reader has to know.
        host: The host of the node whose ranks hold most there; None where nothing lies on any.
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

    def _repr_html_(self) -> str:
        html: str = view("memory_html")(self)
        return html

    @property
    def worst(self) -> RankGroup:
        """The group whose band ends highest; of several, the first."""
        return max(self.groups, key=lambda group: group.band[1])

    @property
    def size(self) -> str:
        """The need of the worst ranks, as every verb says it; see `size_in_words`."""
        worst = self.worst
        return size_in_words(
            worst.band[1], self.limit_bytes, None if self.bound else worst.peak.total_bytes
        )

    @property
    def fits(self) -> bool | None:
        """Whether all ranks do, and hosts whose memory the plan states; None without a limit."""
        if self.host is not None and self.host.is_over and self.host.is_stated:
            return False
        return None if self.limit_bytes is None else all(group.fits for group in self.groups)


def size_in_words(high_bytes: int, limit_bytes: int | None, expected_bytes: int | None) -> str:
    """Say what a GPU holds of what it may: THE words for it in every verb.

    Args:
        high_bytes: The upper end of the band, by which "fits" is said.
        limit_bytes: What the GPU may hold; None where nothing says.
        expected_bytes: None where only an upper bound is known.

    >>> size_in_words(84_503_000_000, 84_944_000_000, 79_994_000_000)
    'expected 74.5, at most 78.7, of 79.1 GiB'
    """
    sizes = [("expected", expected_bytes), ("at most", high_bytes), ("of", limit_bytes)]
    known = [(word, format_gib(size)) for word, size in sizes if size is not None]
    return ", ".join(f"{word} {size.removesuffix(' GiB')}" for word, size in known) + " GiB"


def left_in_words(high_bytes: int, limit_bytes: int | None) -> str:
    """Say what is left of the limit, or how much is over it; "" where there is no limit."""
    if limit_bytes is None:
        return ""
    left = limit_bytes - high_bytes
    return f"{format_bytes(left)} left" if left >= 0 else f"OVER by {format_bytes(-left)}"


def margin(reserved_bytes: int) -> int:
    """The most that the allocator may reserve where so much is predicted."""
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
    """What ranks need of which this was told.

    Args:
        driver: What lies outside of torch's allocator.
        limit_bytes: What the GPU may hold; None where nothing says.
        error: How far the log may be from the truth, as a share.
        least: What is allocated at the least where the log is an upper bound.
    """
    found = figures.reserve
    peak = PeakBytes(
        found.requested_bytes, found.allocated_bytes, found.reserved_bytes, driver.expected
    )
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
