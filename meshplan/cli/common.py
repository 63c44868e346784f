"""Helpers that all subcommands share: exit codes, common flags, the plan file, and output."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshplan.api.source import Source, SourceArguments
from meshplan.errors import Problem, SpecError
from meshplan.render.base.text import envelope, folded, terminal_width, wants_colour
from meshplan.spec.recipes import plans_in
from meshplan.spec.spec import PROFILES
from meshplan.spec.trust import as_code_name

YES, NO, COULD_NOT = 0, 1, 2
INTERRUPTED = 130
"""Exit code after Ctrl-C, as of shells: 128 and the number of SIGINT."""
FIRST_AFTER_S = 2.0
"""Seconds after which `told_if_slow` says for the first time what is going on."""
THEN_EVERY_S = 10.0
_MOST_PLANS = 8
"""Plans of a directory that a message names."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A subcommand of `meshplan`.

    Args:
        name: Name of the subcommand.
        help: One line for `meshplan --help`.
        add_flags: Adds the subcommand's own flags to its parser, which has the common flags.
        run: Prints the answer and returns the exit code.
    """

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def model_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that name a model."""
    parser.add_argument(
        "--model", metavar="PKG.MOD:FN", type=as_code_name, help="a function that builds the model"
    )
    parser.add_argument("--config", metavar="PATH", help="a Hugging Face config.json or its folder")


def machine_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that state the memory of a device."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="name of the GPU, h100-sxm-80gb or a100-40g; or its facts, memory=48GB,bf16=181e12",
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of one GPU: 80GiB, 24GB")


def profile_flag(parser: argparse.ArgumentParser) -> None:
    """Declare `--profile`, for subcommands that estimate step times."""
    parser.add_argument(
        "--profile", metavar="NAME|FILE", action=_TakeProfile,
        help=f"whose code runs the step ({', '.join(PROFILES)}), or a profile that calibrate wrote",
    )  # fmt: skip


class _TakeProfile(argparse.Action):
    """Takes the path of a profile; a name becomes the statement `profile: NAME` of the plan."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values in PROFILES:
            namespace.set = [*namespace.set, f"profile={values}"]
        else:
            namespace.profile = values


def free_flag(parser: argparse.ArgumentParser) -> None:
    """Declare `--free`, for subcommands that search for a plan."""
    parser.add_argument(
        "--free", metavar="KEY", action="append", default=[],
        help="let the planner choose a key that the plan states: mesh.tp, loss_chunks",
    )  # fmt: skip


def plan_file(args: argparse.Namespace) -> str:
    """Return the plan file that -f names: a file, or the only plan in a directory.

    Without -f it is the only plan of the working directory.

    Raises:
        SpecError: There is none, or there are several.
    """
    if args.file is not None and not os.path.isdir(args.file):
        return str(args.file)
    folder = args.file or os.curdir
    found = plans_in(folder)
    if len(found) != 1:
        where = "the working directory" if args.file is None else f"the directory {args.file}"
        what, fix = f"no plan file is given, and {where} has no plan", "add -f plan.yaml"
        if found:
            what = f"no plan file is given, and {where} has {len(found)}"
            fix = "add one of " + ", ".join(f"-f {path}" for path in found[:_MOST_PLANS])
        elif args.file is None:
            fix += ", or write a first plan with meshplan init"
        raise SpecError(Problem(what, None, fix))
    args.file = str(found[0])
    print_notes(args, [f"reads {args.file}, the only plan here"])
    return str(args.file)


def source_of(args: argparse.Namespace) -> Source:
    """Return the `Source` that the flags describe; fields without a flag keep their default.

    Raises:
        SpecError: No plan file is given, or `--free` names a key that the planner does not choose.
    """
    overrides = args.set
    if getattr(args, "free", None):
        from meshplan.api.planning import overrides_of_free  # numpy

        overrides = [*overrides, *overrides_of_free(args.free)]
    given = {each: getattr(args, each, None) for each in SourceArguments.__annotations__}
    return Source(plan_file(args), tuple(overrides), **given)


def answer(args: argparse.Namespace, *lines: str) -> None:
    """Print lines of the answer to `args.answers`.

    `args.answers` is the real stdout. While a subcommand runs, `sys.stdout` is redirected to
    stderr, so that text which the code of a user's model prints does not mix with the answer.
    """
    answer_exactly(args, _fitted("\n".join(lines)))


def answer_json(
    args: argparse.Namespace, schema: str, result: Mapping[str, Any], notes: Sequence[str] = ()
) -> None:
    """Print an answer as JSON, in the envelope of `--json`."""
    answer_exactly(args, envelope(schema, result, notes))


def answer_exactly(args: argparse.Namespace, text: str) -> None:
    """Print an answer that a program reads, whose lines stay as they are in a narrow terminal."""
    print(text, file=args.answers, flush=True)


def print_error(text: str) -> None:
    """Print text for the user to stderr."""
    print(_fitted(text), file=sys.stderr)


def _fitted(text: str) -> str:
    """Fold the lines of a text to the terminal's width, if it has one."""
    width = terminal_width()
    if width is None:
        return text
    return "\n".join(piece for line in text.split("\n") for piece in folded(line, width))


def colours(args: argparse.Namespace) -> bool:
    """Return True if the answer is printed in colour."""
    return wants_colour(args.answers, no_color=args.no_color)


@contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once the user has pressed Ctrl-C.

    The first Ctrl-C only asks for the best answer so far, which no verb writes to a file unless a
    flag says so; the second one raises KeyboardInterrupt.
    """
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python allows signal handlers in the main thread only.
        return

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


def noting(args: argparse.Namespace, kept: list[str] | None = None) -> Callable[[str], None]:
    """Return a function that prints a note immediately and appends it to `kept`, if given."""

    def note(text: str) -> None:
        if kept is not None:
            kept.append(text)
        print_notes(args, [text])

    return note


def print_notes(args: argparse.Namespace, notes: Sequence[str]) -> None:
    """Print notes to stderr, unless the user passed `-q`."""
    if not args.quiet:
        for note in notes:
            print_error(f"note: {note}")


@contextmanager
def told_if_slow(args: argparse.Namespace, doing: str) -> Iterator[None]:
    """Say on a terminal what takes seconds, such as importing torch on a busy machine.

    Args:
        args: The flags; with `-q` nothing is said.
        doing: What is done meanwhile, such as `checking plan.yaml`.
    """
    if args.quiet or not sys.stderr.isatty():
        yield
        return
    is_done, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        wait_s = FIRST_AFTER_S
        while not is_done.wait(wait_s):
            print_notes(args, [f"{doing}: {time.monotonic() - begun:.0f} s so far"])
            wait_s = THEN_EVERY_S

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_done.set()
        teller.join()
