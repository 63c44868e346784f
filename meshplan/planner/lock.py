"""plan.lock.yaml: what the planner chose, in the words of plan.yaml, and what it was chosen for.

The choices are statements that go on top of the plan file, as `--set` does, so that a locked plan
is the user's own file made whole. They hold while the plan file says the same and the model has
the same parameters. No times, no dates: the same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import check_writable, read_bytes, write_bytes
from meshplan.graph import ModelGraph
from meshplan.planner.admission import check_chosen
from meshplan.planner.changed import EXPECTED
from meshplan.reader import read_yaml
from meshplan.spec import Spec
from meshplan.values import Value, plain

FORMAT: Final = 2
_AGAIN: Final = "run meshplan plan again"
_ELSEWHERE: Final = "say -o FILE, in a folder that is there and may be written to"
INSTEAD: Final = "give the plan file itself, or run meshplan plan again"
"""The fix of a lock that was named and does not hold."""
_MOST_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock file's part that decides.

    Args:
        spec, model: Hashes of what it was made for.
        profile: (file beside the lock, its hash) of the constants that were measured; None where
            it went by meshplan's own.
        chosen: Statements by path.
        origins: Where each of them stands.
        path: Of the file.
        content: All that it says.
    """

    spec: str
    model: str
    chosen: Mapping[str, Any]
    profile: tuple[Path, str] | None
    path: Path
    content: Mapping[str, Any]
    origins: Mapping[str, Origin]


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
    """Write a lock file whole, or not at all.

    Args:
        content: All but the hash of it, which is added.
    """
    check_writable(path, "the lock", _ELSEWHERE)
    lock, *rest = content.items()
    whole = dict([lock, ("hash", _hash_of(content)), *rest])
    text = "# Written by `meshplan plan`; commit it beside the plan.\n" + yaml.dump(
        whole, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True
    )
    write_bytes(path, text.encode(), "the lock", _ELSEWHERE)


class _Dumper(yaml.SafeDumper):
    """Writes a list that stands twice twice: aliases are not read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _hash_of(content: Mapping[str, Any]) -> str:
    """The hash of all that a lock says but the hash itself."""
    return _hash(json.dumps({k: v for k, v in content.items() if k != "hash"}, sort_keys=True))


def read(path: Path) -> Lock | None:
    """Return a lock file; None where there is none.

    Raises:
        SpecError: It is no lock file, or was changed after it was written.
    """
    try:
        root = read_yaml(path, _MOST_BYTES, "a lock")
    except FileNotFoundError:
        return None
    except SpecError as error:
        first = error.problems[0]
        what = f"this is no lock file of this version: {first.what}"
        raise SpecError(Problem(what, first.origin, _AGAIN)) from None
    try:
        content = _checked(plain(root))
        inputs = content["inputs"]
        return Lock(
            spec=inputs["plan"],
            model=inputs["model"],
            chosen=content["chosen"],
            profile=_profile_of(path, inputs),
            path=path,
            content=content,
            origins={path: each.key or each.origin for path, each in _chosen(root).items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        why = str(error)
    what = f"this is no lock file of this version: {why}"
    raise SpecError(Problem(what, Origin(str(path)), _AGAIN))


def _chosen(root: Value) -> Mapping[str, Value]:
    found: Mapping[str, Value] = root.data["chosen"].data
    return found


def _checked(content: Any) -> Mapping[str, Any]:
    """What a lock says, once its form and its hash are right."""
    if not isinstance(content, dict) or "lock" not in content:
        raise ValueError("it does not begin with lock:")
    if content["lock"] != FORMAT:
        raise ValueError(f"it is of format {content['lock']}, and this version's is {FORMAT}")
    for part in ("inputs", "chosen"):
        if not isinstance(content.get(part), dict):
            raise ValueError(f"it has no {part}")
    for name in ("plan", "model"):
        if not isinstance(content["inputs"].get(name), str):
            raise ValueError(f"its inputs have no {name}")
    if content.get("hash") != _hash_of(content):
        raise ValueError("it was changed after it was written")
    _check_figures(content)
    return content


def _check_figures(content: Mapping[str, Any]) -> None:
    """Check what is compared and printed: whoever writes a lock can hash it too."""
    expected, groups = content.get("expected"), content.get("memory")
    if not isinstance(expected, dict):
        raise ValueError("it has no expected")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("it has no memory")
    figures = [(f"expected.{name}", expected.get(name)) for name in EXPECTED]
    figures += [("memory.high_bytes", group.get("high_bytes", 0)) for group in groups]
    for name, value in figures:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            raise ValueError(f"its {name} is {value!r}")


def _profile_of(path: Path, inputs: Mapping[str, Any]) -> tuple[Path, str] | None:
    if "profile_file" not in inputs:
        return None
    stated = inputs["profile_file"]
    return path.parent / str(stated["path"]), str(stated["hash"])


def file_hash(path: Path) -> str:
    """Of what a file says."""
    return f"sha256:{hashlib.sha256(read_bytes(path, _MOST_BYTES, 'a profile')).hexdigest()}"


def overrides(stated: Mapping[str, Any]) -> list[str]:
    """Statements as `--set PATH=VALUE` has them; JSON is YAML."""
    return [f"{path}={json.dumps(value)}" for path, value in stated.items()]


def locked(source: Any, load: Callable[[Sequence[str]], Spec], graph: ModelGraph) -> Lock | str:
    """The lock of a plan file, or why there is none of this plan and model.

    Args:
        source: The plan file; a mapping has no lock.
        load: Reads it with statements on top.

    Raises:
        SpecError: The lock cannot be read, or says more than the plan leaves open.
    """
    if not isinstance(source, (str, os.PathLike)):
        return "a plan without a file has no lock"
    path = lock_path(source)
    lock = read(path)
    if lock is None:
        return f"there is no {path.name}"
    if lock.spec != spec_hash(load(())):
        return f"{path.name} was made for another state of this file"
    if lock.model != model_hash(graph):
        return f"{path.name} was made for another model"
    if lock.profile is not None:
        profile, known = lock.profile
        # Where a job runs, the file need not be: its figures have done their work.
        if profile.is_file() and file_hash(profile) != known:
            return f"{path.name} was made with another state of {profile.name}"
    check_chosen(lock.chosen, lock.origins, load, overrides(lock.chosen), graph)
    return lock


def check_holds(lock: Lock, load: Callable[[Sequence[str]], Spec], graph: ModelGraph) -> None:
    """Refuse a lock that somebody names, where the one beside a plan file would be passed over.

    Args:
        load: Reads its plan file with statements on top.

    Raises:
        SpecError: It was made for another plan or model, or says more than the plan leaves open.
    """
    for is_other, other in (
        (lock.spec != spec_hash(load(())), "state of its plan file"),
        (lock.model != model_hash(graph), "model"),
    ):
        if is_other:
            what = f"this lock was made for another {other}"
            raise SpecError(Problem(what, Origin(str(lock.path)), INSTEAD))
    check_chosen(lock.chosen, lock.origins, load, overrides(lock.chosen), graph)


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
