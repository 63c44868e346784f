"""Checkpoints of Hugging Face: safetensors files with the model's names, and an index of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from meshplan.errors import MissingStateError, Origin, Problem, SpecError, StateError
from meshplan.files import read_bytes, write_bytes
from meshplan.state.boxes import TensorBox
from meshplan.state.manifest import Manifest, SavedFile, SavedPiece, SavedTensor
from meshplan.state.reading import StateReader
from meshplan.state.safetensors import Bytes, TensorEntry, TensorFile, write

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
HEADER: Final = {"format": "pt"}
"""Metadata without which transformers does not read a file."""
_MOST_BYTES: Final = 1 << 30
_FILE_BYTES: Final = 5_000_000_000
"""Bytes of one file of a converted state; transformers' own limit for what it saves."""


def read_pretrained(folder: Path) -> Manifest:
    """Return a checkpoint of Hugging Face as the manifest of a state that has the model alone.

    Raises:
        MissingStateError: The folder has no safetensors files.
        StateError: The index or a file is damaged.
    """
    index = folder / INDEX
    names: list[str]
    wanted: Mapping[str, str] | None = None
    if index.exists():
        wanted = _weight_map(index)
        names = list(dict.fromkeys(wanted.values()))
    else:
        single = folder / SINGLE
        names = (
            [SINGLE] if single.exists() else sorted(p.name for p in folder.glob("*.safetensors"))
        )
    if not names:
        what, fix = "this folder has no safetensors files", "name the folder of the checkpoint"
        raise MissingStateError(Problem(what, Origin(str(folder)), fix))
    tensors: dict[str, SavedTensor] = {}
    files: dict[str, SavedFile] = {}
    for name in names:
        path = folder / name
        found = TensorFile(path).tensors
        files[name] = SavedFile(path.stat().st_size, "")
        for key, entry in found.items():
            if wanted is None or wanted.get(key) == name:
                piece = SavedPiece(name, key, TensorBox.whole(entry.shape))
                tensors[f"model/{key}"] = SavedTensor(entry.dtype, entry.shape, (piece,))
    lost = [key for key in wanted or () if f"model/{key}" not in tensors]
    if lost:
        what = f"the index names {lost[0]}, which is not in {(wanted or {})[lost[0]]}"
        raise StateError(Problem(what, Origin(str(index)), "copy the checkpoint again"))
    return Manifest(
        step=0, world_size=1, mesh={}, plan="", versions={}, files=files, tensors=tensors, values={}
    )


def _weight_map(index: Path) -> Mapping[str, str]:
    """Return {name of a tensor: name of its file} of an index."""
    origin = Origin(str(index))
    try:
        found: Any = json.loads(read_bytes(index, _MOST_BYTES, "an index"))["weight_map"]
        whole = {str(key): str(name) for key, name in found.items()}
    except SpecError as error:
        raise StateError(error.problems) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fix = "copy the checkpoint again"
        raise StateError(Problem("the index is not valid", origin, fix)) from None
    for name in whole.values():
        if name != Path(name).name or name in ("", ".", ".."):
            what = f"the index names the file {name!r}, which is not in this folder"
            raise StateError(Problem(what, origin, "copy the checkpoint again"))
    return whole


def file_names(count: int) -> list[str]:
    """Return the names of the files of a checkpoint that has `count` of them.

    >>> file_names(1), file_names(2)[1]
    (['model.safetensors'], 'model-00002-of-00002.safetensors')
    """
    if count == 1:
        return [SINGLE]
    return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def write_index(folder: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of a checkpoint of several files; one of a single file has none.

    Raises:
        SpecError: The index cannot be written.
    """
    if len(set(weight_map.values())) < 2:
        return
    content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(weight_map)}
    write_bytes(folder / INDEX, json.dumps(content, indent=2).encode(), "the index")


def convert(source: Path, manifest: Manifest, target: Path) -> dict[str, int]:
    """Write the model of a state as a checkpoint of Hugging Face, one tensor after another.

    Args:
        source: The folder of the state.
        manifest: Its manifest.
        target: The folder to write to, which must not have files yet.

    Returns:
        {name: bytes} of the files written.

    Raises:
        StateError: The state is damaged, or the folder has files.
        SpecError: The index cannot be written.
        OSError: A file with tensors cannot be written.
    """
    model = {
        key.partition("/")[2]: tensor
        for key, tensor in manifest.tensors.items()
        if key.startswith("model/")
    }
    check_empty(target)
    target.mkdir(parents=True, exist_ok=True)
    groups = list(_groups(model))
    reader = StateReader(source, manifest)
    sizes: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    for name, keys in zip(file_names(len(groups)), groups, strict=True):
        entries = {key: TensorEntry(model[key].dtype, model[key].shape) for key in keys}

        def content(key: str) -> Iterator[Bytes]:
            data: Bytes = np.empty(model[key].num_bytes, dtype=np.uint8)
            reader.read_whole(model[key], data)
            yield data

        sizes[name], _ = write(target / name, entries, content, HEADER)
        weight_map |= dict.fromkeys(keys, name)
    write_index(target, weight_map, sum(each.num_bytes for each in model.values()))
    return sizes


def check_empty(folder: Path) -> None:
    """Check that a checkpoint can be written into a folder without changing another one.

    Raises:
        StateError: The folder has files of a checkpoint.
    """
    if next(folder.glob("*.safetensors*"), None) is not None:
        what = "this folder has a checkpoint, which is not overwritten"
        raise StateError(Problem(what, Origin(str(folder)), "name another folder, or remove it"))


def _groups(model: Mapping[str, SavedTensor]) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    names: list[str] = []
    size = 0
    for key, tensor in model.items():
        if names and size + tensor.num_bytes > _FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(key)
        size += tensor.num_bytes
    yield names
