"""A cache on disk of the planner's answers, for a command that asks the same question again.

An evening asks one question several times: `plan`, then `draw`, then `plan` again. A search takes
seconds, and reading its answer takes a tenth of one. The key of an answer is a hash of all that it
depends on: the whole plan with its path, the modules of the model, the machine, the constants, the
files of this package, and the versions of Python, numpy and torch. A changed question therefore has
another key, and nothing is ever compared or repaired.

Only commands use the cache, whose process is their own. A search in Python always runs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Final

from meshplan.errors import SpecError
from meshplan.files import write_bytes
from meshplan.memory.log.torch_version import installed
from meshplan.own_process import IS_COMMAND
from meshplan.planner.problem.decision import Decision, PlanRequest
from meshplan.shown import whole_repr
from meshplan.version import __version__

VARIABLE: Final = "MESHPLAN_CACHE"
"""Environment variable that names the folder of the cache; "off" for none."""
_OFF: Final = "off"
_MOST_FILES: Final = 64
"""Number of answers that are kept, each of 0.5 to 5 MB; the oldest are removed."""
_SUFFIX: Final = ".decision"
_PACKAGE: Final = Path(__file__).parents[2]


class DecisionCache:
    """The file that keeps the answer to one question.

    Args:
        path: Path of the file, in a folder of such files.
        other_layouts: If True, the question is also one for `Decision.other_layouts`. An answer
            that has them answers the question without them too.
    """

    def __init__(self, path: Path, *, other_layouts: bool) -> None:
        self._path = path
        self._other_layouts = other_layouts

    def get(self) -> tuple[Decision, str] | None:
        """Return the answer and the local time it was found at; None if there is none to read.

        A file of another user, or which others may write, is not read, because unpickling runs
        what it says. One that was cut short or changed is not read either.
        """
        try:
            handle = os.open(self._path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            return None
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(file.fileno())
            if not _is_own(status):
                return None
            hashed, data = file.read(hashlib.sha256().digest_size), file.read()
        if hashlib.sha256(data).digest() != hashed:
            return None
        found: tuple[bool, Decision] = pickle.loads(data)
        has_layouts, decision = found
        if self._other_layouts and not has_layouts:
            return None
        if has_layouts and not self._other_layouts:
            decision = replace(decision, other_layouts=())
        return decision, time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))

    def put(self, decision: Decision) -> None:
        """Keep an answer, if the folder can be written, and remove the oldest ones."""
        data = pickle.dumps((self._other_layouts, decision), protocol=pickle.HIGHEST_PROTOCOL)
        folder = self._path.parent
        with suppress(OSError, SpecError):  # A cache that cannot be written is no cache.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(self._path, hashlib.sha256(data).digest() + data, "the answer")
            self._path.chmod(0o600)
            kept = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda each: each.stat().st_mtime)
            for old in kept[:-_MOST_FILES]:
                old.unlink()


def cache_of(request: PlanRequest) -> DecisionCache | None:
    """Return the file for a question's answer.

    Returns:
        The file, which may not exist. None outside commands, if the cache is turned off, and for a
        live model, whose code the key does not know.
    """
    stated = os.environ.get(VARIABLE, "")
    if not IS_COMMAND.get() or stated == _OFF or request.traced or request.certify:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = stated or os.path.join(home, "meshplan")
    if folder.startswith("~"):  # The user has no home.
        return None
    path = Path(folder, f"{_key(request)}{_SUFFIX}")
    return DecisionCache(path, other_layouts=request.other_layouts)


def _key(request: PlanRequest) -> str:
    spec = request.read(())
    origins = sorted((path, str(origin)) for path, origin in spec.origins.items())
    graph = request.graph
    parts = (
        whole_repr(spec), os.path.abspath(spec.source), origins,
        whole_repr((graph, graph.notes, graph.flow, graph.outline, graph.tp_derived)),
        request.device, request.limit_bytes, whole_repr(request.cluster), request.time_limit_s,
        request.objective,
        whole_repr(request.profile), str(request.profile_path),
        __version__, platform.python_version(), metadata.version("numpy"), installed(),
        *_files_of_package(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _files_of_package() -> Iterator[tuple[str, int, int]]:
    """Yield (path, time of its last change, size) of every file of the package, compiled or not."""
    for folder, names, files in os.walk(_PACKAGE):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for name in sorted(files):
            status = os.stat(os.path.join(folder, name))
            yield os.path.join(folder, name), status.st_mtime_ns, status.st_size


def _is_own(status: os.stat_result) -> bool:
    """Return True if a file belongs to this user, who alone may write it."""
    if os.name == "nt":
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
