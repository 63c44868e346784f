"""`meshplan diff`: compare two plans, or two locks. `compare`: a run with its plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshplan.api import checking
from meshplan.api.source import Source
from meshplan.cli.common import (
    NO,
    YES,
    Verb,
    answer,
    answer_json,
    machine_flags,
    model_flags,
    noting,
    print_notes,
    profile_flag,
    source_of,
)
from meshplan.errors import MeshplanError, Problem, SpecError

if TYPE_CHECKING:
    from meshplan.planner.answers.difference import PlanDifference


def _diff_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plans", nargs=2, metavar="PLAN", help="a plan file, or a lock")
    model_flags(parser)
    profile_flag(parser)


def _diff(args: argparse.Namespace) -> int:
    from meshplan.api import planning
    from meshplan.planner.answers.difference import figures_of
    from meshplan.planner.answers.lock_difference import difference_of_locks, locks_alone

    if args.file is not None:
        raise SpecError(Problem("diff takes two plans, and -f names a third", None, "leave -f out"))
    if not args.set and (locks := locks_alone(*args.plans)) is not None:
        return _print_difference(args, difference_of_locks(*locks), [])
    sides, known, notes = [], [], list[str]()
    for name in args.plans:
        path, lock = planning.plan_of_lock(name) or (name, None)
        source = Source(path, tuple(args.set), args.model, args.config, profile=args.profile)
        plan = checking.decide(
            source, lock=lock,
            noted=lambda text, name=name: notes.append(f"{name}: {text}"),  # type: ignore[misc]
        )  # fmt: skip
        sides.append((name, plan))
        # The figures in a lock are wrong for a plan changed by --set, and with another profile.
        may_use_lock = not args.set and args.profile is None
        figures = planning.figures_of_lock(path, plan, lock) if may_use_lock else {}
        if not figures and not plan.graph.config and lock is None:
            try:
                figures = figures_of(planning.search_plan(source), plan)
            except MeshplanError as error:
                notes.append(f"{name}: step time and memory are unknown: {error.problems[0].what}")
        known.append(figures)
    found = planning.compare(*sides, profile=args.profile, known=(known[0], known[1]))
    return _print_difference(args, found, notes)


def _print_difference(args: argparse.Namespace, found: PlanDifference, notes: Sequence[str]) -> int:
    from meshplan.render.plans.difference import difference_to_json, difference_to_text

    if args.json:
        answer_json(args, "diff/1", difference_to_json(found), notes)
    else:
        answer(args, *difference_to_text(found))
        print_notes(args, notes)
    return YES if found.is_same else NO


def _compare_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", metavar="RUN", help="the run.json that meshplan.Run wrote")
    for add in (model_flags, machine_flags, profile_flag):
        add(parser)
    parser.add_argument(
        "--within", metavar="PERCENT", type=float, default=10.0,
        help="relative error up to which a prediction holds (default 10)",
    )  # fmt: skip


def _compare(args: argparse.Namespace) -> int:
    from meshplan.api import planning
    from meshplan.render.plans.measured import comparison_to_json, comparison_to_text

    if not args.within >= 0:
        what = f"--within is {args.within:g}, but a relative error cannot be negative"
        raise SpecError(Problem(what))
    notes: list[str] = []
    source = source_of(args)
    found = planning.compare_run(
        args.run_file, source, tolerance=args.within / 100, report=noting(args, notes)
    )
    if args.json:
        answer_json(args, "compare/1", comparison_to_json(found), notes)
    else:
        answer(args, *comparison_to_text(found))
    return NO if found.apart else YES


VERBS: tuple[Verb, ...] = (
    Verb(
        "diff", "compare two plans: which decisions differ, and what that costs",
        _diff_flags, _diff,
    ),
    Verb(
        "compare", "compare what a run took with what its plan predicts",
        _compare_flags, _compare,
    ),
)  # fmt: skip
