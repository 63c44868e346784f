"""`meshplan import` and `export`: configuration files of other tools, and plans."""

from __future__ import annotations

import argparse
import os
from typing import Final

from meshplan.cli.common import (
    NO,
    YES,
    Verb,
    answer,
    answer_exactly,
    answer_json,
    model_flags,
    print_notes,
    source_of,
    told_if_slow,
)
from meshplan.cli.starting import write_plan
from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import check_writable, write_bytes

_TOOLS: Final = "deepspeed, accelerate, lightning, hf, torchtitan, megatron or nanotron"
_PARTIAL: Final = "add --partial for the rest"


def _import_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config_file", metavar="FILE", help="the file, or a folder with one")
    parser.add_argument("--from", dest="tool", metavar="TOOL", help=f"its tool: {_TOOLS}")
    parser.add_argument("-o", "--output", metavar="FILE", help="the new plan (default: printed)")
    parser.add_argument(
        "--partial", action="store_true", help="give the plan although some keys were refused"
    )
    parser.add_argument("--nodes", metavar="N", type=int, help="number of nodes")
    parser.add_argument("--gpus-per-node", metavar="M", type=int, help="number of GPUs of a node")
    parser.add_argument("--gpu", metavar="NAME", help="name of the GPU: h100-sxm-80gb, a100-40g")


def _import(args: argparse.Namespace) -> int:
    from meshplan.api.configs import import_config
    from meshplan.render.configs import import_to_json, keys_to_text

    for flag, count in (("--nodes", args.nodes), ("--gpus-per-node", args.gpus_per_node)):
        if count is not None and count < 1:
            raise SpecError(Problem(f"the number must be at least 1, not {count}", Origin(flag)))
    if args.output is not None and not args.output.endswith((".yaml", ".yml")):
        what, stem = "a plan is YAML, and so its name ends", os.path.splitext(args.output)[0]
        raise SpecError(Problem(what, Origin(args.output), f"write -o {stem}.yaml"))
    _check_new(args.output, "the plan")
    with told_if_slow(args, f"reading {args.config_file}"):
        imported = import_config(
            args.config_file, args.tool, nodes=args.nodes, gpus_per_node=args.gpus_per_node,
            gpu=args.gpu,
        )  # fmt: skip
    is_given = imported.is_whole or args.partial
    if is_given and args.output:
        write_plan(args.output, imported.text)
    file = args.output if is_given else None
    if args.json:
        result = import_to_json(imported, is_given=is_given, file=file)
        answer_json(args, "import/1", result, imported.notes)
        return YES if imported.is_whole else NO
    lines = keys_to_text(imported, verbose=args.verbose)
    if args.output or not is_given:
        answer(args, *lines)
    else:
        answer_exactly(args, imported.text.rstrip("\n"))
        print_notes(args, ["\n".join(lines)])
    print_notes(args, imported.notes)
    if file:
        answer(args, f"wrote {file}; next: meshplan check -f {file}")
    elif not is_given:
        print_notes(args, [f"no plan was made, because keys were refused; {_PARTIAL}"])
    return YES if imported.is_whole else NO


def _export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="TOOL", required=True, help=f"the tool: {_TOOLS}")
    parser.add_argument("-o", "--output", metavar="FILE", help="the new file (default: printed)")
    parser.add_argument(
        "--partial", action="store_true", help="give the file although it cannot say the layouts"
    )
    model_flags(parser)


def _export(args: argparse.Namespace) -> int:
    from meshplan.api.configs import check_config_name, export_config
    from meshplan.render.configs import export_to_json, unsaid_to_text

    if args.output is not None:
        check_config_name(args.output, args.to)
    _check_new(args.output, "the file")
    source = source_of(args)
    with told_if_slow(args, "checking the plan"):
        exported = export_config(source, args.to)
    is_given = args.partial or not exported.is_decisive
    if is_given and args.output:
        write_config(args.output, exported.text)
    file = args.output if is_given else None
    if args.json:
        answer_json(args, "export/1", export_to_json(exported, is_given=is_given, file=file))
        return NO if exported.is_decisive else YES
    notes = unsaid_to_text(exported)
    if not is_given:
        what = f"{exported.tool} cannot train this plan"
        answer(args, f"{what}:", *notes)
        print_notes(args, [f"no file was made; {_PARTIAL}"])
        return NO
    if args.output:
        answer(args, f"wrote {args.output}")
    else:
        answer_exactly(args, exported.text.rstrip("\n"))
    print_notes(args, notes)
    return NO if exported.is_decisive else YES


def write_config(path: str | os.PathLike[str], content: str) -> None:
    """Write a configuration file of another tool.

    Raises:
        SpecError: The file cannot be written.
    """
    write_bytes(path, content.encode(), "the file")


def _check_new(path: str | None, what: str) -> None:
    if path is None:
        return
    check_writable(path, what)
    if os.path.lexists(path):
        problem = "this file exists already, and nothing is replaced"
        raise SpecError(Problem(problem, Origin(path), "name another file: -o new.yaml"))


VERBS: tuple[Verb, ...] = (
    Verb("import", "translate another tool's configuration into a plan", _import_flags, _import),
    Verb("export", "translate a plan into another tool's configuration", _export_flags, _export),
)
