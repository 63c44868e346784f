"""What a plan costs in bytes.

`states` sums what is resident, from the layouts alone. `log` is one step of one rank, storage by
storage, as `runtime.imagine` traces it; `allocator` plays it on torch's caching allocator.
"""

from meshplan.memory.allocator import OutOfMemoryError, Reserve, reserve
from meshplan.memory.log import EventLog, Term
from meshplan.memory.states import StateBytes, state_bytes, state_bytes_by_rank

__all__ = [
    "EventLog",
    "OutOfMemoryError",
    "Reserve",
    "StateBytes",
    "Term",
    "reserve",
    "state_bytes",
    "state_bytes_by_rank",
]
