"""Explain one module of a plan: its layouts, what decided them, its memory and its time."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshplan.assign import Placed, Reason
from meshplan.cost.calibration import read_profile
from meshplan.cost.types import Chain
from meshplan.errors import MeshplanError, Origin, Problem, SpecError
from meshplan.memory import StateBytes, state_bytes
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.whole_plan import BlockCost, Costed
from meshplan.shown import shown
from meshplan.textbook.inputs import read_limit
from meshplan.units import spans_of


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAnswer:
    """One tensor of the module.

    Args:
        placed: The tensor with its layouts.
        rank: The first rank that has the tensor.
        states: Bytes of the tensor, its gradient and its optimizer state on `rank`.
        decided_by: Reasons for the tensor's layout along tp, ep and the data axes, in this order;
            axes without a reason are left out.
    """

    placed: Placed
    rank: int
    states: StateBytes
    decided_by: tuple[Reason, ...]


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAnswer:
    """One module with all its submodules, or one tensor.

    Args:
        name: The fqn that was given, of a module or a tensor.
        type: Class of the module; "" for a tensor.
        plan: The plan.
        tensors: The module's parameters and buffers.
        facts: (decision on the module in words, what decided it) for decisions besides layouts.
        rank: The first rank that has one of the tensors.
        states: Bytes of parameters, gradients and optimizer state of all tensors on `rank`.
        block: Fqn of the block that the module is, or is in; "" if `cost` cannot be estimated.
        cost: Seconds that this block takes; None if they cannot be estimated.
        saved_bytes: Bytes that this block saves for the backward of one microbatch; None if they
            cannot be estimated, or only `cost` was traced.
        why_no_cost: Reason why `cost` cannot be estimated; "" if it can.
    """

    name: str
    type: str
    plan: Plan
    tensors: tuple[TensorAnswer, ...]
    facts: tuple[tuple[str, Reason], ...]
    rank: int
    states: StateBytes
    block: str = ""
    cost: BlockCost | None = None
    saved_bytes: int | None = None
    why_no_cost: str = ""


def explain_module(
    plan: Plan,
    name: str,
    *,
    profile: str | Path | None = None,
    chain_of: Callable[[Plan], Chain] | None = None,
) -> ModuleAnswer:
    """Explain what a plan decided for a module or a tensor.

    Args:
        plan: The plan.
        name: Fqn of the module or tensor, as in `meshplan show`; "" for the whole model.
        profile: Path of a file that `meshplan calibrate` wrote; None to use the speeds of known
            devices.
        chain_of: Returns the block costs of a plan whose model has no config; None if there is no
            way to trace them.

    Raises:
        SpecError: The model has no module or tensor of that name.
    """
    graph, a = plan.graph, plan.assignment
    found = [fqn for fqn in a.tensors if is_inside(fqn, name) or not name]
    if name not in graph.modules and name not in a.tensors:
        raise SpecError(_unknown(plan, name))
    first = _first_ranks(plan)
    tensors = tuple(_tensor(plan, fqn, first) for fqn in found)
    rank = min((each.rank for each in tensors), default=0)
    answer = ModuleAnswer(
        name=name,
        type=graph.modules[name].type if name in graph.modules else "",
        plan=plan,
        tensors=tensors,
        facts=tuple(_facts(plan, name)),
        rank=rank,
        states=_states(plan, found, rank),
    )
    blocks = graph.blocks()
    inside = [b for b in blocks if is_inside(b, name) and b != name]
    block = next((b for b in blocks if is_inside(name, b)), "")
    if inside:
        return replace(
            answer, why_no_cost=f"{name} has {len(inside)} blocks: ask about one of them"
        )
    if not block:
        return replace(
            answer, why_no_cost=f"{name} is in no block, and costs are estimated for blocks only"
        )
    try:
        measured = read_profile(Path(profile), Origin("--profile")) if profile else None
        device, _, _ = read_limit(None, None, plan.spec)
        chain = chain_of(plan) if chain_of is not None and not plan.graph.config else None
        costed = Costed(plan, cluster_of(plan.spec, device, measured), measured, chain)
        # A trace counts the operations of a block, and not what it saves.
        cost, saved = costed.block(block), costed.saved_bytes(block) if chain is None else None
    except MeshplanError as error:
        return replace(answer, why_no_cost=error.problems[0].what)
    return replace(answer, block=block, cost=cost, saved_bytes=saved)


def _unknown(plan: Plan, name: str) -> Problem:
    known = [*plan.graph.modules, *plan.assignment.tensors]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    fix = f"did you mean '{close[0]}'?" if close else "see meshplan show for the names."
    above, _, last = name.rpartition(".")
    inside = [fqn.rpartition(".") for fqn in plan.graph.modules]
    numbers = [int(own) for parent, _, own in inside if parent == above and own.isdecimal()]
    if last.isdecimal() and numbers:
        fix = f"{above} has the modules {min(numbers)} to {max(numbers)}."
    what = f"'{name}' is neither a module of {plan.graph.name} nor a question"
    fix += " Questions are: why FIELD, why-not FIELD=VALUE, memory"
    return Problem(what, Origin("explain"), fix)


def _tensor(plan: Plan, fqn: str, first: Mapping[int, int]) -> TensorAnswer:
    placed, stages = plan.assignment.tensors[fqn], plan.assignment.stages
    places = [stages.rank_of(stage) for stage in stages.tensors[fqn]] if stages else [0]
    rank = min(first[place] for place in places)
    reasons = (placed.tp_reason, placed.ep_reason, placed.data_reason)
    return TensorAnswer(
        placed=placed,
        rank=rank,
        states=_states(plan, [fqn], rank),
        decided_by=tuple(each for each in reasons if each is not None),
    )


def _first_ranks(plan: Plan) -> dict[int, int]:
    """Return {index along pp: first rank with it}."""
    out: dict[int, int] = {}
    for rank, place in enumerate(plan.mesh.indices(("pp",))):
        out.setdefault(place, rank)
    return out


def _states(plan: Plan, fqns: list[str], rank: int) -> StateBytes:
    a = plan.assignment
    part = replace(a, tensors={fqn: a.tensors[fqn] for fqn in fqns})
    return state_bytes(part, plan.spec.optimizer, rank)


def _facts(plan: Plan, name: str) -> Iterator[tuple[str, Reason]]:
    """Yield (decision in words, what decided it) for decisions besides layouts.

    The decisions are those on the module, or on a module around it.
    """
    a = plan.assignment
    around = _around(name)
    unit = next((a.units[fqn] for fqn in around if fqn in a.units), None)
    if unit is not None and unit.is_sharded:
        free = unit.reshard_after_forward
        word = (
            "resharded after forward" if free is True else "kept gathered until its last backward"
        )
        if not isinstance(free, bool):
            word = f"resharded over {free} ranks after forward"
        word += ", stored in the host's memory" if unit.on_host else ""
        yield f"parameters of {unit.fqn or 'the root unit'} {word}", unit.reason
    recompute = next(((fqn, a.recompute[fqn]) for fqn in around if fqn in a.recompute), None)
    if recompute is not None:
        text = f"activation_checkpointing: {recompute[1].policy.mode}"
        yield f"{recompute[0]} is recomputed", Reason(text, recompute[1].reason.origin)
    there = next((fqn for fqn in around if fqn in a.host_activations), None)
    if there is not None:
        what = f"activations saved by {there or 'the model'} are offloaded to the host's memory"
        yield what, a.host_activations[there]
    if a.chunked_loss is not None and name in (a.chunked_loss.head, ""):
        what = f"computed with the loss, over {a.chunked_loss.chunks} chunks of the tokens"
        yield f"{a.chunked_loss.head} is {what}", a.chunked_loss.reason
    if name in a.styles:
        yield f"{a.styles[name].style.name} along {a.styles[name].axis}", a.styles[name].reason
    if a.stages is not None:
        stages = sorted({s for f, each in a.stages.tensors.items() if is_inside(f, name)
                         for s in each})  # fmt: skip
        if stages:
            spans = [str(one) if one == two else f"{one}-{two}" for one, two in spans_of(stages)]
            word = "stage" if len(stages) == 1 else "stages"
            yield f"in {word} {', '.join(spans)} of {a.stages.num}", a.stages.reason


def _around(name: str) -> list[str]:
    """Return the fqn, then the fqns of the modules around it, up to the root module ""."""
    out = [name]
    while out[-1]:
        out.append(out[-1].rpartition(".")[0])
    return out
