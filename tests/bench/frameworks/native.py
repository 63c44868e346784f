"""FSDP2 and DTensor as published PyTorch runs used them, and what their allocator came to hold.

Source: pytorch/torchtitan, models/llama3/infra/parallelize.py and train.py; KempnerForge,
distributed/parallel.py (gradients reduced in fp32, a root that gives its parameters back),
training/loss.py (of bf16 logits) and training/grad.py; torchtune, modules/rms_norm.py and
modules/loss/ce_chunked_output_loss.py; torch 2.6, torch/distributed/fsdp/_fully_shard/
_fsdp_collectives.py (the streams of all-gather and reduce-scatter); mosaicml/llm-foundry,
models/mpt/modeling_mpt.py (`loss_fn: fused_crossentropy`), whose FSDP1 is played as FSDP2, and so
is that of foundation-model-stack/fms-fsdp. [Empirical], from the runs
themselves and no source: logits that spring 2024 holds through backward, KempnerForge with tp or on
one data rank, where its own code alone tells 4 to 20 % less than was measured, and the allocator's
segments of October 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from meshplan.memory.decoder.microbatch import MicrobatchSpec
from meshplan.memory.decoder.microbatch import tape_of as decoder_tape
from meshplan.memory.decoder.sizes import Shape, shape_of
from meshplan.memory.log.events import EventLog, Term
from meshplan.memory.replay import replay
from meshplan.memory.replay.shards import unit_shards
from meshplan.memory.replay.unit import GATHERING, REDUCING
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.memory.tape.tape import Grad, Tape, play
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.plan.restrict import restrict
from meshplan.spec.reader import load_spec
from tests.bench.frameworks.settle import settled
from tests.bench.frameworks.torchtitan import Training, tape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How one framework, of one time, sets FSDP2 and the loop up.

    Args:
        what: Framework and version.
        last_stays: Whether the last block stays gathered after forward.
        ends_apart: Whether embedding and head are units of their own.
        holds_logits: Whether the loop holds fp32 logits through backward.
        cuts_loss: Whether logits stay cut over tp.
        is_pure: Whether parameters and states are bf16.
        sums_whole: Whether microbatches but the last are not reduced.
        keeps_logits: Whether the loss is of logits in bf16, which the loop holds through backward.
        is_bare: Whether one process holds the model in bf16 and no wrapper is around it.
        norms_in_fp32: Whether norms are written out in fp32, which compilation fuses.
        fuses_loss: Whether compilation fuses the loss with its cast to fp32.
        expandable: Whether the allocator's segments expand.
        is_mpt: Whether the model is MPT, whose loss is one kernel of logits in bf16.
        reduces_in_bf16: Whether gradients are reduced in bf16.
        all_stay: Whether all blocks stay gathered after forward.
    """

    what: str
    last_stays: bool = False
    ends_apart: bool = False
    holds_logits: bool = False
    cuts_loss: bool = True
    is_pure: bool = False
    sums_whole: bool = False
    keeps_logits: bool = False
    is_bare: bool = False
    norms_in_fp32: bool = False
    fuses_loss: bool = False
    expandable: bool = False
    is_mpt: bool = False
    reduces_in_bf16: bool = False
    all_stay: bool = False


TITAN_2024_04: Final = Profile(
    what="torchtitan, spring 2024 (FSDP2's pull request)",
    last_stays=True,
    holds_logits=True,
    cuts_loss=False,
)
TITAN_2024_12: Final = Profile(what="torchtitan, December 2024", last_stays=True)
TITAN_2025_10: Final = Profile(what="torchtitan, October 2025", ends_apart=True, expandable=True)
KEMPNER: Final = Profile(
    what="KempnerForge 5666d0d",
    cuts_loss=False,
    is_pure=True,
    sums_whole=True,
    keeps_logits=True,
)
TORCHTUNE: Final = Profile(
    what="torchtune 2025-01, one device", is_bare=True, norms_in_fp32=True, fuses_loss=True
)

FOUNDRY: Final = Profile(what="llm-foundry, 2023", is_mpt=True)
FOUNDRY_PURE: Final = replace(FOUNDRY, reduces_in_bf16=True)
FMS: Final = Profile(what="fms-fsdp, spring 2024", reduces_in_bf16=True)


def log_of(
    config: Mapping[str, Any],
    mesh: Mapping[str, int],
    how: Training,
    profile: Profile,
    *,
    accumulate: int = 1,
) -> EventLog:
    """Two steps of the first rank.

    Args:
        config: Of a decoder of Llama's shape.
        mesh: Sizes of dp_replicate, dp_shard and tp.
    """
    keeps = profile.keeps_logits and _is_alone(mesh)
    how = replace(
        how,
        holds_logits=profile.holds_logits or keeps,
        cuts_loss=profile.cuts_loss,
        casts_logits=not keeps,
        fuses_loss=profile.fuses_loss and how.is_compiled and how.chunks > 1,
        norms_in_fp32=profile.norms_in_fp32 and not how.is_compiled,
    )
    plan = _plan(config, mesh, profile, accumulate)
    shape = shape_of(plan.graph)
    tape = _mpt_tape(shape, how) if profile.is_mpt else tape_of(shape, how)
    work = play(tape, sums_in_place=True)
    # Fused Adam takes nothing for itself.
    log = replay(work, plan, "adamw", foreach=False)
    return settled(log, _streams_of(plan, 0))


