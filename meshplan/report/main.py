"""Build the report of a plan from the facts that were collected about it."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from meshplan.errors import MeshplanError, Origin, PlanError, Problem, SpecError
from meshplan.files import check_writable, write_bytes
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.memory.log.events import EventLog
from meshplan.pictures.base.palette import PAGE
from meshplan.pictures.base.types import Picture
from meshplan.pictures.main import OF_DECISIONS, WHATS, draw, draw_decision
from meshplan.pictures.memory.bars import memory_bars, states_alone
from meshplan.plan.plan import Plan
from meshplan.planner.answers.explain import WhyNot
from meshplan.planner.answers.infeasible import Trouble
from meshplan.planner.problem.decision import Decision
from meshplan.report import sections
from meshplan.report.figures import figure
from meshplan.report.page import Section, page, paragraph
from meshplan.shown import shown
from meshplan.textbook.inputs import read_limit
from meshplan.textbook.inverse import StatesEstimate
from meshplan.units import format_count, format_gib
from meshplan.version import __version__

_SHOWN: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "memory": ("memory", "waterfall", "timeline"),
        "layouts": ("mesh", "layout", "treemap", "graph"),
        "time": ("gantt", "comm"),
        "choice": ("pareto", "ladder"),
    }
)
"""Pictures of each section, by the section's key."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """The facts that a report shows; None if a fact is not known.

    Args:
        name: Name of the plan.
        text: Content of the plan file; "" without a file.
        overrides: Overrides of the file, as "KEY=VALUE".
        plan: The plan; None if no model is known or nothing fits.
        counted: The plan for the stated number of parameters, if the model is not known.
        states: The textbook's table of training states, if the model is not known.
        estimate: Memory estimate of the plan.
        decision: The planner's decision; also known for a plan that leaves nothing open.
        trouble: The reason why there is no plan, and changes that would help.
        why_not: Answers about the settings that the user asked about.
        traced: (rank with the highest peak, log of its traced step), if the model has no config.
        gpu: Name of the device whose memory is the limit.
        memory: The memory limit itself, instead of `gpu`.
        left_out: Parts that are left out, as pairs (what, why), in addition to pictures that cannot
            be drawn.
        warnings: Warnings about the plan.
        notes: Notes for the reader.
    """

    name: str
    text: str = ""
    overrides: tuple[str, ...] = ()
    plan: Plan | None = None
    counted: Plan | None = None
    states: StatesEstimate | None = None
    estimate: MemoryEstimate | None = None
    decision: Decision | None = None
    trouble: Trouble | None = None
    why_not: tuple[WhyNot, ...] = ()
    traced: tuple[int, EventLog] | None = None
    gpu: str | None = None
    memory: str | int | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def of_plan(self) -> Decision | None:
        """The decision if `plan` is the plan that it chose; else None."""
        chosen = self.decision.chosen if self.decision else None
        if self.plan is None or chosen is None or chosen.plan.digest() != self.plan.digest():
            return None
        return self.decision


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The finished page about a plan.

    Args:
        verdict: Title of the page.
        html: The whole page.
        fits: True if there is a plan and it fits, False if not; None if that is not known.
        shown: Names of the pictures on the page.
        left_out: Parts that are left out, as pairs (what, why).
        notes: Notes for the reader.
    """

    verdict: str
    html: str
    fits: bool | None
    shown: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page and return its path.

        Raises:
            SpecError: The name does not end in .html or .htm, or the file cannot be written.
        """
        target = Path(path)
        check_target(target)
        write_bytes(target, self.html.encode(), "the report")
        return target


def check_target(path: Path) -> None:
    """Check that a report can have this name, before it is made.

    Raises:
        SpecError: The name does not end in .html or .htm, or the file cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        what = "a report is an HTML page, and this name does not end in .html or .htm"
        raise SpecError(Problem(what, Origin(str(path)), "use a name that ends in .html"))
    check_writable(path, "the report")


