"""`meshplan diff`: every difference is told once, and what it costs is what each plan costs."""

from __future__ import annotations

import json

import pytest

from meshplan.api import checking
from meshplan.api.planning import plan_of_lock, search_plan
from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.planner.answers.difference import difference, side_of
from meshplan.planner.lock.lock import lock_path, read
from meshplan.spec.match import compile_selector
from meshplan.spec.spec import Selector
from tests.planner.test_planner import LLAMA, PLAN, job

__all__ = ["job"]

WHOLE = {"mesh": {"dp_shard": 8}, "strategy": "full_shard",
         "batch": {"micro": 4, "accumulate": 2, "seq_len": 1024}}  # fmt: skip


@pytest.fixture
def two(job, tmp_path):
    """Two plan files of one model."""

    def write(*fields, config=LLAMA):
        out = []
        for number, each in enumerate(fields):
            path = job(config, **(WHOLE | each))
            out.append(path.rename(tmp_path / f"{number}.yaml"))
        return out

    return write


def compared(paths):
    return difference(*(side_of(path.name, checking.decide(path)) for path in paths))


def as_dict(items):
    return {each.what: (each.old, each.new) for each in items}


def test_what_is_decided_otherwise(two):
    rules = [{"match": "model.layers.{1..3}", "activation_checkpointing": "full"}]
    found = compared(two({}, {
        "mesh": {"dp_replicate": 2, "dp_shard": 4}, "strategy": "hybrid_shard_zero2",
        "rules": rules, "optimizer": "sgd", "batch": {"micro": 2, "accumulate": 4, "seq_len": 1024},
    }))  # fmt: skip
    assert as_dict(found.fields) == {
        "mesh.dp_shard": (8, 4), "mesh.dp_replicate": (None, 2), "batch.micro": (4, 2),
        "batch.accumulate": (2, 4), "strategy": ("full_shard", "hybrid_shard_zero2"),
        "optimizer": ("adamw", "sgd"),
    }  # fmt: skip
    assert as_dict(found.blocks) == {
        "model.layers.{1..3} activation_checkpointing": ("none", "full"),
        "model.layers.{0..5} reshard_after_forward": ("true", "false"),
    }
    assert found.placements == ()
    assert not found.is_same


@pytest.mark.parametrize(
    "other",
    [
        {"mesh": {"tp": 2, "dp_shard": 4}, "tp_plan": "auto"},
        {"mesh": {"tp": 2, "dp_shard": 4}, "tp_plan": "none",
         "rules": [{"match": "model.layers.{2,4}.mlp.up_proj", "place": {"tp": "colwise"}},
                   {"match": "model.layers.{2,4}.mlp.gate_proj", "place": {"tp": "colwise"}},
                   {"match": "model.layers.{2,4}.mlp.down_proj", "place": {"tp": "rowwise"}}]},
        {"mesh": {"dp_replicate": 8}, "strategy": "ddp"},
    ],
)  # fmt: skip
def test_patterns_cover_every_tensor_that_lies_otherwise_and_no_other(two, other):
    paths = two({}, other)
    found = compared(paths)
    plans = [checking.decide(path) for path in paths]
    layouts = [
        {f: p.stored.spell(plan.mesh) for f, p in plan.assignment.tensors.items()} for plan in plans
    ]
    assert found.placements
    told = {}
    for each in found.placements:
        for fqn in layouts[0]:
            if any(compile_selector(Selector("glob", part)).matches(fqn)
                   for part in each.what.split(", ")):  # fmt: skip
                assert fqn not in told
                told[fqn] = (each.old.split(" float")[0], each.new.split(" float")[0])
    assert told == {
        fqn: (layouts[0][fqn], layouts[1][fqn])
        for fqn in layouts[0]
        if layouts[0][fqn] != layouts[1][fqn]
    }


def test_figures_are_those_of_each_plan(two, job):
    one, two_ = two({}, {"batch": {"micro": 2, "accumulate": 4, "seq_len": 1024}})
    found = compared([one, two_])
    for path, side in ((one, found.old), (two_, found.new)):
        decision = search_plan(path)
        assert side.step_s.value == pytest.approx(decision.chosen.seconds)
        assert side.peak_bytes.value == decision.chosen.memory.worst.band[1]
        assert side.tokens_per_s.value == pytest.approx(8 * 8 * 1024 / side.step_s.value)
    # Every microbatch gathers blocks twice and scatters gradients once; the root stays gathered.
    by_kind = [
        {kind: size for (kind, _), size in side.routes.items()} for side in (found.old, found.new)
    ]
    root = [
        2 * sum(p.info.numel for p in side.plan.assignment.tensors.values() if p.unit == "")
        for side in (found.old, found.new)
    ]
    blocks = [each["all_gather"] - once for each, once in zip(by_kind, root, strict=True)]
    assert 0 < root[0] == root[1]
    assert blocks[1] == 2 * blocks[0] > 0
    assert by_kind[1]["reduce_scatter"] == 2 * by_kind[0]["reduce_scatter"]


def test_what_cannot_be_told_says_why(two):
    found = compared(two({}, {"mesh": {"tp": 2, "dp_shard": 4}, "tp_plan": "auto"}))
    assert found.new.traffic_bytes.value is None
    assert "unknown from a config" in found.new.traffic_bytes.why
    assert found.old.traffic_bytes.value > 0
    found = compared(two({}, {"hardware": None}))
    assert "the plan states no hardware" in found.new.step_s.why
    assert found.new.peak_bytes.value > 0


