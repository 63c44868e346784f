"""The verbs of planning: what `meshplan plan` and `meshplan calibrate` answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshplan.api.in_force import PlanSource
from meshplan.cost.calibration import profile_from, read_profile, write_profile
from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import check_writable
from meshplan.garbage import collecting_rarely
from meshplan.memory.log.torch_version import installed, unlike
from meshplan.plan.plan import Plan
from meshplan.planner.answers import lock_words
from meshplan.planner.lock.lock import lock_in_words, locked, profile_of_lock
from meshplan.planner.lock.lock import overrides as overrides_of
from meshplan.planner.objectives.answer import answer
from meshplan.planner.problem.decision import Decision, Evaluated, PlanRequest
from meshplan.planner.problem.request import cluster_of, question_of_file
from meshplan.spec.keys import check_free, freed
from meshplan.spec.reader import load_spec
from meshplan.textbook.inputs import read_limit

if TYPE_CHECKING:
    from meshplan.cost.profile import Profile
    from meshplan.planner.answers.difference import PlanDifference
    from meshplan.planner.answers.explain import WhyNot
    from meshplan.planner.answers.infeasible import Trouble
    from meshplan.planner.answers.module import ModuleAnswer
    from meshplan.planner.answers.reshard import Reshard
    from meshplan.planner.answers.written import Written
    from meshplan.planner.lock.changes import FieldChange
    from meshplan.planner.lock.lock import Lock
    from meshplan.planner.objectives.num_devices import TrainingTarget


def search_plan(
    plan: PlanSource,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    config: str | Path | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: str | Path | None = None,
    told: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Decision:
    """The fastest plan for all that a plan file leaves open, proved, and what was left out.

    Args:
        plan, model, config: As for `check_plan`.
        gpu, memory: As for `estimate_memory`.
        profile: What `meshplan calibrate` wrote; None takes what is known of such devices.
        told: Is told of each better plan.
        is_stopped: Whether the best so far is wanted now.

    Raises:
        SpecError: The plan or the model cannot be read.
        PlanError: The plan contradicts itself, or says too little.
    """
    question = _question(plan, overrides, model, config, gpu, memory, profile, told)
    return answer(replace(question, is_stopped=is_stopped), told)


def find_frontier(
    plan: PlanSource,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    config: str | Path | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: str | Path | None = None,
    told: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[tuple[Evaluated, ...], bool]:
    """(the fastest plans within less and less memory, whether the time sufficed).

    Args:
        plan, model, config, gpu, memory, profile, is_stopped: As for `search_plan`.
    """
    from meshplan.planner.answers.frontier import frontier

    question = _question(plan, overrides, model, config, gpu, memory, profile, told)
    return frontier(replace(question, is_stopped=is_stopped), told)


def fewest_devices(
    plan: PlanSource,
    overrides: Sequence[str] = (),
    *,
    tokens: str | float,
    days: str | float,
    model: str | None = None,
    config: str | Path | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: str | Path | None = None,
    told: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> TrainingTarget:
    """The fewest whole nodes that train on so many tokens in so many days.

    Args:
        plan, model, config, gpu, memory, profile, is_stopped: As for `search_plan`; how many
            nodes the plan's `hardware` has does not matter.
        tokens, days: Of the whole training.
    """
    from meshplan.planner.objectives.num_devices import fewest, positive

    amounts = positive(tokens, "--tokens"), positive(days, "--days")
    question = _question(plan, overrides, model, config, gpu, memory, profile, told)
    return fewest(replace(question, is_stopped=is_stopped), *amounts, told)


def _question(
    plan: PlanSource,
    overrides: Sequence[str],
    model: str | None,
    config: str | Path | None,
    gpu: str | None,
    memory: str | int | None,
    profile: str | Path | None,
    told: Callable[[str], None],
) -> PlanRequest:
    """What is asked, of a model that its config tells of, or of one that has to be run."""
    if why := unlike(installed()):
        told(why)
    stated = load_spec(plan, overrides).model
    is_live = model is not None or (config is None and stated is not None and stated.entry)
    if not is_live:
        return question_of_file(plan, overrides, config, gpu, memory, profile)
    with collecting_rarely():  # Many modules are loaded, and a model is built.
        from meshplan.runtime.live.planned import question_of_entry  # torch

        return question_of_entry(
            plan, overrides, model, config, gpu=gpu, memory=memory,
            profile=Path(profile) if profile is not None else None, told=told,
        )  # fmt: skip


def find_trouble(
    plan: PlanSource,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    config: str | Path | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: str | Path | None = None,
    told: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Trouble:
    """Why `search_plan` finds nothing: what contradicts what, and what would help.

    Args:
        plan, model, config, gpu, memory, profile, is_stopped: As for `search_plan`.
        told: Is told what is looked for.
    """
    from meshplan.planner.answers.infeasible import trouble_of

    question = _question(plan, overrides, model, config, gpu, memory, profile, told)
    return trouble_of(replace(question, is_stopped=is_stopped), told)


def explain(
    plan: PlanSource,
    words: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    config: str | Path | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: str | Path | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> list[WhyNot]:
    """Why the plan is not another.

    Args:
        plan, model, config, gpu, memory: As for `search_plan`.
        profile: Likewise; None takes the one that the lock was made with.
        words: "why-not" and a setting such as "mesh.tp=8", or "why" and a field such as "mesh.tp",
            which asks of each of its values.

    Raises:
        SpecError: The words ask nothing that is planned, or something cannot be read.
        PlanError: The plan contradicts itself, or says too little.
    """
    from meshplan.planner.answers.explain import Asker

    if len(words) != 2 or words[0] not in ("why", "why-not"):
        what, fix = f"'{' '.join(words)}' is no question", "ask why FIELD, or why-not FIELD=VALUE"
        raise SpecError(Problem(what, Origin("explain"), fix))
    if profile is None and (profile := profile_of_lock(plan)) is not None:
        told(f"by the figures of {profile.name}, as the lock")
    question = _question(plan, overrides, model, config, gpu, memory, profile, told)
    asker = Asker(question, told)
    settings = [words[1]] if words[0] == "why-not" else asker.settings(words[1])
    answers = [asker.why_not(each) for each in settings]
    by = locked(plan, question.read, question.graph)
    if line := lock_in_words(by, plan, question.read(())):
        told(line)
    return answers


def explain_module(plan: Plan, name: str, *, profile: str | Path | None = None) -> ModuleAnswer:
    """How the tensors of a module lie and why, what they hold, and what its block takes.

    Args:
        plan: Decided for its model.
        profile: As for `explain`.

    Raises:
        SpecError: The model has no such module.
    """
    from meshplan.planner.answers import module

    profile = profile if profile is not None else profile_of_lock(plan.spec.source)
    return module.explain_module(plan, name, profile=profile)


def compare(
    old: tuple[str, Plan],
    new: tuple[str, Plan],
    *,
    profile: str | Path | None = None,
    known: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
) -> PlanDifference:
    """What one plan decides otherwise than another, and what that costs.

    Args:
        old, new: (what it is called, the plan).
        profile: As for `explain`.
        known: Of each, what its lock or the planner says where no config tells it, as of `Side`;
            by the same profile.
    """
    from meshplan.planner.answers.difference import difference, side_of

    if profile is None:
        # What was measured holds for both sides, where their locks say no different things.
        found = {profile_of_lock(plan.spec.source) for _, plan in (old, new)} - {None}
        profile = found.pop() if len(found) == 1 else None
    measured = read_profile(Path(profile), Origin("--profile")) if profile is not None else None
    sides = zip((old, new), known, strict=True)
    return difference(*(side_of(name, plan, measured, figures) for (name, plan), figures in sides))


def locks_alone(old: str, new: str) -> tuple[Lock, Lock] | None:
    """Two locks to compare by what they say alone, as of `lock_difference.locks_alone`."""
    from meshplan.planner.answers import lock_difference

    return lock_difference.locks_alone(old, new)


def compare_locks(old: Lock, new: Lock) -> PlanDifference:
    """Differences between two locks, such as two versions of one."""
    from meshplan.planner.answers import lock_difference

    return lock_difference.difference_of_locks(old, new)


def moved_between(old: Plan, new: Plan) -> Reshard:
    """Bytes of parameters and optimizer state that change hands from one plan to another.

    Raises:
        PlanError: They are not of one model and one optimizer.
    """
    from meshplan.planner.answers.reshard import reshard

    return reshard(old, new)


def plan_of_lock(path: str | os.PathLike[str]) -> tuple[str, Lock] | None:
    """(the plan file that a lock was made for, the lock, for `decide`); None of other files.

    Raises:
        SpecError: It is a lock, and cannot be read, or the plan is not beside it.
    """
    found = lock_words.source_of_lock(Path(path))
    return found and (str(found[0]), found[1])


def figures_of_lock(
    plan: str | os.PathLike[str], decided: Plan, lock: Lock | None = None
) -> dict[str, float]:
    """What the lock beside a plan file expects of the plan, for `compare`; {} without one.

    Args:
        lock: With which the plan was decided.

    Raises:
        SpecError: There is a lock, and it cannot be read.
    """
    return lock_words.figures_of_lock(plan, decided, lock)


def lock_plan(
    plan: str | os.PathLike[str],
    decision: Decision,
    path: str | Path | None = None,
    free: Sequence[str] = (),
) -> Path:
    """Write a decision beside its plan file; returns where.

    Args:
        free: Keys that `overrides_of_free` left to the planner, and the file does not.
    """
    return lock_words.write_lock(plan, decision, path, free)


def as_written(
    decision: Decision, gpu: str | None = None, memory: str | int | None = None
) -> Written | None:
    """Estimate a plan as its file stands, without the choices; None where that is no other.

    Args:
        gpu, memory: As for the search.
    """
    from meshplan.planner.answers import written

    device, _, _ = read_limit(gpu, memory, decision.spec)
    return written.as_written(decision, device, cluster_of(decision.spec, device, decision.profile))


def overrides_of_free(keys: Sequence[str]) -> list[str]:
    """The overrides that leave keys to the planner although the plan file states them.

    Raises:
        SpecError: One of them is nothing that the planner chooses.
    """
    check_free(keys)
    return overrides_of(freed(keys))


def changes_since(
    plan: str | os.PathLike[str],
    decision: Decision,
    path: str | Path | None = None,
    free: Sequence[str] = (),
) -> tuple[FieldChange, ...] | None:
    """What a decision says otherwise than the lock beside its plan file; None without one.

    Args:
        free: As for `lock_plan`.

    Raises:
        SpecError: There is a lock, and it cannot be read.
    """
    return lock_words.changes_since(plan, decision, path, free)


def calibrate(out: str | os.PathLike[str]) -> Profile | None:
    """Time this machine and write what it reaches as a profile, for `read_profile` to take.

    Under torchrun every rank times what the ranks send to each other, and the first one writes.

    Returns:
        None on any other rank.

    Raises:
        PlanError: The times are too noisy to follow from any constants.
        SpecError: The profile cannot be written there.
    """
    from meshplan.runtime.calibrate import measure, together  # torch

    check_writable(out, "the profile")
    with together() as is_first:
        measured = measure()
        if not is_first:
            return None
        profile = profile_from(measured)
        write_profile(profile, Path(out))
        return profile
