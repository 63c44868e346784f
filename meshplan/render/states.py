"""Saved training states as lines of text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshplan.errors import Problem
from meshplan.state.manifest import Manifest
from meshplan.units import format_bytes

_SECTIONS = ("model", "optimizer")


def state_to_text(
    folder: str, manifest: Manifest | None, problems: tuple[Problem, ...]
) -> Iterator[str]:
    """Yield lines on one state: whether it is whole, and what is in it."""
    if manifest is None:
        yield f"{folder}: damaged"
    else:
        mesh = " x ".join(f"{axis} {size}" for axis, size in manifest.mesh.items())
        ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}"
        origin = f"step {manifest.step}, saved by {ranks}" + (f" ({mesh})" if mesh else "")
        if not manifest.plan:
            origin = "a checkpoint of Hugging Face"
        yield f"{folder}: {'damaged' if problems else 'whole'}, {origin}"
        for section, count, size in _sections(manifest):
            kind = (manifest.values.get("optimizer") or {}).get("type", "")
            name = f", {kind}" if section == "optimizer" and kind else ""
            yield f"  {section:10} {count} tensors, {format_bytes(size)}{name}"
        if manifest.lock is not None:
            yield f"  {'lock':10} {manifest.lock}"
        if others := _others(manifest):
            yield f"  {'values':10} {', '.join(others)}"
    for problem in problems:
        yield f"  {problem}"


def _sections(manifest: Manifest) -> Iterator[tuple[str, int, int]]:
    """Yield (section, number of tensors, bytes) of the model and of the optimizer."""
    for section in _SECTIONS:
        found = [t for key, t in manifest.tensors.items() if key.startswith(f"{section}/")]
        if found:
            yield section, len(found), sum(each.num_bytes for each in found)


def _others(manifest: Manifest) -> list[str]:
    """Return the names of the values that were given to `save`."""
    given = ("scheduler", "data", "extra")
    return [name for name in given if manifest.values.get(name) is not None]


def state_to_json(
    folder: str, manifest: Manifest | None, problems: tuple[Problem, ...]
) -> dict[str, Any]:
    """Return one state as `meshplan state --json` prints it."""
    out: dict[str, Any] = {"folder": folder, "is_whole": not problems}
    if manifest is not None:
        out |= {
            "step": manifest.step,
            "world_size": manifest.world_size,
            "mesh": dict(manifest.mesh),
            "plan": manifest.plan,
            "lock": manifest.lock,
            "versions": dict(manifest.versions),
            "sections": {
                name: {"tensors": count, "bytes": size} for name, count, size in _sections(manifest)
            },
            "values": _others(manifest),
        }
    out["problems"] = [str(each) for each in problems]
    return out
