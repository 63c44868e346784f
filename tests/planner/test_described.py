"""A live model that is what its config describes is planned as its config is, and traced then."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshplan
from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.memory.log.driver import with_workspaces
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.fastest import decide
from meshplan.planner.problem.request import request_of_file
from meshplan.runtime.fake_step.default_loop import loop_of
from meshplan.runtime.fake_step.step import fake_step
from meshplan.runtime.live import certify
from meshplan.runtime.live.matches_config import Described, described
from meshplan.runtime.live.planned import request_of_entry, request_of_model
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec

GPU = "h100-sxm-80gb"
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "use_cache": False,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 256, "use_cache": False}


def built(name: str = "Llama", **more: Any) -> nn.Module:
    import transformers

    if name == "GPT2":
        config = transformers.GPT2Config(**GPT2 | more)
        return transformers.GPT2LMHeadModel(config)
    config = getattr(transformers, f"{name}Config")(**SIZES | more)
    return getattr(transformers, f"{name}ForCausalLM")(config)


llama = built


def plan_of(model: dict[str, str], **more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "model": model,
        "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": GPU},
        "mesh": "auto",
        "strategy": "auto",
        "activation_checkpointing": "auto",
        "precision": "bf16-mixed",
        "batch": {"global": 16, "seq_len": 128},
    } | more


def found_of(model: nn.Module, **more: Any) -> Described | str:
    spec = load_spec(plan_of({"entry": "x:y"}, **more))
    return described(model, graph_of(model), spec)


@pytest.mark.parametrize(
    ("name", "device"), [("Llama", "meta"), ("Llama", "cpu"), ("Qwen3", "meta"), ("GPT2", "cpu")]
)
def test_described(name: str, device: str) -> None:
    """Wherever it is, whatever numbers it has."""
    with torch.device(device):
        model = built(name)
    found = found_of(model)
    assert isinstance(found, Described)
    assert found.graph.tensors == graph_of(model).tensors
    assert len(found.shorter(2).blocks()) == 2


class Adapted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.add = inner, nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + self.add(x)


def _adapt(model: Any) -> None:
    model.model.layers[1].mlp = Adapted(model.model.layers[1].mlp)


def _hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, out: out)


def _freeze(model: Any) -> None:
    model.model.embed_tokens.weight.requires_grad_(False)


def _change(model: Any) -> None:
    model.model.layers[2].self_attn.is_causal = False


def _fix(model: Any) -> None:
    model.model.layers[2].mlp.eval()


def _replace(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x


OTHERS = [
    ({"use_cache": True}, None, "set use_cache=False"),
    ({"attn_implementation": "eager"}, None, "its attention is 'eager'"),
    ({"attention_dropout": 0.1}, None, "attention_dropout"),
    ({}, _adapt, "changed after it was built"),
    ({}, _hook, "changed after it was built"),
    ({}, _change, "changed after it was built"),
    ({}, _fix, "in eval mode"),
    ({}, _replace, "changed after it was built"),
    ({}, _freeze, "in shape, dtype or requires_grad"),
    ({}, lambda model: model.to(torch.bfloat16), "changed after it was built"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "change", "words"), OTHERS)
def test_another(sizes: dict[str, Any], change: Callable[[Any], None] | None, words: str) -> None:
    with torch.device("meta"):
        model = built(num_hidden_layers=3, **sizes)
    if change is not None:
        change(model)
    found = found_of(model)
    assert isinstance(found, str)
    assert words in found


def test_classes_that_run_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As packages of kernels do to transformers."""
    with torch.device("meta"):
        model: Any = built(num_hidden_layers=3)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x)
    assert found_of(model) == "the forward of LlamaMLP was replaced by code of another file"


def test_what_plans_say_that_is_not_told() -> None:
    with torch.device("meta"):
        model = built(num_hidden_layers=3)
    stated = {"shape": [2, 16, 256], "dtype": "fp32"}
    assert "not token ids" in str(found_of(model, input=stated))
    assert "no sequence length" in str(found_of(model, batch={"global": 64}))
    rule = [{"match": "model.layers.*.mlp", "activation_checkpointing": "full"}]
    assert "no rules for" in str(found_of(model, rules=rule))
    assert found_of(nn.Linear(2, 2)) == ""


