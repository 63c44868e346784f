"""Files in the safetensors format: written as a stream with a digest, read box by box.

The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes. The
library of that name can neither write tensor after tensor nor digest and flush what it writes, so
both are done here. Whole rows are read straight into their place. Other boxes are copied out of the
file's pages in memory, without what lies around them.

The digest is XXH3, which is as fast as memory; SHA-256 is slower than a disk. It finds damage, and
no manipulation, against which only a signature would help.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from meshplan.errors import Origin, Problem, StateError
from meshplan.shown import shown
from meshplan.state.boxes import TensorBox

BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
        "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
    }
)  # fmt: skip
"""Bytes of one element, by the format's word for a dtype."""

_MOST_HEADER: Final = 100_000_000
"""Bytes of a header, the format's own limit."""
_ALIGNMENT: Final = 8
_BLOCK: Final = 1 << 20
"""Bytes that are written, or read for a digest, at a time: they fit into a core's cache."""

Bytes = npt.NDArray[np.uint8]


@shown
@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file.

    Args:
        dtype: The format's word for its dtype, such as "BF16".
        shape: Its shape.
        offset: Where its bytes begin in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


def write(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    content: Callable[[str], Iterable[Bytes]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, str]:
    """Write a new file and flush it to disk.

    Args:
        path: The file, which must not exist yet.
        tensors: The tensors by name, in the order in which they are written; offsets are ignored.
        content: Called with each name in turn; returns its bytes in row-major order, in parts.
        metadata: Texts for the header.

    Returns:
        (Size of the file in bytes, digest of its content).

    Raises:
        OSError: The file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, entry in tensors.items():
        span = [end, end + entry.num_bytes]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        end = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest, size = xxhash.xxh3_128(), 8 + len(text) + end
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    try:
        _write_all(handle, memoryview(struct.pack("<Q", len(text)) + text), digest)
        for name, entry in tensors.items():
            written = 0
            for part in content(name):
                _write_all(handle, part.data, digest)
                written += part.nbytes
            assert written == entry.num_bytes, name
        os.fsync(handle)
    finally:
        os.close(handle)  # Some file systems report a full disk only here.
    return size, digest.hexdigest()


def _write_all(handle: int, data: memoryview, digest: Any) -> None:
    """Write and digest all of `data`, block by block, so that the digest finds it in the cache."""
    for begin in range(0, len(data), _BLOCK):
        block = data[begin : begin + _BLOCK]
        digest.update(block)
        while block:
            block = block[os.write(handle, block) :]


def digest_of(path: Path) -> str:
    """Return the digest of a file's content, 128 bits of XXH3 in hexadecimal.

    Raises:
        OSError: The file cannot be read.
    """
    digest, buffer = xxhash.xxh3_128(), bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


class TensorFile:
    """A file: its tensors by name, and their bytes.

    Attributes:
        tensors: The tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header of a file.

        Raises:
            StateError: The file is not a whole safetensors file.
        """
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(8)
                (length,) = struct.unpack("<Q", start) if len(start) == 8 else (size,)
                if length > min(size - 8, _MOST_HEADER):
                    raise _broken(path, "its header is longer than the file")
                header = json.loads(file.read(length))
            self.tensors = dict(_entries(header, 8 + length, size))
        except OSError as error:
            raise _broken(path, error.strerror or str(error)) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _broken(path, f"its header is not valid ({error})") from None

    def read(
        self, name: str, box: TensorBox, into: Bytes, local: TensorBox, shape: tuple[int, ...]
    ) -> None:
        """Copy a box of a tensor into a part of an array.

        Args:
            name: The tensor.
            box: The box, in the tensor's own coordinates.
            into: The bytes of a contiguous array of `shape`, with the tensor's dtype.
            local: Where the box goes in that array.
            shape: Shape of that array.

        Raises:
            OSError: The file cannot be read.
            StateError: The file ends before the box does.
        """
        entry = self.tensors[name]
        if not box.numel:
            return
        if box.shape[1:] == entry.shape[1:] == shape[1:]:
            count = box.numel * BYTES[entry.dtype]
            row = count // box.shape[0] if shape else 0
            at, to = (row * start[0] if shape else 0 for start in (box.start, local.start))
            self._read_bytes(entry.offset + at, into[to : to + count])
            return
        word = np.dtype(f"V{BYTES[entry.dtype]}")
        # Mapped anew for each tensor: pages of the file that were read count as memory of the
        # process for as long as they are mapped.
        source = np.memmap(self._path, word, "r", entry.offset, entry.shape or (1,))
        into.view(word).reshape(shape or (1,))[local.slices] = source[box.slices]

    def _read_bytes(self, offset: int, into: Bytes) -> None:
        """Fill an array with the bytes of the file from an offset on."""
        handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            rest = into.data
            while rest:  # One call reads at most 2 GiB.
                count = os.preadv(handle, [rest], offset)
                if not count:
                    raise _broken(self._path, "it ends within a tensor")
                rest, offset = rest[count:], offset + count
        finally:
            os.close(handle)


def _entries(header: Any, start: int, size: int) -> Iterable[tuple[str, TensorEntry]]:
    """Yield (name, entry) for each tensor of a header, with offsets from the start of the file."""
    if not isinstance(header, dict):
        raise TypeError("it is not a JSON object")
    for name, each in header.items():
        if name == "__metadata__":
            continue
        begin, end = each["data_offsets"]
        entry = TensorEntry(each["dtype"], tuple(each["shape"]), start + begin)
        whole = (begin, end, *entry.shape)
        if any(type(number) is not int or number < 0 for number in whole):
            raise ValueError(f"{name} has no valid place")
        if entry.dtype not in BYTES:
            raise ValueError(f"{name} has the unknown dtype {entry.dtype!r}")
        if end - begin != entry.num_bytes or start + end > size:
            raise ValueError(f"{name} does not fit into its place")
        yield name, entry


def _broken(path: Path, reason: str) -> StateError:
    what = f"this is not a whole safetensors file: {reason}"
    return StateError(Problem(what, Origin(str(path)), "load another state or copy the file again"))
