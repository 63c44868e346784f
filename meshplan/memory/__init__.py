"""What a plan costs in bytes."""

from meshplan.memory.states import StateBytes, state_bytes, state_bytes_by_rank

__all__ = ["StateBytes", "state_bytes", "state_bytes_by_rank"]
