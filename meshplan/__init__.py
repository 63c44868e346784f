"""Declare how a PyTorch model is parallelised, estimate its memory before it runs, and run it.

This module lists the public names. `import meshplan` imports no other module: each name is looked
up in its module on first use, so that the command line starts without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshplan.api.batch_size import find_batch_size as find_batch_size
    from meshplan.api.checking import check_plan as check_plan
    from meshplan.api.checking import decide as decide
    from meshplan.api.checking import estimate_memory as estimate_memory
    from meshplan.api.checking import estimate_states as estimate_states
    from meshplan.api.checking import verify_plan as verify_plan
    from meshplan.api.configs import export_config as export_config
    from meshplan.api.configs import import_config as import_config
    from meshplan.api.exploring import explore as explore
    from meshplan.api.planning import calibrate as calibrate
    from meshplan.api.planning import explain as explain
    from meshplan.api.planning import lock_plan as lock_plan
    from meshplan.api.planning import search_plan as search_plan
    from meshplan.api.reporting import make_report as make_report
    from meshplan.api.retargeting import retarget as retarget
    from meshplan.errors import ApplyError as ApplyError
    from meshplan.errors import MeshplanError as MeshplanError
    from meshplan.errors import MissingStateError as MissingStateError
    from meshplan.errors import PlanError as PlanError
    from meshplan.errors import SpecError as SpecError
    from meshplan.errors import StateError as StateError
    from meshplan.interop.hf import trainer as trainer
    from meshplan.layout.layout import Layout as Layout
    from meshplan.layout.mesh import Mesh as Mesh
    from meshplan.plan.plan import Plan as Plan
    from meshplan.plan.plan import make_plan as make_plan
    from meshplan.runtime.apply.data.gather import gather_batch as gather_batch
    from meshplan.runtime.apply.data.gather import global_mean as global_mean
    from meshplan.runtime.parallelize import parallelize as parallelize
    from meshplan.runtime.state.load import load as load
    from meshplan.runtime.state.pretrained import load_pretrained as load_pretrained
    from meshplan.runtime.state.pretrained import save_pretrained as save_pretrained
    from meshplan.runtime.state.save import save as save
    from meshplan.runtime.train.callbacks import Callback as Callback
    from meshplan.runtime.train.dataloader import dataloader as dataloader
    from meshplan.runtime.train.ema import EMA as EMA
    from meshplan.runtime.train.evaluation import eval_step as eval_step
    from meshplan.runtime.train.evaluation import reduce as reduce
    from meshplan.runtime.train.grad_hooks import register_grad_hook as register_grad_hook
    from meshplan.runtime.train.gradient_scale import clip_grad_norm_ as clip_grad_norm_
    from meshplan.runtime.train.gradient_scale import clip_grad_value_ as clip_grad_value_
    from meshplan.runtime.train.prediction import predict as predict
    from meshplan.runtime.train.process import is_main as is_main
    from meshplan.runtime.train.process import main_first as main_first
    from meshplan.runtime.train.process import rank_logger as rank_logger
    from meshplan.runtime.train.process import seed_everything as seed_everything
    from meshplan.runtime.train.run import Run as Run
    from meshplan.runtime.train.state import full_state_dict as full_state_dict
    from meshplan.runtime.train.step import chunked_loss as chunked_loss
    from meshplan.runtime.train.step import data_rank as data_rank
    from meshplan.runtime.train.step import local_batch as local_batch
    from meshplan.runtime.train.step import loss_parallel as loss_parallel
    from meshplan.runtime.train.step import train_step as train_step
    from meshplan.runtime.train.stop import stop_requested as stop_requested
    from meshplan.runtime.watch.guard import guarded as guarded
    from meshplan.spec.reader import load_spec as load_spec
    from meshplan.spec.spec import Spec as Spec
    from meshplan.version import __version__ as __version__

_ROOMS = {
    # run a model under a plan
    "parallelize": "meshplan.runtime.parallelize",
    "local_batch": "meshplan.runtime.train.step",
    "data_rank": "meshplan.runtime.train.step",
    "dataloader": "meshplan.runtime.train.dataloader",
    "train_step": "meshplan.runtime.train.step",
    "eval_step": "meshplan.runtime.train.evaluation",
    "predict": "meshplan.runtime.train.prediction",
    "reduce": "meshplan.runtime.train.evaluation",
    "Run": "meshplan.runtime.train.run",
    "Callback": "meshplan.runtime.train.callbacks",
    "EMA": "meshplan.runtime.train.ema",
    "is_main": "meshplan.runtime.train.process",
    "main_first": "meshplan.runtime.train.process",
    "rank_logger": "meshplan.runtime.train.process",
    "seed_everything": "meshplan.runtime.train.process",
    "chunked_loss": "meshplan.runtime.train.step",
    "loss_parallel": "meshplan.runtime.train.step",
    "stop_requested": "meshplan.runtime.train.stop",
    "register_grad_hook": "meshplan.runtime.train.grad_hooks",
    "clip_grad_norm_": "meshplan.runtime.train.gradient_scale",
    "clip_grad_value_": "meshplan.runtime.train.gradient_scale",
    "gather_batch": "meshplan.runtime.apply.data.gather",
    "global_mean": "meshplan.runtime.apply.data.gather",
    "full_state_dict": "meshplan.runtime.train.state",
    "save": "meshplan.runtime.state.save",
    "load": "meshplan.runtime.state.load",
    "save_pretrained": "meshplan.runtime.state.pretrained",
    "load_pretrained": "meshplan.runtime.state.pretrained",
    "guarded": "meshplan.runtime.watch.guard",
    # inside other tools
    "trainer": "meshplan.interop.hf",
    # check, estimate and search before running
    "estimate_states": "meshplan.api.checking",
    "estimate_memory": "meshplan.api.checking",
    "check_plan": "meshplan.api.checking",
    "verify_plan": "meshplan.api.checking",
    "find_batch_size": "meshplan.api.batch_size",
    "search_plan": "meshplan.api.planning",
    "explain": "meshplan.api.planning",
    "lock_plan": "meshplan.api.planning",
    "retarget": "meshplan.api.retargeting",
    "calibrate": "meshplan.api.planning",
    "decide": "meshplan.api.checking",
    "load_spec": "meshplan.spec.reader",
    "make_plan": "meshplan.plan.plan",
    "make_report": "meshplan.api.reporting",
    "explore": "meshplan.api.exploring",
    "import_config": "meshplan.api.configs",
    "export_config": "meshplan.api.configs",
    # the values that these functions take and return
    "Spec": "meshplan.spec.spec",
    "Plan": "meshplan.plan.plan",
    "Mesh": "meshplan.layout.mesh",
    "Layout": "meshplan.layout.layout",
    # errors
    "MeshplanError": "meshplan.errors",
    "SpecError": "meshplan.errors",
    "PlanError": "meshplan.errors",
    "ApplyError": "meshplan.errors",
    "StateError": "meshplan.errors",
    "MissingStateError": "meshplan.errors",
    "__version__": "meshplan.version",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use, and cache it."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'meshplan' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ROOMS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
