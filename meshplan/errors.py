"""Errors in a user's input: what is wrong, where it is written, and how to fix it.

This module defines how a problem is stored and printed. The checks themselves are in the other
packages: each check collects its `Problem`s and raises all of them in one error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from meshplan.shown import shown


@shown
@dataclass(frozen=True, slots=True)
class Origin:
    """The place where the user stated a value.

    Args:
        file: The plan file as the user named it, or a word such as "<mapping>" or "--set".
        path: The dotted path inside the file, such as "rules[0].place.tp"; "" for the whole file.
        line: 1-based line, 0 when the source has no lines.
        column: 1-based column, 0 when the source has no columns.
        digest: SHA-256 of the text that was parsed, "" if the value was not read from a file.
    """

    file: str
    path: str = ""
    line: int = 0
    column: int = 0
    digest: str = field(default="", compare=False, repr=False)

    @property
    def place(self) -> str:
        """`file:line:column` as compilers print it, or only the file if there is no line."""
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def __str__(self) -> str:
        return f"{self.place}: {self.path}" if self.path else self.place


@shown
@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: what is wrong, where it is written, how to fix it.

    Args:
        what: One sentence without a full stop.
        origin: The place where the user wrote it; None if it is not written in any file.
        fix: One sentence that says what to do; "" when there is no single answer.
    """

    what: str
    origin: Origin | None = None
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.origin}: {self.what}" if self.origin else self.what
        return f"{head}\n    fix: {self.fix}" if self.fix else head


@shown
class MeshplanError(Exception):
    """Base class of all errors that meshplan raises on purpose; `problems` has every `Problem`."""

    __repr_fields__ = ("problems",)

    def __init__(self, problems: Problem | str | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem(problems)
        self.problems: Sequence[Problem] = (
            (problems,) if isinstance(problems, Problem) else tuple(problems)
        )
        super().__init__(self.render())

    def __reduce__(self) -> tuple[object, ...]:
        """Return how a copy on another rank is made: of its problems, not of their text."""
        return type(self), (tuple(self.problems),), self.__dict__

    def render(self) -> str:
        """Return the message as the command line prints it: a count, then each problem."""
        return findings_to_text("problem", self.problems)


def findings_to_text(noun: str, findings: Sequence[Problem]) -> str:
    """Return a line with the number of findings, then the findings.

    >>> print(findings_to_text("warning", [Problem("this decides nothing", fix="remove it")]))
    meshplan: 1 warning
    this decides nothing
        fix: remove it
    """
    head = f"meshplan: {len(findings)} {noun}{'' if len(findings) == 1 else 's'}"
    return "\n".join([head, *map(str, findings)])


class SpecError(MeshplanError, ValueError):
    """The plan file or the command line cannot be read."""


class PlanError(MeshplanError, ValueError):
    """The plan can be read but does not work for this model and these devices."""


class UnstatedError(PlanError):
    """The plan leaves out a value that the answer depends on and that only the user knows."""


class ApplyError(MeshplanError, RuntimeError):
    """The live model or the running job does not agree with the plan."""


class StateError(MeshplanError, RuntimeError):
    """A saved training state is damaged, does not fit the model, or cannot be written."""


class MissingStateError(StateError, FileNotFoundError):
    """The folder has no whole training state, or none of the step asked for."""


def check_all(*checks: Callable[[], object]) -> None:
    """Call every check, and raise one error with the problems of all, to be mended in one round.

    Raises:
        PlanError: At least one check raised a PlanError.
    """
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except PlanError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems)
