"""Explain why a forward or a step on fake tensors failed: operator, module, line, and a fix."""

from __future__ import annotations

import ast
import linecache
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import Origin, PlanError, Problem
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.torch_private.fakes import untraceable
from meshplan.runtime.trace.bounds import UnknownShapeError
from meshplan.runtime.trace.sample import EXAMPLES, input_for

_WHY: Final = MappingProxyType(
    {
        "number": (
            "reads the values of a tensor, and fake tensors have none",
            "let the code depend on sizes only, or name a function that builds the model "
            "with a stub in place of {module}: --model pkg.mod:fn",
        ),
        "shape": (
            "makes a tensor whose shape depends on values, and fake tensors have none",
            "keep the full size and mask elements (torch.where), or name a function that builds "
            "the model with a stub in place of {module}: --model pkg.mod:fn",
        ),
        "rule": (
            "has no fake implementation that gives the shape of its result",
            "register one (torch.library.register_fake), or name a function that builds the model "
            "with a stub in place of {module}: --model pkg.mod:fn",
        ),
    }
)


def refused(error: Exception, model: nn.Module, origin: Origin | None) -> PlanError:
    """Return `problem_of` as an error to raise.

    It is an UnknownShapeError if only a shape depends on values, so that a bound may be known.
    """
    found, problem = untraceable(error), problem_of(error, model, origin)
    is_shape = found is not None and found[1] == "shape"
    return UnknownShapeError(problem) if is_shape else PlanError(problem)


STATE_INPUT: Final = (
    "state inputs that the model takes, or change those that are stated, and batch.seq_len: "
    f"{EXAMPLES}"
)
"""Fix for a forward that fails on the inputs that the plan states, or that were assumed."""


def _state_input(error: Exception, model: nn.Module) -> str:
    """Return the fix for a forward that fails on its inputs, also if it lacks some of them."""
    if isinstance(error, TypeError) and "required positional argument" in str(error):
        return f"state every input of the forward, as in {input_for(model)}"
    return STATE_INPUT


def problem_of(error: Exception, model: nn.Module, origin: Origin | None) -> Problem:
    """Explain an error that a step on fake tensors raised.

    Args:
        error: The error.
        model: The unsharded model, for the names of modules.
        origin: The place where the user named the model; None if unknown.
    """
    module, line = _where(error, model)
    place = f"in {module}" if module else f"in {type(model).__name__}"
    place += f" ({line})" if line else ""
    found = untraceable(error)
    if found is None:
        if (why := _untrained(error, model)) is not None:
            return Problem(
                why, origin, "name a model with parameters to train, and inputs that use them"
            )
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        what = f"the step cannot run on fake tensors, {place}: {text}"
        return Problem(what, origin, _state_input(error, model))
    op, why = found
    says, fix = _WHY[why]
    fix = fix.format(module=module or "the module that calls the operator")
    return Problem(f"{op} {says}: {place}", origin, fix)


@dataclass(frozen=True, slots=True)
class StyledWidths:
    """The size of the last dim of each styled module's output.

    Args:
        local: Sizes on one rank, by fqn of the module, in the order in which the modules ran.
        whole: Sizes in one process, by fqn of the module, in the same order.
    """

    local: Mapping[str, int]
    whole: Mapping[str, int]

    def cut_in(self, module: str) -> str | None:
        """Return the last module inside `module` that returned a sharded output, or None."""
        found = [
            fqn
            for fqn, width in self.local.items()
            if self.whole.get(fqn, width) != width and is_inside(fqn, module)
        ]
        return found[-1] if found else None


def alone_problem(
    error: Exception, model: nn.Module, origin: Origin | None, inputs: Any
) -> Problem:
    """Explain the error of a forward that fails in one process, without any sharding.

    Args:
        error: The error that the forward raised.
        model: The unsharded model.
        origin: The place where the user named the model; None if unknown.
        inputs: Inputs of the forward, whose shapes and dtypes the message states.
    """
    if untraceable(error) is not None:
        return problem_of(error, model, origin)
    module, _ = _where(error, model)
    place = place_of(error) or module or type(model).__name__
    shapes = [f"{list(t.shape)} {str(t.dtype)[6:]}" for _, t in tensors_in(inputs)]
    what = f"the forward of {type(model).__name__} fails at {place}, in one process too, on inputs "
    what += f"{', '.join(shapes)}: {_first_line(error)}"
    return Problem(what, origin, f"fix {place}, or {_state_input(error, model)}")


def sharded_problem(
    error: Exception, model: nn.Module, plan: Plan, widths: StyledWidths, origin: Origin | None
) -> Problem:
    """Explain the error of a forward that works in one process, but fails on a rank of the plan.

    Args:
        error: The error that the forward raised.
        model: The unsharded model.
        plan: The plan applied to the model.
        widths: Output widths of styled modules, on the rank and in one process.
        origin: The place where the user named the model; None if unknown.
    """
    module, _ = _where(error, model)
    place = place_of(error) or module or type(model).__name__
    fqn = widths.cut_in(module)
    if fqn is None:
        what = f"{module or type(model).__name__} fails under this plan at {place}, but not in one "
        what += f"process: {_first_line(error)}"
        fix = "let the code there read sizes and dtypes from its tensors, or replicate the module: "
        return Problem(what, origin, fix + f'rules: [{{match: "{module}", place: replicate}}]')
    use = plan.assignment.styles[fqn]
    local, whole, size = widths.local[fqn], widths.whole[fqn], plan.mesh.size(use.axis)
    what = (
        f"with {use.axis}: {size}, {fqn} returns {local} features where one process returns "
        f"{whole}, but {place} assumes {whole}: {_first_line(error)}"
    )
    fix = advice_of(error, size) or "read the size from the tensor there, such as x.shape[-1]"
    fix += f"; or replicate {fqn} and the modules that read its output along {use.axis}"
    return Problem(what, use.reason.origin or origin, fix)


