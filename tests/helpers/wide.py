"""Which cases the default run leaves to `-m wide`: those that combine what others show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def leaving(cases: Iterable[Any], is_wide: Callable[[int, Any], bool]) -> list[Any]:
    """The cases as parameters; `is_wide` gets the number and the case."""
    return [
        pytest.param(case, marks=[pytest.mark.wide] if is_wide(number, case) else [])
        for number, case in enumerate(cases)
    ]
