"""Saved training states: what is in them, whether they are whole, and how they are converted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshplan.api.checking import decide
from meshplan.api.source import Source
from meshplan.errors import MissingStateError, Origin, Problem, StateError
from meshplan.plan.plan import Plan
from meshplan.shown import shown
from meshplan.state.convert import convert_to_plan
from meshplan.state.folder import find_state, folder_of, steps_in
from meshplan.state.manifest import NAME, Manifest, changed_file, read_manifest
from meshplan.state.matching import held_by, match
from meshplan.state.pretrained import convert, read_pretrained
from meshplan.state.safetensors import digest_of

_EVERY_RANK = 256
"""Ranks up to which what each one reads is counted; of more ranks only the first is."""


@shown
@dataclass(frozen=True, slots=True)
class SavedState:
    """One state found in a folder.

    Args:
        folder: Its folder.
        manifest: Its manifest; None if it cannot be read.
        problems: What is wrong with it; none if it is whole.
    """

    folder: Path
    manifest: Manifest | None
    problems: tuple[Problem, ...] = ()


@shown
@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The bytes that ranks would read to load a state under a plan.

    Args:
        mesh: The mesh of the plan, as text.
        ranks: Number of ranks.
        most_bytes: Bytes that a rank reads, at most; of the first rank if there are very many.
        total_bytes: Bytes that all ranks read together.
        problems: Why the state cannot be loaded under the plan, if so.
    """

    mesh: str
    ranks: int
    most_bytes: int
    total_bytes: int
    problems: tuple[Problem, ...] = ()


def inspect_states(path: str | os.PathLike[str]) -> tuple[SavedState, ...]:
    """Return the states in a folder, newest first, after comparing the digest of every file.

    Args:
        path: The folder given to `meshplan.save`, the folder of one state, or a checkpoint of
            Hugging Face.

    Raises:
        MissingStateError: There is none.
    """
    folder = Path(os.fspath(path))
    if steps := steps_in(folder):
        return tuple(_inspected(folder_of(folder, step)) for step in steps)
    if (folder / NAME).exists():
        return (_inspected(folder),)
    if next(folder.glob("*.safetensors"), None) is not None:
        return (SavedState(folder, read_pretrained(folder)),)
    find_state(folder, None)  # Raises, and says what is missing.
    raise AssertionError(folder)


def _inspected(folder: Path) -> SavedState:
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return SavedState(
            folder, None, (Problem("the folder has no manifest", Origin(str(folder))),)
        )
    except StateError as error:
        return SavedState(folder, None, tuple(error.problems))
    return SavedState(folder, manifest, tuple(_changed(folder, manifest)))


def _changed(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Yield a problem for each file whose digest is another one."""
    for name, saved in manifest.files.items():
        try:
            if digest_of(folder / name) != saved.xxh3:
                yield changed_file(folder / name)
        except OSError as error:
            what = f"a file of the state cannot be read: {error.strerror}"
            yield Problem(what, Origin(str(folder / name)))


def plan_load(state: SavedState, source: Source) -> PlannedLoad:
    """Return what loading a state under a plan would read.

    Args:
        state: A state that is whole.
        source: The plan and its model.

    Raises:
        SpecError: The plan or the model cannot be read, or no model is known.
        PlanError: The plan does not fit the model.
    """
    assert state.manifest is not None
    plan = decide(source)
    matching = match(state.manifest, plan)
    problems = tuple(matching.problems(strict=True))
    if matching.reshaped:
        return PlannedLoad(str(plan.mesh), plan.mesh.world_size, 0, 0, problems)
    world = plan.mesh.world_size
    ranks = range(world) if world <= _EVERY_RANK else range(1)
    sizes = [sum(each.num_bytes for each in held_by(rank, matching, plan)) for rank in ranks]
    total = sum(sizes) * world // len(sizes)
    return PlannedLoad(str(plan.mesh), world, max(sizes), total, problems)


def convert_state(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    source: Source | None,
    step: int | None = None,
) -> Path:
    """Write a state as another plan shards it, or its model as a checkpoint of Hugging Face.

    One tensor, or one rank's shard of it, is in memory at a time.

    Args:
        path: The folder given to `meshplan.save`, or the folder of one state.
        out: The folder to write to.
        source: The plan and its model; None writes a checkpoint of Hugging Face.
        step: The step; None takes the newest state that is whole.

    Returns:
        The folder that was written.

    Raises:
        MissingStateError: There is no such state.
        StateError: The state is damaged, is of another model, or the folder cannot be written.
    """
    folder, target = Path(os.fspath(path)), Path(os.fspath(out))
    if step is None and (folder / NAME).exists():
        manifest = read_manifest(folder)
    else:
        folder, manifest = find_state(folder, step)
    if problems := list(_changed(folder, manifest)):
        raise StateError(problems)
    plan: Plan | None = None if source is None else decide(source)
    try:
        if plan is None:
            convert(folder, manifest, target)
            return target
        return convert_to_plan(folder, manifest, plan, target)
    except OSError as error:
        if isinstance(error, MissingStateError):
            raise
        what = f"the state cannot be written: {error.strerror or error}"
        raise StateError(
            Problem(what, Origin(str(error.filename or target)), "name another folder with --out")
        ) from None


def with_place(problems: tuple[Problem, ...], folder: Path) -> tuple[Problem, ...]:
    """Return problems with the folder as the place of those that name none."""
    return tuple(p if p.origin else replace(p, origin=Origin(str(folder))) for p in problems)
