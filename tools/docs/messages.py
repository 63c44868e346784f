"""Every message that meshplan can print about a user's input, collected from the source by `ast`.

A message is made where the fact is known: by `Problem(what, origin, fix)`, by `found.add(where,
what, fix)` while a plan is read, by an error class that is given its text, or by a row of
`spec/compatibility.py`. Text that is put together at run time is followed as far as it can be:
through local variables, constants and functions that return text. What remains is shown as "…".
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

HOLE: Final = "…"
_MOST: Final = 16
"""Alternatives of one text that are followed; a message has rarely more than three."""
_DEEPEST: Final = 6
_FEWEST_LETTERS: Final = 8
"""Letters of a message's own; one with fewer repeats what another message or torch says."""
_MOST_CALLS: Final = 40
"""Calls of a function from which texts of an argument are taken."""
_MAKES: Final = re.compile(r"\b(?:Problem|Clash|\w+Error)\(|found\.add\(")
_CLASH: Final = ("left", "right", "why", "instead")
_ERRORS: Final = {"MeshplanError", "SpecError", "PlanError", "UnstatedError", "ApplyError"}
_FORMATS: Final = {"str", "repr", "join", "show", "quote", "format_bytes"}
"""Functions that format a value of the user: nothing of their text is a message's own."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Args:
        module: Path of its source file, from below the package.
        line: Line of its source file.
        what: What is wrong, with `HOLE` for what is known only at run time.
        where: The key or flag that the message points to, if it is always the same one.
        fix: What to do; "" if the message has no fix.
    """

    module: str
    line: int
    what: str
    where: str
    fix: str


@dataclass(slots=True)
class _Module:
    path: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    makers: dict[str, list[str]] = field(default_factory=dict)
    """Functions that pass what they are given as `what` on to a `Problem`, with their arguments."""
    calls: dict[str, list[tuple[ast.Call, list[ast.FunctionDef]]]] = field(default_factory=dict)
    """Calls by the name of their function, each with the functions that it stands in."""


@cache
def collect(package: Path) -> tuple[Message, ...]:
    """Return the messages of a package, in the order of its files and lines."""
    modules = _Modules(package)
    sources = [name for name, path in modules.paths.items() if _MAKES.search(path.read_text())]
    parsed = [modules[name] for name in sources]
    found = {
        (message.module, message.what, message.fix): message
        for module in parsed
        for message in _Collector(module, modules).messages()
    }
    return tuple(found.values())


