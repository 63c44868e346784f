"""Rejection of a second strategy around a parallelized model.

Scripts that are moved to a plan often keep a line of the strategy before, or give the model to a
trainer that adds one: DistributedDataParallel reduces the gradients once more, over ranks along tp
and pp too, which hold other parameters, and waits for ever where a stage has fewer of them.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from meshplan.errors import ApplyError, Problem

_WRAPPERS: Final = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)
_parallelized: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()


def refuse_second_wrappers(wrapped: nn.Module, model: nn.Module, *, is_compiled: bool) -> None:
    """Make wrappers of torch reject a parallelized model, and any module with it inside.

    `fully_shard`, which is a function and registers nothing, is found in the first forward.

    Args:
        wrapped: The module that `parallelize` returns.
        model: The user's module, which may be inside it.
        is_compiled: True if torch.compile traces the forward, hooks included.
    """
    _parallelized.update((wrapped, model))
    _watch_registrations()
    _watch_accelerate()
    if is_compiled:
        return
    units = weakref.WeakSet(_units(wrapped))

    def look(module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():  # The model was compiled after the plan was applied.
            return
        handle.remove()
        for fqn, part in module.named_modules():
            if isinstance(part, FSDPModule) and part not in units:
                raise ApplyError(
                    _two(f"fully_shard of '{fqn}', a part of" if fqn else "fully_shard of")
                )

    handle: RemovableHandle = wrapped.register_forward_pre_hook(look, prepend=True)


def _units(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


@functools.cache
def _watch_registrations() -> None:
    """Look at each module that a wrapper is about to hold, before it sends anything."""

    def look(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(parent, _WRAPPERS) and child is not None:
            for part in child.modules():
                if part in _parallelized:
                    holder = "" if part is child else f"a {type(child).__name__} that holds "
                    raise ApplyError(_two(f"{_name_of(parent)} around {holder}".rstrip()))

    register_module_module_registration_hook(look)


def _watch_accelerate() -> None:
    """Look at what accelerate prepares: with GPUs it refuses DTensors, and speaks of a device_map.

    Only an accelerate that is imported by now is watched, as transformers' Trainer imports it.
    """
    module = sys.modules.get("accelerate.accelerator")
    kind = getattr(module, "Accelerator", None)
    if kind is None or getattr(kind.prepare, "looks_for_plans", False):
        return
    prepare: Callable[..., Any] = kind.prepare

    @functools.wraps(prepare)
    def look(self: Any, *args: Any, **more: Any) -> Any:
        models = [each for each in args if isinstance(each, nn.Module)]
        if self.use_distributed and any(
            part in _parallelized for model in models for part in model.modules()
        ):
            what = "Accelerator.prepare, which the Trainer of transformers calls, around"
            raise ApplyError(_two(what))
        return prepare(self, *args, **more)

    look.looks_for_plans = True  # type: ignore[attr-defined]
    kind.prepare = look


def _name_of(wrapper: nn.Module) -> str:
    return next(kind.__name__ for kind in _WRAPPERS if isinstance(wrapper, kind))


def _two(wrapper: str) -> Problem:
    return Problem(
        f"two strategies at once: {wrapper} a model that meshplan has parallelized",
        fix="use the module that parallelize returned as it is: it reduces its gradients by "
        "itself; if a trainer added the wrapper, use MeshplanAccelerator(plan=...), "
        "meshplan.trainer(Trainer) or strategy=MeshplanStrategy(...), each with the model that is "
        "not parallelized yet",
    )
