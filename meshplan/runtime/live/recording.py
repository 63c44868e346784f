"""Traces of a live model, kept on disk: a search asks for the same ones again and again.

Most of the time of a search of a live model goes into running it on fake tensors. What such a run
records depends on the model (`identity`) and on a few choices of the plan, not on the machine, the
batch, or the memory limit. Each trace is kept under a hash of both. `meshplan record` makes the
traces of a model beforehand, and writes them into one file.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import CACHE_VARIABLE, DiskCache, read_bytes, write_bytes
from meshplan.runtime.live.identity import ModelIdentity, canonical, hashed, versions
from meshplan.runtime.live.trace_json import costs_from_json, trace_from_json

FORMAT: Final = "meshplan recording"
VERSION: Final = 1
_MOST_TRACES: Final = 512
"""Number of traces that are kept, each of 10 to 200 KB."""
_MOST_MODELS: Final = 64
_SUFFIX: Final = ".trace"
REMAKE: Final = "make it anew with meshplan record"
_MOST_BYTES: Final = 512 * 2**20
"""Most bytes of the file of a recording."""


class Recording:
    """The traces of one live model.

    Args:
        identity: The model.
        kept: Where traces are kept on disk; None for nowhere.

    Attributes:
        traces: Traces that were made or recalled, as JSON values, by key.
    """

    def __init__(self, identity: ModelIdentity, kept: DiskCache | None = None) -> None:
        self.identity, self._digest, self._kept = identity, identity.digest(), kept
        self.traces: dict[str, Any] = {}

    @classmethod
    def of_user(cls, identity: ModelIdentity, report: Callable[[str], None]) -> Recording:
        """Return the recording of a model, with what was recorded earlier.

        Args:
            identity: The model.
            report: Called with a line if what was recorded is of another state of the model.
        """
        models = DiskCache.of_user(".model", _MOST_MODELS)
        if models is not None:
            name, data = hashed(identity.model + identity.modules), _dumped(asdict(identity))
            earlier = models.get(name)
            if earlier is not None and earlier[0] != data:
                why = ModelIdentity(**json.loads(earlier[0])).difference(identity)
                report(f"{identity.name} is traced anew: {why}")
            if earlier is None or earlier[0] != data:
                models.put(name, data)
        return cls(identity, DiskCache.of_user(_SUFFIX, _MOST_TRACES))

    def find(self, key: str) -> Any:
        """Return a trace as JSON values; None if it was not recorded."""
        if key not in self.traces and self._kept is not None:
            kept = self._kept.get(hashed(self._digest + key))
            if kept is not None:
                self.traces[key] = json.loads(zlib.decompress(kept[0]))
        return self.traces.get(key)

    def keep(self, key: str, trace: Any) -> None:
        """Record a trace."""
        self.traces[key] = trace
        if self._kept is not None:
            self._kept.put(hashed(self._digest + key), zlib.compress(_dumped(trace), 1))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file of the recording, with all traces that were made or recalled."""
        content = {"identity": asdict(self.identity), "traces": self.traces}
        head = {"format": FORMAT, "version": VERSION, "sha256": hashed(_dumped(content).decode())}
        write_bytes(path, _dumped({**head, **content}) + b"\n", "the recording")


def key_of(asked: Any) -> str:
    """Return the key of a trace, or a part of it.

    Args:
        asked: All that the trace depends on besides the model.
    """
    return hashed(repr(canonical(asked)))


def load(path: Path) -> tuple[ModelIdentity, int]:
    """Keep the traces of a file where searches look for them.

    Returns:
        The recorded model, and the number of its traces.

    Raises:
        SpecError: The file cannot be read, is no recording, was cut short or changed, or was made
            by other versions than are installed; or nothing is kept on this machine.
    """
    identity, traces = _read(path)
    origin = Origin(str(path))
    now = versions()
    for name, was in identity.versions.items():
        if name in now and now[name] != was:
            what = f"the recording was made by {name} {was}, and this is {name} {now[name]}"
            raise SpecError(Problem(what, origin, REMAKE))
    kept = DiskCache.of_user(_SUFFIX, _MOST_TRACES)
    if kept is None:
        what = f"nothing is kept on disk, as {CACHE_VARIABLE} says"
        raise SpecError(Problem(what, origin, f"unset {CACHE_VARIABLE}"))
    recording = Recording(identity, kept)
    for trace in traces.values():
        try:
            costs_from_json(trace) if "trace" in trace else trace_from_json(trace)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise SpecError(
                Problem("a trace of the recording is malformed", origin, REMAKE)
            ) from None
    for key, trace in traces.items():
        recording.keep(key, trace)
    return identity, len(traces)


def _read(path: Path) -> tuple[ModelIdentity, Mapping[str, Any]]:
    origin = Origin(str(path))

    def refused(what: str) -> SpecError:
        return SpecError(Problem(what, origin, REMAKE))

    try:
        content = json.loads(read_bytes(path, _MOST_BYTES, "a recording"))
    except FileNotFoundError:
        raise refused("the recording does not exist") from None
    except (ValueError, RecursionError):
        raise refused("the recording is cut short, or is no JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise refused("this is no recording")
    if (version := content.get("version")) != VERSION:
        raise refused(f"this recording has version {version}, and this meshplan reads {VERSION}")
    rest = {key: content.get(key) for key in ("identity", "traces")}
    if content.get("sha256") != hashed(_dumped(rest).decode()):
        raise refused("the recording was changed after it was made")
    try:
        return ModelIdentity(**content["identity"]), dict(content["traces"])
    except (TypeError, ValueError):
        raise refused("the recording does not say of which model it is") from None


def _dumped(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()
