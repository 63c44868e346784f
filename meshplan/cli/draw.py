"""`meshplan show`, `draw` and `report`: a plan as text, as a picture, and as a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.api import checking
from meshplan.api.source import Source
from meshplan.cli.common import (
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
    print_error,
    print_notes,
    profile_flag,
    source_of,
)
from meshplan.errors import Origin, PlanError, Problem, SpecError, findings_to_text
from meshplan.textbook.inputs import read_limit

if TYPE_CHECKING:
    from meshplan.memory import MemoryEstimate
    from meshplan.pictures.base.types import Picture
    from meshplan.plan.plan import Plan

_OF_MEMORY = ("memory", "waterfall")


def _show(args: argparse.Namespace) -> int:
    from meshplan.render.layouts.show import plan_to_json, plan_to_text

    notes: list[str] = []
    plan = checking.decide(source_of(args), noted=notes.append)
    warnings = plan.assignment.warnings
    if args.json:
        lines = [*notes, *(str(warning) for warning in warnings)]
        answer_json(args, "show/1", plan_to_json(plan), lines)
        return YES
    answer(args, *plan_to_text(plan, colour=colours(args)))
    print_notes(args, notes)
    if warnings and not args.quiet:
        print_error(findings_to_text("warning", warnings))
    return YES


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", metavar="WHAT", help="mesh, layout, memory, waterfall, timeline, "
                        "treemap, gantt, comm, pareto, ladder or graph")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="the picture: .png, .svg or .html")
    model_flags(parser)
    machine_flags(parser)
    profile_flag(parser)
    free_flag(parser)
    parser.add_argument("--theme", metavar="NAME", default="light", help="light or dark")
    parser.add_argument(
        "--module", metavar="NAME", help="layout: module whose largest parameter is drawn"
    )
    parser.add_argument("--rank", metavar="N", help="timeline, treemap, comm: which rank")
    parser.add_argument("--bytes", metavar="OF", help="treemap: local (default) or global")


def _draw(args: argparse.Namespace) -> int:
    from meshplan.pictures.base.palette import theme_of
    from meshplan.pictures.base.types import check_target, import_matplotlib
    from meshplan.pictures.main import check_what

    source = source_of(args)
    if args.what is None and (args.output is not None or args.json):
        fix = "add --what mesh, for example; meshplan report -o report.html has all pictures"
        raise SpecError(Problem("no picture is named", None, fix))
    if args.what is not None:
        check_what(args.what)
    theme_of(args.theme)
    _check_profile(args)
    if args.output is None:
        return _in_terminal(source, args)
    check_target(Path(args.output))
    import_matplotlib()
    notes: list[str] = []
    picture = _picture(source, args, notes)
    saved = picture.save(args.output)
    if args.json:
        result = {
            "what": picture.what,
            "title": picture.title,
            "alt": picture.alt,
            "file": str(saved),
        }
        answer_json(args, "draw/1", result, notes)
    else:
        answer(args, picture.title)
        print_notes(args, notes)
        print_notes(args, [f"wrote {saved}"])
    return YES


def _in_terminal(source: Source, args: argparse.Namespace) -> int:
    """Print the text version of a picture and return the exit code.

    Without `--what` it is an overview: the mesh, the pipeline if there is one, and the memory.

    Raises:
        SpecError: The picture has no text version, or `--json` was passed without a file.
    """
    from meshplan.pictures.main import facts_of
    from meshplan.render.layouts.drawn import (
        gantt_lines,
        graph_lines,
        layout_lines,
        memory_lines,
        mesh_lines,
        print_lines,
    )

    texts: dict[str, Callable[[Any], Any]] = {
        "mesh": mesh_lines, "layout": layout_lines, "memory": memory_lines, "gantt": gantt_lines,
        "graph": graph_lines,
    }  # fmt: skip
    if (args.what is not None and args.what not in texts) or args.json:
        what = f"the picture of {args.what} has no text form, and no file is named"
        if args.json:
            what = "--json describes the file that was written, and no file is named"
        raise SpecError(Problem(what, Origin("-o"), "add -o out.png, out.svg or out.html"))
    notes: list[str] = []
    plan = _decided(source, notes)
    overview = ("mesh", *(("gantt",) if plan.assignment.stages is not None else ()), "memory")
    for number, what in enumerate((args.what,) if args.what is not None else overview):
        if number:
            answer(args, "")
        args.what = what
        facts = facts_of(plan, what, **_given(source, plan, args))
        print_lines(texts[what](facts), args.answers, colour=colours(args))
    print_notes(args, notes)
    return YES


def _picture(source: Source, args: argparse.Namespace, notes: list[str]) -> Picture:
    from meshplan.pictures.main import OF_DECISIONS, draw

    if args.what in OF_DECISIONS:
        return _of_search(source, args)
    plan = _decided(source, notes)
    return draw(plan, args.what, theme=args.theme, **_given(source, plan, args))


def _check_profile(args: argparse.Namespace) -> None:
    """Raise SpecError if `--profile` is passed with a picture that is not about a search."""
    from meshplan.pictures.main import OF_DECISIONS

    if args.profile is not None and args.what not in OF_DECISIONS:
        what = f"the picture of {args.what} takes no --profile"
        raise SpecError(Problem(what, Origin("--profile"), "leave it out"))


def _decided(source: Source, notes: list[str]) -> Plan:
    """Return the decided plan and append notes to `notes`.

    If the plan file states only the model's number of parameters, this is `counted_plan`.
    """
    from meshplan.pictures.mesh.counted import counted_plan

    plan = None if source.names_model else counted_plan(source.spec)
    return plan or checking.decide(source, noted=notes.append)


def _of_search(source: Source, args: argparse.Namespace) -> Picture:
    """Search, and draw a picture of the search: "pareto" or "ladder"."""
    from meshplan.api.planning import search_plan
    from meshplan.pictures.main import draw_decision

    report = noting(args)
    decision = search_plan(source, report=report)
    if note := decision.profile.note:
        report(note)
    for flag in ("module", "rank", "bytes"):
        if getattr(args, flag) is not None:
            what = f"the picture of {args.what} takes no --{flag}"
            raise SpecError(Problem(what, Origin(f"--{flag}"), "leave it out"))
    return draw_decision(decision, args.what, theme=args.theme)


def _given(source: Source, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `draw`, from the flags and with the estimate it needs."""
    from meshplan.pictures.main import check_rank

    if args.rank is not None and not args.rank.isdigit():
        what, fix = f"'{args.rank}' is not a rank", "give a number, such as --rank 0"
        raise SpecError(Problem(what, Origin("--rank"), fix))
    if args.rank is not None:
        check_rank(plan, int(args.rank))
    from meshplan.pictures.mesh.counted import is_counted

    given: dict[str, Any] = {
        "name": args.module, "rank": None if args.rank is None else int(args.rank),
        "gpu": args.gpu, "memory": args.memory, "of": args.bytes,
    }  # fmt: skip
    if args.what not in (*_OF_MEMORY, "timeline"):
        return given
    # Estimate as `meshplan estimate` does: from the config alone if possible, else trace a step.
    if is_counted(plan):
        return given
    estimate = _analytic_estimate(plan, args)
    if args.what == "timeline":
        if estimate is None:
            given["log"] = checking.traced_log(plan, int(args.rank or 0), source, noting(args))
        elif args.rank is None:
            given["rank"] = estimate.worst.ranks[0]
        return given
    if estimate is None:
        try:
            estimate = checking.estimate_memory(source, fixes=False, report=noting(args))
        except PlanError:
            # Without an estimate of the step, the picture shows only the states and the reason.
            estimate = None
    given["estimate"] = estimate
    return given


