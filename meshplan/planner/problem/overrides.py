"""Turn a candidate of the search into statements of plan.yaml.

Every choice of a candidate becomes one statement: a path of the file and its value. A finished plan
is the user's file with these statements added, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.cost.grid import CONTEXT_WORDS, MODES, OPTIONS, RECOMPUTE, SCHEDULE_WORDS
from meshplan.layout.mesh import DATA_AXES, order_of
from meshplan.planner.solve.config import Candidate
from meshplan.planner.space.ep import is_placed, words
from meshplan.planner.space.fixed import Pins
from meshplan.planner.space.memory_settings import memory_setting_words
from meshplan.planner.space.offload import offload_words
from meshplan.planner.space.space import Freedom
from meshplan.spec.borrow import LENDER
from meshplan.spec.spec import AUTO, Allocator, Spec
from meshplan.spec.strategies import strategy_of
from meshplan.units import spans_of


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """The options chosen for one block.

    Attributes:
        name: Fqn of the block.
        recompute: Index into `cost.grid.RECOMPUTE`.
        reshard: 1 if parameters are freed after forward, 0 if they stay gathered.
    """

    name: str
    recompute: int
    reshard: int


def blocks_of(
    candidate: Candidate, order: Sequence[int], names: Sequence[str]
) -> tuple[tuple[BlockChoice, ...], ...]:
    """Return the options of every block, one tuple of blocks for each stage.

    Among identical blocks of a stage, the first ones get the most recomputation and, of these, the
    first ones reshard: by their backward, the activations that later blocks saved are freed.

    Args:
        candidate: The candidate, which counts blocks by kind and option.
        order: Kind of each place of the model, as in `CostTable`.
        names: Fqn of the block at each place, as in `CostTable`; "" for modules outside the blocks.
    """
    out = []
    for stage, (begin, end) in enumerate(itertools.pairwise(candidate.ends)):
        left = [_sorted_options(option_counts) for option_counts in candidate.option_counts[stage]]
        blocks = []
        for place in range(begin, end):
            option = next(left[order[place]])
            if names[place]:
                blocks.append(BlockChoice(names[place], *OPTIONS[option]))
        out.append(tuple(blocks))
    return tuple(out)


def _sorted_options(option_counts: Sequence[int]) -> Iterator[int]:
    """Return an iterator over the options of one kind, one per block, most recomputation first."""
    options = [number for number, count in enumerate(option_counts) for _ in range(count)]
    return iter(sorted(options, key=lambda number: OPTIONS[number], reverse=True))


def statements(
    spec: Spec,
    free: Freedom,
    row: np.void,
    stages: Sequence[Sequence[BlockChoice]],
    pins: Pins,
    allocator: Allocator,
) -> dict[str, Any]:
    """Return {path: value} statements that turn the plan file into the given plan.

    The value None removes a statement of the file.

    Args:
        spec: The spec of the plan file.
        free: The choices that the plan file leaves open.
        row: One configuration of the grid.
        stages: Choices of the blocks by stage, as `blocks_of` returns them.
        pins: Choices of single blocks that the file's rules fix already.
        allocator: The CUDA allocator setting that the memory was estimated with.
    """
    sizes = {axis: int(row[axis]) for axis in order_of(spec.mesh)}
    mesh = {axis: size for axis, size in sizes.items() if size > 1}
    ep = mesh.pop("ep", 1)
    data = [axis for axis in ("dp_replicate", "dp_shard") if axis in mesh]
    out: dict[str, Any] = {"mesh": mesh or {"dp_replicate": 1}}
    if ep > 1:
        out["mesh"] = {**mesh, "ep": f"{ep} in {LENDER}"}
    elif spec.experts.capacity is not None:
        out["experts.capacity"] = None  # Without ep no tokens are sent to other ranks.
    blocks = [block for stage in stages for block in stage]
    usual = max((block.reshard for block in blocks), default=0)
    mode = MODES[int(row["mode"])]
    if mode != "ddp" and not data:  # FSDP over one rank: offload needs it, or the plan states it.
        out["mesh"] = {"dp_shard": 1, **mesh}
        data = ["dp_shard"]
    if mode == "shard":
        cuts = {"optimizer", "gradient", *(("parameter",) if usual else ())}
        axes = DATA_AXES if len(data) > 1 else ("dp_shard",)
        out["strategy"] = strategy_of(axes, frozenset(cuts))
    else:
        out["strategy"] = mode if data else None  # A mesh without a data axis needs no strategy.
    pp, micro, count = sizes["pp"], int(row["micro"]), int(row["microbatches"])
    out["batch.micro"] = micro * count if pp > 1 else micro
    out["batch.accumulate"] = 1 if pp > 1 else count
    if sizes["tp"] > 1:
        if spec.tp_plan == "none" and "tp_plan" not in spec.origins:
            out["tp_plan"] = "auto"
        if free.sequence_parallel.get(sizes["tp"]) and not spec.sequence_parallel:
            out["sequence_parallel"] = True
        if free.loss_parallel.get(sizes["tp"]) and not spec.loss_parallel:
            out["loss_parallel"] = True
    else:
        # Without tp, undo the file's settings that concern tp alone.
        out |= {"tp_plan": "none"} if spec.tp_plan != "none" else {}
        for switch in ("sequence_parallel", "loss_parallel"):
            out |= {switch: False} if getattr(spec, switch) else {}
    if pp > 1:
        out["pipeline.schedule"] = SCHEDULE_WORDS[int(row["schedule"])]
        if int(row["virtual"]) > 1:
            out["pipeline.virtual"] = int(row["virtual"])
        out["pipeline.microbatches"] = count
        # A stage reaches from its named module to the first module of the next stage, so naming
        # the stage's first block is enough.
        if spec.pipeline is None or spec.pipeline.split == AUTO:
            out["pipeline.split"] = [[stage[0].name] for stage in stages]
    out |= offload_words(spec, int(row["offload"]))
    out |= memory_setting_words(spec, int(row["loss_chunks"]), allocator)
    open_ = [b for b in blocks if not (b.name in pins and pins[b.name].recompute)]
    word = _usual_recompute(open_)
    if spec.activation_checkpointing.every == 1:  # With `every` above 1 all blocks are decided.
        out["activation_checkpointing"] = word
    rules = list(_recompute_rules(open_, word))
    open_ = [b for b in blocks if not (b.name in pins and pins[b.name].reshard)]
    rules += _reshard_rules(open_, usual)
    if sizes["cp"] > 1 and spec.context is None:
        out["context.attention"] = CONTEXT_WORDS[int(row["gathers_kv"])]
    if ep > 1 and not is_placed(spec):
        rules.append(words(free.experts))
    for number, rule in enumerate(rules, len(spec.rules)):
        out[f"rules[{number}]"] = rule
    return out


def _usual_recompute(blocks: Sequence[BlockChoice]) -> str:
    """Return the recompute setting that all blocks share, or "none" if they differ."""
    modes = {block.recompute for block in blocks}
    return RECOMPUTE[modes.pop()] if len(modes) == 1 else RECOMPUTE[0]


def _recompute_rules(blocks: Sequence[BlockChoice], usual: str) -> Iterator[dict[str, Any]]:
    """Yield plan rules for the blocks whose recompute setting differs from the plan-wide one."""
    for place, word in enumerate(RECOMPUTE):
        names = [block.name for block in blocks if block.recompute == place]
        if names and word != usual:
            yield {"match": patterns(names), "activation_checkpointing": word}


def _reshard_rules(blocks: Sequence[BlockChoice], usual: int) -> Iterator[dict[str, Any]]:
    """Yield the plan rule for the blocks whose reshard differs from the plan-wide one, if any."""
    names = [block.name for block in blocks if block.reshard != usual]
    if names:
        yield {"match": patterns(names), "reshard_after_forward": not usual}


def patterns(names: Sequence[str]) -> str | list[str]:
    """Return globs that match these modules and no others.

    Consecutive block numbers become one glob, such as `layers.{0..3}`.

    Returns:
        One glob, or a list if several are needed.
    """
    out: list[str] = []
    by_container: dict[str, list[int]] = {}
    for name in names:
        container, _, last = name.rpartition(".")
        if last.isdigit():
            by_container.setdefault(container, []).append(int(last))
        else:
            out.append(name)
    for container, numbers in by_container.items():
        for low, high in spans_of(sorted(numbers)):
            span = str(low) if low == high else f"{{{low}..{high}}}"
            out.append(f"{container}.{span}" if container else span)
    return out[0] if len(out) == 1 else out
