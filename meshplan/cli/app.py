"""The command line: one function per subcommand, which calls a function of `api` and prints.

Results go to stdout, notes and problems to stderr. Exit codes: 0 the answer is yes, 1 the answer is
no, 2 the question could not be answered, 70 a bug of meshplan, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

from meshplan.api import checking
from meshplan.cli import configs, diff, draw, launching, planning, starting, state, trust
from meshplan.cli.common import (
    COULD_NOT,
    INTERRUPTED,
    NO,
    YES,
    Verb,
    answer,
    answer_json,
    colours,
    machine_flags,
    model_flags,
    noting,
    plan_file,
    print_error,
    print_notes,
    source_of,
    told_if_slow,
)
from meshplan.errors import MeshplanError, Origin, Problem, SpecError, findings_to_text
from meshplan.own_process import IS_OWN
from meshplan.render.base.text import PlainStream, envelope
from meshplan.render.memory.estimate import estimate_to_json, estimate_to_text
from meshplan.spec.recipes import find_plan, plans_in
from meshplan.spec.trust import ALLOW_CODE, as_code_name
from meshplan.spec.values import did_you_mean
from meshplan.textbook.inverse import STATES_ONLY
from meshplan.version import __version__

CRASHED = 70
"""Exit code of sysexits.h for an internal software error (EX_SOFTWARE)."""
_REPORT_TO = "https://github.com/meshplan/meshplan/issues"
_DEMO_PLAN = "hybrid_2x4"
_DEMO_STEPS = 30


def _estimate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", metavar="N", help="number of parameters: 3e9, 3B, 350M")
    parser.add_argument("--config", metavar="PATH", help="a Hugging Face config.json or its folder")
    parser.add_argument("--gpus", metavar="N", help="number of GPUs on all nodes together")
    parser.add_argument("--nodes", metavar="N", help="number of nodes (default 1)")
    machine_flags(parser)
    parser.add_argument(
        "--lora", metavar="ADAPTERS", help="train adapters of a frozen model: "
        "r=16,targets=q_proj:v_proj (or all-linear), or their size, params=6.8M",
    )  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="show formulas, numbers, sources")
    parser.add_argument(
        "--max-params", action="store_true", help="also find the largest model that fits"
    )
    parser.add_argument(
        "--min-gpus", action="store_true", help="also find the fewest GPUs that fit"
    )
    parser.add_argument(
        "--model", metavar="PKG.MOD:FN", type=as_code_name,
        help="with -f: a function that builds the model",
    )  # fmt: skip
    parser.add_argument(
        "--fixes", action="store_true", help="with -f: look for changes that make the plan fit"
    )
    parser.add_argument(
        "--trace", action="store_true", help="with -f and a config: trace the model with torch"
    )
    parser.add_argument(
        "--tier", type=int, choices=(1, 2, 3),
        help="with -f: 1 composes the step from traced blocks, 3 (or 2) traces the whole step",
    )  # fmt: skip


def _estimate(args: argparse.Namespace) -> int:
    if _asks_for_peaks(args):
        return _estimate_peaks(args)
    of_peaks = {"--model": args.model, "--fixes": args.fixes, "--trace": args.trace,
                "--tier": args.tier}  # fmt: skip
    if any(of_peaks.values()):
        flag = next(name for name, value in of_peaks.items() if value)
        what = f"{flag} is about the peak memory of a step, which needs a plan with a model"
        fix = "add -f plan.yaml whose 'model' is a function or a config, and leave out --params, "
        fix += "--gpus, --nodes, --lora, --explain, --max-params and --min-gpus"
        raise SpecError(Problem(what, Origin(flag), fix))
    estimate = checking.estimate_states(
        params=args.params,
        config=args.config,
        gpus=args.gpus,
        nodes=args.nodes,
        gpu=args.gpu,
        memory=args.memory,
        lora=args.lora,
        plan=args.file,
        overrides=args.set,
        ask_max_params=args.max_params,
        ask_min_gpus=args.min_gpus,
    )
    explain = args.explain or args.verbose
    if args.json:
        result = estimate_to_json(estimate, explain=explain)
        answer_json(args, "estimate/1", result, estimate.notes)
    else:
        answer(args, *estimate_to_text(estimate, explain=explain, colour=colours(args)))
        print_notes(args, [note for note in estimate.notes if note != STATES_ONLY])
    return YES if estimate.is_possible else NO


def _asks_for_peaks(args: argparse.Namespace) -> bool:
    """Return True if a plan and its model are named, and no flag asks about states alone.

    Without flags of the size of a model, the only plan of the directory counts as named.
    """
    of_states = (args.params, args.gpus, args.nodes)
    is_of_states = args.explain or args.max_params or args.min_gpus or args.lora is not None
    if is_of_states or any(flag is not None for flag in of_states):
        return False
    if args.file is None and args.config is None and plans_in(os.curdir):
        plan_file(args)  # As for every other verb.
    if args.file is None:
        return False
    if args.model is not None or args.config is not None:
        return True
    from meshplan.spec.reader import load_spec

    stated = load_spec(args.file, args.set).model
    return stated is not None and stated.params is None


def _estimate_peaks(args: argparse.Namespace) -> int:
    from meshplan.render.memory.memory import memory_to_json, memory_to_text

    estimate = checking.estimate_memory(
        source_of(args),
        fixes=True if args.fixes else None,
        trace=args.trace,
        tier=args.tier,
        report=noting(args),
    )
    if args.json:
        answer_json(args, "memory/1", memory_to_json(estimate), estimate.notes)
    else:
        colour = colours(args)
        answer(
            args, *memory_to_text(estimate, str(args.file), colour=colour, by_module=args.verbose)
        )
        print_notes(args, estimate.notes)
    return NO if estimate.fits is False else YES


def _check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plans", nargs="*", metavar="PLAN", help="plan files; same as -f")
    model_flags(parser)


def _check(args: argparse.Namespace) -> int:
    """Check the plan of -f, or each of several plans; the worst answer is the exit code."""
    if not args.plans:
        return _check_one(args)
    if args.file is not None:
        what = "-f and the words after check both name plans"
        raise SpecError(Problem(what, None, "leave one of them out"))
    if args.json and len(args.plans) > 1:
        what = "--json describes one plan, and several are named"
        raise SpecError(Problem(what, Origin("--json"), "name one plan"))
    codes = []
    for path in args.plans:
        args.file = path
        try:
            codes.append(_check_one(args))
        except MeshplanError as error:
            if len(args.plans) == 1:
                raise
            print_error(str(error))
            codes.append(COULD_NOT)
    return max(codes)


def _check_one(args: argparse.Namespace) -> int:
    from meshplan.render.base.findings import findings_to_json

    try:
        path = plan_file(args)
        with told_if_slow(args, f"checking {path}"):
            checked = checking.check_plan(source_of(args))
    except SpecError as error:
        if not args.json:
            raise
        answer_json(args, "check/1", findings_to_json(error.problems))
        return COULD_NOT
    if args.json:
        result = findings_to_json(checked.problems, checked.warnings)
        answer_json(args, "check/1", result, checked.notes)
    else:
        for noun, findings in (("problem", checked.problems), ("warning", checked.warnings)):
            if findings:
                answer(args, findings_to_text(noun, findings))
        if checked.is_ok:
            plan = checked.plan
            answer(args, f"{path}: ok" + (f", {plan.graph.name} on {plan.mesh}" if plan else ""))
        print_notes(args, checked.notes)
    return YES if checked.is_ok else NO


def _demo_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", metavar="PLAN", help="a recipe's name or a plan file; same as -f")
    parser.add_argument(
        "--steps", metavar="N", type=int, default=_DEMO_STEPS, help="number of training steps"
    )


def _demo(args: argparse.Namespace) -> int:
    from meshplan.memory import state_bytes_by_rank
    from meshplan.render.base.progress import loss_progress
    from meshplan.render.demo import agrees, bytes_to_text, demo_to_json, losses_to_text
    from meshplan.render.layouts.show import plan_to_text
    from meshplan.runtime import demo
    from meshplan.runtime.base import local_ranks
    from meshplan.spec.reader import load_spec

    if args.file and args.plan:
        raise SpecError(Problem("-f and --plan both name the plan", None, "leave one of them out"))
    local_ranks.prepare()  # The processes' parent imports torch while the plan is read here.
    path = find_plan(args.plan or args.file or _DEMO_PLAN)
    plan = checking.decide(
        path, args.set, model=demo.entry_of(load_spec(path, args.set)), noted=noting(args)
    )
    demo.check_demo(plan, args.steps)
    if not args.json:
        answer(args, *plan_to_text(plan, colour=colours(args)), "")
    world, steps = plan.mesh.world_size, args.steps
    print_notes(args, [f"{world} processes on the CPU of this machine, and gloo between them"])
    with loss_progress(f"{world} ranks", steps, is_quiet=args.quiet) as on_step:
        losses, live = demo.train_under_plan(plan, steps, on_step)
    with loss_progress("1 process", steps, is_quiet=args.quiet) as on_step:
        alone = demo.train_alone(plan, steps, on_step)
    tolerance = demo.tolerance(plan)
    predicted = state_bytes_by_rank(plan.assignment, plan.spec.optimizer)
    if args.json:
        result = demo_to_json(losses, alone, tolerance, live, predicted)
        answer_json(args, "demo/1", {"plan": str(path), **result})
    else:
        answer(args, *losses_to_text(losses, alone, world, tolerance), "")
        answer(args, *bytes_to_text(live, predicted))
    return YES if agrees(losses, alone, tolerance) and tuple(live) == predicted else NO


def _verify_flags(parser: argparse.ArgumentParser) -> None:
    model_flags(parser)
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="maximum number of processes (default 16)"
    )


def _verify(args: argparse.Namespace) -> int:
    from meshplan.render.verify import verdict_to_json, verdict_to_text

    path, notes = plan_file(args), list[str]()
    say = noting(args, notes)
    verdict = checking.verify_plan(source_of(args), max_ranks=args.ranks, report=say)
    if args.json:
        answer_json(args, "verify/1", {"plan": path, **verdict_to_json(verdict)}, notes)
    else:
        answer(args, *verdict_to_text(verdict, path))
    return YES if verdict.is_ok else NO


VERBS: tuple[Verb, ...] = (
    *starting.VERBS[:1],
    Verb(
        "estimate",
        "estimate the memory of a plan's step, or of the states under every strategy",
        _estimate_flags,
        _estimate,
    ),
    Verb("check", "find the mistakes of a plan before a process starts", _check_flags, _check),
    *planning.VERBS,
    *diff.VERBS,
    *draw.VERBS,
    trust.VERB,
    Verb("verify", "compare a scaled-down plan with one process", _verify_flags, _verify),
    *launching.VERBS,
    state.VERB,
    *configs.VERBS,
    Verb("demo", "train under a plan on this machine and in one process", _demo_flags, _demo),
    *starting.VERBS[1:],
)
"""All subcommands, in the order of `meshplan --help`."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises usage errors as SpecError and accepts no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        fix = f"see {self.prog} --help"
        wrong = re.match(r"argument VERB: invalid choice: '(.*)' \(", message)
        if wrong is not None:
            verbs = [verb.name for verb in VERBS]
            message = f"there is no verb '{wrong[1]}'"
            fix = did_you_mean(wrong[1], verbs, f"write one of {', '.join(verbs)}")
            if wrong[1] in ("why", "why-not"):  # The first word of a question.
                fix = f"did you mean 'explain {wrong[1]}'?"
        raise SpecError(Problem(message, None, fix))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        SpecError: The verb has no such flag or argument; the message names the closest flag.
        SystemExit: The help was printed: asked for, or because no verb is given.
    """
    if not (sys.argv[1:] if argv is None else argv):
        _parser().print_help()
        raise SystemExit(COULD_NOT)
    args, unknown = _parser().parse_known_args(argv)
    for action in args.parser._actions:
        if action.nargs in ("+", "*"):  # argparse takes such words only up to the first flag.
            words = [word for word in unknown if not word.startswith("-")]
            setattr(args, action.dest, [*getattr(args, action.dest), *words])
            unknown = [word for word in unknown if word.startswith("-")]
    if not unknown:
        return args
    word = unknown[0].partition("=")[0]
    flags = [flag for action in args.parser._actions for flag in action.option_strings]
    fix = f"see meshplan {args.verb} --help"
    if word.startswith("-"):
        what = f"{args.verb} has no flag {word}"
        fix = did_you_mean(word, flags, fix)
    else:
        what = f"{args.verb} does not take '{word}'"
        if os.path.exists(word) and args.file is None:
            fix = f"write -f {word}"
    raise SpecError(Problem(what, None, fix))


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    flags = common.add_argument_group("flags of every verb")
    flags.add_argument("-f", "--file", metavar="PLAN", help="a plan file, plan.yaml")
    flags.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a value of the plan file: mesh.tp=2",
    )
    flags.add_argument(
        "--allow-code", action="store_true", help="run the code that the plan file names"
    )
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_argument("-q", "--quiet", action="store_true", help="print no notes")
    flags.add_argument("-v", "--verbose", action="store_true", help="print more details")
    flags.add_argument("--no-color", action="store_true", help="no colours, like NO_COLOR=1")
    parser = _Parser(
        prog="meshplan",
        description="Declare how a model is parallelised, estimate its memory, run it.",
    )
    parser.add_argument("--version", action="version", version=f"meshplan {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        sub = verbs.add_parser(verb.name, help=verb.help, description=verb.help, parents=[common])
        verb.add_flags(sub)
        sub.set_defaults(run=verb.run, verb=verb.name, parser=sub, whole_parser=parser)
    return parser


@contextmanager
def _streams() -> Iterator[None]:
    """Replace stdout and stderr by streams that accept any text, and restore them at the end.

    Control characters and characters that the terminal's encoding lacks are escaped. Output to a
    closed stream is dropped.
    """
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, PlainStream(stream))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def _environment(args: argparse.Namespace) -> Iterator[None]:
    """Set environment variables for processes that a subcommand starts, and restore them.

    `args.environment` is the environment before, for programs of the user. The processes start as
    `python -c`, which would search the working directory first for every module; PYTHONSAFEPATH
    prevents this.
    """
    stated = {"PYTHONSAFEPATH": "1"} | ({ALLOW_CODE: "1"} if args.allow_code else {})
    args.environment = dict(os.environ)
    before = {name: os.environ.get(name) for name in stated}
    os.environ.update(stated)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; mistakes of the user are printed, not raised.

    With `--json`, a question that could not be answered also prints its problems as JSON, in schema
    problems/1, which has the keys of check/1.

    Args:
        argv: The arguments after the program's name; if None, `sys.argv[1:]`.
    """
    token = IS_OWN.set(True)
    try:
        with _streams():
            return _main(argv)
    finally:
        IS_OWN.reset(token)


