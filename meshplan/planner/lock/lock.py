"""plan.lock.yaml: the planner's choices, as statements of plan.yaml, and the inputs they are for.

The choices go on top of the plan file, like `--set` statements, so that a locked plan is the user's
file made complete. They apply as long as the plan file states the same and the model has the same
parameters. A lock has no times and no dates: the same inputs give the same bytes.
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
from meshplan.model.graph import ModelGraph
from meshplan.planner.lock.admission import check_chosen
from meshplan.planner.lock.changes import EXPECTED
from meshplan.shown import shown, whole_repr
from meshplan.spec.keys import FREEABLE, freed
from meshplan.spec.reader import load_spec, read_yaml
from meshplan.spec.spec import PROFILES, InputSpec, Spec
from meshplan.spec.values import PlanValue, plain

FORMAT: Final = 2
_FIX: Final = "run meshplan plan again"
_ELSEWHERE: Final = "name another file with -o FILE, in a folder that exists and is writable"
INSTEAD: Final = "give the plan file itself, or run meshplan plan again"
"""The fix in errors on a lock that the user named and that does not apply."""
_HEADROOM: Final = 0.10
"""Memory headroom that earlier versions assumed for plans that state none."""
_MOST_BYTES: Final = 4 * 2**20


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The contents of a lock file.

    Args:
        spec: Hash of the plan file's spec that the lock was made for.
        model: Hash of the model that the lock was made for.
        profile: (path, hash) of the file with measured speeds that the lock was made with; None if
            it was made with the speeds that meshplan knows of the devices.
        chosen: {path: value} statements of the planner's choices.
        free: Keys that `--free` gave to the planner although the plan file states them.
        origins: {path of a choice: place in the lock file}.
        path: Path of the lock file.
        content: Everything in the file.
    """

    spec: str
    model: str
    chosen: Mapping[str, Any]
    profile: tuple[Path, str] | None
    path: Path
    content: Mapping[str, Any]
    origins: Mapping[str, Origin]
    free: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """The lock's hash of its own content, as the file states it."""
        return str(self.content["hash"])

    @property
    def framework(self) -> str:
        """The name in `PROFILES` of the constants that the lock was made with."""
        name = str(self.content["inputs"]["profile"]).split(", ")[1]
        return name if name in PROFILES else PROFILES[0]

    @property
    def statements(self) -> dict[str, Any]:
        """{path: value} statements to put on top of the plan file: freed keys, then choices."""
        return {**freed(self.free), **self.chosen}

    @property
    def used(self) -> str:
        """The line to print if a command uses this lock; it names the freed keys."""
        free = f", which frees {' and '.join(self.free)}" if self.free else ""
        return f"uses {self.path.name}{free}"


def lock_path(plan: str | os.PathLike[str]) -> Path:
    """Return the path of the lock of a plan file.

    >>> lock_path("jobs/plan.yaml").name
    'plan.lock.yaml'
    """
    path = Path(plan)
    return path.with_name(f"{path.stem}.lock.yaml")


def is_file(source: Any) -> bool:
    """Return True if a plan is given as a file, which may have a lock, and not as a mapping."""
    return isinstance(source, str | os.PathLike)


def has_lock(source: Any) -> bool:
    """Return True if there is a lock next to a plan file, even one that no longer applies."""
    return is_file(source) and lock_path(source).exists()


def spec_hash(spec: Spec) -> str:
    """Hash what a plan states; comments, the order of keys and the path do not matter.

    A headroom or dtype that is not stated counts as the value that earlier versions assumed, so
    that locks of these versions still apply.
    """
    hardware, given, more = spec.hardware, spec.input, ""
    if hardware is not None and "hardware.headroom" not in spec.origins:
        hardware = replace(hardware, headroom=_HEADROOM)
    elif hardware is not None and hardware.headroom == _HEADROOM:
        more = ", and it is stated"
    if isinstance(given, InputSpec) and given.dtype is None:
        given = replace(given, dtype="int64")
    return _hash(whole_repr(replace(spec, hardware=hardware, input=given)) + more)


