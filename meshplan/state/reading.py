"""Read boxes of a saved tensor from the pieces that it was saved in."""

from __future__ import annotations

from pathlib import Path

from meshplan.errors import Origin, Problem, StateError
from meshplan.state.boxes import LocalBox, TensorBox
from meshplan.state.manifest import Manifest, SavedPiece, SavedTensor
from meshplan.state.safetensors import Bytes, TensorFile


class StateReader:
    """The files of one state; the header of each is read when it is first needed.

    Args:
        folder: The folder of the state.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._open: dict[str, TensorFile] = {}

    def read(self, tensor: SavedTensor, box: LocalBox, into: Bytes, shape: tuple[int, ...]) -> None:
        """Copy one box of a tensor into the array that holds a rank's shard of it.

        Args:
            tensor: The saved tensor.
            box: Where the box lies in the whole tensor, and where in the shard.
            into: The bytes of the shard, with the saved dtype.
            shape: Shape of the shard.

        Raises:
            StateError: A file is not what the manifest says.
        """
        for piece in tensor.pieces:
            common = piece.box.overlap(box.box)
            if common is None:
                continue
            start = common.within(box.box).start
            local = TensorBox(tuple(a + b for a, b in zip(start, box.local.start, strict=True)),
                        common.shape)  # fmt: skip
            file = self._file(piece, tensor)
            file.read(piece.key, common.within(piece.box), into, local, shape)

    def read_whole(self, tensor: SavedTensor, into: Bytes) -> None:
        """Copy a whole tensor into an array of its shape and dtype.

        Raises:
            StateError: A file is not what the manifest says.
        """
        whole = TensorBox.whole(tensor.shape)
        self.read(tensor, LocalBox(whole, whole), into, tensor.shape)

    def _file(self, piece: SavedPiece, tensor: SavedTensor) -> TensorFile:
        """Return the file of a piece, after checking that it has this piece."""
        path = self._folder / piece.file
        if piece.file not in self._open:
            self._open[piece.file] = TensorFile(path)
        file = self._open[piece.file]
        entry = file.tensors.get(piece.key)
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, piece.box.shape):
            what = f"the file does not have {piece.key} as the manifest describes it"
            raise StateError(Problem(what, Origin(str(path)), "load another step, with step=..."))
        return file