def _analytic_estimate(plan: Plan, args: argparse.Namespace) -> MemoryEstimate | None:
    """Return an estimate from the model's config alone; None if this is not possible."""
    from meshplan.memory.analytic.estimate import estimate_analytic

    if not plan.graph.config:
        return None
    device, limit_bytes, notes = read_limit(args.gpu, args.memory, plan.spec)
    try:
        return estimate_analytic(plan, device=device, limit_bytes=limit_bytes, notes=notes)
    except PlanError:
        return None


def _report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="file of the page: report.html")
    for add in (model_flags, machine_flags, profile_flag):
        add(parser)
    parser.add_argument(
        "--why-not",
        metavar="SETTING",
        action="append",
        default=[],
        help="also explain why a setting is not chosen: mesh.tp=8, or mesh.tp for each value",
    )


def _report(args: argparse.Namespace) -> int:
    from meshplan.api.reporting import make_report
    from meshplan.pictures.base.types import import_matplotlib
    from meshplan.report.main import check_target

    source = source_of(args)
    if args.output is None:
        raise SpecError(Problem("no file is named for the report", None, "add -o report.html"))
    check_target(Path(args.output))
    import_matplotlib()
    report = make_report(source, why_not=args.why_not, report=noting(args))
    saved = report.save(args.output)
    if args.json:
        result = {
            "verdict": report.verdict,
            "fits": report.fits,
            "file": str(saved),
            "pictures": list(report.shown),
            "left_out": [{"what": what, "why": why} for what, why in report.left_out],
        }
        answer_json(args, "report/1", result, report.notes)
    else:
        answer(args, report.verdict)
        print_notes(args, report.notes)
        print_notes(args, [f"left out: {what}: {why}" for what, why in report.left_out])
        print_notes(args, [f"wrote {saved}"])
    return NO if report.fits is False else YES


VERBS: tuple[Verb, ...] = (
    Verb("show", "print every layout of a plan, with the line that decided it", model_flags, _show),
    Verb("draw", "draw a plan: mesh, layout, memory, pipeline and more", _flags, _draw),
    Verb(
        "report", "write one page with the verdict, all pictures and tables", _report_flags, _report
    ),
)
