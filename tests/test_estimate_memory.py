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

from meshplan import api
from meshplan.cli import main
from meshplan.errors import Origin
from meshplan.memory import EventLog, Term, reserve
from meshplan.memory.extrapolate import Blocks, NotRepeatingError, extrapolate, is_same
from meshplan.memory.log import Event, Storage
from meshplan.reader import load_spec
from meshplan.runtime.apart import run_apart
from meshplan.runtime.foretell import Question, _imagine, _worth_cutting, decided
from meshplan.runtime.repeats import Repeats
from meshplan.runtime.shrink import Source
from tests import estimated

ROOT = Path(__file__).resolve().parent.parent

PLAN: dict[str, Any] = {
    "version": 1,
    "mesh": {"dp_shard": 4},
    "model": {"entry": "tests.estimated:tower"},
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
    low, high = group["band"]
    assert low < peak["reserved_bytes"] + peak["driver_bytes"] < high < result["limit_bytes"]
    assert group["at"]["phase"] in ("forward", "loss", "backward", "step")
    assert (group["fits"], result["fits"], result["tier"]) == (True, True, 3)
    assert (result["limit_bytes"], result["is_upper_bound"]) == (141 * 10**9, False)
    assert result["fixes"] == []


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
    plan = PLAN | {"model": {"entry": "tests.estimated:Uneven"}}
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


@pytest.mark.wide
def test_too_large_is_an_honest_no_and_each_fix_is_estimated(run):
    plan = PLAN | {"mesh": {"dp_shard": 1}, "batch": {"micro": 256, "seq_len": 512}}
    limit = result_of(run, plan)["groups"][0]["band"][1] - 1
    result = result_of(run, plan, "--memory", str(limit), "--fixes", code=1)
    assert result["fits"] is False
    fixes = {fix["setting"]: fix for fix in result["fixes"]}
    halved = fixes["batch: {micro: 128, accumulate: 2}"]
    assert halved["fits"]
    smaller = plan | {"batch": {"micro": 128, "accumulate": 2, "seq_len": 512}}
    assert result_of(run, smaller)["groups"][0]["band"][1] == halved["high_bytes"]
    full = result_of(run, plan | {"activation_checkpointing": "full"})["groups"][0]
    assert fixes["activation_checkpointing: full"]["high_bytes"] == full["band"][1]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("asking", ("aten._local_scalar_dense.default", "blocks.1 (estimated.py:")),
        ("picking", ("aten.nonzero.default", "blocks.2 (estimated.py:")),
        ("ruleless", ("meshplan_tests::half", "blocks.0 (estimated.py:")),
    ],
)
def test_what_cannot_be_traced_is_named(run, entry, words):
    code, out, err = run(PLAN | {"model": {"entry": f"tests.estimated:{entry}"}}, "-q")
    assert (code, out) == (2, "")
    assert err.startswith("meshplan: 1 problem\n")
    assert "    fix: " in err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"batch": {"seq_len": 16}}, "add batch: {micro: 1}"),
        ({"batch": {"micro": 2}}, "add batch: {seq_len: 2048}"),
        ({"optimizer": "lion"}, "torch has no optimizer 'lion'"),
        ({"optimizer": "adafactor"}, "does not step on parameters that lie in parts"),
        ({"model": {"entry": "tests.estimated:nobody"}}, "has no 'nobody'"),
        ({"model": {"entry": "tests.estimated:Block"}}, "nothing says what Block takes"),
    ],
)
def test_what_is_missing_is_said(run, change, what):
    code, out, err = run(PLAN | change, "-q")
    assert (code, out) == (2, "")
    assert what in err


def test_the_text_says_where_and_why(run):
    code, out, err = run(PLAN, "--memory", "1GiB", "-q")
    assert (code, err) == (1, "")
    assert "OVER by" in out
    assert "the peak of ranks 0-3 is in " in out
    assert "from the textbook to this figure:\n  textbook: full_shard, 16*a/n" in out
    assert "tier 3: the whole step was traced; nothing is extrapolated" in out


def test_states_are_still_answered_without_a_model(run):
    plan = {"version": 1, "mesh": {"dp_shard": 8}, "model": {"params": "3e9"}}
    assert json.loads(run(plan, "--json")[1])["schema"] == "estimate/1"
    code, _, err = run(plan, "--fixes")
    assert code == 2
    assert "no plan with a model" in err


def whole_log(plan: dict[str, Any], entry: str) -> EventLog:
    """Of rank 0, with all blocks."""
    source = Source(entry=f"tests.estimated:{entry}", origin=Origin("<test>"))
    (imagined,) = run_apart(_imagine, [(Question(spec=load_spec(plan), source=source), 0)])
    return imagined.log


