"""Arithmetic on all events of a log at once, with arrays.

`EventLog` imports this module when it is first needed: most commands that know of logs compute
none, and do without numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Columns: TypeAlias = NDArray[np.int64]
"""[3, events] array with the fields of `events.Event`: changes in bytes, storages and phases."""


def columns_of(changes: Sequence[tuple[int, int, int]]) -> Columns:
    """Return events as an array."""
    fields = np.fromiter(chain.from_iterable(changes), np.int64, 3 * len(changes))
    return np.ascontiguousarray(fields.reshape(-1, 3).T)


def ints(values: Sequence[int]) -> Ints:
    """Return numbers as an array."""
    return np.array(values, np.int64)


def preceded(first: Sequence[tuple[int, int, int]], columns: Columns) -> Columns:
    """Return events with others before them."""
    return np.concatenate([columns_of(first), columns], axis=1)


def peak_of(columns: Columns) -> tuple[int, int]:
    """Return (the most live bytes, the index of the first event that reaches them).

    (0, -1) if no byte is ever live.
    """
    live = np.cumsum(columns[0])
    event = int(np.argmax(live)) if live.size else -1
    most = int(live[event]) if live.size else 0
    return (most, event) if most > 0 else (0, -1)


def pooled_bytes(columns: Columns, stream_of: Ints) -> int:
    """Return the sum over streams of the most bytes that are live on each.

    Args:
        columns: The events.
        stream_of: [storages] number of the stream of each storage.
    """
    deltas, streams = columns[0], stream_of[columns[1]]
    count = int(streams.max(initial=-1)) + 1
    live = (np.cumsum(deltas[streams == stream]) for stream in range(count))
    return sum(int(each.max(initial=0)) for each in live)


def live_sizes(columns: Columns) -> dict[int, int]:
    """Return the bytes of each storage that is live after all events, by its index."""
    sizes = np.bincount(columns[1], weights=columns[0])  # Exact below 2**53 bytes.
    return {storage: int(sizes[storage]) for storage in np.flatnonzero(sizes).tolist()}
