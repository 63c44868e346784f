"""`python -m tests.gpu` where there is no GPU: small models, and live bytes equal to the byte.

Which seeded bug would this catch? A rank that is wrapped otherwise than predicted, a plan that the
group of fakes cannot run, a section that no longer runs, a failure that ends the other rows.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as command
from tests.gpu import memory, plans
from tests.gpu.plans import CASES
from tests.gpu.run import Room, Workers, apart, line_of, stream

DEFAULT = ("ddp, buckets apart",)
"""The others differ from it in what `test_memory_exact` tries."""
COUNTED = [name for name in CASES if "compiled" not in name]
"""What a compiler saves on a CPU is not what it saves on a GPU."""


def test_there_are_enough_cases_of_all_kinds() -> None:
    assert len(CASES) >= 30
    words = json.dumps([dict(case.plan) for case in CASES.values()])
    for word in ("zero1", "zero2", "ddp", "tp", "pp", "dp_replicate", "offload", "accumulate",
                 "compile", "loss_chunks", "adamw_fused", "sequence_parallel", "bf16-true",
                 "16-mixed", "32-true", "selective", "expandable"):  # fmt: skip
        assert word in words


BOOK = json.loads((Path(__file__).parents[2] / "docs/evidence/h200.json").read_text())
MEASURED = {
    row["name"]: row["measured"]
    for row in BOOK["sections"]["memory"]
    if row["predicted"]["requested_bytes"] == row["measured"]["requested_bytes"]
}
"""What an H200 took in the runs that the committed file predicts to the byte."""


def test_the_evidence_has_runs_that_are_predicted_to_the_byte() -> None:
    assert len(BOOK["sections"]["memory"]) >= 46
    assert len(MEASURED) >= 31


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n == "full_shard, recomputed" else [pytest.mark.wide])
        for n in MEASURED
    ],
)
def test_what_a_gpu_took_is_predicted(apart: ProcessPoolExecutor, name: str) -> None:
    predicted = apart.submit(memory.predicted, name, "full", BOOK["gpu"]).result()
    assert predicted["requested_bytes"] == MEASURED[name]["requested_bytes"]
    if "ddp" not in name:  # The buckets of DDP's first step are not those of later ones.
        rel = 0.01
        assert predicted["reserved_bytes"] == pytest.approx(MEASURED[name]["reserved_bytes"], rel)


def test_what_attention_takes_for_itself_is_what_it_took_on_a_gpu() -> None:
    from tests.gpu.workspaces import kernels

    predicted = {kernel.name: sum(kernel.workspace) for kernel in kernels()}
    rows = [row for row in BOOK["sections"]["workspaces"] if "attention" in row["name"]]
    assert len(rows) >= 14
    for row in rows:  # The file has six digits.
        measured = row["measured"]["requested_bytes"]
        assert predicted[row["name"]] == pytest.approx(measured, 1e-5), row["name"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.wide]) for n in COUNTED]
)
def test_what_is_counted_is_what_was_predicted(apart: ProcessPoolExecutor, name: str) -> None:
    predicted = apart.submit(memory.predicted, name, "tiny", "cpu").result()
    assert apart.submit(memory.measured, name, "tiny", "cpu").result() == predicted


def test_a_failed_row_does_not_end_the_others(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    broken = plans.Case({"version": 1, "mesh": {"dp_shard": 3, "tp": 2}}, "resnet")
    monkeypatch.setattr(plans, "CASES", {"zero1": CASES["zero1"]})
    monkeypatch.setattr(command, "Workers", _Instead)
    out = tmp_path / "measured" / "found.json"
    plans.CASES["broken"] = broken
    flags = ["--device", "cpu", "--out", str(out), "--seconds", "60"]
    assert command.main([*flags, "memory", "workspaces"]) == 0
    assert "memory: zero1: live_bytes 1,000 / 990 (+1.01 %)" in capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(out.read_text())["sections"]["memory"]}
    assert rows["broken"]["error"] == "predicted: RuntimeError: no memory"
    assert command.main(["--table", str(out)]) == 0
    assert "a CPU has no such kernels" in capsys.readouterr().out


class _Instead:
    """Workers that answer at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Instead:
        return self

    def __exit__(self, *_: object) -> None: ...

    def call(self, function: Any, name: str, *args: Any, **flags: Any) -> Any:
        if name == "broken":
            return "RuntimeError: no memory"
        return {"live_bytes": 1000 if function is memory.predicted else 990}


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert command.main(["--device", "cpu", "--out", str(out), "--seconds", "0"]) == 0
    sections = json.loads(out.read_text())["sections"]
    assert set(sections) == set(command.SECTIONS)
    assert all("skipped" in row for rows in sections.values() for row in rows)


@pytest.mark.wide
@pytest.mark.parametrize("section", [s for s in command.SECTIONS if s != "memory"])
def test_a_section_runs_on_a_cpu(tmp_path: Path, section: str) -> None:
    out = tmp_path / "found.json"
    assert command.main(["--device", "cpu", "--out", str(out), section]) == 0
    rows = [row for each in json.loads(out.read_text())["sections"].values() for row in each]
    assert rows
    assert not [row for row in rows if "error" in row]


def test_a_process_of_its_own_answers_fails_or_is_stopped() -> None:
    assert apart(os.path.basename, "a/b", seconds=60) == "b"
    assert "FileNotFoundError" in apart(os.listdir, "/nowhere", seconds=60)
    assert apart(os._exit, 3, seconds=60) == "the process died with exit code 3"
    assert apart(time.sleep, 60, seconds=0.5).startswith("stopped")
    assert apart(os.getcwd, seconds=0).startswith("stopped")
    with Workers(1) as workers:  # The same process, until it dies.
        first, again = (workers.call(os.getpid, seconds=60) for _ in range(2))
        assert first == again != os.getpid()
        assert workers.call(os._exit, 3, seconds=60) == "the process died with exit code 3"
        assert workers.call(os.getpid, seconds=60) not in (first, os.getpid())
    assert list(stream(_two, seconds=60)) == [1, 2, "the process died with exit code 1"]


def _two(send: Any) -> None:
    send(1)
    send(2)
    raise ValueError


def test_runs_share_the_memory() -> None:
    room, most, now = Room(10), [0.0], [0.0]

    def use(size: float) -> None:
        with room.of(size):
            now[0] += size
            most[0] = max(most[0], now[0])
            time.sleep(0.01)
            now[0] -= size

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, [4, 5, 3, 20, 6, 2]))
    assert 0 < most[0] <= 20  # The one that is too large runs alone.
    assert now[0] == 0


def test_a_line_says_how_far_apart_the_figures_are() -> None:
    row = {"name": "a", "predicted": {"x": 110}, "measured": {"x": 100, "y": 2}}
    assert line_of(row) == "a: x 110 / 100 (+10.00 %); y 2"
    assert line_of({"name": "a", "error": "T\nboom"}) == "a: boom"
