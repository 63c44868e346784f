"""Seconds and saved bytes of one complete plan, from the cost model that the search uses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshplan.cost.chain import (
    AFTER,
    BEFORE,
    chain_of,
    parts_of,
    parts_of_places,
    with_optimizer,
)
from meshplan.cost.config import mode_of, offload_of, option_of, plan_as_config
from meshplan.cost.grid import (
    ACTIVATIONS_ON_HOST,
    MODES,
    OPTIONS,
    PARAMS_ON_HOST,
)
from meshplan.cost.pipeline import (
    CLOSED_FORMS,
    crossing_seconds,
    sending_seconds,
    unhidden_seconds,
)
from meshplan.cost.profile import Profile, profile_of_plan, without
from meshplan.cost.rows import Array, UnitPart
from meshplan.cost.simulate import simulate
from meshplan.cost.step import Terms, terms
from meshplan.cost.types import Chain
from meshplan.errors import PlanError, Problem
from meshplan.layout.hardware import Cluster
from meshplan.layout.mesh import order_of
from meshplan.layout.optimizers import product_flops
from meshplan.layout.schedules import SCHEDULES
from meshplan.memory.analytic.microbatches import (
    loss_chunks_of,
    refusals,
    saves_of,
    styled_of,
)
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.planner.space.ep import LENDER
from meshplan.planner.tables.cost_table import weights
from meshplan.planner.tables.memory_bounds import element_bytes_of
from meshplan.spec.spec import PRODUCTS


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds of one block on its rank.

    Attributes:
        forward_s: Seconds of a microbatch's forward, with exposed communication.
        backward_s: Seconds of a microbatch's backward, with recomputation and exposed
            communication.
        exposed_s: Part of `forward_s` + `backward_s` that would disappear if communication took no
            time.
        update_s: Seconds once per step: the extra time of the first forward and of the last
            backward, and the optimizer's step.
    """

    forward_s: float
    backward_s: float
    exposed_s: float
    update_s: float


class _UnitSettings(NamedTuple):
    """How FSDP2 gathers the parameters of a place.

    Attributes:
        is_awaited: If True, nothing hides the gathers and reductions.
        reshard_ranks: Ranks over which parameters are resharded after forward; None for those that
            store them.
        parts: How the parameters are sharded, if not all units of the plan are alike; else ().
    """

    is_awaited: bool
    reshard_ranks: int | None
    parts: tuple[UnitPart, ...]


class _Place(NamedTuple):
    """The seconds of one microbatch in a block, or in the modules before or after the blocks.

    Attributes:
        stage: The pipeline stage, 0 without a pipeline.
        forward_s: Seconds of the forward.
        seconds: Seconds of forward and backward, and of what is done once per step divided by the
            number of microbatches.
        compute_s: The part of `seconds` without communication and recomputation.
    """

    stage: int
    forward_s: float
    seconds: float
    compute_s: float


