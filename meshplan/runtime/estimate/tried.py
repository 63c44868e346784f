"""Run one rank's forward on fake tensors: what `check` does before any process starts.

Layouts can be right and the model's own code still fail under them, if it divides by the full width
or unpacks a fixed number of pieces. The real wrappers run here in a fake process group, so what
raises in them would raise on a rank. What fails in a single process, too, is reported as a mistake
of the model.
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
from meshplan.runtime.fake_step.step import fake_rank, fake_single_rank
from meshplan.runtime.torch_private.fakes import untraceable
from meshplan.runtime.trace.constants import MOST_NUMBERS
from meshplan.runtime.trace.entry import model_of_entry
from meshplan.runtime.trace.sample import TOKENS, call, sample_inputs
from meshplan.runtime.trace.trace_errors import StyledWidths, alone_problem, sharded_problem
from meshplan.runtime.train.one_process import in_dtype_of
from meshplan.spec.spec import Spec

_SAMPLES = 2
"""Samples that the forward is run on: few, and not 1, which would broadcast."""


def try_entry(entry: str, origin: Origin, plan: Plan) -> tuple[Problem | None, str]:
    """Run the forward of the model that "pkg.mod:function" makes; otherwise as `try_forward`."""
    if dist.is_initialized():
        return None, "torch.distributed is already initialized in this process"
    return try_forward(model_of_entry(entry, origin), plan, origin)


def try_forward(model: nn.Module, plan: Plan, origin: Origin | None) -> tuple[Problem | None, str]:
    """Run the forward of a model as rank 0 of a plan would, in a process without a process group.

    Args:
        model: The unsharded model of one process.
        plan: A plan decided for the model.
        origin: Place where the user named the model; None if there is none.

    Returns:
        (the problem or None, why the forward was not run). The latter is "" if the forward ran, or
        if it would depend on the plan's own code, on numbers of tokens or on a router.
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
        with fake_rank(model, plan, 0) as (twin, mesh, fake, _):
            wrapped = apply_plan(twin, plan, mesh, InitialValues())
            is_wrapped = True
            with _widths(wrapped, plan, found):
                _run(wrapped, in_dtype_of(wrapped, mapped(inputs, fake)))
        return None, ""
    except MeshplanError as error:
        # A forward may be refused only for the size of this example.
        return (None if is_wrapped else error.problems[0]), ""
    except Exception as error:  # The model's code may raise anything.
        if (odd := untraceable(error)) is not None:
            return (
                None,
                f"{odd[0]} needs the values of tensors, and this check runs on fake tensors",
            )
        sharded = error
    # Run without the plan: what fails there, too, is a mistake of the model.
    whole: dict[str, int] = {}
    try:
        with fake_single_rank(model) as (twin, fake, _), _widths(twin, plan, whole):
            _run(twin, in_dtype_of(twin, mapped(inputs, fake)))
    except Exception as error:
        # If the plan does not state the inputs, the assumed ones may be wrong.
        problem = alone_problem(error, model, origin, inputs)
        if plan.spec.input is None or untraceable(error) is not None:
            fix = "state the model's input in the plan: input: {shape: [2, 16], dtype: int64}"
            return None, f"{problem.what}; {fix}"
        return problem, ""
    return sharded_problem(sharded, model, plan, StyledWidths(found, whole), origin), ""


def _with_length(plan: Plan) -> Spec:
    """Return the spec with a sequence length that divides over tp, if it states none."""
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
    """Record output widths of modules with a style in `found`, in the order of last calls."""

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
