"""`meshplan report`: write everything that is known about a plan to one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshplan.cli.common import NO, YES, Verb, answer, plan_file, print_notes
from meshplan.errors import Problem, SpecError
from meshplan.render.text import envelope


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="the page, report.html")
    parser.add_argument("--model", metavar="PKG.MOD:FN", help="a function that builds the model")
    parser.add_argument("--config", metavar="PATH", help="a Hugging Face config.json or its folder")
    parser.add_argument("--gpu", metavar="NAME", help="what one GPU is: h100-sxm-80gb, a100-40g")
    parser.add_argument("--memory", metavar="SIZE", help="memory of one GPU: 80GiB, 24GB")
    parser.add_argument("--profile", metavar="FILE", help="what calibrate wrote of this machine")
    parser.add_argument(
        "--why-not",
        metavar="SETTING",
        action="append",
        default=[],
        help="also ask why the plan has it otherwise: mesh.tp=8, or mesh.tp for each value",
    )


def _report(args: argparse.Namespace) -> int:
    from meshplan.api.reporting import make_report
    from meshplan.pictures.base.types import import_matplotlib
    from meshplan.report.main import check_target

    path = plan_file(args)
    if args.output is None:
        raise SpecError(Problem("nothing says where the report goes", None, "add -o report.html"))
    check_target(Path(args.output))
    import_matplotlib()
    report = make_report(
        path, args.set, model=args.model, config=args.config, gpu=args.gpu,
        memory=args.memory, profile=args.profile, why_not=args.why_not,
        report=lambda text: print_notes(args, [text]),
    )  # fmt: skip
    saved = report.save(args.output)
    if args.json:
        result = {
            "verdict": report.verdict,
            "fits": report.fits,
            "file": str(saved),
            "pictures": list(report.shown),
            "left_out": [{"what": what, "why": why} for what, why in report.left_out],
        }
        answer(args, envelope("report/1", result, report.notes))
    else:
        answer(args, report.verdict)
        print_notes(args, report.notes)
        print_notes(args, [f"left out: {what}: {why}" for what, why in report.left_out])
        print_notes(args, [f"wrote {saved}"])
    return NO if report.fits is False else YES


VERBS: tuple[Verb, ...] = (
    Verb("report", "one page with the verdict, all pictures and tables", _flags, _report),
)
