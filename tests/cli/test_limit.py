"""The one size of a GPU, which every verb goes by and quotes in the same words.

Which seeded bug would this catch? The datasheet's decimal gigabytes, which refuse what fits, or a
headroom that nobody asked for on top of a band.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from meshplan.cli.app import main
from meshplan.layout.hardware import devices, find_device
from meshplan.spec.reader import load_spec
from meshplan.textbook.inputs import read_limit, read_sizing
from tests.planner.test_planner import job

__all__ = ["job"]

GIB = 2**30


def limit(hardware: dict[str, Any], **flags: Any) -> int | None:
    spec = load_spec({"version": 1, "hardware": {"nodes": 1, "gpus_per_node": 8, **hardware}})
    return read_limit(flags.get("gpu"), flags.get("memory"), spec)[1]


def test_a_known_device_counts_with_what_torch_sees() -> None:
    seen = limit({"gpu": "h100-sxm-80gb"})
    assert seen == limit({}, gpu="h100-sxm-80gb")
    assert seen == pytest.approx(79.11 * GIB, abs=1)


def test_any_other_counts_with_its_datasheet() -> None:
    assert limit({"gpu": "l40s-48gb"}) == 48 * 10**9


def test_a_stated_memory_and_a_stated_headroom_count_as_stated() -> None:
    assert limit({"memory": "40GiB"}) == 40 * GIB
    assert limit({"memory": "40GiB", "headroom": 0.25}) == 30 * GIB
    assert limit({}) is None


@pytest.mark.parametrize("name", devices())
def test_states_and_steps_go_by_the_same_size_in_the_same_words(name: str) -> None:
    hardware = {"nodes": 1, "gpus_per_node": 8, "gpu": name}
    spec = load_spec({"version": 1, "model": {"params": 3e9}, "hardware": hardware})
    device, of_step, notes = read_limit(None, None, spec)
    by_plan, by_flag = read_sizing({}, spec), read_sizing({"params": "3e9", "gpu": name})
    assert device == name
    assert of_step == by_plan.memory_bytes == by_flag.memory_bytes == limit({}, gpu=name)
    assert notes == (find_device(name).size,)
    assert notes == by_plan.notes[: len(notes)] == by_flag.notes
    _, _, both = read_limit(name, None, spec)
    assert both == notes  # Said once, whoever names it.


def test_every_verb_quotes_it(job, capsys: pytest.CaptureFixture[str]) -> None:
    path = job(mesh={"dp_shard": 8}, batch={"micro": 1, "accumulate": 1, "seq_len": 512},
               hardware={"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"})  # fmt: skip
    found = {}
    for verb, at in {
        "estimate": ("limit_bytes",), "explain memory": ("memory", "limit_bytes"),
        "plan --dry-run": ("limit_bytes",),
    }.items():  # fmt: skip
        main([*verb.split(), "-f", str(path), "--json", "-q"])
        result = json.loads(capsys.readouterr().out)["result"]
        for key in at:
            result = result[key]
        found[verb] = result
    main(["estimate", "--params", "3e9", "--gpus", "8", "--gpu", "h100-sxm-80gb", "--json"])
    found["states"] = json.loads(capsys.readouterr().out)["result"]["memory_bytes"]
    assert set(found.values()) == {find_device("h100-sxm-80gb").usable_bytes}
    sizes = set()
    for verb in ("estimate", "explain memory", "plan --dry-run", "draw --what memory"):
        main([*verb.split(), "-f", str(path), "-q"])
        sizes.update(re.findall("expected .*?, of .*? GiB", capsys.readouterr().out))
    assert len(sizes) == 1
    assert sizes.pop().endswith(", of 79.1 GiB")
