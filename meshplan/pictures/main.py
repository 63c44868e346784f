"""Entry points of the pictures: check the options, compute the facts, draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import EventLog
from meshplan.pictures.base.page import NARROW, WIDTH
from meshplan.pictures.base.palette import Theme, theme_of
from meshplan.pictures.base.types import Picture
from meshplan.pictures.graphs.drawn import draw_graph
from meshplan.pictures.graphs.modules import module_graph
from meshplan.pictures.graphs.tree import Tree, module_tree
from meshplan.pictures.memory.bars import MemoryBars, memory_bars, states_alone
from meshplan.pictures.memory.drawn_bars import draw_memory
from meshplan.pictures.memory.timeline import draw_timeline, log_of, timeline
from meshplan.pictures.memory.treemap import Of, draw_treemap, treemap
from meshplan.pictures.memory.waterfall import draw_waterfall, waterfall, waterfall_of_states
from meshplan.pictures.mesh.comm import comm, draw_comm
from meshplan.pictures.mesh.counted import ONLY_COUNT, check_counted, is_counted
from meshplan.pictures.mesh.mesh_map import MeshMap, draw_mesh, mesh_map
from meshplan.pictures.mesh.tensor import TensorLayout, draw_layout, tensor_layout
from meshplan.pictures.plans.drawn_gantt import draw_gantt
from meshplan.pictures.plans.drawn_pareto import draw_pareto
from meshplan.pictures.plans.gantt import Gantt, gantt
from meshplan.pictures.plans.ladder import draw_ladder, ladder
from meshplan.pictures.plans.pareto import pareto
from meshplan.plan.plan import Plan
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.whole_plan import Costed
from meshplan.spec.values import did_you_mean
from meshplan.textbook.inputs import read_limit

if TYPE_CHECKING:
    from meshplan.planner.problem.decision import Decision

OF_DECISIONS: Final = ("pareto", "ladder")
"""Pictures of a search instead of a single plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest:
    """A request for a picture. The fields are the arguments of `draw`, which explains them."""

    plan: Plan
    theme: Theme
    name: str | None = None
    rank: int | None = None
    estimate: MemoryEstimate | None = None
    decision: Decision | None = None
    gpu: str | None = None
    memory: str | int | None = None
    of: Of = "local"
    log: EventLog | None = None

    @property
    def limit(self) -> tuple[str, int | None, tuple[str, ...]]:
        """(device name, memory limit in bytes or None, notes), from `gpu`, `memory` and plan."""
        return read_limit(self.gpu, self.memory, self.plan.spec)

    @property
    def known(self) -> MemoryEstimate:
        """The given estimate, or the estimate from the model's config.

        Raises:
            PlanError: No estimate was given, and the config alone does not suffice for one.
        """
        if self.estimate is not None:
            return self.estimate
        device, limit_bytes, notes = self.limit
        try:
            return estimate_analytic(
                self.plan, device=device, limit_bytes=limit_bytes, notes=notes, try_expandable=False
            )  # Pictures do not show what expandable segments would change.
        except PlanError as error:
            first = error.problems[0]
            fix = f"{first.fix or 'see the plan'}; or pass estimate=meshplan.estimate_memory(...)"
            raise PlanError(Problem(first.what, first.origin, fix)) from None


def _finished(paint: Callable[[Theme, float], Picture], theme: Theme) -> Picture:
    """Return the picture that `paint` draws, which can draw itself for a narrow screen too."""
    return replace(paint(theme, WIDTH), narrow=partial(paint, theme, NARROW))


def _mesh(request: DrawRequest) -> Picture:
    return _finished(partial(draw_mesh, _mesh_facts(request)), request.theme)


def _mesh_facts(request: DrawRequest) -> MeshMap:
    return mesh_map(request.plan)


def _layout(request: DrawRequest) -> Picture:
    return _finished(partial(draw_layout, _layout_facts(request)), request.theme)


def _layout_facts(request: DrawRequest) -> TensorLayout:
    return tensor_layout(request.plan, request.name)


def memory_facts(request: DrawRequest) -> MemoryBars:
    """Return bars with the peak of a step if it can be estimated, else with the states alone."""
    if request.estimate is None and is_counted(request.plan):
        return states_alone(request.plan, request.limit[1], ONLY_COUNT)
    try:
        return memory_bars(request.known)
    except PlanError as error:
        _, limit_bytes, _ = request.limit
        return states_alone(request.plan, limit_bytes, error.problems[0].what)


def _memory(request: DrawRequest) -> Picture:
    return _finished(partial(draw_memory, memory_facts(request)), request.theme)


