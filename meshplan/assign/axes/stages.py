"""Pipeline stages: assign each module to a stage, and find the tensors that each stage needs.

The model is split between units: the repeated blocks and the modules before and after them. If a
forward was recorded, or an outline of it is known, units are in the order in which they run, else
in the order in which they are defined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from meshplan.assign.base.cascade import Cascade
from meshplan.assign.base.types import Reason, Recompute, Stages
from meshplan.errors import Origin, Problem
from meshplan.layout.mesh import Mesh
from meshplan.layout.schedules import SCHEDULES
from meshplan.model.flow import Call, Flow
from meshplan.model.graph import ModelGraph, around, is_inside
from meshplan.model.stage_boundary import Bond, UnitFlow, unit_calls
from meshplan.spec.match import nearest
from meshplan.spec.spec import AUTO, Pipeline, Spec


@dataclass(frozen=True, slots=True)
class _StageMark:
    """The stage that the plan states for a module."""

    stage: int
    reason: Reason


def assign_stages(
    spec: Spec,
    graph: ModelGraph,
    cascade: Cascade,
    mesh: Mesh,
    recompute: Mapping[str, Recompute],
) -> tuple[Stages | None, list[Problem]]:
    """Return the pipeline (None without a pp axis, or if there are problems) and the problems."""
    ranks = mesh.size("pp")
    if ranks == 1:
        return None, list(_without_axis(spec, cascade))
    settings = spec.pipeline or Pipeline()
    row = SCHEDULES["1F1B" if settings.schedule == AUTO else settings.schedule]
    problems: list[Problem] = []
    is_stated = "pipeline.virtual" in spec.origins
    virtual = row.virtual or (settings.virtual if is_stated or settings.virtual > 1 else 2)
    if (row.virtual and is_stated and settings.virtual != row.virtual) or virtual < (
        row.virtual or 2
    ):
        problems.append(
            Problem(
                f"{row.name} has {row.virtual or 'at least 2'} stages per rank, not "
                f"virtual: {settings.virtual}",
                spec.origin("pipeline.virtual"),
                f"write virtual: {row.virtual or 2}",
            )
        )
        return None, problems
    least = 2 * ranks if row.is_v else ranks
    count = settings.microbatches if isinstance(settings.microbatches, int) else least
    why = row.problem(ranks, count)
    if why:
        origin = spec.origin("pipeline.microbatches")
        problems.append(Problem(f"{row.name} on pp {ranks} {why}, not {count}", origin,
                                f"write microbatches: {least}"))  # fmt: skip
    cutter = StageCutter(spec, graph, cascade, ranks * virtual, recompute)
    units = cutter.units()
    stages = cutter.stages(units) if units else None
    problems += cutter.problems
    if stages is None or problems:
        return None, problems
    names = [name for name, _ in units]
    return (
        Stages(
            schedule=row.name,
            num_ranks=ranks,
            virtual=virtual,
            microbatches=count,
            opened=tuple(sorted(cutter.opened)),
            free=tuple(sorted(cutter.free)),
            units=tuple(zip(names, stages, strict=True)),
            tensors=MappingProxyType(cutter.tensors(units, stages)),
            reason=cutter.reason,
        ),
        [],
    )


def idle_warnings(spec: Spec, graph: ModelGraph, stages: Stages | None) -> list[Problem]:
    """Return a warning if a rank has no trainable parameter.

    torch's optimizers raise an error for an empty parameter list.
    """
    if stages is None:
        return []
    trained = [fqn for fqn in stages.tensors if graph.tensors[fqn].trainable]
    idle = [
        place
        for place in range(stages.num_ranks)
        if not any(stages.holds(fqn, place) for fqn in trained)
    ]
    if not trained or not idle:
        return []
    return [
        Problem(
            f"no parameter of pp rank {', '.join(map(str, idle))} is trainable: an optimizer of "
            "only the trainable parameters would be empty there, and torch raises an error",
            spec.origin("mesh.pp"),
            "pass all of model.parameters() to the optimizer, or change pipeline.split",
        )
    ]


def order_warnings(spec: Spec, graph: ModelGraph, stages: Stages | None) -> list[Problem]:
    """Return a warning if stages follow the definition order, because no forward is known.

    `parallelize` records the forward, and so may split the model differently.
    """
    if stages is None or _flow_of(graph, stages.opened) is not None:
        return []
    return [
        Problem(
            "no forward of the model was recorded: its stages follow the order in which modules "
            "are defined, while parallelize follows the order in which they run, which may differ",
            spec.origin("mesh.pp"),
            "name the model with --model pkg.mod:function to see the stages that parallelize makes",
        )
    ]


def _without_axis(spec: Spec, cascade: Cascade) -> list[Problem]:
    stated = {s.path for _, s in cascade.modules_with("stage")}
    paths = ["pipeline"] * (spec.pipeline is not None) + sorted(stated)
    return [
        Problem(f"'{path.rpartition('.')[2]}' has no effect without a pp axis",
                spec.origin(path), f"add pp to the mesh, or remove {path.rpartition('.')[2]}")
        for path in paths
    ]  # fmt: skip


def _flow_of(graph: ModelGraph, opened: Iterable[str]) -> Flow | None:
    """Return the recorded forward, else the outline if it has the calls inside opened modules."""
    if graph.flow is not None or graph.outline is None:
        return graph.flow
    calls = graph.outline.calls
    called = {call.module for call in calls}
    shown = {calls[call.parent].module for call in calls if call.parent is not None}
    return graph.outline if set(opened) & called <= shown else None


Units = list[tuple[str, Call | None]]
"""Pairs (fqn of a unit's module, its call) in order; the call is None if no forward is known."""


class StageCutter:
    """Splits one model into a number of stages.

    Args:
        spec: The spec, with the stages that it states.
        graph: The model.
        cascade: The rules of the spec, resolved for the model.
        count: Number of stages.
        recompute: The modules that are recomputed, by fqn.

    Attributes:
        problems: What prevents the split.
        reason: Why the stages are cut where they are.
        free: Modules without parameters that may run in any stage.
        opened: Modules whose children are split between stages.
        flow: The recorded forward or an outline of it; None if neither is known.
    """

    def __init__(
        self,
        spec: Spec,
        graph: ModelGraph,
        cascade: Cascade,
        count: int,
        recompute: Mapping[str, Recompute],
    ) -> None:
        self.spec, self.graph, self.count, self.recompute = spec, graph, count, recompute
        self.problems: list[Problem] = []
        self.reason = Reason("balanced by parameters")
        self.marks = self._marks(cascade)
        self.free: set[str] = set()
        self.opened = self._ancestors([*graph.blocks(), *self.marks])
        self.flow = _flow_of(graph, self.opened)
        self._known: tuple[Flow, tuple[Call, ...], UnitFlow] | None = None

    def _marks(self, cascade: Cascade) -> dict[str, _StageMark]:
        marks: dict[str, _StageMark] = {}
        for fqn, stated in cascade.modules_with("stage"):
            word = {"first": 0, "last": self.count - 1}.get(stated.value, stated.value)
            marks[fqn] = _StageMark(word, Reason(stated.text, self.spec.origin(stated.path)))
        split = self.spec.pipeline.split if self.spec.pipeline else AUTO
        if isinstance(split, tuple):
            origin = self.spec.origin("pipeline.split")
            if len(split) != self.count:
                self._error(f"split has {len(split)} stages, but the plan has {self.count}", origin,
                          f"write {self.count} lists of modules, one per stage")  # fmt: skip
            known = {n: m.fqn for m in self.graph.modules.values() for n in (m.fqn, *m.aliases)}
            for stage, names in enumerate(split):
                for name in names:
                    if name not in known:
                        near = nearest(name, [n for n in known if n])
                        fix = f"did you mean '{near}'?" if near else "correct the name"
                        self._error(f"'{name}' is not a module of {self.graph.name}", origin, fix)
                        continue
                    marks[known[name]] = _StageMark(stage, Reason("split", origin))
        for fqn, mark in marks.items():
            if not 0 <= mark.stage < self.count:
                what = f"'{fqn}' is assigned to stage {mark.stage}, but there are only {self.count}"
                self._error(what, mark.reason.origin, f"use 0 to {self.count - 1}")
        if marks:
            self.reason = next(iter(marks.values())).reason
        return marks

    def _error(self, what: str, origin: Origin | None, fix: str) -> None:
        if not any(p.origin == origin and p.what == what for p in self.problems):
            self.problems.append(Problem(what, origin, fix))

    def _ancestors(self, fqns: Iterable[str]) -> set[str]:
        out = {""}
        for fqn in fqns:
            parts = fqn.split(".")[:-1]
            out.update(".".join(parts[: n + 1]) for n in range(len(parts)))
        return out

    def units(self) -> Units:
        """Return the units between which stages can be cut; [] after a problem.

        While there are fewer units than stages, the largest unit is replaced by the modules in it.
        """
        if self.problems:
            return []
        for fqn in sorted(self.opened & set(self.recompute)):
            self._error(f"'{fqn}' is recomputed as a whole, so it cannot be split between stages",
                      self.recompute[fqn].reason.origin,
                      "recompute the modules inside it, or move the stage boundary")  # fmt: skip
            return []
        while True:
            units = self._list()
            if len(units) >= self.count:
                return units
            if self.flow is not self.graph.flow:
                self.flow = None  # An outline has no calls inside its units; use definitions.
                continue
            closed = [m for m, call in units if m not in self.recompute and self._opens(m, call)]
            if not closed:
                self._error(
                    f"{self.graph.name} has {len(units)} modules to split between, fewer than "
                    f"{self.count} stages",
                    self.spec.origin("mesh"),
                    "use a smaller pp, or fewer stages per rank",
                )
                return []
            self.opened.add(max(closed, key=lambda m: self._bytes(m, set())))

    def _opens(self, module: str, call: Call | None) -> bool:
        if call is None or self.flow is None:
            return bool(self.graph.children(module))
        return any(other.parent == call.id for other in self.flow.calls)

    def _list(self) -> Units:
        if self.flow is not None:
            flow = self.flow
            found = UnitFlow(flow, unit_calls(flow, self.opened)).free()
            self.free = {m for m in found if m not in self.marks and not self._bytes(m, set())}
            calls = unit_calls(flow, self.opened, self.free)
            return [(call.module, call) for call in calls]
        out: Units = []

        def visit(fqn: str) -> None:
            children = self.graph.children(fqn)
            is_open = fqn in self.opened or not self.graph.modules[fqn].has_forward
            if children and is_open:
                for child in children:
                    visit(child.fqn)
            elif fqn and self._bytes(fqn, set()):
                out.append((fqn, None))

        visit("")
        return out

    def _bytes(self, module: str, counted: set[str]) -> int:
        """Return the bytes of a module's parameters that `counted` lacks, and add these to it."""
        total = 0
        for tensor in self.graph.parameters:
            below = any(is_inside(name, module) for name in tensor.names)
            if below and tensor.fqn not in counted:
                counted.add(tensor.fqn)
                total += tensor.num_bytes
        return total

    def stages(self, units: Units) -> list[int] | None:
        """Return the stage of each unit, in order; None after a problem."""
        flow = self.flow
        calls = [call for _, call in units if call is not None]
        bonds = tuple(self.cut(flow, calls).bonds()) if flow is not None else ()
        if not self.marks:
            counted: set[str] = set()
            weights = [self._bytes(module, counted) + 1 for module, _ in units]
            allowed = [
                not any(b.first <= cut < b.last for b in bonds) for cut in range(len(units) - 1)
            ]
            found = balance(weights, allowed, self.count)
            if found is None:
                why = bonds[0].why if bonds else "there are too few modules"
                what = f"{self.graph.name} cannot be split into {self.count} stages: {why}"
                self._error(what, self.spec.origin("mesh"), "use a smaller pp, or another axis")
            return found
        stages = self._marked([module for module, _ in units])
        if stages is not None:
            self._check_bonds(units, stages, bonds)
        return stages

    def _marked(self, modules: Sequence[str]) -> list[int] | None:
        stages: list[int] = []
        current, seen = 0, set[str]()
        for place, module in enumerate(modules):
            mark = next((self.marks[m] for m in around(module) if m in self.marks), None)
            if mark is not None:
                if mark.stage < current and module not in seen:
                    before = modules[place - 1]
                    is_recorded = self.flow is not None
                    fix = f"assign it to stage {current} or later"
                    self._error(
                        f"'{module}' is assigned to stage {mark.stage}, but "
                        f"{'runs' if is_recorded else 'is defined'} after '{before}' of "
                        f"stage {current}",
                        mark.reason.origin,
                        fix
                        if is_recorded
                        else f"{fix}, or name the model with --model "
                        "pkg.mod:function, so that stages follow the order in which modules run",
                    )
                    return None
                current = max(current, mark.stage)
            seen.add(module)
            stages.append(current)
        missing = [s for s in range(self.count) if s not in stages]
        if missing:
            self._error(f"no module is in stage {missing[0]}, but the plan has {self.count} stages",
                      self.reason.origin, "assign a module to every stage")  # fmt: skip
            return None
        return stages

    def _check_bonds(self, units: Units, stages: list[int], bonds: Iterable[Bond]) -> None:
        for bond in bonds:
            if stages[bond.first] != stages[bond.last]:
                self._error(
                    f"'{units[bond.first][0]}' and '{units[bond.last][0]}' are in stages "
                    f"{stages[bond.first]} and {stages[bond.last]}, but must share one: {bond.why}",
                    self.reason.origin,
                    "move the stage boundary: assign both to one stage",
                )

    def tensors(self, units: Units, stages: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return, by fqn of a tensor, the stages that need it, in ascending order.

        A tensor that no stage uses is in the stage of the tensor defined before it.
        """
        holders: dict[str, set[int]] = {fqn: set() for fqn in self.graph.tensors}
        first = {name: t.fqn for t in self.graph.tensors.values() for name in t.names}
        stages_of: dict[str, list[int]] = {}
        for (module, _), stage in zip(units, stages, strict=True):
            stages_of.setdefault(module, []).append(stage)
        for name, fqn in first.items():
            for module in around(name.rpartition(".")[0]):
                holders[fqn].update(stages_of.get(module, ()))
        if self.flow is not None:
            cut = self.cut(self.flow, [call for _, call in units if call is not None])
            for stage, names in enumerate(cut.relay(stages, self.count).reads):
                for name in names:
                    if name in first:
                        holders[first[name]].add(stage)
        by_module = dict(zip((m for m, _ in units), stages, strict=True))
        places = {module: place for place, module in enumerate(by_module)}
        before = 0
        for fqn, tensor in self.graph.tensors.items():
            if tensor.is_buffer and self._runs_everywhere(tensor.module):
                holders[fqn] = set(range(self.count))
            elif not holders[fqn]:
                holders[fqn] = {before}
            found = [m for m in around(tensor.module) if m in places]
            before = by_module[min(found, key=places.__getitem__)] if found else before
        return {fqn: tuple(sorted(found)) for fqn, found in holders.items()}

    def cut(self, flow: Flow, calls: Sequence[Call]) -> UnitFlow:
        """Return the `UnitFlow` of these calls; the latest result is cached."""
        if self._known is None or self._known[:2] != (flow, tuple(calls)):
            self._known = flow, tuple(calls), UnitFlow(flow, calls)
        return self._known[2]

    def _runs_everywhere(self, module: str) -> bool:
        return module in self.opened or any(m in self.free for m in around(module))


def balance(weights: Sequence[int], allowed: Sequence[bool], parts: int) -> list[int] | None:
    """Return the index of the part of each weight; None if `parts` non-empty parts are impossible.

    The heaviest part is as light as possible. Among such splits, the one with the smallest sum of
    squared part weights is chosen.

    Args:
        weights: The weights, in order.
        allowed: For each place between two weights, True if a split is allowed there.
        parts: Number of parts.

    >>> balance([1, 1, 1, 3], [True, True, True], 2)
    [0, 0, 0, 1]
    """
    count = len(weights)
    sums = [0, *accumulate(weights)]
    ends = [end for end in range(1, count) if allowed[end - 1]] + [count]
    # best[end] describes the best split of the weights before `end` into the number of parts that
    # the loop has reached: (weight of the heaviest part, sum of squares).
    best: dict[int, tuple[int, int]] = {end: (sums[end], sums[end] ** 2) for end in ends}
    choices: list[dict[int, int]] = []
    for _ in range(parts - 1):
        now: dict[int, tuple[int, int]] = {}
        cuts: dict[int, int] = {}
        for end in ends:
            options = [
                (max(heavy, sums[end] - sums[cut]), squares + (sums[end] - sums[cut]) ** 2, cut)
                for cut, (heavy, squares) in best.items()
                if cut < end
            ]
            if options:
                *score, cut = min(options)
                now[end], cuts[end] = (score[0], score[1]), cut
        best = now
        choices.append(cuts)
    if count not in best:
        return None
    out: list[int] = [0] * count
    end = count
    for part in range(parts - 1, 0, -1):
        cut = choices[part - 1][end]
        out[cut:end] = [part] * (end - cut)
        end = cut
    return out