def model_hash(graph: ModelGraph) -> str:
    """Hash the names and shapes of all parameters, which identify the model for a plan."""
    return _hash(json.dumps(sorted((t.fqn, list(t.shape)) for t in graph.parameters)))


def _hash(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a lock file completely, or not at all.

    Args:
        path: Path of the lock file.
        content: Everything in the lock except its hash, which is added.
    """
    check_writable(path, "the lock", _ELSEWHERE)
    lock, *rest = content.items()
    whole = dict([lock, ("hash", _hash_of(content)), *rest])
    text = "# Written by `meshplan plan`; commit it beside the plan.\n" + yaml.dump(
        whole, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True
    )
    write_bytes(path, text.encode(), "the lock", _ELSEWHERE)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes no aliases, since `spec.reader` does not accept them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _hash_of(content: Mapping[str, Any]) -> str:
    """Hash the contents of a lock without the hash itself."""
    return _hash(json.dumps({k: v for k, v in content.items() if k != "hash"}, sort_keys=True))


def read(path: Path) -> Lock | None:
    """Return the lock in a file; None if there is no file.

    Raises:
        SpecError: The file is no lock of this version, or was changed after it was written.
    """
    try:
        root = read_yaml(path, _MOST_BYTES, "a lock")
    except FileNotFoundError:
        return None
    except SpecError as error:
        first = error.problems[0]
        what = f"this is not a lock file of this version: {first.what}"
        raise SpecError(Problem(what, first.origin, _FIX)) from None
    try:
        content = _checked(plain(root))
        inputs = content["inputs"]
        return Lock(
            spec=inputs["plan"],
            model=inputs["model"],
            chosen=content["chosen"],
            profile=_profile_of(path, inputs),
            free=_free_of(inputs),
            path=path,
            content=content,
            origins={path: each.key or each.origin for path, each in _chosen(root).items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        why = str(error)
    what = f"this is not a lock file of this version: {why}"
    raise SpecError(Problem(what, Origin(str(path)), _FIX))


def _chosen(root: PlanValue) -> Mapping[str, PlanValue]:
    found: Mapping[str, PlanValue] = root.data["chosen"].data
    return found


def _checked(content: Any) -> Mapping[str, Any]:
    """Check the format, hash and figures of a lock's contents, and return the contents.

    Raises:
        ValueError: The contents are not those of a lock that this version wrote.
    """
    if not isinstance(content, dict) or "lock" not in content:
        raise ValueError("it does not begin with lock:")
    if content["lock"] != FORMAT:
        raise ValueError(f"its format is {content['lock']}, and this version reads {FORMAT}")
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
    """Check the figures that are compared and printed, since an edited lock may have a valid hash.

    Raises:
        ValueError: `expected` or `memory` is missing, or a figure is not a finite number >= 0.
    """
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


def _free_of(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the plan file that a lock frees, as `--free` did.

    Raises:
        ValueError: The lock frees a key that cannot be freed.
    """
    free = inputs.get("free", [])
    if not isinstance(free, list) or not all(each in FREEABLE for each in free):
        raise ValueError(f"its free is {free!r}")
    return tuple(free)


def file_hash(path: Path) -> str:
    """Return "sha256:" and the hash of a profile's bytes."""
    return f"sha256:{hashlib.sha256(read_bytes(path, _MOST_BYTES, 'a profile')).hexdigest()}"


def overrides(stated: Mapping[str, Any]) -> list[str]:
    """Return {path: value} statements as "path=value" strings, with values in JSON, for `--set`."""
    return [f"{path}={json.dumps(value)}" for path, value in stated.items()]


def locked(source: Any, load: Callable[[Sequence[str]], Spec], graph: ModelGraph) -> Lock | str:
    """Return the lock of a plan file, or the reason why none applies to this plan and model.

    Args:
        source: The plan file, or a mapping, which has no lock.
        load: Reads the plan file with statements on top.
        graph: The model.

    Raises:
        SpecError: The lock cannot be read, or makes choices that the plan does not leave open.
    """
    if not is_file(source):
        return "a plan without a file has no lock"
    path = lock_path(source)
    lock = read(path)
    if lock is None:
        return f"there is no {path.name}"
    free = overrides(freed(lock.free))
    if lock.spec != spec_hash(load(free)):
        if lock.spec == spec_hash(load_spec(source, free)):
            return f"{path.name} was made for the file without --set"
        return f"{path.name} was made for another state of this file"
    if lock.model != model_hash(graph):
        return f"{path.name} was made for another model"
    if lock.profile is not None:
        profile, known = lock.profile
        # The profile may be missing where a job runs: only planning needs its speeds.
        if profile.is_file() and file_hash(profile) != known:
            return f"{path.name} was made with another state of {profile.name}"
    # `--profile NAME` prices the locked plan anew, as a file does; what the plan file says decides.
    own = load_spec(source)
    if "profile" in own.origins and own.profile != lock.framework:
        return f"{path.name} was made with profile: {lock.framework}"
    _check_chosen(lock, load, graph)
    return lock


def lock_in_words(found: Lock | str, source: Any, spec: Spec) -> str:
    """Return a line for the user: the lock that a plan uses, or why it uses none; or "".

    The line is "" if nothing is left to the planner and there is no lock.

    Args:
        found: The result of `locked`.
        source: The plan file, or a mapping.
        spec: The spec of the plan file without a lock.
    """
    if not isinstance(found, str):
        return found.used
    if spec.free_fields:
        return f"{found}: planning"
    return f"{found}: keys that the plan leaves out have their defaults" if has_lock(source) else ""


def _check_chosen(lock: Lock, load: Callable[[Sequence[str]], Spec], graph: ModelGraph) -> None:
    """Check that the lock makes only choices that the plan, with the freed keys, leaves open.

    Raises:
        SpecError: The lock makes other choices.
    """
    free = overrides(freed(lock.free))
    check_chosen(
        lock.chosen, lock.origins, lambda more: load([*free, *more]), overrides(lock.chosen), graph
    )


def check_holds(lock: Lock, load: Callable[[Sequence[str]], Spec], graph: ModelGraph) -> None:
    """Check that a lock which the user named applies to its plan and model.

    A lock that merely lies next to its plan file is ignored if it does not apply (`locked`).

    Args:
        lock: The lock.
        load: Reads the lock's plan file with statements on top.
        graph: The model.

    Raises:
        SpecError: The lock is for another plan or model, or makes choices that the plan does not
            leave open.
    """
    for is_other, other in (
        (lock.spec != spec_hash(load(overrides(freed(lock.free)))), "state of its plan file"),
        (lock.model != model_hash(graph), "model"),
    ):
        if is_other:
            what = f"this lock was made for another {other}"
            raise SpecError(Problem(what, Origin(str(lock.path)), INSTEAD))
    _check_chosen(lock, load, graph)


def chosen_spec(
    load: Callable[[Sequence[str]], Spec],
    chosen: Mapping[str, Any],
    source: str,
    lock: str | None = None,
) -> Spec:
    """Return the spec with choices on top; error messages about them name `source`.

    Args:
        load: Reads the plan file with statements on top.
        chosen: {path: value} choices.
        source: Name of what made the choices, such as a lock file.
        lock: The hash of the lock, if one made them.
    """
    spec = load(overrides(chosen))

    def is_chosen(path: str) -> bool:
        return any(path == c or path.startswith((f"{c}.", f"{c}[")) for c in chosen)

    origins = {
        path: Origin(source, origin.path) if is_chosen(path) else origin
        for path, origin in spec.origins.items()
    }
    return replace(spec, origins=origins, lock=lock)


def profile_of_lock(source: Any, spec: Spec) -> Path | None:
    """Return the path of the profile that a plan file's lock was made with; None if none exists.

    Args:
        source: The plan file, or a mapping, which has no lock.
        spec: What it states, with overrides; a profile that it names is used instead.
    """
    if not is_file(source) or "profile" in spec.origins:
        return None
    lock = read(lock_path(source))
    found = lock and lock.profile
    return found[0] if found and found[0].is_file() else None
