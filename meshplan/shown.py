"""Access to the functions that show a layout, spec, plan or estimate in a notebook.

These functions are in `meshplan.pictures`, which imports the packages of the values. A package of
values therefore cannot import them itself: `view` imports them by name when a value is first shown.
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
"""The module that defines each function, by the name of the function."""


def view(name: str) -> Callable[..., Any]:
    """Import the function of this name in `VIEWS`, and return it."""
    function: Callable[..., Any] = getattr(import_module(VIEWS[name]), name)
    return function
