"""The manifest of a state: each tensor's shape and pieces, all other values, a digest of each file.

It is written last, so a folder with a manifest has everything else. Its own digest and the files'
sizes tell a whole state from a damaged one; the files' digests find any other change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError, StateError
from meshplan.files import read_bytes
from meshplan.shown import shown
from meshplan.state.boxes import TensorBox, are_a_partition
from meshplan.state.safetensors import BYTES

NAME: Final = "manifest.json"
FORMAT: Final = "meshplan state"
VERSION: Final = 1
_MOST_BYTES: Final = 1 << 30
_LOAD_ANOTHER: Final = "load another step, with step=..., or copy the state again"


@shown
@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of a state.

    Args:
        num_bytes: Its size.
        xxh3: 128 bits of XXH3 of its content, in hexadecimal.
    """

    num_bytes: int
    xxh3: str


@shown
@dataclass(frozen=True, slots=True)
class SavedPiece:
    """One saved box of a tensor.

    Args:
        file: Name of the file that it is in.
        key: Its name in that file.
        box: The part of the tensor that it is.
    """

    file: str
    key: str
    box: TensorBox


@shown
@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of a state.

    Args:
        dtype: The safetensors word for its dtype, such as "BF16".
        shape: Its global shape.
        pieces: Its pieces, which together are the whole tensor.
        aliases: Other names of the same tensor, if it is tied.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]
    aliases: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return TensorBox.whole(self.shape).numel * BYTES[self.dtype]


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything in a state, except the tensors' bytes.

    Args:
        step: The number of optimizer steps after which it was saved.
        world_size: Number of ranks that saved it.
        mesh: {axis: size} of the mesh under which it was saved.
        plan: Digest of the plan (`Plan.digest`).
        lock: Hash of the lock that decided the plan; None if none did.
        versions: {package: version}.
        files: The other files of the folder, by name.
        tensors: The tensors by name: `model/NAME`, `optimizer/PARAMETER/STATE`, `values/NUMBER`.
        values: Everything else, in the form of `state.values`.
        digest: SHA-256 of the manifest itself; "" before it is written.
    """

    step: int
    world_size: int
    mesh: Mapping[str, int]
    plan: str
    versions: Mapping[str, str]
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor] = field(repr=False)
    values: Mapping[str, Any] = field(repr=False)
    lock: str | None = None
    digest: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(each.num_bytes for each in self.tensors.values())

    def dump(self) -> bytes:
        """Return the content of `manifest.json`."""
        numbers = {name: number for number, name in enumerate(self.files)}
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "mesh": dict(self.mesh),
            "plan": self.plan,
            "lock": self.lock,
            "versions": dict(self.versions),
            "files": [[name, f.num_bytes, f.xxh3] for name, f in self.files.items()],
            "tensors": {
                name: {
                    "dtype": each.dtype,
                    "shape": list(each.shape),
                    **({"aliases": list(each.aliases)} if each.aliases else {}),
                    "pieces": [
                        [numbers[p.file], p.key, list(p.box.start), list(p.box.shape)]
                        for p in each.pieces
                    ],
                }
                for name, each in self.tensors.items()
            },
            "values": self.values,
        }
        content["digest"] = _digest(content)
        return json.dumps(content, indent=1, allow_nan=False).encode()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a state whose files all exist and have the right size.

    Raises:
        FileNotFoundError: The folder has no manifest.
        StateError: The manifest or the folder is damaged, or from another program.
    """
    path = folder / NAME
    origin = Origin(str(path))
    try:
        content = json.loads(read_bytes(path, _MOST_BYTES, "a manifest"))
    except SpecError as error:
        raise StateError(error.problems) from None
    except (ValueError, RecursionError):
        problem = Problem("the manifest is not valid JSON", origin, _LOAD_ANOTHER)
        raise StateError(problem) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        what = "this is not the manifest of a state that meshplan saved"
        raise StateError(Problem(what, origin, "name the folder that meshplan.save wrote to"))
    version = content.get("version")
    if version != VERSION:
        what = f"the state has version {version!r}, and this meshplan reads version {VERSION}"
        raise StateError(Problem(what, origin, "load it with the meshplan that saved it"))
    digest = content.pop("digest", None)
    if digest != _digest(content):
        what = "the manifest was changed after it was written: its digest is another one"
        raise StateError(Problem(what, origin, _LOAD_ANOTHER))
    try:
        manifest = _parsed(content, digest)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"the manifest is not valid: {type(error).__name__}: {error}"
        raise StateError(Problem(what, origin, _LOAD_ANOTHER)) from None
    problems = list(_folder_problems(folder, manifest))
    if problems:
        raise StateError(problems)
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own digest."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _parsed(content: Mapping[str, Any], digest: str) -> Manifest:
    """Return the manifest with this JSON content; raise ValueError and its like if it is wrong."""
    files = {}
    for name, size, xxh3 in content["files"]:
        if type(name) is not str or name in ("", ".", "..", NAME) or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a file in the folder")
        files[name] = SavedFile(_natural(size), str(xxh3))
    names = list(files)
    tensors = {}
    for name, each in content["tensors"].items():
        shape = tuple(map(_natural, each["shape"]))
        pieces = tuple(
            SavedPiece(
                names[_natural(number)],
                str(key),
                TensorBox(tuple(map(_natural, start)), tuple(map(_natural, size))),
            )
            for number, key, start, size in each["pieces"]
        )
        if each["dtype"] not in BYTES:
            raise ValueError(f"{name} has the unknown dtype {each['dtype']!r}")
        if any(len(p.box.start) != len(shape) or len(p.box.shape) != len(shape) for p in pieces):
            raise ValueError(f"the pieces of {name} have not as many dims as {list(shape)}")
        if not are_a_partition((p.box for p in pieces), shape):
            raise ValueError(f"the pieces of {name} do not make up the whole tensor")
        aliases = tuple(map(str, each.get("aliases", ())))
        tensors[name] = SavedTensor(each["dtype"], shape, pieces, aliases)
    values = content["values"]
    if not isinstance(values, dict):
        raise TypeError("its values are not an object")
    lock = content.get("lock")  # States of earlier versions have none.
    return Manifest(
        step=_natural(content["step"]),
        world_size=_natural(content["world_size"]),
        mesh={str(axis): _natural(size) for axis, size in content["mesh"].items()},
        plan=str(content["plan"]),
        lock=None if lock is None else str(lock),
        versions={str(k): str(v) for k, v in content["versions"].items()},
        files=files,
        tensors=tensors,
        values=values,
        digest=digest,
    )


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a whole number")
    return number


def _folder_problems(folder: Path, manifest: Manifest) -> Iterable[Problem]:
    """Yield a problem for each file that is missing or has another size."""
    for name, each in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            what = f"a file of the state cannot be read: {error.strerror}"
            yield Problem(what, Origin(str(path)), _LOAD_ANOTHER)
            continue
        if size != each.num_bytes:
            what = f"the file has {size:,} bytes, but {each.num_bytes:,} were saved"
            yield Problem(what, Origin(str(path)), _LOAD_ANOTHER)


def changed_file(path: Path) -> Problem:
    """Return the problem of a file whose digest is not that of the manifest."""
    what = "the file was changed after it was saved: its digest is another one"
    return Problem(what, Origin(str(path)), _LOAD_ANOTHER)
