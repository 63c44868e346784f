"""One microbatch of one rank as its `Work`: the model as this rank computes it, without wrappers.

Tensor and context parallelism, compute dtypes and recomputation are in it; what gathers, reduces,
accumulates and updates is not, and is composed by `memory.replay`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from meshplan.assign import Assignment
from meshplan.memory.log import Term
from meshplan.memory.replay.buckets import Options
from meshplan.memory.work import Work
from meshplan.mesh import UNIT_AXES
from meshplan.plan import Plan
from meshplan.runtime.applied import applied, apply_plan
from meshplan.runtime.batch import as_arguments, mapped
from meshplan.runtime.imagine import imagining, names_of
from meshplan.runtime.ledger import Ledger
from meshplan.runtime.loss import LossParallel, take_loss
from meshplan.runtime.marking import Marking
from meshplan.runtime.materialize import Values
from meshplan.runtime.moments import begin, heard_by
from meshplan.runtime.nest import tensors_in

LossFn = Callable[[Any, Any], torch.Tensor]


def trace_work(
    model: nn.Module, plan: Plan, inputs: Any, targets: Any, loss_fn: LossFn, rank: int = 0
) -> Work:
    """What one microbatch allocates and frees on one rank, from the second one on.

    Args:
        model: As one process has it, on any device; it is copied, and only shapes count.
        inputs: One microbatch of one rank.
        targets: The same microbatch's targets.
        loss_fn: As `train_step` takes it.
        rank: Which rank to be.
    """
    bare = without_data(plan)
    with imagining(model, bare, rank) as (twin, mesh, fake):
        batch, goals = mapped(inputs, fake), mapped(targets, fake)
        wrapped = apply_plan(twin, bare, mesh, Values())
        applied(wrapped).is_tested = True
        return _watched(wrapped, plan, batch, goals, loss_fn)


def without_data(plan: Plan) -> Plan:
    """The plan with parameters as they are computed with, and nothing around the model."""
    whole = plan.assignment
    tensors = {
        fqn: replace(
            placed,
            stored=placed.stored.without(*UNIT_AXES),
            dtype=placed.compute_dtype,
            reduced_alone=False,
        )
        for fqn, placed in whole.tensors.items()
    }
    bare: Assignment = replace(
        whole, wrapper="none", tensors=MappingProxyType(tensors), units=MappingProxyType({})
    )
    return replace(plan, assignment=bare, accumulate=1)


def _watched(model: nn.Module, plan: Plan, inputs: Any, targets: Any, loss_fn: LossFn) -> Work:
    """The second of two microbatches: what a model keeps from one to the next is there by then."""
    ledger = Ledger(names_of(model))
    ledger.note(model.parameters(), Term.PARAMETERS)
    ledger.note(model.buffers(), Term.BUFFERS)
    ledger.note((tensor for _, tensor in tensors_in((inputs, targets))), Term.INPUTS)
    held = {number for param in model.parameters() for number in ledger.numbers_of(param)}
    marking = _marking(model, plan, ledger)
    args, kwargs = as_arguments(inputs)

    def take(output: Any) -> torch.Tensor:
        ledger.note((tensor for _, tensor in tensors_in(output)), Term.LOSS)
        begin("loss")
        loss = take_loss(loss_fn, output, targets)
        begin("backward")
        return loss

    def microbatch() -> torch.Tensor:
        # As `train_step` does it: what its names hold on to lives as long.
        begin("forward")
        with LossParallel() if plan.assignment.loss_parallel else nullcontext():
            loss = take(model(*args, **kwargs))
            (loss * 1.0).backward()
        return loss

    work = None
    with heard_by(ledger.begin):
        for _ in range(2):
            marking.clear()
            ledger.forget()
            with ledger:
                loss = microbatch()
                marking.finish()
            work = _work(ledger, marking, held, loss)
            del loss
    assert work is not None
    return work


def _marking(model: nn.Module, plan: Plan, ledger: Ledger) -> Marking:
    """Hooks where the plan has units."""
    params = {fqn: param for fqn, param in model.named_parameters() if param.requires_grad}
    marking = Marking(ledger, params)
    owned: dict[str | None, list[str]] = {}
    for fqn, placed in plan.assignment.tensors.items():
        owned.setdefault(placed.unit, []).append(fqn)
    for fqn, unit in plan.assignment.units.items():
        marking.watch(model.get_submodule(fqn), unit, owned.get(fqn, ()))
    if plan.assignment.wrapper == "ddp" and Options.of(plan.spec.ddp).clones_output:
        model.register_forward_hook(lambda *call: tree_map_only(torch.Tensor, torch.clone, call[2]))
    return marking


def _work(ledger: Ledger, marking: Marking, held: set[int], loss: torch.Tensor) -> Work:
    """What was noted, without the parameters, whose memory is the wrappers' affair."""
    log = ledger.log()
    num_left_out = sum(event.storage in held for event in log.events)
    assert not any(event.storage in held for event in log.events if event.phase)
    return Work(
        log=replace(log, events=tuple(e for e in log.events if e.storage not in held)),
        marks=tuple(m._replace(event=m.event - num_left_out) for m in marking.marks),
        gradients=dict(marking.gradients),
        ready={fqn: event - num_left_out for fqn, event in marking.ready.items()},
        losses=ledger.numbers_of(loss),
        settling=dict(marking.settling),
    )
