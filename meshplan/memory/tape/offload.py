"""What waits in the host's memory from forward to backward, while a tape is played.

The rule is `runtime.apply.offload`'s: whatever autograd is asked to keep goes there one by one,
though two operations keep the same, but for parameters, buffers, and what is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LEAST_BYTES: Final = 1024
"""Smaller tensors stay: a copy takes longer than they are worth. Source: torchtune 0.5,
training/_activation_offloading.py, `min_offload_size`."""


class OffloadedValues:
    """Copies in the host's memory, and when they come and go.

    Args:
        nbytes: Of every value of the tape.

    Attributes:
        changes: (number of the event before which it is so, bytes more or less).
    """

    def __init__(self, nbytes: Sequence[int]) -> None:
        self._nbytes = nbytes
        self._sizes: dict[int, tuple[int, ...]] = {}
        self.changes: list[tuple[int, int]] = []

    def take(self, key: int, values: Sequence[int], event: int) -> tuple[int, ...]:
        """Copy what is large enough.

        Args:
            key: What it is known by from now on.

        Returns:
            The values that stay on the device.
        """
        moved = tuple(value for value in values if self._nbytes[value] >= LEAST_BYTES)
        self._sizes[key] = sizes = tuple(self._nbytes[value] for value in moved)
        if sizes:
            self.changes.append((event, sum(sizes)))
        return tuple(value for value in values if value not in moved)

    def of(self, key: int) -> tuple[int, ...]:
        """Bytes of each copy."""
        return self._sizes.get(key, ())

    def end(self, key: int, event: int) -> None:
        """Nobody needs them any more."""
        if sizes := self._sizes.pop(key, ()):
            self.changes.append((event, -sum(sizes)))
