"""`meshplan estimate -f` at its boundary: the contract, groups, limits, what cannot be told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
from meshplan.render.memory import memory_to_json, memory_to_text
from meshplan.runtime.apart import run_apart
from meshplan.runtime.fixes import _Change, _first_blocks, _least, _times
from meshplan.runtime.foretell import _imagine, _worth_cutting
from meshplan.runtime.question import Question, decided
from meshplan.runtime.repeats import Repeats
from meshplan.runtime.shrink import Source
from tests import estimated, picked

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
        (
            "filling",
            (
                "aten.nonzero.default",
                "blocks.1 (estimated.py:",
                "nor is there an upper",
                "what aten.ones.default in blocks.1 makes is larger",
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
    code, out, err = run(PLAN | {"model": {"entry": f"tests.estimated:{entry}"}}, "-q")
    assert (code, out) == (2, "")
    assert err.startswith("meshplan: 1 problem\n")
    assert "    fix: " in err
    for word in words:
        assert word in err


def test_what_a_mask_picks_has_an_upper_bound():
    plan = PLAN | {"model": {"entry": "tests.estimated:picking"}}
    estimate = api.estimate_memory(plan, memory="1GiB", fixes=False)
    result = memory_to_json(estimate)
    assert result["is_upper_bound"]
    assert "all is picked that aten.nonzero.default could pick, in blocks.2" in result["bound"]
    (group,) = result["groups"]
    assert group["band"][1] > group["peak"]["reserved_bytes"]
    # Of the least nothing is known but what is there before the step.
    assert group["band"][0] < sum(group["terms"][n] for n in ("parameters", "optimizer")) + 2**20
    text = memory_to_text(estimate, "it")
    assert text[0].startswith("AT MOST: ")
    assert any(line.startswith("an upper bound: all is picked") for line in text)


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
        ({"optimizer": "adamw_8bit"}, "torch has no optimizer 'adamw_8bit'"),
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
    code, out, err = run(PLAN, "--memory", "1GiB", "-q", "-v")
    assert (code, err) == (1, "")
    (row,) = [line.split() for line in out.splitlines() if line.startswith("  blocks.*.up ")]
    assert row[1:3] == ["x", "3"]
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
    result = result_of(run, plan, "--tier", "2")
    assert result["tier"] == 2
    assert "found again to the byte with" in result["certified"]
    assert "the composed step (tier 1) has the same peak, to the byte" in result["certified"]
    check_is_whole(result, whole_log(plan, "high_tower"))


def check_is_whole(result: dict[str, Any], log: EventLog) -> None:
    """Whether the first group needs what the step that was traced whole does."""
    group = result["groups"][0]
    terms = group["terms"]
    workspaces = terms.pop("library workspaces")
    assert group["peak"]["requested_bytes"] - workspaces == log.peak.live_bytes
    traced = {term: size for term, size in log.terms_at_peak.items() if size}
    if result["tier"] == 1:  # It knows gradients and losses sooner: before they are reduced.
        for found in (terms, traced):
            found["temporaries"] += sum(found.pop(n, 0) for n in ("gradients", "logits and loss"))
    assert terms == traced
    assert group["peak"]["reserved_bytes"] - workspaces == reserve(log).reserved_bytes


TALL = PLAN | {"model": {"entry": "tests.estimated:high_tower"}}


@pytest.mark.parametrize(
    "more",
    [
        {"clip_grad_norm": 1.0, "batch": {"micro": 2, "seq_len": 16, "accumulate": 2}},
        pytest.param({"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}, marks=pytest.mark.wide),
        pytest.param({"strategy": "zero1", "precision": "bf16-mixed"}, marks=pytest.mark.wide),
        pytest.param({"mesh": {"pp": 2, "dp_shard": 2}, "batch": {"micro": 4, "seq_len": 16},
                      "pipeline": {"schedule": "1F1B", "microbatches": 4}}, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_where_blocks_repeat_a_step_is_composed_and_is_the_whole_one(run, more):
    """A rule left out of the replay, or a block too few, would be seen here."""
    result = result_of(run, TALL | more)
    assert result["tier"] == 1
    assert "composed by rules" in result["certified"]
    if "clip_grad_norm" in more:
        check_modules(result["groups"][0], {"table": 1, "blocks.*.up": 24, "head": 1})
    check_is_whole(result, whole_log(TALL | more, "high_tower"))
    low, high = result["groups"][0]["band"]
    driver = result["groups"][0]["peak"]["driver_bytes"]
    whole = result_of(run, TALL | more, "--tier", "3") if "mesh" in more else None
    if whole is not None:  # What is composed has the wider band.
        assert low < whole["groups"][0]["band"][0]
        assert high > whole["groups"][0]["band"][1] > driver


@pytest.mark.parametrize(
    ("change", "flags", "what"),
    [
        ({}, ("--tier", "2"), "tier 2 cannot answer: the model has no long list of equal blocks"),
        ({"compile": True}, ("--tier", "1"), "tier 1 cannot answer: the replay of a step has no"),
        ({"model": {"params": "1e6"}}, ("--tier", "3"), "--tier is about the peak of a plan's"),
    ],
)
def test_a_tier_that_cannot_answer_says_why(run, change, flags, what):
    code, out, err = run(PLAN | change, "-q", *flags)
    assert (code, out) == (2, "")
    assert what in err
    assert "    fix: " in err


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


@pytest.mark.parametrize(("limit", "count"), [(100, 1), (99, 2), (91, 10), (77, 24), (76, None)])
def test_the_least_of_a_change_that_fits_is_looked_for(limit, count):
    """101 - n bytes with n blocks checkpointed: one block less would not fit."""
    asked = []

    def change(number: int) -> _Change:
        return _Change(f"checkpoint {number}", "", load_spec(PLAN), count=number)

    def high_of(part: _Change) -> int:
        asked.append(part.count)
        return 101 - part.count

    whole = replace(change(24), part=change)
    found = _least(whole, high_of, limit) if high_of(whole) <= limit else None
    assert (None if found is None else found.change) == (
        f"checkpoint {count}" if count not in (None, 24) else None
    )
    assert len(asked) <= 1 + whole.num_parts


def test_the_first_blocks_are_named_as_a_rule_matches_them():
    names = ("encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2")
    part = _first_blocks(load_spec(PLAN), names, 4)
    assert part.text == "checkpoint 4 of 5 blocks"
    assert part.setting == (
        'rules: [{match: ["encoder.{0..1}", "decoder.{0..1}"], activation_checkpointing: full}]'
    )
    assert _first_blocks(load_spec(PLAN), names, 1).spec.rules[-1].match[0].text == "encoder.0"


@pytest.mark.wide
def test_as_few_blocks_as_fit_are_checkpointed(run):
    plan = TALL | {"batch": {"micro": 64, "seq_len": 64}}

    def high(change: dict[str, Any]) -> int:
        return result_of(run, plan | change)["groups"][0]["band"][1]

    def of(count: int) -> dict[str, Any]:
        rule = {"match": f"blocks.{{0..{count - 1}}}", "activation_checkpointing": "full"}
        return {"rules": [rule]}

    limit = high(of(9))
    assert high(of(8)) > limit
    fixes = result_of(run, plan, "--memory", str(limit), "--fixes", code=1)["fixes"]
    found = {fix["change"]: fix for fix in fixes}
    assert found["checkpoint 9 of 24 blocks"] == {
        "change": "checkpoint 9 of 24 blocks",
        "setting": 'rules: [{match: ["blocks.{0..8}"], activation_checkpointing: full}]',
        "high_bytes": limit,
        "fits": True,
    }
    assert found["checkpoint every block"]["high_bytes"] < limit


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({}, {5: "mesh: {dp_shard: 5}", 6: "mesh: {dp_shard: 6}", 7: "mesh: {dp_shard: 7}"}),
        ({"mesh": {"dp_shard": 4, "tp": 2}, "tp_plan": "auto",
          "hardware": {"gpu": "h100-sxm-80gb", "gpus_per_node": 4, "nodes": 2}},
         {3: "mesh: {dp_shard: 6, tp: 2}"}),
        ({"hardware": {"gpu": "h100-sxm-80gb", "gpus_per_node": 4, "nodes": 1}}, {}),
    ],
)  # fmt: skip
def test_gpus_are_added_by_whole_nodes(more, parts):
    source = Source(entry="tests.estimated:tower", origin=Origin("<test>"))
    _, plan = decided(load_spec(PLAN | more), source)
    change = _times(plan, 2)
    assert change.spec.mesh["dp_shard"] == 8
    assert change.part is not None
    between = range(change.fails + 1, change.count)
    assert {n: change.part(n).setting for n in between} == parts
    if parts and more:
        assert change.part(3).spec.hardware.nodes == 3
    assert change.further().spec.mesh["dp_shard"] == 16


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
    traced = api.estimate_memory(path, trace=True)
    assert (tier, traced.tier) == ("1", "3")
    for one, other in zip(told[:3], traced.worst.peak[:3], strict=True):
        assert one == pytest.approx(other, rel=0.01)
