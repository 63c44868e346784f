"""Decide whether code that a file names may be run.

A plan may name code: a function that builds the model (`model: {entry: pkg.mod:function}`) and
functions applied to a module (`apply:` of a rule). A file that came by mail or with a clone must
not run code merely because somebody looked at it. Code runs when the user says so: by naming it on
the command line, with `--allow-code` or MESHPLAN_ALLOW_CODE=1, or by `meshplan trust plan.yaml`.
That command remembers the content of the file; it asks again once the file has changed, as direnv
does, or is used from elsewhere.

The reader hashes the very text that it parses, and this module checks that hash. The file is not
read a second time, so it cannot be replaced in between.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import write_bytes
from meshplan.spec.recipes import OWN_MODELS

ALLOW_CODE: Final = "MESHPLAN_ALLOW_CODE"
"""The environment variable that allows the code of every file; child processes inherit it."""
PERSONS_WORDS: Final = frozenset({"--set", "--model", "<mapping>", "model"})
"""Values of `Origin.file` that are no file: the user or the user's program stated the value."""
_RECORD: Final = "the record of trusted plan files"
_ELSEWHERE: Final = "set XDG_DATA_HOME to a folder that you can write to"


class UntrustedError(SpecError):
    """A file names code that the user has not allowed to run."""


def check_code(code: str, origin: Origin | None) -> None:
    """Raise an error if the user has not allowed this code; to be called before running it.

    Args:
        code: "pkg.mod:function".
        origin: The place where the code is named; None if no file can have named it.

    Raises:
        UntrustedError: The code is named by a file that is not trusted.
    """
    if origin is None or origin.file in PERSONS_WORDS or code in OWN_MODELS or _is_allowed():
        return
    if not is_trusted(origin):
        what = f"this file names the code '{code}', which you have not allowed to run"
        named = ", or name the code with --model" if origin.path.startswith("model") else ""
        command = f"meshplan trust {shlex.quote(origin.file)}"
        fix = f"read the code, then run: {command}; or pass --allow-code{named}"
        raise UntrustedError(Problem(what, origin, fix))


def digest_of(text: str) -> str:
    """Return the hash that identifies the content of a plan file."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_trusted(origin: Origin) -> bool:
    """Return True if a file was trusted with the content from which `origin` was read."""
    with suppress(OSError, ValueError):
        return _record_of(origin).is_file()
    return False


def trust(origin: Origin) -> Path:
    """Remember the content from which `origin` was read as trusted.

    Returns:
        The file that records it.

    Raises:
        SpecError: The record cannot be written.
    """
    try:
        record = _record_of(origin)
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        problem = Problem(f"{_RECORD} cannot be written: {error.strerror}", origin, _ELSEWHERE)
        raise SpecError(problem) from None
    where = f"{os.path.realpath(origin.file)}\n".encode(errors="surrogateescape")
    write_bytes(record, where, _RECORD, _ELSEWHERE)
    return record


def forget(origin: Origin) -> bool:
    """Forget the content from which `origin` was read; return True if it was trusted."""
    with suppress(FileNotFoundError):
        _record_of(origin).unlink()
        return True
    return False


def _is_allowed() -> bool:
    return os.environ.get(ALLOW_CODE, "").lower() in ("1", "true", "yes")


def _record_of(origin: Origin) -> Path:
    """Return the path of the record that marks a file as trusted.

    Its name is the hash of the trusted file's path, of the working directory, and of the file's
    content. So trust does not extend to another file of the same content, to another content of
    the same file, or to other modules that the same name would import from another folder.

    Raises:
        ValueError: The origin is not a file.
        OSError: The working directory has been removed.
    """
    if not origin.digest:
        raise ValueError(f"{origin} was not read from a file")
    places = (os.path.realpath(origin.file), os.path.realpath(os.getcwd()), origin.digest)
    name = hashlib.sha256("\0".join(places).encode(errors="surrogateescape")).hexdigest()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "meshplan" / "trusted" / name


def as_code_name(text: str) -> str:
    """Return "pkg.mod:name" for a function that is named by its file, "pkg/mod.py:name".

    A file outside the working directory has no such name, and its text is returned as it is.

    >>> as_code_name("models/net.py:build"), as_code_name("models.net:build")
    ('models.net:build', 'models.net:build')
    """
    file, colon, name = text.partition(":")
    path = os.path.relpath(file) if os.path.isabs(file) else os.path.normpath(file)
    if not file.endswith(".py") or path.startswith(os.pardir + os.sep):
        return text
    return path.removesuffix(".py").replace(os.sep, ".") + colon + name
