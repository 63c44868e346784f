"""Compare two complete plans: the decisions that differ, and the figures of each plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from meshplan.assign.base.types import Recompute, Stages
from meshplan.cost.profile import Profile, framework_of
from meshplan.errors import MeshplanError
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.planner.problem.decision import Decision
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.whole_plan import Costed
from meshplan.shown import shown
from meshplan.spec.match import fold
from meshplan.textbook.inputs import read_limit
from meshplan.traffic import Forecast, forecast
from meshplan.units import format_bytes

_ABSENT: Final = "absent"
"""Stands for the layout of a tensor that one of the two plans does not have."""


@shown
@dataclass(frozen=True, slots=True)
class Differs:
    """One decision that differs between two plans.

    Args:
        what: A field of the plan, or a pattern of fqns.
        old: Value in the first plan; None if the plan has none.
        new: Value in the second plan; None if the plan has none.
    """

    what: str
    old: Any
    new: Any


@shown
@dataclass(frozen=True, slots=True)
class Figure:
    """An estimated figure of a plan, such as its step time.

    Args:
        value: The figure; None if it cannot be estimated.
        why: Reason why the figure cannot be estimated; "" if it can.
    """

    value: float | None
    why: str = ""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSide:
    """One of the two plans, with its figures.

    Args:
        name: The user's name for the plan, such as a path.
        plan: The plan; None if only its lock is known.
        step_s: Seconds of a step.
        tokens_per_s: Tokens per second of all devices together.
        peak_bytes: Upper end of the estimated memory of the fullest rank, in bytes.
        traffic_bytes: Bytes of the whole tensors in rank 0's collectives and sends of a step.
        routes: {(kind of collective, axes): its part of `traffic_bytes`}.
    """

    name: str
    plan: Plan | None
    step_s: Figure
    tokens_per_s: Figure
    peak_bytes: Figure
    traffic_bytes: Figure
    routes: Mapping[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """The difference between two plans.

    Args:
        old: The first plan.
        new: The second plan.
        fields: Differences in mesh, strategy, batch and other fields of the plan.
        blocks: Differences in the choices of blocks, one for each pattern of block fqns.
        placements: Differences in the stored layouts of tensors, one for each pattern of fqns.
    """

    old: DiffSide
    new: DiffSide
    fields: tuple[Differs, ...]
    blocks: tuple[Differs, ...]
    placements: tuple[Differs, ...]

    @property
    def is_same(self) -> bool:
        """True if no decision differs."""
        return not (self.fields or self.blocks or self.placements)


def figures_of(decision: Decision, plan: Plan | None = None) -> dict[str, float]:
    """Return the planner's figures of the plan that it chose.

    Args:
        decision: The planner's decision.
        plan: A plan that must equal the chosen one; None to skip this check.

    Returns:
        {field of `DiffSide`: figure}; {} if no plan was chosen, or another plan than `plan`.
    """
    evaluated = decision.chosen
    if evaluated is None or (plan is not None and plan.digest() != evaluated.plan.digest()):
        return {}
    rate = decision.tokens_per_s(evaluated) * evaluated.plan.mesh.world_size
    found = {
        "step_s": evaluated.seconds,
        "peak_bytes": float(evaluated.memory.high_bytes),
    }
    return {**found, "tokens_per_s": rate} if rate else found


def side_of(
    name: str | Path,
    plan: Plan,
    profile: Profile | None = None,
    known: Mapping[str, float] = MappingProxyType({}),
) -> DiffSide:
    """Return a plan with its figures, computed from its model's config.

    Args:
        name: The user's name for the plan, such as a path.
        plan: The plan.
        profile: Measured speeds of the machine; None to use the tables of known devices.
        known: {field of `DiffSide`: figure} from the planner or a lock, used for figures that
            cannot be computed.
    """

    def figure(what: str, ask: Callable[[], float]) -> Figure:
        why = f"{plan.graph.name} has no config to estimate from"
        if plan.graph.config:
            try:
                return Figure(ask())
            except MeshplanError as error:
                why = error.problems[0].what
        return Figure(known[what]) if what in known else Figure(None, why)

    spec = plan.spec

    def costed() -> Costed:
        device, _, _ = read_limit(None, None, spec)
        return Costed(plan, cluster_of(spec, device, profile), profile)

    def peak() -> float:
        device, limit, _ = read_limit(None, None, spec)
        return estimate_analytic(plan, device=device, limit_bytes=limit).high_bytes

    def tokens() -> float:
        found = costed()
        return found.tokens / found.seconds

    sent = forecast(plan)
    routes = bytes_by_route(sent)
    traffic = Figure(float(sum(routes.values())))
    if sent.unknown:
        traffic = Figure(None, f"unknown from a config: {sent.unknown[0]}")
    return DiffSide(
        name=str(name),
        plan=plan,
        step_s=figure("step_s", lambda: costed().seconds),
        tokens_per_s=figure("tokens_per_s", tokens),
        peak_bytes=figure("peak_bytes", peak),
        traffic_bytes=traffic,
        routes=routes,
    )


def bytes_by_route(sent: Forecast) -> dict[tuple[str, tuple[str, ...]], int]:
    """Return {(kind of collective, axes): bytes of the whole tensors} of a step."""
    routes: dict[tuple[str, tuple[str, ...]], int] = {}
    for each in sent.traffic:
        key = each.route.kind, each.route.axes
        routes[key] = routes.get(key, 0) + each.count * each.route.num_bytes
    return routes


def difference(old: DiffSide, new: DiffSide) -> PlanDifference:
    """Compare two plans.

    Args:
        old: The first plan; its `plan` must not be None.
        new: The second plan; its `plan` must not be None.
    """
    assert old.plan is not None
    assert new.plan is not None
    before, after = dict(_fields(old.plan)), dict(_fields(new.plan))
    return PlanDifference(
        old=old,
        new=new,
        fields=tuple(
            Differs(name, before.get(name), after.get(name))
            for name in dict.fromkeys((*before, *after))
            if before.get(name) != after.get(name)
        ),
        blocks=tuple(_folded(_blocks(old.plan), _blocks(new.plan))),
        placements=tuple(_placements(old.plan, new.plan)),
    )


def _fields(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield (path as in plan.yaml, value) of the decisions on the whole model."""
    a, spec, stages = plan.assignment, plan.spec, plan.assignment.stages
    if spec.hardware is not None:
        for each in dataclasses.fields(spec.hardware):
            name = each.name.removesuffix("_bytes").removesuffix("_bytes_per_s")
            yield f"hardware.{name}", _size(each.name, getattr(spec.hardware, each.name))
    yield "model", plan.graph.name
    yield "parameters", plan.graph.num_params
    for axis in a.mesh:
        if axis.size > 1:
            yield f"mesh.{axis.name}", axis.size
    for loan in a.mesh.loans:
        yield f"mesh.{loan.name}", f"{loan.size} in {loan.within}"
    # Without a data axis the strategy is "ddp" even if none was stated or chosen: omit it then.
    is_said = plan.num_data_ranks > 1 or plan.mesh.world_size == 1 or a.strategy.name != "ddp"
    yield "strategy", a.strategy.name if is_said else None
    yield "sequence_parallel", a.sequence_parallel
    yield "loss_parallel", a.loss_parallel
    yield "loss_chunks", a.chunked_loss and a.chunked_loss.chunks
    yield "context", a.context and a.context.attention
    if stages is not None:
        yield "pipeline.schedule", stages.schedule
        yield "pipeline.virtual", stages.virtual
        yield "pipeline.microbatches", stages.microbatches
        yield "pipeline.split", _begins(plan, stages)
    yield "batch.micro", plan.micro
    yield "batch.accumulate", plan.accumulate
    yield "batch.global", plan.samples or None
    yield "batch.seq_len", spec.batch.seq_len
    for role in ("param", "reduce", "output", "master"):
        yield f"precision.{role}", getattr(spec.precision, role)
    yield "optimizer", spec.optimizer
    yield "compile", bool(a.compiled)
    yield "clip_grad_norm", spec.clip_grad_norm
    yield "allocator", spec.allocator
    yield "profile", framework_of(spec, plan.graph)


