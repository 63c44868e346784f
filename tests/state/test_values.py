"""Values that are no tensors: as JSON and back, and nothing that would have to be pickled."""

from __future__ import annotations

import enum
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import StateError
from meshplan.state.values import from_json, to_json

KEYS = st.one_of(st.text(), st.integers(), st.none(), st.booleans(), st.just("$tuple"))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
              st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner),
        st.sets(st.integers()),
    ),
    max_leaves=12,
)  # fmt: skip


def again(value):
    form = json.loads(json.dumps(to_json(value, "extra", lambda *_: None), allow_nan=False))
    return from_json(form, lambda key: key)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value):
    back = again(value)
    assert back == value
    assert type(back) is type(value)


def test_what_is_no_number_comes_back():
    assert math.isnan(again(math.nan))
    assert again(-math.inf) == -math.inf
    assert again(np.float64(0.5)) == 0.5
    assert again(np.int64(7)) == 7


def test_an_enum_is_its_number():
    class Colour(enum.IntEnum):
        RED = 3

    assert again({"c": Colour.RED}) == {"c": 3}


def test_a_tensor_is_a_key():
    found = {}

    def keep(value, name):
        found[name] = value
        return f"values/{len(found)}" if isinstance(value, slice) else None

    form = to_json({"a": [slice(3)]}, "extra", keep)
    assert form == {"a": [{"$tensor": "values/1"}]}
    assert from_json(form, {"values/1": "back"}.get) == {"a": ["back"]}
    assert list(found) == ["extra['a'][0]"]


@pytest.mark.parametrize("value", [object(), print, lambda: 0, {"a": [StateError]}])
def test_an_object_is_refused_by_name(value):
    with pytest.raises(StateError, match=r"extra.* is a .*, which is not saved"):
        again(value)


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(StateError, match="contains itself"):
        again(value)
