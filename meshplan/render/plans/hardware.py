"""Output of `meshplan gpus`: the hardware table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.layout.hardware import Device
from meshplan.render.base.text import columns
from meshplan.units import GIB

_HEAD = ("gpu", "GiB", "bf16 TFLOPS", "memory GB/s", "node GB/s", "network GB/s")


def gpus_to_json(devices: Mapping[str, Device]) -> dict[str, Any]:
    """Return the `result` of schema gpus/1; sizes in bytes, speeds per second."""
    return {
        "gpus": [
            {
                "name": device.name,
                "memory_bytes": device.usable_bytes,
                "peak_flops": dict(device.peak_flops),
                "product_flops": device.product_flops,
                "memory_bytes_per_s": device.memory_bytes_per_s,
                "intra_bytes_per_s": device.intra_bytes_per_s,
                "inter_bytes_per_s": device.inter_bytes_per_s,
                "note": device.note,
                "sources": list(device.all_sources),
            }
            for device in devices.values()
        ]
    }


def gpus_to_text(devices: Mapping[str, Device], *, verbose: bool) -> list[str]:
    """Return a table with a row per GPU; verbose adds remarks and sources."""
    rows = [
        (
            device.name,
            f"{device.usable_bytes / GIB:.1f}",
            _number(device.peak_flops.get("bfloat16"), 1e12),
            _number(device.memory_bytes_per_s, 1e9),
            _number(device.intra_bytes_per_s, 1e9),
            "-" if device.inter_bytes_per_s is None else f"{device.inter_bytes_per_s / 1e9:g}",
        )
        for device in devices.values()
    ]
    lines = columns([_HEAD, *rows], "<>>>>>")
    if verbose:
        for device in devices.values():
            lines += ["", f"{device.name}{': ' if device.note else ''}{device.note}"]
            lines += [f"  {source}" for source in device.all_sources]
    else:
        lines += [
            "",
            "TFLOPS are dense, GB/s are one way per GPU, and the network is that of a plan without",
            "`inter`; -v shows the sources",
        ]
    return lines


def _number(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:,.0f}"