@pytest.mark.parametrize(
    "more",
    [
        {"clip_grad_norm": 1.0, "batch": {"micro": 2, "seq_len": 16, "accumulate": 2},
         "activation_checkpointing": {"mode": "full", "every": 2}},
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.wide),
        pytest.param({"strategy": "zero1"}, marks=pytest.mark.wide),
        pytest.param({"mesh": {"dp_replicate": 4}, "clip_grad_norm": 1.0}, marks=pytest.mark.wide),
        pytest.param({"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto",
                      "activation_checkpointing": "full"}, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_few_blocks_tell_the_whole(run, more):
    plan = PLAN | {"model": {"entry": "tests.estimated:high_tower"}} | more
    result = result_of(run, plan)
    assert result["tier"] == 2
    assert "found again to the byte with" in result["certified"]
    group = result["groups"][0]
    log = whole_log(plan, "high_tower")
    workspaces = group["terms"].pop("library workspaces")
    assert group["peak"]["requested_bytes"] - workspaces == log.peak.live_bytes
    assert group["terms"] == {term: size for term, size in log.terms_at_peak.items() if size}
    assert group["peak"]["reserved_bytes"] - workspaces == reserve(log).reserved_bytes


def repeats(plan: dict[str, Any]) -> Repeats | None:
    source = Source(entry=plan["model"]["entry"], origin=Origin("<test>"))
    return _worth_cutting(*decided(load_spec(plan), source))


def test_only_equal_blocks_are_left_out():
    plan = PLAN | {"model": {"entry": "tests.estimated:high_tower"}}
    found = repeats(plan)
    assert found is not None
    assert (found.blocks.lists, found.blocks.period, found.counts) == (("blocks",), 1, (24,))
    assert repeats(plan | {"model": {"entry": "tests.estimated:of_many_kinds"}}) is None
    assert repeats(plan | {"model": {"entry": "tests.estimated:tower"}}) is None
    for rule in (
        {"match": "blocks.0", "activation_checkpointing": "full"},
        {"match": "blocks.{0..22}", "unit": False},
        {"match": "blocks.23.up", "place": "replicate"},
    ):
        assert repeats(plan | {"rules": [rule]}) is None, rule


def test_what_does_not_repeat_is_refused():
    made = Storage(Term.ACTIVATIONS, "aten.mm.default", "blocks.0")

    def log(*sizes: int) -> EventLog:
        births = tuple(Event(size, n, 0) for n, size in enumerate(sizes))
        return EventLog((made,) * len(sizes), births, ("forward",))

    blocks = Blocks(("blocks",))
    sums = {n: sum(e.delta for e in extrapolate(log(8), log(8, 4), blocks, n).events)
            for n in (0, 1, 5)}  # fmt: skip
    assert sums == {0: 12, 1: 16, 5: 32}
    grown = extrapolate(log(16), log(24), blocks, 2)
    assert [event.delta for event in grown.events] == [40]
    with pytest.raises(NotRepeatingError):
        extrapolate(log(8, 4), log(8), blocks, 1)
    assert not is_same(log(8, 4), log(4, 8, 4))


def test_a_model_that_reads_numbers_while_it_is_built(run):
    assert result_of(run, PLAN | {"model": {"entry": "tests.estimated:dropping"}})["groups"]


def test_nothing_recomputed_lives_on(run):
    """With tp the hook that lets go of activations is not called for what runs again."""
    tp = {"mesh": {"tp": 2}, "tp_plan": "auto"}
    again = whole_log(PLAN | tp | {"activation_checkpointing": "full"}, "tower")
    assert again.by_phase["step"][1] == whole_log(PLAN | tp, "tower").by_phase["step"][1]


def is_alive(group: int) -> bool:
    """Whether any process of a group is."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupt_ends_everything(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(PLAN | {"model": {"entry": "tests.estimated:slow_tower"}}))
    command = [sys.executable, "-m", "meshplan", "estimate", "-f", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # What runs in a shell's background ignores interrupts, and would hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("note: imagining")
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    for _ in range(600):  # The fork server goes when it notices that its parent has.
        if not is_alive(process.pid):
            return
        time.sleep(0.05)
    pytest.fail("a process is left")


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
        "import json, sys; from meshplan import api;"
        "peak = api.estimate_memory(sys.argv[1]);"
        "assert 'torch' not in sys.modules;"
        "print(json.dumps([peak.tier, [g.peak for g in peak.groups]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tier, [told] = json.loads(done.stdout)
    traced = api.estimate_memory(path, trace=True)
    assert (tier, traced.tier) == ("1", "3")
    for one, other in zip(told[:3], traced.worst.peak[:3], strict=True):
        assert one == pytest.approx(other, rel=0.01)
