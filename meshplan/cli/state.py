"""`meshplan state`: look at saved training states, and convert them."""

from __future__ import annotations

import argparse
from typing import Any

from meshplan.cli.common import (
    NO,
    YES,
    Verb,
    answer,
    answer_json,
    model_flags,
    source_of,
)
from meshplan.errors import Origin, Problem, SpecError
from meshplan.units import format_bytes

_CONVERT = "convert"


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="+", metavar="DIR",
        help="the folder given to meshplan.save, or convert and that folder",
    )  # fmt: skip
    parser.add_argument(
        "--to", metavar="PLAN|hf", help="with convert: a plan file, or hf for Hugging Face"
    )
    parser.add_argument("-o", "--out", metavar="DIR", help="with convert: the folder to write to")
    parser.add_argument("--step", metavar="N", type=int, help="with convert: the step to convert")
    model_flags(parser)


def _state(args: argparse.Namespace) -> int:
    if args.words[0] == _CONVERT and len(args.words) == 2:
        return _convert(args, args.words[1])
    if len(args.words) != 1:
        fix = "write meshplan state DIR, or meshplan state convert DIR --to hf --out OUT"
        raise SpecError(Problem("state takes one folder", None, fix))
    for flag, value in (("--to", args.to), ("--out", args.out), ("--step", args.step)):
        if value is not None:
            raise SpecError(
                Problem(f"{flag} is about converting", Origin(flag), "write state convert DIR")
            )
    return _inspect(args, args.words[0])


def _inspect(args: argparse.Namespace, path: str) -> int:
    from meshplan.api.states import inspect_states, plan_load, with_place
    from meshplan.render.states import state_to_json, state_to_text

    found = inspect_states(path)
    results = [(str(each.folder), each.manifest, each.problems) for each in found]
    newest = next((each for each in found if not each.problems), None)
    load = None
    if args.file is not None and newest is not None:
        load = plan_load(newest, source_of(args))
    if args.json:
        result: dict[str, Any] = {"states": [state_to_json(*each) for each in results]}
        if load is not None and newest is not None:
            result["load"] = {
                "folder": str(newest.folder), "plan": str(args.file), "ranks": load.ranks,
                "most_bytes": load.most_bytes, "total_bytes": load.total_bytes,
                "problems": [str(each) for each in load.problems],
            }  # fmt: skip
        answer_json(args, "state/1", result)
    else:
        for each in results:
            answer(args, *state_to_text(*each))
        if load is not None and newest is not None:
            answer(args, "", f"loading {newest.folder} under {args.file}, {load.mesh}:")
            if load.problems:
                answer(args, *(f"  {p}" for p in with_place(load.problems, newest.folder)))
            else:
                most, total = format_bytes(load.most_bytes), format_bytes(load.total_bytes)
                answer(args, f"  each of {load.ranks} ranks reads up to {most}, {total} in all")
    is_good = not any(each.problems for each in found) and not (load and load.problems)
    return YES if is_good else NO


def _convert(args: argparse.Namespace, path: str) -> int:
    from meshplan.api.states import convert_state

    if args.to is None or args.out is None:
        missing = "--to" if args.to is None else "--out"
        fix = "write meshplan state convert DIR --to hf --out OUT, or --to plan.yaml"
        raise SpecError(Problem(f"convert needs {missing}", None, fix))
    source = None
    if args.to != "hf":
        args.file = args.to
        source = source_of(args)
    written = convert_state(path, args.out, source, args.step)
    if args.json:
        answer_json(args, "state-convert/1", {"folder": str(written)})
    else:
        answer(args, f"wrote {written}")
    return YES


VERB = Verb("state", "show what saved states have and verify them; convert them", _flags, _state)
