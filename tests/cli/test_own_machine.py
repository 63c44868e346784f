"""A machine that no table has: `hardware: {memory: 8GB}` and a profile of it answer every verb.

Which seeded bug would this catch? A verb that asks for the name of a GPU although the speed of the
devices was measured.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshplan.cli.app import main
from meshplan.cost.calibration import LINKS_ARE_A_GUESS, profile_from, write_profile
from meshplan.layout.hardware import Device
from meshplan.planner.lock.lock import lock_path
from meshplan.render.profile import profile_to_text
from tests.cost.test_calibrate import GIGAS, MADE, times
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

CPU = replace(
    MADE, device=Device(name="cpu", memory_bytes=0), dtype="float32", copies=(),
    products=times(4e-6, 1e11, [1e9 * 2**n for n in range(6)]),
    attention=times(8e-6, 5e10, [1e8 * 2**n for n in range(6)]),
    moves=times(3e-6, 1e10, GIGAS), collectives=times(1e-4, 2e9, GIGAS, hops=1),
)  # fmt: skip
STATED: dict[str, Any] = {
    "hardware": {"nodes": 1, "gpus_per_node": 2, "memory": "16GB"}, "precision": "32-true",
    "batch": {"global": 8, "seq_len": 256},
}  # fmt: skip


@pytest.fixture
def own(job, tmp_path: Path) -> tuple[str, str]:
    """(a plan for two ranks of a machine without a name, a profile of it)."""
    profile = tmp_path / "mine.json"
    write_profile(profile_from(CPU), profile)
    return str(job(LLAMA, **STATED)), str(profile)


def test_without_a_profile_what_to_do_is_said(own, capsys):
    path, _ = own
    assert main(["plan", "-f", path, "-q"]) == 2
    err = capsys.readouterr().err
    assert "the plan states no GPU, so its speed is unknown" in err
    assert "meshplan calibrate --out mine.json, then meshplan plan --profile mine.json" in err


def test_a_profile_is_enough_for_every_verb(own, capsys):
    path, profile = own

    def answer(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words, "--json", "-q"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out.splitlines()[-1])["result"]

    planned = answer("plan", "-f", path, "--profile", profile)
    assert planned["step_s"] > 0
    assert planned["profile"]["device"] == "cpu"
    assert lock_path(path).is_file()
    estimate = answer("estimate", "-f", path)
    assert estimate["groups"][estimate["worst"]]["band"][1] == planned["peak_bytes"]
    assert answer("check", "-f", path)["ok"]
    assert answer("explain", "memory", "-f", path)["memory"]["band"][1] == planned["peak_bytes"]
    (why,) = answer("explain", "why-not", "strategy=ddp", "-f", path)["answers"]
    assert why["plan_step_s"] == planned["step_s"]
    module = answer("explain", "model.layers.0", "-f", path)["module"]
    assert module["seconds_per_microbatch"]
    assert answer("diff", path, path)["old"]["step_s"] == pytest.approx(planned["step_s"])
    folder = Path(path).parent
    answer("draw", "-f", path, "--what", "pareto", "-o", str(folder / "p.svg"),
           "--profile", profile)  # fmt: skip
    report = answer("report", "-f", path, "-o", str(folder / "r.html"), "--profile", profile)
    assert report["fits"] is True
    assert {"pareto", "ladder"} <= {*report["pictures"]}
    trained = answer("plan", "-f", path, "--profile", profile, "--tokens", "1e6", "--days", "365")
    assert trained["training"]


def test_a_profile_of_another_device_is_refused_by_name(own, capsys):
    path, profile = own
    words = ["--set", "hardware={nodes: 1, gpus_per_node: 2, gpu: h100-sxm-80gb}"]
    assert main(["plan", "-f", path, "-q", "--profile", profile, *words]) == 2
    assert "the profile was measured on cpu, not on h100-sxm-80gb" in capsys.readouterr().err


def test_what_one_rank_cannot_time_is_called_a_guess():
    alone = profile_from(replace(CPU, collectives=()))
    assert LINKS_ARE_A_GUESS in alone.sources
    assert any(line.endswith("GB/s (a guess)") for line in profile_to_text(alone))
    assert not any("a guess" in line for line in profile_to_text(profile_from(CPU)))
