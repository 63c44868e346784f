"""Constants: where they come from, what is refused, and that fits find what made the runs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshplan.cost.profile import GENERIC, fitted, framework_of, profile_of, without
from meshplan.errors import PlanError
from meshplan.layout.hardware import Cluster, Device, Link, devices, find_device
from meshplan.model.blueprint import from_config
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import PROFILES
from tests.bench import fit_profiles, published, published_time
from tests.bench.fit_profiles import FEWEST, Fit, bounds_of, least_squares, left_out, select
from tests.bench.mapping import SkipError
from tests.bench.time_mapping import case_of

ROOT = Path(__file__).resolve().parents[2]
H100, A100 = find_device("h100-sxm-80gb"), find_device("a100-sxm-80gb")
EIGHT = Cluster(device=H100, nodes=1, gpus_per_node=8)


def test_a_datasheet_times_shares():
    told = profile_of(EIGHT)
    assert told.residual is None
    assert told.peak_flops == 989e12
    assert told.memory_bytes_per_s == 3350e9 * GENERIC["memory_share"]
    assert told.intra_bytes_per_s == 450e9 * GENERIC["intra_share"]
    assert any("[Empirical]" in source for source in told.sources)
    stated = profile_of(replace(EIGHT, nodes=2, intra=Link("", 40e9), inter=Link("", 10e9)))
    assert stated.intra_bytes_per_s == 40e9 * GENERIC["intra_share"]
    assert stated.inter_bytes_per_s == 10e9 * GENERIC["inter_share"]
    free = without(stated, network=True)
    assert free.inter_bytes_per_s == float("inf")
    assert free.peak_flops == told.peak_flops


def test_products_are_as_fast_as_the_fastest_one_measured_on_the_device():
    """A share of the datasheet that holds for all devices flatters those that throttle."""

    def share(gpu, dtype="bfloat16"):
        return profile_of(replace(EIGHT, device=find_device(gpu)), dtype=dtype).efficiency

    usual = GENERIC["efficiency"]
    assert share("h100-sxm-80gb") == share("h200") == share("v100-sxm-32gb", "float16") == usual
    assert share("a100-sxm-80gb") == pytest.approx(usual * (271.2 / 312) / (794.5 / 989))
    assert share("mi300x") / share("h100-sxm-80gb") == pytest.approx((668.4 / 1307) / (794.5 / 989))
    assert share("a100-sxm-80gb", "float32") == usual  # Not the units that were measured.
    fitted_share = fitted()["megatron", None]["constants"]["efficiency"]
    named = profile_of(replace(EIGHT, device=find_device("a100-sxm-80gb")), framework="megatron")
    assert named.efficiency == fitted_share


@pytest.mark.parametrize(
    ("cluster", "dtype", "says"),
    [
        (replace(EIGHT, nodes=2), "bfloat16", r"between nodes.*\n.*inter: 50GB/s"),
        (replace(EIGHT, device=find_device("b200")), "float32",
         r"no known float32 throughput\n.*set precision: bf16-true, .*write gpu: {memory: 180GB, "
         r"fp32: 181e12, hbm: 8000GB/s} with its fp32 operations per second"),
        (replace(EIGHT, device=find_device("rtx-3090")), "bfloat16",
         r"set precision: 32-true; or write gpu: {memory: 24GB, bf16: 181e12, hbm: 936"),
        (replace(EIGHT, device=Device(name="stated", memory_bytes=10**10)), "bfloat16",
         "set gpu in hardware:"),
        (replace(EIGHT, device=find_device("mi250x")), "bfloat16", r"of one node.*\n.*intra: 25GB"),
        (replace(EIGHT, device=Device(name="stated", memory_bytes=10**10)), "bfloat16",
         r"(?s)no known bfloat16 throughput.*stated has no known memory bandwidth"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_with_the_key_to_add(cluster, dtype, says):
    with pytest.raises(PlanError, match=says):
        profile_of(cluster, dtype=dtype)


def test_shipped_profiles_are_few_constants_within_what_a_device_can_do():
    assert {framework for framework, _ in fitted()} == set(PROFILES[1:])
    for (framework, device), row in fitted().items():
        assert device is None or device in devices()
        assert set(row["devices"]) <= set(devices())
        assert row["dtype"] == "bfloat16"
        assert row["num_runs"] >= FEWEST
        for name, value in row["constants"].items():
            low, high = bounds_of(framework, name)
            assert low <= value <= high, (framework, name)
            assert name in GENERIC or name == "contention_alone"
    cluster = Cluster(device=A100, nodes=2, gpus_per_node=8, inter=Link("", 25e9))
    told = profile_of(cluster, "megatron")
    assert told.residual is not None
    assert told.num_runs == fitted()["megatron", None]["num_runs"]
    assert told.efficiency != profile_of(cluster).efficiency


def test_a_device_without_runs_takes_the_shares_of_the_others():
    h200 = profile_of(replace(EIGHT, device=find_device("h200")), "llm-foundry")
    shared = fitted()["llm-foundry", None]["constants"]
    assert h200.attention_efficiency == shared["attention_efficiency"]
    own = fitted()["llm-foundry", "h100-sxm-80gb"]["constants"]
    assert profile_of(EIGHT, "llm-foundry").attention_efficiency == own["attention_efficiency"]


def test_runs_of_another_dtype_are_no_profile():
    with pytest.raises(PlanError, match=r"of megatron computed in bfloat16, but the plan in flo"):
        profile_of(EIGHT, "megatron", "float32")


def test_least_squares_find_what_made_the_data_and_pass_over_what_did_not():
    x = np.linspace(0, 1, 40)
    real = np.log(0.3 + 0.6 * x)
    real[::7] += 2.0

    def errors(unit):
        return np.log(unit[0] + unit[1] * x + 1e-9) - real

    assert least_squares(errors, np.array([0.5, 0.5])) == pytest.approx([0.3, 0.6], abs=1e-3)


TITAN = {
    "id": "a", "group": "g",
    "model": {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1024,
              "seq_len": 1024},
    "hardware": {"gpu": "H100 SXM (HBM2e 96GB, 500W, 2.4TB/s)", "gpus": 8, "nodes": 1,
                 "gpus_per_node": 8},
    "parallel": {"dp_shard": 8, "tp": 1, "zero_stage": 3},
    "training": {"precision": "bf16 compute, fp32 params/grad-reduce (FSDP2 mixed precision)",
                 "grad_accum": 1, "local_batch": 2, "activation_checkpointing": "full",
                 "compile": True},
    "measured": {"tokens_per_s_per_gpu": 50000.0, "fits": True},
}  # fmt: skip
MEGATRON = {
    "id": "b", "group": "g",
    "model": {"layers": 8, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 5120,
              "seq_len": 512},
    "hardware": {"gpu": "A100 SXM 80GB", "gpus": 16, "nodes": 2, "gpus_per_node": 8,
                 "inter": "8x HDR InfiniBand per node"},
    "parallel": {"dp": 2, "tp": 4, "pp": 2, "zero_stage": 0},
    "training": {"precision": "fp16 mixed", "optimizer": "Adam", "micro_batch": 2,
                 "global_batch": 32, "activation_checkpointing": "full"},
    "measured": {"iter_time_s": 1.0, "fits": True},
}  # fmt: skip


def changed(row, **fields):
    """The row with fields of any section changed; None takes one out."""
    out = {name: dict(each) if isinstance(each, dict) else each for name, each in row.items()}
    for field, value in fields.items():
        section = next(s for s in out.values() if isinstance(s, dict) and field in s)
        section[field] = value
    return out


@pytest.mark.parametrize("row", [TITAN, MEGATRON])
def test_a_prediction_follows_from_fields_and_not_from_names(row):
    (told,) = published_time.predict_rows([row])
    assert told["skipped"] is None
    assert told["predicted_s"] > 0
    renamed = changed(row) | {"id": "other", "group": "other", "source": "elsewhere"}
    (other,) = published_time.predict_rows([renamed])
    assert other["predicted_s"] == told["predicted_s"]
    assert told["predicted_tokens_per_s_per_gpu"] > 0


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        (TITAN, {"activation_checkpointing": "none"}), (TITAN, {"local_batch": 4}),
        (TITAN, {"seq_len": 2048}), (TITAN, {"tp": 2, "dp_shard": 4}),
        (MEGATRON, {"tp": 8, "dp": 1}), (MEGATRON, {"pp": 1, "dp": 4}),
        (MEGATRON, {"activation_checkpointing": "none"}), (MEGATRON, {"layers": 16}),
    ],
)  # fmt: skip
def test_every_field_that_matters_changes_the_prediction(row, fields):
    before, after = published_time.predict_rows([row, changed(row, **fields)])
    assert after["skipped"] is None
    assert after["predicted_s"] != pytest.approx(before["predicted_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("row", "fields", "reason"),
    [
        (TITAN, {"gpu": "TITAN RTX 24GB"}, "hardware.gpu"),
        (TITAN, {"compile": "graph trainer"}, "training.compile"),
        (TITAN, {"activation_checkpointing": "unstated"}, "activation_checkpointing"),
        (TITAN, {"precision": "MXFP8"}, "no profile"),
        (TITAN, {"layers": None}, "model.layers"),
        (MEGATRON, {"inter": "not stated"}, "hardware.inter"),
        (MEGATRON, {"zero_stage": 3}, "zero_stage 3"),
        (MEGATRON, {"pp": 3}, "stages is not stated"),
        (MEGATRON, {"micro_batch": 32}, "cannot cut 32 samples"),
    ],
)
def test_what_is_not_modelled_is_skipped_with_its_reason(row, fields, reason):
    with pytest.raises(SkipError, match=reason):
        case_of(changed(row, **fields))
    (told,) = published_time.predict_rows([changed(row, **fields)])
    # Ranks that do not make the row's GPUs are found first.
    assert reason in told["skipped"] or "ranks are stated" in told["skipped"]
    assert told["predicted_s"] is None
    assert published_time.predict_rows([{"id": "c"}])[0]["skipped"]


def cases_of(truth):
    """Runs of two models, as long as steps take by the constants `truth`."""
    cases = [
        case_of(changed(MEGATRON, micro_batch=mb, tp=tp, dp=8 // tp, hidden=hidden,
                        ffn=4 * hidden, heads=32, global_batch=256))
        for mb, tp, hidden in itertools.product((1, 4), (1, 4), (2048, 4096))
    ]  # fmt: skip
    fit = Fit(cases, list(truth))
    real = (1 + fit.errors(np.array(list(truth.values())))) * fit.real
    return [replace(c, real_s=float(s)) for c, s in zip(cases, real, strict=True)]


def test_a_fit_finds_the_constants_that_made_the_runs():
    truth = {"efficiency": 0.8, "memory_share": 0.4}
    fit = Fit(cases_of(truth), list(truth))
    assert fit.run() == pytest.approx(list(truth.values()), rel=0.02)
    wrong = Fit([replace(c, real_s=1 / c.real_s) for c in fit.cases], list(truth))
    assert np.abs(wrong.errors(wrong.run())).max() > 0.1


def test_constants_are_freed_only_where_left_out_models_gain(monkeypatch):
    """Of three: a dozen would be tried two by two, for minutes."""
    free = ["efficiency", "memory_share", "intra_share"]
    assert set(free) < set(fit_profiles.free_constants(cases_of({"efficiency": 0.85})))
    monkeypatch.setattr(fit_profiles, "free_constants", lambda cases: free)
    assert select(cases_of({})) == []  # The runs of generic constants need no others.
    cases = cases_of({"efficiency": 0.85})
    assert select(cases) == ["efficiency"]
    assert np.abs(left_out(cases, ["efficiency"])).max() < 0.01
    assert np.abs(left_out(cases, [])).max() > 0.1


def test_values_are_fitted_anew_for_the_constants_that_there_are():
    (row,) = fit_profiles.refitted("megatron", cases_of({"efficiency": 0.55}))
    assert row["constants"] == {"efficiency": pytest.approx(0.55, rel=0.02)}
    assert list(fit_profiles.refitted("nobody", [])) == []


def test_order_and_regret():
    assert published_time.spearman(np.array([1, 2, 3.0]), np.array([10, 20, 30.0])) == 1
    assert published_time.spearman(np.array([1, 2, 3.0]), np.array([30, 20, 10.0])) == -1
    answers = [
        {"skipped": None, "is_stalled": False, "predicted_s": told, "real_s": real,
         "order": ["m", 1, 8, "f", "d", "t"]}
        for told, real in ((1.0, 1.2), (2.0, 1.0), (3.0, 3.0))
    ]  # fmt: skip
    (group,) = published_time.ranking(answers)["groups"]
    assert group["plans"] == 3
    assert group["regret"] == pytest.approx(0.2)
    assert group["spearman"] == pytest.approx(0.5)


def test_the_bench_writes_what_was_asked(tmp_path, capsys):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    rows.write_text("\n".join(json.dumps(row) for row in (TITAN, MEGATRON)))
    assert published.main([str(rows), "--json", str(out), "--what", "time,ranking"]) == 0
    told = json.loads(out.read_text())
    assert "memory" not in told
    assert len(told["time"]["rows"]) == 2
    assert "seconds of a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "changes", "framework"),
    [
        ("h200-sxm-141gb", {}, "hf-eager"),
        ("h200-sxm-141gb", {"profile": "generic"}, "generic"),
        ("h200-sxm-141gb", {"compile": True}, "hf-eager"),  # As eager blocks.
        ("h200-sxm-141gb", {"precision": "32-true"}, "generic"),
        ("h100-sxm-80gb", {}, "generic"),  # Its runs had another GPU.
        ("h100-sxm-80gb", {"profile": "hf-eager"}, "hf-eager"),
    ],
)
def test_a_model_of_transformers_has_the_constants_of_its_runs(gpu, changes, framework):
    spec = load_spec({"version": 1, "precision": "bf16-mixed", **changes})
    graph = from_config(ROOT / "plans/models/llama-3.1-8b.json")
    assert framework_of(spec, graph, gpu) == framework
    root = replace(graph.modules[""], qualified_type="mine.Llama")
    own = replace(graph, modules={"": root})
    assert framework_of(spec, own, gpu) == changes.get("profile", "generic")
