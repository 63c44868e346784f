"""`meshplan launch` and `doctor`: start the ranks of a plan, and see if a machine is fit for it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from meshplan.cli.common import (
    NO,
    YES,
    Verb,
    answer,
    answer_exactly,
    answer_json,
    model_flags,
    plan_file,
    source_of,
)
from meshplan.errors import Origin, Problem, SpecError


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", metavar="N", type=int, help="number of nodes (default: plan's)")
    parser.add_argument(
        "--gpus-per-node", metavar="M", type=int, help="number of ranks of a node (default: plan's)"
    )
    parser.add_argument("--host", metavar="HOST", help="the first node, if there are several")
    parser.add_argument("--port", metavar="P", type=int, help="a port on it (default 29400)")
    parser.add_argument(
        "--node-rank", metavar="R", type=int,
        help="number of this node, from 0; torchrun numbers the nodes itself if left out",
    )  # fmt: skip
    parser.add_argument("--rdzv-id", metavar="ID", help="name of the job, equal on all nodes")
    parser.add_argument(
        "--max-restarts", metavar="K", type=int, default=0,
        help="times to start all ranks again after one failed (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--grace", metavar="S", type=int, help="seconds to save after SIGTERM (default 60)"
    )
    parser.add_argument(
        "--fast-dev-run", metavar="N", type=int,
        help="try the script on N batches; states and records go into a folder that is removed",
    )  # fmt: skip
    parser.add_argument("--local", action="store_true", help="start all nodes on this machine")
    parser.add_argument("--slurm", metavar="FILE", help="write a script for sbatch, start nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the command, start nothing")
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT is a module")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments"
    )


def _launch(args: argparse.Namespace) -> int:
    from meshplan.launch.command import (
        GRACE_S,
        PORT,
        TorchrunJob,
        check_script,
        job_size,
        own_address,
        serves_unasked,
    )
    from meshplan.launch.environment import FAST_DEV_RUN
    from meshplan.launch.local import free_port, run_launchers
    from meshplan.spec.reader import load_spec

    check_script(args.script, args.module)
    _check_flags(args)
    is_stated = args.nodes is not None and args.gpus_per_node is not None
    has_plan = args.file is not None or not is_stated
    spec = load_spec(plan_file(args), args.set) if has_plan else None
    nodes, ranks = job_size(spec, args.nodes, args.gpus_per_node)
    host = "localhost" if args.local else _host(args, nodes)
    is_several = nodes > 1 and not args.local and not args.slurm
    address = own_address(host) if is_several else ""
    job = TorchrunJob(
        nodes=nodes,
        ranks_per_node=ranks,
        script=args.script,
        is_module=args.module,
        host=host,
        port=args.port or (free_port() if args.local else PORT),
        run_id=args.rdzv_id or args.environment.get("SLURM_JOB_ID", "meshplan"),
        node_rank=args.node_rank,
        max_restarts=args.max_restarts,
        grace_s=GRACE_S if args.grace is None else args.grace,
        is_host=is_several and serves_unasked(host, address),
        address=address,
    )
    if args.slurm:
        from meshplan.launch.slurm import check_new, slurm_script, write_slurm_script

        check_new(args.slurm)
        text = slurm_script(job, os.path.basename(args.slurm), sys.executable)
        write_slurm_script(args.slurm, text)
        if args.json:
            answer_json(args, "launch/1", {"file": args.slurm})
        else:
            answer(args, f"wrote {args.slurm}; next: sbatch {args.slurm}")
        return YES
    environment = job.environment(args.environment, nodes if args.local else 1)
    if args.fast_dev_run is not None:
        environment[FAST_DEV_RUN] = str(args.fast_dev_run)
    if args.dry_run:
        added = {k: v for k, v in environment.items() if args.environment.get(k) != v}
        if args.json:
            answer_json(args, "launch/1", {"command": job.command(), "environment": added})
        else:
            answer_exactly(args, shlex.join([*(f"{k}={v}" for k, v in added.items()),
                                             *job.command()]))  # fmt: skip
        return YES
    if not args.quiet:
        print(shlex.join(job.command()), file=sys.stderr)
    sys.stderr.flush()
    if args.local and nodes > 1:
        from meshplan.runtime.local_nodes import environments_of_nodes

        environments = environments_of_nodes(environment, nodes, ranks)
        return run_launchers(job.command(), environments, job.grace_s)
    os.execve(sys.executable, job.command(), environment)


def _check_flags(args: argparse.Namespace) -> None:
    """Raise SpecError for flags that exclude each other, or whose numbers are out of range."""
    problems = [
        Problem(f"{value} is less than {least}", Origin(flag), f"write {least} or more")
        for flag, value, least in (
            ("--port", args.port, 1),
            ("--node-rank", args.node_rank, 0),
            ("--max-restarts", args.max_restarts, 0),
            ("--grace", args.grace, 1),
            ("--fast-dev-run", args.fast_dev_run, 1),
        )
        if value is not None and value < least
    ]
    if args.local and args.slurm:
        problems.append(Problem("--local and --slurm exclude each other", Origin("--slurm")))
    if args.slurm and args.fast_dev_run is not None:
        what = "a script for sbatch stands for more jobs than the one that is to be short"
        fix = f"set MESHPLAN_FAST_DEV_RUN={args.fast_dev_run} where you call sbatch"
        problems.append(Problem(what, Origin("--fast-dev-run"), fix))
    if args.local and args.node_rank is not None:
        what = "--local starts every node, and --node-rank names one"
        problems.append(Problem(what, Origin("--node-rank"), "leave one of them out"))
    if args.json and not (args.dry_run or args.slurm):
        what = "stdout is the script's, so there is no JSON beside it"
        problems.append(Problem(what, Origin("--json"), "add --dry-run"))
    if problems:
        raise SpecError(problems)


def _host(args: argparse.Namespace, nodes: int) -> str:
    """Return the node at which the others meet: --host, or what the scheduler says."""
    from meshplan.launch.environment import first_host

    environment = args.environment
    nodes_of_job = environment.get("SLURM_JOB_NODELIST", "")
    host = args.host or environment.get("MASTER_ADDR") or first_host(nodes_of_job)
    if host or nodes == 1 or args.slurm:
        return str(host)
    what = f"{nodes} nodes must meet at one of them, which is not named"
    fix = "add --host NAME, the first node, and run the same line on every node; --local starts "
    raise SpecError(Problem(what, Origin("--host"), f"{fix}all of them on this machine"))


def _doctor(args: argparse.Namespace) -> int:
    from meshplan.api.doctor import examine
    from meshplan.render.doctor import checkup_to_text, checkups_to_json

    found = []
    for each in examine(source_of(args) if args.file is not None else None):
        found.append(each)
        if not args.json:
            answer(args, *checkup_to_text(each))
    if args.json:
        answer_json(args, "doctor/1", checkups_to_json(found))
    return NO if any(each.problems for each in found) else YES


VERBS: tuple[Verb, ...] = (
    Verb("launch", "start a script on the ranks of a plan, with torchrun", _flags, _launch),
    Verb("doctor", "see if this machine can train, and under a plan", model_flags, _doctor),
)
