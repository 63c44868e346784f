"""Tensors from which the output of a forward was computed, found call by call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshplan.runtime.base.pytree import given_to, tensors_in

_Names = frozenset[str]


class Reach(TorchFunctionMode):
    """A mode that follows given tensors through every function that is called on them.

    A function's results, and its first argument if it writes that, count as computed from all its
    arguments. The trace is lost in Python numbers (`.item()`) and in functions that torch does not
    intercept (`torch.autograd.Function`), so a missing name proves nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], _Names]] = {}
        self._is_watching = False

    def begin(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Start following these tensors, given by name."""
        self._names = {}
        for name, tensor in tensors:
            self._add(tensor, frozenset((name,)))
        if self._names:
            self._is_watching = True
            self.__enter__()

    def stop(self) -> None:
        """Stop following; a second call does nothing."""
        if self._is_watching:
            self._is_watching = False
            self.__exit__(None, None, None)

    def end(self, output: Any) -> _Names:
        """Stop, and return the names of the tensors from which `output` was computed."""
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
