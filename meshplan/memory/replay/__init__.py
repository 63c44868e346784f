"""Compose a training step from the trace of one microbatch, by rules.

The microbatch (`memory.log.microbatch`) is traced from a model once, or computed from a blueprint,
and is the same whichever wrapper manages the parameters. The rules of this package say, in bytes,
what each wrapper and the optimizer allocate and free at the hook points of the microbatch. A plan
for which there is no rule is refused; a trace of the whole step can estimate it.
"""

from meshplan.memory.replay.main import check_rules, replay
from meshplan.memory.replay.prepare import Prepared

__all__ = ["Prepared", "check_rules", "replay"]
