"""Errors on their way to another rank.

Which seeded bug would this catch? A copy whose only problem is the text of the first error.
"""

from __future__ import annotations

import pickle

import pytest

from meshplan.errors import ApplyError, Origin, Problem, SpecError


@pytest.mark.parametrize("kind", [ApplyError, SpecError])
def test_a_copy_of_an_error_has_its_problems(kind):
    error = kind([Problem("one", Origin("plan.yaml", "mesh"), "two"), Problem("three")])
    error.add_note("seen on rank 1")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert copied.problems == error.problems
    assert str(copied) == str(error)
    assert copied.__notes__ == ["seen on rank 1"]
