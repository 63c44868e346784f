"""A stated split into stages, carried over to the small model that `verify` runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshplan
from meshplan.errors import Origin
from meshplan.plan.verdict import Verdict
from meshplan.runtime.estimate.scale_down import ModelSource, model_of_source, shrink
from meshplan.runtime.estimate.small_split import small_split
from meshplan.runtime.verify.verify import verify

HERE = Origin("<test>")
INPUT = {"shape": [1, 8, 16], "dtype": "fp32"}


class Deep(nn.Module):
    """A chain of blocks between two layers."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(blocks)])
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def deep() -> nn.Module:
    return Deep(24)


class Towers(nn.Module):
    """Groups of blocks, of which both the groups and the blocks become fewer."""

    def __init__(self, groups: int, blocks: int) -> None:
        super().__init__()
        self.groups = nn.ModuleList(
            [nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4) for _ in range(blocks)])})
             for _ in range(groups)]
        )  # fmt: skip


def test_stages_begin_with_blocks_that_the_small_model_has():
    split = (("first",), ("blocks.13",), ("blocks.22", "last"))
    small, notes = small_split(split, Deep(24), Deep(8))
    assert small == (("first",), ("blocks.4",), ("blocks.7", "last"))
    assert notes == [
        "pipeline.split: blocks.13 to blocks.4", "pipeline.split: blocks.22 to blocks.7",
    ]  # fmt: skip


def test_blocks_named_one_by_one_keep_the_first_of_each_stage():
    split = (tuple(f"blocks.{n}" for n in range(20)), tuple(f"blocks.{n}" for n in range(20, 24)))
    assert small_split(split, Deep(24), Deep(4))[0] == (("blocks.0",), ("blocks.3",))


def test_stages_side_by_side_at_the_end_stay_different():
    split = (("blocks.0",), ("blocks.22",), ("blocks.23",), ("last",))
    assert small_split(split, Deep(24), Deep(8))[0] == (
        ("blocks.0",), ("blocks.6",), ("blocks.7",), ("last",),
    )  # fmt: skip


def test_lists_in_lists_and_unchanged_ones():
    split = (("groups.0.blocks.0",), ("groups.0.blocks.6",), ("groups.9.blocks.7",))
    small, _ = small_split(split, Towers(10, 8), Towers(2, 4))
    assert small == (("groups.0.blocks.0",), ("groups.0.blocks.3",), ("groups.1.blocks.3",))
    assert small_split(split, Towers(10, 8), Towers(10, 8)) == (split, [])


def test_names_of_no_module_stay_for_the_plan_to_refuse():
    split = (("blocks.0",), ("blcoks.13",))
    assert small_split(split, Deep(24), Deep(8)) == (split, [])


@pytest.mark.parametrize("begins", [13, 23])
def test_a_plan_with_a_stated_split_runs_on_a_model_of_fewer_blocks(begins: int):
    plan = {
        "version": 1, "mesh": {"pp": 2}, "input": INPUT, "batch": {"micro": 4},
        "pipeline": {"microbatches": 2, "split": [["blocks.0"], [f"blocks.{begins}"]]},
    }  # fmt: skip
    small = shrink(meshplan.load_spec(plan), ModelSource(entry=f"{__name__}:deep", origin=HERE))
    assert len(model_of_source(small.source).blocks) == 8
    verdict = verify(small, lambda line: None)
    assert isinstance(verdict, Verdict)
    assert verdict.is_ok, verdict.refusal