def _waterfall(request: DrawRequest) -> Picture:
    if request.estimate is None and is_counted(request.plan):
        facts = waterfall_of_states(request.plan, request.limit[1], ONLY_COUNT)
        return _finished(partial(draw_waterfall, facts), request.theme)
    try:
        facts = waterfall(request.known)
    except PlanError as error:
        facts = waterfall_of_states(request.plan, request.limit[1], error.problems[0].what)
    return _finished(partial(draw_waterfall, facts), request.theme)


def _timeline(request: DrawRequest) -> Picture:
    """Draw the timeline of the requested rank, or of a rank with the highest peak."""
    plan, stages = request.plan, request.plan.assignment.stages
    count = plan.accumulate * (stages.microbatches * stages.virtual if stages is not None else 1)
    if request.log is not None:
        log, rank = with_workspaces(request.log, request.limit[0]), request.rank or 0
    else:
        rank = request.rank if request.rank is not None else request.known.worst.ranks[0]
        log = log_of(plan, rank, request.limit[0])
    return _finished(partial(draw_timeline, timeline(log, rank, count)), request.theme)


def _treemap(request: DrawRequest) -> Picture:
    """Draw the treemap of `of` ("local" or "global") bytes, with the other one as second view."""
    rank = request.rank or 0
    names: dict[Of, str] = {"local": f"bytes of rank {rank}", "global": "bytes of the model"}
    order = sorted(names, key=lambda of: of != request.of)
    drawn = [partial(draw_treemap, treemap(request.plan, of, rank)) for of in order]
    pictures = [_finished(paint, request.theme) for paint in drawn]
    views = tuple((names[of], each) for of, each in zip(order, pictures, strict=True))
    return replace(pictures[0], views=views, choice="whose bytes")


def gantt_facts(request: DrawRequest) -> Gantt:
    """Return facts in seconds if the cost model can tell them, else in forwards of a stage."""
    hardware = request.plan.spec.hardware
    if hardware is None or hardware.gpu is None:
        return gantt(request.plan)
    cluster = cluster_of(request.plan.spec, hardware.gpu)
    try:
        costed = Costed(request.plan, cluster)
        times = costed.stage_seconds
        parts = costed.step_parts if request.plan.assignment.stages is None else None
    except PlanError:
        return gantt(request.plan)
    end = ", without the end of a step: the last reductions and the optimizer"
    return gantt(
        request.plan, times.forward_s, times.backward_s, crossing_s=times.crossing_s,
        parts=parts,
        assumed=f"Seconds are the cost model's for {costed.profile.device}{'' if parts else end}.",
    )  # fmt: skip


def _gantt(request: DrawRequest) -> Picture:
    return _finished(partial(draw_gantt, gantt_facts(request)), request.theme)


def _comm(request: DrawRequest) -> Picture:
    return _finished(partial(draw_comm, comm(request.plan, request.rank or 0)), request.theme)


def _searched(request: DrawRequest) -> Decision:
    if request.decision is None:
        what = "this picture shows a search, and a plan does not contain the search"
        fix = "pass decision=meshplan.search_plan(...), or run meshplan draw -f plan.yaml"
        raise PlanError(Problem(what, Origin("draw"), fix))
    return request.decision


def _pareto(request: DrawRequest) -> Picture:
    return draw_decision(_searched(request), "pareto", theme=request.theme.name)


def _ladder(request: DrawRequest) -> Picture:
    return draw_decision(_searched(request), "ladder", theme=request.theme.name)


def _graph(request: DrawRequest) -> Picture:
    return _finished(partial(draw_graph, module_graph(request.plan)), request.theme)


def _graph_facts(request: DrawRequest) -> Tree:
    """Return the modules as a tree, for the terminal: a graph's arrows cannot be shown as text."""
    return module_tree(request.plan)


_DRAWN: Final[Mapping[str, Callable[[DrawRequest], Picture]]] = MappingProxyType(
    {
        "mesh": _mesh,
        "layout": _layout,
        "memory": _memory,
        "waterfall": _waterfall,
        "timeline": _timeline,
        "treemap": _treemap,
        "gantt": _gantt,
        "comm": _comm,
        "pareto": _pareto,
        "ladder": _ladder,
        "graph": _graph,
    }
)
_FACTS: Final[Mapping[str, Callable[[DrawRequest], Any]]] = MappingProxyType(
    {
        "mesh": _mesh_facts,
        "layout": _layout_facts,
        "memory": memory_facts,
        "gantt": gantt_facts,
        "graph": _graph_facts,
    }
)
"""For each picture with a text version for the terminal, the function that computes its facts."""
_TAKES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "name": ("layout",),
        "rank": ("timeline", "treemap", "comm"),
        "of": ("treemap",),
        "log": ("timeline",),
        "estimate": ("memory", "waterfall"),
        "decision": ("pareto", "ladder"),
        "gpu": ("memory", "waterfall", "timeline"),
        "memory": ("memory", "waterfall", "timeline"),
    }
)
"""For each option, the pictures that take it."""
WHATS: Final = tuple(_DRAWN)
"""Names of all pictures, in the order in which they are listed."""


