"""Lightning: plans as strategies of its `Trainer` and of `Fabric`.

`Trainer(strategy=MeshplanStrategy("plan.yaml"))` trains a LightningModule under a plan. Importing
this module also registers the alias "meshplan", whose plan is the file that the environment
variable MESHPLAN_PLAN names, else `plan.yaml` in the working directory.
"""

from meshplan.interop.extras import not_importable

try:
    import lightning  # noqa: F401
except ImportError as error:
    raise not_importable(error, "lightning", __name__, "'meshplan[lightning]'") from error

from meshplan.interop.lightning.fabric import MeshplanFabricStrategy
from meshplan.interop.lightning.registry import register
from meshplan.interop.lightning.strategy import MeshplanStrategy

__all__ = ["MeshplanFabricStrategy", "MeshplanStrategy"]

register()
