"""A cache on disk of the planner's answers, for a command that asks the same question again.

An evening asks one question several times: `plan`, then `draw`, then `plan` again. A search takes
seconds, and reading its answer takes a tenth of one. The key of an answer is a hash of all that it
depends on: the whole plan with its path, the modules of the model, for a live one also its code and
its recorded forward, the machine, the constants, the files of this package, and the versions of
Python, numpy and torch. A changed question therefore has
another key, and nothing is ever compared or repaired.

Only commands use the cache, whose process is their own. A search in Python always runs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Final

from meshplan.files import DiskCache
from meshplan.memory.log.torch_version import installed
from meshplan.own_process import IS_COMMAND
from meshplan.planner.problem.decision import Decision, PlanRequest
from meshplan.shown import whole_repr
from meshplan.version import __version__

_MOST_FILES: Final = 64
"""Number of answers that are kept, each of 0.5 to 5 MB; the oldest are removed."""
_PACKAGE: Final = Path(__file__).parents[2]


class DecisionCache:
    """The file that keeps the answer to one question.

    Args:
        files: The files of all answers.
        key: Name of this one.
        other_layouts: If True, the question is also one for `Decision.other_layouts`. An answer
            that has them answers the question without them too.
    """

    def __init__(self, files: DiskCache, key: str, *, other_layouts: bool) -> None:
        self._files, self._key = files, key
        self._other_layouts = other_layouts

    def get(self) -> tuple[Decision, str] | None:
        """Return the answer and the local time it was found at; None if there is none to read.

        Unpickling runs what a file says, and only files that this user alone may write are read.
        """
        kept = self._files.get(self._key)
        if kept is None:
            return None
        found: tuple[bool, Decision] = pickle.loads(kept[0])
        has_layouts, decision = found
        if self._other_layouts and not has_layouts:
            return None
        if has_layouts and not self._other_layouts:
            decision = replace(decision, other_layouts=())
        return decision, time.strftime("%Y-%m-%d %H:%M", time.localtime(kept[1]))

    def put(self, decision: Decision) -> None:
        """Keep an answer.

        An answer of a live model whose recorded operators have arguments that cannot be pickled is
        not kept.
        """
        with suppress(pickle.PicklingError, TypeError, AttributeError):
            data = pickle.dumps((self._other_layouts, decision), protocol=pickle.HIGHEST_PROTOCOL)
            self._files.put(self._key, data)


def cache_of(request: PlanRequest) -> DecisionCache | None:
    """Return the file for a question's answer.

    Returns:
        The file, which may not exist. None outside commands, if the cache is turned off, and for a
        live model whose forward cannot be recorded, so that nothing tells it from another one.
    """
    files = DiskCache.of_user(".decision", _MOST_FILES)
    is_live = bool(request.traced or request.certify)
    if not IS_COMMAND.get() or files is None or (is_live and not request.identity()):
        return None
    return DecisionCache(files, _key(request), other_layouts=request.other_layouts)


def _key(request: PlanRequest) -> str:
    spec = request.read(())
    origins = sorted((path, str(origin)) for path, origin in spec.origins.items())
    graph = request.graph
    parts = (
        whole_repr(spec), os.path.abspath(spec.source), origins,
        whole_repr((graph, graph.notes, graph.flow, graph.outline, graph.tp_derived)),
        request.identity(),
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
