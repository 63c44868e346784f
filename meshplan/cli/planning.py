"""`meshplan plan`, `meshplan explain` and `meshplan calibrate`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshplan.api import checking
from meshplan.cli import recording
from meshplan.cli.common import (
    COULD_NOT,
    INTERRUPTED,
    NO,
    YES,
    Verb,
    answer,
    answer_json,
    colours,
    free_flag,
    machine_flags,
    model_flags,
    noting,
    plan_file,
    print_error,
    print_notes,
    profile_flag,
    source_of,
    until_interrupted,
)
from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import check_writable

if TYPE_CHECKING:
    from meshplan.api.source import Source
    from meshplan.planner.lock.changes import FieldChange
    from meshplan.planner.problem.decision import Decision
    from meshplan.planner.space.space import EmptySpaceError


def _request_flags(parser: argparse.ArgumentParser) -> None:
    for add in (model_flags, machine_flags, profile_flag, free_flag):
        add(parser)


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    _request_flags(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="file of the lock (default PLAN.lock.yaml)"
    )
    parser.add_argument("--dry-run", action="store_true", help="write no lock")
    parser.add_argument(
        "--why-not-searched",
        action="store_true",
        help="also list the settings that were not searched, with the reasons",
    )
    parser.add_argument(
        "--keep-best",
        action="store_true",
        help="after Ctrl-C, write the best plan so far as the lock; otherwise nothing is written",
    )
    parser.add_argument(
        "--retarget", metavar="HW", help="plan for other hardware: nodes=4,gpu=h200"
    )
    parser.add_argument(
        "--what-if",
        metavar="HW",
        action="append",
        default=[],
        help="also estimate the plan on other hardware, and plan anew there: gpu=b200; may be "
        "repeated",
    )
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="also list the fastest plans for less and less memory",
    )
    parser.add_argument("--price", metavar="P", help="price of one GPU-hour")
    parser.add_argument(
        "--tokens", metavar="N", help="with --days: tokens of the whole training, such as 15e12"
    )
    parser.add_argument(
        "--days", metavar="D", help="with --tokens: find the fewest nodes that train in D days"
    )


def _plan(args: argparse.Namespace) -> int:
    from meshplan.api import planning
    from meshplan.planner.answers.frontier import undominated
    from meshplan.planner.space.space import EmptySpaceError
    from meshplan.render.plans.sizing import frontier_to_json, frontier_to_text

    old = None
    flags = _PlanFlags(args)
    if args.output is not None and not args.dry_run:
        check_writable(args.output, "the lock")  # A search is not lost to a typing error.
    for words in args.what_if:
        _hardware_settings(flags.source, words, "--what-if")
    if args.retarget is not None and (args.tokens or args.days):
        what = "--retarget needs a number of nodes, which --tokens and --days search"
        fix = "leave --retarget out, or --tokens and --days"
        raise SpecError(Problem(what, Origin("--retarget"), fix))
    if args.what_if and (args.tokens or args.days):
        what = "--what-if needs a number of nodes, which --tokens and --days search"
        fix = "leave --what-if out, or --tokens and --days"
        raise SpecError(Problem(what, Origin("--what-if"), fix))
    if args.retarget is not None:
        from meshplan.api.retargeting import on_other_hardware

        settings = _hardware_settings(flags.source, args.retarget, "--retarget")
        old = checking.decide(replace(flags.source, overrides=tuple(args.set)))
        known = {} if args.set or args.profile else planning.figures_of_lock(flags.path, old)
        args.set = [*args.set, *settings]
        flags.source = on_other_hardware(flags.source, old, args.retarget)
    if args.tokens is not None or args.days is not None:
        return _plan_training(flags)
    with until_interrupted() as is_stopped:
        try:
            decision = planning.search_plan(
                flags.source, report=flags.report, is_stopped=is_stopped, other_layouts=True
            )
        except EmptySpaceError as error:
            return _print_trouble(flags, error, is_stopped)
        if decision.chosen is None:
            return _print_trouble(flags, decision, is_stopped)
        # If the space has only one configuration, its plan is the whole frontier.
        evaluated_plans, is_whole = undominated(decision.evaluated_plans), decision.num_configs == 1
        if args.frontier and not is_whole:
            evaluated_plans, is_whole = planning.find_frontier(
                flags.source, report=flags.report, is_stopped=is_stopped
            )
    more = frontier_to_json(decision, evaluated_plans, is_whole=is_whole)
    lines: list[str] = []
    if args.frontier:
        lines = [
            "",
            *frontier_to_text(evaluated_plans, is_whole=is_whole, is_interrupted=is_stopped()),
        ]
    if old is not None:
        from meshplan.planner.answers.difference import figures_of
        from meshplan.planner.answers.reshard import reshard
        from meshplan.render.plans.retarget import retarget_to_json, retarget_to_text

        assert decision.chosen is not None
        found = planning.compare(
            (str(flags.path), old),
            (args.retarget, decision.chosen.plan),
            profile=args.profile,
            known=(known, figures_of(decision)),
        )
        moved = reshard(old, decision.chosen.plan)
        more["retarget"] = retarget_to_json(found, moved)
        lines += ["", *retarget_to_text(found, moved)]
    if args.what_if and not is_stopped():  # Who pressed Ctrl-C wants no further search.
        more["what_if"], text = _what_if(flags, decision)
        lines += text
    return _print_plan(flags, decision, more, lines, is_interrupted=is_stopped())


def _hardware_settings(source: Source, words: str, flag: str) -> list[str]:
    """Return the statements that make a flag's changes to the hardware.

    Raises:
        SpecError: The plan cannot be read, or not with these changes: the problem is the flag's.
    """
    from meshplan.api.retargeting import retarget_settings

    _ = source.spec
    settings = retarget_settings(words, flag)
    try:
        _ = source.with_overrides(settings).spec
    except SpecError as error:
        raise SpecError(
            replace(each, origin=replace(each.origin, file=flag))
            if each.origin is not None and each.origin.file == "--set"
            else each
            for each in error.problems
        ) from None
    return settings


def _what_if(flags: _PlanFlags, decision: Decision) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the answers to `--what-if`, as JSON and as lines of text."""
    from meshplan.api.retargeting import what_if
    from meshplan.render.plans.retarget import what_if_to_json, what_if_to_text

    assert decision.chosen is not None
    found, lines = [], list[str]()
    for words in flags.args.what_if:
        with until_interrupted() as is_stopped:
            told = what_if(
                flags.source, decision.chosen, words, report=flags.report, is_stopped=is_stopped
            )
        found.append(what_if_to_json(told))
        lines += ["", *what_if_to_text(told, decision.chosen)]
    return found, lines


