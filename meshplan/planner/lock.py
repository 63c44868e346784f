"""plan.lock.yaml: what the planner chose, in the words of plan.yaml, and what it was chosen for.

The choices are statements that go on top of the plan file, as `--set` does, so that a locked plan
is the user's own file made whole. They hold while the plan file says the same and the model has
the same parameters. No times, no dates: the same inputs give the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from meshplan.errors import Origin, Problem, SpecError
from meshplan.graph import ModelGraph
from meshplan.spec import Spec

FORMAT: Final = 1
_AGAIN: Final = "run meshplan plan again"
_MOST_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock file's part that decides.

    Args:
        spec, model: Hashes of what it was made for.
        profile: (file beside the lock, its hash) of the constants that were measured; None where
            it went by meshplan's own.
        chosen: Statements by path.
        path: Of the file.
        content: All that it says.
    """

    spec: str
    model: str
    chosen: Mapping[str, Any]
    profile: tuple[Path, str] | None
    path: Path
    content: Mapping[str, Any]


def lock_path(plan: str | os.PathLike[str]) -> Path:
    """Where the lock of a plan file is.

    >>> lock_path("jobs/plan.yaml").name
    'plan.lock.yaml'
    """
    path = Path(plan)
    return path.with_name(f"{path.stem}.lock.yaml")


def spec_hash(spec: Spec) -> str:
    """Of what a plan says, whatever its comments, the order of its keys and where the file is."""
    return _hash(repr(spec))


def model_hash(graph: ModelGraph) -> str:
    """Of the names and shapes of all parameters, which say what a plan's rules match."""
    return _hash(json.dumps(sorted((t.fqn, list(t.shape)) for t in graph.parameters)))


def _hash(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a lock file whole, or not at all."""
    text = "# Written by `meshplan plan`; commit it beside the plan.\n" + yaml.safe_dump(
        dict(content), sort_keys=False, width=100, allow_unicode=True
    )
    _check_file(path, "the lock cannot be written")
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # A full disk leaves a part of it.
            beside.unlink()
        what = f"the lock cannot be written: {error.strerror}"
        fix = "say -o FILE, in a folder that is there and may be written to"
        raise SpecError(Problem(what, Origin(str(path)), fix)) from None


def _check_file(path: Path, what: str) -> None:
    """Refuse what is there and is no file: to read a device may not end, to replace one is worse.

    Args:
        what: What cannot be done.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device"
        problem = f"{what}: this is {kind}, not a file"
        raise SpecError(Problem(problem, Origin(str(path)), "name a file with -o FILE"))


def read(path: Path) -> Lock | None:
    """A lock file; None where there is none.

    Raises:
        SpecError: It is no lock file.
    """
    _check_file(path, "the lock cannot be read")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"the lock cannot be read: {error.strerror}"
        raise SpecError(Problem(what, Origin(str(path)), _AGAIN)) from None
    try:
        content, inputs = _parts(data)
        return Lock(
            spec=str(inputs["plan"]),
            model=str(inputs["model"]),
            chosen=dict(content["chosen"]),
            profile=_profile_of(path, inputs),
            path=path,
            content=content,
        )
    except (yaml.YAMLError, RecursionError):
        why = "it is no YAML"
    except KeyError as error:
        why = f"its inputs have no {error}"
    except (TypeError, ValueError) as error:
        why = str(error)
    what = f"this is no lock file of this version: {why}"
    raise SpecError(Problem(what, Origin(str(path)), _AGAIN))


def _parts(data: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(all that a lock says, its inputs)."""
    if len(data) > _MOST_BYTES:
        raise ValueError("it is far too large")
    content = yaml.safe_load(data)
    if not isinstance(content, dict) or "lock" not in content:
        raise ValueError("it does not begin with lock:")
    if content["lock"] != FORMAT:
        raise ValueError(f"it is of format {content['lock']}, and this version's is {FORMAT}")
    for part in ("inputs", "chosen"):
        if not isinstance(content.get(part), dict):
            raise ValueError(f"it has no {part}")
    return content, content["inputs"]


def _profile_of(path: Path, inputs: Mapping[str, Any]) -> tuple[Path, str] | None:
    if "profile_file" not in inputs:
        return None
    stated = inputs["profile_file"]
    return path.parent / str(stated["path"]), str(stated["hash"])


def file_hash(path: Path) -> str:
    """Of what a file says."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def overrides(stated: Mapping[str, Any]) -> list[str]:
    """Statements as `--set PATH=VALUE` has them; JSON is YAML."""
    return [f"{path}={json.dumps(value)}" for path, value in stated.items()]


def locked(source: Any, spec: Spec, graph: ModelGraph) -> Lock | str:
    """The lock of a plan file, or why there is none of this plan and model.

    Args:
        source: The plan file; a mapping has no lock.
        spec: As the file says it.

    Raises:
        SpecError: The lock cannot be read.
    """
    if not isinstance(source, (str, os.PathLike)):
        return "a plan without a file has no lock"
    path = lock_path(source)
    lock = read(path)
    if lock is None:
        return f"there is no {path.name}"
    if lock.spec != spec_hash(spec):
        return f"{path.name} was made for another state of this file"
    if lock.model != model_hash(graph):
        return f"{path.name} was made for another model"
    if lock.profile is not None:
        profile, known = lock.profile
        # Where a job runs, the file need not be: its figures have done their work.
        if profile.is_file() and file_hash(profile) != known:
            return f"{path.name} was made with another state of {profile.name}"
    return lock


def chosen_spec(
    load: Callable[[Sequence[str]], Spec], chosen: Mapping[str, Any], source: str
) -> Spec:
    """The spec with choices on top, each of which is said to stand in `source`."""
    spec = load(overrides(chosen))

    def is_chosen(path: str) -> bool:
        return any(path == c or path.startswith((f"{c}.", f"{c}[")) for c in chosen)

    origins = {
        path: Origin(source, origin.path) if is_chosen(path) else origin
        for path, origin in spec.origins.items()
    }
    return replace(spec, origins=origins)


def profile_of_lock(source: Any) -> Path | None:
    """The profile that the lock of a plan file was made with, where it is still there."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    lock = read(lock_path(source))
    found = lock and lock.profile
    return found[0] if found and found[0].is_file() else None
