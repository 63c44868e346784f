"""Seconds and saved bytes of one complete plan, from the cost model that the search uses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshplan.cost.chain import AFTER, BEFORE, parts_of, parts_of_places, with_optimizer
from meshplan.cost.config import (
    chain_of_plan,
    option_of,
    plan_as_config,
    stage_of_places,
)
from meshplan.cost.grid import OPTIONS, PARAMS_ON_HOST, Array
from meshplan.cost.pipeline import (
    CLOSED_FORMS,
    crossing_seconds,
    sending_seconds,
    unhidden_seconds,
)
from meshplan.cost.profile import Profile, profile_of_plan, without
from meshplan.cost.rows import UnitPart
from meshplan.cost.simulate import simulate
from meshplan.cost.step import Terms, terms
from meshplan.cost.types import Chain
from meshplan.errors import PlanError
from meshplan.layout.hardware import Cluster
from meshplan.layout.mesh import order_of
from meshplan.layout.schedules import SCHEDULES
from meshplan.memory.analytic.microbatches import op_refusals
from meshplan.plan.plan import Plan
from meshplan.planner.tables.cost_table import weights
from meshplan.planner.tables.unpriced import has_unlike_units, is_uneven, not_read, unpriced


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
    """Settings by which FSDP2 gathers the parameters of a place.

    Attributes:
        is_awaited: If True, nothing hides the gathers and reductions.
        reshard_ranks: Ranks over which parameters are resharded after forward; None for those that
            store them.
        is_on_host: True if the parameters, their gradients and states are on the host.
        parts: How the parameters are sharded, if not all units of the plan are alike; else ().
    """

    is_awaited: bool
    reshard_ranks: int | None
    is_on_host: bool
    parts: tuple[UnitPart, ...]


class _Place(NamedTuple):
    """A block, or the modules before or after the blocks.

    Attributes:
        name: Fqn of the block; "" outside the blocks.
        stage: The pipeline stage, 0 without a pipeline.
        found: Seconds of the place under each option.
        option: The option of the place, as an index into `cost.grid.OPTIONS`.
    """

    name: str
    stage: int
    found: Terms
    option: int

    @property
    def forward_s(self) -> float:
        return float(self.found.forward_s[0, self.option])

    @property
    def backward_s(self) -> float:
        return float(self.found.backward_s[0, self.option])

    @property
    def ends_s(self) -> float:
        return float(self.found.ends_s[0, self.option])

    @property
    def update_s(self) -> float:
        return float(self.found.update_s[0])

    @property
    def once_s(self) -> float:
        """Seconds once per step: at the step's ends, and of the optimizer."""
        return self.ends_s + self.update_s

    @property
    def compute_s(self) -> float:
        return float(self.found.compute_s[0])


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one microbatch in each pipeline stage.

    Args:
        forward_s, backward_s: Seconds of each stage, in the order of the model; one entry without
            pipeline.
        crossing_s: Seconds to send the output of a stage to the next stage.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    crossing_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds of a step without pipeline stages, by what they are spent on.

    Args:
        compute_s: Computation of forward and backward.
        recompute_s: Recomputation of forwards in backward.
        model_parallel_s: Communication of tp, ep and cp, for which computation waits.
        data_parallel_s: Waits for gathers and reductions that computation does not hide, or for the
            host to launch kernels.
        ends_s: The part of the first gathers and the last reductions that nothing hides.
        update_s: The optimizer's step.
    """

    compute_s: float
    recompute_s: float
    model_parallel_s: float
    data_parallel_s: float
    ends_s: float
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
        refused = list(op_refusals(plan)) or list(not_read(plan)) if chain is None else []
        if problems := refused or list(unpriced(plan)):
            raise PlanError(problems)
        dtype = plan.spec.precision.param or plan.graph.dtype
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
        if self._run is None:
            return chain_of_plan(self.plan)
        return with_optimizer(self._run, self.plan.graph, self.plan.spec.optimizer)

    @cached_property
    def seconds(self) -> float:
        """Seconds of one step of the plan.

        A pipeline whose schedule has no closed form, or whose ranks have unlike stages, is
        simulated.
        """
        stages, count = self.plan.assignment.stages, int(self.row["microbatches"][0])
        num = stages.num if stages is not None else 1
        once_s = [sum(p.once_s / count for p in self._places if p.stage == n) for n in range(num)]
        each, one_run = self.stage_seconds, self._one_run
        compute = np.array([sum(place.compute_s for place in self._places)])
        crossing = np.array([each.crossing_s])
        if stages is None or (stages.schedule in CLOSED_FORMS and not is_uneven(self.plan)):
            by_rank = [0.0] * int(self.row["pp"][0])
            parts = zip(each.forward_s, each.backward_s, once_s, strict=True)
            for stage, stage_s in enumerate(map(sum, parts)):
                by_rank[stages.rank_of(stage) if stages else 0] += stage_s
            (a,), (b,) = weights(one_run)
            seconds = a * max(by_rank) + b * sum(by_rank)
            sending = sending_seconds(one_run, compute, crossing)
        else:
            step = simulate(
                SCHEDULES[stages.schedule],
                each.forward_s,
                [sum(parts) for parts in zip(each.backward_s, once_s, strict=True)],
                ranks=stages.num_ranks,
                microbatches=stages.microbatches,
                crossing_s=each.crossing_s,
            )
            seconds = step.seconds
            sending = unhidden_seconds(one_run, compute, crossing)
        runs = 1 if stages is None else self.plan.accumulate
        return float(runs * (seconds + sending[0]))

    @cached_property
    def stage_seconds(self) -> StageSeconds:
        """Seconds of one microbatch in each pipeline stage."""
        stages = self.plan.assignment.stages
        forward_s, backward_s = np.zeros((2, stages.num if stages is not None else 1))
        for place in self._places:
            forward_s[place.stage] += place.forward_s
            backward_s[place.stage] += place.backward_s
        most = max(kind.boundary_bytes for kind in self.chain.kinds)
        per_node, order = self.cluster.gpus_per_node, order_of(self.plan.mesh.sizes)
        crossing = crossing_seconds(self.row, most, self.profile, per_node, order)
        return StageSeconds(
            tuple(forward_s.tolist()), tuple(backward_s.tolist()), float(crossing[0])
        )

    @property
    def step_parts(self) -> StepParts:
        """Parts of the seconds of a step without a pipeline, by what they are spent on."""
        count, parts = int(self.row["microbatches"][0]), np.zeros(6)
        for place in self._places:
            found, option = place.found, place.option
            # With the same option without recomputation, backward takes less by the recomputation.
            plain = OPTIONS.index((0, OPTIONS[option][1]))
            again = place.backward_s - float(found.backward_s[0, plain])
            sent = float(found.exposed_tp_s[0])
            waits = place.forward_s + place.backward_s - again - place.compute_s - sent
            passes = np.array((place.compute_s, again, sent, waits)) * count
            parts += (*passes, place.ends_s, place.update_s)
        compute, again, sent, waits, ends, update = parts.tolist()
        return StepParts(
            compute_s=compute,
            recompute_s=again,
            model_parallel_s=sent,
            data_parallel_s=waits,
            ends_s=ends,
            update_s=update,
        )

    @cached_property
    def phases(self) -> Mapping[str, float] | None:
        """Seconds of the phases of a step, as `meshplan.Run` measures them; they sum to `seconds`.

        "communication" is what would disappear from the others if it took no time. None with a
        pipeline, in which forwards and backwards take turns.
        """
        if self.row["pp"][0] > 1:
            return None
        whole = self._phase_seconds(self._places)
        alone = self._phase_seconds(self._places_of(without(self.profile, network=True)))
        forward, backward, optimizer = alone.tolist()
        return {
            "forward": forward,
            "backward": backward,
            "communication": float(whole.sum() - alone.sum()),
            "optimizer": optimizer,
        }

    def _phase_seconds(self, places: Sequence[_Place]) -> Array:
        """Return the seconds of forward, backward and the optimizer, with communication."""
        count, sums = int(self.row["microbatches"][0]), np.zeros(3)
        for place in places:
            backward_s = count * place.backward_s + place.ends_s
            sums += (count * place.forward_s, backward_s, place.update_s)
        return sums

    @property
    def tokens(self) -> int:
        """Tokens of a step, summed over ranks."""
        r = self.row[0]
        samples = int(r["dp_replicate"] * r["dp_shard"] * r["micro"] * r["microbatches"])
        return samples * (self.plan.spec.batch.seq_len or 0)

    @cached_property
    def _places(self) -> tuple[_Place, ...]:
        return self._places_of(self.profile)

    def _places_of(self, profile: Profile) -> tuple[_Place, ...]:
        """Return the places of the chain, with their seconds at the speeds of a profile."""
        chain, known, out = self.chain, dict[tuple[int, _UnitSettings], Terms](), []
        for kind, name, part, stage in zip(
            chain.order,
            chain.names,
            parts_of_places(chain),
            stage_of_places(self.plan, chain),
            strict=True,
        ):
            key = kind, self._unit_of(part)
            if key not in known:
                known[key] = self._terms(*key, profile)
            out.append(_Place(name, stage, known[key], self.option(name)))
        return tuple(out)

    @cached_property
    def _one_run(self) -> Array:
        """The plan as a grid, with the microbatches of one run of its pipeline."""
        row, stages = self.row.copy(), self.plan.assignment.stages
        if stages is not None:
            row["microbatches"] = stages.microbatches
        return row

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
        found = [place for place in self._places if place.name == name]
        free = self._places_of(without(self.profile, network=True))
        unsent = sum(p.forward_s + p.backward_s for p in free if p.name == name)
        forward, backward = sum(p.forward_s for p in found), sum(p.backward_s for p in found)
        update = sum(place.once_s for place in found)
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

    def _terms(self, kind: int, unit: _UnitSettings, profile: Profile) -> Terms:
        """Return the seconds of a kind of place."""
        row = self.row.copy()
        row["offload"] = row["offload"] & ~PARAMS_ON_HOST | PARAMS_ON_HOST * unit.is_on_host
        return terms(
            row,
            self.chain.kinds[kind],
            profile,
            self.cluster.gpus_per_node,
            self.plan.spec.precision,
            dtype=self.plan.graph.dtype,
            is_awaited=unit.is_awaited,
            reshard_ranks=unit.reshard_ranks,
            parts=unit.parts,
            order=order_of(self.plan.mesh.sizes),
        )

    def _unit_of(self, part: str) -> _UnitSettings:
        """Return how the parameters of a part of the model (`cost.chain.parts_of`) are gathered."""
        units = self.plan.assignment.units
        unit = units.get(part)
        over = unit.reshard_after_forward if unit is not None else False
        # Nothing hides the root unit, which also has the parameters of blocks that are no units.
        is_outside = part in (BEFORE, AFTER)
        is_in_root = is_outside or (unit is None and bool(units))
        ranks = None if isinstance(over, bool) else over
        its = unit or units.get("")
        is_on_host = its is not None and its.on_host
        return _UnitSettings(is_in_root, ranks, is_on_host, self._unlike_parts.get(part, ()))

    @cached_property
    def _unlike_parts(self) -> dict[str, tuple[UnitPart, ...]]:
        """Layouts of each part of the model; {} if all units of the plan are alike."""
        a = self.plan.assignment
        if not has_unlike_units(self.plan):
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
