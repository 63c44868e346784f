"""A strategy has a row in every table. Which seeded bug would this catch? A forgotten row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from meshplan.cost.config import STRATEGY_OPTIONS
from meshplan.memory.answer.reconcile import textbook_row
from meshplan.spec.spec import STRATEGY_WORDS
from meshplan.spec.strategies import STRATEGIES


def test_every_strategy_is_named_and_priced() -> None:
    assert set(STRATEGY_WORDS.values()) - {"auto"} == set(STRATEGIES) == set(STRATEGY_OPTIONS)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_formula(name: str, is_mixed: bool) -> None:
    assignment = SimpleNamespace(strategy=STRATEGIES[name])
    assert textbook_row(assignment, is_mixed=is_mixed)  # type: ignore[arg-type]
