"""`meshplan report`: collect the answers to every question about a plan for one page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Unpack

from meshplan.api import checking, planning
from meshplan.api.in_force import is_built, plan_of_spec
from meshplan.api.source import PlanSource, Source, SourceArguments, source_of
from meshplan.errors import MeshplanError, PlanError, SpecError
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.pictures.mesh.counted import counted_plan
from meshplan.plan.plan import Plan
from meshplan.planner.lock.lock import chosen_spec, lock_in_words, locked
from meshplan.planner.problem.decision import Decision, Evaluated
from meshplan.planner.problem.request import loading
from meshplan.planner.space.space import EmptySpaceError
from meshplan.report.main import STEP_MEMORY, Report, ReportFacts, report_of
from meshplan.spec.strategies import resolve_mesh
from meshplan.textbook.inputs import read_limit

_OPEN: Final = "faster plans and other choices"


def make_report(
    plan: PlanSource | Source,
    overrides: Sequence[str] = (),
    *,
    why_not: Sequence[str] = (),
    report: Callable[[str], None] = lambda text: None,
    **given: Unpack[SourceArguments],
) -> Report:
    """Make an HTML page about a plan: a verdict, all pictures, tables, and reasons for choices.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        overrides: `KEY=VALUE` statements that change the plan.
        why_not: Settings to explain, such as "mesh.tp=8"; a field alone, such as "mesh.tp", stands
            for each of its values.
        report: Called with lines on the progress.
        given: The model and the machine, by the names of `Source`: `model`, `config`, `gpu`,
            `memory` and `profile`.

    Raises:
        SpecError: The plan or the model cannot be read.
        PlanError: The plan does not suit the model.
    """
    return report_of(_ReportBuilder(source_of(plan, overrides, **given), report).all(why_not))


class _ReportBuilder:
    """Collects the answers about one plan file; questions without an answer get the reason."""

    def __init__(self, source: Source, report: Callable[[str], None]) -> None:
        self._source, self._plan, self._report = source, source.plan, report
        self._spec = source.spec
        name = "a plan" if isinstance(self._plan, Mapping) else os.fspath(self._plan)
        self._known = ReportFacts(
            name=name, text=self._text(), overrides=source.overrides, gpu=source.gpu,
            memory=source.memory,
        )  # fmt: skip

    def all(self, why_not: Sequence[str]) -> ReportFacts:
        """Ask all questions and return the facts of the report."""
        try:
            decision = self._search()
        except EmptySpaceError as error:
            self._leave_out(_OPEN, error)
            self._find_trouble()
            for each in why_not:
                why = "no configuration satisfies everything that the plan states"
                self._leave_out(f"why not {each}", why)
            return self._known
        self._learn(decision=decision)
        if decision is not None and decision.chosen is None and self._spec.free_fields:
            if decision.is_whole:  # An unfinished search does not prove that nothing fits.
                self._find_trouble()
            for each in why_not:
                self._leave_out(f"why not {each}", "no plan was found that fits")
            return self._known
        self._decide(decision)
        self._ask(why_not, decision)
        return self._known

    def _ask(self, why_not: Sequence[str], decision: Decision | None) -> None:
        """Add an answer, or the reason why there is none, for each setting in `why_not`."""
        if decision is None:
            for each in why_not:
                self._leave_out(f"why not {each}", "the planner could not search this plan")
            return
        answers = []
        for words in why_not:
            verb = "why-not" if "=" in words else "why"
            try:
                answers += planning.explain(self._source, [verb, words])
            except PlanError as error:  # A fully stated plan has no alternatives.
                self._leave_out(f"why not {words}", error.problems[0].what)
        self._learn(why_not=tuple(answers))

    def _search(self) -> Decision | None:
        """Return the planner's decision; None if the plan cannot be searched."""
        self._report("searching")
        try:
            return planning.search_plan(self._searched())
        except EmptySpaceError:
            if self._spec.free_fields:
                raise
            return None
        except (PlanError, SpecError) as error:
            self._leave_out(_OPEN, error)
            return None

    def _searched(self) -> Source:
        """Return the question to search.

        Each size of tp or pp of a Python model takes seconds to trace. They are left out where
        nothing is `auto`: the report is then about the plan's own mesh.
        """
        spec = self._spec
        if spec.free_fields or spec.mesh is not None or not is_built(self._source, spec):
            return self._source
        sizes = {axis.name: axis.size for axis in resolve_mesh(spec)[0]}
        return self._source.with_overrides([f"mesh={json.dumps(sizes)}"])

    def _find_trouble(self) -> None:
        self._report("no plan fits: looking for the statements that conflict")
        found = planning.find_trouble(self._source)
        self._learn(trouble=found)

    def _decide(self, decision: Decision | None) -> None:
        """Add the plan to report on, from the search or the lock, and its memory estimate."""
        chosen = decision.chosen if decision else None
        if chosen is not None and self._spec.free_fields and not self._has_lock(decision):
            plan, memory = self._with_origins(chosen), chosen.memory
            warnings = tuple(map(str, plan.assignment.warnings))
            by = locked(self._plan, loading(self._plan, self._source.overrides), plan.graph)
            line = lock_in_words(by, self._plan, self._spec)
            notes = (line, *memory.notes)
            self._learn(plan=plan, estimate=memory, warnings=warnings, notes=notes)
            self._trace(plan, memory)
            return
        checked = checking.check_plan(self._source)
        if checked.problems:
            raise PlanError(checked.problems)
        notes = checked.notes
        self._learn(plan=checked.plan, warnings=tuple(map(str, checked.warnings)), notes=notes)
        if checked.plan is None:
            has_code = self._source.entry(self._spec) is not None
            if has_code:  # `check_plan` has no plan because the user has not trusted the code.
                self._leave_out("the model", notes[0].partition("\n")[0])
            self._textbook()
            return
        if chosen is not None and chosen.plan.digest() != checked.plan.digest():
            more = "a new search chooses another plan: this report describes the plan as it is, "
            more += "but its times, candidates and choices are those of the search"
            notes = (*notes, more)
            self._learn(notes=notes)
        try:
            estimate = self._estimate(checked.plan, chosen)
        except MeshplanError as error:
            self._leave_out(STEP_MEMORY, error)
        else:
            self._learn(estimate=estimate, notes=tuple(dict.fromkeys((*notes, *estimate.notes))))
            self._trace(checked.plan, estimate)

    def _estimate(self, plan: Plan, chosen: Evaluated | None) -> MemoryEstimate:
        """Return the memory of a plan, without a second trace if the search has traced this one."""
        if chosen is None or plan.graph.config or not _is_same(plan, chosen.plan):
            return checking.estimate_memory(self._source, fixes=False, report=self._report)
        _, _, notes = read_limit(self._source.gpu, self._source.memory, plan.spec)
        return replace(chosen.memory, notes=(*notes, *chosen.memory.notes))

    def _trace(self, plan: Plan, estimate: MemoryEstimate) -> None:
        """Add the traced step of one rank, for the timeline, if the model has no config."""
        if plan.graph.config:
            return
        rank, log = estimate.worst.ranks[0], estimate.log
        try:
            if log is None:
                log = checking.traced_log(plan, rank, self._source, self._report)
        except MeshplanError as error:
            self._leave_out("the timeline of a step", error)
        else:
            self._learn(traced=(rank, log))

    def _with_origins(self, chosen: Evaluated) -> Plan:
        """Return the chosen plan, with "the planner" as the origin of the fields that it chose."""
        if not self._spec.free_fields:
            return chosen.plan
        load = loading(self._plan, self._source.overrides)
        spec = chosen_spec(load, chosen.stated, "the planner")
        plan = plan_of_spec(spec, chosen.plan.graph, self._source)
        assert plan.digest() == chosen.plan.digest()
        return plan

    def _textbook(self) -> None:
        """Add the plan and the table of states that follow from the number of parameters alone."""
        try:
            self._learn(counted=counted_plan(self._spec))
        except PlanError as error:
            self._leave_out("pictures of the training states", error)
        try:
            if isinstance(self._plan, Mapping):
                raise PlanError("the textbook's table needs a plan file, not a mapping")
            states = checking.estimate_states(
                plan=Path(self._plan),
                overrides=self._source.overrides,
                gpu=self._source.gpu,
                memory=self._source.memory,
            )
        except MeshplanError as error:
            self._leave_out("the textbook's table of the training states", error)
        else:
            self._learn(states=states)

    def _has_lock(self, decision: Decision | None) -> bool:
        if isinstance(self._plan, Mapping) or not self._spec.free_fields or decision is None:
            return False
        return planning.changes_since(self._plan, decision) is not None

    def _text(self) -> str:
        if isinstance(self._plan, Mapping):
            return ""
        return Path(self._plan).read_text(encoding="utf-8")

    def _learn(self, **more: Any) -> None:
        self._known = replace(self._known, **more)

    def _leave_out(self, what: str, why: MeshplanError | str) -> None:
        text = why if isinstance(why, str) else why.problems[0].what
        self._learn(left_out=(*self._known.left_out, (what, text)))


def _is_same(plan: Plan, other: Plan) -> bool:
    """Return True if two plans of a model have equal layouts and batches."""
    batches = [(each.micro, each.accumulate) for each in (plan, other)]
    return batches[0] == batches[1] and plan.digest() == other.digest()
