"""`meshplan trust`: allow code that a plan file names to run, and remember it."""

from __future__ import annotations

import argparse

from meshplan.cli.common import YES, Verb, answer, answer_json, print_notes
from meshplan.errors import Problem, SpecError
from meshplan.spec import trust
from meshplan.spec.recipes import OWN_MODELS


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", metavar="PLAN", help="a plan file; same as -f")
    parser.add_argument("--forget", action="store_true", help="do not trust the file any more")


def _trust(args: argparse.Namespace) -> int:
    from meshplan.spec.reader import load_spec

    path = args.plan or args.file
    if path is None or (args.plan and args.file):
        raise SpecError(
            Problem("trust takes exactly one plan file", None, "run meshplan trust plan.yaml")
        )
    spec = load_spec(path)
    entry = spec.model.entry if spec.model is not None else None
    named = [(entry, spec.origin("model.entry"))] if entry and entry not in OWN_MODELS else []
    named += spec.applied_code
    whole = spec.origins[""]
    if args.json:
        code = [{"code": each, "line": origin.line, "path": origin.path} for each, origin in named]
        result = {"plan": str(path), "is_trusted": not args.forget, "code": code}
        answer_json(args, "trust/1", result)
    else:
        for each, origin in named:
            answer(args, f"{origin}: {each}")  # The user sees which code is trusted.
    is_known = trust.forget(whole) if args.forget else trust.is_trusted(whole)
    if not args.forget:
        trust.trust(whole)
    if args.json:
        return YES
    if not named:
        print_notes(args, ["this file names no code other than meshplan's own"])
    state = "is not trusted any more" if args.forget else "is trusted as it is now, in this folder"
    was = "" if is_known == args.forget else ", as before"
    answer(args, f"{path} {state}{was}")
    return YES


VERB = Verb(
    "trust", "let the code that a plan file names run, until the file changes", _flags, _trust
)
