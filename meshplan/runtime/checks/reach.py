"""Tensors that what a forward returns was computed from, found call by call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshplan.runtime.base.pytree import given_to, tensors_in

_Names = frozenset[str]


class Reach(TorchFunctionMode):
    """While it watches, follows given tensors through every function that is called on them.

    What a function returns, or writes into its first argument, comes from all that it is given.
    What goes through Python numbers (`.item()`) or through functions that torch does not show
    (`torch.autograd.Function`) is lost on the way, so a name that is missing proves nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], _Names]] = {}
        self._is_watching = False

    def begin(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Follow these tensors, by name."""
        self._names = {}
        for name, tensor in tensors:
            self._add(tensor, frozenset((name,)))
        if self._names:
            self._is_watching = True
            self.__enter__()

    def stop(self) -> None:
        """Follow no further; a second call does nothing."""
        if self._is_watching:
            self._is_watching = False
            self.__exit__(None, None, None)

    def end(self, output: Any) -> _Names:
        """Stop, and return the names of what `output` was computed from."""
        self.stop()
        found = [self._of(tensor) for _, tensor in tensors_in(output)]
        self._names = {}
        return frozenset().union(*found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [self._of(tensor) for tensor in (*given_to(args), *given_to(kwargs))]
        out = func(*args, **kwargs)
        names = frozenset[str]().union(*found)
        if names:
            name = getattr(func, "__name__", "")
            is_write = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            for tensor in (*given_to(out), *given_to(args[:1] if is_write else ())):
                self._add(tensor, names)
        return out

    def _of(self, tensor: torch.Tensor) -> _Names:
        known = self._names.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else frozenset()

    def _add(self, tensor: torch.Tensor, names: _Names) -> None:
        self._names[id(tensor)] = weakref.ref(tensor), names | self._of(tensor)