def report_of(known: ReportFacts) -> Report:
    """Build the report from its facts."""
    figures: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for what in WHATS:
        try:
            picture = _picture(known, what)
        except _AlreadyToldError:
            continue
        except MeshplanError as error:
            missing.setdefault(error.problems[0].what, []).append(what)
        else:
            figures[what] = figure(f"picture-{what}", picture)
    left_out = [
        *known.left_out,
        *((f"pictures: {', '.join(whats)}", why) for why, whats in missing.items()),
    ]
    verdict, fits = _verdict(known)
    parts = {key: [figures[w] for w in whats if w in figures] for key, whats in _SHOWN.items()}
    parts["plan"], parts["rest"] = [], []
    for key, more in _tables(known, left_out).items():
        parts[key] += filter(None, more)
    answer = f"<p class='quiet'>{html.escape(_about(known))}</p><h1>{html.escape(verdict)}</h1>"
    answer += sections.key_figures(known.plan, known.estimate, known.of_plan)
    chosen = sections.chosen_plan(known.plan or known.counted, known.of_plan)
    top = f'<div class="top"><div>{answer}</div>{chosen}</div>'
    foot = f"meshplan {__version__}" + (f", plan {known.plan.digest()[:16]}" if known.plan else "")
    titles = {
        "memory": "Does it fit?",
        "choice": "Why this plan, and why not another?",
        "layouts": "What does each rank hold, and why?",
        "time": "When do ranks wait, and what do they send?",
        "plan": "What does the plan say?",
        "rest": "What is left out, and what else should you know?",
    }
    content = [Section(key, title, parts[key]) for key, title in titles.items()]
    return Report(
        verdict=verdict,
        html=page(f"{verdict} – {known.name}", top, content, paragraph(foot)),
        fits=fits,
        shown=tuple(figures),
        left_out=tuple(left_out),
        notes=known.notes,
    )


class _AlreadyToldError(Exception):
    """The facts of a picture are not known, and `left_out` already has the reason."""


def _picture(known: ReportFacts, what: str) -> Picture:
    if what in OF_DECISIONS:
        if known.decision is None:
            raise _AlreadyToldError
        return draw_decision(known.decision, what, theme=PAGE.name)
    plan = known.plan or known.counted
    if plan is None:
        has_searched = known.decision is not None or known.trouble is not None
        raise PlanError("no plan was found" if has_searched else "pictures need a model")
    given: dict[str, Any] = {}
    if what in ("memory", "waterfall", "timeline"):
        given = {"gpu": known.gpu, "memory": known.memory}
    if what in ("memory", "waterfall"):
        given["estimate"] = known.estimate
    if what == "timeline" and known.traced is not None:
        given["rank"], given["log"] = known.traced
    return draw(plan, what, theme=PAGE.name, **given)


def _tables(known: ReportFacts, left_out: list[tuple[str, str]]) -> Mapping[str, Iterator[str]]:
    """Return the elements that follow the pictures of each section, by the section's key."""
    plan, estimate, decision = known.plan, known.estimate, known.decision
    return {
        "memory": _each(estimate, sections.about_memory, known.states, sections.about_states),
        "layouts": _each(plan, sections.about_layouts),
        "time": _each(plan, sections.about_traffic),
        "choice": chain(
            sections.about_trouble(known.trouble) if known.trouble else (),
            sections.about_choice(decision, known.why_not) if decision else (),
        ),
        "plan": sections.about_plan(plan, known.of_plan, known.text, known.overrides),
        "rest": sections.about_rest(left_out, known.warnings, known.notes),
    }


def _each(*pairs: Any) -> Iterator[str]:
    """Call functions with the values that are not None, and chain their results.

    Args:
        pairs: A value, its function, the next value, its function, and so on.
    """
    values: tuple[Any, ...] = pairs[::2]
    functions: tuple[Callable[[Any], Iterator[str]], ...] = pairs[1::2]
    for value, function in zip(values, functions, strict=True):
        if value is not None:
            yield from function(value)


STEP_MEMORY: Final = "the memory of a step"
"""Name in `ReportFacts.left_out` for the memory of a step that cannot be estimated."""


def _verdict(known: ReportFacts) -> tuple[str, bool | None]:
    """Return (verdict in words, fits), where `fits` is as in `Report`."""
    plan, estimate, decision = known.plan, known.estimate, known.decision
    if plan is not None and estimate is not None:
        return memory_bars(estimate).title, estimate.fits
    if plan is not None:
        why = dict(known.left_out).get(STEP_MEMORY, "it was not estimated")
        facts = states_alone(plan, _limit(known), why)
        is_over = facts.worst.total_bytes > (facts.limit_bytes or math.inf)
        return facts.title, False if is_over else None
    if decision is not None and decision.chosen is None:
        found = "fits" if decision.is_whole else "was found in time that fits"
        limit = format_gib(decision.limit_bytes)
        return f"None of {decision.num_configs:,} configurations {found} into {limit}", False
    if known.trouble is not None:
        return "The settings of the plan leave no configuration to choose from", None
    return "Without a model, textbook formulas give the training states only", None


def _limit(known: ReportFacts) -> int | None:
    """Return the bytes that one GPU may use; None if no limit is known."""
    assert known.plan is not None
    return read_limit(known.gpu, known.memory, known.plan.spec)[1]


def _about(known: ReportFacts) -> str:
    """Return the line above the title: the plan, its model and its number of parameters."""
    graph = known.plan.graph if known.plan else None
    if graph is None:
        return known.name
    return f"{known.name}: {graph.name}, {format_count(graph.num_params)} parameters"
