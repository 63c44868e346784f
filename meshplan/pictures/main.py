"""One line from a plan to a picture: which question, its facts, its drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.memory.estimate import MemoryEstimate
from meshplan.memory.told import told_estimate
from meshplan.pictures.gantt import draw_gantt, gantt
from meshplan.pictures.memory_bars import MemoryBars, draw_memory, memory_bars, states_alone
from meshplan.pictures.mesh_map import draw_mesh, mesh_map
from meshplan.pictures.palette import Theme, theme_of
from meshplan.pictures.tensor import draw_layout, tensor_layout
from meshplan.pictures.types import Picture
from meshplan.plan import Plan
from meshplan.sizing import read_limit

if TYPE_CHECKING:
    from meshplan.planner.decision import Decision

OF_DECISIONS: Final = ("pareto", "ladder")
"""What is about a search, and not about one plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question, and what was given with it; arguments of `draw`."""

    plan: Plan
    theme: Theme
    name: str | None = None
    rank: int | None = None
    estimate: MemoryEstimate | None = None
    decision: Decision | None = None
    gpu: str | None = None
    memory: str | int | None = None

    @property
    def limit(self) -> tuple[str, int | None, tuple[str, ...]]:
        """(device, bytes that it may hold, notes), as `meshplan estimate` reads them."""
        return read_limit(self.gpu, self.memory, self.plan.spec)

    @property
    def known(self) -> MemoryEstimate:
        """The estimate that was given, or the one that `meshplan estimate` tells from a config.

        Raises:
            PlanError: Nothing tells it.
        """
        if self.estimate is not None:
            return self.estimate
        device, limit_bytes, notes = self.limit
        try:
            return told_estimate(self.plan, device=device, limit_bytes=limit_bytes, notes=notes)
        except PlanError as error:
            first = error.problems[0]
            fix = f"{first.fix or 'see the plan'}; or give estimate=meshplan.estimate_memory(...)"
            raise PlanError(Problem(first.what, first.origin, fix)) from None


def _mesh(asked: Asked) -> Picture:
    return draw_mesh(mesh_map(asked.plan), asked.theme)


def _layout(asked: Asked) -> Picture:
    return draw_layout(tensor_layout(asked.plan, asked.name), asked.theme)


def memory_facts(asked: Asked) -> MemoryBars:
    """Of the step where it is known, of the states where it is not."""
    try:
        return memory_bars(asked.known)
    except PlanError as error:
        _, limit_bytes, _ = asked.limit
        return states_alone(asked.plan, limit_bytes, error.problems[0].what)


def _memory(asked: Asked) -> Picture:
    return draw_memory(memory_facts(asked), asked.theme)


def _gantt(asked: Asked) -> Picture:
    return draw_gantt(gantt(asked.plan), asked.theme)


_DRAWN: Final[Mapping[str, Callable[[Asked], Picture]]] = MappingProxyType(
    {
        "mesh": _mesh,
        "layout": _layout,
        "memory": _memory,
        "gantt": _gantt,
    }
)
_TAKES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "name": ("layout",),
        "rank": ("timeline", "comm"),
        "estimate": ("memory", "waterfall"),
        "decision": ("pareto", "ladder"),
        "gpu": ("memory", "waterfall", "timeline"),
        "memory": ("memory", "waterfall", "timeline"),
    }
)
"""By option, the pictures that it says something about."""
WHATS: Final = tuple(_DRAWN)
"""Every question, in the order in which they are listed."""


def draw(plan: Plan, what: str, *, theme: str = "light", **given: Any) -> Picture:
    """A picture of a plan.

    Args:
        what: A word of `WHATS`.
        theme: "light" or "dark".
        given: What some pictures take: `name` of a module or parameter (layout), `rank`
            (timeline, comm), `estimate`, what `estimate_memory` answered (memory, waterfall),
            `decision`, what `search_plan` answered (pareto, ladder), `gpu` and `memory`, as of
            `estimate_memory` (memory, waterfall, timeline).

    Raises:
        SpecError: There is no such picture, theme, module or rank.
        PlanError: What the picture shows is not known of this plan.
    """
    check_what(what)
    given = {option: value for option, value in given.items() if value is not None}
    for option in given:
        if what not in _TAKES.get(option, ()):
            fix = (
                f"of {option} there are pictures {' and '.join(_TAKES[option])}"
                if (option in _TAKES)
                else f"the options are theme, {', '.join(_TAKES)}"
            )
            problem = f"the picture of {what} takes no '{option}'"
            raise SpecError(Problem(problem, Origin("draw"), fix))
    asked = Asked(plan=plan, theme=theme_of(theme), **given)
    world = plan.mesh.world_size
    if asked.rank is not None and not 0 <= asked.rank < world:
        problem = f"there is no rank {asked.rank}"
        raise SpecError(Problem(problem, Origin("--rank"), f"name one of 0 to {world - 1}"))
    return _DRAWN[what](asked)


def check_what(what: str) -> None:
    """Whether there is such a picture.

    Raises:
        SpecError: There is none.
    """
    if what not in _DRAWN:
        fix = f"ask for one of {', '.join(WHATS)}"
        raise SpecError(Problem(f"there is no picture of '{what}'", Origin("--what"), fix))
