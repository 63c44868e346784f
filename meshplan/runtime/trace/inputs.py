"""Inputs for the recorded forward: the caller's, or inputs made for the plan and the model."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from meshplan.errors import PlanError, Problem, SpecError
from meshplan.runtime.trace.constants import MOST_NUMBERS
from meshplan.runtime.trace.sample import input_for, sample_inputs
from meshplan.spec.spec import AUTO, Spec

_SAMPLES: Final = 2
"""Number of samples in generated inputs: few, but not 1, since a dim of size 1 broadcasts."""


def find_example(model: nn.Module, spec: Spec, given: Any = None) -> Any:
    """Return inputs for a forward: a tensor, a tuple of arguments, or a mapping by keyword.

    Args:
        model: The model that takes the inputs.
        spec: The plan's spec.
        given: The caller's inputs, returned unchanged. If None, inputs are generated; those with
            more than `MOST_NUMBERS` elements are on meta, without values.

    Raises:
        PlanError: Neither caller nor plan states an input, and none can be derived from the model.
    """
    if given is not None:
        return given
    try:
        return sample_inputs(model, spec, _SAMPLES, 0, MOST_NUMBERS)
    except SpecError as error:
        raise PlanError(
            Problem(
                f"the plan needs the data flow of {type(model).__name__}, but no input of the "
                "model is stated",
                spec.origin("tp_plan" if spec.tp_plan == AUTO else "mesh"),
                f"pass example_inputs to parallelize, or add to the plan: {input_for(model)}",
            )
        ) from error