def test_other_hardware_is_told(two):
    """Whatever the key: figures follow from it."""
    one = {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    other = {**one, "gpu": "a100-sxm-40gb", "intra": "100GB/s", "host_memory": "1TiB",
             "headroom": 0.2}  # fmt: skip
    found = compared(two({"hardware": one}, {"hardware": other}))
    assert as_dict(found.fields) == {
        "hardware.gpu": ("h100-sxm-80gb", "a100-sxm-40gb"), "hardware.intra": (None, "100 GB/s"),
        "hardware.host_memory": (None, "1,024.0 GiB"), "hardware.headroom": (0.0, 0.2),
    }  # fmt: skip
    assert not found.is_same


def test_two_versions_of_one_lock(job, capsys):
    """The older one holds for no plan file any more, and says by itself what was chosen."""
    path = job()
    assert main(["plan", "-f", str(path), "-q"]) == 0
    lock, old = lock_path(path), path.with_name("old.lock.yaml")
    old.write_text(lock.read_text())
    assert main(["diff", str(old), str(lock)]) == 0
    assert "the same plan" in capsys.readouterr().out
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mesh": {"tp": 2, "dp_shard": 4}}))
    assert main(["plan", "-f", str(path), "-q"]) == 0
    capsys.readouterr()
    assert main(["diff", str(old), str(lock), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    before, after = read(old).content, read(lock).content
    told = {each["what"]: (each["old"], each["new"]) for each in result["fields"]}
    assert told["mesh.tp"] == (None, 2)
    assert told["inputs.plan"][0] != told["inputs.plan"][1]
    for side, content in ((result["old"], before), (result["new"], after)):
        assert side["step_s"] == content["expected"]["step_s"]
        assert side["peak_bytes"] == max(group["high_bytes"] for group in content["memory"])
        rate = content["expected"]["tokens_per_s_per_gpu"]
        assert side["tokens_per_s"] == pytest.approx(8 * rate)
    placed = {each["what"]: (each["old"], each["new"]) for each in result["placements"]}
    assert placed == {
        name: (before["tensors"].get(name), after["tensors"].get(name))
        for name in before["tensors"] | after["tensors"]
        if before["tensors"].get(name) != after["tensors"].get(name)
    }
    assert main(["diff", str(old), str(lock)]) == 1
    assert "mesh.tp" in capsys.readouterr().out


def test_what_only_the_planner_knows_is_taken_from_the_lock(tmp_path, capsys):
    """Of a live model no config tells: its lock does, but for no plan that --set changes."""
    paths = []
    for name, samples in (("one", 64), ("two", 32)):
        content = PLAN | {"model": {"entry": "tests.helpers.planned:Alone"},
                          "batch": {"global": samples},
                          "input": {"shape": [2, 64, 512], "dtype": "fp32"}}  # fmt: skip
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(json.dumps(content))
        assert main(["plan", "-f", str(paths[-1]), "-q"]) == 0
    locks = [str(lock_path(path)) for path in paths]
    said = [read(lock_path(path)).content for path in paths]
    capsys.readouterr()
    assert main(["diff", *locks, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    for side, content in zip((result["old"], result["new"]), said, strict=True):
        assert side["step_s"] == content["expected"]["step_s"]
        assert side["peak_bytes"] == max(group["high_bytes"] for group in content["memory"])
        assert side["tokens_per_s"] is None
    assert result["step_s_difference"] == result["new"]["step_s"] - result["old"]["step_s"]
    main(["diff", *locks, "--json", "--set", "optimizer=sgd"])
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["old"]["step_s"], result["old"]["peak_bytes"]) == (None, None)
    words = ["plan", "-f", str(paths[0]), "--retarget", "gpus_per_node=2", "-q", "--json"]
    assert main([*words, "--dry-run"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["retarget"]["new"]["step_s"] == result["step_s"]
    assert result["retarget"]["new"]["peak_bytes"] == result["peak_bytes"]
    assert result["retarget"]["old"]["step_s"] == said[0]["expected"]["step_s"]


def test_locks_and_exit_codes(job, capsys):
    path = job()
    assert main(["plan", "-f", str(path), "-q"]) == 0
    lock = str(lock_path(path))
    assert main(["diff", str(path), lock]) == 0
    assert "the same plan" in capsys.readouterr().out
    assert main(["diff", lock, str(path), "--json"]) == 0
    other = path.with_name("other.yaml")
    chosen = plan_of_lock(lock)[1].chosen
    other.write_text(json.dumps(json.loads(path.read_text()) | {"mesh": {"dp_replicate": 8}}))
    capsys.readouterr()
    assert main(["diff", lock, str(other), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    result = content["result"]
    assert content["schema"] == "diff/1"
    assert result["same"] is False
    for name in ("step_s", "tokens_per_s", "peak_bytes", "traffic_bytes"):
        old, new = result["old"][name], result["new"][name]
        assert result[f"{name}_difference"] == pytest.approx(new - old)
    assert {"what": "mesh.dp_shard", "old": 8, "new": None} in result["fields"]
    assert main(["diff", lock, str(other)]) == 1
    assert "mesh.dp_shard" in capsys.readouterr().out
    assert chosen == search_plan(path).chosen.stated
    path.write_text(json.dumps(json.loads(path.read_text()) | {"optimizer": "sgd"}))
    capsys.readouterr()
    assert main(["diff", lock, str(other)]) == 2
    assert f"{lock}: this lock was made for another state of its plan" in capsys.readouterr().err
    path.unlink()
    with pytest.raises(SpecError, match="which is not in the same folder"):
        plan_of_lock(lock)
    assert main(["diff", lock, str(other)]) == 2
    assert main(["diff", str(other), str(other), "-f", str(other)]) == 2
