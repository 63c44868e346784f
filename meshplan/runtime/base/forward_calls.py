"""Blocks whose `forward` is called by name: `layer.forward(x)` in place of `layer(x)`.

Such a call bypasses every hook, including those that gather the parameters of a unit, recompute
its activations or move its inputs. `route_direct_calls` makes it a call of the module itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from torch import nn

from meshplan.plan.plan import Plan

_AS_WRITTEN: Final[ContextVar[bool]] = ContextVar("as_written", default=False)


@contextmanager
def as_written() -> Iterator[None]:
    """Let `forward(...)` bypass the hooks inside the `with` block, undoing `route_direct_calls`.

    For code that has gathered the parameters itself.
    """
    token = _AS_WRITTEN.set(True)
    try:
        yield
    finally:
        _AS_WRITTEN.reset(token)


def routable_units(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """Return the FSDP units whose `forward(...)` may be turned into a call of the module.

    Units on which the user registered hooks are left out: a caller of `forward` may want to bypass
    these hooks. No unit is returned if the plan compiles, because `torch.compile` traces the calls.

    Assumes: the plan is not applied yet, so that every hook is the user's.
    """
    if plan.spec.compile:
        return []
    units = [model.get_submodule(fqn) for fqn in plan.assignment.units]
    return [unit for unit in units if not (unit._forward_hooks or unit._forward_pre_hooks)]


def route_direct_calls(units: Iterable[nn.Module]) -> None:
    """Replace each unit's `forward` so that `unit.forward(...)` runs `unit(...)` with its hooks."""
    for unit in units:
        _route(unit)


def _route(module: nn.Module) -> None:
    is_called = False  # True between the pre-hook of `module(...)` and the `forward` that it runs.

    def note_call(*_: Any) -> None:
        nonlocal is_called
        is_called = True

    forward = module.forward

    @functools.wraps(forward)
    def forward_or_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_called
        if not is_called and not _AS_WRITTEN.get():
            return module(*args, **kwargs)
        is_called = False
        return forward(*args, **kwargs)

    module.forward = forward_or_call
    module.register_forward_pre_hook(note_call)
