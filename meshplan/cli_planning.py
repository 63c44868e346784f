"""The verbs of planning on the command line."""

from __future__ import annotations

import argparse
import dataclasses

from meshplan.render.text import envelope, wants_colour
from meshplan.verbs import NO, YES, Verb, plan_file, print_notes


def _question_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PKG.MOD:FN", help="what builds the model, if no config")
    parser.add_argument("--config", metavar="PATH", help="a Hugging Face config.json or its folder")
    parser.add_argument("--gpu", metavar="NAME", help="what one GPU is: h100-sxm-80gb, a100-40g")
    parser.add_argument("--memory", metavar="SIZE", help="memory of one GPU: 80GiB, 24GB")


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    _question_flags(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="the lock (default PLAN.lock.yaml)")
    parser.add_argument("--dry-run", action="store_true", help="write no lock")


def _plan(args: argparse.Namespace) -> int:
    from meshplan import planning
    from meshplan.render.plan import decision_to_json, decision_to_text

    path = plan_file(args)
    decision = planning.search_plan(
        path,
        args.set,
        model=args.model,
        config=args.config,
        gpu=args.gpu,
        memory=args.memory,
        told=lambda text: print_notes(args, [text]),
    )
    if args.json:
        print(envelope("plan/1", decision_to_json(decision)))
    else:
        colour = wants_colour(no_color=args.no_color)
        print(*decision_to_text(decision, path, colour=colour), sep="\n")
    if decision.chosen is None:
        return NO
    if args.set and not args.dry_run and args.output is None:
        print_notes(args, ["no lock is written for a plan changed by --set; -o FILE writes one"])
    elif not args.dry_run:
        target = planning.lock_plan(path, decision, args.output)
        print_notes(args, [f"wrote {target}"])
    return YES


def _explain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="+", metavar="WORD", help="why FIELD, or why-not FIELD=VALUE"
    )
    _question_flags(parser)


def _explain(args: argparse.Namespace) -> int:
    from meshplan import planning
    from meshplan.render.explain import why_not_to_json, why_not_to_text

    answers = planning.explain(
        plan_file(args),
        args.words,
        args.set,
        model=args.model,
        config=args.config,
        gpu=args.gpu,
        memory=args.memory,
        told=lambda text: print_notes(args, [text]),
    )
    if args.json:
        print(envelope("explain/1", {"answers": [why_not_to_json(each) for each in answers]}))
    elif len(answers) == 1:
        print(*why_not_to_text(answers[0]), sep="\n")
    else:
        print(*(why_not_to_text(each)[0] for each in answers), sep="\n")
    return YES if any(each.seconds is not None for each in answers) else NO


def _calibrate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="PROFILE", default="profile.json", help="where to write the profile"
    )


def _calibrate(args: argparse.Namespace) -> int:
    from meshplan import planning
    from meshplan.render.profile import profile_to_text

    print_notes(args, ["this takes about a minute"])
    profile = planning.calibrate(args.out)
    if profile is None:
        return YES
    if args.json:
        print(envelope("calibrate/1", dataclasses.asdict(profile), []))
    else:
        print(*profile_to_text(profile), f"written to {args.out}", sep="\n")
    return YES


VERBS: tuple[Verb, ...] = (
    Verb("plan", "decide all that a plan leaves open: the fastest that fits", _plan_flags, _plan),
    Verb(
        "explain",
        "why a plan is what it is: why FIELD, why-not FIELD=VALUE",
        _explain_flags,
        _explain,
    ),
    Verb(
        "calibrate",
        "time this machine: products, copies, messages",
        _calibrate_flags,
        _calibrate,
    ),
)
