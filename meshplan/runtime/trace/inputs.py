"""Inputs to record a model with: the caller's, or what the plan and the model say of them."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from meshplan.errors import PlanError, Problem, SpecError
from meshplan.runtime.trace.constants import MOST_NUMBERS
from meshplan.runtime.trace.sample import sample_inputs
from meshplan.spec.spec import AUTO, Spec

_SAMPLES: Final = 2
"""Samples of an example that nobody gave: few, and not 1, which would broadcast."""


def find_example(model: nn.Module, spec: Spec, given: Any = None) -> Any:
    """A tensor, a tuple of arguments or a mapping of keyword arguments for the model's forward.

    Args:
        given: The caller's; taken as it is. A very large one of nobody's has no numbers.

    Raises:
        PlanError: Nobody says what the model takes.
    """
    if given is not None:
        return given
    try:
        return sample_inputs(model, spec, _SAMPLES, 0, MOST_NUMBERS)
    except SpecError as error:
        raise PlanError(
            Problem(
                f"the plan needs the data flow of {type(model).__name__}, and nothing says what "
                "the model takes",
                spec.origin("tp_plan" if spec.tp_plan == AUTO else "mesh"),
                "pass example_inputs to parallelize, or state input: {shape: [2, 16], "
                "dtype: int64}",
            )
        ) from error
