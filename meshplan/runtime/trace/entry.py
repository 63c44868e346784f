"""Build a model that the user names as "pkg.mod:function", by default on meta.

The user's code runs here and may do anything. Any error becomes a single problem with its location,
and output goes to stderr, so that `--json` stays JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import nn

from meshplan.errors import Origin, Problem, SpecError
from meshplan.runtime.torch_private import modes
from meshplan.runtime.torch_private.modes import built_on
from meshplan.spec.recipes import OWN_MODELS
from meshplan.spec.trust import check_code
from meshplan.spec.values import did_you_mean

_ON_META = (
    "the function is called without arguments under torch.device('meta'), where tensors have "
    "shapes and no values: it must only build the model"
)
_FOUND = "modules are imported from the installed packages or the working directory"
_ELSEWHERE = "run the command in the folder of the module, or add this folder to PYTHONPATH"


def model_of_entry(entry: str, origin: Origin, *, on_meta: bool = True) -> nn.Module:
    """Build the model that "pkg.mod:function" makes.

    Args:
        entry: Name of a function or class that is called without arguments and returns an
            `nn.Module`, or of an `nn.Module` itself. Python modules are searched among the
            installed ones first, then in the working directory.
        origin: The place where the user named the entry.
        on_meta: If True, the model is built on meta, without memory; if False, on the CPU.

    Raises:
        UntrustedError: The entry is named in a file that is not trusted.
        SpecError: The entry cannot be imported or called, or does not return an `nn.Module`.
    """
    check_code(entry, origin)
    module_name, colon, name = entry.partition(":")
    if not (colon and module_name and name):
        what = f"'{entry}' does not name a function"
        raise SpecError(Problem(what, origin, "write it as pkg.mod:function"))
    if module_name.endswith(".py") and os.sep in module_name:
        raise SpecError(_outside(module_name, name, origin))
    path = contextlib.nullcontext() if entry in OWN_MODELS else _working_directory_last()
    with path:
        found: object = _imported(module_name, origin)
        _check_place(module_name, origin)
        for part in name.split("."):
            if not hasattr(found, part):
                what = f"'{module_name}' has no '{name}'"
                names = [each for each in vars(found) if callable(getattr(found, each))]
                fix = did_you_mean(part, names, f"name a function of {module_name}")
                raise SpecError(Problem(what, origin, fix))
            found = getattr(found, part)
        if not isinstance(found, nn.Module):
            if not callable(found):
                what = f"'{entry}' is {type(found).__name__}, which cannot be called"
                raise SpecError(Problem(what, origin, "name a function that returns the model"))
            device = torch.device("meta" if on_meta else "cpu")
            with (
                built_on(device),
                _as_spec_error(f"calling '{entry}'", origin, _ON_META if on_meta else ""),
            ):
                found = found()
    if not isinstance(found, nn.Module):
        what = f"'{entry}' returned {type(found).__name__}, not an nn.Module"
        raise SpecError(Problem(what, origin, "return the model"))
    return found


def _outside(file: str, name: str, origin: Origin) -> Problem:
    """Say how to name a function of a file that is outside the working directory."""
    if not os.path.isfile(file):
        return Problem(f"there is no file {file}", origin)
    folder, module = os.path.split(file.removesuffix(".py"))
    what = f"{file} is not in the working directory"
    fix = f"run the command in {folder}, or write PYTHONPATH={folder} before it and name the "
    return Problem(what, origin, f"{fix}function as {module}:{name}")


def _imported(module_name: str, origin: Origin) -> ModuleType:
    """Import a module of the user; raise SpecError if it is not found or raises an error."""
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        problem = _raised(f"importing '{module_name}'", error, origin, _FOUND if missing else "")
        if missing and f"{module_name}.".startswith(f"{missing}."):  # No import of its own.
            file = module_name.replace(".", os.sep)
            what = f"there is no {file}.py in the working directory, nor a package '{module_name}'"
            problem = Problem(what, origin, _ELSEWHERE)
        raise SpecError(problem) from None


@contextlib.contextmanager
def _as_spec_error(doing: str, origin: Origin, fix: str) -> Iterator[None]:
    """Raise any exception of the user's code in the `with` block as a SpecError.

    Args:
        doing: The current action, for the message.
        origin: The place where the user named the model.
        fix: Advice for the message.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise SpecError(_raised(doing, error, origin, fix)) from None


def _raised(doing: str, error: BaseException, origin: Origin, fix: str) -> Problem:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = text.strip().partition("\n")[0]
    name = type(error).__name__
    what = f"{doing} raised {name}{': ' + text if text else ''}{_place(error)}"
    return Problem(what, origin, fix)


def _place(error: BaseException) -> str:
    """Return " (file:line)" of the user's innermost line in the traceback; "" if none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    foreign = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename not in (__file__, modes.__file__) and (
            "site-packages" not in frame.filename and not frame.filename.startswith(foreign)
        ):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


@contextlib.contextmanager
def _working_directory_last() -> Iterator[None]:
    """Append the working directory to `sys.path`, so that it does not shadow installed modules."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _check_place(module_name: str, origin: Origin) -> None:
    """Reject an installed module if a file in the working directory has the same name."""
    top = module_name.partition(".")[0]
    there = getattr(sys.modules[top], "__file__", None)
    here = os.path.join(os.getcwd(), top)
    is_here = os.path.isfile(f"{here}.py") or os.path.isfile(os.path.join(here, "__init__.py"))
    if there is None or not is_here or os.path.realpath(there).startswith(os.path.realpath(here)):
        return
    what = f"'{top}' was imported from {there}, not from the working directory"
    fix = "rename the module in the working directory, or add that directory to PYTHONPATH"
    raise SpecError(Problem(what, origin, fix))
