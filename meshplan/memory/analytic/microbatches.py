"""Compute the microbatches of a plan's ranks from the sizes of a blueprint, ready to replay.

A plan or model for which there are no rules raises a `PlanError` that names the feature.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

from meshplan.assign.base.types import Stages
from meshplan.errors import PlanError, Problem
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.memory.analytic.stages import Played, StageWorks
from meshplan.memory.decoder.attention_kernel import is_fused, no_rules
from meshplan.memory.decoder.common import number_of
from meshplan.memory.decoder.cp_all_gather import gathered_of
from meshplan.memory.decoder.experts import Spread, most_arriving
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import Shape, shape_of
from meshplan.memory.decoder.tp_ops import TpPlanOnTape
from meshplan.memory.replay import Prepared
from meshplan.memory.tape.tape import play
from meshplan.plan.plan import Plan
from meshplan.spec.spec import PRODUCTS


class Works(Protocol):
    """The microbatches of all ranks of a plan."""

    @property
    def summarised(self) -> bool:
        """True if the step is so long that only the fullest ranks should be expanded in full."""

    @property
    def only_summarised(self) -> bool:
        """True if the step is so long that no rank should be expanded in full."""

    def of_rank(self, rank: int, *, summarised: bool = False) -> Prepared:
        """Return one rank's trace: a single microbatch, or in a pipeline all of them interleaved.

        Args:
            rank: The rank.
            summarised: If True, summarise the microbatches of a pipeline that cannot contain the
                peak: write only the storages that they leave behind.
        """


@dataclass(frozen=True, slots=True)
class _Same:
    """The microbatch of a plan without a pipeline, where all ranks have the same one."""

    prepared: Prepared
    summarised: bool = False
    only_summarised: bool = False

    def of_rank(self, rank: int, *, summarised: bool = False) -> Prepared:
        """Return the microbatch, which is the same for every rank."""
        return self.prepared


@dataclass(frozen=True, slots=True)
class _Each:
    """The microbatches of a plan whose ranks differ, because cp gives them different tokens."""

    played: Callable[[int], Prepared]
    summarised: bool = False
    only_summarised: bool = False

    def of_rank(self, rank: int, *, summarised: bool = False) -> Prepared:
        """Return the microbatch of one rank."""
        return self.played(rank)


def analytic_microbatches(
    plan: Plan,
    batch: int,
    seq_len: int,
    *,
    is_cuda: bool = True,
    in_place: bool = True,
    spread: Spread | None = None,
    device: str = "",
    rank: int | None = None,
    played: Played | None = None,
) -> Works:
    """Return the microbatches of all ranks of a plan.

    Args:
        plan: A plan for a graph of `blueprint`.
        batch: Sequences of a rank per forward of the training loop; a pipeline splits these
            further into its microbatches.
        seq_len: Tokens of one sequence, before cp splits it.
        is_cuda: If True, compute memory for CUDA's kernels, otherwise for those of a CPU.
        in_place: If True, several gradients of one tensor are added up in place.
        spread: Distribution of experts and tokens over ep; None for the plan's.
        device: A device name of `hardware`; "" if unknown.
        rank: The only rank that the caller will ask for; None for all. In a pipeline, a single rank
            is computed from the blocks near its stages only. `summarised` and `only_summarised` of
            the result are then meaningless, because they count the ops of these blocks alone.
        played: Cache of the stages played for earlier plans; None for an empty cache.

    Raises:
        PlanError: There are no rules for the model's ops, or for a feature of the plan.
    """
    if problems := list(refusals(plan)):
        raise PlanError(problems)
    recompute = {number_of(fqn): r.policy for fqn, r in plan.assignment.recompute.items()}
    stages = plan.assignment.stages
    run = MicrobatchSpec(
        batch=batch // (stages.microbatches if stages is not None else 1),
        seq_len=seq_len // plan.mesh.size("cp"),
        cp=plan.mesh.size("cp"),
        element_bytes=_element_bytes(plan),
        is_fused=not is_cuda or is_fused(plan),
        recomputed=frozenset(recompute),
        saves=saves_of(plan),
        is_cuda=is_cuda,
        in_place=in_place,
        styled=styled_of(plan),
        relaid_at_once=frozenset(f for f, p in plan.assignment.tensors.items() if p.unit is None),
        spread=spread or spread_of(plan),
        loss_chunks=loss_chunks_of(plan),
        offloaded=frozenset(map(number_of, plan.assignment.host_activations)),
        is_compiled=bool(plan.assignment.compiled),
    )
    shape = shape_of(plan.graph)
    if stages is not None:
        only = None if rank is None else _near(plan, stages, rank)
        tape = tape_of(shape, run, only=only)
        return StageWorks(tape, plan, in_place=in_place, played=played)
    if gathered_of(plan, 0, is_cuda=is_cuda, device=device) is None:
        return _Same(LAST.played(shape, run, in_place=in_place))

    # With all-gathered keys and values, a rank's memory depends on its shard of the sequence.
    def of_rank(rank: int) -> Prepared:
        own = gathered_of(plan, rank, is_cuda=is_cuda, device=device)
        return LAST.played(shape, replace(run, gathered=own), in_place=in_place)

    return _Each(of_rank)


class LastPlayed:
    """Plays microbatches and caches the most recent ones.

    The cache pays off because a search estimates plans that differ only in the number of nodes or
    the strategy, and so run the same ops, one after the other. The cache is searched linearly,
    because a `MicrobatchSpec` has no hash.

    Args:
        most: Maximum number of cached microbatches, each of which is tens of thousands of tuples.
    """

    def __init__(self, most: int) -> None:
        self._last: deque[tuple[Shape, MicrobatchSpec, bool, Prepared]] = deque(maxlen=most)

    def played(self, shape: Shape, run: MicrobatchSpec, *, in_place: bool) -> Prepared:
        """Return one microbatch; it is shared, so callers must not modify it."""
        for *key, prepared in tuple(self._last):
            if key == [shape, run, in_place]:
                return prepared
        prepared = Prepared(play(tape_of(shape, run), sums_in_place=in_place))
        self._last.append((shape, run, in_place, prepared))
        return prepared


LAST: Final = LastPlayed(most=8)
"""The cache of this process."""


def spread_of(plan: Plan) -> Spread:
    """Return how the plan distributes experts and tokens over the ranks of ep.

    A rank receives `experts.capacity` times an even share of the tokens, or an even share if the
    plan states no capacity.
    """
    a, ep = plan.assignment, plan.mesh.size("ep")
    is_unit, arriving = bool(a.experts.keys() & a.units.keys()), plan.spec.experts.capacity or 1.0
    if ep > 1 and arriving > 1:
        arriving = min(arriving, most_arriving(shape_of(plan.graph), ep))
    return Spread(ep, arriving, is_unit=is_unit)


def loss_chunks_of(plan: Plan) -> int:
    """Return over how many chunks of the tokens head and loss are computed; 1 for all at once."""
    chunked = plan.assignment.chunked_loss
    return 1 if chunked is None else chunked.chunks


def saves_of(plan: Plan) -> dict[int, frozenset[str]]:
    """Return {number of a block with selective recomputation: words of `save:` that it saves}."""
    return {
        number_of(fqn): frozenset(recompute.policy.kept)
        for fqn, recompute in plan.assignment.recompute.items()
        if recompute.policy.mode == "selective"
    }


def refusals(plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each feature that the analytic estimate has no rules for."""
    yield from op_refusals(plan)
    a = plan.assignment
    blocks = {fqn for fqn in plan.graph.modules if _is_block(plan, fqn)}
    if a.units.keys() - blocks - a.experts.keys() - {""}:
        yield no_rules("units that are no blocks")


