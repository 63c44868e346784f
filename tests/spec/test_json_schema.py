"""The JSON Schema of plan.yaml accepts what the reader accepts, and nothing else.

Which seeded bug would this catch? A decoder whose schema has another bound, word or required key.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from meshplan.errors import SpecError
from meshplan.layout.mesh import AXES
from meshplan.layout.styles import EXPERT_STYLE, PLANNED_STYLES, STYLE_NAMES
from meshplan.spec import contradictions
from meshplan.spec.json_schema import plan_schema
from meshplan.spec.keys import KEYS
from meshplan.spec.meanings import MEANINGS
from meshplan.spec.reader import load_spec

ROOT: Final = Path(__file__).parents[2]
VALID: Final = jsonschema.Draft7Validator(plan_schema())
GOOD: Final[dict[str, list[Any]]] = {
    "model": [{"params": "3B"}, {"params": 10**9}, {"config": "c.json"}, {"entry": "a.b:c"}],
    "hardware": [
        {"nodes": 2, "gpus_per_node": 8, "gpu": "A100 40g", "inter": "50GB/s"},
        {"gpus_per_node": 8, "memory": "80GiB", "host_memory": 10**12, "headroom": 0.1},
        {"gpus_per_node": 1, "gpu": "h100-sxm-80gb", "memory": None, "intra": "400Gb/s"},
    ],
    "mesh": ["auto", [2, 4], {"dp_shard": 4, "ep": "2 in dp_shard"}, {"pp": 2, "tp": "Auto"}],
    "strategy": ["full_shard", "HSDP", "auto", "zero3"],
    "precision": ["bf16-mixed", {"param": "bf16", "reduce": 32}, {"master": "torch.float32"}],
    "batch": [
        {"micro": 2, "seq_len": 128}, {"global": 64, "accumulate": "auto", "per_rank": True},
        {"accumulate": {"0": 8, "4": 1}, "micro": "auto"},
    ],
    "input": [
        {"shape": [4, 3, 32, 32], "dtype": "float32"}, {"shape": [2]},
        {"image": {"shape": [1, 3, 8, 8], "dtype": "fp32"}, "y": {"shape": [2], "dtype": "int64"}},
        {"shape": {"shape": [2, 8], "dtype": "int64"}},
    ],
    "activation_checkpointing": [
        "full", "Selective", "auto", {"mode": "selective", "save": ["mm"], "every": 2},
        {"mode": "full", "every": 2, "budget": None}, {"mode": "auto", "budget": 0.5},
        {"mode": "auto", "budget": "4GiB"},
    ],
    "offload": ["none", "optimizer", {"params": True, "optimizer": "auto"}, {}],
    "pipeline": [
        {"schedule": "1F1B", "microbatches": 8, "virtual": 1}, {"split": "auto"},
        {"split": [["embed", "layers.0"], ["head"]], "microbatches": "auto"},
    ],
    "context": [{"attention": "all_to_all", "balance": False}, {}],
    "experts": [{"capacity": 1.5}],
    "tp_plan": ["hf", "AUTO", "none"],
    "sequence_parallel": [True, False],
    "loss": ["mean", "tokens"],
    "loss_chunks": [8, "fused", "auto"],
    "ddp": [{"bucket_mb": 25, "static_graph": True}],
    "clip_grad_norm": [1.0, 0.5],
    "optimizer": ["adamw", "sgd"],
    "allocator": ["expandable", "auto"],
    "solve": [{"objective": "time", "time_limit": "5min", "keep": 2}, {"time_limit": 30},
              {"robust": "10%"}, {"robust": 0.5, "objective": "TIME"}],
    "rules": [
        [{"match": "layers.*", "place": "shard"}, {"match": {"type": "Linear"}, "unit": False}],
        [{"match": ["embed", {"param": "bias"}], "place": {"tp": "colwise", "dp_shard": "S(0)"}}],
        [{"match": "a", "place": {"tp": "packed_colwise(64, 16, 16)", "cp": "R"}, "why": "so"}],
        [{"match": "a", "stage": "first", "reshard_after_forward": 4, "optional": True}],
        [{"match": "/a\\d/", "precision": "32-true", "offload": "params", "apply": "a.b:c"}],
        [],
    ],
}  # fmt: skip
"""Values that the reader accepts, of every key."""
JUNK: Final[list[Any]] = [
    None, True, False, 0, 1, 2, 7, -3, 0.5, 1.5, 1e30, 10**12, "", " ", "auto", "none", "full",
    "S(0)", "Replicate()", "colwise", "packed_colwise(1)", "packed_colwise(2)", "packed_colwise",
    "ep_dispatch_experts", "80GiB", "80 gb", "50GB/s", "50Gb/s", "50 GBit/s", "3e9", "-1B", "0",
    "0.5", "2 in dp_shard", "0 in dp_shard", "a.b:c", "a-b", "h100", "H100 sxm", "a100", "80gb",
    "b200", "gpu", "5min", "0s", "1f1b", "ADAMW", "32", 32, "bf16", "first", [], [1], [[]], ["a"],
    [None], [["a"]], {}, {"tp": 2}, {"mode": "none"}, {"mode": "full", "budget": 0.5}, {"a": 1},
    {"type": "Linear"}, {"type": "Linear", "param": "x"}, {"match": "a"}, [{"match": "a"}],
    {"params": 1}, {"shape": [1]}, {"gpus_per_node": 8}, {"0": 2}, {"x": 2}, {"tp": "colwise"},
]  # fmt: skip


def accepts(plan: dict[str, Any]) -> str:
    try:
        load_spec(plan)
    except SpecError as error:
        return str(error)
    return ""


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a plan."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    inner = [value[key] for key in keys if isinstance(value[key], (dict, list))]
    return found + [place for each in inner for place in places(each)]


@pytest.mark.parametrize("seed", range(10))
def test_random_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several sections contradict is not the schema's."""
    for check in ("_devices", "_batch"):
        monkeypatch.setattr(contradictions, check, lambda spec: [])
    rng, valid = random.Random(seed), 0
    for _ in range(1000):
        keys = rng.sample(list(GOOD), rng.randint(1, 3))
        plan = {"version": 1} | {key: copy.deepcopy(rng.choice(GOOD[key])) for key in keys}
        for _ in range(rng.choice((0, 1, 1, 2))):
            container, key = rng.choice(places(plan))
            kind = rng.random()
            if kind < 0.8:
                container[key] = copy.deepcopy(rng.choice(JUNK))
            elif kind < 0.9:
                del container[key]
            elif isinstance(container, dict):
                container[rng.choice(["x", "tp", "micro", "mode"])] = 1
        problem = accepts(plan)
        if "cannot borrow ranks" in problem or "does not divide" in problem:
            continue
        wrong = [error.message for error in VALID.iter_errors(plan)]
        assert bool(wrong) == bool(problem), (plan, problem, wrong)
        valid += not problem
    assert 250 < valid < 750


