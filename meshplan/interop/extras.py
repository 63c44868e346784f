"""Errors of packages of other tools that are missing, or that lack something themselves."""

from __future__ import annotations

from importlib import import_module

from meshplan.errors import ApplyError, Problem


def not_importable(error: ImportError, package: str, who: str, install: str) -> ApplyError:
    """Return the error to raise where a package of another tool cannot be imported.

    Args:
        error: The error of its import.
        package: The package.
        who: What needs it.
        install: What pip installs it by.
    """
    is_missing = isinstance(error, ModuleNotFoundError)
    missing = (error.name or "").partition(".")[0] if is_missing else ""
    if missing == package:
        what = f"{who} needs the package {package}, which is not installed"
        return ApplyError(Problem(what, fix=f"pip install {install}"))
    what = f"{who} needs the package {package}, which is installed but cannot be imported: {error}"
    fix = f"pip install {missing}, or " if missing else ""
    return ApplyError(Problem(what, fix=f"{fix}pip install --force-reinstall {install}"))


def need(package: str, who: str, install: str) -> None:
    """Raise what `not_importable` returns if a package cannot be imported."""
    try:
        import_module(package)
    except ImportError as error:
        raise not_importable(error, package, who, install) from error
