"""Hooks of a unit of another stage, called in this stage with a placeholder for its result.

A hook of the model's own code may store the result (hidden states, features). Code between units
runs in every stage and may read what was stored, so the hooks are called in every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshplan.errors import ApplyError, Problem


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
            if number not in self.wrapping
            and getattr(hook, "__module__", "").partition(".")[0] != "torch"
        ]


def numbers_of(module: nn.Module) -> frozenset[int]:
    """Return the ids of the forward hooks and pre-hooks that a module has now."""
    return frozenset((*module._forward_pre_hooks, *module._forward_hooks))


def hooks_of(part: nn.Module, units: Iterable[str]) -> Mapping[str, frozenset[int]]:
    """Return the ids of each unit's hooks, by fqn; call it before anything is wrapped."""
    return {fqn: numbers_of(part.get_submodule(fqn)) for fqn in units}