def _parse(name: str, path: Path) -> _Module:
    module = _Module(name, ast.parse(path.read_text(encoding="utf-8")))
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    module.constants[target.id] = node.value
        elif isinstance(node, ast.FunctionDef):
            module.functions[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module.imports[alias.asname or alias.name] = (node.module, alias.name)
    _note_calls(module, module.tree, [])
    return module


def _note_calls(module: _Module, node: ast.AST, scopes: list[ast.FunctionDef]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            name = _name_of(child.func)
            module.calls.setdefault(name, []).append((child, scopes))
            if name == "Problem" and child.args and _name_of(child.args[0]) == "what":
                for function in scopes:
                    names = [each.arg for each in function.args.args if each.arg != "self"]
                    if "what" in names:
                        module.makers[function.name] = names
        inner = [*scopes, child] if isinstance(child, ast.FunctionDef) else scopes
        _note_calls(module, child, inner)


class _Modules(dict[str, _Module]):
    """The modules of a package by dotted name, each parsed when it is first asked for."""

    def __init__(self, package: Path) -> None:
        super().__init__()
        self.package = package
        self.paths = {
            ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): path
            for path in sorted(package.rglob("*.py"))
        }

    def __missing__(self, name: str) -> _Module:
        path = self.paths[name]
        self[name] = _parse(str(path.relative_to(self.package)), path)
        return self[name]


class _Collector:
    """Finds the messages of one module."""

    def __init__(self, module: _Module, others: _Modules) -> None:
        self.module, self.others = module, others

    def messages(self) -> Iterator[Message]:
        calls = [each for calls in self.module.calls.values() for each in calls]
        for call, scopes in sorted(calls, key=lambda each: (each[0].lineno, each[0].col_offset)):
            yield from self._of_call(call, scopes)

    def _of_call(self, call: ast.Call, scopes: list[ast.FunctionDef]) -> Iterator[Message]:
        values = self._arguments(call)
        if values is None:
            return
        if "why" in values:
            left, right, why, fix = (self._text(values.get(name), scopes)[0] for name in _CLASH)
            pairs = [(f"{left} and {right} do not go together: {why}", fix)]
        else:
            fixes = self._variants(values["fix"], scopes) if "fix" in values else [("", ())]
            pairs = _paired(self._variants(values.get("what"), scopes), fixes)
        for what, fix in pairs[:_MOST]:
            if sum(letter.isalpha() for letter in what) >= _FEWEST_LETTERS:
                where = _key_of(values.get("origin"))
                yield Message(self.module.path, call.lineno, what.strip(), where, fix.strip())

    def _variants(
        self, node: ast.expr | None, scopes: Sequence[ast.FunctionDef]
    ) -> list[tuple[str, _Blocks]]:
        """Return the texts of an expression, each with the branches in which it has that text."""
        for number in range(len(scopes) - 1, -1, -1):
            flow = _flow_of(scopes[number])
            if isinstance(node, ast.Name) and node.id in flow.values:
                return self._of_variable(node, flow, scopes[: number + 1], 1)
        return [(text, ()) for text in self._text(node, scopes)]

    def _arguments(self, call: ast.Call) -> dict[str, ast.expr] | None:
        """Return the arguments of a call that makes a message; None if it makes none."""
        name = _name_of(call.func)
        if name in _ERRORS:
            is_text = len(call.args) == 1 and isinstance(call.args[0], ast.Constant | ast.JoinedStr)
            return {"what": call.args[0]} if is_text else None
        if name == "Problem":
            names: Sequence[str] = ("what", "origin", "fix")
        elif name == "Clash":
            names = _CLASH
        elif name == "add" and isinstance(call.func, ast.Attribute):
            if _name_of(call.func.value).lstrip("_") != "found" or len(call.args) not in (2, 3):
                return None
            names = ("origin", "what", "fix")
        elif name == "PatternError" or (name == "ValueError" and self.module.path == "units.py"):
            names = ("what", "fix")
        elif name in self.module.makers:
            names = self.module.makers[name]
        else:
            return None
        given = dict(zip(names, call.args, strict=False))
        return given | {word.arg: word.value for word in call.keywords if word.arg}

    def _text(
        self, node: ast.expr | None, scopes: Sequence[ast.FunctionDef], depth: int = 0
    ) -> list[str]:
        """Return the texts that an expression may have."""
        if depth > _DEEPEST:
            return [HOLE]
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Constant(value=int() | float() as value):
                return [str(value)]
            case ast.JoinedStr(values=parts):
                return _joined([self._text(part, scopes, depth) for part in parts])
            case ast.FormattedValue(value=value):
                inner = self._text(value, scopes, depth + 1)
                return inner if all(text != HOLE for text in inner) else [HOLE]
            case ast.BinOp(right=ast.Constant(value=int())):
                return [HOLE]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined([self._text(left, scopes, depth), self._text(right, scopes, depth)])
            case ast.IfExp(body=body, orelse=orelse):
                both = self._text(body, scopes, depth) + self._text(orelse, scopes, depth)
                return list(dict.fromkeys(both))[:_MOST]
            case ast.BoolOp(op=ast.Or(), values=values):
                every = [text for each in values for text in self._text(each, scopes, depth)]
                return list(dict.fromkeys(t for t in every if t not in ("", HOLE))) or [HOLE]
            case ast.Name():
                return self._of_name(node, scopes, depth + 1)
            case ast.Call(func=func, args=args):
                return self._of_function(_name_of(func), args, scopes, depth + 1)
            case ast.Subscript(value=ast.Call(func=func), slice=ast.Constant(value=int(number))):
                return self._of_function(_name_of(func), [], scopes, depth + 1, number)
        return [HOLE]

    def _of_name(self, node: ast.Name, scopes: Sequence[ast.FunctionDef], depth: int) -> list[str]:
        for number in range(len(scopes) - 1, -1, -1):
            flow = _flow_of(scopes[number])
            if node.id in flow.values:
                found = self._of_variable(node, flow, scopes[: number + 1], depth)
                return [text for text, _ in found]
            if node.id in flow.arguments:
                return self._of_argument(node.id, scopes[number], depth)
        if node.id in self.module.constants:
            return self._text(self.module.constants[node.id], [], depth)
        source, original = self.module.imports.get(node.id, ("", ""))
        other = self.others[source] if source in self.others.paths else None
        if other is not None and original in other.constants:
            return _Collector(other, self.others)._text(other.constants[original], [], depth)
        return [HOLE]

    def _of_argument(self, name: str, function: ast.FunctionDef, depth: int) -> list[str]:
        """Return the constant texts that callers give to an argument."""
        arguments = [each.arg for each in function.args.args if each.arg != "self"]
        makes_messages = function.name in self.module.makers
        if name not in arguments or makes_messages or function.name not in self.module.functions:
            return [HOLE]
        texts: list[str] = []
        for module in list(self.others.values()):
            home = (f"meshplan.{self.module.path[:-3].replace('/', '.')}", function.name)
            if module is not self.module and home not in module.imports.values():
                continue
            for call, scopes in module.calls.get(function.name, [])[:_MOST_CALLS]:
                given = dict(zip(arguments, call.args, strict=False))
                given |= {word.arg: word.value for word in call.keywords if word.arg}
                if name in given:
                    texts += _Collector(module, self.others)._text(given[name], scopes, depth + 2)
        # What one caller takes from the user is the user's everywhere.
        is_constant = all(any(letter.isalpha() for letter in text) for text in texts)
        return list(dict.fromkeys(texts))[:_MOST_CALLS] if texts and is_constant else [HOLE]

    def _of_variable(
        self, use: ast.Name, flow: _Flow, scopes: Sequence[ast.FunctionDef], depth: int
    ) -> list[tuple[str, _Blocks]]:
        """Return the texts that a variable may have where it is used, with their branches."""
        found: list[tuple[str, _Blocks]] = []
        here = flow.blocks.get(use, ())
        for value, is_added, blocks in flow.values[use.id]:
            if use in flow.blocks and not _reaches(value, blocks, use, here):
                continue
            new = self._text(value, scopes, depth)
            # What was set outside of this branch remains where the branch is not taken.
            is_always = here[: len(blocks)] == blocks
            kept = [] if is_always else [each for each in found if each[1][: len(blocks)] != blocks]
            if is_added:
                before = [each for each in found if not _exclude(each[1], blocks)]
                new_ones = [
                    (text, max(old, blocks, key=len))
                    for each, old in before
                    for text in _joined([[each], new])
                ]
            else:
                new_ones = [(text, blocks) for text in new]
            found = kept + new_ones
        return found[:_MOST] or [(HOLE, ())]

    def _of_function(
        self,
        name: str,
        args: list[ast.expr],
        scopes: Sequence[ast.FunctionDef],
        depth: int,
        number: int | None = None,
    ) -> list[str]:
        """Return the texts that a function returns, or that it returns as one of several values."""
        if name == "did_you_mean" and len(args) == 3:
            return self._text(args[2], scopes, depth)
        function, home = self.module.functions.get(name), self
        if function is None and name in self.module.imports:
            source, original = self.module.imports[name]
            if source in self.others.paths:
                home = _Collector(self.others[source], self.others)
                function = home.module.functions.get(original)
        if function is None or name in _FORMATS:
            return [HOLE]
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        if number is not None:
            several = [each.elts for each in returned if isinstance(each, ast.Tuple)]
            parts = [each[number] for each in several if number < len(each)]
            return [text for part in parts for text in home._text(part, [function], depth)]
        if _name_of(function.returns) != "str":
            return [HOLE]
        texts = [text for value in returned for text in home._text(value, [function], depth)]
        # A function that only formats, such as of a number of bytes, adds no words.
        return list(dict.fromkeys(t for t in texts if len(t) > 12))[:_MOST] or [HOLE]


_Blocks = tuple[tuple[ast.AST, str], ...]
"""The blocks around a node, outermost first: a statement, and which of its lists of statements."""


@dataclass(slots=True)
class _Flow:
    """What a function assigns, and where.

    Args:
        arguments: Names of its arguments.
        values: By name, in the order of lines: the value, whether it is added to what was there,
            and the blocks that the assignment is in.
        blocks: The blocks around each name that is read.
    """

    arguments: set[str]
    values: dict[str, list[tuple[ast.expr, bool, _Blocks]]]
    blocks: dict[ast.AST, _Blocks]


@cache
def _flow_of(function: ast.FunctionDef) -> _Flow:
    named = function.args
    every = [*named.posonlyargs, *named.args, *named.kwonlyargs, named.vararg, named.kwarg]
    flow = _Flow({each.arg for each in every if each}, defaultdict(list), {})

    def visit(node: ast.AST, blocks: _Blocks) -> None:
        flow.blocks[node] = blocks
        if isinstance(node, ast.AugAssign):
            flow.values[_name_of(node.target)].append((node.value, True, blocks))
        elif isinstance(node, ast.NamedExpr):
            flow.values[node.target.id].append((node.value, False, blocks))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name, value in _parts(target, node.value):
                    flow.values[name].append((value, False, blocks))
        elif isinstance(node, ast.For):
            for each in ast.walk(node.target):
                if isinstance(each, ast.Name):
                    flow.arguments.add(each.id)
        for key, value in ast.iter_fields(node):
            is_block = isinstance(value, list) and value and isinstance(value[0], ast.stmt)
            inner = (*blocks, (node, key)) if is_block and node is not function else blocks
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, inner)

    visit(function, ())
    return flow


