"""Blocks whose `forward` is called by name: `layer.forward(x)` in place of `layer(x)`.

That leaves out every hook, and so what gathers the parameters of a unit, recomputes its
activations, or moves its inputs. Such a call is turned into one of the module itself.
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
    """Let `forward(...)` be what it says: for code that has brought the parameters itself."""
    token = _AS_WRITTEN.set(True)
    try:
        yield
    finally:
        _AS_WRITTEN.reset(token)


def routable_units(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The units of sharding whose `forward(...)` may become a call of the module.

    Those with hooks of the user's own are left alone: who calls `forward` may mean to leave them
    out. Compiled ones are left alone too: their calls are traced already.

    Assumes: nothing is applied yet, so that every hook is the user's.
    """
    if plan.spec.compile:
        return []
    units = [model.get_submodule(fqn) for fqn in plan.assignment.units]
    return [unit for unit in units if not (unit._forward_hooks or unit._forward_pre_hooks)]


def route_direct_calls(units: Iterable[nn.Module]) -> None:
    """Let `unit.forward(...)` do what `unit(...)` does, in place."""
    for unit in units:
        _route(unit)


def _route(module: nn.Module) -> None:
    is_called = False  # Whether the call that is coming to `forward` went through the hooks.

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
