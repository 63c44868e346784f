"""Small changes of the package's code, each at one place: what `tests.bench.mutants` draws from."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from tests.bench.mutants_record import blocks

ROOMS: Final = ("layout/*", "assign/*", "memory/*", "cost/*", "planner/*", "runtime/*")
WEAK: Final = (
    "layout/layout.py", "layout/mesh.py", "layout/schedules.py", "assign/base/types.py",
    "assign/axes/stages.py", "memory/repeat/compose.py", "memory/log/allocator.py",
    "memory/log/driver.py", "memory/replay/optimizer.py", "cost/step.py", "cost/pipeline.py",
    "planner/knapsack/knapsack.py", "planner/solve/search.py", "runtime/train/step.py",
    "runtime/apply/tensor_parallel/tensor_parallel.py", "runtime/watch/guard.py",
    "runtime/apply/loss/vocab_parallel_loss.py", "runtime/apply/parameters/materialize.py",
    "runtime/apply/pipeline/run.py",
)  # fmt: skip
"""Where mutants have survived before: half of the draws are from here."""

COMPARED: Final = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED: Final = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
TEXTS: Final = frozenset({"__repr__", "__str__", "_repr_html_", "_repr_svg_"})
"""Functions that only make text."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file; its place is told by the text of the line, which edits do not move.

    Attributes:
        nth: Which one it is of equal changes of equal lines in the file.
        start: The offset in bytes of what is replaced, to `stop`.
        block: The first line of the innermost block of a function around it; 0 outside of any.
    """

    file: str
    text: str
    change: str
    nth: int
    kind: str
    line: int
    start: int
    stop: int
    new: str
    block: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.file, self.text, self.change, self.nth

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def mutants(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its text."""
    tree = ast.parse(source)
    lines = source.encode().splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    innermost: dict[ast.AST, int] = {}
    for block in blocks(tree):
        for statement in block:
            # An inner block comes later, and overwrites.
            innermost.update(dict.fromkeys(ast.walk(statement), block[0].lineno))
    found: list[Mutant] = []
    seen: dict[tuple[str, str], int] = {}
    for node in _code(tree):
        place = node.test if isinstance(node, ast.If) else node
        start = offsets[place.lineno - 1] + place.col_offset
        stop = offsets[place.end_lineno - 1] + place.end_col_offset
        old = source.encode()[start:stop].decode()
        for kind, new in _changes(node):
            text = lines[place.lineno - 1].decode().strip()
            change = f"{' '.join(old.split())} -> {' '.join(new.split())}"
            if kind.startswith("without "):
                kind, change = "keyword", kind
            nth = seen[text, change] = seen.get((text, change), -1) + 1
            block = innermost.get(node, 0)
            found.append(
                Mutant(file, text, change, nth, kind, place.lineno, start, stop, new, block)
            )
    return found


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that decide what happens: no annotations, assertions or texts of errors."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "names"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_left_out(child):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            yield from _code(child)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        return name in ("Problem", "warn", "warning", "cast", "TypeVar") or name.endswith("Error")
    if isinstance(node, ast.FunctionDef):
        return node.name in TEXTS
    if isinstance(node, ast.keyword):
        return node.arg == "strict"  # It asserts.
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What may stand in the node's place, after the kind of change."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in COMPARED:
            other = ast.Compare(left, [COMPARED[type(operator)]()], [right])
            yield "comparison", f"({ast.unparse(other)})"
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED:
            other = ast.BinOp(left, COMPUTED[type(operator)](), right)
            yield "arithmetic", f"({ast.unparse(other)})"
        case ast.BoolOp(operator, values):
            other = ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            yield "and, or", f"({ast.unparse(other)})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield "boolean", str(not value)
        case ast.Constant(int() | float() as value):
            yield "number", str(value + 1)
        case ast.IfExp(test, body, orelse):
            yield "branch", f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Call(ast.Name(name), arguments, keywords) if name in NAMES:
            other = ast.Call(ast.Name(NAMES[name]), arguments, keywords)
            yield "function", ast.unparse(other)
        case ast.Call(function, arguments, keywords):
            for keyword in keywords:
                # `strict` asserts.
                if keyword.arg not in (None, "strict"):
                    rest = [each for each in keywords if each is not keyword]
                    yield (
                        f"without {keyword.arg}=",
                        ast.unparse(ast.Call(function, arguments, rest)),
                    )
        case ast.Break():
            yield "loop", "continue"
        case ast.Continue():
            yield "loop", "break"
        case ast.Return(value) if _is_condition(value):
            yield "return", f"return not ({ast.unparse(value)})"
        case ast.If(test) if not isinstance(test, ast.Compare | ast.UnaryOp) or _is_condition(test):
            yield "branch", f"not ({ast.unparse(test)})"
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield "statement", "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"
        case _:
            pass


def _is_condition(node: ast.AST | None) -> bool:
    """Whether its negation is no change that another kind makes already."""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return isinstance(node, ast.BoolOp)


def population(root: Path, only: Sequence[str] = ()) -> dict[str, list[Mutant]]:
    """All mutants of the rooms, by file of the package."""
    found = {}
    for path in sorted((root / "meshplan").rglob("*.py")):
        file = path.relative_to(root / "meshplan").as_posix()
        wanted = not only or any(fnmatch(f"meshplan/{file}", each) for each in only)
        if wanted and any(fnmatch(file, room) for room in ROOMS):
            found[file] = mutants(file, path.read_text())
    return {file: each for file, each in found.items() if each}


def draw(population: dict[str, list[Mutant]], num: int, seed: int) -> list[Mutant]:
    """Mutants at random, in turn from where they survived before and from anywhere.

    A file is as likely as it has places; in a file all kinds of change are as likely.
    """
    random_ = random.Random(seed)
    left = {file: list(each) for file, each in population.items()}
    drawn: list[Mutant] = []
    while len(drawn) < num and left:
        files = [file for file in left if file in WEAK] if len(drawn) % 2 == 0 else []
        files = files or list(left)
        (file,) = random_.choices(files, [len(left[each]) for each in files])
        kind = random_.choice(sorted({each.kind for each in left[file]}))
        mutant = random_.choice([each for each in left[file] if each.kind == kind])
        left[file].remove(mutant)
        if not left[file]:
            del left[file]
        drawn.append(mutant)
    return drawn
