"""Track which module, or the loss, is running in forward or in backward."""

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
    """A context to open while the model runs.

    Operators in backward are attributed by the sequence numbers that autograd gives its nodes
    during forward: the nodes made while a module ran belong to that module.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self._names = names
        self._running: list[str] = [""]
        self._is_loss = False
        self._numbers: list[int] = [-1]
        self._owners: list[tuple[str, bool]] = [("", False)]
        """Owners of nodes as (module, is loss), each from the number in `_numbers` at its index on.
        """
        self._open = ExitStack()

    @property
    def module(self) -> str:
        """The fqn of the innermost running module; "" outside of all."""
        return self._owner()[0]

    @property
    def is_loss(self) -> bool:
        """True if the loss is computed, or its backward runs."""
        return self._owner()[1]

    def mark(self, *, is_loss: bool) -> None:
        """Set whether the code that follows computes the loss."""
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
            return  # Recomputation inside backward; its nodes run at once.
        number = autograd_sequence()
        if number < self._numbers[-1]:  # Another thread has its own count.
            self._numbers, self._owners = [-1], [("", False)]
        if torch.is_grad_enabled():
            self._numbers.append(number)
            self._owners.append((self._running[-1], self._is_loss))
