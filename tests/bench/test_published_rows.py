"""Rows of other sources: told, or skipped by the name of what is odd, never a crash or a guess.

Which seeded bug would this catch? A field that nobody reads or names, a number that is none,
ranks that do not make the GPUs, an exception that ends the run.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.bench import (
    mapping,
    published,
    published_time,
    residuals,
    row_check,
    time_case,
    time_mapping,
)
from tests.helpers.published_rows import FOUNDRY, MEGATRON, NANOTRON, ODD, TIMED, TITAN, changed


def test_rows_of_all_frameworks_are_timed() -> None:
    told = published_time.predict_rows(TIMED)
    assert [each["skipped"] for each in told] == [None] * 4
    assert all(each["predicted_s"] > 0 for each in told)
    assert len({each["framework"] for each in told}) == 4


def test_a_job_that_stood_still_leaves_the_score() -> None:
    """Of jobs that differ in nothing else, those of the faster mode are told, in all tables."""
    told = published_time.predict_rows([TIMED[1]])[0]["predicted_tokens_per_s_per_gpu"]
    nanotron = time_mapping.case_of(mapping.checked(TIMED[1]))
    step_s = nanotron.tokens / told / nanotron.gpus
    rows = [
        changed(TIMED[1], "measured", tokens_per_s_per_gpu=told * step_s / (step_s + waits))
        | {"id": str(waits)}
        for waits in (0, 0.2 * nanotron.stall_s, nanotron.stall_s, 2 * nanotron.stall_s)
    ]
    answers = published_time.predict_rows(rows)
    assert [each["is_stalled"] for each in answers] == [False, False, True, True]
    time = published_time.times(answers)
    assert (time["stalled"], time["errors"]["all"]["rows"]) == (2, 2)
    assert published_time.ranking(answers)["groups"] == []  # Two plans make no order.
    pairs = list(residuals.errors(rows, {"time": {"rows": answers}}, "time"))
    assert len(pairs) == 4 - 2


def test_jobs_of_other_sources_stay_however_long_they_took() -> None:
    row = changed(TIMED[0], "measured", tokens_per_s_per_gpu=1.0)
    assert not published_time.predict_rows([row])[0]["is_stalled"]


@pytest.mark.parametrize("row", TIMED, ids=["titan", "nanotron", "megatron", "foundry"])
def test_a_number_that_is_none_is_skipped_by_its_name(row: dict[str, Any]) -> None:
    rows, reasons = [], []
    for section, names in row_check.SIZES.items():
        for name in row[section].keys() & set(names):
            for value in ODD:
                rows.append(row | {section: row[section] | {name: value}})
                reasons.append(name)
    told = [published_time.predict_rows(rows), list(map(published.predict, rows))]
    for answers in told:
        for answer, name, odd in zip(answers, reasons, rows, strict=True):
            assert answer["skipped"] is not None, (name, odd)
            assert f"{name} " in answer["skipped"], (name, answer)


@pytest.mark.parametrize("row", TIMED, ids=["titan", "nanotron", "megatron", "foundry"])
def test_whatever_is_missing_or_odd_nothing_fails(row: dict[str, Any]) -> None:
    """Told or skipped, and what is told is a number."""
    rows: list[Any] = [None, [], "row", 1]
    for section in ("model", "hardware", "parallel", "training", "measured"):
        rows += [row | {section: value} for value in (None, [], "none", {})]
        rows.append({name: value for name, value in row.items() if name != section})
        for name in row[section]:
            rows += [changed(row, section, **{name: value}) for value in (None, ["x"], {"a": 1})]
            rows.append(copy.deepcopy(row))
            del rows[-1][section][name]
    told = published_time.predict_rows(rows)
    assert len(told) == len(rows)
    for answer in told:
        if answer["skipped"] is None:
            assert 0 < answer["predicted_s"] < 1e9
        else:
            assert answer["predicted_s"] is None
            assert "KeyError" not in answer["skipped"]  # That is no reason.
    published_time.times(told)
    published_time.ranking(told)
    answers = [published.predict(each) for each in rows if row is not TIMED[1]][::6]
    assert all(a["skipped"] or a["predicted_bytes"] > 0 for a in answers)


@pytest.mark.parametrize(
    ("row", "section", "fields", "reason"),
    [
        (TITAN, "parallel", {"ep": 4}, "parallel.ep 4"),
        (TITAN, "model", {"experts": 8}, "model.experts 8"),
        (TITAN, "training", {"optimizer": "8-bit AdamW"}, "8-bit AdamW"),
        (TITAN, "parallel", {"zero_stage": 2}, "zero_stage 2"),
        (TITAN, "hardware", {"gpus": 16}, "8 ranks are stated, and 16 GPUs"),
        (
            TITAN,
            "hardware",
            {"nodes": 1, "gpus_per_node": 4},
            "8 GPUs are stated, and 1 nodes of 4",
        ),
        (TITAN, "hardware", {"gpus": None}, "hardware.gpus"),
        (TITAN, "training", {"global_batch": 99}, "global_batch 99"),
        (MEGATRON, "training", {"global_batch": None}, "training.global_batch"),
        (NANOTRON, "hardware", {"gpu": "A100 SXM 80GB"}, "H100"),
        (NANOTRON, "parallel", {"sp": False}, "sp False"),
        (NANOTRON, "parallel", {"pp": 8, "tp": 1, "dp": 1}, "8 stages"),
        (NANOTRON, "training", {"compile": True}, "compile True"),
        (MEGATRON, "training", {"attention": "flash-attn 2"}, "flash-attn 2"),
        (MEGATRON, "parallel", {"cp": 2}, "cp 2"),
        (MEGATRON, "parallel", {"schedule": "interleaved 1F1B"}, "virtual stages"),
        (FOUNDRY, "training", {"activation_cpu_offload": True}, "offload"),
    ],
)
def test_what_no_rule_reads_is_skipped_by_its_name(
    row: dict[str, Any], section: str, fields: dict[str, Any], reason: str
) -> None:
    other = changed(changed(row, section, **fields), "measured", tokens_per_s_per_gpu=1000)
    if row in (TITAN, NANOTRON):
        assert reason in published.predict(other)["skipped"]
    assert reason in published_time.predict_rows([other])[0]["skipped"]


def test_how_gpus_are_spread_over_nodes_is_stated_or_follows() -> None:
    far = changed(changed(MEGATRON, "parallel", dp=8), "training", global_batch=64)

    def nodes(**fields: Any) -> tuple[int, int]:
        row = changed(far, "hardware", **fields)
        cluster = time_case.cluster_of(row)
        return cluster.nodes, cluster.gpus_per_node

    assert far["hardware"]["gpus"] == 32
    assert nodes(nodes=4, gpus_per_node=8) == nodes(nodes=4, gpus_per_node=None) == (4, 8)
    assert nodes(nodes=None, gpus_per_node=4) == (8, 4)
    with pytest.raises(mapping.SkipError, match="spread over nodes"):
        nodes(nodes=None, gpus_per_node=None)


def test_a_line_that_is_no_row_is_skipped_by_its_number(tmp_path: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps(TITAN), "", "{", "[1]"]))
    rows = row_check.read_rows(file)
    assert [row["id"] for row in rows] == ["a", "line 3", "line 4"]
    answers = [published.predict(row) for row in rows]
    assert [bool(answer["skipped"]) for answer in answers] == [False, True, True]
    assert published.summary(rows, answers)["all"]["skipped"] == 2
