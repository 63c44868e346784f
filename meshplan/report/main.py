"""From what is known of a plan to its report."""

from __future__ import annotations

import html
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
from meshplan.pictures.base.types import Picture
from meshplan.pictures.main import OF_DECISIONS, WHATS, draw, draw_decision
from meshplan.pictures.memory.bars import memory_bars, states_alone
from meshplan.plan.plan import Plan
from meshplan.planner.answers.explain import WhyNot
from meshplan.planner.answers.infeasible import Trouble
from meshplan.planner.problem.decision import Decision
from meshplan.report import sections
from meshplan.report.figures import Colours, figure
from meshplan.report.page import Section, page, paragraph
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
"""By section, its pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """What a report tells; None is what nobody knows.

    Args:
        name: What the plan is called.
        text: Its file, as it is written; "" where it is none.
        on_top: What was stated beside it, as "KEY=VALUE".
        counted: Where there is no model, the plan for as many parameters as are stated.
        states: The textbook's table, likewise.
        decision: What the planner says of it; of a plan that leaves nothing open, too.
        trouble: Why there is no plan, and what would help.
        why_not: Settings that were asked about.
        traced: The rank that needs most with its step, event by event, where it had to be traced.
        gpu, memory: As of `estimate_memory`.
        left_out: (what, why) beside the pictures that cannot be drawn.
    """

    name: str
    text: str = ""
    on_top: tuple[str, ...] = ()
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
        """What the planner says of this very plan, and not of one that it would choose now."""
        chosen = self.decision.chosen if self.decision else None
        if self.plan is None or chosen is None or chosen.plan.digest() != self.plan.digest():
            return None
        return self.decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page that tells what a plan does.

    Args:
        verdict: Its title.
        html: All of it.
        fits: Whether the plan does, and is there at all; None where nobody can say.
        shown: The pictures on it.
        left_out: (what, why).
        notes: What a reader has to know.
    """

    verdict: str
    html: str
    fits: bool | None
    shown: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it; returns where.

        Raises:
            SpecError: It cannot be written there.
        """
        target = Path(path)
        check_target(target)
        write_bytes(target, self.html.encode(), "the report")
        return target


def check_target(path: Path) -> None:
    """Whether a report can have this name, before it is made.

    Raises:
        SpecError: It cannot.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        what = "a report is a page, and the name does not say so"
        raise SpecError(Problem(what, Origin(str(path)), "let the name end in .html"))
    check_writable(path, "the report")


def report_of(known: ReportFacts) -> Report:
    """The page."""
    colours = Colours()
    figures: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for what in WHATS:
        try:
            light, dark = (_picture(known, what, theme) for theme in ("light", "dark"))
        except _AlreadyToldError:
            continue
        except MeshplanError as error:
            missing.setdefault(error.problems[0].what, []).append(what)
        else:
            figures[what] = figure(f"picture-{what}", light, dark, colours)
    left_out = [
        *known.left_out,
        *((f"pictures: {', '.join(whats)}", why) for why, whats in missing.items()),
    ]
    verdict, fits = _verdict(known)
    parts = {key: [figures[w] for w in whats if w in figures] for key, whats in _SHOWN.items()}
    parts["plan"], parts["rest"] = [], []
    for key, more in _tables(known, left_out).items():
        parts[key] += filter(None, more)
    top = f"<p class='quiet'>{html.escape(_about(known))}</p><h1>{html.escape(verdict)}</h1>"
    top += sections.key_figures(known.plan, known.estimate, known.of_plan)
    foot = f"meshplan {__version__}" + (f", plan {known.plan.digest()[:16]}" if known.plan else "")
    titles = {
        "memory": "Does it fit?",
        "choice": "Why this plan, and why not another?",
        "layouts": "Who holds what, and why?",
        "time": "Who waits, and who sends?",
        "plan": "What does the plan say?",
        "rest": "What is left out, and what is to be known?",
    }
    content = [Section(key, title, parts[key]) for key, title in titles.items()]
    return Report(
        verdict=verdict,
        html=page(f"{verdict} – {known.name}", top, content, paragraph(foot), colours),
        fits=fits,
        shown=tuple(figures),
        left_out=tuple(left_out),
        notes=known.notes,
    )


class _AlreadyToldError(Exception):
    """What a picture shows is not known, and why stands with what is left out."""


def _picture(known: ReportFacts, what: str, theme: str) -> Picture:
    if what in OF_DECISIONS:
        if known.decision is None:
            raise _AlreadyToldError
        return draw_decision(known.decision, what, theme=theme)
    plan = known.plan or known.counted
    if plan is None:
        raise PlanError("there is no plan to draw" if known.decision else "no model is known")
    given: dict[str, Any] = {}
    if what in ("memory", "waterfall", "timeline"):
        given = {"gpu": known.gpu, "memory": known.memory}
    if what in ("memory", "waterfall"):
        given["estimate"] = known.estimate
    if what == "timeline" and known.traced is not None:
        given["rank"], given["log"] = known.traced
    return draw(plan, what, theme=theme, **given)


def _tables(known: ReportFacts, left_out: list[tuple[str, str]]) -> Mapping[str, Iterator[str]]:
    """By section, what follows its pictures."""
    plan, estimate, decision = known.plan, known.estimate, known.decision
    return {
        "memory": _each(estimate, sections.about_memory, known.states, sections.about_states),
        "layouts": _each(plan, sections.about_layouts),
        "time": _each(plan, sections.about_traffic),
        "choice": chain(
            sections.about_trouble(known.trouble) if known.trouble else (),
            sections.about_choice(decision, known.why_not) if decision else (),
        ),
        "plan": sections.about_plan(plan, known.of_plan, known.text, known.on_top),
        "rest": sections.about_rest(left_out, known.warnings, known.notes),
    }


def _each(*pairs: Any) -> Iterator[str]:
    """What each function says of what stands before it, where that is known."""
    values: tuple[Any, ...] = pairs[::2]
    functions: tuple[Callable[[Any], Iterator[str]], ...] = pairs[1::2]
    for value, function in zip(values, functions, strict=True):
        if value is not None:
            yield from function(value)


def _verdict(known: ReportFacts) -> tuple[str, bool | None]:
    """(in words, whether it fits)."""
    plan, estimate, decision = known.plan, known.estimate, known.decision
    if plan is not None and estimate is not None:
        return memory_bars(estimate).title, estimate.fits
    if plan is not None:
        facts = states_alone(plan, _limit(known), "")
        return facts.title, facts.worst.fits
    if decision is not None and decision.chosen is None:
        found = "fits" if decision.is_whole else "was found in time that fits"
        limit = format_gib(decision.limit_bytes)
        return f"Nothing of {decision.num_configs:,} configurations {found} into {limit}", False
    return "No model is known: only the states can be told, by the textbook", None


def _limit(known: ReportFacts) -> int | None:
    """Bytes that a GPU may hold."""
    assert known.plan is not None
    return read_limit(known.gpu, known.memory, known.plan.spec)[1]


def _about(known: ReportFacts) -> str:
    """What the page is about."""
    graph = known.plan.graph if known.plan else None
    if graph is None:
        return known.name
    return f"{known.name}: {graph.name}, {format_count(graph.num_params)} parameters"
