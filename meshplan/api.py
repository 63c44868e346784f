"""The verbs, each a straight line through the rooms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshplan.errors import Origin, Problem, SpecError
from meshplan.formulas import ROWS
from meshplan.sizing import Sizing, read_sizing
from meshplan.solve import (
    STATES_ONLY,
    Answer,
    StatesEstimate,
    StatesRow,
    max_params,
    min_gpus,
    tabulate,
)


def estimate_states(
    *,
    params: str | int | float | None = None,
    config: str | Path | None = None,
    gpus: str | int | None = None,
    nodes: str | int | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    plan: str | Path | None = None,
    overrides: Sequence[str] = (),
    ask_max_params: bool = False,
    ask_min_gpus: bool = False,
) -> StatesEstimate:
    """Memory of the training states under every textbook strategy.

    Args:
        params: Number of parameters, or `config`, a Hugging Face config to count them in.
        gpus: All GPUs together; `nodes` divides them.
        gpu: Name of the device whose memory is the limit, or `memory`, the limit itself.
        plan: A plan file that states any of these; what both state must agree.
        overrides: `KEY=VALUE` for the plan file.
        ask_max_params: Also solve for the largest model.
        ask_min_gpus: Also solve for the fewest GPUs.

    Raises:
        SpecError: Something is missing, cannot be read, or is stated twice and differs.
        PlanError: The plan's mesh and strategy contradict each other.

    >>> estimate = estimate_states(params="3e9", gpus=8)
    >>> [row.bytes_per_gpu for row in estimate.rows if row.row.strategy == "full_shard"]
    [6000000000]
    """
    if overrides and plan is None:
        what = "there is no plan file to change"
        raise SpecError(Problem(what, Origin("--set"), "add -f plan.yaml"))
    spec = None
    if plan is not None:
        from meshplan.reader import load_spec  # yaml would cost the flags alone 20 ms

        spec = load_spec(plan, overrides)
    size = read_sizing(
        {
            "params": params, "config": config, "gpus": gpus, "nodes": nodes, "gpu": gpu,
            "memory": memory,
        },
        spec,
    )  # fmt: skip
    _check_enough(size, ask_max_params, ask_min_gpus)
    a, n, limit_bytes = size.num_params, size.num_gpus, size.memory_bytes
    rows: tuple[StatesRow, ...] = ()
    largest: list[Answer] = []
    fewest: list[Answer] = []
    if a and n:
        rows = tabulate(
            num_params=a, num_gpus=n, nodes=size.nodes, memory_bytes=limit_bytes, plan=size.plan_row
        )
    if ask_max_params and n and limit_bytes:
        largest = [
            max_params(r, num_gpus=n, nodes=size.nodes, memory_bytes=limit_bytes) for r in ROWS
        ]
    if ask_min_gpus and a and limit_bytes:
        fewest = [
            min_gpus(r, num_params=a, nodes=size.nodes, memory_bytes=limit_bytes) for r in ROWS
        ]
    notes = [STATES_ONLY, *size.notes]
    if size.nodes == 1:
        notes.append("on one node hybrid_shard is full_shard; --nodes says how many there are")
    return StatesEstimate(
        num_params=a,
        num_gpus=n,
        nodes=size.nodes,
        memory_bytes=limit_bytes,
        rows=rows,
        max_params=tuple(largest),
        min_gpus=tuple(fewest),
        notes=tuple(notes),
    )


def _check_enough(size: Sizing, ask_max_params: bool, ask_min_gpus: bool) -> None:
    """Refuse a question that lacks a number, all that is lacking at once."""
    missing = []
    if size.num_params is None and (ask_min_gpus or not ask_max_params):
        missing.append(("how large the model is", "--params 3e9, --config PATH"))
    if size.num_gpus is None and (ask_max_params or not ask_min_gpus):
        missing.append(("how many GPUs there are", "--gpus 8"))
    if size.memory_bytes is None and (ask_max_params or ask_min_gpus):
        missing.append(("how much memory a GPU has", "--gpu h100-sxm-80gb, --memory 80GiB"))
    if missing:
        raise SpecError(
            [
                Problem(
                    f"nothing says {what}", None, f"add {flags}, or -f with a plan that says so"
                )
                for what, flags in missing
            ]
        )