def _size(name: str, value: Any) -> Any:
    """Return the value of a hardware field, as text with its unit if it is in bytes."""
    if value is not None and name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value / 1e9:g} GB/s" if value is not None and name.endswith("_per_s") else value


def _begins(plan: Plan, stages: Stages) -> list[list[str]]:
    """Return one list per stage, as `pipeline.split` names stages.

    Each list has the stage's first block, or its first module if it has no block.
    """
    blocks = set(plan.graph.blocks())
    inside: dict[int, list[str]] = {}
    for module, stage in stages.units:
        inside.setdefault(stage, []).append(module)
    return [
        [next((m for m in inside[stage] if m in blocks), inside[stage][0])]
        for stage in sorted(inside)
    ]


def _blocks(plan: Plan) -> dict[str, dict[str, str]]:
    """Return {fqn of a block: {key of plan.yaml: value}} of the choices of each block."""
    a = plan.assignment
    out: dict[str, dict[str, str]] = {}
    for block in plan.graph.blocks():
        recompute, unit = a.recompute.get(block), a.units.get(block)
        words = {"activation_checkpointing": _recompute_words(recompute)}
        for fqn in (*a.recompute, *a.units):
            if fqn != block and is_inside(fqn, block):
                own = fqn.removeprefix(f"{block}.")
                if fqn in a.recompute:
                    words[f"{own}: activation_checkpointing"] = _recompute_words(a.recompute[fqn])
                if fqn in a.units:
                    reshards = str(a.units[fqn].reshard_after_forward).lower()
                    words[f"{own}: unit, reshard_after_forward"] = reshards
        if a.units and unit is None:
            words["unit"] = "false"
        if unit is not None and unit.is_sharded:
            words["reshard_after_forward"] = str(unit.reshard_after_forward).lower()
        parts = {"params": unit is not None and unit.on_host,
                 "activations": block in a.host_activations}  # fmt: skip
        words["offload"] = (
            " and ".join(part for part, is_present in parts.items() if is_present) or "none"
        )
        out[block] = words
    return out


