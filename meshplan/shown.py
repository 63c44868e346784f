"""Views that values give of themselves in a notebook, in packages that import those values.

Here alone a lower package names a higher one: by text, imported when the view is first asked for.
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
"""The module of each view, by the name of its function."""


def view(name: str) -> Callable[..., Any]:
    """Return the function that shows a value."""
    function: Callable[..., Any] = getattr(import_module(VIEWS[name]), name)
    return function
