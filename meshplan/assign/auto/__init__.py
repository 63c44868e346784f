"""`tp_plan: auto`: tensor-parallel styles derived from a recorded forward pass, and proved.

`regions` says what cutting a class of dims would cut, `proof` follows values and gradients
through it, `numbers` and `comparison` rehearse it as one rank would run it, `choose` takes what
holds, `derive` puts it into words.
"""

from meshplan.assign.auto.apply import apply_derived
from meshplan.assign.auto.derive import Derived, cut_inside, derive

__all__ = ["Derived", "apply_derived", "cut_inside", "derive"]
