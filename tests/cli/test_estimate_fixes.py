"""`meshplan estimate -f --fixes`: what would make a plan fit, and no more than it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from meshplan.cli.app import main
from meshplan.errors import Origin
from meshplan.memory.answer.estimate import margin
from meshplan.plan.plan import Plan
from meshplan.runtime.estimate import fixes as fixes_module
from meshplan.runtime.estimate.changes import (
    PlanChange,
    _batches,
    _first_blocks,
    _times,
    changes_of,
)
from meshplan.runtime.estimate.fixes import SECONDS, _FixSearch, _free, _least
from meshplan.runtime.estimate.request import decided
from meshplan.runtime.estimate.scale_down import ModelSource
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import Spec
from tests.cli.test_estimate_memory import PLAN, result_of, run
from tests.planner.test_planner import LARGE, LLAMA, job
from tests.runtime.estimate.test_estimate_tiers import TALL

__all__ = ["job", "run"]


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


def test_the_verdict_is_of_the_same_tier_above_and_below(job, capsys):
    """A change is estimated as the plan is, by its config alone."""
    path = job(LLAMA | LARGE, mesh={"dp_shard": 8}, strategy="full_shard",
               batch={"micro": 2, "accumulate": 1, "seq_len": 8192},
               hardware={"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-40gb"})  # fmt: skip

    def result(*flags: str) -> dict[str, Any]:
        main(["estimate", "-f", str(path), "--json", "-q", *flags])
        return json.loads(capsys.readouterr().out)["result"]

    plain, asked = result(), result("--fixes")
    assert asked["fixes"]
    assert {**asked, "fixes": []} == plain
    for fix in asked["fixes"]:
        alone = ("activation_checkpointing", "loss_chunks", "offload")
        if all(each.startswith(alone) for each in fix["settings"]):
            overrides = [each.replace(": ", "=", 1) for each in fix["settings"]]
            changed = result(*(flag for each in overrides for flag in ("--set", each)))
            assert changed["tier"] == plain["tier"]
            assert changed["groups"][changed["worst"]]["band"][1] == fix["high_bytes"]


@pytest.mark.parametrize(("limit", "count"), [(100, 1), (99, 2), (91, 10), (77, 24), (76, None)])
def test_the_least_of_a_change_that_fits_is_looked_for(limit, count):
    """101 - n bytes with n blocks checkpointed: one block less would not fit."""
    asked = []

    def change(number: int) -> PlanChange:
        return PlanChange(f"checkpoint {number}", "", load_spec(PLAN), count=number)

    def high_of(part: PlanChange) -> int:
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
        "settings": ['rules: [{match: ["blocks.{0..8}"], activation_checkpointing: full}]'],
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
    source = ModelSource(entry="tests.helpers.estimated:tower", origin=Origin("<test>"))
    _, plan = decided(load_spec(PLAN | more), source)
    change = _times(plan, 2)
    assert change.spec.mesh["dp_shard"] == 8
    assert change.part is not None
    between = range(change.fails + 1, change.count)
    assert {n: change.part(n).setting for n in between} == parts
    if parts and more:
        assert change.part(3).spec.hardware.nodes == 3
    assert change.further().spec.mesh["dp_shard"] == 16


@pytest.mark.parametrize(
    ("micro", "halves"), [(12, [(6, 2), (3, 4)]), (2, [(1, 2)]), (1, []), (7, [])]
)
def test_a_batch_is_halved_as_long_as_it_can_be(micro, halves):
    source = ModelSource(entry="tests.helpers.estimated:tower", origin=Origin("<test>"))
    _, plan = decided(load_spec(PLAN | {"batch": {"micro": micro, "seq_len": 64}}), source)
    found, change = [], next(_batches(plan), None)
    while change is not None:
        found.append((change.spec.batch.micro, change.spec.batch.accumulate))
        assert (
            change.text
            == f"micro batch {micro} to {found[-1][0]}, accumulated {found[-1][1]} times"
        )
        change = change.further() if change.further is not None else None
    assert found == halves


@pytest.mark.parametrize("packed", [None, 100 << 20, 60 << 20])
def test_segments_that_grow_are_a_fix_where_less_is_reserved(packed: int | None) -> None:
    high, reserved = 110 << 20, 100 << 20
    group = mock.Mock(packed_bytes=packed, band=(0, high))
    group.peak.reserved_bytes = reserved
    estimate = mock.Mock(groups=[group], limit_bytes=90 << 20)
    estimate.worst.band = (0, high)
    found = [(fix.setting, fix.total_bytes, fix.fits) for fix in _free(estimate)]
    less = high - margin(reserved) + margin(60 << 20)
    expected = [("allocator: expandable", less, True)]
    assert less <= 90 << 20
    assert found == (expected if packed == 60 << 20 else [])


class _Bytes:
    """Counts bytes by what a spec states, instead of a trace."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now, self.seconds, self.asked = 0.0, seconds, 0

    def of(self, spec: Spec) -> int:
        return (
            20
            + 40 * spec.batch.micro // 4
            + (20 if spec.activation_checkpointing.mode != "full" else 0)
            + (20 if spec.loss_chunks == 1 else 0)
        )

    def again(self, spec: Spec) -> Any:
        self.now += self.seconds
        self.asked += 1
        return mock.Mock(host=None, worst=mock.Mock(band=(0, self.of(spec))))

    def search(self, limit: int) -> tuple[_FixSearch, Plan]:
        source = ModelSource(entry="tests.helpers.estimated:tower", origin=Origin("<test>"))
        _, plan = decided(load_spec(PLAN | {"batch": {"micro": 4, "seq_len": 64}}), source)
        estimate = mock.Mock(limit_bytes=limit, worst=mock.Mock(band=(0, self.of(plan.spec))))
        return _FixSearch(plan, estimate, self.again, lambda text: None), plan


MICRO_1, MICRO_2 = "batch: {micro: 1, accumulate: 4}", "batch: {micro: 2, accumulate: 2}"
FULL, CHUNKS = "activation_checkpointing: full", "loss_chunks: 8"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (60, [{CHUNKS, MICRO_2}, {CHUNKS, FULL}, {MICRO_2, FULL}]),
        (50, [{CHUNKS, MICRO_1}, {FULL, MICRO_1}]),
        (30, [{CHUNKS, FULL, MICRO_1}]),
        (29, [{CHUNKS, FULL, MICRO_1}]),
    ],
)
def test_changes_are_combined_where_no_single_one_fits(limit: int, expected: list[set[str]]):
    """100 bytes at first; checkpointing and chunks save 20 each, the batch up to 30."""
    search, plan = _Bytes().search(limit)
    singles = search.singles(list(changes_of(plan)))
    assert singles
    assert not any(fix.fits for fix in singles)
    found = search.combined()
    assert [set(fix.settings) for fix in found] == expected
    assert [fix.fits for fix in found] == [limit >= 30] * len(found)
    assert found[0].setting == "; ".join(found[0].settings)


def test_the_search_ends_in_time_and_says_what_it_left_out(monkeypatch):
    of_test = _Bytes(seconds=2.5)
    monkeypatch.setattr(fixes_module.time, "monotonic", lambda: of_test.now)
    search, plan = of_test.search(limit=29)
    changes = list(changes_of(plan))
    search.singles(changes)
    search.combined()
    assert of_test.now <= max(SECONDS, 3 * of_test.seconds)
    assert of_test.asked == 3
    assert {change.text for change in changes[3:]} <= {*search.left_out}
