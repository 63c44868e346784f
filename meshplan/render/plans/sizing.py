"""Output of `meshplan plan`: the memory-time frontier, the cost, and the fewest nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshplan.planner.objectives.num_devices import Size, TrainingTarget, format_days
from meshplan.planner.problem.decision import Decision, Evaluated
from meshplan.render.base.statements import plan_lines
from meshplan.render.base.text import columns, packed, wrapped
from meshplan.render.plans.plan import evaluated_to_json
from meshplan.units import format_count, format_gib, format_step

_MOST_SIZES = 12
_KNOWN_BY = (
    "mesh", "strategy", "batch.micro", "activation_checkpointing", "offload", "rules[",
    "loss_chunks", "loss_parallel", "allocator",
)  # fmt: skip


def frontier_to_json(
    decision: Decision, evaluated_plans: Sequence[Evaluated], *, is_whole: bool
) -> dict[str, Any]:
    """Return the keys `frontier` and `frontier_is_whole` of the `result` of schema plan/1.

    Args:
        decision: The planner's decision.
        evaluated_plans: The plans of the frontier: fastest first, each with less memory.
        is_whole: If True, the frontier was searched completely; if False, it may only have plans
            that the search for the best plan evaluated.
    """
    return {
        "frontier": [evaluated_to_json(decision, evaluated) for evaluated in evaluated_plans],
        "frontier_is_whole": is_whole,
    }


def frontier_to_text(
    evaluated_plans: Sequence[Evaluated], *, is_whole: bool, is_interrupted: bool = False
) -> list[str]:
    """Return a title and the plans of the frontier, each on one or more lines.

    Args:
        evaluated_plans: The plans of the frontier.
        is_whole: If True, the frontier was searched completely.
        is_interrupted: If True, the user ended the search; if not, and the frontier is not whole,
            the time limit was reached.
    """
    heads = columns(
        [
            (
                f"  {format_step(evaluated.seconds)}",
                format_gib(evaluated.memory.high_bytes),
            )
            for evaluated in evaluated_plans
        ],
        ">>",
    )
    lines = [
        part
        for head, evaluated in zip(heads, evaluated_plans, strict=True)
        for part in packed(f"{head}  ", _words(evaluated))
    ]
    end = "interrupted" if is_interrupted else "time limit reached"
    end = "" if is_whole else f" (search incomplete: {end})"
    return [f"memory-time frontier, fastest plan first{end}", *lines]


def _words(evaluated: Evaluated) -> Iterator[str]:
    """Yield the statements of a plan that readers know it by: those that start as `_KNOWN_BY`."""
    for line in plan_lines(evaluated):
        if line.startswith(_KNOWN_BY):
            yield line


def cost_to_json(decision: Decision, price: float | None) -> dict[str, Any] | None:
    """Return `result.cost` of schema plan/1; None if nothing was chosen.

    Args:
        decision: The planner's decision.
        price: Price of one GPU-hour; None if it is not stated.
    """
    evaluated = decision.chosen
    if evaluated is None:
        return None
    hours = evaluated.seconds * evaluated.plan.mesh.world_size / 3600
    priced = None if price is None else hours * price
    found = {
        "gpu_hours_per_step": hours,
        "price_per_gpu_hour": price,
        "price_per_step": priced,
    }
    for what, count in (("tokens", decision.tokens), ("samples", decision.samples)):
        # `count` is 0 for tokens if samples are not sequences.
        each = 1e6 / count if count else None
        found[f"gpu_hours_per_million_{what}"] = None if each is None else hours * each
        found[f"price_per_million_{what}"] = (
            None if each is None or priced is None else priced * each
        )
    return found


def cost_to_text(decision: Decision, price: float | None) -> list[str]:
    """Return a line on the cost; [] if neither a price nor the objective "cost" is given."""
    found = cost_to_json(decision, price)
    if found is None or (price is None and decision.objective != "cost"):
        return []
    what = "tokens" if decision.tokens else "samples"
    line = f"cost    {found[f'gpu_hours_per_million_{what}']:.4f} GPU-hours per million {what}"
    if price is not None:
        line += f", {found[f'price_per_million_{what}']:.4f} at {price:g} per GPU-hour"
    return [line]


def training_to_json(found: TrainingTarget, price: float | None) -> dict[str, Any]:
    """Return `result.training` of schema plan/1."""
    return {
        "tokens": found.tokens,
        "days_allowed": found.days,
        "is_fewest": found.is_fewest,
        "answer": _size_to_json(found.answer, price) if found.answer else None,
        "sizes": [_size_to_json(size, price) for size in found.sizes],
        "more_samples": found.more and {
            "global": found.more[0],
            "answer": _size_to_json(found.more[1], price),
        },
    }  # fmt: skip


def _size_to_json(size: Size, price: float | None) -> dict[str, Any]:
    evaluated = size.decision.chosen if size.decision else None
    hours = size.days * 24 * size.num_gpus if size.days is not None else None
    return {
        "nodes": size.nodes,
        "num_gpus": size.num_gpus,
        "days": size.days,
        "least_days": size.least_days,
        "step_s": evaluated.seconds if evaluated else None,
        "peak_bytes": evaluated.memory.high_bytes if evaluated else None,
        "gpu_hours": hours,
        "price": hours * price if hours is not None and price is not None else None,
        "why": size.why,
    }


def _allowed(days: float) -> str:
    return f"{days:g} day{'' if days == 1 else 's'}"


def _more(found: TrainingTarget) -> str:
    """Return advice to raise the batch size; "" if the batch size does not limit the GPUs."""
    if found.samples is None:
        return ""
    few = f": with {found.samples:,} samples per step, more GPUs are no faster"
    if found.more is None:
        return f"{few}; raise batch.global"
    samples, size = found.more
    assert size.days is not None
    took = f"{size.num_gpus:,} GPUs take {format_days(size.days)}"
    return f"{few}; raise batch.global: with {samples:,} samples, {took}"


def training_to_text(found: TrainingTarget, price: float | None) -> list[str]:
    """Return a row for each number of nodes that was tried; the answer is marked.

    Args:
        found: The result of the search.
        price: Price of one GPU-hour; None if it is not stated.
    """
    rows = []
    for size in found.sizes:
        mark = "<- the fewest" if size is found.answer else ""
        if size is found.answer and not found.is_fewest:
            mark = "<- the fewest of the numbers tried"
        took = format_days(size.days) if size.days is not None else size.why
        nodes = f"{size.nodes:,} node{'' if size.nodes == 1 else 's'}"
        rows.append((f"  {size.num_gpus:,} GPUs", nodes, took, mark))
    if len(rows) > _MOST_SIZES and found.answer is not None:
        at = found.sizes.index(found.answer)
        rows = rows[max(0, at - _MOST_SIZES // 2) : at + _MOST_SIZES // 2]
    title = f"{format_count(round(found.tokens))} tokens in {_allowed(found.days)}"
    lines = [title, *columns(rows, ">><<")]
    if found.answer is None:
        return [
            *lines,
            *wrapped(f"  none of these numbers of nodes trains in time{_more(found)}", 4),
        ]
    if price is not None:
        assert found.answer.days is not None
        whole = found.answer.days * 24 * found.answer.num_gpus * price
        lines.append(f"  cost: {whole:,.0f} at {price:g} per GPU-hour")
    return lines
