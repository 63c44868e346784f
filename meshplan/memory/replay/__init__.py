"""Compose a training step from the trace of one microbatch, by rules.

The microbatch (`memory.log.microbatch`) is traced from a model once, or computed from a blueprint,
and does not depend on which wrapper (FSDP2, DDP) manages the parameters. The rules of this package
allocate and free, at the hook points of the microbatch, the bytes that each wrapper and the
optimizer do. A plan for which there is no rule raises a `PlanError`; it can still be estimated from
a trace of the whole step.
"""

from meshplan.memory.replay.main import check_rules, replay
from meshplan.memory.replay.prepare import Prepared

__all__ = ["Prepared", "check_rules", "replay"]
