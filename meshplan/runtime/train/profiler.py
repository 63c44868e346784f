"""Measurements that a recorded run takes in few steps: FLOPs, and the seconds of each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import own_module
from meshplan.runtime.base.phases import heard_by
from meshplan.runtime.torch_private.modes import Watching
from meshplan.runtime.trace.flops import flops_of
from meshplan.spec.match import any_number

NUM_SLOWEST: Final = 10
_FORWARD: Final = ("forward", "loss")
"""Phases in which forwards are timed: a head that the loss calls in chunks runs in the second."""


class StepFlops(Watching):
    """A dispatch mode that sums the FLOPs of this rank's matrix products and attention.

    Those of a fused or custom kernel are not known and count as 0. An optimizer's do not count.

    Attributes:
        model_flops: FLOPs of forward and backward.
        recomputed_flops: FLOPs of forwards that were run again in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model_flops = self.recomputed_flops = 0.0
        self._phase = ""

    def hear(self, phase: str) -> None:
        """Note the phase that begins."""
        self._phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # Its own dispatch calls the operators on shards, seen here too.
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or self._phase not in (*_FORWARD, "backward"):
            return out
        flops = flops_of(func, args, kwargs, out) or 0.0
        # Backward computes gradients without autograd; only a forward is recorded there.
        if self._phase == "backward" and torch.is_grad_enabled():
            self.recomputed_flops += flops
        else:
            self.model_flops += flops
        return out


@contextmanager
def counting_flops() -> Iterator[StepFlops]:
    """Count the FLOPs of this thread's operators inside the `with` block."""
    with StepFlops() as mode, heard_by(mode.hear):
        yield mode


@dataclass(slots=True)
class _Group:
    """The calls of the modules whose fqns differ in numbers only."""

    modules: set[str] = field(default_factory=set)
    spans: list[tuple[Any, Any]] = field(default_factory=list)


class ModuleTimes:
    """Times the forward of each module in one step, by the marks of a clock.

    A forward that backward runs again, for recomputation, is not timed. Backward is not timed by
    module at all: autograd runs its operators in an order of its own, in which those of several
    modules can take turns.

    Args:
        now: Returns a mark.
        seconds: Returns the seconds between two marks.
    """

    def __init__(self, now: Callable[[], Any], seconds: Callable[[Any, Any], float]) -> None:
        self._now, self._seconds = now, seconds
        self._groups: dict[str, _Group] = {}
        self._running: list[tuple[nn.Module, Any]] = []
        self._phase = ""

    @contextmanager
    def timing(self, model: nn.Module) -> Iterator[None]:
        """Time the forwards of the modules of a model inside the `with` block."""
        hooks = []
        for name, module in _named_modules(model):
            # Around the hooks of FSDP2, which gather the parameters, and also after an exception,
            # with which a recomputation ends early.
            hooks += [
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leaver(name), always_call=True),
            ]
        try:
            with heard_by(self._hear):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def slowest(self) -> list[dict[str, Any]]:
        """Return the slowest groups of modules, with the seconds of all calls in the step."""
        seconds = {
            name: sum(self._seconds(*span) for span in group.spans)
            for name, group in self._groups.items()
        }
        slowest = sorted(seconds, key=lambda name: -seconds[name])[:NUM_SLOWEST]
        return [
            {
                "name": name,
                "modules": len(self._groups[name].modules),
                "calls": len(self._groups[name].spans),
                "forward_s": seconds[name],
            }
            for name in slowest
        ]

    def _hear(self, phase: str) -> None:
        self._phase = phase

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._phase in _FORWARD:
            self._running.append((module, self._now()))

    def _leaver(self, name: str) -> Callable[..., None]:
        group = self._groups.setdefault(any_number(name), _Group())

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._phase in _FORWARD and self._running and self._running[-1][0] is module:
                group.modules.add(name)
                group.spans.append((self._running.pop()[1], self._now()))

        return leave


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (fqn, module) of all modules of this rank but the whole model."""
    wholes = model.stage_modules if isinstance(model, PipelinedModule) else [model]
    for whole in wholes:
        yield from ((name, each) for name, each in own_module(whole).named_modules() if name)
