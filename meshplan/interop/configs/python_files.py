"""A Python file with the configuration of torchtitan, read without running it.

Calls such as `TrainingConfig(local_batch_size=8)` and assignments such as
`config.training.steps = 5` are read as far as their values are literals.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from meshplan.errors import Origin, Problem, SpecError
from meshplan.interop.configs.texts import UNKNOWN, placed
from meshplan.spec.values import PlanValue


def parse_python(text: str, name: str) -> PlanValue:
    """Return the arguments of the file's only configuration as nested values.

    Raises:
        SpecError: It is no Python, several functions return a configuration, or one takes `**`
            arguments.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", 0) or 0
        origin = Origin(name, "", line, getattr(error, "offset", 0) or 0)
        raise SpecError(
            Problem(f"this is not valid Python: {error}", origin, "correct it")
        ) from None
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _config_of(node)
    ]
    if len(functions) > 1:
        what = f"{len(functions)} functions return a configuration"
        listed = ", ".join(node.name for node in functions[:8])
        fix = f"keep one of {listed} in a file of its own"
        origin = Origin(name, functions[1].name, functions[1].lineno, 1)
        raise SpecError(Problem(what, origin, fix))
    scope: ast.AST = functions[0] if functions else tree
    call = _config_of(scope)
    data, places = dict[str, Any](), dict[str, tuple[int, int]]()
    if call is not None:
        for node in ast.walk(call):
            if isinstance(node, ast.keyword) and node.arg is None:
                origin = Origin(name, "", node.value.lineno, node.value.col_offset + 1)
                what = f"**{ast.unparse(node.value)[:40]} has arguments that are not in the call"
                raise SpecError(Problem(what, origin, "write them out: no code is run here"))
        data = _arguments(call, "", places)
    _assign(tree, scope, data, places, name)
    return placed(data, name, places)


def _assign(
    tree: ast.Module, scope: ast.AST, data: dict[str, Any], places: dict[str, tuple[int, int]],
    name: str,
) -> None:  # fmt: skip
    """Follow the assignments of the function itself, and refuse those that may not happen.

    Raises:
        SpecError: One is in another function, under a condition, or uses the old value.
    """
    own = set(map(id, getattr(scope, "body", [])))
    inside = set(map(id, ast.walk(scope)))
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        path = _attribute_path(targets[0])
        if isinstance(node, ast.Assign) and len(targets) == 1 and path and id(node) in own:
            _put(data, path, _value(node.value, ".".join(path), places))
            places[".".join(path)] = (node.lineno, node.col_offset + 1)
            continue
        changed = [
            each for target in targets for each in ast.walk(target)
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
            and len(_attribute_path(each)) >= (1 if id(node) in inside else 2)
            and not ast.unparse(each).startswith(("self.", "cls."))
        ]  # fmt: skip
        if changed:
            origin = Origin(name, "", node.lineno, node.col_offset + 1)
            what = (
                f"{ast.unparse(changed[0])[:60]} is not simply assigned in the function that "
                "returns the configuration"
            )
            fix = "write it among the arguments of the configuration: no code is run here"
            raise SpecError(Problem(what, origin, fix))


def _config_of(scope: ast.AST) -> ast.Call | None:
    """Return the call that makes a Trainer's configuration."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and re.search(
            r"(Trainer\.Config|JobConfig)$", _name(node.func)
        ):
            return node
    return None


def _name(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _attribute_path(node: ast.AST) -> list[str]:
    """Return ["training", "steps"] of `config.training.steps`."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return parts if isinstance(node, ast.Name) and len(parts) > 0 else []


def _arguments(call: ast.Call, path: str, places: dict[str, tuple[int, int]]) -> dict[str, Any]:
    out = dict[str, Any]()
    for keyword in call.keywords:
        assert keyword.arg is not None  # `parse_python` refuses `**`.
        inner = f"{path}.{keyword.arg}" if path else keyword.arg
        places[inner] = (keyword.lineno, keyword.col_offset + 1)
        out[keyword.arg] = _value(keyword.value, inner, places)
    return out


def _value(node: ast.expr, path: str, places: dict[str, tuple[int, int]]) -> Any:
    """Return a literal, the arguments of a configuration class, or UNKNOWN."""
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if re.search(r"(Config|AC)(\.Config)?$", name):
            given = _arguments(node, path, places)
            kind = name.removesuffix(".Config").rpartition(".")[2]
            return {"class": kind, **given} if kind.endswith("AC") else given
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        inner = data.get(part)
        if not isinstance(inner, dict):
            inner = data[part] = {}
        data = inner
    data[path[-1]] = value
