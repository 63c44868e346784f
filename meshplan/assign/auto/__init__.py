"""`tp_plan: auto`: tensor-parallel styles derived from a recorded forward pass, and proved.

`regions` finds what sharding a class of dims would shard, `proof` follows values and gradients
through it, `numbers` and `comparison` rehearse it as one rank would run it, `choose` takes what
holds, and `derive` expresses it as styles.
"""

from meshplan.assign.auto.apply import apply_derived
from meshplan.assign.auto.derive import Derived, cut_inside, derive

__all__ = ["Derived", "apply_derived", "cut_inside", "derive"]
