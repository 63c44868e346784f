"""`meshplan report`: write everything that is known about a plan to one page."""

from __future__ import annotations

import argparse
from pathlib import Path

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
from meshplan.errors import Problem, SpecError


def _flags(parser: argparse.ArgumentParser) -> None:
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
    Verb("report", "write one page with the verdict, all pictures and tables", _flags, _report),
)
