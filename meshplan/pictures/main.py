"""One line from a plan to a picture: which question, its facts, its drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from meshplan.cost.profile import profile_of
from meshplan.cost.stages import stage_seconds
from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import EventLog
from meshplan.pictures.base.palette import Theme, theme_of
from meshplan.pictures.base.types import Picture
from meshplan.pictures.graphs.drawn import draw_graph
from meshplan.pictures.graphs.modules import module_graph
from meshplan.pictures.graphs.tree import Tree, module_tree
from meshplan.pictures.memory.bars import MemoryBars, draw_memory, memory_bars, states_alone
from meshplan.pictures.memory.timeline import draw_timeline, log_of, timeline
from meshplan.pictures.memory.treemap import Of, draw_treemap, treemap
from meshplan.pictures.memory.waterfall import draw_waterfall, waterfall, waterfall_of_states
from meshplan.pictures.mesh.comm import comm, draw_comm
from meshplan.pictures.mesh.counted import ONLY_COUNT, check_counted, is_counted
from meshplan.pictures.mesh.mesh_map import MeshMap, draw_mesh, mesh_map
from meshplan.pictures.mesh.tensor import TensorLayout, draw_layout, tensor_layout
from meshplan.pictures.plans.gantt import Gantt, draw_gantt, gantt
from meshplan.pictures.plans.ladder import draw_ladder, ladder
from meshplan.pictures.plans.pareto import draw_pareto, pareto
from meshplan.plan.plan import Plan
from meshplan.planner.problem.request import cluster_of
from meshplan.textbook.inputs import read_limit

if TYPE_CHECKING:
    from meshplan.planner.problem.decision import Decision

OF_DECISIONS: Final = ("pareto", "ladder")
"""What is about a search, and not about one plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest:
    """A question, and what was given with it; arguments of `draw`."""

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
            return estimate_analytic(
                self.plan, device=device, limit_bytes=limit_bytes, notes=notes, packs=False
            )  # No picture shows what it would be under another allocator.
        except PlanError as error:
            first = error.problems[0]
            fix = f"{first.fix or 'see the plan'}; or give estimate=meshplan.estimate_memory(...)"
            raise PlanError(Problem(first.what, first.origin, fix)) from None


def _mesh(asked: DrawRequest) -> Picture:
    return draw_mesh(_mesh_facts(asked), asked.theme)


def _mesh_facts(asked: DrawRequest) -> MeshMap:
    return mesh_map(asked.plan)


def _layout(asked: DrawRequest) -> Picture:
    return draw_layout(_layout_facts(asked), asked.theme)


def _layout_facts(asked: DrawRequest) -> TensorLayout:
    return tensor_layout(asked.plan, asked.name)


def memory_facts(asked: DrawRequest) -> MemoryBars:
    """Of the step where it is known, of the states where it is not."""
    if asked.estimate is None and is_counted(asked.plan):
        return states_alone(asked.plan, asked.limit[1], ONLY_COUNT)
    try:
        return memory_bars(asked.known)
    except PlanError as error:
        _, limit_bytes, _ = asked.limit
        return states_alone(asked.plan, limit_bytes, error.problems[0].what)


def _memory(asked: DrawRequest) -> Picture:
    return draw_memory(memory_facts(asked), asked.theme)


def _waterfall(asked: DrawRequest) -> Picture:
    if asked.estimate is None and is_counted(asked.plan):
        states = waterfall_of_states(asked.plan, asked.limit[1], ONLY_COUNT)
        return draw_waterfall(states, asked.theme)
    try:
        facts = waterfall(asked.known)
    except PlanError as error:
        facts = waterfall_of_states(asked.plan, asked.limit[1], error.problems[0].what)
    return draw_waterfall(facts, asked.theme)


def _timeline(asked: DrawRequest) -> Picture:
    """Of the rank that was asked for, or of one that needs most."""
    plan, stages = asked.plan, asked.plan.assignment.stages
    count = plan.accumulate * (stages.microbatches * stages.virtual if stages is not None else 1)
    if asked.log is not None:
        log, rank = with_workspaces(asked.log, asked.limit[0]), asked.rank or 0
    else:
        rank = asked.rank if asked.rank is not None else asked.known.worst.ranks[0]
        log = log_of(plan, rank, asked.limit[0])
    return draw_timeline(timeline(log, rank, count), asked.theme)


def _treemap(asked: DrawRequest) -> Picture:
    """The bytes that were asked for, and beside them the others."""
    rank = asked.rank or 0
    names: dict[Of, str] = {"local": f"bytes of rank {rank}", "global": "bytes of the model"}
    order = sorted(names, key=lambda of: of != asked.of)
    pictures = [draw_treemap(treemap(asked.plan, of, rank), asked.theme) for of in order]
    views = tuple((names[of], each) for of, each in zip(order, pictures, strict=True))
    return replace(pictures[0], views=views, choice="whose bytes")


