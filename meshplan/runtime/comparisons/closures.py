"""Restore the state of a user's function after a call: modules, closure, globals and attributes."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from meshplan.runtime.checks.dry_run import dry_run, untouched

_UNSET: Final = object()
_NOT_THE_USERS: Final = ("builtins", "torch", "meshplan")
"""Packages whose functions and objects contain no state of a user's loss."""


@dataclass(slots=True)
class _ClosureWalk:
    """The state that a function can reach, each object once.

    Attributes:
        modules: nn.Modules that the function uses.
        cells: (closure cell, its value); the value is `_UNSET` if the variable is not assigned yet.
        names: (globals of a function, name of a global that the function uses, its value).
        tables: `__dict__` of functions and of objects.
        values: Tensors, lists, dicts and sets.
        seen: All objects visited so far, by `id`.
    """

    modules: list[nn.Module] = field(default_factory=list)
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    names: list[tuple[MutableMapping[str, Any], str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)

    def add(self, item: Any, *, is_called: bool = False) -> None:
        """Collect the state of an object and of all objects that it uses.

        Args:
            item: A function, or an object that a function uses.
            is_called: If True, `item` is the user's function itself, which is searched even if it
                is defined in torch or meshplan.
        """
        if id(item) in self.seen or isinstance(item, type | types.ModuleType):
            return
        self.seen[id(item)] = item
        if isinstance(item, nn.Module):
            self.modules.append(item)
        elif isinstance(item, functools.partial):
            for each in (item.func, *item.args, *item.keywords.values()):
                self.add(each, is_called=is_called)
        elif isinstance(item, types.MethodType):
            self.add(item.__self__)
            self.add(item.__func__)
        elif isinstance(item, types.FunctionType):
            if is_called or _package(item) not in _NOT_THE_USERS:
                self._add_function(item)
        elif isinstance(item, torch.Tensor | list | dict | set):
            self.values.append(item)
        elif _package(type(item)) not in _NOT_THE_USERS:
            own = getattr(item, "__dict__", None)
            if isinstance(own, dict):
                self.tables.append(own)
                for each in own.values():
                    self.add(each)
            if callable(item):
                self.add(type(item).__call__)

    def _add_function(self, function: types.FunctionType) -> None:
        if function.__dict__:
            self.tables.append(function.__dict__)
        for cell in function.__closure__ or ():
            value = _contents(cell)
            self.cells.append((cell, value))
            self.add(value)
        for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add(each)
        known = function.__globals__
        for name in set(_names(function.__code__)) & known.keys():
            self.names.append((known, name, known[name]))
            self.add(known[name])


def _package(item: Any) -> str:
    return (getattr(item, "__module__", None) or "").partition(".")[0]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # The variable is not assigned yet.
        return _UNSET


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function's code, or a function defined in it, may look up as globals.

    Attribute names are among them, because `co_names` does not distinguish the two.
    """
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


@contextmanager
def kept(function: Any) -> Iterator[None]:
    """Restore the state of a function, and of the modules that it uses, after the `with` block."""
    state = _ClosureWalk()
    state.add(function, is_called=True)
    tables = [(table, dict(table)) for table in state.tables]
    inside = [value for _, before in tables for value in before.values()]
    with ExitStack() as stack:
        for module in state.modules:
            stack.enter_context(dry_run(module, evaluates=False))
        stack.enter_context(untouched([*state.values, *inside]))
        try:
            yield
        finally:
            for cell, value in state.cells:
                if value is not _UNSET:
                    cell.cell_contents = value
                elif _contents(cell) is not _UNSET:
                    del cell.cell_contents
            for known, name, value in state.names:
                if known.get(name, _UNSET) is not value:
                    known[name] = value
            for table, before in tables:
                for name in table.keys() - before.keys():
                    del table[name]
                table.update(before)
