"""What a GPU may hold, for those who count all that is in it.

Which seeded bug would this catch? The datasheet's decimal gigabytes, which refuse what fits, or a
headroom that nobody asked for on top of a band.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.reader import load_spec
from meshplan.sizing import read_limit

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
