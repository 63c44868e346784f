"""The modules for which the first forward compares sharded with unsharded computation.

They are sharded by the rules of a tp plan, whose correctness nothing else has proved.
"""

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
    """A module with tp-sharded modules inside, and the inputs of its first call.

    Attributes:
        fqn: Name of the module.
        kind: Key that modules running the same code share; one module of each kind is compared.
        family: Key shared with modules of other kinds. If this module cannot be compared, a
            successful comparison of one in the same family counts for it. T5 is an example: its
            later attention layers take the position bias that the first one computed for this
            rank's heads, and no input of the unsharded module corresponds to this bias. None if
            no other module counts.
        whole: Unsharded value of each attribute that tp changes, such as {"num_heads": 12}.
        is_enclosed: True if another such module contains this one. The outputs may then be sharded,
            because the outer module is compared as well.
        inputs: Arguments and keyword arguments of the first call; None before the call and after
            the comparison.
    """

    fqn: str
    kind: tuple[object, ...]
    family: tuple[object, ...] | None
    whole: dict[str, int]
    is_enclosed: bool
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def local_modules_of(model: nn.Module, plan: Plan) -> list[LocalModule]:
    """Return the modules whose sharded computation the first forward must check.

    These are the modules with attributes that tp changes, those with a fused projection whose
    pieces are sharded separately, and those around a pair of projections of which the second takes
    the sharded output of the first. A module is left out if the data flow has already proved the
    style of every module inside.
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
    """Return a key that two modules share if they run the same code.

    The class alone does not suffice: its forward may choose a branch by which submodules exist or
    by an attribute that is a bool or a string, so these are part of the key.
    """
    parts = tuple((name, type(m)) for name, m in module.named_modules())
    switches = tuple(
        (name, value)
        for name, value in sorted(own_attributes(module).items())
        if isinstance(value, bool | str | None)
    )
    return (type(module), parts, switches)
