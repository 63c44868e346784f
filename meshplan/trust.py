"""Whether a function that a file names may be called.

A plan may name code: what builds the model (`model: {entry: pkg.mod:function}`) and what is done to
a module (`apply:` of a rule). A file that came by mail or with a clone must not run any because
somebody looked at it. Code runs when the person says so: by naming it on the command line, with
`--allow-code` or MESHPLAN_ALLOW_CODE=1, or by `meshplan trust plan.yaml`, which remembers the
content of that file and asks again once it has changed, as direnv does.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import read_bytes, write_bytes
from meshplan.recipes import OWN_MODELS

ALLOW_CODE: Final = "MESHPLAN_ALLOW_CODE"
"""The environment variable that allows code of every file; processes that are started inherit it.
"""
PERSONS_WORDS: Final = frozenset({"--set", "--model", "<mapping>", "model"})
"""Where the person at the keyboard states something, in place of a file's name."""
_MOST_BYTES: Final = 1 << 22


class UntrustedError(SpecError):
    """A file names code, and nobody said that it may run."""


def check_code(code: str, origin: Origin | None) -> None:
    """Refuse code that must not run; the last thing before it does.

    Args:
        code: "pkg.mod:function".
        origin: Where it is named; None where only a program can have named it.

    Raises:
        UntrustedError: A file names it that nobody trusts.
    """
    if origin is None or origin.file in PERSONS_WORDS or code in OWN_MODELS or _is_allowed():
        return
    if not is_trusted(origin.file):
        what = f"'{code}' is code that this file names, and nobody said that it may run"
        named = ", or name it with --model" if origin.path.startswith("model") else ""
        command = f"meshplan trust {shlex.quote(origin.file)}"
        fix = f"read it, then: {command}; or say --allow-code{named}"
        raise UntrustedError(Problem(what, origin, fix))


def is_trusted(path: str | os.PathLike[str]) -> bool:
    """Return whether the file, with the content that it has now, was trusted."""
    record = _record(path)
    return record is not None and record.is_file()


def trust(path: str | os.PathLike[str]) -> Path:
    """Remember the content that a file has now.

    Returns:
        The file that remembers it.

    Raises:
        FileNotFoundError: There is no such file.
        SpecError: It cannot be read, or nothing can be remembered.
    """
    record = _record_of(path)
    record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    where = f"{os.path.realpath(path)}\n".encode(errors="surrogateescape")
    write_bytes(record, where, "what is trusted", "let XDG_DATA_HOME name a folder of yours")
    return record


def forget(path: str | os.PathLike[str]) -> bool:
    """Forget the content that a file has now; return whether it was trusted."""
    record = _record(path)
    with suppress(FileNotFoundError):
        if record is not None:
            record.unlink()
            return True
    return False


def _is_allowed() -> bool:
    return os.environ.get(ALLOW_CODE, "").lower() in ("1", "true", "yes")


def _record(path: str | os.PathLike[str]) -> Path | None:
    """As `_record_of`; None where the file cannot be read."""
    with suppress(OSError, ValueError):
        return _record_of(path)
    return None


def _record_of(path: str | os.PathLike[str]) -> Path:
    """Return the file whose presence says that a file is trusted.

    Its name is the hash of where the trusted file lies and what it says, so that neither another
    file of the same content nor another content of the same file is trusted.
    """
    place = os.path.realpath(path).encode(errors="surrogateescape")
    content = read_bytes(path, _MOST_BYTES, "a plan")
    name = hashlib.sha256(place + b"\0" + content).hexdigest()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "meshplan" / "trusted" / name
