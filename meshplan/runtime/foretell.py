"""Tiers 3 and 2: a step of every rank that differs, imagined in a process of its own.

Decides which tier answers, and nothing else: the plan decides what is run, `imagine` runs it, and
`memory` reads the logs.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import nn

from meshplan.errors import ApplyError, MeshplanError, PlanError
from meshplan.memory.driver import communicators, driver_bytes, with_workspaces
from meshplan.memory.estimate import MemoryEstimate, Tier, group_of
from meshplan.memory.groups import equal_ranks
from meshplan.memory.log import EventLog
from meshplan.memory.reconcile import reconcile
from meshplan.plan import Plan, make_plan
from meshplan.runtime.apart import run_apart
from meshplan.runtime.assumed import Loop, check_stated, loop_of
from meshplan.runtime.example import find_example
from meshplan.runtime.imagine import imagine_step
from meshplan.runtime.record import record
from meshplan.runtime.rehearse import rehearser
from meshplan.runtime.shrink import Source, model_of_source
from meshplan.runtime.stumble import problem_of
from meshplan.runtime.trace import graph_of
from meshplan.spec import Spec

UNKNOWN_DEVICE: Final = ""
"""The device of a plan that names none: what it holds beside torch has the widest band."""
_GPUS_PER_NODE: Final = 8
_NOT_CERTIFIED: Final = "nothing is extrapolated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Args:
        spec: The plan, as declared.
        source: How to build its model.
        device: The name of the GPU; "" where nobody says.
        limit_bytes: What it may hold; None where nobody says.
    """

    spec: Spec
    source: Source
    device: str = UNKNOWN_DEVICE
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Imagined:
    """What a process found out about one rank.

    Args:
        assumed: As of `Loop`.
    """

    log: EventLog
    assumed: tuple[tuple[str, str], ...]


def foretell(
    question: Question, told: Callable[[str], None], notes: Sequence[str] = ()
) -> MemoryEstimate:
    """The memory of every rank.

    Args:
        told: Is told what is being done.
        notes: What is known already that a reader has to know.

    Raises:
        SpecError: The model cannot be built, or nothing says what it takes.
        PlanError: The plan does not fit the model, says too little, or its step cannot be imagined.
    """
    _, plan = decided(question.spec, question.source)
    check_stated(question.spec, plan.micro, reads_tokens=False)
    groups = equal_ranks(plan.assignment)
    logs, assumed, tier, certified = _logs(question, plan, [ranks[0] for ranks in groups], told)
    hardware = question.spec.hardware
    per_node = hardware.gpus_per_node if hardware else _GPUS_PER_NODE
    driver = driver_bytes(question.device, communicators(plan.assignment, gpus_per_node=per_node))
    found = [
        group_of(
            with_workspaces(log, question.device),
            ranks,
            driver=driver,
            limit_bytes=question.limit_bytes,
            stages=_stages_of(plan, ranks[0]),
        )
        for log, ranks in zip(logs, groups, strict=True)
    ]
    estimate = MemoryEstimate(
        groups=tuple(found),
        tier=tier,
        certified=certified,
        limit_bytes=question.limit_bytes,
        assumed=assumed,
        notes=tuple(notes),
    )
    is_mixed = plan.spec.precision.is_mixed
    return replace(
        estimate, reconciliation=reconcile(estimate.worst, plan.assignment, is_mixed=is_mixed)
    )


def _logs(
    question: Question, plan: Plan, ranks: Sequence[int], told: Callable[[str], None]
) -> tuple[list[EventLog], tuple[tuple[str, str], ...], Tier, str]:
    """The logs of these ranks, by the cheapest tier that can tell.

    THE place where tiers are chosen.
    """
    told(f"imagining a step of rank{'s' if len(ranks) > 1 else ''} {_words(ranks)}")
    found = run_apart(_imagine, [(question.spec, question.source, rank) for rank in ranks])
    return [each.log for each in found], found[0].assumed, Tier.WHOLE, _NOT_CERTIFIED


def decided(spec: Spec, source: Source) -> tuple[nn.Module, Plan]:
    """The model, without memory, and its plan.

    Raises:
        SpecError: The model cannot be built.
        PlanError: The plan does not fit it.
    """
    model = model_of_source(source, on_meta=True).train()
    if not spec.reads_flow:
        return model, make_plan(spec, graph_of(model))
    inputs = find_example(model, spec)
    try:
        flow = record(model, inputs)
    except ApplyError as error:
        if isinstance(error.__cause__, Exception):
            raise PlanError(problem_of(error.__cause__, model, source.origin)) from None
        raise PlanError(error.problems) from None
    return model, make_plan(spec, graph_of(model, flow), rehearse=rehearser(model, inputs))


def _imagine(spec: Spec, source: Source, rank: int) -> Imagined:
    """One rank's step, in a process of its own."""
    warnings.simplefilter("ignore")
    model, plan = decided(spec, source)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            loop = loop_of(model, plan)
            log = _step(model, plan, loop, rank)
    except MeshplanError:
        raise
    except Exception as error:  # The model's own code may raise anything.
        raise PlanError(problem_of(error, model, source.origin)) from None
    return Imagined(log, loop.assumed)


def _step(model: nn.Module, plan: Plan, loop: Loop, rank: int) -> EventLog:
    return imagine_step(
        model, plan, loop.inputs, loop.targets, loop.loss_fn, loop.make_optimizer, rank
    )


def _stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    stages = plan.assignment.stages
    return () if stages is None else stages.of_rank(plan.mesh.index(rank, ("pp",)))


def _words(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
