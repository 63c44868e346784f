"""Run one rank's forward on fake tensors, so that `meshplan check` finds errors in model code.

All layouts of a plan may be right and the model's code still fail under them, if it divides by the
full width or unpacks a fixed number of chunks. The real wrappers run here in a fake process group,
so an error raised here would be raised on a rank. If the model also fails without the plan, the
error is reported as a mistake of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import MeshplanError, Origin, Problem, SpecError
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.parameters.materialize import InitialValues
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import apply_plan
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.estimate.request import built_without_memory
from meshplan.runtime.estimate.scale_down import ModelSource
from meshplan.runtime.fake_step.step import fake_rank, fake_single_rank
from meshplan.runtime.torch_private.fakes import untraceable
from meshplan.runtime.trace.constants import MOST_NUMBERS
from meshplan.runtime.trace.sample import TOKENS, call, sample_inputs
from meshplan.runtime.trace.trace_errors import (
    STATE_INPUT,
    StyledWidths,
    alone_problem,
    sharded_problem,
)
from meshplan.runtime.train.one_process import in_dtype_of
from meshplan.spec.spec import Spec

_SAMPLES = 2
"""Number of samples that the forward runs on: few, but not 1, which would broadcast and hide
errors."""


def try_source(source: ModelSource, plan: Plan) -> tuple[Problem | None, str]:
    """Build a model and run `try_forward` on it.

    Args:
        source: The source of the model.
        plan: A plan decided for the model.

    Returns:
        (the problem or None, why the forward was not run), as `try_forward` returns them.
    """
    if dist.is_initialized():
        return None, "torch.distributed is already initialized in this process"
    return try_forward(built_without_memory(source), plan, source.origin)


def try_forward(model: nn.Module, plan: Plan, origin: Origin | None) -> tuple[Problem | None, str]:
    """Run the forward of a model as rank 0 of a plan would, in a process without a process group.

    Args:
        model: The unsharded model of one process.
        plan: A plan decided for the model.
        origin: Place where the user named the model; None if there is none.

    Returns:
        (the problem or None, why the forward was not run). The second is "" if the forward ran. It
        is "" too if the forward is not run by design: if the plan applies the user's own functions,
        or uses cp or ep, where the result depends on the number of tokens or on a router.
    """
    if plan.assignment.apply or plan.mesh.size("cp", "ep") > 1:
        return None, ""
    try:
        inputs = sample_inputs(model, _with_length(plan), _SAMPLES, 0, MOST_NUMBERS)
    except SpecError as error:
        problem = error.problems[0]
        return None, f"{problem.what}; {problem.fix}"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return _try(model, plan, inputs, origin)


def _try(
    model: nn.Module, plan: Plan, inputs: Any, origin: Origin | None
) -> tuple[Problem | None, str]:
    found: dict[str, int] = {}
    is_wrapped = False
    try:
        with fake_rank(model, plan, 0) as (fake_model, mesh, fake, _):
            wrapped = apply_plan(fake_model, plan, mesh, InitialValues())
            is_wrapped = True
            with _widths(wrapped, plan, found):
                _run(wrapped, in_dtype_of(wrapped, mapped(inputs, fake)))
        return None, ""
    except MeshplanError as error:
        # An error of meshplan in the forward may be due to the small size of this input only.
        return (None if is_wrapped else error.problems[0]), ""
    except Exception as error:  # The model's code may raise anything.
        if (odd := untraceable(error)) is not None:
            return (
                None,
                f"{odd[0]} needs the values of tensors, but this check runs on fake tensors, which "
                "have none",
            )
        sharded = error
    # Run without the plan. An error there, too, is a mistake of the model.
    whole: dict[str, int] = {}
    try:
        with fake_single_rank(model) as (fake_model, fake, _), _widths(fake_model, plan, whole):
            _run(fake_model, in_dtype_of(fake_model, mapped(inputs, fake)))
    except Exception as error:
        # If the plan does not state the inputs, the error may be due to assumed inputs.
        problem = alone_problem(error, model, origin, inputs)
        if plan.spec.input is None or untraceable(error) is not None:
            return None, f"{problem.what}; {STATE_INPUT}"
        return problem, ""
    return sharded_problem(sharded, model, plan, StyledWidths(found, whole), origin), ""


def _with_length(plan: Plan) -> Spec:
    """Return the plan's spec with a sequence length that is a multiple of tp, if it states none."""
    spec, tp = plan.spec, plan.mesh.size("tp")
    if spec.batch.seq_len is not None or TOKENS % tp == 0:
        return spec
    return replace(spec, batch=replace(spec.batch, seq_len=TOKENS * tp))


def _run(model: nn.Module, inputs: Any) -> None:
    if isinstance(model, PipelinedModule):
        model.eval_step(inputs)
    else:
        call(model, inputs)


@contextmanager
def _widths(model: nn.Module, plan: Plan, found: dict[str, int]) -> Iterator[None]:
    """Record the output widths of modules with a style inside the `with` block.

    Args:
        model: The model.
        plan: The plan, which has the styles.
        found: Receives {fqn: size of the output's last dim}, in the order of the last calls.
    """

    def noting(fqn: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.ndim:
                found.pop(fqn, None)
                found[fqn] = output.shape[-1]

        return note

    parts = model.stage_modules if isinstance(model, PipelinedModule) else [model]
    modules = {n.removeprefix("module."): m for part in parts for n, m in part.named_modules()}
    handles = [
        modules[fqn].register_forward_hook(noting(fqn))
        for fqn in plan.assignment.styles
        if fqn in modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
