"""The folders of states: written beside their place, renamed when whole, removed when old.

A state is written into `step-N.incomplete`. When all of its files and its manifest are on disk, the
folder is renamed to `step-N`. A crash at any moment leaves the states before it as they were.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from meshplan.errors import MissingStateError, Origin, Problem, StateError
from meshplan.files import sync_folder, write_all
from meshplan.state.manifest import NAME, Manifest, read_manifest

_STEP: Final = re.compile(r"step-(\d{8,})")
_INCOMPLETE: Final = ".incomplete"


def folder_of(path: Path, step: int) -> Path:
    """Return the folder of the state of a step."""
    return path / f"step-{step:08d}"


def incomplete(path: Path, step: int) -> Path:
    """Return the folder into which the state of a step is written before it is whole."""
    return path / f"step-{step:08d}{_INCOMPLETE}"


def steps_in(path: Path) -> list[int]:
    """Return the steps of which `path` has a folder, newest first; they need not be whole."""
    return sorted(_steps(path, ""), reverse=True)


def _steps(path: Path, ending: str) -> Iterator[int]:
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        found = _STEP.fullmatch(name.removesuffix(ending))
        if found and name.endswith(ending) and folder_of(path, int(found[1])).name == found[0]:
            yield int(found[1])


def find_state(path: Path, step: int | None) -> tuple[Path, Manifest]:
    """Return the folder and the manifest of a state.

    Args:
        path: The folder that holds the states, one folder each.
        step: The step; None finds the newest state that is whole.

    Raises:
        MissingStateError: There is no such state, or none that is whole.
        StateError: The state of that step is damaged.
    """
    found = steps_in(path)
    if step is not None:
        folder = folder_of(path, step)
        try:
            return folder, read_manifest(folder)
        except FileNotFoundError:
            raise MissingStateError(_missing(path, f"no state of step {step}", found)) from None
    damaged: list[Problem] = []
    for each in found:
        folder = folder_of(path, each)
        try:
            return folder, read_manifest(folder)
        except FileNotFoundError:
            damaged.append(Problem("the folder has no manifest", Origin(str(folder))))
        except StateError as error:
            damaged += error.problems
    if damaged:
        raise MissingStateError(damaged)
    raise MissingStateError(_missing(path, "no state", found))


def _missing(path: Path, what: str, found: list[int]) -> Problem:
    """Return the problem of a folder without the wanted state."""
    if found:
        steps = ", ".join(map(str, found[:10])) + (", ..." if len(found) > 10 else "")
        fix = f"load one of the steps {steps}"
    else:
        fix = "name the folder that was given to meshplan.save"
    return Problem(f"there is {what} in this folder", Origin(str(path)), fix)


def begin_folder(path: Path, step: int) -> Path:
    """Make the empty folder into which the state of a step is written, and return it.

    Raises:
        StateError: The step was saved before.
        OSError: The folder cannot be made.
    """
    final = folder_of(path, step)
    if final.exists():
        raise StateError(
            Problem(
                f"step {step} was saved before, and a state is never overwritten",
                Origin(str(final)),
                "remove this folder, or save into another one",
            )
        )
    path.mkdir(parents=True, exist_ok=True)
    folder = incomplete(path, step)
    if folder.exists():  # What a save that was interrupted has left.
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def finish_folder(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest into a folder that has all other files, and give it its final name.

    Raises:
        OSError: The manifest cannot be written, or the folder cannot be renamed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(folder / NAME, flags, 0o666)
    try:
        write_all(handle, manifest.dump())
        os.fsync(handle)
    finally:
        os.close(handle)
    sync_folder(folder)
    final = folder.with_name(folder.name.removesuffix(_INCOMPLETE))
    os.rename(folder, final)
    sync_folder(final.parent)
    return final


def abandon_folder(folder: Path) -> None:
    """Remove the folder of a state that could not be written."""
    with suppress(OSError):  # The error that led here is the one to report.
        shutil.rmtree(folder)


def remove_old(path: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole states, and what interrupted saves left before them.

    A folder that is not whole does not count, and is not removed.

    Raises:
        OSError: A folder cannot be removed.
    """
    whole: list[int] = []
    for step in steps_in(path):
        with suppress(FileNotFoundError, StateError):
            read_manifest(folder_of(path, step))
            whole.append(step)
    for step in whole[keep:]:
        folder = folder_of(path, step)
        # A crash while its files are removed must not leave a folder that looks like a state.
        going = incomplete(path, step)
        if going.exists():
            shutil.rmtree(going)
        os.rename(folder, going)
        shutil.rmtree(going)
    for step in list(_steps(path, _INCOMPLETE)):
        if whole and step < whole[0]:
            shutil.rmtree(incomplete(path, step))