def gantt_facts(asked: DrawRequest) -> Gantt:
    """In seconds where the model and the machine are known, else in forwards of a stage."""
    hardware = asked.plan.spec.hardware
    if hardware is None or hardware.gpu is None:
        return gantt(asked.plan)
    cluster = cluster_of(asked.plan.spec, hardware.gpu)
    try:
        a = asked.plan.assignment
        dtype = next((p.compute_dtype for p in a.tensors.values() if not p.info.is_buffer), "")
        profile = profile_of(cluster, dtype=dtype)
        times = stage_seconds(asked.plan, profile, hardware.gpus_per_node)
    except PlanError:
        return gantt(asked.plan)
    return gantt(
        asked.plan, times.forward_s, times.backward_s, crossing_s=times.crossing_s,
        assumed=f"Seconds are a cost model's for {profile.device}, without what ends a step: the "
        "last reductions and the optimizer.",
    )  # fmt: skip


def _gantt(asked: DrawRequest) -> Picture:
    return draw_gantt(gantt_facts(asked), asked.theme)


def _comm(asked: DrawRequest) -> Picture:
    return draw_comm(comm(asked.plan, asked.rank or 0), asked.theme)


def _searched(asked: DrawRequest) -> Decision:
    if asked.decision is None:
        what = "a plan does not say what it was chosen from"
        fix = "give decision=meshplan.search_plan(...), or use meshplan draw -f plan.yaml"
        raise PlanError(Problem(what, Origin("draw"), fix))
    return asked.decision


def _pareto(asked: DrawRequest) -> Picture:
    return draw_decision(_searched(asked), "pareto", theme=asked.theme.name)


def _ladder(asked: DrawRequest) -> Picture:
    return draw_decision(_searched(asked), "ladder", theme=asked.theme.name)


def _graph(asked: DrawRequest) -> Picture:
    return draw_graph(module_graph(asked.plan), asked.theme)


def _graph_facts(asked: DrawRequest) -> Tree:
    """Of the twin, a tree: lines below each other have no room for arrows."""
    return module_tree(asked.plan)


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
"""Of those that have a twin in the terminal."""
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
"""By option, the pictures that it says something about."""
WHATS: Final = tuple(_DRAWN)
"""Every question, in the order in which they are listed."""


def draw(plan: Plan, what: str, *, theme: str = "light", **given: Any) -> Picture:
    """A picture of a plan.

    Args:
        what: A word of `WHATS`.
        theme: "light" or "dark".
        given: What some pictures take: `name` of a module or parameter (layout), `rank`
            (timeline, treemap, comm), `of`, "local" or "global" bytes (treemap), `estimate`, what
            `estimate_memory` answered (memory, waterfall), `decision`, what `search_plan` answered
            (pareto, ladder), `log`, a traced step of the rank (timeline), `gpu` and `memory`, as of
            `estimate_memory` (memory, waterfall, timeline).

    Raises:
        SpecError: There is no such picture, theme, module or rank.
        PlanError: What the picture shows is not known of this plan.
    """
    asked = _asked(plan, what, theme, given)
    return _DRAWN[what](asked)


def facts_of(plan: Plan, what: str, **given: Any) -> Any:
    """What a picture shows, before it is drawn: for those with a twin in the terminal.

    Args:
        given: As of `draw`.
    """
    asked = _asked(plan, what, "light", given)
    return _FACTS[what](asked)


def _asked(plan: Plan, what: str, theme: str, given: Mapping[str, Any]) -> DrawRequest:
    """A question that makes sense."""
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
    check_counted(plan, what)
    asked = DrawRequest(plan=plan, theme=theme_of(theme), **given)
    if asked.of not in ("local", "global"):
        problem = f"there are no '{asked.of}' bytes"
        raise SpecError(Problem(problem, Origin("--bytes"), "write local or global"))
    if asked.rank is not None:
        check_rank(plan, asked.rank)
    return asked


def check_rank(plan: Plan, rank: int) -> None:
    """Whether the mesh has such a rank.

    Raises:
        SpecError: It has not.
    """
    world = plan.mesh.world_size
    if not 0 <= rank < world:
        problem = f"there is no rank {rank}"
        raise SpecError(Problem(problem, Origin("--rank"), f"name one of 0 to {world - 1}"))


def draw_decision(decision: Decision, what: str, *, theme: str = "light") -> Picture:
    """A picture of a search, whether or not it found a plan.

    Args:
        what: A word of `OF_DECISIONS`.

    Raises:
        PlanError: There is nothing to compare.
    """
    assert what in OF_DECISIONS
    if what == "pareto":
        return draw_pareto(pareto(decision), theme_of(theme))
    return draw_ladder(ladder(decision), theme_of(theme))


def check_what(what: str) -> None:
    """Whether there is such a picture.

    Raises:
        SpecError: There is none.
    """
    if what not in _DRAWN:
        fix = f"ask for one of {', '.join(WHATS)}"
        raise SpecError(Problem(f"there is no picture of '{what}'", Origin("--what"), fix))
