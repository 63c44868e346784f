"""Megatron's, DeepSpeed's and InternEvo's runs: 16-bit parameters whose copies in fp32 are apart.

Which seeded bug would this catch? States that the wrong ranks shard, a microbatch too few in
flight, a stage without the second embedding, a metric of one node that is told of another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.allocator import reserve
from meshplan.memory.tape.tape import play
from tests.bench import published
from tests.bench.frameworks import native
from tests.bench.frameworks.megatron_job import (
    MegatronJob,
    States,
    even_stages,
    log_of,
    outside_bytes,
)
from tests.bench.frameworks.torchtitan import Training
from tests.helpers.published_rows import FOUNDRY, MEGATRON, changed

SHAPE = Shape(
    layers=8, hidden=512, heads=8, kv_heads=8, head_dim=64, mlp=2048, vocab=4096, tied=True
)
JOB = MegatronJob(
    stages=even_stages(8, 1), batch=1, seq_len=256, accumulate=8, dp=4, tp=1, shards=4,
    states=States.DEEPSPEED_FP16, is_sequence=False, recompute="full",
)  # fmt: skip
BF16 = changed(
    MEGATRON, "parallel", impl="Megatron-DeepSpeed", zero_stage=1, pp_partition="type:transformer"
)
BF16["training"]["precision"] = "bf16 with BF16 optimizer, fp32 grad accumulation not sharded"
GB = "nvidia-smi level, integer GB"


def left(job: MegatronJob, rank: int = 0) -> int:
    """Bytes that stay after two steps."""
    return sum(event.delta for event in log_of(SHAPE, job, rank).events)


def peak(job: MegatronJob, rank: int = 0) -> int:
    return reserve(log_of(SHAPE, job, rank)).allocated_bytes


def test_states_are_what_each_optimizer_keeps() -> None:
    """12 h^2 + 13 h of a block, the tables, and the last norm."""
    count = 8 * (12 * 512**2 + 13 * 512) + (4096 + 256) * 512 + 2 * 512
    assert left(JOB) == (2 + 2 + 12 / 4) * count
    assert left(replace(JOB, states=States.DEEPSPEED_BF16)) == (2 + 2 + 4 + 12 / 4) * count
    assert left(replace(JOB, states=States.MEGATRON, shards=1)) == (2 + 2 + 12) * count


def test_llama_has_its_own_parameters() -> None:
    shape = replace(SHAPE, mlp=1536, tied=False)
    job = replace(JOB, states=States.INTERNEVO, shards=2)
    count = 8 * (4 * 512**2 + 3 * 512 * 1536 + 2 * 512) + 2 * 4096 * 512 + 512
    assert sum(event.delta for event in log_of(shape, job, 0).events) == (2 + 2 + 6) * count


def test_tp_shards_products_and_not_norms() -> None:
    whole, half = left(JOB), left(replace(JOB, tp=2))
    norms = 8 * 6 * 512 + 2 * 512 + 256 * 512  # Two norms, two biases of sums; positions.
    assert half == (whole + 7 * norms) / 2


def test_recomputation_keeps_less() -> None:
    job = replace(JOB, batch=16)
    full, core, none = (peak(replace(job, recompute=w)) for w in ("full", "core", "none"))
    assert full < core < none
    # Scores, their mask and what dropout leaves: 5 bytes of each.
    assert none - core >= 7 * 5 * 8 * 256**2 * 16


def test_sequence_parallelism_shards_what_blocks_hand_on() -> None:
    job = replace(JOB, tp=2, stages=even_stages(8, 4))
    kept = 3 * 2 * 256 * 512 * 2 // 2  # Three more microbatches in flight, of two blocks.
    assert peak(job) - peak(replace(job, is_sequence=True)) >= kept


def test_stages_are_even_and_each_later_one_holds_less() -> None:
    assert [s.layers for s in even_stages(10, 4)] == [3, 3, 2, 2]
    assert [s.layers for s in even_stages(10, 4, counts_ends=True)] == [2, 3, 3, 2]
    job = replace(JOB, stages=even_stages(8, 4))
    assert job.distinct() == (0, 1, 3)
    # One microbatch less: its ids, and what enters and leaves its two blocks.
    assert peak(job, 1) - peak(job, 2) == 8 * 256 + 3 * 2 * 256 * 512
    # The last stage has the embedding a second time, and only one final norm.
    table, places = 4096 * 512, 256 * 512
    assert left(job, 0) - left(job, 3) == 7 * (places - 2 * 512)
    assert left(job, 3) - left(job, 1) == 7 * (table + 2 * 512)


def test_a_pipeline_that_deepspeed_runs_holds_its_logits() -> None:
    job = replace(JOB, stages=even_stages(8, 2), shards=1)
    shape = replace(SHAPE, vocab=65536)
    held, free = (
        reserve(log_of(shape, replace(job, states=states), 1)).allocated_bytes
        for states in (States.DEEPSPEED_FP16, States.MEGATRON)
    )
    assert held - free >= 256 * 65536


def test_kernels_are_loaded_with_the_context_and_each_group_has_buffers() -> None:
    alone, pair, both = (outside_bytes("A100-SXM-80GB", *s) for s in ((1, 1), (2, 1), (2, 8)))
    assert alone.expected == 1536 * 2**20
    assert alone.expected < pair.expected < both.expected
    assert outside_bytes("V100-SXM2-32GB", 1).expected == 1113 * 2**20


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("model", {"layers": 6}),
        ("model", {"vocab": 64000}),
        ("parallel", {"tp": 1}),
        ("parallel", {"pp": 1}),
        ("parallel", {"sp": True}),
        ("training", {"micro_batch": 2, "grad_accum": 4}),
        ("training", {"activation_checkpointing": "none"}),
        ("training", {"precision": "fp16"}),
        ("measured", {"mem_metric": GB}),
    ],
)
def test_every_field_counts(section: str, fields: dict[str, Any]) -> None:
    row = BF16 if section == "parallel" else BF16 | {"parallel": BF16["parallel"] | {"sp": False}}
    other = changed(row, section, **fields)
    training, p = other["training"], other["parallel"]
    training["global_batch"] = training["micro_batch"] * training["grad_accum"] * p["dp"]
    answer = published.predict(other)
    assert answer["skipped"] is None
    assert answer["predicted_bytes"] != published.predict(row)["predicted_bytes"]
    assert answer["band"][0] <= answer["predicted_bytes"] <= answer["band"][1]


@pytest.mark.parametrize(
    ("section", "fields", "reason"),
    [
        ("parallel", {"vpp": 2}, "vpp 2"),
        ("parallel", {"zero_stage": 2}, "zero_stage 2"),
        ("parallel", {"pp_partition": "type:other"}, "type:other"),
        ("parallel", {"pp": 8}, "stage without blocks"),
        ("training", {"attention": "flash"}, "flash"),
        ("training", {"optimizer": "SGD"}, "SGD"),
        ("training", {"activation_checkpointing": "sometimes"}, "sometimes"),
        ("model", {"kv_heads": 2}, "grouped queries"),
        ("model", {"heads": 6}, "heads 6"),
    ],
)
def test_what_is_unknown_is_skipped(section: str, fields: dict[str, Any], reason: str) -> None:
    row = changed(BF16, section, **fields)
    row["model"]["layers"] = max(row["model"]["layers"], row["parallel"]["pp"])
    if row["parallel"]["pp"] == 8:
        row["parallel"]["pp_partition"] = "type:transformer|embed"
        row["model"]["layers"] = 8
    assert reason in published.predict(row)["skipped"]


def test_blocks_that_do_not_divide_need_a_partition() -> None:
    row = changed(changed(BF16, "model", layers=6), "parallel", pp=4)
    first = published.predict(row)["predicted_bytes"]
    row["parallel"]["pp_partition"] = "type:transformer|embed"
    assert published.predict(row)["predicted_bytes"] < first  # One block of four, not two.
    del row["parallel"]["pp_partition"]
    assert "spread over stages" in published.predict(row)["skipped"]


def test_a_reading_is_of_the_first_node_unless_it_says_of_all() -> None:
    """The last of two stages, on another node, is fuller: its logits have a large vocabulary."""
    row = changed(BF16, "measured", mem_metric=GB)
    row["model"]["vocab"] = 2**18
    row["hardware"] |= {"gpus_per_node": 4, "nodes": 2}
    first = published.predict(row)["predicted_bytes"]
    row["measured"]["mem_metric"] = f"{GB}, max over nodes"
    assert published.predict(row)["predicted_bytes"] > first
    row["hardware"]["gpus_per_node"] = 8
    row["measured"]["mem_metric"] = GB
    assert published.predict(row)["predicted_bytes"] > first


def test_a_run_fits_if_its_fullest_rank_does() -> None:
    row = changed(BF16, "hardware", gpu="V100 SXM2 16GB", mem_gb=16)
    assert published.predict(row)["fits"] is True
    row["model"] |= {"vocab": 2**20, "hidden": 4096, "ffn": 16384}
    assert published.predict(row)["fits"] is False


def test_readings_of_nvidia_smi_count() -> None:
    row = changed(BF16, "measured", mem_metric=GB, peak_mem_gb=10)
    answer = published.predict(row) | {"predicted_bytes": 11 * 2**30}
    found = published.summary([row], [answer])["copies in fp32"]
    assert found["with_figure"] == 1
    assert found["median"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("training", {"activation_checkpointing": "none"}),
        ("training", {"precision": "bf16"}),
        ("training", {"micro_batch": 2, "global_batch": 16}),
        ("parallel", {"fsdp": "SHARD_GRAD_OP", "zero_stage": 2}),
        ("model", {"vocab": 64000}),
    ],
)
def test_every_field_of_mpt_counts(section: str, fields: dict[str, Any]) -> None:
    answer = published.predict(changed(FOUNDRY, section, **fields))
    assert answer["skipped"] is None
    assert answer["predicted_bytes"] != published.predict(FOUNDRY)["predicted_bytes"]


def test_the_loss_of_mpt_keeps_its_logits_in_bf16_alone() -> None:
    """Forward keeps 2 bytes of each logit, and backward adds as many."""
    tokens, vocab = 2**16, 2**15
    shape = Shape(layers=1, hidden=64, heads=1, kv_heads=1, head_dim=64, mlp=64, vocab=vocab,
                  tied=True, positions=tokens)  # fmt: skip
    peaks = [
        play(native._mpt_tape(replace(shape, vocab=size), Training(batch=1, tokens=tokens)))
        .log.peak.live_bytes
        for size in (vocab, 2 * vocab)
    ]  # fmt: skip
    assert peaks[1] - peaks[0] == pytest.approx(4 * tokens * vocab, rel=0.01)
