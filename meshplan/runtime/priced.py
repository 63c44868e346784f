"""A live model under a plan that states everything: its memory and its blocks, as they are run.

The search composes microbatches that were traced without tp, cp and pp. What it has no pieces of is
priced here as it stands: `foretell` traces the step of every rank that differs, and one rank's
microbatch is counted, with what tp sends and what recomputation runs again in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from meshplan.mesh import DATA_AXES
from meshplan.plan import Plan
from meshplan.planner.traced import Priced
from meshplan.runtime.assumed import loop_of
from meshplan.runtime.batch import mapped
from meshplan.runtime.blocks import trace_work
from meshplan.runtime.chain import chain_as_run, check_speed
from meshplan.runtime.counting import Counted, CountingLedger
from meshplan.runtime.foretell import foretell
from meshplan.runtime.nest import tensors_in
from meshplan.runtime.personality import Behaviour
from meshplan.runtime.probe import with_again
from meshplan.runtime.question import Question, decided, decided_of
from meshplan.runtime.runs import runs_of, shown_of
from meshplan.spec import Spec

_PARTED: Final = ("pp", "cp")
"""Axes along which a microbatch is parted; along the others a rank runs all of the model."""


def priced(question: Question, told: Callable[[str], None]) -> Priced:
    """What a plan takes.

    Args:
        told: Is told what is being done.

    Raises:
        SpecError: The model cannot be built.
        PlanError: The plan does not fit the model, its step cannot be traced, or how fast
            something in it runs is not known.
    """
    model, plan = decided(question.spec, question.source)
    memory = foretell(question, told)
    told(f"counting what a rank does in a microbatch of {type(model).__name__}")
    whole = decided_of(model, _unparted(question.spec, plan), question.source.origin)
    counted = plain = count(model, whole, question.device)
    check_speed(
        model, whole, flops=counted.flops, convolved=counted.convolved, unknown=counted.unknown,
        origin=question.source.origin, told=told,
    )  # fmt: skip
    if whole.assignment.recompute:
        plain = count(model, with_again(whole, frozenset()), question.device)
    assert whole.micro is not None
    flops = plain.flops * plan.mesh.size("tp") / whole.micro
    return Priced(plan, memory, chain_as_run(whole, counted), flops)


def _unparted(spec: Spec, plan: Plan) -> Spec:
    """The spec of ranks that run the whole model on one microbatch.

    Which stage runs a block, and what cp gathers, is for the cost model to say.
    """
    sizes = {axis.name: axis.size for axis in plan.mesh if axis.name not in _PARTED}
    stages = plan.assignment.stages
    assert plan.micro is not None
    micro = plan.micro // (stages.microbatches if stages is not None else 1)
    return replace(
        spec,
        mesh=MappingProxyType(sizes or {"dp_replicate": 1}),
        strategy=spec.strategy if any(axis in sizes for axis in DATA_AXES) else None,
        hardware=None,
        pipeline=None,
        context=None,
        batch=replace(spec.batch, micro=micro, accumulate=None, global_=None),
        rules=tuple(replace(rule, stage=None) for rule in spec.rules),
    )


def count(model: nn.Module, plan: Plan, device: str) -> Counted:
    """What rank 0 does in one microbatch, from the second one on.

    Args:
        model: As one process has it, on any device; it is copied, and only shapes count.
        plan: Without pp and cp.
        device: As for `imagine_step`.
    """
    blocks = plan.graph.blocks()
    shown = shown_of(blocks, runs_of(model, plan))
    ledgers: list[CountingLedger] = []
    handed: dict[str, int] = {}

    def ledger(names: Mapping[nn.Module, str], behaviour: Behaviour) -> CountingLedger:
        every = {*blocks, *shown.values()}
        for module, fqn in names.items():
            if fqn in every:
                _note_handed(module, fqn, handed)
        ledgers.append(CountingLedger(names, behaviour, every, plan.mesh))
        return ledgers[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = loop_of(model, plan)
        inputs, targets = mapped((loop.inputs, loop.targets), lambda tensor: tensor.clone())
        work = trace_work(model, plan, inputs, targets, loop.loss_fn, 0, device, ledger)
    found = ledgers[-1]  # Blocks that turn out not to be alike are all run once more.
    ran = {where.block for where in found.done}
    return Counted(
        done=MappingProxyType(dict(found.done)),
        shown={block: block for block in blocks} if ran >= set(blocks) else shown,
        trained=frozenset(work.gradients),
        handed_bytes=max(handed.values(), default=0),
        convolved=found.convolved / max(sum(done.flops for done in found.done.values()), 1.0),
        unknown=frozenset(found.unknown),
    )


def _note_handed(module: nn.Module, fqn: str, handed: dict[str, int]) -> None:
    """Note the bytes of what a module takes that has a gradient, each time that it runs."""

    def note(_: nn.Module, args: Any) -> None:
        given = [tensor for _, tensor in tensors_in(args) if tensor.requires_grad]
        handed[fqn] = sum(tensor.nbytes for tensor in given)

    module.register_forward_pre_hook(note)
