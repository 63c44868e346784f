"""The cascade: find the rule that decides each field of each module.

Precedence: a rule that matches a module beats a rule that matches a module around it; among rules
that match the same module, the later rule wins, field by field; a rule that matches a parameter
beats all rules on modules. Other modules of `assign` interpret the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.errors import Problem
from meshplan.model.graph import ModelGraph, TensorInfo
from meshplan.spec.match import compile_selector, nearest, numbers_without
from meshplan.spec.spec import Rule, Spec

_FIELDS = (
    "reshard_after_forward", "precision", "activation_checkpointing",
    "stage", "unit", "apply",
)  # fmt: skip
_MOST_GUESSED = 100
"""Maximum number of problems up to which a suggestion is searched for an unmatched rule, because
each search takes milliseconds.
"""
_PARTS = {"offload": ("params", "optimizer", "activations")}
"""Fields that consist of parts, each of which a later rule can override separately."""

_DATA_WORDS = {"replicate": "R", "shard": "S(0)", "hybrid_shard": "S(0)"}
"""The placement on dp_shard that `place: WORD` means, by word."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A value that a rule states for a field.

    `path` is its place in the plan ("rules[0].place.tp"), `text` how messages show it
    ("tp: colwise").
    """

    value: Any
    rule: Rule
    path: str
    text: str


def fields_of(rule: Rule) -> dict[str, Stated]:
    """Return what a rule states, by field; `place` is one field per axis, such as "place.tp"."""
    at = f"rules[{rule.index}]"
    out = {
        name: Stated(value, rule, f"{at}.{name}", f"{name}: {value}")
        for name in _FIELDS
        if (value := getattr(rule, name)) is not None
    }
    for field, parts in _PARTS.items():
        for part in parts:
            value = getattr(getattr(rule, field), part, None)
            if value is not None:
                path = f"{field}.{part}"
                out[path] = Stated(value, rule, f"{at}.{path}", f"{field}: {part}")
    if rule.data is not None:
        word = _DATA_WORDS[rule.data]
        out["place.dp_shard"] = Stated(word, rule, f"{at}.place", f"place: {rule.data}")
    for axis, word in rule.place.items():
        field = f"place.{axis}"
        out[field] = Stated(word, rule, f"{at}.{field}", f"{axis}: {word}")
    return out


class Cascade:
    """The rules of a spec, matched against a model once.

    Attributes:
        problems: Problems of rules, such as rules that match nothing.
        hits: The fqns of modules and parameters that each rule matches, by index of the rule.
    """

    def __init__(self, spec: Spec, graph: ModelGraph) -> None:
        self._spec = spec
        self._modules: dict[str, dict[str, Stated]] = {}
        self._params: dict[str, dict[str, Stated]] = {}
        self._graph = graph
        self._used: set[int] = set()
        self.problems: list[Problem] = []
        self.hits: dict[int, tuple[str, ...]] = {}
        for rule in spec.rules:
            self._match(rule, graph)
        self._fields = {field for stated in self._modules.values() for field in stated}

    def _match(self, rule: Rule, graph: ModelGraph) -> None:
        stated = fields_of(rule)
        hits: list[str] = []
        for number, selector in enumerate(rule.match):
            matcher = compile_selector(selector)
            found: list[str] = []
            if selector.kind == "param":
                self._only_places(stated)
                for tensor in graph.parameters:
                    if any(matcher.matches(name) for name in tensor.names):
                        self._params.setdefault(tensor.fqn, {}).update(stated)
                        found.append(tensor.fqn)
            else:
                for fqn, info in graph.modules.items():
                    kinds = info.type, info.qualified_type
                    is_hit = matcher.matches(fqn, *kinds)
                    if is_hit or any(matcher.matches(name, *kinds) for name in info.aliases):
                        self._modules.setdefault(fqn, {}).update(stated)
                        found.append(fqn)
            if not found and not rule.optional:
                many = f"[{number}]" if len(rule.match) > 1 else ""
                self._unmatched(rule, selector.kind, selector.text, many, graph)
            hits += found
        self.hits[rule.index] = tuple(dict.fromkeys(hits))

    def _only_places(self, stated: dict[str, Stated]) -> None:
        """Report all fields but placements, which alone can be stated for a parameter."""
        for field, statement in stated.items():
            if not field.startswith("place."):
                self.problems.append(
                    Problem(
                        f"'{field}' cannot be stated for a parameter, only for a module",
                        self._spec.origin(statement.path),
                        "match the module that contains the parameter",
                    )
                )

    def _unmatched(self, rule: Rule, kind: str, text: str, many: str, graph: ModelGraph) -> None:
        if kind == "param":
            noun, known = "parameter", [n for t in graph.parameters for n in t.names]
        elif kind == "type":
            noun, known = "module of that type", sorted({m.type for m in graph.modules.values()})
        else:
            noun, known = "module", [f for f in graph.modules if f]
        near = nearest(text, known) if len(self.problems) < _MOST_GUESSED else None
        self.problems.append(
            Problem(
                f"'{text}' matches no {noun} of {graph.name}",
                self._spec.origin(f"rules[{rule.index}].match{many}"),
                f"did you mean '{near}'?" if near else "correct the pattern, or add optional: true",
            )
        )

    def partly_unmatched(self) -> list[Problem]:
        """Return a warning for each pattern of which some numbers match nothing."""
        out = []
        modules = [n for fqn, info in self._graph.modules.items() for n in (fqn, *info.aliases)]
        for rule in self._spec.rules:
            for number, selector in enumerate(rule.match):
                if rule.optional or selector.kind != "glob":
                    continue
                if missing := numbers_without(selector.text, modules):
                    many = f"[{number}]" if len(rule.match) > 1 else ""
                    what = f"'{selector.text}' matches no module of {self._graph.name} for the "
                    out.append(
                        Problem(
                            f"{what}numbers {missing}",
                            self._spec.origin(f"rules[{rule.index}].match{many}"),
                            "correct the range, or add optional: true",
                        )
                    )
        return out

    def _ancestors(self, fqn: str) -> Iterator[str]:
        """Yield the module, then its enclosing modules outwards to the root, by first name."""
        while True:
            fqn = self._graph.first_name(fqn)
            yield fqn
            if not fqn:
                return
            fqn = fqn.rpartition(".")[0]

    def own(self, module: str, field: str) -> Stated | None:
        """Return what the last rule that matches the module itself states for a field.

        None if no such rule states it. Rules on modules around it do not count.
        """
        return self._take(self._modules.get(module, {}).get(field))

    def inherited(self, module: str, field: str) -> Stated | None:
        """Return what rules state for a field of this module, or else of the closest module around.

        None if no rule states it.
        """
        if field not in self._fields:
            return None
        for fqn in self._ancestors(module):
            found = self._modules.get(fqn, {}).get(field)
            if found:
                return self._take(found)
        return None

    def param(self, tensor: TensorInfo, field: str) -> Stated | None:
        """Return what the last rule that matches the parameter states for a field, or None."""
        return self._take(self._params.get(tensor.fqn, {}).get(field))

    def modules_with(self, field: str) -> Iterator[tuple[str, Stated]]:
        """Yield (fqn, statement) of every module that a rule with this field matches itself."""
        for fqn, stated in self._modules.items():
            found = self._take(stated.get(field))
            if found:
                yield fqn, found

    def _take(self, stated: Stated | None) -> Stated | None:
        if stated is not None:
            self._used.add(stated.rule.index)
        return stated

    def shadowed(self) -> list[Problem]:
        """Return a warning for each rule whose statements are all overridden.

        To be called last: a rule counts as overridden if no call of the methods above returned one
        of its statements.
        """
        out = []
        for rule in self._spec.rules:
            says_nothing_new = set(fields_of(rule)) == {"place.dp_replicate"}
            if rule.index in self._used or not self.hits.get(rule.index) or says_nothing_new:
                continue
            winner = self._winner(rule)
            by = f" by rules[{winner.index}]" if winner else ""
            out.append(
                Problem(
                    f"this rule decides nothing: every field it states is overridden{by}",
                    self._spec.origin(f"rules[{rule.index}]"),
                    "remove it, or move it below the rules that override it",
                )
            )
        return out

    def _winner(self, rule: Rule) -> Rule | None:
        tables: tuple[Mapping[str, Mapping[str, Stated]], ...] = (self._modules, self._params)
        for hit in self.hits[rule.index]:
            for table in tables:
                for field in fields_of(rule):
                    found = table.get(hit, {}).get(field)
                    if found and found.rule.index != rule.index:
                        return found.rule
        return None
