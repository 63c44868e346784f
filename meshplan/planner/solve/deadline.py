"""The moment at which a search ends, by two clocks."""

from __future__ import annotations

import time


class Deadline(float):
    """A value of `time.monotonic()`, beside the one of `time.process_time()` in this process.

    On a busy machine the first may come before the search has had a processor for a second.
    """

    own: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline that is this many seconds from now."""
        deadline = cls(time.monotonic() + seconds)
        deadline.own = time.process_time() + seconds
        return deadline
