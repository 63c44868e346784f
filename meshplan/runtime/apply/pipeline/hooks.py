"""Hooks of the model's own code on modules that this stage does not run, or does not run whole.

A hook of a unit may store the unit's result (hidden states, features). Code between units runs in
every stage and may read what was stored, so a stage that does not run the unit calls its hooks with
a placeholder. A hook of the whole model's output or of its gradient runs in the last stage only. A
hook of the gradient of another module's inputs needs a stage that has all of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshplan.assign.base.types import Stages
from meshplan.errors import ApplyError, Problem
from meshplan.model.graph import around


@dataclass(frozen=True, slots=True)
class UnitHooks:
    """The hooks of one unit in one stage.

    Attributes:
        wrapping: Ids of the hooks that meshplan and torch's wrappers added; `call` skips them.
    """

    wrapping: frozenset[int]

    def call(
        self,
        module: nn.Module,
        fqn: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Call the forward pre-hooks and forward hooks that the model's own code registered.

        Args:
            module: The unit.
            fqn: The unit's fqn.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            output: The placeholder for the result.

        Raises:
            ApplyError: A hook changes the result.
        """
        for number, hook in self._called(module._forward_pre_hooks):
            if number in module._forward_pre_hooks_with_kwargs:
                given = hook(module, args, kwargs)
                args, kwargs = given if given is not None else (args, kwargs)
            else:
                given = hook(module, args)
                if given is not None:
                    args = given if isinstance(given, tuple) else (given,)
        for number, hook in self._called(module._forward_hooks):
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

    def _called(self, hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
        # Hooks that torch itself registers prepare weights, which this stage does not have.
        return [
            (number, hook)
            for number, hook in hooks.items()
            if number not in self.wrapping and not _is_of_torch(hook)
        ]


def _is_of_torch(hook: Any) -> bool:
    return getattr(hook, "__module__", "").partition(".")[0] == "torch"


def leave_hooks_of_output(part: nn.Module) -> None:
    """Remove the hooks of the whole model's output, and of its gradient, from a stage module.

    Call it, before anything is wrapped, for every stage but the last: the others return what they
    send to the next stage.
    """
    for kind in ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        table = vars(part)[kind]
        for number in [number for number, hook in table.items() if not _is_of_torch(hook)]:
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


def numbers_of(module: nn.Module) -> frozenset[int]:
    """Return the ids of the forward hooks and pre-hooks that a module has now."""
    return frozenset((*module._forward_pre_hooks, *module._forward_hooks))


def hooks_of(part: nn.Module, units: Iterable[str]) -> Mapping[str, frozenset[int]]:
    """Return the ids of each unit's hooks, by fqn; call it before anything is wrapped."""
    return {fqn: numbers_of(part.get_submodule(fqn)) for fqn in units}
