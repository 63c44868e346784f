"""Why a step could not be imagined: the operator, the module, and what to do about it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from types import FrameType, MappingProxyType
from typing import Final

import torch
from torch import nn

from meshplan.errors import Origin, PlanError, Problem
from meshplan.runtime.private_fakes import untraceable

_WHY: Final = MappingProxyType(
    {
        "number": (
            "asks a tensor for its numbers, and there are none before the step is run",
            "make what follows depend on sizes alone, or name a function that builds the model "
            "with a stub in place of {module}: --model pkg.mod:fn",
        ),
        "shape": (
            "makes a tensor as large as its numbers say, and there are none before the step is run",
            "keep the whole tensor and mask it (torch.where), or name a function that builds the "
            "model with a stub in place of {module}: --model pkg.mod:fn",
        ),
        "rule": (
            "has no rule that says which shape it makes",
            "register one (torch.library.register_fake), or name a function that builds the model "
            "with a stub in place of {module}: --model pkg.mod:fn",
        ),
    }
)


class UnknownShapeError(PlanError):
    """A tensor is as large as numbers say: what it is at the most may be known."""


def refused(error: Exception, model: nn.Module, origin: Origin | None) -> PlanError:
    """The same as `problem_of`, as an error that tells whether a bound may be known."""
    found, problem = untraceable(error), problem_of(error, model, origin)
    is_shape = found is not None and found[1] == "shape"
    return UnknownShapeError(problem) if is_shape else PlanError(problem)


def problem_of(error: Exception, model: nn.Module, origin: Origin | None) -> Problem:
    """What a user has to know of an error that a step on fake tensors raised.

    Args:
        model: As one process has it, whose names count.
        origin: Where the user named it.
    """
    module, line = _where(error, model)
    place = f"in {module}" if module else f"in {type(model).__name__}"
    place += f" ({line})" if line else ""
    found = untraceable(error)
    if found is None:
        if (why := _untrained(error, model)) is not None:
            return Problem(
                why, origin, "name a model, and inputs, that its parameters are used for"
            )
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        what = f"the step cannot be imagined, {place}: {text}"
        fix = "state the inputs that the model takes: input: {shape: [2, 16], dtype: int64}"
        return Problem(what, origin, fix)
    op, why = found
    says, fix = _WHY[why]
    return Problem(f"{op} {says}: {place}", origin, fix.format(module=module or "it"))


def _untrained(error: Exception, model: nn.Module) -> str | None:
    """Why there are no gradients; None where that is not what was wrong."""
    name = type(model).__name__
    if not any(each.requires_grad for each in model.parameters()):
        return f"{name} has no parameters to train"
    if "does not require grad" in str(error):
        return f"what {name} gives of these inputs does not depend on its parameters"
    return None


def _where(error: BaseException, model: nn.Module) -> tuple[str, str]:
    """(the fqn of the innermost module whose forward raised, the user's line)."""
    names = {type(m): fqn for fqn, m in model.named_modules()}
    outer: nn.Module | None = None
    found, line = "", ""
    for frame, number in _frames(error):
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and type(own) in names:
            outer = outer or own
            found = next((fqn for fqn, m in outer.named_modules() if m is own), found)
        file = frame.f_code.co_filename
        if not _is_foreign(file):
            line = f"{os.path.basename(file)}:{number}"
    return found, line


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """From the outermost to where it was raised, through what it was raised from."""
    if error.__cause__ is not None:
        yield from _frames(error.__cause__)
    else:
        yield from traceback.walk_tb(error.__traceback__)


def _is_foreign(file: str) -> bool:
    ours = os.path.dirname(os.path.dirname(__file__))
    return file.startswith(
        (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), ours, "<")
    )
