"""Settings that save GPU memory at hardly any cost: the number of loss chunks, and the allocator.

The number of loss chunks is a field of the grid. The allocator setting is not: it only changes how
many bytes are reserved for the same allocations, and may raise or lower them. Each candidate is
therefore replayed with the allocator settings that the plan leaves open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from meshplan.spec.spec import AUTO, Allocator, Spec

_CHUNKS: Final = (1, 2, 8, 32)
"""Numbers of loss chunks to try. Other numbers up to 32 hardly differ from these in memory or time.
With still more chunks, each would read the head's weight for few tokens."""
_ALLOCATORS: Final[tuple[Allocator, ...]] = ("default", "expandable")
"""Allocator settings to try, the simpler one first."""
OFFERED: Final = {
    "loss_parallel": (True, False),
    "loss_chunks": _CHUNKS,
    "allocator": _ALLOCATORS,
}
"""{key: values that the planner tries if the plan does not state the key}."""


def chunks_of(
    spec: Spec, refuses: Callable[[Spec], str], trial: Spec, *, is_traced: bool
) -> tuple[tuple[int, ...], str]:
    """Return the numbers of loss chunks to try, and the reason why the model allows only one.

    The reason is "" if the model allows more, or if the plan states the number.

    Args:
        spec: The spec of the plan file.
        refuses: Returns the reason why a trial spec is not possible; "" if it is.
        trial: A trial spec, to which loss chunks are added.
        is_traced: If True, costs come from traces of a live model, with the loss as stated.
    """
    if spec.loss_chunks != AUTO and "loss_chunks" in spec.origins:
        assert isinstance(spec.loss_chunks, int)
        return (spec.loss_chunks,), ""
    if is_traced:
        return _CHUNKS[:1], "a live model is traced with the loss as the plan states it"
    why = refuses(replace(trial, loss_chunks=_CHUNKS[1]))
    return (_CHUNKS[:1] if why else _CHUNKS), why


def allocators_of(spec: Spec) -> tuple[Allocator, ...]:
    """Return the allocator settings that a plan leaves open, the simpler one first."""
    if spec.allocator != AUTO and "allocator" in spec.origins:
        return (spec.allocator,)
    return _ALLOCATORS


def memory_setting_words(spec: Spec, loss_chunks: int, allocator: Allocator) -> dict[str, Any]:
    """Return {path: value} statements that give the plan these settings; {} if it has them."""
    chosen = {"loss_chunks": loss_chunks, "allocator": allocator}
    return {path: value for path, value in chosen.items() if getattr(spec, path) != value}
