"""`meshplan verify`: what it makes small, what it finds, and that it finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshplan
from meshplan.cli.app import main
from meshplan.errors import Origin
from meshplan.memory import StateBytes
from meshplan.plan.verdict import RankReport, Shift, StateComparison, TrainingRun, Verdict
from meshplan.render.verify import verdict_to_text
from meshplan.runtime.estimate.scale_down import (
    ModelSource,
    model_of_source,
    shrink,
    source_of_config,
)
from meshplan.runtime.estimate.tiny_config import shrink_layers, shrink_sizes
from meshplan.traffic import Route, RouteDifference
from tests.helpers import models

HERE = Origin("<test>")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Tower(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tower() -> nn.Module:
    return Tower(32, 6)


class Tied(nn.Module):
    """Its first and its last stage share a weight, and a unit with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(24, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Broken(Tied):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).view(-1, 65)


def broken() -> nn.Module:
    return Broken()


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.rand_like(x))


class Partly(nn.Module):
    """Its forward leaves a parameter out, as vision models leave the token of masked patches."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.zeros(1, 32))
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Captioner(nn.Module):
    """Reads an image and a text."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, 32, 4, 4), nn.Embedding(24, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 24)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text) + self.patches(image).flatten(2).mean(dim=2)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def halve_gradients(module: nn.Module) -> None:
    """A seeded bug: everything before this module learns half as fast."""
    forward = module.forward

    def halved(x: torch.Tensor) -> torch.Tensor:
        return forward(x / 2 + x.detach() / 2)

    module.forward = halved


