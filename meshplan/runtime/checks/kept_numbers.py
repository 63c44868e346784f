"""Numbers that a model keeps outside of tensors and changes in its forward.

A model may count its forwards, or lower a temperature, in an attribute, in a dict or an object that
an attribute or a hook holds, or in the length of a list. One process runs one forward in a step, so
each microbatch, and a forward that is recomputed, has to find the numbers that the first one found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from meshplan.runtime.base.module_state import Table, containers_in, held_by_hooks, own_attributes

_NUMBERS: Final = (int, float, complex)
"""Not booleans: code that sets a flag, such as one for a preparation in the first call, has other
effects too, and without the flag it would run again."""
_MISSING: Final = object()

_Series = list[Any] | deque[Any]
_Place = tuple[int, Any]
"""(id of a dict, key), or (id of a list, None)."""
KeptValues = dict[_Place, Any]


class KeptNumbers:
    """The places in a module where forwards change numbers."""

    def __init__(self) -> None:
        self._places: dict[_Place, Table | _Series] = {}
        self._before: list[tuple[Table, type | None, dict[Any, Any]]] = []
        self._series_before: list[tuple[_Series, list[Any]]] = []

    def look(self, model: nn.Module) -> None:
        """Note all numbers of a module before a forward; `settle` finds which of them it changes.

        Args:
            model: The module, with those inside of it.
        """
        self._before = [(table, owner, _numbers(table)) for table, owner in _tables_of(model)]
        self._series_before = [(s, list(s)) for s in _series_of(model) if _all_numbers(s)]

    def settle(self) -> KeptValues:
        """Return the values that the forward after `look` changed, as they were before it."""
        found: KeptValues = {}
        for table, owner, before in self._before:
            now = _numbers(table)
            for key in before.keys() | now.keys():
                old = before.get(key, _MISSING)
                # A new attribute hides the default of its class. One without a default may mark a
                # preparation that must not run again.
                if old is _MISSING and owner and not _is_number(getattr(owner, key, None)):
                    continue
                if now.get(key, old) != old:
                    found[id(table), key] = old
                    self._places[id(table), key] = table
        for series, items in self._series_before:
            if list(series) != items and _all_numbers(series):
                found[id(series), None] = items
                self._places[id(series), None] = series
        self._before, self._series_before = [], []
        return found

    def values(self) -> KeptValues:
        """Return the values in the places found so far."""
        return {
            place: table.get(place[1], _MISSING) if isinstance(table, dict) else list(table)
            for place, table in self._places.items()
        }

    def put(self, values: KeptValues) -> None:
        """Put back values that `settle` or `values` returned."""
        for place, value in values.items():
            table = self._places[place]
            if not isinstance(table, dict):
                table.clear()
                table.extend(value)
            elif value is _MISSING:
                table.pop(place[1], None)
            else:
                table[place[1]] = value


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS


def _all_numbers(series: _Series) -> bool:
    return all(map(_is_number, series))


def _numbers(table: Table) -> dict[Any, Any]:
    return {key: value for key, value in table.items() if _is_number(value)}


def _tables_of(model: nn.Module) -> Iterator[tuple[Table, type | None]]:
    """Yield (a dict that may hold numbers, class of the object whose attributes they are)."""
    for module in model.modules():
        yield vars(module), type(module)
    for found, owner in containers_in(_attributes_of(model)):
        if isinstance(found, dict):
            yield found, owner


def _series_of(model: nn.Module) -> Iterator[_Series]:
    for found, _ in containers_in(_attributes_of(model)):
        if isinstance(found, list | deque):
            yield found


def _attributes_of(model: nn.Module) -> list[Any]:
    """Return what modules hold in attributes, and hooks of their forwards in closures."""
    values = (v for module in model.modules() for v in own_attributes(module).values())
    return [*values, *held_by_hooks(model)]
