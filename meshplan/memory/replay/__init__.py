"""A training step composed: work on a microbatch, and what wrappers and the optimizer add to it.

The work (`memory.log.microbatch`) is traced from a model once, or told from a blueprint, and is the
same whatever holds the parameters. This room knows, as rules on bytes, what each wrapper makes and
frees at the marks of the work. What no rule covers it refuses: a trace of the whole step tells.
"""

from meshplan.memory.replay.main import check_rules, replay
from meshplan.memory.replay.prepare import Prepared

__all__ = ["Prepared", "check_rules", "replay"]
