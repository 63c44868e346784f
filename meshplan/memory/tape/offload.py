"""Offload saved values to host memory from forward to backward, while a tape is played.

The rule is that of `runtime.apply.offload`: every tensor that autograd saves is copied to the host,
once for each op that saves it, except for parameters, buffers and small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LEAST_BYTES: Final = 1024
"""Minimum bytes of a tensor that is offloaded: for smaller ones the copy takes too long. Source:
torchtune 0.5, training/_activation_offloading.py, `min_offload_size`."""


class OffloadedValues:
    """The copies in host memory, and the events at which they are made and freed.

    Args:
        nbytes: Bytes of every value of the tape.

    Attributes:
        changes: Changes of host memory, as (index of the event before which the change happens,
            bytes).
    """

    def __init__(self, nbytes: Sequence[int]) -> None:
        self._nbytes = nbytes
        self._sizes: dict[int, tuple[int, ...]] = {}
        self.changes: list[tuple[int, int]] = []

    def take(self, key: int, values: Sequence[int], event: int) -> tuple[int, ...]:
        """Copy the values that are large enough to the host.

        Args:
            key: Identifier of these copies in `of` and `end`.
            values: The saved values.
            event: Index of the next event.

        Returns:
            The values that stay on the device.
        """
        moved = tuple(value for value in values if self._nbytes[value] >= LEAST_BYTES)
        self._sizes[key] = sizes = tuple(self._nbytes[value] for value in moved)
        if sizes:
            self.changes.append((event, sum(sizes)))
        return tuple(value for value in values if value not in moved)

    def of(self, key: int) -> tuple[int, ...]:
        """Return the bytes of each copy that was made under `key`."""
        return self._sizes.get(key, ())

    def end(self, key: int, event: int) -> None:
        """Free the copies that were made under `key`, before the event with index `event`."""
        if sizes := self._sizes.pop(key, ()):
            self.changes.append((event, -sum(sizes)))
