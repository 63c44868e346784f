"""Output of `meshplan explain MODULE` and `meshplan explain memory`."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshplan.memory import MemoryEstimate
from meshplan.planner.answers.module import ModuleAnswer, TensorAnswer
from meshplan.render.base.text import columns
from meshplan.render.layouts.show import reason_to_json, shape_to_text, states_to_json, why_to_text
from meshplan.render.memory.memory import explained_to_text, memory_to_json
from meshplan.spec.match import any_number, fold
from meshplan.units import format_bytes, format_seconds


def module_to_json(answer: ModuleAnswer) -> dict[str, Any]:
    """Return `result.module` of schema explain/1."""
    cost = answer.cost
    return {
        "name": answer.name,
        "type": answer.type,
        "tensors": [_tensor_to_json(answer, each) for each in answer.tensors],
        "decided": [{"what": what, **reason_to_json(reason)} for what, reason in answer.facts],
        "rank": answer.rank,
        "state_bytes": states_to_json(answer.states),
        "block": answer.block or None,
        "activations_bytes_per_microbatch": answer.saved_bytes,
        "seconds_per_microbatch": dataclasses.asdict(cost) if cost else None,
        "why_no_cost": answer.why_no_cost,
    }


def _tensor_to_json(answer: ModuleAnswer, each: TensorAnswer) -> dict[str, Any]:
    placed, mesh = each.placed, answer.plan.mesh
    return {
        "name": placed.info.fqn,
        "shape": placed.info.shape,
        "layout": placed.stored.spell(mesh),
        "computed": placed.computed.spell(mesh),
        "gradient": placed.gradient.spell(mesh),
        "local_shape": placed.local_shape(mesh, each.rank),
        "dtype": placed.dtype,
        "compute_dtype": placed.compute_dtype,
        "rank": each.rank,
        "state_bytes": states_to_json(each.states),
        "decided_by": [reason_to_json(reason) for reason in each.decided_by],
    }


def module_to_text(answer: ModuleAnswer) -> list[str]:
    """Return the lines of the answer: the module's tensors, their bytes, and its block's time."""
    plan = answer.plan
    title = f"{answer.name}: {answer.type or 'a tensor'} of {plan.graph.name}"
    title = title if answer.name else f"the model: {plan.graph.name}"
    sections = [[f"{title}, under {plan.spec.source} on {plan.mesh}"]]
    if answer.tensors:
        sections.append(_tensors(answer))
    if answer.facts:
        sections.append([f"{what}: {why_to_text(why, plan)}" for what, why in answer.facts])
    sections += [_states(answer), _cost(answer)]
    return "\n\n".join("\n".join(section) for section in sections).splitlines()


def _tensors(answer: ModuleAnswer) -> list[str]:
    plan = answer.plan
    header = ("tensor", "shape", "at rest", "in forward", "gradient", "local shape", "decided by")
    prefix = f"{answer.name}." if answer.name else ""
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in answer.tensors:
        name = each.placed.info.fqn.removeprefix(prefix)
        cells = (
            shape_to_text(each.placed.info.shape),
            each.placed.stored.spell(plan.mesh),
            each.placed.computed.spell(plan.mesh),
            each.placed.gradient.spell(plan.mesh),
            shape_to_text(each.placed.local_shape(plan.mesh, each.rank)),
            "; ".join(why_to_text(reason, plan) for reason in each.decided_by),
        )
        # Tensors that differ only in the numbers of their names share a row.
        alike.setdefault((any_number(name), *cells), []).append(name)
    rows = [(name, *cells) for (_, *cells), names in alike.items() for name in fold(names)]
    return columns([header, *rows], "<<<<<<<")


def _states(answer: ModuleAnswer) -> list[str]:
    states = answer.states
    rows = [
        ("  parameters", format_bytes(states.parameters_bytes)),
        ("  gradients", format_bytes(states.gradients_bytes)),
        (f"  {answer.plan.spec.optimizer}", format_bytes(states.optimizer_bytes)),
        ("  buffers", format_bytes(states.buffers_bytes)),
    ]
    if answer.saved_bytes is not None:
        what = f"  activations saved by {answer.block}, per microbatch"
        rows.append((what, format_bytes(answer.saved_bytes)))
    rows = [row for row in rows if row[1] != "0 B"]
    return [f"bytes on rank {answer.rank}", *columns(rows, "<>")]


def _cost(answer: ModuleAnswer) -> list[str]:
    cost = answer.cost
    if cost is None:
        return [f"no time estimate: {answer.why_no_cost}"]
    rows = [
        ("  forward", format_seconds(cost.forward_s)),
        ("  backward", format_seconds(cost.backward_s)),
        ("  exposed communication in both", format_seconds(cost.exposed_s)),
        ("  once per step, last gradients and the optimizer", format_seconds(cost.update_s)),
    ]
    return [f"time of {answer.block} per microbatch", *columns(rows, "<>")]


def explained_memory_to_json(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return `result.memory` of schema explain/1."""
    whole = memory_to_json(estimate)
    worst = whole["groups"][whole["worst"]]
    return {
        "reconciliation": whole["reconciliation"],
        "ranks": worst["ranks"],
        "at": worst["at"],
        "terms": worst["terms"],
        "total_bytes": estimate.worst.peak.total_bytes,
        "band": worst["band"],
        "limit_bytes": whole["limit_bytes"],
        "fits": whole["fits"],
        "size": whole["size"],
    }


def explained_memory_to_text(estimate: MemoryEstimate) -> list[str]:
    """Return a table that leads from the textbook's states to the peak that has to fit."""
    return explained_to_text(estimate)
