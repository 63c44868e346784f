"""Tensors are found inside whatever models take, return and remember."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from meshplan.runtime.base.pytree import fill, shape_of, tensors_in


@dataclasses.dataclass
class Output:
    first: torch.Tensor
    rest: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Guarded:
    """A configuration that says of some fields to look elsewhere."""

    table: torch.Tensor
    heads: int = 4

    def __getattribute__(self, name: str) -> Any:
        if name == "heads":
            raise RuntimeError("heads differ from layer to layer")
        return super().__getattribute__(name)


@dataclasses.dataclass
class Later:
    table: torch.Tensor
    made: torch.Tensor = dataclasses.field(init=False)


Pair = namedtuple("Pair", "a b")


def test_paths() -> None:
    x = torch.ones(1)
    nested = {"a": (x, [Output(x, [x, None])]), "b": Pair(x, "text"), "c": OrderedDict(d=x)}
    found = [path for path, _ in tensors_in(nested)]
    assert found == ["a.0", "a.1.0.first", "a.1.0.rest.0", "b.0", "c.d"]


@pytest.mark.parametrize("item", [Guarded(torch.ones(1)), Later(torch.ones(1))])
def test_fields_that_cannot_be_read_by_name(item: Any) -> None:
    assert [path for path, _ in tensors_in(item)] == ["table"]


def test_a_form_is_filled_again() -> None:
    x, y = torch.ones(1), torch.zeros(2)
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> int:
        held.append(tensor)
        return len(held) - 1

    form = shape_of((Output(x, [y, 3]), Pair(y, "text")), keep)
    output, pair = fill(form, lambda place: held[place])
    assert output.first is x
    assert output.rest[0] is y
    assert output.rest[1] == 3
    assert type(pair) is Pair
    assert pair.a is y
    assert pair.b == "text"
