"""Seconds of steps: against what is sent, and against rules by hand.

Which seeded bug would this catch? A collective charged twice or not at all, in the wrong dtype,
after the wrong microbatch or over the wrong ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshplan.cost.chain import chain_of
from meshplan.cost.collectives import all_gather, all_reduce, group
from meshplan.cost.grid import GRID, MODES, OPTIONS, PARAMS_ON_HOST
from meshplan.cost.pipeline import crossing_seconds
from meshplan.cost.profile import profile_of, without
from meshplan.cost.rows import Rows, widths_of
from meshplan.cost.step import terms
from meshplan.cost.types import Sent, Tally
from meshplan.layout.hardware import Cluster, Link, find_device
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import make_plan
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import Precision
from meshplan.traffic import forecast

LENGTH, LAYERS = 32, 3
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 160,
    "hidden_size": 48, "intermediate_size": 112, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "max_position_embeddings": 64,
    "use_cache": False, "tie_word_embeddings": False, "head_dim": 12,
}  # fmt: skip
FP32, BF16 = Precision(), Precision(param="bfloat16", reduce="float32")
ALL_BF16 = Precision(param="bfloat16", reduce="bfloat16")
H100 = Cluster(
    device=find_device("h100-sxm-80gb"), nodes=4, gpus_per_node=8, inter=Link("stated", 50e9)
)
REAL = replace(profile_of(H100), contention=0.1)
COUNTING = replace(
    REAL, efficiency=np.inf, attention_efficiency=np.inf, memory_bytes_per_s=np.inf, kernel_s=0.0,
    launch_s=0.0, collective_s=0.0, collective_rank_s=0.0, collective_node_s=0.0,
    intra_bytes_per_s=1.0, inter_bytes_per_s=1e9, intra_latency_s=0.0, inter_latency_s=0.0,
    contention=0.0,
)  # fmt: skip
"""Nothing takes time but bytes on the wire, a second each: seconds are bytes."""
SETTLING = ("the loss and the number", "whether", "which parameters", "the norm",
            "the loss of", "float32 buffers")  # fmt: skip
"""Scalars that ranks settle, and DDP's broadcast of buffers: their bytes are not charged."""


def row(**sizes):
    out = np.ones(1, GRID)
    out["offload"] = out["gathers_kv"] = 0
    out["mode"], out["schedule"] = MODES.index(sizes.pop("mode", "shard")), 0
    for name, size in sizes.items():
        out[name] = size
    return out


def charged(grid, chain, precision, again=0, reshard=1):
    """Wire bytes of a step, as the cost model has them."""
    out = 0.0
    for number in chain.order:
        kind = chain.kinds[number]
        option = OPTIONS.index((again, reshard)) if kind.has_options else 0
        told = terms(grid, kind, COUNTING, 8, precision, is_awaited=True)
        out += (told.seconds[0, option] - told.update_s[0]) * grid["microbatches"][0]
    return out


def wire(told, mesh, skips=SETTLING):
    """Wire bytes of a forecast: what a ring moves through each rank."""
    out = 0.0
    for each in told.traffic:
        ranks = mesh.size(*each.route.axes)
        times = 2 if each.route.kind == "all_reduce" else 1
        if not each.what.startswith(skips):
            out += times * each.count * each.route.num_bytes * (ranks - 1) / ranks
    return out


@pytest.mark.parametrize("precision", [FP32, BF16, ALL_BF16], ids=["fp32", "bf16", "all bf16"])
@pytest.mark.parametrize(
    ("strategy", "sizes", "mode"),
    [
        ("full_shard", {"dp_shard": 4}, "shard"),
        ("hybrid_shard", {"dp_replicate": 2, "dp_shard": 4}, "shard"),
        ("zero2", {"dp_shard": 4}, "shard"),
        ("zero1", {"dp_shard": 4}, "zero1"),
        ("ddp", {"dp_replicate": 4}, "ddp"),
    ],
)
def test_data_ranks_are_charged_what_is_forecast(strategy, sizes, mode, precision):
    graph = from_mapping(LLAMA)
    plan = {"version": 1, "mesh": sizes, "strategy": strategy, "batch": {"accumulate": 3}}
    if precision is not FP32:
        plan["precision"] = {"param": precision.param, "reduce": precision.reduce}
    decided = make_plan(load_spec(plan), graph)
    width = 4 if precision is FP32 else 2
    chain = chain_of(graph, seq_len=LENGTH, element_bytes=width)
    grid = row(mode=mode, microbatches=3, **sizes)
    reshard = int(strategy in ("full_shard", "hybrid_shard"))
    told = forecast(decided)
    assert charged(grid, chain, precision, reshard=reshard) == pytest.approx(
        wire(told, decided.mesh), rel=1e-12
    )
    only_whole = [o for o, (_, reshard) in enumerate(OPTIONS) if reshard]
    seconds = terms(grid, chain.kinds[1], REAL, 8, precision).seconds
    assert np.isinf(seconds[:, only_whole]).all() == (mode != "shard")