def _recompute_words(recompute: Recompute | None) -> str:
    if recompute is None:
        return "none"
    saved = f", save: {', '.join(recompute.policy.save)}" if recompute.policy.save else ""
    return f"{recompute.policy.mode}{saved}"


def _folded(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> Iterator[Differs]:
    """Yield the differences between block choices, one for all blocks with the same change.

    Args:
        old: Choices in the first plan, as `_blocks` returns them.
        new: Choices in the second plan.
    """
    alike: dict[tuple[str, str | None, str | None], list[str]] = {}
    for block in dict.fromkeys((*old, *new)):
        before, after = old.get(block, {}), new.get(block, {})
        for word in dict.fromkeys((*before, *after)):
            if before.get(word) != after.get(word):
                alike.setdefault((word, before.get(word), after.get(word)), []).append(block)
    for (word, was, now), blocks in alike.items():
        yield Differs(f"{_names(blocks)} {word}", was, now)


def _placements(old: Plan, new: Plan) -> Iterator[Differs]:
    """Yield the differences between stored layouts.

    Tensors with the same name inside their blocks and the same change share one difference.
    """
    before, after = _layouts(old), _layouts(new)
    blocks = sorted({*old.graph.blocks(), *new.graph.blocks()}, key=len, reverse=True)
    alike: dict[tuple[str, str, str], list[str]] = {}
    for fqn in dict.fromkeys((*before, *after)):
        was, now = before.get(fqn, _ABSENT), after.get(fqn, _ABSENT)
        if was == now:
            continue
        block = next((b for b in blocks if fqn.startswith(f"{b}.")), "")
        rest = fqn[len(block) :] if block else fqn
        alike.setdefault((rest, was, now), []).append(block)
    for (rest, was, now), found in alike.items():
        name = _names(found, rest) if found[0] else rest
        yield Differs(name, None if was == _ABSENT else was, None if now == _ABSENT else now)


def _layouts(plan: Plan) -> dict[str, str]:
    mesh = plan.mesh
    out = {}
    for fqn, placed in plan.assignment.tensors.items():
        if not placed.info.is_buffer:
            out[fqn] = f"{placed.stored.spell(mesh)} {placed.dtype}"
    return out


def _names(blocks: list[str], rest: str = "") -> str:
    return ", ".join(fold(f"{block}{rest}" for block in blocks))
