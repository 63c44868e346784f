"""What a plan costs in bytes.

`states` sums what is resident, from the layouts alone. `log` is one step of one rank, storage by
storage, as `runtime.fake_step.step` traces it; `allocator` plays it on torch's caching allocator,
and `driver` knows what lies outside of that.
"""

from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.memory.answer.states import StateBytes, state_bytes, state_bytes_by_rank
from meshplan.memory.log.allocator import OutOfMemoryError, Reserve, reserve
from meshplan.memory.log.device_overheads import Band
from meshplan.memory.log.driver import communicators, driver_bytes, with_workspaces
from meshplan.memory.log.events import EventLog, Term

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
