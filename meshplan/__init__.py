"""Declare how a PyTorch model is parallelised, know its memory beforehand, run it.

The public names on one page. Importing meshplan imports nothing: each name is found in its room
when it is first used, so that the command line starts without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshplan.api import check_plan as check_plan
    from meshplan.api import decide as decide
    from meshplan.api import estimate_memory as estimate_memory
    from meshplan.api import estimate_states as estimate_states
    from meshplan.api import verify_plan as verify_plan
    from meshplan.errors import ApplyError as ApplyError
    from meshplan.errors import MeshplanError as MeshplanError
    from meshplan.errors import PlanError as PlanError
    from meshplan.errors import SpecError as SpecError
    from meshplan.exploring import explore as explore
    from meshplan.layout import Layout as Layout
    from meshplan.mesh import Mesh as Mesh
    from meshplan.plan import Plan as Plan
    from meshplan.plan import make_plan as make_plan
    from meshplan.planning import calibrate as calibrate
    from meshplan.planning import explain as explain
    from meshplan.planning import lock_plan as lock_plan
    from meshplan.planning import search_plan as search_plan
    from meshplan.reader import load_spec as load_spec
    from meshplan.reporting import make_report as make_report
    from meshplan.retargeting import retarget as retarget
    from meshplan.runtime.gather import gather_batch as gather_batch
    from meshplan.runtime.gather import global_mean as global_mean
    from meshplan.runtime.grad_hooks import register_grad_hook as register_grad_hook
    from meshplan.runtime.gradient_scale import clip_grad_norm_ as clip_grad_norm_
    from meshplan.runtime.guard import guarded as guarded
    from meshplan.runtime.parallelize import parallelize as parallelize
    from meshplan.runtime.state import full_state_dict as full_state_dict
    from meshplan.runtime.train import chunked_loss as chunked_loss
    from meshplan.runtime.train import local_batch as local_batch
    from meshplan.runtime.train import loss_parallel as loss_parallel
    from meshplan.runtime.train import train_step as train_step
    from meshplan.spec import Spec as Spec
    from meshplan.version import __version__ as __version__

_ROOMS = {
    # run a model under a plan
    "parallelize": "meshplan.runtime.parallelize",
    "local_batch": "meshplan.runtime.train",
    "train_step": "meshplan.runtime.train",
    "chunked_loss": "meshplan.runtime.train",
    "loss_parallel": "meshplan.runtime.train",
    "register_grad_hook": "meshplan.runtime.grad_hooks",
    "clip_grad_norm_": "meshplan.runtime.gradient_scale",
    "gather_batch": "meshplan.runtime.gather",
    "global_mean": "meshplan.runtime.gather",
    "full_state_dict": "meshplan.runtime.state",
    "guarded": "meshplan.runtime.guard",
    # know it beforehand
    "estimate_states": "meshplan.api",
    "estimate_memory": "meshplan.api",
    "check_plan": "meshplan.api",
    "verify_plan": "meshplan.api",
    "search_plan": "meshplan.planning",
    "explain": "meshplan.planning",
    "lock_plan": "meshplan.planning",
    "retarget": "meshplan.retargeting",
    "calibrate": "meshplan.planning",
    "decide": "meshplan.api",
    "load_spec": "meshplan.reader",
    "make_plan": "meshplan.plan",
    "make_report": "meshplan.reporting",
    "explore": "meshplan.exploring",
    # the values that pass between them
    "Spec": "meshplan.spec",
    "Plan": "meshplan.plan",
    "Mesh": "meshplan.mesh",
    "Layout": "meshplan.layout",
    # what can go wrong
    "MeshplanError": "meshplan.errors",
    "SpecError": "meshplan.errors",
    "PlanError": "meshplan.errors",
    "ApplyError": "meshplan.errors",
    "__version__": "meshplan.version",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> Any:
    """Find a public name in its room, once."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'meshplan' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ROOMS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
