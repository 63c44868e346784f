"""What every verb of the command line shares: its row, its exit codes, its plan file, its notes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshplan.errors import Problem, SpecError

YES, NO, COULD_NOT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Verb:
    """One row of the command line.

    Args:
        name: The word.
        help: One line for `meshplan --help`.
        add_flags: Declares its own flags; the common ones are there already.
        run: Answers and returns the exit code.
    """

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def plan_file(args: argparse.Namespace) -> str:
    if args.file is None:
        raise SpecError(Problem("no plan file is given", None, "add -f plan.yaml"))
    return str(args.file)


def print_notes(args: argparse.Namespace, notes: Sequence[str]) -> None:
    """What is good to know but not the answer: on stderr, silenced by `-q`."""
    if not args.quiet:
        sys.stdout.flush()
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
