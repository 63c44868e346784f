"""Write a state anew, sharded as another plan shards it, without a process for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.errors import Origin, StateError
from meshplan.plan.plan import Plan
from meshplan.state.boxes import LocalBox, TensorBox
from meshplan.state.folder import abandon_folder, begin_folder, finish_folder
from meshplan.state.held import HeldTensor, held_alone, written_by
from meshplan.state.manifest import Manifest, SavedFile, SavedPiece, SavedTensor
from meshplan.state.matching import held_by, match
from meshplan.state.reading import StateReader
from meshplan.state.safetensors import Bytes, TensorEntry, write


def convert_to_plan(source: Path, manifest: Manifest, plan: Plan, target: Path) -> Path:
    """Write a state as the ranks of a plan would, one box after another; return its folder.

    At most one rank's shard of one tensor is in memory.

    Args:
        source: The folder of the state.
        manifest: Its manifest.
        plan: The plan, made for the model that was saved.
        target: The folder to write the state's folder into.

    Raises:
        StateError: The state is damaged or is not of this model, or its step is there already.
        OSError: A file cannot be written.
    """
    matching = match(manifest, plan)
    manifest = matching.manifest
    problems = [
        replace(each, origin=Origin(str(source))) for each in matching.problems(strict=True)
    ]
    if problems:
        raise StateError(problems)
    folder = begin_folder(target, manifest.step)
    try:
        files: dict[str, SavedFile] = {}
        pieces: dict[str, list[SavedPiece]] = {}
        for rank in range(plan.mesh.world_size):
            own = written_by(rank, held_by(rank, matching, plan), plan.mesh)
            if rank == 0:
                own += [
                    held_alone(key, each.dtype, each.shape)
                    for key, each in manifest.tensors.items()
                    if key.startswith("values/")
                ]
            name = f"rank-{rank:05d}.safetensors"
            written = _write(folder / name, own, source, manifest, pieces)
            if written is not None:
                files[name] = written
        made = replace(
            manifest,
            world_size=plan.mesh.world_size,
            mesh=plan.mesh.sizes,
            plan=plan.digest(),
            lock=plan.spec.lock,
            files=files,
            values={**manifest.values, "random": _shared(manifest.values.get("random", {}))},
            tensors={
                key: replace(manifest.tensors[key], pieces=tuple(each))
                for key, each in pieces.items()
            },
        )
        return finish_folder(folder, made)
    except BaseException:
        abandon_folder(folder)
        raise


def _shared(states: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the states of those random number generators that all ranks had alike."""
    return {name: each for name, each in states.items() if len(each) == 1}


def _write(
    path: Path,
    tensors: list[HeldTensor],
    source: Path,
    manifest: Manifest,
    pieces: dict[str, list[SavedPiece]],
) -> SavedFile | None:
    """Write the file of one rank, and append its pieces to those of each tensor.

    Returns:
        The file; None if the rank has no elements to write.
    """
    reader = StateReader(source, manifest)  # For each file anew: a state can have many files.
    entries: dict[str, TensorEntry] = {}
    boxes: dict[str, tuple[SavedTensor, TensorBox]] = {}
    for each in tensors:
        known = pieces.setdefault(each.name, [])
        for key, box in each.pieces():
            entries[key] = TensorEntry(each.dtype, box.box.shape)
            boxes[key] = manifest.tensors[each.name], box.box
            known.append(SavedPiece(path.name, key, box.box))
    if not entries:
        return None

    def content(key: str) -> Iterator[Bytes]:
        tensor, box = boxes[key]
        data: Bytes = np.empty(entries[key].num_bytes, dtype=np.uint8)
        reader.read(tensor, LocalBox(box, TensorBox.whole(box.shape)), data, box.shape)
        yield data

    return SavedFile(*write(path, entries, content))
