"""`meshplan estimate -f` at its boundary: the contract, groups, limits, what cannot be told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshplan.api import checking
from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.kernels import recurrent_buffers
from meshplan.render.memory.memory import memory_to_json, memory_to_text
from tests.helpers import estimated, picked

ROOT = Path(__file__).resolve().parents[2]

PLAN: dict[str, Any] = {
    "version": 1,
    "mesh": {"dp_shard": 4},
    "model": {"entry": "tests.helpers.estimated:tower"},
    "batch": {"micro": 2, "seq_len": 16},
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(plan, *flags)`: (exit code, stdout, stderr) of the verb."""

    def of(plan: dict[str, Any], *flags: str) -> tuple[int, str, str]:
        path = tmp_path / "plan.yaml"
        path.write_text(json.dumps(plan))  # JSON is YAML.
        code = main(["estimate", "-f", str(path), *flags])
        return code, *capsys.readouterr()

    return of


def result_of(run: Run, plan: dict[str, Any], *flags: str, code: int = 0) -> dict[str, Any]:
    got, out, err = run(plan, "--json", "-q", *flags)
    assert (got, err) == (code, "")
    answer = json.loads(out)
    assert answer["schema"] == "memory/1"
    return answer["result"]


def test_the_json_contract(run):
    result = result_of(run, PLAN, "--gpu", "h200")
    (group,) = result["groups"]
    peak = group["peak"]
    assert list(peak) == ["requested_bytes", "allocated_bytes", "reserved_bytes", "driver_bytes"]
    assert 0 < peak["requested_bytes"] <= peak["allocated_bytes"] <= peak["reserved_bytes"]
    assert sum(group["terms"].values()) == peak["requested_bytes"]
    assert group["ranks"] == [0, 1, 2, 3]
    check_modules(group, {"table": 1, "blocks.*.up": 3, "head": 1})
    low, high = group["band"]
    assert low < peak["reserved_bytes"] + peak["driver_bytes"] < high < result["limit_bytes"]
    assert group["at"]["phase"] in ("forward", "loss", "backward", "step")
    assert (group["fits"], result["fits"], result["tier"]) == (True, True, 3)
    assert (result["limit_bytes"], result["is_upper_bound"]) == (141 * 10**9, False)
    assert result["fixes"] == []


def check_modules(group: dict[str, Any], counts: dict[str, int]) -> None:
    """The modules of `estimated.Tower`, which four ranks hold in parts, and Adam's states."""
    rows = {row["module"]: row for row in group["modules"]}
    assert sum(row["bytes"] for row in rows.values()) == group["peak"]["requested_bytes"]
    for row in rows.values():
        assert sum(row["terms"].values()) == row["bytes"]
    for term, size in group["terms"].items():
        assert sum(row["terms"].get(term, 0) for row in rows.values()) == size
    tower = estimated.tower()
    for name, count in counts.items():
        module = tower.get_submodule(name.replace("*", "0"))
        part = count * sum(p.numel() for p in module.parameters()) * 4 // 4
        assert rows[name]["count"] == count
        assert rows[name]["terms"]["parameters"] == part
        assert rows[name]["terms"]["optimizer"] == 2 * part


def test_the_steps_lead_from_the_textbook_to_the_total(run):
    result = result_of(run, PLAN | {"mesh": {"dp_replicate": 4}})
    first, *steps = result["reconciliation"]
    num_params = sum(p.numel() for p in estimated.tower().parameters())
    assert first["total_bytes"] == 20 * num_params  # DDP in fp32: 20a.
    total = first["total_bytes"]
    for step in steps:
        total += step["delta_bytes"]
        assert step["total_bytes"] == total
    peak = result["groups"][result["worst"]]["peak"]
    assert total == peak["reserved_bytes"] + peak["driver_bytes"]


def test_uneven_parts_are_told_apart(run):
    plan = PLAN | {"model": {"entry": "tests.helpers.estimated:Uneven"}}
    groups = result_of(run, plan)["groups"]
    # Ten rows in four parts: 3, 3, 3, 1.
    assert [group["ranks"] for group in groups] == [[0, 1, 2], [3]]
    first, last = (group["terms"]["optimizer"] for group in groups)
    assert first > last


