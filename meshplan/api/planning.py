"""Functions behind `meshplan plan`, `explain`, `diff` and `calibrate`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from meshplan.api import checking
from meshplan.api.in_force import is_built
from meshplan.api.source import PlanSource, Source, SourceArguments, source_of
from meshplan.cost.calibration import profile_from, read_profile, write_profile
from meshplan.errors import MeshplanError, Origin, PlanError, Problem, SpecError
from meshplan.files import check_writable
from meshplan.garbage import collecting_rarely
from meshplan.memory.log.torch_version import installed, unlike
from meshplan.plan.plan import Plan
from meshplan.planner.answers.lock_words import changes_since as changes_since
from meshplan.planner.answers.lock_words import figures_of_lock as figures_of_lock
from meshplan.planner.answers.lock_words import lock_plan as lock_plan
from meshplan.planner.answers.lock_words import source_of_lock
from meshplan.planner.lock.lock import lock_in_words, locked, profile_of_lock
from meshplan.planner.lock.lock import overrides as overrides_of
from meshplan.planner.objectives.answer import answer
from meshplan.planner.problem.decision import Decision, Evaluated, PlanRequest
from meshplan.planner.problem.live_model import Priced
from meshplan.planner.problem.request import cluster_of, request_of_file
from meshplan.spec.keys import check_free, freed
from meshplan.spec.spec import Spec
from meshplan.textbook.inputs import read_limit

if TYPE_CHECKING:
    from meshplan.cost.profile import Profile
    from meshplan.cost.types import Chain
    from meshplan.memory import MemoryEstimate
    from meshplan.planner.answers.difference import PlanDifference
    from meshplan.planner.answers.explain import WhyNot
    from meshplan.planner.answers.infeasible import Trouble
    from meshplan.planner.answers.measured import RunComparison
    from meshplan.planner.answers.module import ModuleAnswer
    from meshplan.planner.answers.written import Written
    from meshplan.planner.lock.lock import Lock
    from meshplan.planner.objectives.num_devices import TrainingTarget
    from meshplan.spec.spec import Spec


def search_plan(
    plan: PlanSource | Source,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
    other_layouts: bool = False,
    **given: Unpack[SourceArguments],
) -> Decision:
    """Search everything that a plan file leaves open for the fastest plan that fits.

    If the plan states another objective (`solve.objective`), search for the best plan by that one.
    The result has a bound on how much better any plan in the search space can be.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        overrides: `KEY=VALUE` statements that change the plan.
        report: Called with a line for each better plan.
        is_stopped: Asked regularly; if it returns True, the search ends with the best plan so far.
        other_layouts: If True, also search the fastest plan of each kind of layout that the chosen
            plan is not of: with tp, with pp, with two data axes, with one data axis alone. They are
            `Decision.other_layouts`. Not with `solve.objective: memory`.
        given: The model and the machine, by the names of `Source`: `model`, `config`, `gpu`,
            `memory` and `profile`.

    Returns:
        The chosen plan, its alternatives, and the values that are not in the search space. The
        chosen plan is None if nothing fits.

    Raises:
        SpecError: The plan or the model cannot be read.
        PlanError: The plan contradicts itself, or lacks a value that the search needs.
    """
    request = _request(source_of(plan, overrides, **given), report)
    request = replace(request, is_stopped=is_stopped, other_layouts=other_layouts)
    return answer(request, report)


def find_frontier(
    source: Source,
    *,
    report: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[tuple[Evaluated, ...], bool]:
    """Search the frontier of memory and time: the fastest plan, and for less memory the next ones.

    Each plan is the fastest that needs at least 5 % less memory than the plan before it.

    Args:
        source: The plan, the model and the machine.
        report: Called with lines on the progress.
        is_stopped: Asked regularly; if it returns True, the search ends with the plans so far.

    Returns:
        (plans, is_whole): the plans, fastest first, and False if a search was stopped early.
    """
    from meshplan.planner.answers.frontier import frontier

    request = _request(source, report)
    return frontier(replace(request, is_stopped=is_stopped), report)


def fewest_devices(
    plan: PlanSource | Source,
    overrides: Sequence[str] = (),
    *,
    tokens: str | float,
    days: str | float,
    report: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
    **given: Unpack[SourceArguments],
) -> TrainingTarget:
    """Find the fewest nodes that train on a number of tokens in a number of days.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`. The number of
            nodes that it states is ignored.
        overrides: `KEY=VALUE` statements that change the plan.
        tokens: Tokens of the whole training.
        days: Days that the whole training may take.
        report: Called with lines on the progress.
        is_stopped: Asked regularly; if it returns True, the search ends with the best answer so
            far.
        given: The model and the machine, by the names of `Source`: `model`, `config`, `gpu`,
            `memory` and `profile`.
    """
    from meshplan.planner.objectives.num_devices import fewest, positive

    amounts = positive(tokens, "--tokens"), positive(days, "--days")
    request = _request(source_of(plan, overrides, **given), report)
    return fewest(replace(request, is_stopped=is_stopped), *amounts, report)


def _request(source: Source, report: Callable[[str], None]) -> PlanRequest:
    """Build the planner's request from the model's config, or by running the model's function."""
    if why := unlike(installed()):
        report(why)
    if not is_built(source, source.spec):
        request = request_of_file(
            source.plan, source.overrides, source.config, source.gpu, source.memory, source.profile
        )

        def price(spec: Spec) -> Priced:
            from meshplan.runtime.estimate.scale_down import model_source_of  # torch
            from meshplan.runtime.live.priced import priced_as_stated

            model = model_source_of(spec, None, source.config)
            return priced_as_stated(model, request.device, request.limit_bytes, spec, report=report)

        return replace(request, price=price)
    with collecting_rarely():  # Loading modules and building a model create many objects.
        from meshplan.runtime.live.planned import request_of_entry  # torch

        profile = source.profile
        return request_of_entry(
            source.plan, source.overrides, source.model, source.config, gpu=source.gpu,
            memory=source.memory, profile=Path(profile) if profile is not None else None,
            report=report,
        )  # fmt: skip


def find_trouble(
    source: Source,
    *,
    report: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Trouble:
    """Explain why `search_plan` finds no plan: which statements conflict, and which changes help.

    Args:
        source: The plan, the model and the machine.
        report: Called with lines on the progress.
        is_stopped: Asked regularly; if it returns True, the search ends with the answer so far.
    """
    from meshplan.planner.answers.infeasible import trouble_of

    request = _request(source, report)
    return trouble_of(replace(request, is_stopped=is_stopped), report)


def explain(
    plan: PlanSource | Source,
    words: str | Sequence[str],
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] = lambda text: None,
    **given: Unpack[SourceArguments],
) -> list[WhyNot]:
    """Explain what the best plan with another setting would cost, and so why it is not chosen.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        words: ("why-not", SETTING) asks about one setting, such as "mesh.tp=8". ("why", FIELD) asks
            about each value of a field, such as "mesh.tp". Also as one text, "why mesh.tp".
        overrides: `KEY=VALUE` statements that change the plan.
        report: Called with lines on the progress.
        given: The model and the machine, by the names of `Source`: `model`, `config`, `gpu`,
            `memory` and `profile`.

    Returns:
        One answer per setting.

    Raises:
        SpecError: The planner does not choose the named field, or a file cannot be read.
        PlanError: The plan contradicts itself, or lacks a value that the search needs.
    """
    from meshplan.planner.answers.explain import Asker

    words = words.split(maxsplit=1) if isinstance(words, str) else words
    if len(words) != 2 or words[0] not in ("why", "why-not"):
        what = f"'{' '.join(words)}' is not a question to explain"
        fix = "ask why FIELD, or why-not FIELD=VALUE"
        raise SpecError(Problem(what, Origin("explain"), fix))
    source = source_of(plan, overrides, **given)
    if source.profile is None:
        profile = profile_of_lock(source.plan, source.spec)
        if profile is not None:
            report(f"step times use {profile.name}, the profile that the lock was made with")
            source = replace(source, profile=profile)
    request = _request(source, report)
    if words[0] == "why-not":
        asker, settings = Asker(request, report), [words[1]]
    else:
        asker = Asker(request, lambda text: None)
        settings = asker.settings(words[1])
        report(f"searching the best plan with each of {len(settings)} settings")
    answers = [asker.why_not(each) for each in settings]
    if note := asker.decision.profile.note:
        report(note)
    by = locked(source.plan, request.read, request.graph)
    if line := lock_in_words(by, source.plan, request.read(())):
        report(line)
    return answers


def explain_module(
    plan: Plan,
    name: str,
    *,
    profile: str | Path | None = None,
    source: Source | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> ModuleAnswer:
    """Explain the layouts of a module's tensors, their memory, and the time of the module's block.

    Args:
        plan: A plan decided for its model.
        name: Fqn of the module.
        profile: A profile written by `meshplan calibrate`; None takes the profile that the lock was
            made with.
        source: The question that the plan answers; None if it is not known. With it, the time of a
            model without a config is found by a trace.
        report: Called with lines on the progress.

    Raises:
        SpecError: The model has no such module.
    """
    from meshplan.planner.answers import module

    def chain_of(plan: Plan) -> Chain:
        assert source is not None
        traced = _request(source, report).traced
        assert traced is not None
        return traced.priced(plan.spec).chain

    profile = profile if profile is not None else profile_of_lock(plan.spec.source, plan.spec)
    has_model = source is not None and is_built(source, plan.spec)
    return module.explain_module(
        plan, name, profile=profile, chain_of=chain_of if has_model else None
    )


def compare(
    old: tuple[str, Plan],
    new: tuple[str, Plan],
    *,
    profile: str | Path | None = None,
    known: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
) -> PlanDifference:
    """Compare two plans: which decisions differ, and the difference in time, memory and traffic.

    Args:
        old: (name to print, plan) of the first plan.
        new: (name to print, plan) of the second plan.
        profile: A profile written by `meshplan calibrate`; None takes the profile that the plans'
            locks name, unless they name different ones.
        known: Figures of the old plan and of the new plan, by their names in `DiffSide`, from a
            lock or a search with the same profile. They are used for models without a config.
    """
    from meshplan.planner.answers.difference import difference, side_of

    if profile is None:
        # If one lock names a profile, or both name the same one, it is used for both plans.
        found = {profile_of_lock(p.spec.source, p.spec) for _, p in (old, new)} - {None}
        profile = found.pop() if len(found) == 1 else None
    measured = read_profile(Path(profile), Origin("--profile")) if profile is not None else None
    sides = zip((old, new), known, strict=True)
    return difference(*(side_of(name, plan, measured, figures) for (name, plan), figures in sides))


def compare_run(
    path: str | os.PathLike[str],
    source: Source,
    *,
    tolerance: float = 0.1,
    report: Callable[[str], None] = lambda text: None,
) -> RunComparison:
    """Compare what a run took with what its plan predicts: seconds, memory, collectives.

    Args:
        path: The run.json that `meshplan.Run` wrote.
        source: The plan of the run, its model and the machine.
        tolerance: Relative error up to which a prediction holds.
        report: Called with lines on the progress.

    Raises:
        SpecError: The run or the plan cannot be read, or they have other numbers of ranks.
        PlanError: The plan does not suit the model.
    """
    from meshplan.planner.answers.difference import figures_of
    from meshplan.planner.answers.measured import comparison_of, read_run

    run = read_run(path)
    decided = checking.decide(source, noted=report)
    if run.plan != decided.digest():
        report("the run was of another plan, or of a module of which the config is no exact copy")
    is_as_planned = run.accumulate in (None, decided.accumulate)
    if not is_as_planned:
        assert run.accumulate is not None
        each = f"{run.accumulate} parts in each step, and the plan {decided.accumulate}"
        has_config = bool(decided.graph.config)
        then = f"predicted for {run.accumulate}" if has_config else "unknown without a config"
        report(f"the run accumulated {each}: its seconds are {then}")
        decided = replace(decided, accumulate=run.accumulate)
    device, _, _ = read_limit(source.gpu, source.memory, decided.spec)
    memory: MemoryEstimate | MeshplanError
    try:
        memory = checking.estimate_memory(source, fixes=False, report=report)
    except MeshplanError as error:
        memory = error
    known = None
    if not decided.graph.config and is_as_planned:
        with suppress(PlanError, SpecError):  # The comparison says that the seconds are unknown.
            known = figures_of(search_plan(source, report=report), decided).get("step_s")
    named = source.profile or profile_of_lock(decided.spec.source, decided.spec)
    profile = read_profile(Path(named), Origin("--profile")) if named is not None else None
    return comparison_of(
        run, decided, memory, known, device=device, profile=profile, tolerance=tolerance
    )


def plan_of_lock(path: str | os.PathLike[str]) -> tuple[str, Lock] | None:
    """Return (plan file, lock) for the path of a lock; None if `path` is not a lock.

    Raises:
        SpecError: The lock cannot be read, or the plan file is not next to it.
    """
    found = source_of_lock(Path(path))
    return found and (str(found[0]), found[1])


def as_written(decision: Decision, source: Source) -> Written | None:
    """Estimate a plan file without a lock: with defaults in place of the planner's choices.

    Args:
        decision: The planner's decision on that file.
        source: The plan, model and machine that were given to the search.

    Returns:
        The estimate; None if something in the file is `auto`, if the planner chose the same plan,
        or if the plan cannot be estimated.
    """
    from meshplan.api.in_force import plan_of_spec
    from meshplan.planner.answers import written

    device, _, _ = read_limit(source.gpu, source.memory, decision.spec)

    def decide(spec: Spec) -> Plan:
        assert decision.chosen is not None
        return plan_of_spec(spec, decision.chosen.plan.graph, source)

    def trace() -> MemoryEstimate:
        from meshplan.runtime.estimate.estimate import estimate_by_trace  # torch

        return estimate_by_trace(
            checking.request_of_trace(decision.spec, source), lambda text: None
        )

    cluster = cluster_of(decision.spec, device, decision.profile)
    return written.as_written(decision, device, cluster, decide, trace)


def overrides_of_free(keys: Sequence[str]) -> list[str]:
    """Return `KEY=VALUE` overrides that leave keys to the planner even if the plan states them.

    Raises:
        SpecError: One of the keys is nothing that the planner chooses.
    """
    check_free(keys)
    return overrides_of(freed(keys))


def calibrate(out: str | os.PathLike[str]) -> Profile | None:
    """Time this machine and write the measured speeds as a profile that `read_profile` reads.

    Under torchrun, the communication between the ranks of each node is timed too and, on several
    nodes, that between nodes. Rank 0 writes the file.

    Args:
        out: Path of the profile.

    Returns:
        The profile on rank 0; None on any other rank.

    Raises:
        PlanError: The measured times are too noisy to fit the constants of the cost model, or nodes
            have different numbers of ranks.
        SpecError: The profile cannot be written to `out`.
    """
    from meshplan.runtime.calibrate import measure, together  # torch

    if os.environ.get("RANK", "0") == "0":  # The rank that writes; other nodes may lack the folder.
        check_writable(out, "the profile")
    with together() as is_first:
        measured = measure()
        if not is_first:
            return None
        profile = profile_from(measured)
        write_profile(profile, Path(out))
        return profile
