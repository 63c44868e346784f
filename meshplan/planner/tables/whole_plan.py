"""Seconds and saved bytes of one complete plan, from the cost model that the search uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.cost.chain import chain_of
from meshplan.cost.config import mode_of, offload_of, option_of, plan_as_config
from meshplan.cost.grid import (
    ACTIVATIONS_ON_HOST,
    MODES,
    OPTIONS,
    PARAMS_ON_HOST,
    RECOMPUTE,
    SCHEDULE_WORDS,
)
from meshplan.cost.profile import Profile, profile_of_plan, without
from meshplan.cost.step import Array, Terms, terms
from meshplan.cost.types import Chain
from meshplan.errors import PlanError, Problem
from meshplan.layout.hardware import Cluster
from meshplan.layout.mesh import order_of
from meshplan.layout.schedules import SCHEDULES
from meshplan.memory.analytic.microbatches import loss_chunks_of, refusals, styled_of
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.planner.space.ep import LENDER
from meshplan.planner.tables.build import cost_table_of
from meshplan.planner.tables.cost_table import CostTable, weights
from meshplan.planner.tables.memory_bounds import element_bytes_of

_SCHEDULES = SCHEDULE_WORDS[1:]


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
        if problems := refused or list(unpriced(plan, is_run=chain is not None)):
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
        if self._run is not None:
            return self._run
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
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of one step of the plan."""
        table = self._cost_table
        stages = self._by_stage(table)
        a, b = (float(each[0]) for each in weights(self.row))
        return a * max(stages) + b * sum(stages) + float(table.once_s[0])

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
        for kind, name in zip(chain.order, chain.names, strict=True):
            found, option = self._terms(kind, profile), self.option(name)
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
    def _cost_table(self) -> CostTable:
        return cost_table_of(
            self.row,
            lambda *cut: self.chain,
            profile=self.profile,
            gpus_per_node=self.cluster.gpus_per_node,
            precision=self.plan.spec.precision,
            dtype=self._dtype,
            sizes=element_bytes_of(self.plan),
            recompute=tuple(range(len(RECOMPUTE))),
            reshard=(0, 1),
            pins={},
            exchanges=self._exchanges,
            order=order_of(self.plan.mesh.sizes),
        )

    def _by_stage(self, table: CostTable) -> list[float]:
        """Return the seconds of a microbatch, forward and backward, on each pipeline rank."""
        stages = self.plan.assignment.stages
        out = [0.0] * int(self.row["pp"][0])
        at = 0
        for kind, name in zip(table.order, table.names, strict=True):
            if stages is not None and name:
                at = stages.rank_of(_stage_of(self.plan, name))
            out[at] += float(table.seconds[0, kind, self.option(name)])
        return out

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
        option = self.option(name)
        chain = self.chain
        kinds = [k for k, other in zip(chain.order, chain.names, strict=True) if other == name]
        parts = [self._part(self._terms(k, self.profile), option) for k in kinds]
        free = without(self.profile, network=True)
        alone = [self._part(self._terms(k, free), option) for k in kinds]
        forward, backward, update = (sum(p[n] for p in parts) for n in range(3))
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

    def _terms(self, kind: int, profile: Profile) -> Terms:
        return terms(
            self.row,
            self.chain.kinds[kind],
            profile,
            self.cluster.gpus_per_node,
            self.plan.spec.precision,
            dtype=self._dtype,
            exchanges=self._exchanges,
            order=order_of(self.plan.mesh.sizes),
        )

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


def unpriced(plan: Plan, *, is_run: bool) -> Iterator[Problem]:
    """Yield a problem for each feature of the plan that the cost model has no figures for.

    Args:
        plan: The plan.
        is_run: If True, the costs of the blocks were counted as they run, with what they recompute.
    """
    a, mesh, stages = plan.assignment, plan.mesh, plan.assignment.stages
    mode = MODES[mode_of(plan)]
    # With ep, the units of experts are sharded over the ranks that ep leaves.
    units = {(u.shard_axes, u.replicate_axes) for f, u in a.units.items() if f not in a.experts}
    odd_data = (mode == "ddp" and mesh.size("dp_shard") > 1) or (
        mode == "zero1" and mesh.size("dp_replicate") > 1
    )
    reshards = [u.reshard_after_forward for u in a.units.values()]
    blocks = plan.graph.blocks()
    split = stages and {_stages_of_block(plan, block) for block in blocks}
    for is_present, what in (
        (plan.micro is None, "a plan that states no batch size"),
        (any(loan.within != LENDER for loan in mesh.loans), f"ranks not borrowed from {LENDER}"),
        (any(u.on_host for u in a.units.values()) and not offload_of(plan) & PARAMS_ON_HOST,
         "offloaded parameters of single modules"),
        (bool(a.host_activations) and not offload_of(plan) & ACTIVATIONS_ON_HOST,
         "offloaded activations without full recomputation of all blocks"),
        (any(not isinstance(each, bool) for each in reshards), "resharding over fewer ranks"),
        (len(units) > 1, "units that are not all sharded along the same axes"),
        (mode == "shard" and not set(blocks) <= set(a.units), "blocks that are not units"),
        (odd_data, f"{a.strategy.name} on this mesh"),
        (not is_run and any(r.policy.save for r in a.recompute.values()),
         "a list of operations to save"),
        (stages is not None and plan.accumulate > 1, "gradient accumulation around a pipeline"),
        (stages is not None and stages.schedule not in _SCHEDULES,
         f"the schedule {stages.schedule}" if stages is not None else ""),
        (stages is not None and SCHEDULES[stages.schedule].splits_backward
         and any(unit.on_host for unit in a.units.values()),
         "a split backward of offloaded parameters"),
        (stages is not None and stages.virtual > 1 and _is_uneven(plan),
         "stages of one rank that differ by more than one block"),
        (bool(split) and max(len(each) for each in split or ()) > 1,
         "stage boundaries inside blocks"),
    ):  # fmt: skip
        if is_present:
            yield _no_figures(plan, what)


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