PLAN = {
    "version": 1,
    "hardware": {"nodes": 1, "gpus_per_node": 8},
    "strategy": "full_shard",
    "model": {"entry": f"{__name__}:tower"},
    "input": {"shape": [1, 32], "dtype": "float32"},
    "batch": {"micro": 4, "global": 64},
}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`run(plan, *flags)`: (exit code, stdout, stderr) of the verb."""

    def of(plan: dict[str, Any], *flags: str) -> tuple[int, str, str]:
        path = tmp_path / "plan.yaml"
        path.write_text(json.dumps(plan))  # JSON is YAML.
        code = main(["verify", "-f", str(path), "-q", *flags])
        return code, *capsys.readouterr()

    return of


def test_a_right_plan_is_ok(run):
    code, out, err = run(PLAN, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)["result"]
    assert (result["ok"], result["ranks"], result["refusal"]) == (True, 2, "")
    assert result["made_smaller"] == ["mesh: dp_shard 8 to 2", "blocks 6 to 2 blocks"]
    assert result["parameters"]["judged"] == result["tensors"] == 14
    assert result["parameters"]["worst"] < 1e-3
    assert result["losses"] == pytest.approx(result["losses_of_one_process"], abs=1e-5)
    norms = zip(result["gradient_norms"], result["gradient_norms_of_one_process"], strict=True)
    assert all(a == pytest.approx(b, rel=1e-4) for a, b in norms)
    # Accumulated twice: two units gathered twice per microbatch, and the root, which forward does
    # not give back, once; which gradients there are; the loss.
    for rank in result["by_rank"]:
        assert rank["collectives"] == 2 * (2 * 2) + 1 + 2 * 3 + 1 + 1
        assert rank["held_bytes"] == rank["predicted_bytes"] > 0
        assert rank["differences"] == rank["not_predicted"] == []


def test_a_halved_gradient_differs(run):
    rules = [{"match": "blocks.1", "apply": f"{__name__}:halve_gradients"}]
    code, out, _ = run(PLAN | {"rules": rules, "strategy": "ddp"})
    assert code == 1
    assert out.splitlines()[-1].endswith("plan.yaml: DIFFERS in loss, gradient norm, parameters")
    assert "DIFFERENT: blocks.0.norm.weight" in out
    assert "DIFFERENT: head" not in out


@pytest.mark.parametrize(
    "pipeline", [{}, pytest.param({"schedule": "ZBVZeroBubble"}, marks=pytest.mark.wide)]
)
def test_stages_that_share_a_weight_hold_what_is_predicted(run, pipeline):
    # The sum over stages must not leave a shard of the gradient behind it.
    plan = {
        "version": 1, "mesh": {"pp": 2, "dp_shard": 2}, "strategy": "full_shard",
        "model": {"entry": f"{__name__}:Tied"}, "batch": {"micro": 4, "seq_len": 8},
        "pipeline": {"schedule": "1F1B", "microbatches": 2} | pipeline, "clip_grad_norm": 1.0,
    }  # fmt: skip
    code, out, _ = run(plan)
    assert code == 0, out
    assert "bytes of state: ok, as predicted on all 4 ranks" in out


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 2}, "strategy": "full_shard"},
        {"mesh": {"dp_shard": 2}, "strategy": "zero1"},
        {"mesh": {"dp_replicate": 2}, "strategy": "ddp", "ddp": {"find_unused_parameters": True}},
        {"mesh": {"tp": 2}, "tp_plan": "auto"},
    ],
)
def test_a_parameter_that_is_left_out_has_no_state_of_the_optimizer(run, plan):
    model = {"entry": f"{__name__}:Partly"}
    code, out, _ = run({"version": 1, "model": model, "input": PLAN["input"],
                        "batch": {"micro": 4}} | plan)  # fmt: skip
    assert code == 0, out
    assert "bytes of state: ok, as predicted on all 2 ranks" in out


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"pp": 2}, {"tp": 2}])
def test_a_model_of_two_inputs(run, mesh):
    inputs = {
        "image": {"shape": [1, 3, 8, 8], "dtype": "float32"},
        "text": {"shape": [1, 6], "dtype": "int64"},
    }
    plan = {"version": 1, "mesh": mesh, "tp_plan": "auto" if "tp" in mesh else "none",
            "model": {"entry": f"{__name__}:Captioner"}, "batch": {"micro": 4}}  # fmt: skip
    code, out, _ = run(plan | {"input": inputs})
    assert code == 0, out
    code, *said = run(plan | {"input": inputs["image"]})
    assert code != 0
    assert "Captioner.forward() missing 1 required positional argument: 'text'" in "".join(said)
    assert "every input of the forward, as in input: {image: {shape: [2, 16]" in "".join(said)


def test_a_plan_that_torch_would_run_wrongly_does_not_run(run):
    # The weight between the two products is whole and computes on parts of the features.
    rules = [{"match": "layers.*.attn.{wq,wv}", "place": {"tp": "colwise"}},
             {"match": "layers.*.attn.wo", "place": {"tp": "rowwise"}}]  # fmt: skip
    plan = {"version": 1, "mesh": {"tp": 8}, "rules": rules,
            "model": {"entry": "meshplan.runtime.demo_model:build"}}  # fmt: skip
    code, out, _ = run(plan)
    assert code == 1
    assert "does NOT RUN" in out


def test_what_only_the_whole_model_does_not_divide_by_is_found(run):
    rules = [{"match": "blocks.*.up", "place": {"tp": "colwise"}},
             {"match": "blocks.*.down", "place": {"tp": "rowwise"}}]  # fmt: skip
    code, out, _ = run({**PLAN, "strategy": "full_shard", "rules": rules,
                        "hardware": {"nodes": 3, "gpus_per_node": 8},
                        "batch": {"micro": 4}, "mesh": {"dp_shard": 8, "tp": 3}})  # fmt: skip
    assert code == 1
    assert "of size 64 does not divide by tp 3" in out
    assert "does NOT RUN" in out


def test_a_model_that_draws_random_numbers_cannot_be_compared(run):
    shape = {"shape": [1, 8], "dtype": "float32"}
    code, out, err = run(PLAN | {"model": {"entry": f"{__name__}:Random"}, "input": shape})
    assert (code, out) == (2, "")
    assert "its forward draws random numbers: two calls on the same inputs differ" in err


def test_a_model_that_says_nothing_of_its_input(run):
    code, _, err = run({k: v for k, v in PLAN.items() if k != "input"})
    assert code == 2
    assert "the plan states no input for Tower" in err


def test_a_model_larger_than_this_machine_is_cut_before_it_is_built(run, monkeypatch):
    monkeypatch.setattr("meshplan.runtime.estimate.scale_down.MODEL_LIMIT", 60_000)
    code, out, _ = run(PLAN, "--json")
    assert code == 0
    assert "blocks 6 to 2 blocks" in json.loads(out)["result"]["made_smaller"]


def test_a_model_that_stays_too_large_is_refused(run, monkeypatch):
    monkeypatch.setattr("meshplan.runtime.estimate.scale_down.MODEL_LIMIT", 20_000)
    code, out, err = run(PLAN)
    assert (code, out) == (2, "")
    assert "no small model could be built: the model has 0.0 GiB" in err


def test_a_forward_that_fails_is_named_and_not_the_size_of_the_model(run):
    entry = "tests.runtime.verify.test_verify:broken"
    plan = {k: v for k, v in PLAN.items() if k != "input"}
    batch = {"micro": 4, "seq_len": 8}
    code, out, err = run({**plan, "model": {"entry": entry}, "batch": batch})
    assert (code, out) == (2, "")
    assert "the forward of Broken fails at tests/runtime/verify/test_verify.py:" in err
    assert "in one process too" in err
    assert "no small model" not in err


def test_a_loss_over_parts_of_the_vocabulary_is_compared_too(run):
    plan = {"version": 1, "mesh": {"tp": 2}, "loss_parallel": True,
            "model": {"entry": "meshplan.runtime.demo_model:build"},
            "rules": [{"match": "{embed,head}", "place": {"tp": "vocab"}}]}  # fmt: skip
    code, out, _ = run(plan, "--json")
    assert code == 0
    for rank in json.loads(out)["result"]["by_rank"]:
        assert rank["differences"] == rank["not_predicted"] == []
        assert rank["sized_by_routing"] == 0


def small(plan: dict[str, Any], source: ModelSource, max_ranks: int = 16) -> Any:
    return shrink(meshplan.load_spec({"version": 1, **plan}), source, max_ranks)


def test_every_axis_stays_and_rules_that_lose_their_match_are_told():
    plan = {
        "mesh": {"dp_replicate": 4, "dp_shard": 16, "tp": 8},
        "input": PLAN["input"],
        "batch": {"micro": 3, "accumulate": 7, "seq_len": 4096},
        "rules": [
            {"match": "blocks.{4..5}", "place": "replicate"},
            {"match": "blocks.*", "reshard_after_forward": 8},
            {"match": "nothing", "place": "replicate"},
        ],
    }
    found = small(plan, ModelSource(entry=f"{__name__}:tower", origin=HERE))
    # Resharding to fewer ranks needs more than two of them.
    assert dict(found.spec.mesh) == {"dp_replicate": 2, "dp_shard": 4, "tp": 2}
    assert (found.spec.batch.micro, found.spec.batch.accumulate) == (2, 2)
    assert found.unmatched == ("rules[0] (blocks.{4..5}): blocks.{4..5}",)
    # What never matched anything stays an error.
    assert [rule.optional for rule in found.spec.rules] == [True, False, False]
    assert len(model_of_source(found.source).blocks) == 2


def test_too_many_ranks_are_refused():
    plan = {"mesh": {"dp_replicate": 4, "dp_shard": 16, "tp": 8}, "input": PLAN["input"]}
    source = ModelSource(entry=f"{__name__}:tower", origin=HERE)
    with pytest.raises(meshplan.SpecError) as caught:
        small(plan, source, 4)
    assert "has 8 ranks, more than 4" in str(caught.value)
    assert "--ranks 8" in str(caught.value)


def test_lists_of_unequal_blocks_are_left_alone():
    source = ModelSource(entry="tests.helpers.models:ResNet", origin=HERE)
    plan = {"strategy": "ddp", "mesh": {"dp_replicate": 2}}
    images = {"input": {"shape": [1, 3, models.IMAGE, models.IMAGE], "dtype": "float32"}}
    found = small(plan | images, source)
    assert len(model_of_source(found.source).blocks) == 3


def test_configs_keep_ratios_and_what_divides():
    from transformers import FalconConfig, Gemma2Config, LlamaConfig, LlavaConfig, MixtralConfig

    llama = LlamaConfig(
        vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8,
    )  # fmt: skip
    tiny, notes = shrink_sizes(llama, layers=4, tp=8, small_tp=2, ep=1)
    assert tiny.num_attention_heads // tiny.num_key_value_heads == 8
    assert tiny.hidden_size == tiny.num_attention_heads * tiny.head_dim
    assert tiny.vocab_size % 2 == tiny.intermediate_size % 2 == 0
    assert "num_hidden_layers 80 to 4" in notes
    assert llama.num_hidden_layers == 80  # The original stays.
    tiny, _ = shrink_sizes(llama, layers=4, tp=16, small_tp=2, ep=1)
    assert (tiny.num_key_value_heads, tiny.num_attention_heads) == (1, 8)  # Fewer than tp.
    uneven = LlamaConfig(vocab_size=32_001, intermediate_size=11_009)
    tiny, _ = shrink_sizes(uneven, layers=2, tp=2, small_tp=2, ep=1)
    assert tiny.vocab_size % 2 == tiny.intermediate_size % 2 == 1
    tiny, _ = shrink_sizes(MixtralConfig(), layers=2, tp=1, small_tp=1, ep=4)
    assert (tiny.num_local_experts, tiny.num_experts_per_tok) == (8, 2)
    tiny, _ = shrink_sizes(MixtralConfig(num_experts_per_tok=4), layers=2, tp=1, small_tp=1, ep=1)
    assert tiny.num_experts_per_tok == 2
    tiny, _ = shrink_sizes(FalconConfig(), layers=2, tp=1, small_tp=1, ep=1)
    assert tiny.hidden_size == tiny.num_attention_heads * tiny.head_dim < 200  # A property.
    gemma = Gemma2Config(num_hidden_layers=26)
    tiny, _ = shrink_layers(gemma, 4)
    assert tiny.layer_types == gemma.layer_types[:4]
    assert tiny.hidden_size == gemma.hidden_size
    tiny, _ = shrink_sizes(LlavaConfig(), layers=2, tp=1, small_tp=1, ep=1)
    assert tiny.text_config.num_hidden_layers == tiny.vision_config.num_hidden_layers == 2


@pytest.mark.parametrize("embedded", [768, 512])
def test_a_small_model_projects_its_embeddings_if_the_model_does(embedded: int) -> None:
    """OPT's head has a bias-free projection before it where the two widths differ."""
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(hidden_size=768, word_embed_proj_dim=embedded)
    small, _ = shrink_sizes(config, layers=2, tp=4, small_tp=4, ep=1)
    assert small.hidden_size == 64
    assert (small.word_embed_proj_dim == small.hidden_size) is (embedded == 768)


