"""The pages that put the planner beside rules of thumb and published plans say what they should."""

from __future__ import annotations

from meshplan.planner.answers.explain import WhyNot
from meshplan.planner.solve.shares import Shares
from tests.bench.planned_models import LIVE, MODELS, write_plan
from tests.bench.plans_table import CASES, PUBLISHED, _picked
from tests.bench.strategy_guide import MACHINES, SIZES, Rule, _compared, _row

RULE = Rule("FSDP or ZeRO-2", ("full_shard", "zero2"))
SHARES = Shares(compute=1.0, recompute=0.0, tensor_parallel=0.0, data=0.0, pipeline=0.0)


def asked(word, seconds, missing=None):
    return WhyNot(setting=f"strategy={word}", base_s=1.0, seconds=seconds, shares=SHARES,
                  plan_shares=SHARES, missing_bytes=missing)  # fmt: skip


def test_how_a_rule_does():
    both = [asked("full_shard", 1.3), asked("zero2", 1.01)]
    assert _compared("zero2", RULE, both, 1.0) == "agrees"
    assert _compared("zero1", RULE, both, 1.0).startswith("as good: zero2 +1.0%")
    slow = [asked("full_shard", 1.3), asked("zero2", 1.2)]
    assert _compared("zero1", RULE, slow, 1.0).startswith("no: zero2 +20.0%")
    none = [asked("full_shard", None, 2**30), asked("zero2", None, 2**30)]
    assert _compared("zero1", RULE, none, 1.0) == (
        "no: does not fit: at least 1.0 GiB over the limit"
    )


def test_a_row_of_each_page(tmp_path):
    hardware = {"nodes": 1, "gpus_per_node": 1, "gpu": "h100-sxm-80gb"}
    path = write_plan(tmp_path, "GPT-2 124M", hardware=hardware,
                      batch={"global": 8, "seq_len": 1024})  # fmt: skip
    picked, seconds, memory, rule = _row(path, Rule("single GPU", ()))
    assert (picked, rule) == ("no data ranks, one GPU", "agrees")
    assert seconds.endswith(" s")
    assert memory.endswith(" GiB")
    plan, _, step, _, mfu, held, gap = _picked(path)
    assert (plan, step, held, gap) == ("one GPU", seconds, memory, "0.00%")
    assert 0 < float(mfu.rstrip("%")) < 100
    path = write_plan(tmp_path, "Llama-3.1-8B", hardware=hardware,
                      batch={"global": 8, "seq_len": 1024})  # fmt: skip
    assert _picked(path)[0] == "one GPU, parameters on the host"
    path = write_plan(tmp_path, "Llama-3.1-8B", hardware=hardware, offload="none",
                      batch={"global": 8, "seq_len": 1024})  # fmt: skip
    assert _picked(path)[0] == "nothing fits"
    assert _row(path, Rule("single GPU", ()))[3] == "no: it does not fit"


def test_the_pages_are_whole():
    """Every model is known, every machine has its rule, and what is published has its source."""
    counts = {case.model: case.counts for case in CASES}
    assert counts.keys() <= MODELS.keys() | LIVE.keys()
    for _, model, _, _, rules in SIZES:
        assert model in MODELS
        assert len(rules) == len(MACHINES)
    for (model, gpus), published in PUBLISHED.items():
        assert gpus in counts[model]
        assert published.source
    for case in CASES:
        for gpus in case.counts:
            assert case.least <= case.samples(gpus) <= case.most
