"""What every verb of the command line shares: its row, its exit codes, its plan file, its notes."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshplan.errors import Problem, SpecError
from meshplan.render.text import wants_colour

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


def model_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that name a model."""
    parser.add_argument("--model", metavar="PKG.MOD:FN", help="a function that builds the model")
    parser.add_argument("--config", metavar="PATH", help="a Hugging Face config.json or its folder")


def free_flag(parser: argparse.ArgumentParser) -> None:
    """Declare `--free`, of verbs that plan."""
    parser.add_argument(
        "--free", metavar="KEY", action="append", default=[],
        help="leave a key to the planner that the plan states: mesh.tp, loss_chunks",
    )  # fmt: skip


def plan_file(args: argparse.Namespace) -> str:
    if args.file is None:
        raise SpecError(Problem("no plan file is given", None, "add -f plan.yaml"))
    return str(args.file)


def answer(args: argparse.Namespace, *lines: str) -> None:
    """Print lines of the answer.

    They go to `args.answers`: stdout as it was before the verb ran. What a model's own code prints
    while a verb builds it or runs its forward goes to stderr, and an answer in JSON stays JSON.
    """
    print(*lines, sep="\n", file=args.answers, flush=True)


def colours(args: argparse.Namespace) -> bool:
    """Return whether the answer is coloured."""
    return wants_colour(args.answers, no_color=args.no_color)


@contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Gives whether Ctrl-C was pressed: the first asks for an answer, the second one stops all."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python lets no other thread know.
        return

    def press(number: int, frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def noting(args: argparse.Namespace, kept: list[str] | None = None) -> Callable[[str], None]:
    """Return what prints a note at once, and keeps it for `--json`."""

    def note(text: str) -> None:
        if kept is not None:
            kept.append(text)
        print_notes(args, [text])

    return note


def print_notes(args: argparse.Namespace, notes: Sequence[str]) -> None:
    """What is good to know but not the answer: on stderr, silenced by `-q`."""
    if not args.quiet:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
