"""Hooks on a unit that another stage runs, called here with what stands in for its result.

A hook lies outside of the module that it is registered on: what it keeps of the result (hidden
states, features), code between units may read in any stage.
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
        wrapping: Those that meshplan and torch's wrappers added, which are not called.
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
        """Call what is the model's own, or came to it later.

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
                # Of a result that it has changed already it may keep another than it kept there.
                raise ApplyError(
                    Problem(
                        f"a forward hook changes what '{fqn}' returns, which stages that do not "
                        "run it cannot follow",
                        fix="change it inside the module's forward, or leave pp out",
                    )
                )

    def _called(self, hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
        # Those of torch itself prepare the module's own weights, which are not here.
        return [
            (number, hook)
            for number, hook in hooks.items()
            if number not in self.wrapping
            and getattr(hook, "__module__", "").partition(".")[0] != "torch"
        ]


def numbers_of(module: nn.Module) -> frozenset[int]:
    """The hooks that a module has now."""
    return frozenset((*module._forward_pre_hooks, *module._forward_hooks))


def hooks_of(part: nn.Module, units: Iterable[str]) -> Mapping[str, frozenset[int]]:
    """The model's own hooks on each unit; before anything is wrapped."""
    return {fqn: numbers_of(part.get_submodule(fqn)) for fqn in units}
