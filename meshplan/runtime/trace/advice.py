"""Suggested replacements for a line of a model that fails because a tensor is sharded.

Such a line states the size that a dim has in one process, where a rank has a shard.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FrameType

_VIEWS = ("view", "reshape", "unflatten")


def advice_at(frame: FrameType, line: int, size: int) -> str:
    """Return a suggested replacement for a line that raised on a sharded tensor.

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
