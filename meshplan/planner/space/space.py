"""The values that each choice of a plan may take.

A concrete value in the plan is a constraint. `auto`, or no statement, leaves the choice open.
Values that the model or this version does not allow are left out, and reported with a reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from meshplan.cost.config import STRATEGY_OPTIONS
from meshplan.cost.grid import ACTIVATIONS_ON_HOST, MODES, OPTIONS, PARAMS_ON_HOST, RECOMPUTE, SHARD
from meshplan.errors import PlanError, Problem
from meshplan.layout.mesh import AXES
from meshplan.memory.replay.optimizer import OF_WHOLE_TENSORS
from meshplan.planner.space.batch import of_data_rank
from meshplan.planner.space.cp import contexts_of
from meshplan.planner.space.ep import NO_EXPERTS, ExpertCounts, is_placed
from meshplan.planner.space.memory_settings import allocators_of, chunks_of
from meshplan.planner.space.offload import ONLY_IN_FULL, stated_offloads
from meshplan.planner.space.schedule import schedules_of, stated_virtual
from meshplan.planner.space.trials import data_axis, with_axes, with_offload
from meshplan.shown import shown
from meshplan.spec.spec import AUTO, Allocator, Borrow, Spec

PRICED_ALONE: Final = "other plans"
"""Name under which all other plans are rejected if a plan is only priced as it is stated."""


@shown
@dataclass(frozen=True, slots=True)
class Rejected:
    """A value that is not in the space, or a plan that is not the answer, with the reason.

    Attributes:
        what: The value or plan, such as "mesh.tp=16".
        why: The reason.
    """

    what: str
    why: str


class EmptySpaceError(PlanError):
    """No configuration satisfies everything that the plan states.

    Attributes:
        rejected: Values that the model or the plan excludes.
    """

    def __init__(self, problem: Problem, rejected: tuple[Rejected, ...]) -> None:
        super().__init__(problem)
        self.rejected = rejected


class UnsearchedError(EmptySpaceError):
    """The stated plan does not fit, and the planner cannot search others.

    Attributes:
        missing_bytes: Bytes by which the plan exceeds the limit; None if they are not known.
    """

    def __init__(
        self, problem: Problem, rejected: tuple[Rejected, ...], missing_bytes: int | None = None
    ) -> None:
        super().__init__(problem, rejected)
        self.missing_bytes = missing_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """The values that each choice may take.

    Args:
        world: Number of devices.
        axes: Sizes that each mesh axis may have.
        hybrid: If True, configurations that shard parameters have dp_replicate > 1; if False, they
            have dp_replicate 1; None leaves it open.
        modes: Indices into `cost.grid.MODES`.
        schedules: Indices into `cost.grid.SCHEDULE_WORDS`.
        virtual: Stages per rank, for schedules with several; None leaves it open.
        num_blocks: Number of blocks of the model.
        heads: (number of heads, number of key/value heads) that tp * cp must divide where cp
            exchanges heads; () if they are not known.
        contexts: {size of cp: indices into `cost.grid.CONTEXT_WORDS`}.
        recompute: Indices into `cost.grid.RECOMPUTE`.
        reshard: Values of reshard after forward of blocks whose parameters are sharded.
        micro: Values of `batch.micro`: samples of one microbatch or, in a pipeline, of all its
            microbatches; () leaves it open.
        accumulate: Microbatches of a step; None leaves it open.
        pipelined: Microbatches of a pipeline; None leaves it open.
        global_: Samples of a step of all ranks; None if `of_data_rank` states the batch.
        of_data_rank: Samples of a step of one data rank.
        sequence_parallel: {size of tp: True if tp shards activations along the sequence}.
        loss_parallel: {size of tp: True if tp shards the loss along the vocabulary}.
        tensor_settings: Values that `sequence_parallel` and `loss_parallel` may have together, the
            most sharding first. `less_sharded` has spaces with those that a size of tp has not.
        experts: Patterns of the modules whose experts ep shards.
        offload: Values of the grid's `offload` that the plan leaves open.
        stages_may_offload: If True, pipeline stages may have their parameters on the host.
        loss_chunks: Numbers of loss chunks. With pp, cp or tp, only the first is possible.
        allocators: Allocator settings that the plan may have, the simplest first.
        rejected: Values that were left out, with reasons.
    """

    world: int
    axes: Mapping[str, tuple[int, ...]]
    hybrid: bool | None = None
    modes: tuple[int, ...] = tuple(range(len(MODES)))
    schedules: tuple[int, ...] = (0,)
    virtual: int | None = None
    num_blocks: int = 1
    heads: tuple[int, ...] = ()
    contexts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    recompute: tuple[int, ...] = tuple(range(len(RECOMPUTE)))
    reshard: tuple[int, ...] = (0, 1)
    micro: tuple[int, ...] = ()
    accumulate: int | None = None
    pipelined: int | None = None
    global_: int | None = None
    of_data_rank: int = 1
    sequence_parallel: Mapping[int, bool] = field(default_factory=dict)
    loss_parallel: Mapping[int, bool] = field(default_factory=dict)
    tensor_settings: tuple[tuple[bool, bool], ...] = ()
    experts: tuple[str, ...] = ()
    offload: tuple[int, ...] = (0,)
    stages_may_offload: bool = True
    loss_chunks: tuple[int, ...] = (1,)
    allocators: tuple[Allocator, ...] = ("default",)
    rejected: tuple[Rejected, ...] = ()

    @property
    def options(self) -> tuple[bool, ...]:
        """For each of `cost.grid.OPTIONS`, True if a block may take it."""
        return tuple(r in self.recompute and s in (0, *self.reshard) for r, s in OPTIONS)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def freedom_of(
    spec: Spec,
    *,
    world: int,
    gpus_per_node: int,
    num_blocks: int,
    refuses: Callable[[Spec], str],
    can_cut: Callable[[int], bool] = lambda stages: True,
    experts: ExpertCounts = NO_EXPERTS,
    keeps_from_rounds: str = "",
    heads: tuple[int, ...] = (),
    is_traced: bool = False,
) -> Freedom:
    """Return the values that a spec leaves open and the model allows.

    Args:
        spec: The spec of the plan file.
        world: Number of devices.
        gpus_per_node: Devices of one node. If the size of tp is open, it does not exceed this.
        num_blocks: Number of blocks of the model.
        refuses: Returns the reason why a trial spec is not possible, such as a dim that does not
            divide or a step that cannot be estimated; "" if it is possible.
        can_cut: Returns True if the plan allows a cut of the blocks into this many stages.
        experts: The experts of the model.
        keeps_from_rounds: Reason why no rank may have several stages; "" if ranks may.
        heads: (number of heads, number of key/value heads) of the attention; () if not known.
        is_traced: If True, costs come from traces of a live model.

    Raises:
        PlanError: The spec contradicts itself, or lacks a statement.
    """
    rejected: list[Rejected] = []
    axes = _axes(spec, world)
    axes["tp"] = tuple(t for t in axes["tp"] if t <= gpus_per_node or len(axes["tp"]) == 1)
    tensor = _tensor_parallel(spec, axes, refuses, rejected)
    axes["tp"] = tuple(tensor)
    axes["pp"] = _pipelines(spec, axes["pp"], num_blocks, refuses, rejected, is_traced)
    axes["pp"] = tuple(_as_stated(spec, axes["pp"], can_cut, rejected))
    contexts, left_out = contexts_of(
        spec,
        axes["cp"],
        heads,
        lambda size, context: refuses(with_axes(replace(spec, context=context), {"cp": size})),
        is_traced=is_traced,
    )
    axes["cp"] = tuple(contexts)
    rejected += (Rejected(what, why) for what, why in left_out)
    axes["ep"] = tuple(_ep_sizes(spec, axes["ep"], experts, refuses, rejected))
    schedules, without = schedules_of(spec, axes["pp"], keeps_from_rounds)
    rejected += (Rejected(f"pipeline.schedule={words}", why) for words, why in without)
    modes: tuple[int, ...] = tuple(range(len(MODES)))
    reshard: tuple[int, ...] = (0, 1)
    hybrid = None
    strategy = None if spec.strategy == AUTO else spec.strategy
    if strategy is None and (why := only_ddp(spec, refuses)):
        strategy = "ddp"
        spec = replace(spec, strategy=strategy)
        rejected.append(Rejected("strategy=zero1, zero2, full_shard, hybrid_shard", why))
    if strategy is not None:
        modes, reshard = STRATEGY_OPTIONS[strategy]
        hybrid = strategy.startswith("hybrid") if modes == (SHARD,) else None
    trial = with_axes(spec, {data_axis(spec): 2})
    chunks, why = chunks_of(spec, refuses, trial, is_traced=is_traced)
    rejected += [Rejected("loss_chunks", why)] if why else []
    offload = stated_offloads(spec)
    if offload[0]:
        _check_offload(spec, offload[0], refuses)
    return Freedom(
        world=world,
        axes=axes,
        hybrid=hybrid,
        modes=modes,
        schedules=schedules,
        virtual=stated_virtual(spec),
        num_blocks=num_blocks,
        heads=heads,
        contexts=contexts,
        recompute=tuple(_recompute(spec, refuses, rejected)),
        reshard=reshard,
        sequence_parallel={size: cuts for size, (cuts, _) in tensor.items()},
        loss_parallel={size: cuts_loss for size, (_, cuts_loss) in tensor.items()},
        tensor_settings=tuple(_tensor_settings(spec)),
        experts=experts.modules,
        rejected=tuple(rejected),
        micro=(spec.batch.micro,) if isinstance(spec.batch.micro, int) else (),
        accumulate=spec.batch.accumulate if isinstance(spec.batch.accumulate, int) else None,
        pipelined=_stated_microbatches(spec),
        global_=spec.batch.global_,
        of_data_rank=of_data_rank(spec.batch),
        offload=offload,
        loss_chunks=chunks,
        allocators=allocators_of(spec),
        stages_may_offload=not offload[0] & PARAMS_ON_HOST
        or max(axes["pp"], default=1) == 1
        or not refuses(with_offload(spec, offload[0], pp=2)),
    )


def only_ddp(spec: Spec, refuses: Callable[[Spec], str]) -> str:
    """Return why of all strategies only ddp is possible, if the plan leaves the strategy open.

    "" if others are possible, if ddp is not, or if the plan states its strategy.
    """
    if spec.strategy not in (None, AUTO):
        return ""
    if spec.ddp:
        return "the plan has options of DistributedDataParallel, which only ddp uses"
    if spec.optimizer not in OF_WHOLE_TENSORS:
        return ""
    why = refuses(with_axes(spec, {"dp_shard": 2}))
    return why if why and not refuses(with_axes(spec, {"dp_replicate": 2})) else ""


def _axes(spec: Spec, world: int) -> dict[str, tuple[int, ...]]:
    """Return {axis: sizes that the plan allows}, before the model excludes any."""
    every = divisors(world)
    if spec.mesh is None or spec.mesh == AUTO:
        return dict.fromkeys(AXES, every)
    if not isinstance(spec.mesh, Mapping):
        what = "a bare mesh does not name its axes"
        fix = "name the axes, such as mesh: {dp_replicate: 2, dp_shard: 4}, or write mesh: auto"
        raise PlanError(Problem(what, spec.origin("mesh"), fix))
    out: dict[str, tuple[int, ...]] = dict.fromkeys(AXES, (1,))
    for axis, size in spec.mesh.items():
        own = size.size if isinstance(size, Borrow) else size
        out[axis] = (own,) if isinstance(own, int) else every
    return out


def _tensor_parallel(
    spec: Spec,
    axes: Mapping[str, Sequence[int]],
    refuses: Callable[[Spec], str],
    rejected: list[Rejected],
) -> dict[int, tuple[bool, bool]]:
    """Return the sizes of tp that the model allows, with the settings of each.

    Each size maps to (True if activations are sharded along the sequence, True if the loss is
    sharded along the vocabulary). Of the settings that the model allows, those with more sharding
    are taken, which need less memory; `less_sharded` has the others.
    """
    out = {1: (spec.sequence_parallel, False)} if 1 in axes["tp"] else {}
    for size in axes["tp"]:
        if size == 1:
            continue
        whys = []
        for cuts, cuts_loss in _tensor_settings(spec):
            trial = with_axes(spec, {"tp": size}, sequence_parallel=cuts, loss_parallel=cuts_loss)
            why = refuses(trial)
            if not why:
                out[size] = cuts, cuts_loss
                break
            whys.append(why)
        else:
            rejected.append(Rejected(f"mesh.tp={size}", whys[-1]))
    return out


def _tensor_settings(spec: Spec) -> Iterator[tuple[bool, bool]]:
    """Yield the (sequence_parallel, loss_parallel) that the plan allows, most sharding first."""
    yield from itertools.product(
        *(
            (getattr(spec, name),) if name in spec.origins else (True, False)
            for name in ("sequence_parallel", "loss_parallel")
        )
    )


def less_sharded(spec: Spec, free: Freedom, refuses: Callable[[Spec], str]) -> Iterator[Freedom]:
    """Yield spaces whose tp shards activations or the loss less than that of `freedom_of`.

    Together with `free` they have all settings of tp. Each has the sizes of tp above 1 that allow
    its settings, and differs from the others in these settings.

    Args:
        spec: The spec of the plan file.
        free: What `freedom_of` returned for it.
        refuses: As in `freedom_of`.
    """
    sizes = [size for size in free.axes["tp"] if size > 1]
    for cuts, cuts_loss in free.tensor_settings:
        allowed = [
            size
            for size in sizes
            if (cuts, cuts_loss) < (free.sequence_parallel[size], free.loss_parallel[size])
            and not refuses(
                with_axes(spec, {"tp": size}, sequence_parallel=cuts, loss_parallel=cuts_loss)
            )
        ]
        if allowed:
            yield replace(
                free,
                axes={**free.axes, "tp": tuple(allowed)},
                tensor_settings=((cuts, cuts_loss),),
                sequence_parallel=dict(free.sequence_parallel) | dict.fromkeys(allowed, cuts),
                loss_parallel=dict(free.loss_parallel) | dict.fromkeys(allowed, cuts_loss),
            )


def _pipelines(
    spec: Spec,
    sizes: Sequence[int],
    num_blocks: int,
    refuses: Callable[[Spec], str],
    rejected: list[Rejected],
    is_traced: bool,
) -> tuple[int, ...]:
    """Return the sizes of pp that the model allows.

    Every stage must have a block. If the model refuses two stages, more stages are not tried. If it
    allows two, more are tried for a live model only: its forward may prevent some of the cuts.
    """
    more = [size for size in sizes if size > 1]
    why = refuses(with_axes(spec, {"pp": 2})) if more else ""
    if why:
        rejected.append(Rejected(f"mesh.pp={', '.join(map(str, more))}", why))
        return tuple(size for size in sizes if size == 1)
    over = [size for size in more if size > num_blocks]
    if over:
        what = f"mesh.pp={', '.join(map(str, over))}"
        there = "is 1 block" if num_blocks == 1 else f"are {num_blocks} blocks"
        rejected.append(Rejected(what, f"there {there}, and each stage has one"))
    allowed = [size for size in sizes if size <= max(1, num_blocks)]
    for size in [size for size in allowed if size > 2 and is_traced]:
        if why := refuses(with_axes(spec, {"pp": size})):
            rejected.append(Rejected(f"mesh.pp={size}", why))
            allowed.remove(size)
    return tuple(allowed)


def _as_stated(
    spec: Spec,
    sizes: Sequence[int],
    can_cut: Callable[[int], bool],
    rejected: list[Rejected],
) -> Iterator[int]:
    """Yield the sizes of pp that agree with what the plan states on its pipeline and stages."""
    is_stated = spec.pipeline is not None or any(rule.stage is not None for rule in spec.rules)
    for size in sizes:
        why = ""
        if size == 1 and is_stated:
            why = "the plan states a pipeline"
        elif size > 1 and not can_cut(size):
            why = "the plan states stages that do not go with it"
        if why:
            rejected.append(Rejected(f"mesh.pp={size}", why))
        else:
            yield size


def _stated_microbatches(spec: Spec) -> int | None:
    stated = spec.pipeline.microbatches if spec.pipeline is not None else AUTO
    return stated if isinstance(stated, int) else None


def _ep_sizes(
    spec: Spec,
    sizes: Sequence[int],
    experts: ExpertCounts,
    refuses: Callable[[Spec], str],
    rejected: list[Rejected],
) -> Iterator[int]:
    """Yield the sizes of ep that the model allows; size 1 only if no rule places experts on ep."""
    more = [size for size in sizes if size > 1]
    if 1 in sizes and not is_placed(spec):
        yield 1
    if more and not experts.modules:
        rejected.append(Rejected(f"mesh.ep={more[0]}", "no module of the model stacks experts"))
        return
    for size in [size for size in more if experts.count % size == 0]:
        if why := refuses(with_axes(spec, {"ep": size}, experts=experts.modules)):
            rejected.append(Rejected(f"mesh.ep={size}", why))
        else:
            yield size
    if uneven := [str(size) for size in more if experts.count % size]:
        why = f"{experts.count} experts do not divide by it"
        rejected.append(Rejected(f"mesh.ep={', '.join(uneven)}", why))


def _check_offload(spec: Spec, what: int, refuses: Callable[[Spec], str]) -> None:
    """Check that the stated offload is possible and has figures.

    Args:
        spec: The spec of the plan file.
        what: Bits of the grid's `offload` that the plan states, so that all configurations have
            them.
        refuses: Returns the reason why a trial spec is not possible; "" if it is.

    Raises:
        PlanError: The offload is not possible, or the cost model has no figures for it.
    """
    mode = spec.activation_checkpointing.mode
    stated = "activation_checkpointing" in spec.origins and mode != AUTO
    trial = with_offload(spec, what)
    optimizer = spec.offload.optimizer
    if optimizer in (True, False):
        params = trial.offload.params and spec.offload.params is not None
        there = replace(trial.offload, optimizer=optimizer, params=params)
        trial = replace(trial, offload=there)
    why, fix = refuses(trial), "leave it out, or state every open key"
    if not why and what & ACTIVATIONS_ON_HOST and stated and mode != "full":
        why = ONLY_IN_FULL
        fix = "write activation_checkpointing: full"
    if why:
        raise PlanError(Problem(why, spec.origin("offload"), fix))


def _recompute(
    spec: Spec, refuses: Callable[[Spec], str], rejected: list[Rejected]
) -> Iterator[int]:
    """Yield the indices into `cost.grid.RECOMPUTE` that blocks may take; reject the others."""
    stated = spec.activation_checkpointing
    if "activation_checkpointing" in spec.origins and stated.mode != AUTO:
        yield RECOMPUTE.index(stated.mode)
        return
    yield RECOMPUTE.index("none")
    words: tuple[Literal["selective", "full"], ...] = ("selective", "full")
    for word in words:
        trial = with_axes(spec, {data_axis(spec): 2})
        policy = replace(trial.activation_checkpointing, mode=word)
        if why := refuses(replace(trial, activation_checkpointing=policy)):
            rejected.append(Rejected(f"activation_checkpointing={word}", why))
        else:
            yield RECOMPUTE.index(word)