def test_a_subclass_is_another() -> None:
    import transformers

    class Mine(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    with torch.device("meta"):
        model = Mine(transformers.LlamaConfig(**SIZES))
    assert "its modules differ from those" in str(found_of(model))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """(a plan of the live model, the same plan of its config)."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SIZES))
    live, told = tmp_path / "live.yaml", tmp_path / "told.yaml"
    live.write_text(json.dumps(plan_of({"entry": "tests.planner.test_described:llama"})))
    told.write_text(json.dumps(plan_of({"config": "config.json"})))
    return live, told


def test_the_plan_is_that_of_the_config(files: tuple[Path, Path]) -> None:
    """Out of the same space, with tp and pp in it; its memory is what a trace of it says."""
    live, told = (search_plan(path) for path in files)
    assert live.chosen is not None
    assert told.chosen is not None
    assert live.num_configs == told.num_configs
    assert live.chosen.stated == told.chosen.stated
    assert {row.what for row in live.rejected} == {row.what for row in told.rejected}
    question = request_of_entry(files[0], (), None)
    of_config = request_of_file(files[1])
    assert question.traced is None
    assert (question.graph, question.few) == (of_config.graph, of_config.few)
    assert "was traced under the plan" in live.chosen.memory.certified
    assert live.chosen.memory.fits
    (group,) = live.chosen.memory.groups
    assert group.peak.requested_bytes == whole_step(live.chosen.plan)


def whole_step(plan: Plan) -> int:
    """Bytes at the peak of rank 0 with the real wrappers, nothing composed."""
    with torch.device("meta"):
        model = built()
    loop = loop_of(model, plan)
    log = fake_step(
        model, plan, loop.inputs, loop.targets, loop.loss_fn, loop.make_optimizer, 0, GPU
    )
    return with_workspaces(log, GPU).peak.live_bytes


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [
    {"tp": 2, "dp_shard": 4}, {"pp": 2, "dp_shard": 4}, {"pp": 2, "tp": 2, "dp_shard": 2},
])  # fmt: skip
def test_what_is_certified_is_traced(files: tuple[Path, Path], mesh: dict[str, int]) -> None:
    more = {"pipeline.schedule": "1F1B"} if "pp" in mesh else {}
    fields = overrides({"mesh": mesh} | more)
    decision = search_plan(files[0], fields)
    assert decision.chosen is not None
    assert decision.chosen.plan.mesh.size("tp", "pp") > 1
    found = checking.estimate_memory(
        files[0], [*fields, *overrides(decision.chosen.stated)], tier=1
    )
    assert [g.peak for g in decision.chosen.memory.groups] == [g.peak for g in found.groups]
    assert decision.chosen.memory.certified.startswith("chosen by estimates from the config")


def test_what_is_not_traced_says_so(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "_MOST_BLOCKS", 1)
    said: list[str] = []
    fields = overrides({"mesh": {"pp": 2, "dp_shard": 4}, "pipeline.schedule": "1F1B"})
    decision = search_plan(files[0], fields, report=said.append)
    assert decision.chosen is not None
    assert any("4 blocks with" in note for note in decision.chosen.memory.notes)
    assert any("estimated from the config, and not traced" in text for text in said)


def test_a_trace_that_does_not_fit_is_not_the_answer(files: tuple[Path, Path]) -> None:
    """Another plan is; and none, where no trace fits."""
    few = {"mesh": {"dp_shard": 8}, "activation_checkpointing": "none"}
    question = request_of_entry(files[0], overrides(few), None)
    first = decide(question).chosen
    assert first is not None
    asked: list[Any] = []
    over_all = tuple(replace(group, fits=False) for group in first.memory.groups)

    def over(most: int) -> Callable[[Any], Any]:
        def certified(spec: Any) -> Any:
            asked.append(spec)
            too_much = replace(first.memory, groups=over_all)
            return too_much if len(asked) <= most else "nobody traces it"

        return certified

    other = decide(replace(question, certify=over(1))).chosen
    assert other is not None
    assert len(asked) == 2
    assert other.stated != first.stated
    assert decide(replace(question, certify=over(99))).chosen is None


def test_models_in_hand_are_planned_so_too() -> None:
    said: list[str] = []
    with torch.device("meta"):
        one, other = built(), built(use_cache=True)
    plan = plan_of({"entry": "x:y"})

    def load(more: Any) -> Any:
        return load_spec(plan, more)

    assert request_of_model(one, load, report=said.append).traced is None
    assert request_of_model(other, load, report=said.append).traced is not None
    assert "is planned from the config" in said[0]
    assert "set use_cache=False" in said[1]


@contextmanager
def _in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_nothing_is_traced_in_a_process_group() -> None:
    with torch.device("meta"):
        model = built()
    spec = load_spec(plan_of({"entry": "x:y"}))
    certifier = certify.Certifier(
        model, device=GPU, limit_bytes=1, origin=None, report=lambda text: None
    )
    with _in_a_group():
        assert "already initialized" in str(certifier.of(spec))


def parallel(plan: dict[str, Any]) -> tuple[str, str]:
    """What a plan becomes on a rank, where nothing can be traced as another rank."""
    model = meshplan.parallelize(built(), plan, example_inputs=torch.zeros(4, 16).long())
    decided = model.meshplan.plan
    return str(decided.mesh), decided.digest()


@pytest.mark.wide
def test_ranks_plan_from_the_config_too(pool: Any) -> None:
    plan = plan_of({}, mesh={"tp": 2}, batch={"global": 4, "seq_len": 16})
    plan["hardware"] = plan["hardware"] | {"gpus_per_node": 2}
    del plan["model"]
    one, other = pool(2).run(parallel, plan)
    assert one == other
    assert "tp" in one[0]


class _Scores(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        return scores if self.out_features > 1 else scores.mean()


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (3, "mean squared error in float32 of output and targets of its shape"),
        (1, "the scalar that the model returns"),
    ],
)
def test_a_number_that_a_model_returns_is_its_loss(width: int, words: str) -> None:
    model = _Scores(4, width)
    stated = {"mesh": {"dp_shard": 2}, "batch": {"micro": 2}}
    spec = load_spec({"version": 1, "input": {"shape": [2, 4], "dtype": "float32"}} | stated)
    loop = loop_of(model, make_plan(spec, graph_of(model)))
    assert ("loss", words) in loop.assumed
