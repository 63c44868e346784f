"""Views of values for notebooks, defined in packages that import the values' packages.

Only here does a lower package name a higher one: as text, imported on first use of the view.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

VIEWS: Final = MappingProxyType(
    {
        "layout_html": "meshplan.pictures.notebook",
        "spec_html": "meshplan.pictures.notebook",
        "memory_html": "meshplan.pictures.notebook",
        "plan_html": "meshplan.pictures.notebook",
        "draw": "meshplan.pictures.main",
    }
)
"""Module of each view, by the name of the view's function."""


def view(name: str) -> Callable[..., Any]:
    """Return the function that shows a value, by its name in `VIEWS`."""
    function: Callable[..., Any] = getattr(import_module(VIEWS[name]), name)
    return function
