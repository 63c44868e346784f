"""Write a decision as a lock file: the choices, and the plan's figures for people who read it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.plan.plan import Plan
from meshplan.planner.lock.changes import FieldChange, changes, fields
from meshplan.planner.lock.lock import (
    FORMAT,
    INSTEAD,
    Lock,
    file_hash,
    lock_path,
    locked,
    model_hash,
    read,
    spec_hash,
    write,
)
from meshplan.planner.problem.decision import Decision
from meshplan.planner.problem.overrides import patterns
from meshplan.planner.problem.request import loading
from meshplan.version import __version__

_SUFFIX: Final = ".lock.yaml"


def lock_plan(
    plan: str | os.PathLike[str],
    decision: Decision,
    path: str | Path | None = None,
    free: Sequence[str] = (),
) -> Path:
    """Write the lock of a decision next to its plan file, or to another path.

    Args:
        plan: Path of the plan file.
        decision: A decision that chose a plan.
        path: Path of the lock; None to write it next to the plan file.
        free: Keys left to the planner (`--free`) besides those that the file leaves open.

    Returns:
        The path of the lock.
    """
    target = Path(path) if path is not None else lock_path(plan)
    write(target, lock_of(decision, target.parent, free))
    return target


def changes_since(
    plan: str | os.PathLike[str],
    decision: Decision,
    path: str | Path | None = None,
    free: Sequence[str] = (),
) -> tuple[FieldChange, ...] | None:
    """Return the changes from the existing lock to a decision; None if there is no lock.

    Args:
        plan: Path of the plan file.
        decision: A decision that chose a plan.
        path: Path of the lock; None for the lock next to the plan file.
        free: Keys left to the planner (`--free`) besides those that the file leaves open.

    Raises:
        SpecError: The lock cannot be read.
    """
    target = Path(path) if path is not None else lock_path(plan)
    lock = read(target)
    return changes(lock.content, lock_of(decision, target.parent, free)) if lock else None


def figures_of_lock(source: Any, plan: Plan, lock: Lock | None = None) -> dict[str, float]:
    """Return the figures that a plan file's lock states for the plan.

    Args:
        source: Path of the plan file, or its content as a mapping.
        plan: The plan.
        lock: A lock that is known to apply; None for the lock next to the plan file.

    Returns:
        {field of `DiffSide`: figure}; {} if no lock applies.

    Raises:
        SpecError: The lock cannot be read.
    """
    found = lock or locked(source, loading(source, ()), plan.graph)
    if isinstance(found, str):
        return {}
    stated = dict(fields(found.content))
    rate = stated["expected.tokens_per_s_per_gpu"]
    figures = {
        "step_s": stated["expected.step_s"],
        # The rate is 0 or None if samples are not sequences of tokens.
        "tokens_per_s": rate and rate * plan.mesh.world_size,
        "peak_bytes": stated["memory.high_bytes"],
    }
    return {name: float(x) for name, x in figures.items() if x}


def source_of_lock(path: Path) -> tuple[Path, Lock] | None:
    """Return (plan file of a lock, the lock); None if `path` is not a lock.

    This does not check that the lock applies: `check_holds` does, once the model is known.

    Args:
        path: Path of a file that may be a lock.

    Raises:
        SpecError: The plan file is not next to the lock.
    """
    if not path.name.endswith(_SUFFIX):
        return None
    lock = read(path)
    if lock is None:
        return None
    source = source_beside(path)
    if source is None:
        name = f"{path.name.removesuffix(_SUFFIX)}.yaml"
        what = f"this is the lock of {name}, which is not in the same folder"
        raise SpecError(Problem(what, Origin(str(path)), INSTEAD))
    return source, lock


def source_beside(lock: Path) -> Path | None:
    """Return the path of the plan file next to a lock; None if there is no such file."""
    source = lock.with_name(f"{lock.name.removesuffix(_SUFFIX)}.yaml")
    return source if source != lock and source.is_file() else None


def lock_of(decision: Decision, folder: Path, free: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a lock file for a decision. Equal inputs give equal bytes.

    Args:
        decision: A decision that chose a plan.
        folder: The folder that the lock will be in.
        free: Keys left to the planner (`--free`) besides those that the file leaves open.
    """
    chosen = decision.chosen
    assert chosen is not None
    plan, ladder = chosen.plan, decision.ladder
    return {
        "lock": FORMAT,
        "meshplan": __version__,
        "inputs": {
            "plan": spec_hash(decision.spec),
            **({"free": list(free)} if free else {}),
            "model": model_hash(plan.graph),
            "profile": f"{decision.profile.device}, {decision.profile.framework}, "
            f"{decision.profile.dtype}",
            **_profile_file(decision, folder),
        },
        "chosen": dict(chosen.stated),
        "expected": {
            "step_s": _round(chosen.seconds),
            "tokens_per_s_per_gpu": _round(decision.tokens_per_s(chosen)),
            "mfu": _round(decision.mfu(chosen)),
            "gap": _round(decision.gap),
            **(
                {
                    "ladder_s": {
                        "roofline": _round(ladder.roofline_s),
                        "no_network": _round(ladder.no_network_s),
                        "no_memory_limit": _round(ladder.no_memory_limit_s),
                        "fastest": _round(ladder.plan_s),
                    }
                }
                if ladder
                else {}
            ),
        },
        "memory": [
            {
                "ranks": f"{group.ranks[0]}..{group.ranks[-1]}, {len(group.ranks)} in all",
                "high_bytes": group.band[1],
                "limit_bytes": decision.limit_bytes,
                "at": " ".join(filter(None, (group.at.phase, group.at.module))),
            }
            for group in chosen.memory.groups
        ],
        "tensors": dict(_tensors(decision)),
        "rejected": [f"{each.what}: {each.why}" for each in decision.rejected],
    }


def _profile_file(decision: Decision, folder: Path) -> dict[str, Any]:
    """Return the lock's entry with path and hash of the profile; {} if the planner used none."""
    path = decision.profile_path
    if path is None:
        return {}
    name = os.path.relpath(path, folder).replace(os.sep, "/")
    return {"profile_file": {"path": name, "hash": file_hash(path)}}


def _round(number: float) -> float:
    """Round to six digits; further digits depend on the machine that ran the planner."""
    return float(f"{number:.6g}")


def _tensors(decision: Decision) -> Iterator[tuple[str, str]]:
    """Yield (pattern of fqns, stored layout). Equal tensors of several blocks share a pattern."""
    assert decision.chosen is not None
    plan = decision.chosen.plan
    blocks = plan.graph.blocks()
    inside: dict[tuple[str, str], list[str]] = {}
    for fqn, placed in plan.assignment.tensors.items():
        if placed.info.is_buffer:
            continue
        block = next((b for b in blocks if fqn.startswith(f"{b}.")), None)
        layout = str(placed.stored)
        if block is None:
            inside.setdefault((fqn, layout), [])
        else:
            inside.setdefault((fqn[len(block) :], layout), []).append(block)
    for (rest, layout), found in inside.items():
        folded = patterns(found) if found else ""
        for pattern in [folded] if isinstance(folded, str) else folded:
            yield f"{pattern}{rest}", layout
