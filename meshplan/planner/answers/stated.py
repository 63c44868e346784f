"""List the statements of a plan that restrict the planner, and read the plan without some of them.

Some statements are not listed, because they define the task: the machine, the model, the samples
and tokens of a step, the compute dtypes and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from meshplan.layout.mesh import AXES
from meshplan.planner.lock.lock import overrides
from meshplan.planner.space.batch import of_data_rank
from meshplan.planner.space.memory_settings import OFFERED
from meshplan.planner.space.schedule import stated_schedule, stated_virtual
from meshplan.shown import shown
from meshplan.spec.spec import AUTO, Borrow, Rule, Spec

_RULED: Final = ("activation_checkpointing", "reshard_after_forward", "stage", "unit")
"""Fields of rules that restrict the planner, besides `data` and `place`."""
_OTHERS: Final = "mesh"
"""Path of a statement that a mesh with named axes makes: it has no other axes."""
_PIPELINE: Final = "pipeline"
"""Path of the statement that a `pipeline` section makes: the plan has a pipeline."""
_SCHEDULE: Final = "pipeline.schedule"
_VIRTUAL: Final = "pipeline.virtual"
_WITH_SCHEDULE: Final = (_SCHEDULE, _VIRTUAL, "pipeline.microbatches")
_SWITCHES: Final = ("compile",)
"""Fields that the planner does not choose but that restrict its choices if stated."""
_OFFLOADED: Final = ("params", "optimizer", "activations")


@shown
@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a plan that restricts the planner.

    Args:
        path: Path of the statement in plan.yaml.
        text: Value of the statement in words.
        rule: Index of the rule that the statement is part of; None if it is not in a rule.
        allows_more: If True, the statement allows something that the planner would not try by
            itself, so that a plan may fit only with the statement.
    """

    path: str
    text: str
    rule: int | None = None
    allows_more: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"

    def settings(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the planner's statements that replace this statement.

        Args:
            chosen: {path: value} statements of a plan that was found without this statement.

        Returns:
            {path: value}; the value None removes a statement of the file.
        """
        area = self.path.partition(".")[0]
        if area == "mesh":
            return {"mesh": chosen["mesh"]}
        if self.rule is not None or area == "activation_checkpointing":
            names = ("activation_checkpointing", "rules[", "pipeline.split")
            return {path: value for path, value in chosen.items() if path.startswith(names)}
        own = f"{self.path}."
        found = {p: v for p, v in chosen.items() if p in (self.path, area) or p.startswith(own)}
        if area == _PIPELINE:
            # A schedule suits only the virtual stages and microbatches that were chosen with it.
            found |= {path: chosen[path] for path in _WITH_SCHEDULE if path in chosen}
        return found if self.path in found or area in found else {self.path: None, **found}

    def change(self, chosen: Mapping[str, Any]) -> str:
        """Return the replacement in words, such as "batch.micro: 2 -> 1".

        Args:
            chosen: {path: value} statements of a plan that was found without this statement.
        """
        new = self.settings(chosen)
        if self.path.startswith("mesh.") and self.path.partition(".")[2] in AXES:
            return f"{self} -> {new['mesh'].get(self.path.partition('.')[2], 1)}"
        if new.get(self.path) is not None and self.rule is None:
            rules = sum(path.startswith("rules[") for path in new)
            more = f" and {rules} rule{'' if rules == 1 else 's'}" if rules else ""
            return f"{self} -> {_words(new[self.path])}{more}"
        return f"without {self}"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def statements_of(spec: Spec) -> tuple[Statement, ...]:
    """Return all statements of a plan that restrict the planner, statements on the mesh first."""
    return (*_of_mesh(spec), *_of_whole(spec), *_of_pipeline(spec), *_of_rules(spec))


def _of_mesh(spec: Spec) -> Iterator[Statement]:
    if not isinstance(spec.mesh, Mapping):
        return
    node = spec.hardware.gpus_per_node if spec.hardware is not None else 0
    for axis, size in spec.mesh.items():
        if isinstance(size, Borrow):
            yield Statement(f"mesh.{axis}", str(in_words(size)))
        elif isinstance(size, int):
            # The planner does not try tp over several nodes by itself.
            yield Statement(f"mesh.{axis}", str(size), allows_more=axis == "tp" and size > node)
    yield Statement(_OTHERS, f"no axes but {', '.join(spec.mesh)}")


def _of_whole(spec: Spec) -> Iterator[Statement]:
    """Yield the statements on the whole model, other than those on the mesh and the pipeline."""
    if spec.strategy not in (None, AUTO):
        yield Statement("strategy", str(spec.strategy))
    for name in ("micro", "accumulate"):
        if isinstance(getattr(spec.batch, name), int):
            yield Statement(f"batch.{name}", str(getattr(spec.batch, name)))
    policy = spec.activation_checkpointing
    if "activation_checkpointing" in spec.origins and policy.mode != AUTO:
        yield Statement("activation_checkpointing", policy.mode)
    yield from _of_offload(spec)
    if spec.context is not None:
        words = {"attention": spec.context.attention, "balance": spec.context.balance}
        stated = {name: value for name, value in words.items() if value is not None}
        yield Statement("context", _words(stated), allows_more=True)
    if "tp_plan" in spec.origins and spec.tp_plan != AUTO:
        yield Statement("tp_plan", spec.tp_plan, allows_more=True)
    if "sequence_parallel" in spec.origins:
        cuts = spec.sequence_parallel
        yield Statement("sequence_parallel", _words(cuts), allows_more=not cuts)
    if spec.experts.capacity is not None:
        yield Statement("experts.capacity", f"{spec.experts.capacity:g}")
    for name in OFFERED:
        value = getattr(spec, name)
        if name in spec.origins and value != AUTO:
            yield Statement(name, _words(value), allows_more=value not in OFFERED[name])
    for name in _SWITCHES:
        value = getattr(spec, name)
        if value != getattr(Spec(), name):
            yield Statement(name, _words(value), allows_more=True)


def _of_offload(spec: Spec) -> Iterator[Statement]:
    """Yield the statements on offload: one per key of `offload`, or one for its short form."""
    offload = spec.offload
    parts = {n: v for n in _OFFLOADED if (v := getattr(offload, n)) in (True, False)}
    # If only the optimizer is stated to be offloaded, the planner offloads the parameters, too.
    allows_more = offload.optimizer is True
    if any(f"offload.{name}" in spec.origins for name in _OFFLOADED):
        for name, value in parts.items():
            yield Statement(f"offload.{name}", _words(value), allows_more=allows_more)
    elif parts:
        there = [name for name, value in parts.items() if value]
        yield Statement("offload", ", ".join(there) or "none", allows_more=allows_more)


def _of_pipeline(spec: Spec) -> Iterator[Statement]:
    if spec.pipeline is None:
        return
    yield Statement(_PIPELINE, "stated", allows_more=True)
    if (word := stated_schedule(spec)) is not None:
        yield Statement(_SCHEDULE, word)
    if (virtual := stated_virtual(spec)) is not None:
        yield Statement(_VIRTUAL, str(virtual))
    for name in ("microbatches", "split"):
        value = getattr(spec.pipeline, name)
        if value != AUTO:
            words = f"{len(value)} stages" if isinstance(value, tuple) else str(value)
            yield Statement(f"pipeline.{name}", words)


def _of_rules(spec: Spec) -> Iterator[Statement]:
    for rule in spec.rules:
        where = f" of {', '.join(map(str, rule.match))}"
        for name in _RULED:
            value = getattr(rule, name)
            if value is not None:
                words = str(getattr(value, "mode", value)).lower() + where
                yield Statement(f"rules[{rule.index}].{name}", words, rule.index)
        placed = rule.data or _words(rule.place)
        if placed:
            path = f"rules[{rule.index}].place"
            yield Statement(path, placed + where, rule.index, allows_more=bool(rule.place))


def without(
    read: Callable[[Sequence[str]], Spec], dropped: Collection[Statement], more: Sequence[str]
) -> Spec:
    """Read a spec with some of its statements left to the planner.

    Args:
        read: Reads the spec of the plan file with statements on top.
        dropped: The statements to leave to the planner.
        more: Statements to add on top.
    """
    whole = read(())
    paths = {each.path for each in dropped if each.rule is None}
    spec = read([*overrides(_left(whole, paths)), *more])
    counts = {each.path for each in _of_whole(whole)} & {"batch.micro", "batch.accumulate"}
    if whole.batch.global_ is None and len(counts) == 2 and counts & paths:
        # Keep the samples of a step: only the dropped statements stated their number.
        own = of_data_rank(whole.batch)
        spec = replace(spec, batch=replace(spec.batch, of_data_rank=own))
    fields: dict[int, set[str]] = {}
    for each in dropped:
        if each.rule is not None:
            fields.setdefault(each.rule, set()).add(each.path.rpartition(".")[2])
    # The planner appends its rules to those of the file, so the file's indices stay valid.
    return replace(spec, rules=tuple(_without(r, fields.get(r.index, ())) for r in spec.rules))


def _left(spec: Spec, paths: Collection[str]) -> dict[str, Any]:
    """Return {path: value} overrides that leave some paths open; None removes a statement."""
    mesh = _mesh_left(spec, paths)
    out: dict[str, Any] = {
        path: None for path in paths if not path.startswith(("mesh", "pipeline"))
    }
    stages = {each.path for each in _of_pipeline(spec)}
    left = stages & set(paths)
    pp = mesh.get("pp", 1)
    if _PIPELINE in left and (left == stages or pp in (1, AUTO)):
        # With `pipeline` removed, search only plans without a pipeline. Plans with a pipeline must
        # keep the other statements on it; they are searched without this removal.
        mesh |= {"pp": 1} if pp == AUTO and left != stages else {}
        out[_PIPELINE] = None
    else:
        out |= {path: None if path == _VIRTUAL else AUTO for path in left - {_PIPELINE}}
        if _VIRTUAL in left and _SCHEDULE not in stages:
            out[_SCHEDULE] = AUTO  # Else the default schedule would count as stated.
    is_other = mesh != _mesh_left(spec, ())
    return {"mesh": mesh, **out} if is_other else out


def _mesh_left(spec: Spec, paths: Collection[str]) -> dict[str, Any]:
    """Return {axis: size or "auto"} of the mesh with some statements left to the planner."""
    if not isinstance(spec.mesh, Mapping):
        return dict.fromkeys(AXES, AUTO)
    others = dict.fromkeys(AXES, AUTO) if _OTHERS in paths else {}
    return others | {
        axis: AUTO if f"mesh.{axis}" in paths else in_words(size)
        for axis, size in spec.mesh.items()
    }


def in_words(size: int | str | Borrow) -> int | str:
    """Return the size of an axis as written in a plan file, such as "4 in dp_shard" if borrowed."""
    return f"{size.size} in {size.within}" if isinstance(size, Borrow) else size


def _without(rule: Rule, names: Collection[str]) -> Rule:
    taken: dict[str, Any] = {name: None for name in names if name != "place"}
    if "place" in names:
        taken |= {"data": None, "place": {}}
    return replace(rule, **taken)
