"""The table of keys is what the code does.

Which seeded bug would this catch? A key without a row, a default that the values do not have, a key
that the planner chooses and the table does not say so.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from meshplan.errors import SpecError
from meshplan.layout.mesh import AXES
from meshplan.layout.optimizers import SHAPED_STATES
from meshplan.layout.schedules import SCHEDULES
from meshplan.layout.styles import EXPERT_STYLE, STYLE_NAMES
from meshplan.planner.lock.admission import _CHOICES
from meshplan.planner.lock.lock import overrides
from meshplan.spec import schema
from meshplan.spec.keys import FREEABLE, KEEP, KEYS, OBJECTIVE, TIME_LIMIT_S, freed
from meshplan.spec.reader import load_spec
from meshplan.spec.rules import RULE_KEYS
from meshplan.spec.spec import (
    OPTIMIZER_STATES,
    PRECISION_WORDS,
    STRATEGY_WORDS,
    HardwareSpec,
    Spec,
)

REFERENCE = (Path(__file__).resolve().parent.parent / "docs/reference/plan.md").read_text()
STATED_ONLY = {
    "version", "model", "hardware.gpus_per_node", "hardware.gpu", "hardware.memory",
    "hardware.intra", "hardware.inter", "batch.seq_len", "input.shape",
}  # fmt: skip
"""Keys without a default: what they say nobody else knows."""
UNSTATED = {"loss_parallel", "experts.capacity", "hardware.nodes"}
"""Beside the keys that are chosen, what a lock may state because another choice needs it."""
BASE = {
    "version": 1, "mesh": {"dp_shard": 2, "tp": 2, "pp": 2}, "batch": {"micro": 4, "accumulate": 1},
    "pipeline": {"schedule": "1F1B", "virtual": 1, "microbatches": 4, "split": [["a"], ["b"]]},
    "strategy": "full_shard", "activation_checkpointing": "full", "offload": "params",
    "tp_plan": "hf", "sequence_parallel": True, "context": {"attention": "all_gather"},
    "loss_chunks": 8, "allocator": "expandable",
}  # fmt: skip


def paths_of_the_format() -> set[str]:
    sections = {
        "hardware": schema._HARDWARE, "batch": schema._BATCH, "pipeline": schema._PIPELINE,
        "context": schema._CONTEXT, "experts": schema._EXPERTS,
    }  # fmt: skip
    return {
        f"{name}.{key}" if name in sections else name
        for name in schema._PLAN
        for key in sections.get(name, [""])
    }


def test_every_key_of_the_format_has_a_row_or_no_default():
    paths = paths_of_the_format()
    rows = {key.path for key in KEYS} | STATED_ONLY
    paths -= {"input", "solve"}  # Of these, keys of a row of their own each.
    assert paths - rows == set()
    assert rows - paths == {
        *(f"mesh.{axis}" for axis in AXES), "input.dtype", "input.shape", "solve.objective",
        "solve.robust", "solve.time_limit", "solve.keep",
    }  # fmt: skip


def test_the_reference_has_a_row_for_every_key_style_and_word():
    """Which seeded bug would this catch? A new key, style, strategy or schedule nobody explains."""
    rows = set(re.findall(r"^\| `([\w.]+)` \|", REFERENCE, re.MULTILINE))
    styles = {*STYLE_NAMES, EXPERT_STYLE}
    stated = (paths_of_the_format() | {key.path for key in KEYS}) - {"input", "solve", "rules"}
    wanted = stated | {"input.shape"} | set(RULE_KEYS) | styles
    assert rows == wanted
    quoted = set(re.findall(r"[`\[{, ]([\w-]+)(?=[`\]}:, ])", REFERENCE))
    words = {*STRATEGY_WORDS, *PRECISION_WORDS, *OPTIMIZER_STATES, *SHAPED_STATES, *SCHEDULES,
             *schema._DDP}  # fmt: skip
    assert {word for word in words if not word.startswith("_")} - quoted == set()


PLAIN = [
    key for key in KEYS
    if " " not in key.default
    and key.path not in ("rules", "context.attention", "clip_grad_norm", "solve.robust")
]  # fmt: skip
"""Keys whose default can be stated; others follow from what else the plan says, or are no value."""


@pytest.mark.parametrize("key", PLAIN, ids=lambda key: key.path)
def test_what_is_left_out_is_what_its_row_says(key):
    """Stated as the row has it, a plan says nothing else than without the key."""
    bare = {"version": 1, "mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 4}}
    if key.path.startswith("hardware."):
        bare["hardware"] = {"gpus_per_node": 2}
    if key.path == "mesh.dp_replicate":
        bare["mesh"] = {"tp": 2}
    stated, left_out = load_spec(bare, [f"{key.path}={key.default}"]), load_spec(bare)
    if key.path.startswith("mesh."):
        assert stated.mesh == {**dict(left_out.mesh), key.path.partition(".")[2]: 1}
    elif key.path.startswith("solve."):
        name = {"time_limit": "time_limit_s"}.get(key.path[6:], key.path[6:])
        usual = {"objective": OBJECTIVE, "time_limit_s": TIME_LIMIT_S, "keep": KEEP}
        assert stated.solve == {name: usual[name]}
    elif key.path == "offload":
        assert not any(dataclasses.astuple(stated.offload) + dataclasses.astuple(left_out.offload))
    else:
        assert stated == left_out


def test_the_planner_may_choose_what_the_table_says_and_nothing_else():
    chosen = {path for path in FREEABLE if not path.startswith("mesh.")}
    assert chosen | UNSTATED == _CHOICES


@pytest.mark.parametrize("key", FREEABLE)
def test_what_is_freed_is_not_stated_any_more(key):
    spec = load_spec(BASE, overrides(freed([key])))
    if key.startswith("mesh"):
        sizes = spec.mesh if isinstance(spec.mesh, str) else spec.mesh[key.partition(".")[2]]
        assert sizes == "auto"
    else:
        assert key not in spec.origins


def test_a_headroom_is_left_only_where_it_is_stated():
    assert HardwareSpec(gpus_per_node=8).headroom == 0
    assert Spec().input is None
    with pytest.raises(SpecError):
        load_spec({"version": 1, "hardware": {"gpus_per_node": 8, "headroom": 1}})
