"""What a plan states of the things that the planner would choose, one by one, and without some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from meshplan.mesh import AXES
from meshplan.planner.lock import overrides
from meshplan.spec import AUTO, Spec

_RULED: Final = ("activation_checkpointing", "reshard_after_forward", "stage")
"""What rules state that the planner would choose."""
_OTHERS: Final = "mesh"
"""The path of the statement that there are no axes but those that are named."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One of them.

    Args:
        path: As in plan.yaml.
        text: Its value, in words.
        rule: The index of its rule; None where it is no rule's.
    """

    path: str
    text: str
    rule: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"

    def settings(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """What the planner says in its place, by path."""
        area = self.path.partition(".")[0]
        if area == "mesh":
            return {"mesh": chosen["mesh"]}
        if self.rule is not None or area == "activation_checkpointing":
            names: tuple[str, ...] = ("activation_checkpointing", "rules[", "pipeline.split")
        else:
            names = (self.path, *(("pipeline.microbatches",) if area == "pipeline" else ()))
        return {path: value for path, value in chosen.items() if path.startswith(names)}

    def change(self, chosen: Mapping[str, Any]) -> str:
        """In words, such as "batch.micro: 2 -> 1"."""
        new = self.settings(chosen)
        if self.path.startswith("mesh.") and self.path.partition(".")[2] in AXES:
            return f"{self} -> {new['mesh'].get(self.path.partition('.')[2], 1)}"
        if self.path in new and self.rule is None:
            more = f" and {len(new) - 1} rules" if len(new) > 1 else ""
            return f"{self} -> {_words(new[self.path])}{more}"
        return f"without {self}"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def statements_of(spec: Spec) -> tuple[Statement, ...]:
    """All of them."""
    return tuple(_statements(spec))


def _statements(spec: Spec) -> Iterator[Statement]:
    if isinstance(spec.mesh, Mapping):
        for axis, size in spec.mesh.items():
            if isinstance(size, int):
                yield Statement(f"mesh.{axis}", str(size))
        yield Statement(_OTHERS, f"no axes but {', '.join(spec.mesh)}")
    if spec.strategy not in (None, AUTO):
        yield Statement("strategy", str(spec.strategy))
    if spec.batch.global_ is not None:
        for name in ("micro", "accumulate"):
            if isinstance(getattr(spec.batch, name), int):
                yield Statement(f"batch.{name}", str(getattr(spec.batch, name)))
    policy = spec.activation_checkpointing
    if "activation_checkpointing" in spec.origins and policy.mode != AUTO:
        yield Statement("activation_checkpointing", policy.mode)
    for name in ("schedule", "microbatches", "split"):
        value = getattr(spec.pipeline, name, AUTO)
        if f"pipeline.{name}" in spec.origins and value != AUTO:
            words = f"{len(value)} stages" if isinstance(value, tuple) else str(value)
            yield Statement(f"pipeline.{name}", words)
    for rule in spec.rules:
        for name in _RULED:
            value = getattr(rule, name)
            if value is not None:
                text = getattr(value, "mode", value)
                words = f"{str(text).lower()} of {', '.join(map(str, rule.match))}"
                yield Statement(f"rules[{rule.index}].{name}", words, rule.index)


def without(
    read: Callable[[Sequence[str]], Spec], dropped: Collection[Statement], more: Sequence[str]
) -> Spec:
    """The spec with some of its statements left to the planner, then with more on top."""
    stated: dict[str, Any] = {}
    paths = {each.path for each in dropped if each.rule is None}
    for path in paths:
        if not path.startswith("mesh"):
            stated[path] = AUTO
    mesh = read(()).mesh
    if isinstance(mesh, Mapping) and any(path.startswith("mesh") for path in paths):
        sizes = {axis: AUTO if f"mesh.{axis}" in paths else size for axis, size in mesh.items()}
        others = {axis: AUTO for axis in AXES if axis != "ep"} if _OTHERS in paths else {}
        stated["mesh"] = {**others, **sizes}
    spec = read([*overrides(stated), *more])
    fields: dict[int, dict[str, None]] = {}
    for each in dropped:
        if each.rule is not None:
            fields.setdefault(each.rule, {})[each.path.rpartition(".")[2]] = None
    # Rules that the planner adds come after those of the file.
    rules = tuple(replace(r, **fields.get(r.index, {})) for r in spec.rules)  # type: ignore[arg-type]
    return replace(spec, rules=rules)