def draw(plan: Plan, what: str, *, theme: str = "light", **given: Any) -> Picture:
    """Draw a picture of a plan.

    Args:
        plan: The plan.
        what: A name in `WHATS`.
        theme: "light" or "dark".
        given: Options of some pictures: `name` of a module or parameter (layout), `rank` (timeline,
            treemap, comm), `of`, "local" or "global" bytes (treemap), `estimate`, the result of
            `estimate_memory` (memory, waterfall), `decision`, the result of `search_plan` (pareto,
            ladder), `log`, a traced step of the rank (timeline), `gpu`, the name of the device
            whose memory is the limit, and `memory`, the limit itself (memory, waterfall, timeline).

    Raises:
        SpecError: There is no such picture, theme, module or rank.
        PlanError: The facts of the picture are not known for this plan.
    """
    request = _request(plan, what, theme, given)
    return _DRAWN[what](request)


def facts_of(plan: Plan, what: str, **given: Any) -> Any:
    """Return the facts that a picture shows, such as a `MeshMap`, without drawing it.

    Args:
        plan: The plan.
        what: Name of a picture that has a text version: mesh, layout, memory, gantt or graph.
        given: Options of the picture, with the same names as for `draw`.

    Raises:
        SpecError: There is no such picture, module or rank.
        PlanError: The facts of the picture are not known for this plan.
    """
    request = _request(plan, what, "light", given)
    return _FACTS[what](request)


def _request(plan: Plan, what: str, theme: str, given: Mapping[str, Any]) -> DrawRequest:
    """Check the name and options of a picture and return the request.

    Raises:
        SpecError: The picture does not exist, does not take an option, or its value is not valid.
        PlanError: The picture needs modules, and only the number of parameters is known.
    """
    check_what(what)
    given = {option: value for option, value in given.items() if value is not None}
    for option in given:
        if what not in _TAKES.get(option, ()):
            fix = (
                f"{option} is an option of the pictures {' and '.join(_TAKES[option])}"
                if (option in _TAKES)
                else f"the options are theme, {', '.join(_TAKES)}"
            )
            problem = f"the picture of {what} has no option '{option}'"
            raise SpecError(Problem(problem, Origin("draw"), fix))
    check_counted(plan, what)
    request = DrawRequest(plan=plan, theme=theme_of(theme), **given)
    if request.of not in ("local", "global"):
        problem = f"'{request.of}' is not a kind of bytes"
        raise SpecError(Problem(problem, Origin("--bytes"), "write local or global"))
    if request.rank is not None:
        check_rank(plan, request.rank)
    return request


def check_rank(plan: Plan, rank: int) -> None:
    """Check that the mesh has this rank.

    Raises:
        SpecError: The mesh has no such rank.
    """
    world = plan.mesh.world_size
    if not 0 <= rank < world:
        problem = f"there is no rank {rank}"
        raise SpecError(Problem(problem, Origin("--rank"), f"name one of 0 to {world - 1}"))


def draw_decision(decision: Decision, what: str, *, theme: str = "light") -> Picture:
    """Draw a picture of a search. "pareto" can also be drawn if the search found no plan.

    Args:
        decision: The planner's decision.
        what: A name in `OF_DECISIONS`.
        theme: "light" or "dark".

    Raises:
        PlanError: The picture is "ladder", and no plan was found that fits.
    """
    assert what in OF_DECISIONS
    if what == "pareto":
        return _finished(partial(draw_pareto, pareto(decision)), theme_of(theme))
    return _finished(partial(draw_ladder, ladder(decision)), theme_of(theme))


def check_what(what: str) -> None:
    """Check that there is such a picture.

    Raises:
        SpecError: There is no such picture.
    """
    if what not in _DRAWN:
        fix = did_you_mean(what, WHATS, f"ask for one of {', '.join(WHATS)}")
        raise SpecError(Problem(f"there is no picture of '{what}'", Origin("--what"), fix))
