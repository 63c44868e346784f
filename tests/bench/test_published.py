"""Published rows become predictions by their fields only, or are skipped with a reason.

Which seeded bug would this catch? A row told by its id, a field that is ignored, an unknown value
that is guessed at or crashes, a run out of memory that is said to fit.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.allocator import reserve
from meshplan.memory.log.events import Event, EventLog, Storage, Term
from tests.bench import mapping, pace_holdout, published, residuals
from tests.bench.frameworks import nanotron_pace as pace
from tests.bench.frameworks.nanotron import stages
from tests.bench.frameworks.nanotron_job import Job, log_of, made_of
from tests.bench.frameworks.nanotron_pace import QUEUE, lag_of, stalls
from tests.bench.time_nanotron import STALL_S, STALLED_RANK_S, stall_seconds
from tests.helpers.published_rows import NANOTRON, TITAN, changed


@pytest.mark.parametrize("row", [TITAN, NANOTRON], ids=["titan", "nanotron"])
def test_a_row_is_told_by_its_fields(row: dict[str, Any]) -> None:
    answer = published.predict(row)
    low, high = answer["band"]
    assert answer["skipped"] is None
    assert low <= answer["predicted_bytes"] <= high
    renamed = row | {"id": "other", "group": "other", "source": "other"}
    assert published.predict(renamed)["predicted_bytes"] == answer["predicted_bytes"]


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("model", {"layers": 6}),
        ("model", {"vocab": 64000}),
        ("parallel", {"dp_shard": 4}),
        ("parallel", {"tp": 2}),
        ("parallel", {"cp": 2}),
        ("training", {"local_batch": 3}),
        ("training", {"activation_checkpointing": "full"}),
        ("training", {"compile": True}),
        ("measured", {"mem_metric": "max_memory_allocated"}),
    ],
)
def test_every_field_counts(section: str, fields: dict[str, Any]) -> None:
    other = published.predict(changed(TITAN, section, **fields))
    assert other["skipped"] is None
    assert other["predicted_bytes"] != published.predict(TITAN)["predicted_bytes"]


@pytest.mark.parametrize(
    ("row", "section", "fields", "reason"),
    [
        (TITAN, "training", {"precision": "int4"}, "int4"),
        (TITAN, "training", {"activation_checkpointing": "sometimes"}, "sometimes"),
        (TITAN, "training", {"compile": "graph trainer"}, "graph trainer"),
        (TITAN, "parallel", {"impl": "JAX"}, "JAX"),
        (TITAN, "parallel", {"pp": 2}, "pipeline"),
        (TITAN, "measured", {"mem_metric": "bananas"}, "bananas"),
        (TITAN, "model", {"vocab": "250k"}, "250k"),
        (TITAN, "model", {"heads": 0}, "heads"),
        (NANOTRON, "parallel", {"zero_stage": 3}, "zero_stage 3"),
        (NANOTRON, "parallel", {"tp": 3}, "tp 3"),
        (NANOTRON, "training", {"activation_checkpointing": "full"}, "activation_checkpointing"),
    ],
)
def test_what_is_unknown_is_skipped(
    row: dict[str, Any], section: str, fields: dict[str, Any], reason: str
) -> None:
    answer = published.predict(changed(row, section, **fields))
    assert reason in answer["skipped"]
    assert answer["predicted_bytes"] is None
    assert answer["fits"] is None


def test_what_is_missing_is_skipped() -> None:
    for section in ("model", "parallel", "training"):
        row = copy.deepcopy(TITAN)
        row[section] = {}
        assert published.predict(row)["skipped"]
    assert published.predict({"id": "c"})["skipped"]


def test_what_is_too_big_does_not_fit(tmp_path: Any) -> None:
    rows = [TITAN, changed(changed(TITAN, "training", local_batch=200), "measured", fits=False)]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert published.main([str(file), "--json", str(out), "--jobs", "1"]) == 0
    told = json.loads(out.read_text())["memory"]
    assert [row["fits"] for row in told["rows"]] == [True, False]
    assert told["summary"]["all"]["false_fits"] == 0


def test_residuals_are_signed_and_by_field() -> None:
    rows = [changed(TITAN | {"id": str(n)}, "measured", peak_mem_gib=8.0) for n in range(3)]
    rows[2]["parallel"]["tp"] = 2
    told = [{"id": str(n), "skipped": None, "predicted_bytes": gib * 2**30}
            for n, gib in enumerate((4, 6, 10))]  # fmt: skip
    pairs = list(residuals.errors(rows, {"memory": {"rows": told}}, "memory"))
    lines = residuals.table(pairs, ["tp", "nodes"]).splitlines()
    assert lines[1].split() == ["1", "1", "2", "-37.5%", "37.5%", "50.0%"]
    assert lines[2].split() == ["2", "1", "1", "+25.0%", "25.0%", "25.0%"]
    told[0]["skipped"] = "why"
    assert len(list(residuals.errors(rows, {"memory": {"rows": told}}, "memory"))) == 2


def test_stages_are_cut_by_cost() -> None:
    """The head costs as much as 4 of these blocks, so 20 shares are dealt out."""
    shape = Shape(layers=16, hidden=2048, heads=32, kv_heads=32, head_dim=64, mlp=8192,
                  vocab=131072, tied=True)  # fmt: skip
    assert [s.layers for s in stages(shape, 2)] == [10, 6]
    assert [s.layers for s in stages(shape, 4)] == [5, 5, 5, 1]
    # The seventh has not got its share without the head, which is on the last one all the same.
    assert [s.layers for s in stages(shape, 8)] == [3, 2, 3, 2, 3, 2, 1, 0]
    assert [s.last for s in stages(shape, 8)] == [False] * 7 + [True]
    assert sum(sum(s.parameters(shape, 1)) for s in stages(shape, 1)) == 1_342_244_864


def test_a_lagging_device_holds_more() -> None:
    """And no more than when nothing that a collective used comes back within a step."""
    shape = Shape(layers=2, hidden=1024, heads=8, kv_heads=8, head_dim=128, mlp=4096, vocab=32768)
    job = Job(stage=stages(shape, 1)[0], rank=0, batch=2, seq_len=1024, accumulate=4, dp=2,
              tp=2, pp=1, zero=1)  # fmt: skip
    held = [reserve(log_of(shape, job, lag)).reserved_bytes for lag in (0, 40, 100, 10**6)]
    assert held[0] < held[2] < held[3]
    assert held == sorted(held)
    alone = replace(job, tp=1)
    assert reserve(log_of(shape, alone, 0)) == reserve(log_of(shape, alone, 100))
    # Whatever lags, all of it is back before the next step begins.
    for lag in (0, 10**6):
        log = log_of(shape, job, lag)
        assert not {e.storage for e in log.events if e.delta < 0} - {
            e.storage for e in log.events if e.delta > 0
        }
        live = sum(e.delta for e in log.events)
        assert live == sum(e.delta for e in log_of(shape, job, 0).events)


def test_only_the_first_microbatch_of_a_job_does_not_lag() -> None:
    shape = Shape(layers=2, hidden=256, heads=8, kv_heads=8, head_dim=32, mlp=512, vocab=1024)
    job = Job(stage=stages(shape, 1)[0], rank=0, batch=1, seq_len=128, accumulate=1, dp=2,
              tp=2, pp=1, zero=1)  # fmt: skip
    logs = {
        (count, steps): [log_of(shape, replace(job, accumulate=count), lag, steps).events
                         for lag in (0, 40)]
        for count, steps in ((1, 1), (2, 1), (1, 2))
    }  # fmt: skip
    assert {case for case, (calm, late) in logs.items() if calm == late} == {(1, 1)}


def test_memory_that_runs_out_makes_the_process_wait() -> None:
    shape = Shape(layers=2, hidden=1024, heads=8, kv_heads=8, head_dim=128, mlp=4096, vocab=8192)
    job = Job(stage=stages(shape, 1)[0], rank=0, batch=4, seq_len=2048, accumulate=4, dp=2,
              tp=2, pp=1, zero=1)  # fmt: skip
    least, most = (reserve(log_of(shape, job, lag)).reserved_bytes for lag in (0, QUEUE))
    room = (least + most) // 2
    held = published._lagging(shape, job, QUEUE, room)
    assert least <= held.reserved_bytes <= room < most
    assert published._lagging(shape, job, QUEUE, 2 * most).reserved_bytes == most
    # Nothing makes room for a job that needs more than there is.
    assert published._lagging(shape, job, QUEUE, least // 2).reserved_bytes == least


def a_job(tp: int, pp: int, **fields: Any) -> tuple[Shape, Job]:
    shape = Shape(layers=16, hidden=1024, heads=32, kv_heads=32, head_dim=32, mlp=4096, vocab=32768)
    sizes = {"batch": 1, "accumulate": 64, "dp": 2, "zero": 1} | fields
    job = Job(stage=stages(shape, pp)[0], rank=0, seq_len=4096, tp=tp, pp=pp, **sizes)
    return shape, job


def lag(tp: int, pp: int, **fields: Any) -> int:
    shape, job = a_job(tp, pp, **fields)
    return lag_of(shape, job, made_of(shape, job))


def test_the_process_waits_where_its_code_does() -> None:
    assert lag(1, 1) == 0
    assert lag(2, 1) < lag(4, 1) < lag(8, 1) < lag(32, 1) == QUEUE
    # The first gradient is awaited after as many forwards as there are stages.
    assert lag(8, 2) == 0
    forward, _ = made_of(*a_job(8, 4))
    assert lag(8, 4) == 2 * forward
    assert lag(8, 4, accumulate=3) == forward
    assert lag(8, 8) < lag(8, 1)
    assert lag(8, 4, dp=8, batch=2) < lag(8, 4, dp=7, batch=2)  # 256 ranks.


def test_a_slow_device_falls_behind() -> None:
    assert lag(8, 2, batch=16) == 0 < lag(8, 2, batch=64) < lag(8, 2, batch=128)
    # Without a backward and a forward in a row there is less to fall behind in.
    assert 0 < lag(8, 2, batch=64, accumulate=2) < lag(8, 2, batch=64)
    assert lag(2, 2, batch=16) > 0  # A quarter of the ranks: each has four times as much to do.
    # In one microbatch no process gets far ahead of the others, unless the device is slow.
    assert lag(8, 1, accumulate=1) < lag(8, 1, accumulate=8) < lag(8, 1)
    assert lag(8, 1, accumulate=1) < lag(8, 1, accumulate=1, batch=32)
    # Nor does it matter where collectives leave the node: the device waits for these.
    assert lag(16, 1, accumulate=1) == lag(16, 1, accumulate=1, batch=32)


def test_jobs_stall_that_wait_for_their_network() -> None:
    def told(dp: int, tp: int, pp: int, zero: int = 1, batch: int = 2) -> bool:
        return stalls(dp=dp, tp=tp, pp=pp, zero=zero, batch=batch)

    assert told(1, 32, 2)
    assert not told(2, 16, 2)
    assert [told(dp, 8, 2) for dp in (8, 16, 32)] == [False, True, True]
    assert [told(8, 8, 4, batch=batch) for batch in (1, 2)] == [False, True]
    assert told(32, 4, 2, batch=1)
    assert not told(32, 4, 2, zero=0)
    assert told(1, 16, 16, zero=0)  # One data rank has nothing to cut.
    assert told(64, 4, 2, zero=0, batch=1)
    assert [told(512 // tp, tp, 1) for tp in (1, 4, 16, 32)] == [False, True, True, False]
    assert not told(32, 8, 1)


def test_a_stalled_job_waits_for_each_message() -> None:
    def waits(dp: int, tp: int, pp: int, **fields: Any) -> float:
        shape, job = a_job(tp, pp, dp=dp, accumulate=100, **fields)
        return stall_seconds(job, shape)

    assert waits(64, 1, 8) == pytest.approx(STALL_S * (4 * 100 + 2 * 5))
    assert waits(32, 8, 2) == pytest.approx(STALL_S * (2 * 100 + 1))
    assert waits(1, 1, 1) == math.inf  # Nothing is sent.
    assert waits(64, 8, 1) == pytest.approx(STALLED_RANK_S * 100 * 16 * 8 * 8)
    assert waits(64, 8, 1, zero=0) > waits(64, 8, 1)


def test_a_job_that_stalls_leaves_a_rank_only_past_its_share() -> None:
    """Where shares are whole blocks, the first rank has one more."""
    shape = Shape(layers=16, hidden=2048, heads=32, kv_heads=32, head_dim=64, mlp=8192,
                  vocab=131072, tied=True)  # fmt: skip
    assert [s.layers for s in stages(shape, 2, is_past=True)] == [11, 5]
    assert stages(shape, 8)[0] == stages(shape, 8, is_past=True)[0]
    rows = [changed(changed(NANOTRON, "model", hidden=2048, ffn=8192, layers=16, vocab=131072),
                    "parallel", dp=dp, tp=1, pp=2, zero_stage=1) for dp in (128, 256)]  # fmt: skip
    held = [mapping.case_of(row).job.stage.layers for row in rows]  # type: ignore[union-attr]
    assert held == [11, 11]
    row = changed(rows[0], "parallel", dp=64)
    assert mapping.case_of(row).job.stage.layers == 10  # type: ignore[union-attr]


def test_what_was_given_back_is_not_held() -> None:
    """A third buffer that fits only once the first two are returned to the driver."""
    storages = tuple(Storage(Term.ACTIVATIONS) for _ in range(3))
    sizes = (30 << 20, 40 << 20, 60 << 20)
    events = [Event(d, n, 0) for n in (0, 1) for d in (sizes[n],)]
    events += [Event(-sizes[n], n, 0) for n in (0, 1)] + [Event(sizes[2], 2, 0)]
    held = reserve(EventLog(storages, tuple(events), ("step",)), limit_bytes=100 << 20)
    assert (held.reserved_bytes, held.left_bytes) == (70 << 20, 60 << 20)
    assert held.num_retries == 1


def test_constants_are_found_that_made_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pace_holdout.TRIED:
        constant = name.split(" ")[0]
        monkeypatch.setattr(pace, constant, copy.copy(getattr(pace, constant)))
    monkeypatch.setattr(pace, "DRIFT", 0.04)
    jobs = [a_job(tp, pp, accumulate=n) for tp in (4, 8) for pp in (1, 4) for n in (4, 16, 64)]
    told = tuple(10.0 + lag for lag in pace_holdout.LAGS)
    curves = [
        ("16", mapping.Nanotron(shape=shape, job=job), made_of(shape, job), told,
         10.0 + lag_of(shape, job, made_of(shape, job)))
        for shape, job in jobs
    ]  # fmt: skip
    assert pace_holdout.errors(curves).max() < 1e-9
    monkeypatch.setattr(pace, "DRIFT", 0.01)
    assert pace_holdout.errors(curves).max() > 0.1
    chosen = pace_holdout.choose(curves)
    assert chosen["DRIFT"] == 0.04
    assert pace_holdout.errors(curves).max() < 0.02
