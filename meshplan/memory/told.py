"""Tier 1 without torch: a plan for a blueprint's model, told operation by operation and replayed.

The operations come from sizes (`memory.analytic`), the wrappers' rules from `memory.replay`. What
neither knows is refused by name; a trace of the model, which needs torch, answers then.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.graph import DTYPE_BYTES
from meshplan.memory.analytic import Run, work_of
from meshplan.memory.assemble import assemble
from meshplan.memory.estimate import MemoryEstimate, Tier
from meshplan.memory.groups import equal_ranks
from meshplan.memory.log import EventLog, Term, on_streams
from meshplan.memory.replay import Prepared, replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.memory.replay.shards import unit_shards
from meshplan.memory.rows import PRODUCTS
from meshplan.memory.shape import shape_of
from meshplan.memory.styled import Styled
from meshplan.plan import Plan

_GATHERING: Final = 1
_REDUCING: Final = 2
_MOST_FLASH: Final = 256
ERROR: Final = 0.01
"""How far a step told from a config may be from the traced one, as a share.
Source: `tests/test_memory_tape.py`."""


def told_estimate(
    plan: Plan,
    *,
    device: str,
    limit_bytes: int | None,
    notes: Sequence[str] = (),
) -> MemoryEstimate:
    """What every rank needs, without torch and in a second.

    Args:
        plan: Made for a graph of `blueprint`; it states batch and length.
        device, limit_bytes: As for `assemble`.

    Raises:
        PlanError: The model's operations, or something in the plan, are not known.
    """
    spec = plan.spec
    if plan.micro is None or spec.batch.seq_len is None:
        what = "nothing says how many samples of which length a rank takes at once"
        fix = "add batch: {micro: 1, seq_len: 2048}"
        raise PlanError(Problem(what, spec.origin("batch"), fix))
    groups = equal_ranks(plan.assignment)
    with _no_collection():
        work = _told_work(plan, plan.micro, spec.batch.seq_len)
        logs = []
        for ranks in groups:
            log = replay(
                work, plan, spec.optimizer, rank=ranks[0], foreach=is_uniform(plan.assignment)
            )
            logs.append(on_streams(log, streams_of(plan, ranks[0])))
    shape = f"[{plan.micro * plan.accumulate}, {spec.batch.seq_len}] int64"
    return assemble(
        plan,
        groups,
        logs,
        device=device,
        limit_bytes=limit_bytes,
        tier=Tier.REPLAY,
        certified=f"told from the config; traced models differ by at most {ERROR:.0%}",
        assumed=(
            ("inputs of a rank's step", shape),
            ("loss", "cross-entropy in float32 over the last dim of logits"),
            ("optimizer", f"torch's {spec.optimizer} with its defaults"),
        ),
        notes=notes,
        error=ERROR,
    )


def streams_of(plan: Plan, rank: int) -> dict[tuple[Term, int], int]:
    """By term and bytes, the stream on which FSDP2 makes a buffer of its own.

    The allocator keeps a pool for each stream, so what is reserved depends on it.
    Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    streams: dict[tuple[Term, int], int] = {}
    for unit in unit_shards(plan.assignment, plan.graph, rank):
        streams[Term.COMMUNICATION, unit.gathered_bytes] = _GATHERING
        if unit.cast_bytes:
            streams[Term.TEMPORARIES, unit.cast_bytes // unit.num_ranks] = _GATHERING
        numel = sum(param.padded_numel for param in unit.trained) // unit.num_ranks
        streams[Term.GRADIENTS, numel * unit.reduce_itemsize] = _REDUCING
    return streams


def told_log(
    plan: Plan,
    *,
    batch: int,
    seq_len: int,
    optimizer: str = "adamw",
    rank: int = 0,
    is_cuda: bool = True,
    in_place: bool = True,
    foreach: bool = True,
) -> EventLog:
    """The events of a step from the second one on, of a causal language model of transformers.

    Args:
        plan: Made for a graph of `blueprint`.
        batch: Sequences of one microbatch of this rank.
        seq_len: Tokens of one sequence.
        optimizer: A word of `spec.OPTIMIZER_STATES`.
        is_cuda: Whether CUDA's kernels run; what CPUs keep is what a trace on CPUs shows.
        in_place: Whether gradients that meet are added up in place, as torch does when nothing
            watches it.
        foreach: As in `replay`.

    Raises:
        PlanError: The model's operations, or something in the plan, are not known.
    """
    with _no_collection():
        work = _told_work(plan, batch, seq_len, is_cuda=is_cuda, in_place=in_place)
        return replay(work, plan, optimizer, rank=rank, foreach=foreach)


def _told_work(
    plan: Plan, batch: int, seq_len: int, *, is_cuda: bool = True, in_place: bool = True
) -> Prepared:
    """What is the same on every rank."""
    if problems := [*_unknown(plan), *_unfused(plan, seq_len, is_cuda=is_cuda)]:
        raise PlanError(problems)
    recompute = {_number(fqn): r.policy for fqn, r in plan.assignment.recompute.items()}
    run = Run(
        batch=batch,
        seq_len=seq_len,
        element_bytes=_element_bytes(plan),
        recomputed=frozenset(recompute),
        saves={
            number: frozenset(policy.save) or PRODUCTS
            for number, policy in recompute.items()
            if policy.mode == "selective"
        },
        is_cuda=is_cuda,
        in_place=in_place,
        styled=_styled(plan),
        lays_itself=frozenset(f for f, p in plan.assignment.tensors.items() if p.unit is None),
    )
    return Prepared(work_of(plan.graph, run))


@contextmanager
def _no_collection() -> Iterator[None]:
    """To look for cycles among tens of thousands of tuples takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unknown(plan: Plan) -> Iterator[Problem]:
    """What in a plan a told step has no rules for."""
    a, mesh = plan.assignment, plan.mesh
    blocks = {fqn for fqn in plan.graph.modules if _is_block(plan, fqn)}
    saved = {word for r in a.recompute.values() for word in r.policy.save}
    for is_there, what in (
        *((True, problem.what) for problem in _styled(plan).check()),
        # Their code takes the length of a sequence, and positions, from the part that a rank has.
        (a.sequence_parallel, "sequence_parallel, with which transformers' own code does not run"),
        (any(p.gathered_axes for p in a.tensors.values()), "parameters that tp gathers at use"),
        (mesh.size("cp") > 1, "context parallelism"),
        (mesh.size("ep") > 1, "expert parallelism"),
        (mesh.size("pp") > 1, "a pipeline"),
        (bool(saved - PRODUCTS), f"recomputation that saves {', '.join(sorted(saved - PRODUCTS))}"),
        (bool(a.recompute.keys() - blocks), "recomputed modules that are no blocks"),
        (bool(a.units.keys() - blocks - {""}), "units that are no blocks"),
        (_is_autocast(plan), "parameters computed with in several dtypes"),
    ):
        if is_there:
            yield _no_rules(what)


def _unfused(plan: Plan, seq_len: int, *, is_cuda: bool) -> Iterator[Problem]:
    """Attention for which torch takes other kernels than those that the rows stand for.

    Source: torch 2.13, transformers/cuda/sdp_utils.cpp, `select_sdp_backend`.
    """
    shape = shape_of(plan.graph)
    if 0 < shape.window < seq_len:
        yield _no_rules(f"attention over a window of {shape.window} tokens of {seq_len}")
    if not is_cuda or _is_autocast(plan):
        return
    if _element_bytes(plan) != 2:
        if shape.kv_heads != shape.heads:
            yield _no_rules("attention in float32 of queries that share keys and values")
    elif shape.head_dim % 8 or shape.head_dim > _MOST_FLASH:
        yield _no_rules(f"attention with heads of {shape.head_dim} features")


def _no_rules(what: str) -> Problem:
    return Problem(
        f"a step told from a config has no rules for {what}",
        fix="give the model itself (model: entry, with torch), so that it is traced",
    )


def _is_block(plan: Plan, fqn: str) -> bool:
    above, _, name = fqn.rpartition(".")
    return name.isdigit() and above in plan.graph.modules


def _styled(plan: Plan) -> Styled:
    a = plan.assignment
    pieces = {fqn: use.pieces for fqn, use in a.styles.items() if use.pieces}
    return Styled(
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
    )


def _number(fqn: str) -> int:
    """Of a block."""
    return int(fqn.rpartition(".")[2])


def _compute_dtypes(plan: Plan) -> set[str]:
    return {p.compute_dtype for p in plan.assignment.tensors.values() if not p.info.is_buffer}


def _is_autocast(plan: Plan) -> bool:
    return len(_compute_dtypes(plan)) != 1


def _element_bytes(plan: Plan) -> int:
    (dtype,) = _compute_dtypes(plan)
    return DTYPE_BYTES[dtype]