def advice_of(error: Exception, size: int) -> str:
    """Return what to write in the user's line that raised on a shard of `size`; "" if unknown."""
    found = _own_frame(error)
    return advice_at(*found, size) if found else ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _untrained(error: Exception, model: nn.Module) -> str | None:
    """Return why the step had no gradients, or None if the error has another cause."""
    name = type(model).__name__
    if not any(each.requires_grad for each in model.parameters()):
        return f"{name} has no parameters to train"
    if "does not require grad" in str(error):
        return f"the output of {name} on these inputs does not depend on its parameters"
    return None


def place_of(error: BaseException) -> str:
    """Return `file:line` of the innermost line of the user's own code; "" if there is none."""
    found = _own_frame(error)
    if found is None:
        return ""
    file, here = found[0].f_code.co_filename, os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{found[1]}"


def _own_frame(error: BaseException) -> tuple[FrameType, int] | None:
    own = [each for each in _frames(error) if not _is_foreign(each[0].f_code.co_filename)]
    return own[-1] if own else None


def _where(error: BaseException, model: nn.Module) -> tuple[str, str]:
    """Return (fqn, "file:line") of the innermost module and the innermost user line of an error.

    Each is "" if the traceback has none.
    """
    names = {type(m): fqn for fqn, m in model.named_modules()}
    outer: nn.Module | None = None
    found, line = "", ""
    for frame, number in _frames(error):
        own = frame.f_locals.get("self")
        # FSDP2 replaces a module's class by a subclass of the user's.
        if isinstance(own, nn.Module) and not names.keys().isdisjoint(type(own).__mro__):
            outer = outer or own
            found = next((fqn for fqn, m in outer.named_modules() if m is own), found)
        file = frame.f_code.co_filename
        if not _is_foreign(file):
            line = f"{os.path.basename(file)}:{number}"
    return found, line


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield (frame, line number) of an error's root cause, from the outermost to the innermost."""
    if error.__cause__ is not None:
        yield from _frames(error.__cause__)
    else:
        yield from traceback.walk_tb(error.__traceback__)


def _is_foreign(file: str) -> bool:
    ours = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    return file.startswith(
        (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), ours, "<")
    )


_VIEWS = ("view", "reshape", "unflatten")


def advice_at(frame: FrameType, line: int, size: int) -> str:
    """Return a suggested replacement for a line that raised on a sharded tensor.

    Such a line states the size that a dim has in one process, where a rank has a shard.

    Args:
        frame: Frame of the code that raised.
        line: Line number in the frame's file.
        size: Number of shards of the tensor.

    Returns:
        The suggestion as part of a sentence; "" if the line has no known pattern.
    """
    for call in _calls(_statement(frame.f_code.co_filename, line)):
        assert isinstance(call[1].func, ast.Attribute)
        name = call[1].func.attr
        found = ""
        if name == "split":
            found = _in_place_of_split(*call)
        elif name in _VIEWS:
            found = _in_place_of_view(call[1], frame, size)
        if found:
            return found
    return ""


def _statement(file: str, line: int) -> ast.stmt | None:
    """Return the innermost statement that contains a line, or None."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _calls(statement: ast.stmt | None) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """Yield (statement, call) for each method call; nothing for a statement with a body."""
    if statement is None or hasattr(statement, "body"):
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield statement, node


def _in_place_of_split(statement: ast.stmt, call: ast.Call) -> str:
    """Suggest `x.chunk(3, dim=2)` for `a, b, c = x.split(C, dim=2)`; "" if it does not fit."""
    assert isinstance(call.func, ast.Attribute)
    is_function = ast.unparse(call.func.value) == "torch"
    given = call.args[1:] if is_function else call.args
    if not given or isinstance(given[0], ast.List | ast.Tuple):
        return ""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = next((t for t in targets if isinstance(t, ast.Tuple | ast.List)), None)
    if names is None:
        return ""
    words = [str(len(names.elts)), *map(ast.unparse, given[1:])]
    words += [f"{word.arg}={ast.unparse(word.value)}" for word in call.keywords]
    tensor = ast.unparse(call.args[0] if is_function else call.func.value)
    return f"write {tensor}.chunk({', '.join(words)}), which splits the local size"


def _in_place_of_view(call: ast.Call, frame: FrameType, size: int) -> str:
    """Suggest -1 for one size of a view, the number of sharded heads or features; "" if none."""
    sizes = [each for arg in call.args for each in _elements(arg)]
    values = [_value(each, frame) for each in sizes]
    if any(value == -1 for value in values):
        return ""
    # The sharded size divides by the number of shards. Sizes of batch and sequence stand before it,
    # but most code reads those from the tensor, so that they are no attributes or constants.
    counts = [
        ast.unparse(each)
        for each, value in zip(sizes, values, strict=True)
        if isinstance(each, ast.Attribute | ast.Constant | ast.BinOp)
        and isinstance(value, int)
        and value % size == 0
    ]
    return f"write -1 in place of {counts[0]}, the size in one process" if counts else ""


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple | ast.List) else [node]


def _value(node: ast.expr, frame: FrameType) -> object:
    """Evaluate an expression of names, attributes and numbers only; return None for any other."""
    plain = (
        ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop,
        ast.expr_context,
    )  # fmt: skip
    if not all(isinstance(each, plain) for each in ast.walk(node)):
        return None
    code = compile(ast.Expression(node), frame.f_code.co_filename, "eval")
    try:
        return eval(code, frame.f_globals, frame.f_locals)
    except Exception:  # A property in the user's code may raise anything.
        return None