def _reaches(value: ast.expr, blocks: _Blocks, use: ast.Name, here: _Blocks) -> bool:
    """Return True if an assignment comes before a use, and in no branch that excludes it."""
    end = (value.end_lineno or value.lineno, value.end_col_offset or 0)
    if end > (use.lineno, use.col_offset) or _exclude(blocks, here):
        return False
    ends = [getattr(node, key)[-1] for node, key in blocks if (node, key) not in here]
    return not any(isinstance(last, ast.Return | ast.Raise | ast.Continue) for last in ends)


def _exclude(first: _Blocks, second: _Blocks) -> bool:
    """Return True if one place is in the body of a statement and the other in its else."""
    for (node, key), (other, other_key) in zip(first, second, strict=False):
        if node is not other:
            return False
        if key != other_key:
            return True
    return False


def _paired(
    whats: list[tuple[str, _Blocks]], fixes: list[tuple[str, _Blocks]]
) -> list[tuple[str, str]]:
    """Return what is wrong with how to fix it, for texts that are set in the same branches."""
    if [blocks for _, blocks in whats] == [blocks for _, blocks in fixes]:
        pairs = [(what, fix) for (what, _), (fix, _) in zip(whats, fixes, strict=True)]
    else:
        pairs = [
            (what, fix)
            for what, blocks in whats
            for fix, other in fixes
            if not _exclude(blocks, other)
        ]
    return list(dict.fromkeys(pairs))


def _parts(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that an assignment sets, and what it gives to each of them."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        is_split = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        for number, each in enumerate(target.elts):
            if isinstance(each, ast.Name):
                part = ast.Subscript(value, ast.Constant(number), ctx=ast.Load())
                yield each.id, value.elts[number] if is_split else ast.copy_location(part, value)


def _key_of(node: ast.expr | None) -> str:
    """Return the key or flag that a place names as a constant."""
    if isinstance(node, ast.Call) and _name_of(node.func) in ("Origin", "origin"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return first.value
    return ""


def _joined(parts: Sequence[Sequence[str]]) -> list[str]:
    """Return every way of writing one text of each part after the other."""
    texts = ["".join(each) for each in itertools.islice(itertools.product(*parts), _MOST)]
    return list(dict.fromkeys(text.replace(HOLE + HOLE, HOLE) for text in texts))


def _name_of(node: ast.expr | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