def test_backward_gathers_what_was_resharded_from_the_ranks_that_have_it():
    kind = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=4).kinds[1]
    numel, option, found = sum(kind.numels), OPTIONS.index((0, 1)), []
    for ranks in (None, 8, 2):
        told = terms(row(dp_shard=8), kind, COUNTING, 8, FP32, is_awaited=True, reshard_ranks=ranks)
        found.append((told.forward_s[0, option], told.backward_s[0, option]))
    usual, all_ranks, two = found
    assert all_ranks == usual
    assert two[0] == usual[0]
    assert usual[1] - two[1] == pytest.approx(4 * numel * (7 / 8 - 1 / 2))
    # Neighbours are on one node.
    far = replace(COUNTING, inter_bytes_per_s=1e-3)
    grid = row(dp_shard=16)
    near = [
        terms(grid, kind, far, 8, FP32, is_awaited=True, reshard_ranks=ranks).backward_s[0, option]
        for ranks in (8, 16)
    ]
    over_nodes = 4 * numel * (15 / 16)
    reduced = near[1] / 2
    assert near[0] == pytest.approx(reduced + 4 * numel * 7 / 8)
    assert reduced > 100 * over_nodes


@pytest.fixture(scope="module")
def live():
    """The model of transformers of the config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    facts = {k: v for k, v in LLAMA.items() if k not in ("model_type", "architectures")}
    return LlamaForCausalLM(LlamaConfig(**facts, bos_token_id=1, eos_token_id=2, pad_token_id=0))


OTHERS = {
    "tp": ({"tp": 2}, {}),
    "tp, recomputed": ({"tp": 2}, {"activation_checkpointing": "full"}),
    "tp, recomputed but for products": ({"tp": 2}, {"activation_checkpointing": "selective"}),
    "tp and full_shard": ({"dp_shard": 2, "tp": 2}, {"strategy": "full_shard"}),
    "tp, cut loss": ({"tp": 2}, {"loss_parallel": True}),
    "cp": ({"cp": 2}, {"strategy": "full_shard"}),
    "cp over heads": (
        {"cp": 2},
        {"strategy": "full_shard", "context": {"attention": "all_to_all"}},
    ),
    "cp over heads, recomputed": (
        {"dp_shard": 2, "cp": 2},
        {
            "strategy": "full_shard",
            "activation_checkpointing": "full",
            "context": {"attention": "all_to_all"},
        },
    ),
    "cp over heads, recomputed but for products": (
        {"dp_shard": 2, "cp": 2},
        {
            "strategy": "full_shard",
            "activation_checkpointing": "selective",
            "context": {"attention": "all_to_all"},
        },
    ),
    "cp, recomputed": (
        {"cp": 2},
        {"strategy": "full_shard", "activation_checkpointing": "full"},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tp_and_cp_are_charged_what_is_forecast(name, live):
    import torch

    from meshplan.runtime.trace.structure import graph_of
    from meshplan.runtime.verify.module_calls import record_forward
    from tests.helpers import models

    def loss(output, targets):
        logits = output.logits.flatten(0, -2).float()
        return torch.nn.functional.cross_entropy(logits, targets.flatten())

    sizes, more = OTHERS[name]
    tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
    rules = (models.tp_rules("hf_llama") or []) if tp > 1 else []
    plan = {"version": 1, "mesh": sizes, "rules": rules, **more}
    decided = make_plan(load_spec(plan), graph_of(live))
    ids = torch.zeros(2, LENGTH // cp, dtype=torch.int64)
    forward = record_forward(live, decided, {"input_ids": ids}, ids, loss)
    told = forecast(decided, forward)
    assert not told.unknown
    chain = chain_of(
        from_mapping(LLAMA), seq_len=LENGTH, element_bytes=4, tp=tp,
        cuts_loss=bool(more.get("loss_parallel")),
    )  # fmt: skip
    again = {"full": 2, "selective": 1}.get(more.get("activation_checkpointing", ""), 0)
    grid = row(micro=2, gathers_kv=int(cp > 1 and "context" not in more), **sizes)
    found = charged(grid, chain, FP32, again)
    assert found == pytest.approx(wire(told, decided.mesh), rel=1e-12)


def test_stages_are_charged_what_is_forecast(live):
    import torch

    from meshplan.runtime.trace.ops import record
    from meshplan.runtime.trace.structure import graph_of
    from meshplan.runtime.verify.module_calls import record_forward
    from tests.helpers import models

    ids = {"input_ids": torch.zeros(8, LENGTH, dtype=torch.int64)}
    spec = load_spec(
        {"version": 1, "mesh": {"pp": 3}, "pipeline": {"schedule": "1F1B", "microbatches": 4}}
    )
    decided = make_plan(spec, graph_of(live, record(live, ids)))
    forward = record_forward(live, decided, ids, ids["input_ids"], models.loss)
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=4).kinds[1]
    grid = row(pp=3, micro=2, microbatches=4)
    each = crossing_seconds(grid, block.boundary_bytes, COUNTING, 8)[0]
    for rank in range(3):
        told = forecast(decided, forward, rank)
        sent = sum(t.count * t.route.num_bytes for t in told.traffic if t.route.kind == "send")
        assert sent == 4 * each * (2 if rank == 1 else 1)


def test_hidden_communication_costs_its_contention_and_no_more():
    chain = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2)
    block = chain.kinds[1]
    # Launches hide whatever is sent, and adding up gradients takes no time.
    fast = replace(REAL, kernel_s=1e-3, memory_bytes_per_s=np.inf)
    grid = row(dp_shard=8, microbatches=4)
    alone = row(microbatches=4, mode="ddp")
    one, many = (terms(g, block, fast, 8, BF16) for g in (alone, grid))
    ring = group(np.array([8.0]), np.array([1.0]), 8)
    numel = sum(block.numels)
    gather = all_gather(np.array([2.0 * numel]), ring, fast)[0]
    scatter = all_gather(np.array([4.0 * numel]), ring, fast)[0]
    assert many.forward_s[0, 1] == pytest.approx(one.forward_s[0, 1] + 0.1 * gather)
    kept, given_back = many.backward_s[0, :2]
    assert kept == pytest.approx(one.backward_s[0, 0] + 0.1 * scatter)
    assert given_back == pytest.approx(one.backward_s[0, 0] + 0.1 * (gather + scatter))
    bare = terms(grid, block, replace(REAL, kernel_s=0.0, launch_s=0.0), 8, BF16)
    assert bare.forward_s[0, 1] == pytest.approx(gather + 0.1 * one_compute(block))
    root = terms(grid, chain.kinds[0], fast, 8, BF16)
    alone = terms(row(microbatches=4), chain.kinds[0], fast, 8, BF16)
    assert root.ends_s[0, 0] > alone.ends_s[0, 0] + 0.9 * 2.0 * numel / 8 / 450e9


def test_a_sum_over_ranks_that_are_alone_on_their_nodes_slows_less():
    """DDP over 8 ranks with tp 8, and over 8 of a node: of the first, contention may be another."""
    chain = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2)
    fast = replace(REAL, kernel_s=1e-3, memory_bytes_per_s=np.inf)
    free = replace(fast, contention_alone=0.0)

    def settle(profile, **sizes):
        grid = row(mode="ddp", dp_replicate=4, microbatches=2, **sizes)
        return terms(grid, chain.kinds[1], profile, 8, BF16).ends_s[0, 0]

    assert settle(free, tp=8) == 0 < settle(fast, tp=8)
    assert settle(free) == settle(fast) > 0
    assert settle(free, tp=4) == settle(fast, tp=4) > 0  # Two of each node.


def test_what_is_not_given_back_is_gathered_once_a_step():
    """However many microbatches there are; what is given back, twice for each."""
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2).kinds[1]
    bare = replace(REAL, kernel_s=0.0, launch_s=0.0, contention=0.0, peak_flops=1e30)
    bare = replace(bare, memory_bytes_per_s=1e30)  # Nothing hides what is sent.
    ring = group(np.array([8.0]), np.array([1.0]), 8)
    gather = all_gather(np.array([2.0 * sum(block.numels)]), ring, bare)[0]
    for count in (2, 16):
        zero1, shard = (
            terms(row(dp_shard=8, microbatches=count, mode=mode), block, bare, 8, BF16)
            for mode in ("zero1", "shard")
        )
        reduced = all_gather(np.array([4.0 * sum(block.numels)]), ring, bare)[0]
        assert zero1.seconds[0, 0] * count == pytest.approx(gather + reduced)
        assert shard.seconds[0, 0] * count == pytest.approx(gather + count * reduced)
        assert shard.seconds[0, 1] == pytest.approx(2 * gather + reduced)


def one_compute(block):
    still = replace(REAL, kernel_s=0.0, launch_s=0.0)
    return terms(row(), block, still, 8, BF16).forward_s[0, 0]


def test_a_process_that_is_slower_than_the_device_is_what_takes_the_time():
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2, tp=2).kinds[1]
    slow = replace(REAL, launch_s=1e-3, collective_s=5e-3, collective_rank_s=0.0)
    told = terms(row(tp=2), block, slow, 8, BF16)
    assert told.forward_s[0, 0] == pytest.approx(block.forward.kernels * 1e-3 + 2 * 5e-3)
    again = told.backward_s[0, 4] - told.backward_s[0, 0]
    assert again == pytest.approx(block.recompute[2].kernels * 1e-3 + 5e-3)
    large = terms(row(tp=2, micro=1_000_000), block, slow, 8, BF16)
    free = terms(
        row(tp=2, micro=1_000_000), block, replace(slow, launch_s=0, collective_s=0), 8, BF16
    )
    assert large.forward_s[0, 0] == free.forward_s[0, 0] > told.forward_s[0, 0]
    # Where a pipeline crosses nodes, each collective waits for its ranks one by one.
    far = replace(slow, collective_rank_s=1e-3)
    assert terms(row(tp=2, pp=4), block, far, 8, BF16).forward_s == pytest.approx(told.forward_s)
    beside = terms(row(tp=2, pp=8), block, far, 8, BF16).forward_s
    assert beside == pytest.approx(told.forward_s + 2 * 2 * 1e-3)


def test_a_collective_that_leaves_its_node_takes_longer_whatever_it_sends():
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2, tp=2).kinds[1]
    plain = replace(REAL, launch_s=0.0, collective_s=0.0, collective_node_s=0.0)
    far = replace(plain, collective_node_s=1e-3)
    for micro in (1, 64):
        grid = row(tp=2, micro=micro)
        near, apart = (
            [terms(grid, block, p, per_node, BF16).forward_s[0, 0] for p in (plain, far)]
            for per_node in (8, 1)
        )
        assert near[0] == near[1]
        assert apart[1] == pytest.approx(apart[0] + 2 * 1e-3)
    # Twice that on four nodes: the seconds are of each doubling.
    even = from_mapping(LLAMA | {"num_key_value_heads": 4})
    four = chain_of(even, seq_len=LENGTH, element_bytes=2, tp=4).kinds[1]
    quick, slow = (terms(row(tp=4), four, p, 1, BF16).forward_s[0, 0] for p in (plain, far))
    assert slow == pytest.approx(quick + 2 * 2e-3)
    assert without(far, network=True).collective_node_s == 0
    # And in the process, where a pipeline makes it wait for each of them.
    waits = replace(far, collective_rank_s=1.0)
    told = terms(row(tp=2, pp=2), block, waits, 1, BF16).forward_s[0, 0]
    assert told == pytest.approx(2 * (2 * 1.0 + 1e-3))


def test_replicas_are_reduced_after_the_last_microbatch_only():
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=4).kinds[1]
    for mode, sizes in (("shard", {"dp_replicate": 4, "dp_shard": 2}), ("zero1", {"dp_shard": 8}),
                        ("ddp", {"dp_replicate": 8})):  # fmt: skip
        once = terms(row(mode=mode, **sizes), block, COUNTING, 8, FP32)
        often = terms(row(mode=mode, microbatches=5, **sizes), block, COUNTING, 8, FP32)
        assert once.ends_s[0, 0] == often.ends_s[0, 0] > 0
        paid = 5 * (often.seconds[0, 0] - often.forward_s[0, 0] - often.backward_s[0, 0])
        assert paid == pytest.approx(often.ends_s[0, 0] + often.update_s[0])


def test_recomputation_costs_what_it_runs_again():
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=4, tp=2).kinds[1]
    still = replace(REAL, intra_latency_s=0.0, intra_bytes_per_s=np.inf)
    none, selective, full = terms(row(tp=2), block, still, 8, FP32).backward_s[0, ::2]
    forward = terms(row(tp=2), block, still, 8, FP32).forward_s[0, 0]
    assert none < selective < full < none + forward
    again = terms(row(tp=2), block, COUNTING, 8, FP32).backward_s[0, ::2]
    # The all-reduce in the middle of a block runs once more, the one at its end does not; where
    # products are kept, so is what it made.
    assert again[2] - again[0] == LENGTH * 48 * 4
    assert again[1] == again[0]


@pytest.mark.parametrize(
    ("mode", "precision", "first", "further"),
    [
        ("zero1", BF16, 2 + 4, 2 + 2 * 4),  # Kept in the dtype of the reduction.
        ("zero1", ALL_BF16, 0, 3 * 2),  # Autograd adds in place.
        ("ddp", FP32, 0, 3 * 4),
        ("shard", BF16, 0, (4 + 2 * 4) / 8),  # This rank's shard alone.
    ],
)
def test_gradients_of_further_microbatches_are_added_to_those_kept(mode, precision, first, further):
    """They took no time, which made a pipeline of many microbatches look fast."""
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2).kinds[1]
    moving = replace(
        COUNTING,
        streamed_bytes_per_s=0.0,
        memory_bytes_per_s=1.0,
        intra_bytes_per_s=np.inf,
        inter_bytes_per_s=np.inf,
    )
    axis = "dp_replicate" if mode == "ddp" else "dp_shard"

    def step_s(count):
        told = terms(row(mode=mode, microbatches=count, **{axis: 8}), block, moving, 8, precision)
        each = told.forward_s[0, 0] + told.backward_s[0, 0]
        assert told.seconds[0, 0] * count == pytest.approx(
            count * each + told.ends_s[0, 0] + told.update_s[0]
        )
        return count * each + told.ends_s[0, 0], told.compute_s[0] * count

    numel = sum(block.numels)
    alone, computed = step_s(1)
    for count in (2, 5):
        more = numel * (first + (count - 1) * further)
        told, of_which = step_s(count)
        assert told == pytest.approx(count * alone + more)
        assert of_which == pytest.approx(count * computed + more)


def test_gradients_of_a_single_rank_are_added_up_once():
    """FSDP2 over one rank has it among its copies, after every microbatch."""
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2).kinds[1]
    moving = replace(COUNTING, streamed_bytes_per_s=0.0, memory_bytes_per_s=1.0)
    one, two = (terms(row(microbatches=n), block, moving, 8, BF16) for n in (1, 2))
    assert two.backward_s[0, 0] == pytest.approx(one.backward_s[0, 0])
    assert two.compute_s[0] == pytest.approx(one.compute_s[0])


def test_an_update_moves_what_is_held():
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2).kinds[1]
    whole = terms(row(mode="ddp", dp_replicate=8), block, REAL, 8, BF16).update_s[0]
    shard = terms(row(dp_shard=4, cp=2), block, REAL, 8, BF16).update_s[0]
    numel = sum(block.numels)
    assert whole == 8 * shard
    assert terms(row(mode="ddp", cp=2), block, REAL, 8, BF16).update_s[0] == whole
    assert whole == pytest.approx(numel * 4 * REAL.optimizer_bytes / REAL.memory_bytes_per_s)


def test_undoing_the_scale_of_a_loss_is_paid_for():
    """Every element of a gradient is read and written several times more than without one."""
    half, scaled = (
        widths_of(Precision(param="bfloat16", master="float32")),
        widths_of(Precision(param="float16", master="float32")),
    )
    assert half.unscaling == 0
    assert scaled.unscaling == 34
    assert (half.compute, half.stored) == (scaled.compute, scaled.stored)
    assert widths_of(Precision(param="float16", master="float16")).unscaling == 0


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_attention_under_a_mask_skips_nothing_of_its_own_chunk(cp):
    """Of 2 cp chunks a rank has two, and each meets its own keys whole; some kernels are slow."""
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=4, tp=1).kinds[1]
    flops = (block.forward.attention_flops + block.backward.attention_flops) / cp
    for device, kernels in (("h100-sxm-80gb", 1.0), ("a100-sxm-80gb", 2.0)):
        profile = replace(REAL, device=device)
        gathered, exchanged = (
            terms(row(cp=cp, gathers_kv=way), block, profile, 8, FP32).compute_s[0]
            for way in (int(cp > 1), 0)
        )
        plain = flops / (profile.attention_efficiency * profile.peak_flops)
        share = kernels * (1 + 1 / (2 * cp)) if cp > 1 else 1.0
        assert flops > 0
        assert gathered - exchanged == pytest.approx(plain * (share - 1))


def test_over_one_rank_parameters_are_cast_between_kernels_and_gradients_laid_beside_them():
    """Again in backward where they were given back; the fetch from the host is not ahead either."""
    chain = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2)
    block = chain.kinds[1]
    slow = replace(REAL, kernel_s=1e-3)
    alone, shard = row(mode="ddp"), row(microbatches=4, mode="shard")
    hosted = row(microbatches=4, offload=PARAMS_ON_HOST)
    none, one, far = (terms(g, block, slow, 8, BF16) for g in (alone, shard, hosted))
    numel, rate = sum(block.numels), slow.memory_bytes_per_s
    cast = numel * ((4 + 2) + (2 + 2)) / rate
    laid = numel * ((2 + 4) + (4 + 4) + (4 + 4 + 4)) / rate
    fetch = numel * 4 / slow.pcie_bytes_per_s
    assert one.forward_s[0, 1] == pytest.approx(none.forward_s[0, 0] + cast)
    kept, given_back = one.backward_s[0, :2]
    added = numel * (2 + 2 * 4) / (0.9 * 3.35e12)  # What DDP adds in a further microbatch.
    assert kept == pytest.approx(none.backward_s[0, 0] - added + 0.1 * laid, rel=1e-9)
    assert given_back == pytest.approx(kept + cast)
    assert far.forward_s[0, 1] == pytest.approx(none.forward_s[0, 0] + cast + fetch)


@pytest.mark.parametrize("reshard", [0, 1])
def test_what_lies_on_the_host_crosses_once_each_way(reshard):
    """Of one microbatch: shards of parameters before each gathering, those of gradients after."""
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=4).kinds[1]
    bus = replace(COUNTING, intra_bytes_per_s=np.inf, pcie_bytes_per_s=1.0)
    told = terms(row(dp_shard=4, offload=PARAMS_ON_HOST), block, bus, 8, FP32, is_awaited=True)
    shard_bytes = sum(block.numels) * 4 / 4
    crossed = told.seconds[0, OPTIONS.index((0, reshard))] - told.update_s[0]
    assert crossed == pytest.approx(shard_bytes * (2 + reshard))


def test_a_reduce_scatter_takes_as_long_as_it_was_measured_to():
    """Gloo's takes twice as long as a gather, NCCL's as long."""
    block = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=4).kinds[1]
    grid = row(dp_shard=8, microbatches=2)
    (gathered, reduced, summed, _), (twice_gathered, twice_reduced, twice_summed, _) = (
        Rows(grid, replace(COUNTING, reduce_scatter_factor=factor), 8, widths_of(FP32)).data(block)
        for factor in (1.0, 2.0)
    )
    assert (twice_gathered, twice_summed) == (gathered, summed)
    assert twice_reduced == 2 * reduced > 0


def test_statistics_of_batchnorms_are_summed_over_all_data_ranks():
    """Whatever the number of samples, and before the device may go on."""
    sent = Sent(statistics=3, statistics_bytes=1e6)
    seconds = [
        Rows(row(**axes), REAL, 8, widths_of(FP32)).sent(sent)
        for axes in ({"dp_shard": 8}, {"dp_replicate": 4, "dp_shard": 2, "micro": 2}, {"tp": 8})
    ]
    told = all_reduce(np.array([1e6]), group(np.array([8.0]), np.ones(1), 8), REAL, 3)
    assert seconds[0] == seconds[1] == told > 0
    assert seconds[2] == 0
    launch = Rows(row(dp_shard=8), REAL, 8, widths_of(FP32)).launch
    assert launch(Tally(), sent) == 3 * REAL.collective_s
