"""Adapters beside a frozen model, under a plan of each kind (tests/bench/peft_cases.py).

Which seeded bug would this catch? A gradient or a state counted for a frozen parameter, a base that
training changes, an adapter cut beside a projection that is not, a gradient averaged twice, an
integer buffer that is cast, and files of adapters that have the base or another name in them.
"""

from __future__ import annotations

import pytest
import torch

from tests.bench import peft_cases
from tests.bench.peft_cases import CASES, KINDS, LAYOUTS

CELLS = [
    pytest.param(name, layout, marks=[] if (name, layout) in kept else [pytest.mark.wide])
    for kept in [{("llama/lora", "tp_fsdp"), ("gpt2/lora", "pp_fsdp"), ("llama/int8", "hybrid")}]
    for name in CASES[:3]
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_one_cell(pool, name, layout):
    pytest.importorskip("peft", reason="peft is not installed: pip install --no-deps peft")
    cell = peft_cases.run(pool(LAYOUTS[layout][0]), name, layout)
    assert cell.outcome == "pass", cell


def test_a_frozen_tower_needs_no_package(pool):
    cell = peft_cases.run(pool(4), "llava/tower", "hybrid")
    assert cell.outcome == "pass", cell


def test_there_are_20_architectures_of_every_kind():
    assert len({name.partition("/")[0] for name in CASES}) >= 20
    assert {name.partition("/")[2] for name in CASES} == KINDS.keys()


def test_a_wrong_adapter_shows(tmp_path):
    """The comparison itself: other names, other values, and the base among them are wrong."""
    from safetensors.torch import save_file

    expected = {"a.lora_A.weight": torch.ones(2, 3, dtype=torch.float64)}
    compare = peft_cases._compare_adapters
    assert "the folder has" in compare(tmp_path, expected)
    (tmp_path / "adapter_config.json").write_text("{}")
    for found, wrong in (
        ({"a.lora_A.weight": torch.ones(2, 3).double()}, ""),
        ({"a.lora_A.weight": torch.ones(2, 3)}, "a.lora_A.weight is torch.float32"),
        ({"a.lora_A.weight": torch.ones(2, 3).double() + 2e-5}, "has other values"),
        ({"a.lora_A.default.weight": torch.ones(2, 3).double()}, "other names"),
        ({**expected, "a.weight": torch.ones(1)}, "other names"),
    ):
        save_file(found, tmp_path / "adapter_model.safetensors")
        assert wrong in compare(tmp_path, expected)
        assert bool(wrong) == bool(compare(tmp_path, expected))
