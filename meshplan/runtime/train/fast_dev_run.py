"""A fast development run: a whole script on a few batches, of which nothing is left behind.

`meshplan launch --fast-dev-run N` sets MESHPLAN_FAST_DEV_RUN for the ranks. Loaders then end after
N batches, and what `save`, `save_pretrained` and `Run` write goes into a folder that is removed
when the script ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from meshplan.errors import Origin, Problem, StateError
from meshplan.launch.environment import read_fast_dev_run
from meshplan.runtime.train.process import is_main

_MOST_EMPTY: Final = 1_000
"""Loops over a loader in vain after which a script is taken for one that never ends."""

_folders: Final[dict[str, Path]] = {}
"""The folder that takes the place of a path of the script."""
_announced: Final[set[int]] = set()


def num_dev_batches() -> int | None:
    """Return the number of batches after which a loop ends; None for a run in earnest.

    The first call says on the main rank that the run is a short one.

    Raises:
        ApplyError: MESHPLAN_FAST_DEV_RUN is no number of at least 1.
    """
    number = read_fast_dev_run(os.environ)
    if number is not None and os.getpid() not in _announced:
        _announced.add(os.getpid())
        if is_main():
            batches = "1 batch" if number == 1 else f"{number} batches"
            print(
                f"meshplan: fast development run: loaders end after {batches}, and no state or "
                "record is kept",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    return number


def own_folder(path: str | os.PathLike[str]) -> Path:
    """Return where this rank writes what the script wants at `path`: there, if in earnest.

    Rank 0 makes the folder of a fast development run, beside the path because all ranks share that
    place, and removes it when the script ends.
    """
    key = os.path.abspath(path)
    if num_dev_batches() is None:
        return Path(path)
    if key not in _folders:
        near = Path(key).parent
        while not near.is_dir():
            near = near.parent
        try:
            made = tempfile.mkdtemp(prefix="fast-dev-run-", dir=near)
        except OSError as error:
            what = f"no folder can be made for the fast development run: {error.strerror}"
            raise StateError(Problem(what, Origin(str(near)))) from None
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        _folders[key] = Path(made) / Path(key).name
    return _folders[key]


def note_folder(path: str | os.PathLike[str], folder: str) -> Path:
    """Take rank 0's folder for a path of the script on this rank too, and return it."""
    return _folders.setdefault(os.path.abspath(path), Path(folder))


def folder_to_read(path: str | os.PathLike[str]) -> Path:
    """Return where the states of `path` are: those of this fast development run, if it saved some.

    States of other runs are read in their place, and never changed.
    """
    return _folders.get(os.path.abspath(path), Path(path))


class DevBatches:
    """Ends the loops over one loader in a fast development run.

    Each loop ends after a few batches. A loop in which the model was trained is the only one that
    trains: later ones are empty, so that further epochs take no time. Loops that evaluate are not.
    """

    def __init__(self) -> None:
        self._has_trained = False
        self._num_empty = 0

    def begin(self) -> int | None:
        """Return how many batches a loop has that begins now; None for all.

        Raises:
            SystemExit: The script has asked for many loops in vain, as `while step < 1000` does.
        """
        number = num_dev_batches()
        if number is None or not self._has_trained:
            return number
        self._num_empty += 1
        if self._num_empty > _MOST_EMPTY:
            if is_main():
                print(
                    "meshplan: fast development run: the script loops until a step that a short "
                    "run does not reach; what follows that loop was not tried",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            raise SystemExit(0)
        return 0

    def end(self, *, has_trained: bool) -> None:
        """Note if the model has taken a step in the loop that ends."""
        self._has_trained |= has_trained