def op_refusals(plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each feature whose ops, or what they save, no rule gives."""
    a = plan.assignment
    blocks = {fqn for fqn in plan.graph.modules if _is_block(plan, fqn)}
    experts = {f"{fqn}.mlp.experts" for fqn in blocks}
    others = {word for r in a.recompute.values() for word in r.policy.save}.difference(PRODUCTS)
    for is_present, what in (
        *((True, problem.what) for problem in styled_of(plan).check()),
        # transformers takes sequence length and positions from the shape of its input.
        (
            a.sequence_parallel and not a.crossings,
            "sequence_parallel set by rules, with which transformers' own code does not run",
        ),
        (any(p.gathered_axes for p in a.tensors.values()), "parameters that tp gathers at use"),
        (
            plan.mesh.size("cp") > 1 and "kv_lora_rank" in plan.graph.config,
            "context parallelism of multi-head latent attention",
        ),
        (_scores_scaled(plan), "loss_chunks with logits that the model scales"),
        (_parts_heads(plan), "all_to_all with heads that are no multiple of tp times cp"),
        (bool(others), f"recomputation that saves {', '.join(sorted(others))}"),
        (bool(a.recompute.keys() - blocks), "recomputed modules that are no blocks"),
        (bool(a.host_activations.keys() - blocks), "offloaded activations outside of blocks"),
        (bool(a.experts.keys() - experts), "experts in modules other than mlp.experts"),
        (len(a.compute_dtypes) != 1, "parameters with several compute dtypes"),
    ):
        if is_present:
            yield no_rules(what)


def _scores_scaled(plan: Plan) -> bool:
    if plan.assignment.chunked_loss is None or not plan.graph.config:
        return False
    return shape_of(plan.graph).scales


def _parts_heads(plan: Plan) -> bool:
    """Return True if cp exchanges heads (all-to-all) that do not divide evenly over tp and cp."""
    context = plan.assignment.context
    if context is None or context.attention != "all_to_all" or not plan.graph.config:
        return False
    shape, ranks = shape_of(plan.graph), plan.mesh.size("cp", "tp")
    return bool(shape.heads % ranks or shape.kv_heads % ranks)


def _is_block(plan: Plan, fqn: str) -> bool:
    above, _, name = fqn.rpartition(".")
    return name.isdigit() and above in plan.graph.modules


def styled_of(plan: Plan) -> TpPlanOnTape:
    """Return which modules tp shards, and with which style."""
    a = plan.assignment
    pieces = {fqn: use.pieces for fqn, use in a.styles.items() if use.pieces}
    return TpPlanOnTape(
        plan.mesh.size("tp"),
        {fqn: use.style for fqn, use in a.styles.items()},
        pieces,
        frozenset(
            tensor.fqn
            for fqn in pieces
            for tensor in plan.graph.owned(fqn)
            if not a.tensors[tensor.fqn].computed.axes
        ),
        frozenset(fqn for fqn, p in a.tensors.items() if p.is_local),
        has_stream=bool(a.crossings),
        ends=any(crossing.path is None for crossing in a.crossings),
    )


def _near(plan: Plan, stages: Stages, rank: int) -> set[int]:
    """Return the numbers of blocks in a rank's stages and in neighbouring stages.

    The first and the last block of the model are included.
    """
    own_stages = stages.of_rank(plan.mesh.index(rank, ("pp",)))
    near = {each for stage in own_stages for each in (stage - 1, stage, stage + 1)}
    blocks = plan.graph.blocks()
    known = {fqn for fqn, stage in stages.units if stage in near}.intersection(blocks)
    return {number_of(fqn) for fqn in (blocks[0], *known, blocks[-1])}


def _element_bytes(plan: Plan) -> int:
    (dtype,) = plan.assignment.compute_dtypes
    return DTYPE_BYTES[dtype]