def _plan_training(flags: _PlanFlags) -> int:
    """Find the fewest nodes for a whole training, print the plan, and return the exit code."""
    from meshplan.api import planning
    from meshplan.render.plans.sizing import training_to_json, training_to_text

    args = flags.args
    if args.tokens is None or args.days is None:
        what = "the fewest nodes depend on both --tokens and --days, and one is missing"
        raise SpecError(Problem(what, Origin("--days"), "add both --tokens and --days"))
    with until_interrupted() as is_stopped:
        found = planning.fewest_devices(
            flags.source,
            tokens=args.tokens,
            days=args.days,
            report=flags.report,
            is_stopped=is_stopped,
        )
    is_interrupted = is_stopped()
    more = {"training": training_to_json(found, flags.price)}
    lines = training_to_text(found, flags.price)
    if found.answer is None:
        if args.json:
            answer_json(args, "plan/1", {"fits": False, **more})
        else:
            answer(args, *lines)
        return INTERRUPTED if is_interrupted else NO
    assert found.answer.decision is not None
    decision = found.answer.decision
    code = _print_plan(flags, decision, more, ["", *lines], is_interrupted=is_interrupted)
    return code if found.is_fewest or is_interrupted else NO


class _PlanFlags:
    """The flags of a question about a plan file, with what is derived from them.

    Attributes:
        args: The parsed flags.
        path: The plan file.
        source: The plan, model and machine that the flags name.
        notes: Notes that were printed, for the JSON output.
        report: Prints a note and appends it to `notes`.
        price: Price of one GPU-hour; None if `--price` is not given.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.path, self.source = args, plan_file(args), source_of(args)
        self.notes: list[str] = []
        self.report = noting(args, self.notes)
        self.price = self._price()

    def _price(self) -> float | None:
        """Return the price of one GPU-hour; None if it is not stated."""
        stated = getattr(self.args, "price", None)
        if stated is None:
            return None
        from meshplan.planner.objectives.num_devices import positive

        return positive(stated, "--price")


def _print_trouble(
    flags: _PlanFlags, found: Decision | EmptySpaceError, is_stopped: Callable[[], bool]
) -> int:
    """Print why there is no plan and which changes would help, and return the exit code."""
    from meshplan.api import planning
    from meshplan.planner.space.space import UnsearchedError
    from meshplan.render.plans.plan import (
        decision_to_json,
        decision_to_text,
        no_space_to_json,
        no_space_to_text,
    )
    from meshplan.render.plans.trouble import trouble_to_json, trouble_to_text

    args = flags.args
    if isinstance(found, Exception):
        result, is_whole = no_space_to_json(found), True
        lines = no_space_to_text(found, flags.path)
    else:
        result, is_whole = decision_to_json(found), found.is_whole
        # Who pressed Ctrl-C did not ask for all that was not searched.
        told = replace(found, rejected=()) if is_stopped() else found
        lines = decision_to_text(told, flags.path, colour=colours(args))
    trouble = None
    # Only a complete search proves that nothing fits.
    if is_whole and not isinstance(found, UnsearchedError):
        trouble = planning.find_trouble(flags.source, report=flags.report, is_stopped=is_stopped)
    if args.json:
        more = trouble_to_json(trouble) if trouble else {"conflict": None, "fixes": []}
        answer_json(args, "plan/1", {**result, "changed": None, **more})
    else:
        answer(args, *lines, *(["", *trouble_to_text(trouble)] if trouble else []))
    return INTERRUPTED if is_stopped() else NO


def _print_plan(
    flags: _PlanFlags,
    decision: Decision,
    more: Mapping[str, Any],
    lines: Sequence[str],
    *,
    is_interrupted: bool,
) -> int:
    """Print the chosen plan, write its lock, and return the exit code.

    Args:
        flags: The flags.
        decision: The planner's decision; `decision.chosen` is not None.
        more: Further keys of the JSON result.
        lines: Lines to print after the plan, without `--json`.
        is_interrupted: If True, the user pressed Ctrl-C: a lock is written only with `--keep-best`.
    """
    from meshplan.api import planning
    from meshplan.render.plans.changes import changes_to_json, changes_to_text
    from meshplan.render.plans.plan import (
        decision_to_json,
        decision_to_text,
        written_to_json,
        written_to_text,
    )
    from meshplan.render.plans.sizing import cost_to_json, cost_to_text

    args = flags.args
    changes = _changes(args, flags.path, decision)
    written = planning.as_written(decision, flags.source)
    # The lock is written first, so that `meshplan plan | head` writes it, too.
    why_no_lock, failure = _why_no_lock(flags, decision, is_interrupted=is_interrupted), None
    target = None
    if not why_no_lock and not args.dry_run:
        try:
            target = planning.lock_plan(flags.path, decision, args.output, args.free)
        except SpecError as error:  # Not raised: the plan is still the answer.
            failure = error
    if args.json:
        result = {**decision_to_json(decision), "changed": changes_to_json(changes)}
        result |= {"conflict": None, "fixes": [], "cost": cost_to_json(decision, flags.price)}
        result["as_written"] = written and written_to_json(written)
        answer_json(args, "plan/1", {**result, **more})
    else:
        colour = colours(args)
        costs = cost_to_text(decision, flags.price)
        text = decision_to_text(
            decision, flags.path, costs, colour=colour, why_not_searched=args.why_not_searched
        )
        answer(args, *text, *lines)
    assert decision.chosen is not None
    if written is not None:
        print_notes(args, [written_to_text(written)])
    print_notes(args, changes_to_text(changes, decision.chosen.plan.graph.blocks()))
    if why_no_lock:
        print_notes(args, [why_no_lock])
    if failure is not None:
        print_error(str(failure))
        return COULD_NOT
    if target is not None and changes != ():  # Else its content is as before.
        print_notes(args, [f"wrote {target}"])
    if is_interrupted:
        return INTERRUPTED
    return YES if decision.is_whole else NO


def _why_no_lock(flags: _PlanFlags, decision: Decision, *, is_interrupted: bool) -> str:
    """Return why no lock is written although `--dry-run` is not given; "" if one is."""
    args = flags.args
    if (why_not := _more_nodes(flags, decision)) is not None:
        return why_not
    if is_interrupted and not args.keep_best:
        return "interrupted: no lock is written; --keep-best writes the best plan so far"
    if args.set and not args.dry_run and args.output is None:
        by = "--set" if args.retarget is None else "--retarget"
        return f"no lock is written for a plan changed by {by}; -o FILE writes one"
    return ""


def _more_nodes(flags: _PlanFlags, decision: Decision) -> str | None:
    """Return a note that the plan needs more nodes than stated and has no lock; None if neither."""
    from meshplan.spec.reader import load_spec

    assert decision.chosen is not None
    nodes = decision.chosen.stated.get("hardware.nodes", 0)
    hardware = load_spec(flags.path, flags.args.set).hardware
    if hardware is None or nodes <= hardware.nodes:
        return None
    what = "no lock is written: the chosen plan needs more nodes than the plan file states"
    return f"{what}; set hardware: {{nodes: {nodes}}} in the plan file"


def _changes(
    args: argparse.Namespace, path: str, decision: Decision
) -> tuple[FieldChange, ...] | None:
    """Return the changes since the last lock; None if no lock exists or it cannot be read."""
    from meshplan.api import planning

    try:
        return planning.changes_since(path, decision, args.output, args.free)
    except SpecError as error:
        print_notes(args, [f"the last lock cannot be compared: {error.problems[0]}"])
        return None


def _explain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="+",
        metavar="WORD",
        help="why FIELD, why-not FIELD=VALUE, memory, or a module's name",
    )
    _request_flags(parser)


def _explain(args: argparse.Namespace) -> int:
    if len(args.words) == 1 and args.words[0] not in ("why", "why-not"):
        return _explain_memory(args) if args.words == ["memory"] else _explain_module(args)
    from meshplan.api import planning
    from meshplan.render.plans.explain import why_not_to_json, why_not_to_text

    flags = _PlanFlags(args)
    answers = planning.explain(flags.source, args.words, report=flags.report)
    if args.json:
        result = {"answers": [why_not_to_json(each) for each in answers]}
        answer_json(args, "explain/1", result, flags.notes)
    elif len(answers) == 1:
        answer(args, *why_not_to_text(answers[0]))
    else:
        answer(args, *(why_not_to_text(each)[0] for each in answers))
    return YES if any(each.seconds is not None for each in answers) else NO


def _explain_module(args: argparse.Namespace) -> int:
    from meshplan.api import planning
    from meshplan.render.memory.module import module_to_json, module_to_text

    notes: list[str] = []
    source = source_of(args)
    plan = checking.decide(source, noted=notes.append)
    found = planning.explain_module(
        plan, args.words[0], profile=args.profile, source=source, report=noting(args)
    )
    if args.json:
        answer_json(args, "explain/1", {"module": module_to_json(found)}, notes)
    else:
        answer(args, *module_to_text(found))
        print_notes(args, notes)
    return YES


def _explain_memory(args: argparse.Namespace) -> int:
    from meshplan.render.memory.module import explained_memory_to_json, explained_memory_to_text

    estimate = checking.estimate_memory(source_of(args), report=noting(args))
    if args.json:
        result = {"memory": explained_memory_to_json(estimate)}
        answer_json(args, "explain/1", result, estimate.notes)
    else:
        answer(args, *explained_memory_to_text(estimate))
        print_notes(args, estimate.notes)
    return YES if estimate.fits is not False else NO


def _calibrate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", metavar="PROFILE", default="profile.json", help="where to write the profile"
    )


def _calibrate(args: argparse.Namespace) -> int:
    from meshplan.api import planning
    from meshplan.render.profile import profile_to_text

    print_notes(args, ["calibration takes about a minute"])
    profile = planning.calibrate(args.out)
    if profile is None:
        return YES
    if args.json:
        answer_json(args, "calibrate/1", dataclasses.asdict(profile), [])
    else:
        answer(args, *profile_to_text(profile), f"written to {args.out}")
    return YES


VERBS: tuple[Verb, ...] = (
    Verb("plan", "choose what a plan leaves open: the fastest that fits", _plan_flags, _plan),
    Verb(
        "explain",
        "explain a plan: why FIELD, why-not FIELD=VALUE, MODULE, memory",
        _explain_flags,
        _explain,
    ),
    Verb(
        "calibrate",
        "time this machine: matrix products, copies, collectives",
        _calibrate_flags,
        _calibrate,
    ),
    recording.VERB,
)
