"""Modules that compute on parts by rule: what the first forward compares with itself whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshplan.graph import is_inside
from meshplan.plan import Plan
from meshplan.styles import LOGITS


class _Trials:
    num_on = 0


@contextmanager
def on_trial() -> Iterator[None]:
    """While another proof runs the model: what it is fed then, nobody trains on."""
    _Trials.num_on += 1
    try:
        yield
    finally:
        _Trials.num_on -= 1


def is_on_trial() -> bool:
    """Whether another proof runs the model."""
    return _Trials.num_on > 0


@dataclass(slots=True)
class Island:
    """A module whose inner modules are cut, and its first inputs.

    Attributes:
        fqn: Its name.
        kind: One of each kind is proved.
        whole: Attributes that change, as one process has them.
        inputs: Arguments and keyword arguments of its first call.
    """

    fqn: str
    kind: tuple[object, ...]
    whole: dict[str, int]
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def islands_of(model: nn.Module, plan: Plan) -> list[Island]:
    """Modules whose attributes changed, or that hold a module in pieces or a cut pair."""
    changed: dict[str, dict[str, int]] = {}
    styles = plan.assignment.styles
    for attribute in plan.assignment.attributes:
        if attribute.module not in styles:
            changed.setdefault(attribute.module, {})[attribute.name] = attribute.whole
    for fqn, use in styles.items():
        if use.pieces and use.style.kind != "mha":
            changed.setdefault(fqn.rpartition(".")[0], {})
    unproved = {fqn for fqn, use in styles.items() if not use.is_proved}
    for fqn in unproved:
        if styles[fqn].style.output[1] == "S(-1)" and styles[fqn].style is not LOGITS:
            around = _around_pair(fqn, plan)
            if around is not None:
                changed.setdefault(around, {})
    return [
        Island(fqn, _kind(model.get_submodule(fqn), whole), whole)
        for fqn, whole in changed.items()
        if any(is_inside(inner, fqn) for inner in unproved)
    ]


def _around_pair(fqn: str, plan: Plan) -> str | None:
    """The smallest module that holds this projection and one that takes up what it leaves cut.

    None where only the whole of a stage does, or nothing: the loss then tells.
    """
    takers = [f for f, use in plan.assignment.styles.items() if use.style.input[0] == "S(-1)"]
    while fqn:
        fqn = fqn.rpartition(".")[0]
        if any(is_inside(taker, fqn) for taker in takers):
            return fqn if fqn or plan.assignment.stages is None else None
    return None


def _kind(module: nn.Module, whole: Mapping[str, int]) -> tuple[object, ...]:
    """What modules that run the same code have in common: one class may hold several branches.

    Cut by heads, later modules of a class may get what earlier ones made of their own heads
    (T5's position bias), which has no counterpart in the whole: the first speaks for all.
    """
    if whole:
        return (type(module), *sorted(whole))
    parts = tuple((name, type(m)) for name, m in module.named_modules())
    switches = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if name != "training" and isinstance(value, bool | str | None)
    )
    return (type(module), parts, switches)
