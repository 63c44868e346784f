"""`tp_plan: auto`: tensor-parallel styles derived from a recorded forward pass, and proved.

`regions` finds the modules that are sharded if one class of dims is sharded. `proof` checks that
values and gradients are then those of one process, `numbers` and `comparison` that the model's code
runs the same operations on local shapes. `choose` selects the regions that pass both, and `derive`
turns them into styles.
"""

from meshplan.assign.auto.apply import apply_derived
from meshplan.assign.auto.derive import Derived, cut_inside, derive

__all__ = ["Derived", "apply_derived", "cut_inside", "derive"]