def test_every_placement_on_every_axis() -> None:
    words = [
        *STYLE_NAMES, *PLANNED_STYLES, EXPERT_STYLE, "R", "REPLICATE", "replicate()", "Auto",
        "S(0)", "s(-1)", "SHARD( 1 )", "Shard", "partial", "P(sum)", "packed_colwise(2)",
        "packed_colwise(1)", "packed_colwise(3, 0)", "packed_colwise(8,4)", "COLWISE", "", None, 1,
        True, [], {},
    ]  # fmt: skip
    for axis in (*AXES, "dp"):
        for word in words:
            plan = {"version": 1, "rules": [{"match": "a", "place": {axis: word}}]}
            assert VALID.is_valid(plan) == (not accepts(plan)), (axis, word, accepts(plan))


def test_each_value_is_good_alone() -> None:
    for key, values in GOOD.items():
        for value in values:
            assert VALID.is_valid({"version": 1, key: value}), (key, value)


@pytest.mark.parametrize("path", sorted((ROOT / "plans").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_plans_of_the_project(path: Path) -> None:
    VALID.validate(yaml.safe_load(path.read_text()))


def test_every_default_is_described() -> None:
    text = json.dumps(plan_schema())
    assert all(json.dumps(f"If left out: {key.default}")[1:-1] in text for key in KEYS)


def test_every_key_is_described_and_no_description_is_at_two_keys() -> None:
    """Which seeded bug would this catch? Keys with one decoder whose forms are one object."""
    text = json.dumps(plan_schema())
    for keys in MEANINGS.values():
        for path, means in keys.items():
            assert text.count(f'"description": {json.dumps(f"{means}.")[:-1]}') == 1, path


def test_the_published_schema_is_this_one() -> None:
    published = ROOT / "docs" / "plan.schema.json"
    assert json.loads(published.read_text()) == plan_schema()
