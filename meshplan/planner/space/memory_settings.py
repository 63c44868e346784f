"""Settings that make room in a GPU's memory at hardly any cost: parts of the loss, the allocator.

The parts are an axis of the grid. The allocator is none: it changes no figure but how much is
reserved for the same events, sometimes for the better and sometimes not, so each candidate is
measured with whatever allocator the plan leaves open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from meshplan.spec.spec import AUTO, Allocator, Spec

_CHUNKS: Final = (1, 2, 8, 32)
"""Numbers between these save hardly more, or take hardly less; of more parts each reads the head's
weight for few tokens."""
_ALLOCATORS: Final[tuple[Allocator, ...]] = ("default", "expandable")
"""The plainer one first."""
OFFERED: Final = {
    "loss_parallel": (True, False),
    "loss_chunks": _CHUNKS,
    "allocator": _ALLOCATORS,
}
"""Values that the planner tries where the plan does not state a key, by key."""


def chunks_of(
    spec: Spec, refuses: Callable[[Spec], str], trial: Spec, *, is_traced: bool
) -> tuple[tuple[int, ...], str]:
    """(numbers of parts of the loss that a plan leaves open, why it is one alone or "").

    Args:
        refuses: Why a trial cannot be, "" if it can be.
        trial: Of the spec.
        is_traced: Whether the model is known by its traces, which have the loss as it is stated.
    """
    if spec.loss_chunks != AUTO and "loss_chunks" in spec.origins:
        assert isinstance(spec.loss_chunks, int)
        return (spec.loss_chunks,), ""
    if is_traced:
        return _CHUNKS[:1], "a live model is traced with the loss as the plan states it"
    why = refuses(replace(trial, loss_chunks=_CHUNKS[1]))
    return (_CHUNKS[:1] if why else _CHUNKS), why


def allocators_of(spec: Spec) -> tuple[Allocator, ...]:
    """Allocators that a plan leaves open, the plainer one first."""
    if spec.allocator != AUTO and "allocator" in spec.origins:
        return (spec.allocator,)
    return _ALLOCATORS


def memory_setting_words(spec: Spec, loss_chunks: int, allocator: Allocator) -> dict[str, Any]:
    """Return what the plan file would have to say, by path; {} where it says so already."""
    chosen = {"loss_chunks": loss_chunks, "allocator": allocator}
    return {path: value for path, value in chosen.items() if getattr(spec, path) != value}