def test_stages_are_told_apart(run):
    plan = PLAN | {
        "mesh": {"pp": 2, "dp_shard": 2},
        "batch": {"micro": 4, "seq_len": 16},
        "pipeline": {"schedule": "1F1B", "microbatches": 4},
    }
    groups = result_of(run, plan)["groups"]
    assert [(group["ranks"], group["stages"]) for group in groups] == [
        ([0, 1], [0]), ([2, 3], [1]),
    ]  # fmt: skip
    assert groups[0]["peak"] != groups[1]["peak"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("asking", ("aten._local_scalar_dense.default", "blocks.1 (estimated.py:")),
        (
            "filling",
            (
                "aten.nonzero.default",
                "blocks.1 (estimated.py:",
                "no upper bound can be proved",
                "aten.ones.default in blocks.1 makes a larger tensor",
            ),
        ),
        pytest.param(
            "repeating",
            ("aten.repeat_interleave.Tensor", "blocks.0 (estimated.py:"),
            marks=pytest.mark.wide,
        ),
        ("ruleless", ("meshplan_tests::half", "blocks.0 (estimated.py:")),
    ],
)
def test_what_cannot_be_traced_is_named(run, entry, words):
    code, out, err = run(PLAN | {"model": {"entry": f"tests.helpers.estimated:{entry}"}}, "-q")
    assert (code, out) == (2, "")
    assert err.startswith("meshplan: 1 problem\n")
    assert "    fix: " in err
    for word in words:
        assert word in err


def test_what_a_mask_picks_has_an_upper_bound():
    plan = PLAN | {"model": {"entry": "tests.helpers.estimated:picking"}}
    estimate = checking.estimate_memory(plan, memory="1GiB", fixes=False)
    result = memory_to_json(estimate)
    assert result["is_upper_bound"]
    assert "aten.nonzero.default selects as much as possible, in blocks.2" in result["bound"]
    (group,) = result["groups"]
    assert group["band"][1] > group["peak"]["reserved_bytes"]
    # Of the least nothing is known but what is there before the step, and what the driver takes.
    assert (
        group["band"][0] - group["peak"]["driver_bytes"]
        < sum(group["terms"][n] for n in ("parameters", "optimizer")) + 2**20
    )
    text = memory_to_text(estimate, "it")
    assert text[0].startswith("AT MOST: ")
    assert any(line.startswith("an upper bound: aten.nonzero.default selects") for line in text)


def test_a_recurrent_layer_has_a_range():
    """An LSTM is priced from nothing of its buffers to all of them, and not refused whole."""
    plan = PLAN | {"model": {"entry": "tests.helpers.estimated:recurrent"}}
    plan |= {"batch": {"micro": 64, "seq_len": 256}}
    result = memory_to_json(checking.estimate_memory(plan, memory="1GiB", fixes=False))
    assert result["is_upper_bound"]
    assert "lstm is a recurrent layer" in result["bound"]
    (exact,) = memory_to_json(checking.estimate_memory(PLAN, memory="1GiB", fixes=False))["groups"]
    driver_low = exact["band"][0] - exact["peak"]["allocated_bytes"]
    (group,) = result["groups"]
    low, high = group["band"]
    kept, workspace = recurrent_buffers("lstm", 64 * 256, 32, 2, 1, has_dropout=False)
    unsure = group["peak"]["allocated_bytes"] + driver_low - low
    assert 4 * kept < unsure < 4 * (kept + workspace) + 2**20
    assert high > group["peak"]["reserved_bytes"]


def test_what_is_picked_takes_no_more_than_the_bound(pool, apart):
    """All of it takes as much, to the byte."""
    most = apart.submit(picked.at_most).result()
    assert isinstance(most, dict), most
    assert pool(2).run(picked.measured, picked.LENGTH)[0] == most
    for count in (0, 5):
        found = pool(2).run(picked.measured, count)[0]
        assert {name: size for name, (size, _) in found.items() if size > most[name][0]} == {}
        assert found["forward"][0] < most["forward"][0]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"batch": {"seq_len": 16}}, "add batch: {micro: 1}"),
        ({"batch": {"micro": 2}}, "add batch: {seq_len: 2048}"),
        ({"optimizer": "adamw_8bit"}, "the step of optimizer 'adamw_8bit' cannot be traced"),
        ({"optimizer": "adafactor"}, "does not support sharded parameters"),
        ({"model": {"entry": "tests.helpers.estimated:nobody"}}, "has no 'nobody'"),
        (
            {"model": {"entry": "tests.helpers.estimated:Block"}},
            "the plan states no input for Block",
        ),
    ],
)
def test_what_is_missing_is_said(run, change, what):
    code, out, err = run(PLAN | change, "-q")
    assert (code, out) == (2, "")
    assert what in err


