"""Lightning: plans as strategies of its `Trainer` and of `Fabric`.

`Trainer(strategy=MeshplanStrategy("plan.yaml"))` trains a LightningModule under a plan. Importing
this module also registers the alias "meshplan", whose plan is the file that the environment
variable MESHPLAN_PLAN names, else `plan.yaml` in the working directory.
"""

from importlib.util import find_spec

from meshplan.errors import ApplyError, Problem

if find_spec("lightning") is None:
    raise ApplyError(
        Problem(
            "meshplan.interop.lightning needs the package lightning, which is not installed",
            fix="pip install 'meshplan[lightning]'",
        )
    )

from meshplan.interop.lightning.fabric import MeshplanFabricStrategy
from meshplan.interop.lightning.registry import register
from meshplan.interop.lightning.strategy import MeshplanStrategy

__all__ = ["MeshplanFabricStrategy", "MeshplanStrategy"]

register()
