"""Tier 1 of the estimate: trace one microbatch of a live model, and compose the step from it.

Only a few of a run of equal blocks are traced, and one of the ranks that compute the same.
`memory.replay` adds what the wrappers and the optimizer allocate, by rules. If it has no rules for
a plan, `NotComposedError` is raised, and the caller may trace the whole step instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

from torch import nn

from meshplan.errors import MeshplanError, PlanError
from meshplan.layout.mesh import DATA_AXES
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import Prepared
from meshplan.memory.replay.main import check_rules
from meshplan.memory.replay.step import composed_log
from meshplan.plan.plan import Plan
from meshplan.runtime.base.batch import mapped, microbatch
from meshplan.runtime.base.subprocess_pool import run_in_subprocesses
from meshplan.runtime.estimate.request import (
    EstimateRequest,
    FakeStepResult,
    built_without_memory,
    for_subprocess,
)
from meshplan.runtime.fake_step.default_loop import loop_of
from meshplan.runtime.fake_step.equal_blocks import runs_of
from meshplan.runtime.fake_step.microbatch import trace_microbatch
from meshplan.runtime.torch_private.fakes import untraceable
from meshplan.runtime.trace.trace_errors import refused

COMPOSED_ERROR: Final = 0.001
"""Largest relative error of a composed step's peak, compared with the traced step [Empirical]: no
model or layout of tests/bench/tiers.md has a larger error."""


class NotComposedError(Exception):
    """Raised if there are no rules to compose this step; its text is the reason."""


def is_cheaper(model: nn.Module, plan: Plan, ranks: Sequence[int]) -> bool:
    """Return True if composing the steps of these ranks traces less than their whole steps.

    This holds if some ranks compute the same, if there is a pipeline, or if blocks are equal.
    """
    saves = len(alike_ranks(plan, ranks)) < len(ranks) or plan.assignment.stages is not None
    return saves or bool(not plan.assignment.apply and runs_of(model, plan))


def composed(request: EstimateRequest, plan: Plan, ranks: Sequence[int]) -> list[FakeStepResult]:
    """Return the composed step of each of these ranks, in the order of `ranks`.

    Raises:
        NotComposedError: There are no rules to compose this step, or its trace raised an error.
        PlanError: The model cannot run on fake tensors.
    """
    try:
        check_rules(plan)
    except PlanError as error:
        raise NotComposedError(error.problems[0].what) from None
    alike = alike_ranks(plan, ranks)
    sent = for_subprocess(plan)
    found = run_in_subprocesses(_compose, [(request, sent, same) for same in alike])
    refused = next((each for each in found if isinstance(each, str)), None)
    if refused is not None:
        raise NotComposedError(refused)
    by_rank = {
        rank: FakeStepResult(log, assumed)
        for same, (logs, assumed) in zip(alike, found, strict=True)
        for rank, log in zip(same, logs, strict=True)
    }
    return [by_rank[rank] for rank in ranks]


def alike_ranks(plan: Plan, ranks: Sequence[int]) -> list[list[int]]:
    """Group ranks that compute the same: those that differ only along the data axes."""
    mesh = plan.mesh
    axes = tuple(axis for axis in mesh.names if axis not in DATA_AXES)
    out: dict[int, list[int]] = {}
    for rank in ranks:
        out.setdefault(mesh.index(rank, axes), []).append(rank)
    return list(out.values())


def _compose(
    request: EstimateRequest, plan: Plan, ranks: Sequence[int]
) -> tuple[list[EventLog], tuple[tuple[str, str], ...]] | str:
    """Trace a microbatch and compose the steps of ranks that compute the same; a subprocess's task.

    Returns:
        (a log for each rank, assumptions as in `DefaultLoop`), or the reason why the step cannot be
        composed.
    """
    model = built_without_memory(request.source).train()
    warnings.simplefilter("ignore")
    try:
        loop = loop_of(model, plan)
        first = microbatch((loop.inputs, loop.targets), plan.accumulate)
        inputs, targets = mapped(first, lambda tensor: tensor.clone())
        trace = trace_microbatch(
            model, plan, inputs, targets, loop.loss_fn, ranks[0], request.device
        )
        prepared = Prepared(trace)
        return [composed_log(prepared, plan, rank) for rank in ranks], loop.assumed
    except MeshplanError as error:
        return error.problems[0].what
    except Exception as error:  # The model's own code may raise anything.
        if untraceable(error) is not None:
            raise refused(error, model, request.source.origin) from None
        return f"{type(error).__name__}: {error}".partition("\n")[0]
