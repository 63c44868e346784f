"""Text helpers that several pictures use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshplan.model.graph import pattern_of
from meshplan.units import spans_of

_MOST_RUNS = 4


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as runs of consecutive numbers; many runs are shortened to a count and examples.

    >>> ranks_in_words([0]), ranks_in_words(range(8)), ranks_in_words([0, 1, 4, 5])
    ('rank 0', 'ranks 0–7', 'ranks 0–1, 4–5')
    >>> ranks_in_words(range(0, 4096, 2))
    '2,048 ranks (0, 2, …)'
    """
    runs = [f"{a:,}" if a == b else f"{a:,}–{b:,}" for a, b in spans_of(ranks)]
    if len(runs) > _MOST_RUNS:
        return f"{len(ranks):,} ranks ({', '.join(runs[:2])}, …)"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(runs)


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a number with its noun in singular or plural; `several` is an irregular plural.

    >>> counted(1, "rank"), counted(16384, "rank"), counted(2, "copy", "copies")
    ('1 rank', '16,384 ranks', '2 copies')
    """
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def at_in_words(at: Mapping[str, int], axes: Sequence[str]) -> list[str]:
    """Return coordinates as texts such as "tp 1", in the order of `axes`."""
    return [f"{axis} {at[axis]}" for axis in axes]


def in_short(reasons: Sequence[str]) -> str:
    """Join reasons; reasons that differ only in block numbers appear once.

    >>> in_short(["what 'layers.0.mlp' sends", "what 'layers.1.mlp' sends"])
    "what 'layers.*.mlp' sends"
    """
    return "; ".join(dict.fromkeys(pattern_of(reason) for reason in reasons))


def speed(bytes_per_s: float | None) -> str:
    """Return the speed of a link as text.

    >>> speed(450e9), speed(None)
    ('450 GB/s', 'speed not stated')
    """
    return "speed not stated" if bytes_per_s is None else f"{bytes_per_s / 1e9:,.3g} GB/s"


def time_scale(seconds: float) -> tuple[str, float]:
    """Return the unit of a scale that ends at `seconds`, and how many of it are a second.

    >>> time_scale(4.2), time_scale(0.0072)
    (('seconds', 1.0), ('milliseconds', 1000.0))
    """
    if seconds >= 1.0:
        return "seconds", 1.0
    return ("milliseconds", 1e3) if seconds >= 1e-3 else ("microseconds", 1e6)
