"""The script that reads a GPU's allocator, where there is no GPU: live bytes, to the byte.

Which seeded bug would this catch? A rank that is wrapped otherwise than foretold, a plan that the
group of fakes cannot run, a call that begins anew or loses what was measured.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.bench import gpu_memory
from tests.bench.gpu_plans import PLANS

DEFAULT = ("ddp, buckets apart",)
"""The others differ from it in what `test_memory_exact` tries."""


def test_there_are_enough_plans_of_all_kinds() -> None:
    assert len(PLANS) >= 20
    words = json.dumps(PLANS)
    for word in ("zero1", "zero2", "ddp", "tp", "pp", "dp_replicate", "offload", "accumulate"):
        assert word in words


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.wide]) for n in PLANS]
)
def test_what_is_counted_is_what_was_foretold(apart: ProcessPoolExecutor, name: str) -> None:
    predicted = apart.submit(gpu_memory.foretold, "tiny", PLANS[name], "cpu").result()
    measured = apart.submit(gpu_memory.measured, "tiny", PLANS[name], "cpu").result()
    assert isinstance(predicted, dict), predicted
    assert measured == predicted


def test_a_call_goes_on_where_the_one_before_ended(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    calls: list[str] = []
    broken = "ddp"

    def instead(function: Any, size: str, plan: Any, device: str, *, seconds: float) -> Any:
        name = next(n for n, each in PLANS.items() if each is plan)
        calls.append(name)
        if name == broken and function is gpu_memory.measured:
            return "Traceback\nRuntimeError: no memory"
        return {"live_bytes": 1000 if function is gpu_memory.foretold else 990}

    monkeypatch.setattr(gpu_memory, "_apart", instead)
    out = tmp_path / "measured" / "found.json"
    flags = ["--device", "cpu", "--model", "tiny", "--out", str(out)]
    assert gpu_memory.main([*flags, "zero1", "ddp"]) == 0
    assert "| ddp | 8 | RuntimeError: no memory |" in capsys.readouterr().out
    broken, calls[:] = "", []
    assert gpu_memory.main(flags) == 0
    assert "zero1" not in calls
    assert calls.count("ddp") == 2  # What went wrong is tried again.
    rows = json.loads(out.read_text())["rows"]
    assert sorted(row["name"] for row in rows) == sorted(PLANS)
    assert not any("error" in row for row in rows)
    calls.clear()
    assert gpu_memory.main(flags) == 0
    assert calls == []
    capsys.readouterr()
    assert gpu_memory.main(["--table", str(out)]) == 0
    assert "| zero1 | 8 | 1,000 | 990 | +1.010 % |" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # Figures of two models are not put in one table.
        gpu_memory.main(["--device", "cpu", "--model", "1b", "--out", str(out)])


def test_without_time_nothing_is_begun(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(gpu_memory, "_apart", lambda *args, seconds: "stopped: no time was left")
    out = tmp_path / "found.json"
    flags = ["--device", "cpu", "--model", "tiny", "--out", str(out), "--seconds", "1"]
    assert gpu_memory.main(flags) == 3
    assert not out.exists()
    assert "call again" in capsys.readouterr().err
