"""`meshplan init`, `gpus`, `schema`, `completion`: what one needs to write the first plan."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Final

from meshplan.cli.common import (
    YES,
    Verb,
    answer,
    answer_exactly,
    answer_json,
    model_flags,
    print_notes,
)
from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import check_writable, write_bytes
from meshplan.layout.hardware import devices

_PLAN: Final = "plan.yaml"


def _init_flags(parser: argparse.ArgumentParser) -> None:
    model_flags(parser)
    parser.add_argument("--gpu", metavar="NAME", help="name of the GPU; default: those seen here")
    parser.add_argument("--nodes", metavar="N", type=int, help="number of nodes (default 1)")
    parser.add_argument("--gpus-per-node", metavar="M", type=int, help="number of GPUs of a node")
    parser.add_argument("-o", "--output", metavar="FILE", help=f"the new plan (default {_PLAN})")


def _init(args: argparse.Namespace) -> int:
    from meshplan.api.starting import starter
    from meshplan.render.plans.starter import starter_to_text
    from meshplan.spec import trust
    from meshplan.spec.reader import load_spec

    out = args.output or args.file or _PLAN
    check_writable(out, "the plan")
    if os.path.lexists(out):
        what = "this file exists already, and init replaces nothing"
        raise SpecError(Problem(what, Origin(out), "name another file: -o new.yaml"))
    found = starter(
        config=args.config, model=args.model, gpu=args.gpu, nodes=args.nodes,
        gpus_per_node=args.gpus_per_node, folder=Path(out).parent,
    )  # fmt: skip
    content = starter_to_text(found)
    write_plan(out, content)
    if args.model is not None:  # The user has just named this code to be run.
        trust.trust(load_spec(out).origins[""])
    if args.json:
        answer_json(args, "init/1", {"file": str(out)}, found.guesses)
    else:
        answer(args, f"wrote {out}; next: meshplan plan -f {out}")
        print_notes(args, found.guesses)
    return YES


def write_plan(path: str | os.PathLike[str], content: str) -> None:
    """Write the content of a new plan to a file.

    Raises:
        SpecError: The file cannot be written.
    """
    write_bytes(path, content.encode(), "the plan")


def _gpus(args: argparse.Namespace) -> int:
    from meshplan.render.plans.hardware import gpus_to_json, gpus_to_text

    if args.json:
        answer_json(args, "gpus/1", gpus_to_json(devices()))
    else:
        answer(args, *gpus_to_text(devices(), verbose=args.verbose))
    return YES


def _schema(args: argparse.Namespace) -> int:
    from meshplan.spec.json_schema import plan_schema

    answer_exactly(args, json.dumps(plan_schema(), indent=1))
    return YES


def _no_flags(parser: argparse.ArgumentParser) -> None:
    """Declare no flags."""


def _completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def _completion(args: argparse.Namespace) -> int:
    from meshplan.render.completion import completion_to_text

    answer_exactly(args, completion_to_text(args.shell, args.whole_parser))
    return YES


VERBS: tuple[Verb, ...] = (
    Verb("init", "write a commented plan for a model and a machine", _init_flags, _init),
    Verb("gpus", "list the GPUs that a plan can name", _no_flags, _gpus),
    Verb("schema", "print the JSON Schema of plan.yaml, for editors", _no_flags, _schema),
    Verb(
        "completion",
        "print a script that completes commands in a shell",
        _completion_flags,
        _completion,
    ),
)
