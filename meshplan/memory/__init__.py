"""What a plan costs in bytes."""

from meshplan.memory.states import StateBytes, state_bytes

__all__ = ["StateBytes", "state_bytes"]