class Costed:
    """The costs of a complete plan on a machine.

    Args:
        plan: The plan.
        cluster: The machine.
        profile: Measured speeds; None to use the tables of known devices.
        chain: Chain of block costs of one tp rank under this plan; None to derive it from the
            model's config.

    Attributes:
        profile: The speeds used.
        row: The plan as a grid with one configuration (`cost.grid.GRID`).

    Raises:
        PlanError: The cost model has no figures for something in the plan.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        profile: Profile | None = None,
        chain: Chain | None = None,
    ) -> None:
        self.plan, self.cluster, self._run = plan, cluster, chain
        refused = list(refusals(plan)) or list(_not_read(plan)) if chain is None else []
        if problems := refused or list(unpriced(plan)):
            raise PlanError(problems)
        self._dtype = next(
            p.info.dtype for p in plan.assignment.tensors.values() if not p.info.is_buffer
        )
        dtype = plan.spec.precision.param or self._dtype
        self.profile = profile_of_plan(plan.spec, plan.graph, cluster, dtype, profile)
        self.row = plan_as_config(plan)

    def with_profile(self, profile: Profile) -> Costed:
        """Return the costs of the same plan with other constants."""
        other = Costed(self.plan, self.cluster, chain=self.chain)
        other.profile = profile
        return other

    @cached_property
    def chain(self) -> Chain:
        """The chain of block costs of one tp rank."""
        plan = self.plan
        return with_optimizer(self._run or self._of_config(), plan.graph, plan.spec.optimizer)

    def _of_config(self) -> Chain:
        """Return the chain that the model's config gives."""
        plan = self.plan
        length, tp = plan.spec.batch.seq_len, plan.mesh.size("tp")
        assert length is not None
        return chain_of(
            plan.graph,
            seq_len=length,
            element_bytes=element_bytes_of(plan).computed,
            tp=tp,
            ep=plan.mesh.size("ep"),
            styled=styled_of(plan) if tp > 1 else None,
            loss_chunks=loss_chunks_of(plan),
            saves={n: kept for n, kept in saves_of(plan).items() if kept != frozenset(PRODUCTS)},
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of one step of the plan.

        A pipeline whose schedule has no closed form, or whose ranks have unlike stages, is
        simulated.
        """
        stages, places = self.plan.assignment.stages, self._places
        if stages is None or (stages.schedule in CLOSED_FORMS and not _is_uneven(self.plan)):
            by_rank = [0.0] * int(self.row["pp"][0])
            for place in places:
                by_rank[stages.rank_of(place.stage) if stages else 0] += place.seconds
            a, b = (float(each[0]) for each in weights(self._one_run))
            seconds = a * max(by_rank) + b * sum(by_rank)
            sending = sending_seconds(self._one_run, self._compute_s, self._crossing_s)
        else:
            forward_s, backward_s = [0.0] * stages.num, [0.0] * stages.num
            for place in places:
                forward_s[place.stage] += place.forward_s
                backward_s[place.stage] += place.seconds - place.forward_s
            step = simulate(
                SCHEDULES[stages.schedule],
                forward_s,
                backward_s,
                ranks=stages.num_ranks,
                microbatches=stages.microbatches,
                crossing_s=float(self._crossing_s[0]),
            )
            seconds = step.seconds
            sending = unhidden_seconds(self._one_run, self._compute_s, self._crossing_s)
        runs = 1 if stages is None else self.plan.accumulate
        return runs * (seconds + float(sending[0]))

    @cached_property
    def phases(self) -> Mapping[str, float] | None:
        """Seconds of the phases of a step, as `meshplan.Run` measures them; they sum to `seconds`.

        "communication" is what would disappear from the others if it took no time. None with a
        pipeline, in which forwards and backwards take turns.
        """
        if self.row["pp"][0] > 1:
            return None
        whole = self._phase_seconds(self.profile)
        alone = self._phase_seconds(without(self.profile, network=True))
        forward, backward, optimizer = alone.tolist()
        return {
            "forward": forward,
            "backward": backward,
            "communication": float(whole.sum() - alone.sum()),
            "optimizer": optimizer,
        }

    def _phase_seconds(self, profile: Profile) -> Array:
        """Return the seconds of forward, backward and the optimizer, with communication."""
        count, chain = int(self.row["microbatches"][0]), self.chain
        sums = np.zeros(3)
        for kind, name, part in zip(chain.order, chain.names, parts_of_places(chain), strict=True):
            found, option = self._terms(kind, self._unit_of(part), profile), self.option(name)
            forward, backward = found.forward_s[0, option], found.backward_s[0, option]
            last = count * backward + found.ends_s[0, option]
            sums += (count * forward, last, found.update_s[0])
        return sums

    @property
    def tokens(self) -> int:
        """Tokens of a step, summed over ranks."""
        r = self.row[0]
        samples = int(r["dp_replicate"] * r["dp_shard"] * r["micro"] * r["microbatches"])
        return samples * (self.plan.spec.batch.seq_len or 0)

    @cached_property
    def _places(self) -> tuple[_Place, ...]:
        stages, chain = self.plan.assignment.stages, self.chain
        last = max((place for place, name in enumerate(chain.names) if name), default=0)
        known: dict[tuple[int, _UnitSettings], Terms] = {}
        out, stage = [], 0
        for place, part in enumerate(parts_of_places(chain)):
            name = chain.names[place]
            if stages is not None and (name or place > last):
                stage = _stage_of(self.plan, name) if name else stages.num - 1
            key = chain.order[place], self._unit_of(part)
            if key not in known:
                known[key] = self._terms(*key)
            found, option = known[key], self.option(name)
            forward_s, backward_s, update_s = self._part(found, option)
            seconds = forward_s + backward_s + update_s / int(self.row["microbatches"][0])
            out.append(_Place(stage, forward_s, seconds, float(found.compute_s[0])))
        return tuple(out)

    @cached_property
    def _one_run(self) -> Array:
        """The plan as a grid, with the microbatches of one run of its pipeline."""
        row, stages = self.row.copy(), self.plan.assignment.stages
        if stages is not None:
            row["microbatches"] = stages.microbatches
        return row

    @cached_property
    def _compute_s(self) -> Array:
        """Seconds of computation of a microbatch in all places together, of shape [1]."""
        return np.array([sum(place.compute_s for place in self._places)])

    @cached_property
    def _crossing_s(self) -> Array:
        """Seconds to send one microbatch to the next stage, of shape [1]."""
        return crossing_seconds(
            self.row,
            max(kind.boundary_bytes for kind in self.chain.kinds),
            self.profile,
            self.cluster.gpus_per_node,
            order_of(self.plan.mesh.sizes),
        )

    def option(self, name: str) -> int:
        """Return the option of a block, as an index into `cost.grid.OPTIONS`.

        Args:
            name: Fqn of the block; "" for the modules outside the blocks.
        """
        return option_of(self.plan, name)

    def block(self, name: str) -> BlockCost:
        """Return the cost of one block.

        Args:
            name: Fqn of the block; "" for all modules outside the blocks together.
        """
        option, chain = self.option(name), self.chain
        each = zip(chain.order, parts_of_places(chain), chain.names, strict=True)
        places = [(kind, self._unit_of(part)) for kind, part, other in each if other == name]
        free = without(self.profile, network=True)
        found = [self._part(self._terms(*place), option) for place in places]
        alone = [self._part(self._terms(*place, free), option) for place in places]
        forward, backward, update = (sum(p[n] for p in found) for n in range(3))
        unsent = sum(p[0] + p[1] for p in alone)
        return BlockCost(forward, backward, forward + backward - unsent, update)

    def saved_bytes(self, name: str) -> int:
        """Return the bytes that a block saves for the backward of one microbatch.

        Args:
            name: Fqn of the block; "" for all modules outside the blocks together.
        """
        chain = self.chain
        recompute = OPTIONS[self.option(name)][0]
        per_sample = sum(
            chain.kinds[k].saved_bytes[recompute]
            for k, other in zip(chain.order, chain.names, strict=True)
            if other == name
        )
        return int(per_sample * int(self.row["micro"][0]) / int(self.row["cp"][0]))

    @property
    def _exchanges(self) -> bool:
        """True if cp exchanges heads (all-to-all) instead of gathering keys and values."""
        context = self.plan.assignment.context
        return context is not None and context.attention == "all_to_all"

    def _terms(self, kind: int, unit: _UnitSettings, profile: Profile | None = None) -> Terms:
        """Return the seconds of a kind of place; `profile` gives other speeds than the plan's."""
        return terms(
            self.row,
            self.chain.kinds[kind],
            profile or self.profile,
            self.cluster.gpus_per_node,
            self.plan.spec.precision,
            dtype=self._dtype,
            is_awaited=unit.is_awaited,
            reshard_ranks=unit.reshard_ranks,
            parts=unit.parts,
            exchanges=self._exchanges,
            order=order_of(self.plan.mesh.sizes),
        )

    def _unit_of(self, part: str) -> _UnitSettings:
        """Return how the parameters of a part of the model (`cost.chain.parts_of`) are gathered."""
        unit = self.plan.assignment.units.get(part)
        over = unit.reshard_after_forward if unit is not None else False
        # Nothing hides the root unit, which also has the parameters of blocks that are no units.
        is_outside = part in (BEFORE, AFTER)
        is_in_root = is_outside or (unit is None and MODES[mode_of(self.plan)] == "shard")
        ranks = None if isinstance(over, bool) else over
        return _UnitSettings(is_in_root, ranks, self._unlike_parts.get(part, ()))

    @cached_property
    def _unlike_parts(self) -> dict[str, tuple[UnitPart, ...]]:
        """How each part of the model is sharded; {} if all units of the plan are alike."""
        a = self.plan.assignment
        if len(_axes_of_units(self.plan)) < 2:
            return {}
        numels: dict[str, Counter[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
        for fqn, part in parts_of(self.plan.graph).items():
            unit = a.units.get(a.tensors[fqn].unit or "")
            axes = (unit.shard_axes, unit.replicate_axes) if unit is not None else ((), ())
            numels.setdefault(part, Counter())[axes] += math.prod(a.tensors[fqn].info.shape)
        return {
            part: tuple(UnitPart(num / counts.total(), *axes) for axes, num in counts.items())
            for part, counts in numels.items()
        }

    def _part(self, found: Terms, option: int) -> tuple[float, float, float]:
        """Return the seconds of one option: (forward, backward, once per step)."""
        return (
            float(found.forward_s[0, option]),
            float(found.backward_s[0, option]),
            float(found.ends_s[0, option] + found.update_s[0]),
        )


def _stage_of(plan: Plan, block: str) -> int:
    """Return the stage of a block: the stage of its first unit or, without units, tensor."""
    stages = plan.assignment.stages
    assert stages is not None
    first_stages = ((fqn, own[0]) for fqn, own in stages.tensors.items())
    return next(s for fqn, s in (*stages.units, *first_stages) if is_inside(fqn, block))


def _not_read(plan: Plan) -> Iterator[Problem]:
    """Yield a problem if the model has no config, and if the plan states no sequence length."""
    if not plan.graph.config:
        yield _no_figures(plan, f"{plan.graph.name}, which has no config")
    if plan.spec.batch.seq_len is None:
        yield _no_figures(plan, "a plan that states no batch.seq_len")


def _no_figures(plan: Plan, what: str) -> Problem:
    fix = "change this in the plan, or run meshplan estimate, which needs no step time"
    return Problem(f"the cost model has no figures for {what}", plan.spec.origin(""), fix)


def unpriced(plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each feature of the plan that the cost model has no figures for."""
    a, mesh, stages = plan.assignment, plan.mesh, plan.assignment.stages
    mode = MODES[mode_of(plan)]
    odd_data = (mode == "ddp" and mesh.size("dp_shard") > 1) or (
        mode == "zero1" and mesh.size("dp_replicate") > 1
    )
    apart = [block for block in plan.graph.blocks() if block not in a.units]
    blocks = plan.graph.blocks()
    split = stages and {_stages_of_block(plan, block) for block in blocks}
    for is_present, what in (
        (plan.micro is None, "a plan that states no batch size"),
        (any(loan.within != LENDER for loan in mesh.loans), f"ranks not borrowed from {LENDER}"),
        (any(u.on_host for u in a.units.values()) and not offload_of(plan) & PARAMS_ON_HOST,
         "offloaded parameters of single modules"),
        (bool(a.host_activations) and not offload_of(plan) & ACTIVATIONS_ON_HOST,
         "offloaded activations without full recomputation of all blocks"),
        (len(_axes_of_units(plan)) > 1 and (mode != "shard" or mesh.size("ep") > 1),
         "units that are not all sharded along the same axes"),
        (mode == "shard" and not all(_is_in_root(plan, each) for each in apart),
         "blocks inside larger units"),
        (odd_data, f"{a.strategy.name} on this mesh"),
        (bool(product_flops(plan.spec.optimizer, (1, 1)))
         and any(placed.stored.axes for placed in a.tensors.values()),
         "the products of Muon's step on sharded parameters"),
        (stages is not None and SCHEDULES[stages.schedule].splits_backward
         and any(unit.on_host for unit in a.units.values()),
         "a split backward of offloaded parameters"),
        (bool(split) and max(len(each) for each in split or ()) > 1,
         "stage boundaries inside blocks"),
    ):  # fmt: skip
        if is_present:
            yield _no_figures(plan, what)


def unsearched(plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each feature that `Costed` prices, and the search does not."""
    a, stages = plan.assignment, plan.assignment.stages
    is_sharded = MODES[mode_of(plan)] == "shard"
    over = (unit.reshard_after_forward for unit in a.units.values())
    for is_present, what in (
        (is_sharded and not set(plan.graph.blocks()) <= set(a.units), "blocks that are not units"),
        (any(not isinstance(each, bool) for each in over), "resharding over fewer ranks"),
        (len(_axes_of_units(plan)) > 1, "units that are not all sharded along the same axes"),
        (any(each.policy.save for each in a.recompute.values()), "a list of operations to save"),
        (stages is not None and plan.accumulate > 1, "gradient accumulation around a pipeline"),
        (stages is not None and stages.schedule not in CLOSED_FORMS,
         f"the schedule {stages.schedule}" if stages is not None else ""),
        (stages is not None and stages.virtual > 1 and _is_uneven(plan),
         "stages of one rank that differ by more than one block"),
    ):  # fmt: skip
        if is_present:
            yield Problem(f"the planner does not search plans with {what}", plan.spec.origin(""))


def _axes_of_units(plan: Plan) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the (axes that shard, axes that replicate) of all units but those of experts.

    With ep, the units of experts are sharded over the ranks that ep leaves.
    """
    a = plan.assignment
    return {(u.shard_axes, u.replicate_axes) for f, u in a.units.items() if f not in a.experts}


def _is_in_root(plan: Plan, block: str) -> bool:
    """Return True if no unit but the root has the parameters of a block that is no unit."""
    return not any(fqn and is_inside(block, fqn) for fqn in plan.assignment.units)


def _stages_of_block(plan: Plan, block: str) -> tuple[int, ...]:
    """Return all stages that have a tensor of a block."""
    stages = plan.assignment.stages
    assert stages is not None
    counts: Counter[int] = Counter()
    for fqn, stages_of in stages.tensors.items():
        if fqn.startswith(f"{block}."):
            counts.update(stages_of)
    return tuple(counts)


def _is_uneven(plan: Plan) -> bool:
    """Return True if some rank has a stage with two blocks more than another of its stages."""
    stages = plan.assignment.stages
    assert stages is not None
    counts = Counter(_stage_of(plan, block) for block in plan.graph.blocks())
    by_rank: dict[int, list[int]] = {}
    for stage in range(stages.num):
        by_rank.setdefault(stages.rank_of(stage), []).append(counts[stage])
    return any(max(each) - min(each) > 1 for each in by_rank.values())