def _main(argv: Sequence[str] | None) -> int:
    """Run one command and return its exit code, also if stdout is full or closed."""
    try:
        return _answer(argv)
    except KeyboardInterrupt:
        # If the interrupt passed through an `exec` of a string, as in libraries that generate code,
        # CPython remembers it as unhandled, and `python -m` would end by SIGINT instead of with
        # this exit code. Every `exec` of a string clears that flag first.
        exec("pass")
        print("meshplan: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Redirect stdout, or the flush at exit raises again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return YES
    except OSError as error:
        # Only writing to stdout gets here, for example on a full disk: `files` raises SpecError.
        print(f"meshplan: the answer cannot be written: {error.strerror}", file=sys.stderr)
        return COULD_NOT
    except Exception as error:
        return _crash(error)


def _answer(argv: Sequence[str] | None) -> int:
    try:
        args = _parse(argv)
        args.answers = sys.stdout
        with _environment(args), redirect_stdout(sys.stderr):
            code: int = args.run(args)
    except MeshplanError as error:
        print_error(str(error))
        if "--json" in (sys.argv[1:] if argv is None else argv):
            from meshplan.render.base.findings import findings_to_json

            print(envelope("problems/1", findings_to_json(error.problems)))
        sys.stdout.flush()
        return COULD_NOT
    except SystemExit as stop:  # argparse raises this after --help and --version.
        return stop.code if isinstance(stop.code, int) else YES
    return code


def _crash(error: Exception) -> int:
    """Print a report on a bug of meshplan itself, and return the exit code."""
    if os.environ.get("MESHPLAN_TRACEBACK"):
        traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    first = (str(error).strip() or "no message").splitlines()[0]
    print(
        f"meshplan: a bug in meshplan: {type(error).__name__} in {where}: {first}\n"
        f"    fix: report it at {_REPORT_TO}, with the output of MESHPLAN_TRACEBACK=1",
        file=sys.stderr,
    )
    return CRASHED