def test_a_config_file_is_built_as_its_first_architecture(tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaModel", "LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert source_of_config(tmp_path, HERE).architecture == "LlamaModel"


BYTES = StateBytes(1, 1, 1, 1)
RANK = RankReport(
    measured=BYTES, predicted=BYTES, sent=(), num_collectives=1, collective_bytes=8, unknown=()
)
TRAINED = TrainingRun(losses=(1.0, 0.9, 0.8), norms=(1.0, 1.0))
SHIFT = Shift(name="w", is_buffer=False, is_visible=True, moved=1.0, apart=0.005, allowed=0.01)
RIGHT = Verdict(
    world=1, notes=(), unmatched=(), together=TRAINED, alone=TRAINED, ranks=(RANK,),
    moved=StateComparison(shifts=(SHIFT,)),
)  # fmt: skip
SENT = (RouteDifference(Route("all_reduce", ("tp",), 8), 1, 2),)


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        ({}, []),
        ({"together": replace(TRAINED, losses=(1.0, 0.9, 0.82))}, ["loss"]),
        ({"together": replace(TRAINED, losses=(1.0, 0.9, float("nan")))}, ["loss"]),
        ({"together": replace(TRAINED, norms=(1.0, 2.0))}, ["gradient norm"]),
        ({"moved": StateComparison(shifts=(SHIFT, replace(SHIFT, apart=0.5)))}, ["parameters"]),
        (
            {"moved": StateComparison(shifts=(SHIFT, replace(SHIFT, apart=float("nan"))))},
            ["parameters"],
        ),
        (
            {"moved": StateComparison(shifts=(replace(SHIFT, apart=0.5, is_buffer=True),))},
            ["buffers"],
        ),
        (
            {"moved": StateComparison(shifts=(replace(SHIFT, moved=0.0, apart=1, allowed=0),))},
            ["parameters"],
        ),
        ({"ranks": (replace(RANK, measured=StateBytes(1, 1, 1, 2)),)}, ["bytes held"]),
        ({"ranks": (replace(RANK, sent=SENT),)}, ["collectives"]),
        ({"ranks": (replace(RANK, sent=SENT, unknown=("axis pp",)),)}, []),
    ],
)
def test_each_finding(changed, finding):
    verdict = replace(RIGHT, **changed)
    assert verdict.findings() == finding
    assert verdict.is_ok is not bool(finding)


def test_what_the_routing_decides_is_said():
    verdict = replace(RIGHT, ranks=(replace(RANK, num_routed=12),))
    for told, end in ((RIGHT, "the one rank"), (verdict, "whose sizes depend on token routing")):
        line = next(x for x in verdict_to_text(told, "plan") if x.startswith("collectives"))
        assert line.endswith(end)
