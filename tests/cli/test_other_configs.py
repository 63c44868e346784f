"""Every verb answers for a config of a family that meshplan does not know, as for a function.

Which seeded bug would this catch? A verb that refuses what another one answers; an answer about
another model than transformers builds; a refusal without a way forward where torch is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshplan
from meshplan.api import in_force
from meshplan.api.source import Source
from meshplan.cli.app import main

PHI = {
    "model_type": "phi", "architectures": ["PhiForCausalLM"], "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
HEAD = {
    "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "vocab_size": 128,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip


def plan_of(folder: Path, config: dict[str, Any] = PHI, **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    plan = {
        "version": 1, "model": {"config": "config.json"}, "mesh": {"dp_shard": 2},
        "strategy": "full_shard", "precision": "bf16-mixed", "activation_checkpointing": "none",
        "batch": {"micro": 2, "accumulate": 1, "seq_len": 16},
        "hardware": {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"}, **more,
    }  # fmt: skip
    path = folder / "plan.yaml"
    path.write_text(json.dumps(plan))
    return path


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("check -f {plan}", "ok, PhiForCausalLM on dp_shard 2"),
        ("show -f {plan}", "PhiForCausalLM"),
        ("estimate -f {plan}", "expected"),
        ("estimate --config {folder}/config.json --gpus 8", "parameters on 8 GPUs"),
        ("draw --what layout -f {plan}", "cut"),
        ("export -f {plan} --to accelerate --partial -o {plan}.out.yaml", ""),
        ("explain model.layers.1.mlp.fc1 -f {plan}", "Linear of PhiForCausalLM"),
        ("plan -f {plan} --dry-run --set activation_checkpointing=auto", "fits"),
        ("diff {plan} {plan}", "the same plan"),
    ],
)
def test_every_verb_answers(tmp_path, capsys, words, found):
    plan = plan_of(tmp_path)
    is_partial = words.startswith("export")
    assert main(words.format(plan=plan, folder=tmp_path).split()) == int(is_partial)
    assert found in capsys.readouterr().out


def test_the_answer_is_the_one_about_the_model_itself(tmp_path, monkeypatch):
    (tmp_path / "other_config.py").write_text(
        "import json\n"
        "from transformers import PhiConfig, PhiForCausalLM\n"
        f"CONFIG = json.loads({json.dumps(json.dumps(PHI))})\n"
        "def build():\n"
        "    return PhiForCausalLM(PhiConfig(**CONFIG))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = plan_of(tmp_path, activation_checkpointing="auto", strategy="auto")
    by_config = meshplan.search_plan(path)
    by_code = meshplan.search_plan(path, model="other_config:build")
    assert by_config.chosen is not None
    assert by_code.chosen is not None
    assert by_config.chosen.stated == by_code.chosen.stated
    assert by_config.best_s == by_code.best_s
    assert by_config.chosen.memory.worst.band == by_code.chosen.memory.worst.band


def test_another_head_of_a_known_family_is_built_too(tmp_path, capsys):
    plan = plan_of(tmp_path, HEAD)
    assert main(["check", "-f", str(plan)]) == 0
    assert "LlamaForSequenceClassification" in capsys.readouterr().out


def test_a_known_family_needs_no_torch(tmp_path):
    plan = plan_of(tmp_path, {**HEAD, "architectures": ["LlamaForCausalLM"]})
    source = Source(plan)
    assert not in_force.is_built(source, source.spec)


def test_without_transformers_the_way_forward_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(in_force, "find_spec", lambda name: None)
    assert main(["check", "-f", str(plan_of(tmp_path))]) == 2
    told = capsys.readouterr().err
    assert "model_type 'phi' is not supported" in told
    assert "install torch and transformers, which then build it" in told


def test_what_transformers_does_not_know_either_is_refused(tmp_path, capsys):
    assert main(["check", "-f", str(plan_of(tmp_path, PHI | {"model_type": "nosuch"}))]) == 2
    assert "transformers has no model_type 'nosuch'" in capsys.readouterr().err
