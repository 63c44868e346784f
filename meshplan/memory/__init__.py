"""Estimate the memory of a plan on every rank, in bytes.

`answer.states` sums what is resident between steps, from the layouts alone. An `EventLog` is one
step of one rank, allocation by allocation; `runtime.fake_step.step` traces a step, and `replay`
composes one by rules. `log.allocator` plays a log on a model of torch's caching allocator, and
`log.driver` adds the device memory outside of that allocator.
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
