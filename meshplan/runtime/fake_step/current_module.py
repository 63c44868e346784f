"""Track which module is running, and if the loss is, in forward and in backward."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all

from meshplan.runtime.torch_private.private import autograd_sequence, running_node


class CurrentModule:
    """A context that knows the running module; open it around a model's forward and backward.

    In backward an operator is attributed by the sequence number of the running autograd node: nodes
    that were made while a module's forward ran belong to that module.

    Args:
        names: The fqn of every module of the model.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self._names = names
        self._running: list[str] = [""]
        self._is_loss = False
        self._numbers: list[int] = [-1]
        self._owners: list[tuple[str, bool]] = [("", False)]
        """At index i, (fqn of the module, True if the loss) that made the autograd nodes with
        sequence numbers from `_numbers[i]` up to `_numbers[i + 1]`, exclusive."""
        self._open = ExitStack()

    @property
    def module(self) -> str:
        """The fqn of the innermost running module; "" if none is running."""
        return self._owner()[0]

    @property
    def is_loss(self) -> bool:
        """True if the loss is being computed, in forward or in backward."""
        return self._owner()[1]

    def mark(self, *, is_loss: bool) -> None:
        """Note if the code that runs from now on computes the loss."""
        self._is_loss = is_loss
        self._note()

    def _owner(self) -> tuple[str, bool]:
        number = running_node()
        if number is None:
            return self._running[-1], self._is_loss
        return self._owners[bisect.bisect_right(self._numbers, number) - 1]

    def __enter__(self) -> CurrentModule:
        self._open = ExitStack()
        enter = of_all.register_module_forward_pre_hook(self._enter)
        leave = of_all.register_module_forward_hook(self._leave, always_call=True)
        self._open.callback(enter.remove)
        self._open.callback(leave.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(module, self._running[-1]))
        self._note()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self._running) > 1:
            self._running.pop()
        self._note()

    def _note(self) -> None:
        if running_node() is not None:
            return  # Ops recomputed in backward are attributed to the autograd node that runs them.
        number = autograd_sequence()
        if number < self._numbers[-1]:  # Another thread, whose autograd numbers start anew.
            self._numbers, self._owners = [-1], [("", False)]
        if torch.is_grad_enabled():
            self._numbers.append(number)
            self._owners.append((self._running[-1], self._is_loss))
