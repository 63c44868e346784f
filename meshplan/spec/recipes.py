"""The recipes: the plan files that travel with meshplan, one per way to parallelise.

Knows where they lie: inside an installed package, beside it in a checkout.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from meshplan.errors import Origin, Problem, SpecError

OWN_MODELS: Final = ("meshplan.runtime.demo_model:build", "meshplan.runtime.demo_moe:build")
"""The models that recipes name: code of meshplan itself."""


def recipe_names() -> list[str]:
    """The names of all recipes, such as "hybrid_2x4"."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """The plan file of a recipe.

    Raises:
        SpecError: There is none of this name.
    """
    if name not in recipe_names():
        what = f"there is no recipe '{name}'"
        fix = f"use {', '.join(recipe_names())}, or the path of a plan file"
        raise SpecError(Problem(what, None, fix))
    path = _folder() / f"{name}.yaml"
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def find_plan(text: str | os.PathLike[str]) -> Path:
    """The plan file that a path or the bare name of a recipe means.

    A file wins over a recipe of the same name; what looks like a path is taken as one.

    Raises:
        SpecError: It is neither.
    """
    path = Path(text)
    looks_like_a_path = path.suffix in (".yaml", ".yml") or len(path.parts) != 1
    if looks_like_a_path or path.is_file():
        return path
    try:
        return recipe_path(str(text))
    except SpecError as error:
        problem = error.problems[0]
        raise SpecError(Problem(problem.what, Origin("--plan"), problem.fix)) from None


def _folder() -> Path:
    package = Path(__file__).resolve().parent.parent
    inside = package / "plans"
    return inside if inside.is_dir() else package.parent / "plans"
