"""accelerate: loops and saved states under a plan.

`MeshplanAccelerator(plan="plan.yaml")` is an Accelerator whose `prepare` applies the plan.
`planned_state` serves loops around `meshplan.train_step`.
"""

from importlib.util import find_spec

from meshplan.errors import ApplyError, Problem

if find_spec("accelerate") is None:
    raise ApplyError(
        Problem(
            "meshplan.interop.accelerate needs the package accelerate, which is not installed",
            fix="pip install accelerate",
        )
    )

from meshplan.interop.accelerate.accelerator import MeshplanAccelerator
from meshplan.interop.accelerate.state import planned_state

__all__ = ["MeshplanAccelerator", "planned_state"]
