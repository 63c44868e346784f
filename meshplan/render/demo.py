"""Output of `meshplan demo`: losses of both trainings, and measured and predicted bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshplan.memory import StateBytes
from meshplan.render.base.text import columns
from meshplan.render.layouts.show import states_to_json

_MOST_ROWS = 12


def losses_to_text(
    losses: Sequence[float], alone: Sequence[float], num_ranks: int, tolerance: float
) -> list[str]:
    """Return a table of losses at some steps, and a line that compares all steps.

    Args:
        losses: Loss of each step under the plan.
        alone: Loss of each step in one process.
        num_ranks: Number of ranks of the plan.
        tolerance: Largest difference of losses that counts as equal.
    """
    apart = differences(losses, alone)
    every = -(-len(losses) // _MOST_ROWS)
    last = len(losses) - 1
    rows = [("step", _ranks(num_ranks), "1 process", "difference")]
    rows += [
        (str(step + 1), f"{losses[step]:.6f}", f"{alone[step]:.6f}", f"{apart[step]:.1e}")
        for step in range(last + 1)
        if step in (0, last) or (step + 1) % every == 0
    ]
    worst = max(apart)
    verdict = "ok" if agrees(losses, alone, tolerance) else "DIFFERENT"
    return [
        "loss in nats per byte",
        *columns(rows, ">>>>"),
        f"largest difference over all {len(losses)} steps: {worst:.1e}, {tolerance:.0e} allowed: "
        + verdict,
    ]


def bytes_to_text(live: Sequence[StateBytes], predicted: Sequence[StateBytes]) -> list[str]:
    """Return a table with a row per rank: bytes measured, bytes predicted, and their difference."""
    header = ("rank", "parameters", "gradients", "optimizer", "measured", "predicted", "difference")
    rows: list[tuple[str, ...]] = [header]
    for rank, (measured, expected) in enumerate(zip(live, predicted, strict=True)):
        numbers = (measured.parameters_bytes, measured.gradients_bytes, measured.optimizer_bytes,
                   measured.total_bytes, expected.total_bytes)  # fmt: skip
        apart = _difference(measured, expected)
        rows.append((str(rank), *(f"{n:,}" for n in numbers), f"{apart:,}" if apart else "0"))
    num_apart = sum(
        measured != expected for measured, expected in zip(live, predicted, strict=True)
    )
    verdict = f"DIFFERENT on {_ranks(num_apart)}" if num_apart else "ok on every rank, to the byte"
    return [
        "bytes of state that each rank held before the last optimizer step",
        *columns(rows, ">>>>>>>"),
        f"measured and predicted: {verdict}",
    ]


def demo_to_json(
    losses: Sequence[float],
    alone: Sequence[float],
    tolerance: float,
    live: Sequence[StateBytes],
    predicted: Sequence[StateBytes],
) -> dict[str, Any]:
    """Return the `result` of schema demo/1."""
    return {
        "ok": agrees(losses, alone, tolerance) and list(live) == list(predicted),
        "losses": list(losses),
        "losses_of_one_process": list(alone),
        "max_difference": max(differences(losses, alone)),
        "tolerance": tolerance,
        "held_bytes": [states_to_json(states) for states in live],
        "predicted_bytes": [states_to_json(states) for states in predicted],
    }


def differences(losses: Sequence[float], alone: Sequence[float]) -> list[float]:
    """Return the absolute difference of the two runs' losses, step by step."""
    return [abs(a - b) for a, b in zip(losses, alone, strict=True)]


def agrees(losses: Sequence[float], alone: Sequence[float], tolerance: float) -> bool:
    """Return True if no step differs by more than the tolerance; NaN counts as different."""
    return all(apart <= tolerance for apart in differences(losses, alone))


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _difference(measured: StateBytes, expected: StateBytes) -> int:
    """Return the sum of the absolute differences of parameters, gradients and so on, in bytes."""
    one, other = states_to_json(measured), states_to_json(expected)
    return sum(abs(one[term] - other[term]) for term in one if term != "total_bytes")
