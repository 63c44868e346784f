"""What a plan costs in bytes.

`states` sums what is resident, from the layouts alone. `log` is one step of one rank, storage by
storage, as `runtime.imagine` traces it; `allocator` plays it on torch's caching allocator, and
`driver` knows what lies outside of that.
"""

from meshplan.memory.allocator import OutOfMemoryError, Reserve, reserve
from meshplan.memory.driver import communicators, driver_bytes, with_workspaces
from meshplan.memory.estimate import MemoryEstimate
from meshplan.memory.generations import Band
from meshplan.memory.log import EventLog, Term
from meshplan.memory.states import StateBytes, state_bytes, state_bytes_by_rank

__all__ = [
    "Band",
    "EventLog",
    "MemoryEstimate",
    "OutOfMemoryError",
    "Reserve",
    "StateBytes",
    "Term",
    "communicators",
    "driver_bytes",
    "reserve",
    "state_bytes",
    "state_bytes_by_rank",
    "with_workspaces",
]
