"""Find out from which tensors the output of a forward was computed, by intercepting torch calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from meshplan.runtime.base.pytree import given_to, tensors_in
from meshplan.runtime.checks.originals import Switched, writes_first

_Names = frozenset[str]


class Reach(Switched):
    """A torch function mode that records which of the given tensors each result depends on.

    A function's results count as computed from all its arguments, and so does the first argument of
    an in-place function. The mode cannot see a dependence through a Python number (`.item()`) or
    through a function that torch does not intercept (`torch.autograd.Function`). A name that is
    missing in the result of `end` therefore does not prove that the output is independent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], _Names]] = {}

    def begin(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Start recording what is computed from these tensors, given as (name, tensor)."""
        self._names = {}
        for name, tensor in tensors:
            self._add(tensor, frozenset((name,)))
        if self._names:
            self.start()

    def end(self, output: Any) -> _Names:
        """Stop recording; return the names of the tensors from which `output` was computed."""
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
            is_write = writes_first(getattr(func, "__name__", ""))
            for tensor in (*given_to(out), *given_to(args[:1] if is_write else ())):
                self._add(tensor, names)
        return out

    def _of(self, tensor: torch.Tensor) -> _Names:
        known = self._names.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else frozenset()

    def _add(self, tensor: torch.Tensor, names: _Names) -> None:
        self._names[id(tensor)] = weakref.ref(tensor), names | self._of(tensor)
