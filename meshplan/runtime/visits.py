"""Which module reads what in one forward: the facts about activations that no layout holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from meshplan.traffic import Forward, Visit


def record_visits(model: nn.Module, run: Callable[[], Any]) -> Forward:
    """Record every call of every module while `run` runs the model once.

    Args:
        model: The model as one process has it.
        run: Calls it on one microbatch of one rank, with gradients.
    """
    calls: list[Visit] = []
    saves: list[int] = []
    sources: dict[int, int] = {}
    alive: list[torch.Tensor] = []
    event = 0

    def now() -> int:
        nonlocal event
        event += 1
        return event

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saves.append(now())
        return tensor

    def watch(fqn: str, module: nn.Module, stack: ExitStack) -> None:
        begun: list[tuple[int, torch.Tensor | None]] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            begun.append((now(), _first((*args, *kwargs.values()))))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            begin, source = begun.pop()
            result = _first((output,))
            if source is None or result is None:
                return
            alive.append(source)  # So that its id is not given to another tensor.
            calls.append(
                Visit(
                    fqn=fqn,
                    source=sources.setdefault(id(source), len(sources)),
                    input_shape=tuple(source.shape),
                    output_shape=tuple(result.shape),
                    input_needs_grad=source.requires_grad,
                    output_needs_grad=result.requires_grad,
                    begin=begin,
                    end=now(),
                )
            )

        stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)

    with ExitStack() as stack:
        for fqn, module in model.named_modules():
            watch(fqn, module, stack)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept))
        run()
    return Forward(tuple(sorted(calls, key=lambda call: call.begin)), tuple(saves))


def _first(values: tuple[Any, ...]) -> torch.Tensor | None:
    """The first tensor among a module's inputs or outputs."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, dict):
            value = tuple(value.values())
        if isinstance(value, tuple | list):
            found = _first(tuple(value))
            if found is not None:
                return found
    return None
