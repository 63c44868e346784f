"""accelerate: loops and saved states under a plan.

`MeshplanAccelerator(plan="plan.yaml")` is an Accelerator whose `prepare` applies the plan.
`planned_state` serves loops around `meshplan.train_step`.
"""

from meshplan.interop.extras import not_importable

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise not_importable(error, "accelerate", __name__, "accelerate") from error

from meshplan.interop.accelerate.accelerator import MeshplanAccelerator
from meshplan.interop.accelerate.state import planned_state

__all__ = ["MeshplanAccelerator", "planned_state"]
