"""`meshplan record`: the traces of a live model, made beforehand or read from a file."""

from __future__ import annotations

import argparse
import dataclasses
import os

from meshplan.cli.common import (
    NO,
    YES,
    Verb,
    answer,
    answer_json,
    machine_flags,
    model_flags,
    noting,
    source_of,
)
from meshplan.errors import Origin, Problem, SpecError
from meshplan.spec.recipes import plans_in


def _flags(parser: argparse.ArgumentParser) -> None:
    for add in (model_flags, machine_flags):
        add(parser)
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="also write the recording into a file: model.tape.json"
    )
    parser.add_argument(
        "--load", metavar="FILE", help="read a recording that was made on another machine"
    )


def _record(args: argparse.Namespace) -> int:
    from meshplan.api import recording

    if args.load is not None:
        given = (args.file, args.model, args.config, args.gpu, args.memory, args.out)
        if any(each is not None for each in given) or args.set:
            what = "--load reads a recording as it is, without a plan, a model or a machine"
            fix = "leave the other flags out"
            raise SpecError(Problem(what, Origin("--load"), fix))
        found = recording.load_recording(args.load)
    elif args.file is None and not plans_in(os.curdir) and (args.model or args.config):
        given_machine = {"gpu": args.gpu, "memory": args.memory}
        found = recording.record(
            recording.OPEN_PLAN, args.set, model=args.model, config=args.config, out=args.out,
            report=noting(args), **given_machine,
        )  # fmt: skip
    else:
        found = recording.record(source_of(args), out=args.out, report=noting(args))
    is_good = YES if found.num_traces else NO
    if args.json:
        fields = {**dataclasses.asdict(found), "file": args.out or args.load}
        answer_json(args, "record/1", fields)
        return is_good
    traces = f"{found.num_traces} trace{'s' if found.num_traces != 1 else ''} of {found.model}"
    if found.why:
        answer(args, f"nothing is recorded: {found.why}")
    elif args.load is not None:
        answer(args, f"read {traces} from {args.load}")
    else:
        answer(args, f"recorded {traces}" + (f" in {args.out}" if args.out else ""))
    return is_good


VERB = Verb("record", "trace a live model once, for all its searches", _flags, _record)
