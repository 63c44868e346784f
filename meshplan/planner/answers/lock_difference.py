"""Compare two locks by their contents alone, if a plan file is missing or was changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from meshplan.planner.answers.difference import Differs, DiffSide, Figure, PlanDifference
from meshplan.planner.answers.lock_words import source_beside
from meshplan.planner.lock.changes import fields
from meshplan.planner.lock.lock import Lock, read, spec_hash
from meshplan.spec.reader import load_spec

_MARK: Final = ".lock."
_FIGURES: Final = ("expected.", "memory.")
_SHOWN: Final = 19
"""Characters of a hash that are shown: "sha256:" and twelve digits."""


def locks_alone(old: str, new: str) -> tuple[Lock, Lock] | None:
    """Return two locks if at least one does not apply to the plan file next to it.

    Args:
        old: Path of the first lock.
        new: Path of the second lock.

    Returns:
        (the first lock, the second lock); None if both apply, or if a path is not that of a lock.

    Raises:
        SpecError: A lock cannot be read.
    """
    if not all(_MARK in Path(name).name for name in (old, new)):
        return None
    one, two = read(Path(old)), read(Path(new))
    if one is None or two is None or (_holds(one) and _holds(two)):
        return None
    return one, two


def _holds(lock: Lock) -> bool:
    """Return True if a lock's plan file is next to it and states what the lock was made for."""
    source = source_beside(lock.path)
    return source is not None and spec_hash(load_spec(source)) == lock.spec


def difference_of_locks(old: Lock, new: Lock) -> PlanDifference:
    """Compare two locks by their contents; the result has no differences between blocks."""
    before, after = dict(_fields(old.content)), dict(_fields(new.content))
    return PlanDifference(
        old=_side(old),
        new=_side(new),
        fields=tuple(_differ(before, after)),
        blocks=(),
        placements=tuple(_differ(_tensors(old), _tensors(new))),
    )


def _differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Differs]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Differs(name, before.get(name), after.get(name))


def _fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of a lock's choices and inputs; hashes of inputs are shortened."""
    for path, value in fields(content):
        if path in ("inputs.plan", "inputs.model"):
            yield path, str(value)[:_SHOWN]
        elif not path.startswith(_FIGURES):
            yield path, value


def _tensors(lock: Lock) -> Mapping[str, str]:
    found: Mapping[str, str] = lock.content.get("tensors", {})
    return found


def _side(lock: Lock) -> DiffSide:
    """Return one side of the comparison: the figures that a lock states for its plan."""
    stated = dict(fields(lock.content))
    mesh = lock.chosen.get("mesh", {})
    sizes = [size for size in mesh.values() if isinstance(size, int)]  # Skip ep: it is borrowed.
    rate = stated["expected.tokens_per_s_per_gpu"]

    def figure(value: float | None) -> Figure:
        return Figure(value, "" if value is not None else "the lock does not state this figure")

    return DiffSide(
        name=str(lock.path),
        plan=None,
        step_s=figure(stated["expected.step_s"]),
        tokens_per_s=figure(rate * math.prod(sizes) if rate else None),
        peak_bytes=figure(stated["memory.high_bytes"]),
        traffic_bytes=Figure(None, "a lock does not state the bytes sent"),
    )
