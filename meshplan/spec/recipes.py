"""Plan files by name: the recipes that are shipped with meshplan, and the plans of a folder.

Recipes, each a different kind of parallelism, are inside an installed package, and next to the
package in a checkout.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from meshplan.errors import Origin, Problem, SpecError

_MOST_HEAD: Final = 1 << 14
"""Bytes of a file in which its first key is looked for."""
OWN_MODELS: Final = ("meshplan.runtime.demo_model:build", "meshplan.runtime.demo_moe:build")
"""Models of meshplan itself that recipes name; their code may run without the user's permission."""


def recipe_names() -> list[str]:
    """Return the names of all recipes, such as "hybrid_2x4"."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the path of a recipe's plan file, relative to the working directory if inside it.

    Raises:
        SpecError: There is no recipe of this name.
    """
    if name not in recipe_names():
        what = f"there is no recipe '{name}'"
        fix = f"use {', '.join(recipe_names())}, or the path of a plan file"
        raise SpecError(Problem(what, None, fix))
    path = _folder() / f"{name}.yaml"
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def plans_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the plan files directly in a folder; plan.yaml alone if it is among them."""
    files = [p for p in sorted(Path(folder).iterdir()) if p.suffix in (".yaml", ".yml")]
    found = [p for p in files if not p.stem.endswith(".lock") and _begins_a_plan(p)]
    return [p for p in found if p.name == "plan.yaml"] or found


def _begins_a_plan(path: Path) -> bool:
    """Return True if the first key of a file is `version`, as in a plan."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            lines = file.read(_MOST_HEAD).decode("utf-8", "replace").splitlines()
    except OSError:  # The user cannot have meant a file that cannot be read.
        return False
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    return re.match(r"""\{?\s*["']?version["']?\s*:""", first) is not None


def find_plan(text: str | os.PathLike[str]) -> Path:
    """Return the plan file for a path or for the bare name of a recipe.

    A file takes precedence over a recipe of the same name; text that looks like a path is a path.

    Raises:
        SpecError: The text is neither a path nor a recipe.
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
