"""`sequence_parallel` beside auto, of a config: what the live model gives, and what it refuses.

Which seeded bug would this catch? A gather in front of a module that is handed its input under
another name, a norm whose gradient is forgotten, a head that is given parts of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import make_plan
from meshplan.spec.reader import load_spec
from tests.assign.test_known_styles import CASES, decided, styles

TAKEN = frozenset(
    {
        "qwen3, tied", "gpt2", "llama", "llama with biases", "llama, heads of its own",
        "llama, few words", "llama, words whole", "mistral", "qwen2, tied", "granite",
        "gpt2, odd words",
    }
)  # fmt: skip
DEFAULT = ("qwen3, tied",)


def marked(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in cases]


@pytest.mark.parametrize("case", marked(c for c in CASES if c in TAKEN))
def test_a_config_gives_what_the_data_flow_gives(case: str) -> None:
    config, size, more = CASES[case]
    live, told = decided(config, size, {"sequence_parallel": True} | more)
    assert told.assignment.crossings
    assert told.assignment.crossings == live.assignment.crossings
    assert styles(told) == styles(live)
    assert told.digest() == live.digest()


@pytest.mark.parametrize("case", marked(c for c in CASES if c not in TAKEN))
def test_what_the_data_flow_refuses_is_refused(case: str) -> None:
    config, size, more = CASES[case]
    more = {"sequence_parallel": True} | more
    with pytest.raises(PlanError, match="sequence_parallel"):
        decided(config, size, more)
    base = {"version": 1, "mesh": {"tp": size}, "tp_plan": "auto"}
    with pytest.raises(PlanError, match="sequence_parallel"):
        make_plan(load_spec(base | more), from_mapping(config))