def test_the_text_says_where_and_why(run):
    code, out, err = run(PLAN, "--memory", "1GiB", "-q", "-v")
    assert (code, err) == (1, "")
    (row,) = [line.split() for line in out.splitlines() if line.startswith("  blocks.*.up ")]
    assert row[1:3] == ["x", "3"]
    assert "OVER by" in out
    assert "the peak of ranks 0-3 is in " in out
    assert "from the textbook formula to this estimate:\n  textbook: full_shard, 16*a/n" in out
    assert "tier 3: the whole step was traced; nothing is extrapolated" in out


def test_states_are_still_answered_without_a_model(run):
    plan = {"version": 1, "mesh": {"dp_shard": 8}, "model": {"params": "3e9"}}
    assert json.loads(run(plan, "--json")[1])["schema"] == "estimate/1"
    code, _, err = run(plan, "--fixes")
    assert code == 2
    assert "which needs a plan with a model" in err


def test_a_model_that_reads_numbers_while_it_is_built(run):
    assert result_of(run, PLAN | {"model": {"entry": "tests.helpers.estimated:dropping"}})["groups"]


def is_alive(group: int) -> bool:
    """Whether any process of a group is."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupt_ends_everything(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(PLAN | {"model": {"entry": "tests.helpers.estimated:slow_tower"}}))
    command = [sys.executable, "-m", "meshplan", "estimate", "-f", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # What runs in a shell's background ignores interrupts, and would hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("note: tracing")
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "meshplan: interrupted\n")
    for _ in range(600):  # The fork server goes when it notices that its parent has.
        if not is_alive(process.pid):
            return
        time.sleep(0.05)
    pytest.fail("a process is left")


def test_an_interrupt_in_executed_text_gives_the_same_exit_code(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(PLAN | {"model": {"entry": "tests.helpers.estimated:interrupting"}}))
    command = [sys.executable, "-m", "meshplan", "estimate", "-f", str(path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, start_new_session=True, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (130, "")


@pytest.mark.wide
def test_a_script_without_a_main_guard_is_not_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import meshplan\nprint('once')\n"
        f"estimate = meshplan.estimate_memory({PLAN!r}, memory='80GiB')\n"
        "print(estimate.fits)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("once\nTrue\n", "")


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def test_a_config_answers_without_torch_as_the_trace_does(tmp_path):
    config, path = tmp_path / "config.json", tmp_path / "plan.yaml"
    config.write_text(json.dumps(LLAMA))
    batch = {"micro": 2, "seq_len": 64}
    plan = {"version": 1, "model": {"config": "config.json"}, "mesh": {"dp_shard": 4},
            "precision": "bf16-mixed", "activation_checkpointing": "full"}  # fmt: skip
    path.write_text(json.dumps(plan | {"batch": batch}))
    code = (
        "import json, sys; from meshplan.api import checking as api;"
        "peak = api.estimate_memory(sys.argv[1]);"
        "assert 'torch' not in sys.modules;"
        "assert sum(m.num_bytes for m in peak.worst.modules) == peak.worst.peak.requested_bytes;"
        "held = {m.module: (m.count, m.terms) for m in peak.worst.modules};"
        "count, terms = held['model.layers.*.mlp.up_proj'];"
        # Three float32 matrices in four parts, two states of each and its count of steps.
        "assert (count, terms['parameters'], terms['optimizer']) == (3, 33792, 67596), terms;"
        "print(json.dumps([peak.tier, [g.peak for g in peak.groups]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tier, [told] = json.loads(done.stdout)
    traced = checking.estimate_memory(path, trace=True)
    assert (tier, traced.tier) == ("1", "3")
    for one, other in zip(told[:3], traced.worst.peak[:3], strict=True):
        assert one == pytest.approx(other, rel=0.01)


def test_what_check_refuses_is_not_traced(tmp_path):
    """Where its config tells all modules of a model, a trace could but refuse the plan again."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "plan.yaml"
    rules = [{"match": "model.lay", "place": "replicate"}]
    path.write_text(json.dumps({**PLAN, "model": {"config": "config.json"}, "rules": rules}))
    told: list[str] = []
    with pytest.raises(PlanError) as refused:
        checking.estimate_memory(path, report=told.append)
    assert [*refused.value.problems] == [*checking.check_plan(path).problems]
    assert told == []
