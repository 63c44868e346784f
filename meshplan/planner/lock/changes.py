"""List the differences between two locks: the new answer and the lock that it replaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshplan.shown import shown

_ENOUGH: Final = 1e-3
"""Relative change of a figure up to which it counts as unchanged."""
EXPECTED: Final = ("step_s", "tokens_per_s_per_gpu", "mfu")
"""Names of the figures in a lock's `expected` that are compared."""


@shown
@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that differs between two locks.

    Args:
        field: Path of the field; for a choice its path in plan.yaml, for others the path in the
            lock.
        old: Value in the old lock; None if it has none.
        new: Value in the new lock; None if it has none.
    """

    field: str
    old: Any
    new: Any


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Return the fields that differ between two locks: inputs, choices, figures.

    Figures differ if they change by more than a tenth of a per cent. The layouts in a lock are not
    compared, since the choices determine them.

    Args:
        old: Contents of the old lock.
        new: Contents of the new lock.
    """
    before, after = dict(fields(old)), dict(fields(new))
    return tuple(
        FieldChange(field, before.get(field), after.get(field))
        for field in dict.fromkeys((*after, *before))
        if not _same(field, before.get(field), after.get(field))
    )


def fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the fields of a lock that are compared."""
    for name in ("plan", "free", "model", "profile", "profile_file"):
        yield f"inputs.{name}", content["inputs"].get(name)
    for path, value in content["chosen"].items():
        if path == "mesh" and isinstance(value, Mapping):
            yield from ((f"mesh.{axis}", size) for axis, size in value.items())
        else:
            yield path, value
    for name in EXPECTED:
        yield f"expected.{name}", content["expected"].get(name)
    high = (group.get("high_bytes", 0) for group in content["memory"])
    yield "memory.high_bytes", max(high, default=None)


def _same(field: str, old: Any, new: Any) -> bool:
    is_figure = field.startswith(("expected.", "memory."))
    if is_figure and isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return bool(abs(new - old) <= _ENOUGH * abs(old))
    return bool(old == new)
