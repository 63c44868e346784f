"""Hooks of the model's own code on modules that this stage does not run, or does not run whole.

A hook of a unit may store the unit's result (hidden states, features). Code between units runs in
every stage and may read what was stored, so a stage that does not run the unit calls its hooks with
a placeholder. A hook of the whole model's output or of its gradient runs in the last stage only. A
hook of the gradient of another module's inputs needs a stage that has all of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from meshplan.assign.base.types import Stages
from meshplan.errors import ApplyError, Problem
from meshplan.model.graph import around
from meshplan.runtime.base.module_state import is_users


def call_hooks(
    module: nn.Module, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Call the forward pre-hooks and forward hooks that the model's own code put on a unit.

    Args:
        module: The unit.
        fqn: The unit's fqn.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        output: The placeholder for the result.

    Raises:
        ApplyError: A hook changes the result.
    """
    for number, hook in _users(module._forward_pre_hooks):
        if number in module._forward_pre_hooks_with_kwargs:
            given = hook(module, args, kwargs)
            args, kwargs = given if given is not None else (args, kwargs)
        else:
            given = hook(module, args)
            if given is not None:
                args = given if isinstance(given, tuple) else (given,)
    for number, hook in _users(module._forward_hooks):
        if number in module._forward_hooks_with_kwargs:
            given = hook(module, args, kwargs, output)
        else:
            given = hook(module, args, output)
        if given is not None:
            # Only the stage that runs the unit has the real result to change.
            raise ApplyError(
                Problem(
                    f"a forward hook changes the output of '{fqn}', which stages that do not "
                    "run this module cannot reproduce",
                    fix="change the output in the module's forward, or leave pp out",
                )
            )


def _users(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    # Hooks that torch itself registers prepare weights, which this stage does not have.
    return [(number, hook) for number, hook in hooks.items() if is_users(hook)]


def leave_hooks_of_output(part: nn.Module) -> None:
    """Remove the hooks of the whole model's output, and of its gradient, from a stage module.

    Call it, before anything is wrapped, for every stage but the last: the others return what they
    send to the next stage.
    """
    for kind in ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        table = vars(part)[kind]
        for number, _ in _users(table):
            del table[number]
            for flags in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
                if kind == "_forward_hooks":
                    vars(part)[flags].pop(number, None)


def hook_problems(model: nn.Module, stages: Stages) -> list[Problem]:
    """Return the problems of hooks of which no stage could call all, by fqn of their modules.

    Args:
        model: The whole model.
        stages: The assignment of units to stages.
    """
    places: dict[str, set[int]] = {}
    for unit, stage in stages.units:
        for fqn in around(unit):
            places.setdefault(fqn, set()).add(stage)
    return [
        Problem(
            f"'{fqn}' has a full backward hook, but its modules are in {len(found)} pipeline "
            "stages, none of which computes both the gradient of its output and that of its input",
            stages.reason.origin,
            "register the hook on a module that is in one stage, cut elsewhere (pipeline: {split: "
            "[...]}), or leave pp out",
        )
        for fqn, found in sorted(places.items())
        if fqn and len(found) > 1 and model.get_submodule(fqn)._backward_hooks
    ]
