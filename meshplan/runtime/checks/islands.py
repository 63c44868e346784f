"""Modules sharded by rule, which the first forward compares with their unsharded computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from meshplan.assign import around_pair, leaves_cut
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.runtime.base.module_state import own_attributes


@dataclass(slots=True)
class LocalModule:
    """A module whose inner modules are sharded, and its first inputs.

    Attributes:
        fqn: Name of the module.
        kind: Key that modules running the same code share; one module of each kind is compared.
        family: Key shared with modules of other kinds whose comparison may count for this module
            if it cannot be compared itself: later attention may get what an earlier one made of
            its own heads (T5's position bias), which has no counterpart in the whole. None if no
            other module counts.
        whole: Values that one process has in the attributes that tp changes.
        is_enclosed: True if another island contains it and checks what happens to its outputs.
        inputs: Arguments and keyword arguments of its first call; None before and after use.
    """

    fqn: str
    kind: tuple[object, ...]
    family: tuple[object, ...] | None
    whole: dict[str, int]
    is_enclosed: bool
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def local_modules_of(model: nn.Module, plan: Plan) -> list[LocalModule]:
    """Return the modules with changed attributes, a fused weight in pieces or a sharded pair.

    Modules in which every styled module is proved already are left out.
    """
    changed: dict[str, dict[str, int]] = {}
    styles = plan.assignment.styles
    for attribute in plan.assignment.attributes:
        if attribute.module not in styles:
            changed.setdefault(attribute.module, {})[attribute.name] = attribute.whole
    for fqn, use in styles.items():
        if use.pieces and use.style.kind != "mha":
            changed.setdefault(fqn.rpartition(".")[0], {})
        around = around_pair(fqn, styles) if leaves_cut(use) and not use.is_proved else None
        if around is not None:
            changed.setdefault(around, {})
    unproved = [fqn for fqn, use in styles.items() if not use.is_proved]
    found = [fqn for fqn in changed if any(is_inside(inner, fqn) for inner in unproved)]
    return [
        LocalModule(
            fqn,
            _kind(model.get_submodule(fqn)),
            (type(model.get_submodule(fqn)), *sorted(changed[fqn])) if changed[fqn] else None,
            whole=changed[fqn],
            is_enclosed=any(other != fqn and is_inside(fqn, other) for other in found),
        )
        for fqn in found
    ]


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Return a key of the code that a module runs.

    One class may contain several branches, chosen by the modules it has or by a switch.
    """
    parts = tuple((name, type(m)) for name, m in module.named_modules())
    switches = tuple(
        (name, value)
        for name, value in sorted(own_attributes(module).items())
        if isinstance(value, bool | str | None)
    )
    return (type(module), parts, switches)