def _mpt_tape(shape: Shape, how: Training) -> Tape:
    """GPT-2's operations, but for the loss: it is one kernel, which keeps logits in bf16."""
    every = frozenset(range(shape.layers)) if how.recompute == "full" else frozenset[int]()
    run = MicrobatchSpec(batch=how.batch, seq_len=how.tokens, element_bytes=2, recomputed=every)
    tape = decoder_tape(shape, run)
    logits = tape.rows[tape.loss_start].reads[0]
    targets = [value for value, term in tape.before.items() if term is Term.INPUTS][1]
    del tape.rows[tape.loss_start :]
    for values in (tape.nbytes, tape.base, tape.last_use):
        del values[logits + 1 :]
    tape.last_use = [min(each, len(tape.rows)) for each in tape.last_use]
    w = TapeBuilder(tape, 2, 2, is_cuda=True)
    grads = (Grad(logits, w.size(logits)),)
    w.row("fused_cross_entropy", (logits, targets), 4, keeps=(logits, targets), grads=grads)
    tape.hold(logits)
    return tape


def _streams_of(plan: Plan, rank: int) -> dict[tuple[Term, int], int]:
    """Return the number of the CUDA stream of each FSDP2 buffer, by (category, bytes at birth).

    The allocator keeps a pool for each stream, so reserved bytes depend on the streams.

    Args:
        plan: The plan, whose units make the buffers.
        rank: The rank whose buffers are listed.

    Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    streams: dict[tuple[Term, int], int] = {}
    if plan.assignment.wrapper != "units":
        return streams
    stages = plan.assignment.stages
    parts = [plan.assignment]
    if stages is not None:
        place = plan.mesh.index(rank, ("pp",))
        parts = [restrict(plan, stage).assignment for stage in stages.of_rank(place)]
    for unit in (unit for part in parts for unit in unit_shards(part, plan.graph, rank)):
        streams[Term.COMMUNICATION, unit.gathered_bytes] = GATHERING
        if unit.on_host:
            for param in unit.params:
                streams[Term.TEMPORARIES, param.stored_bytes] = GATHERING
                streams[Term.TEMPORARIES, param.whole_bytes // unit.num_ranks] = GATHERING
        elif unit.cast_bytes:
            streams[Term.TEMPORARIES, unit.cast_bytes // unit.num_ranks] = GATHERING
        numel = sum(param.padded_numel for param in unit.trained) // unit.num_ranks
        streams[Term.GRADIENTS, numel * unit.reduce_itemsize] = REDUCING
    return streams


def _is_alone(mesh: Mapping[str, int]) -> bool:
    """Whether all ranks shard, and nothing else is done."""
    return mesh.get("tp", 1) == 1 and mesh.get("dp_shard", 1) > 1


def _plan(
    config: Mapping[str, Any], mesh: Mapping[str, int], profile: Profile, accumulate: int
) -> Plan:
    spec: dict[str, Any] = {"version": 1, "mesh": dict(mesh), "rules": []}
    spec["precision"] = "bf16-mixed"
    sums_whole = profile.sums_whole and accumulate > 1 and _is_alone(mesh)
    if profile.is_pure:
        spec["precision"] = {"param": "bfloat16", "reduce": "float32", "master": "bfloat16"}
    if profile.reduces_in_bf16:
        spec["precision"] = {"param": "bfloat16", "reduce": "bfloat16"}
    if profile.all_stay:
        spec["strategy"] = "zero2"
    if mesh.get("tp", 1) > 1:
        spec["tp_plan"] = "hf"
    if profile.ends_apart or (profile.keeps_logits and _is_alone(mesh)):
        spec["rules"] += [{"match": n, "unit": True} for n in ("model.embed_tokens", "lm_head")]
    if profile.last_stays:
        last = f"model.layers.{config['num_hidden_layers'] - 1}"
        spec["rules"].append({"match": last, "reshard_after_forward": False})
    if accumulate > 1:
        spec["batch"] = {"accumulate": accumulate}
    world = 1
    for size in mesh.values():
        world *= size
    graph = from_mapping(config)
    if profile.is_bare:
        # One process with a model in bf16, and nothing around it.
        spec["mesh"] = {"tp": 1}
        del spec["precision"]
        tensors = {fqn: replace(t, dtype="bfloat16") for fqn, t in graph.tensors.items()}
        graph = replace(graph, tensors=tensors)
    plan = make_plan(load_spec(spec), graph, world_size=world)
    if sums_whole:
        strategy = replace(plan.assignment.strategy, cuts=frozenset({"parameter"}))
        plan = replace(plan, assignment=replace(plan.assignment, strategy=strategy))
    return plan
