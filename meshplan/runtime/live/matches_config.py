"""Check that a live model is what its config describes, so that it can be planned from the config.

Planned from its config, a model can also use tp and pp. The equality is proved, not assumed: built
again from its config alone, the model has the same modules with the same attributes and no hooks;
its classes run the code that they were published with; and its graph, tensor by tensor, is the one
that the blueprint makes from the config.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import MeshplanError
from meshplan.memory.analytic.microbatches import refusals
from meshplan.model.blueprint import from_mapping, with_blocks
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import make_plan
from meshplan.planner.space.trials import with_axes
from meshplan.runtime.fake_step.equal_blocks import is_alike
from meshplan.runtime.torch_private.modes import built_on
from meshplan.runtime.trace.sample import is_tokens
from meshplan.spec.spec import Spec

_ATTENTION: Final = "sdpa"
_EXPERTS: Final = "grouped_mm"
"""Implementations that an analytic estimate assumes, as transformers names them."""
_OF_NO_STEP: Final = frozenset({"_is_hf_initialized", "generation_config", "name_or_path"})
"""Attributes that say where a transformers model comes from; no training step reads them."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model as its config describes it.

    Attributes:
        graph: The graph that the blueprint makes from the config.
        shorter: Makes the graph with a given number of blocks, or with the blocks of these numbers.
    """

    graph: ModelGraph
    shorter: Callable[[int | tuple[int, ...]], ModelGraph]


def described(model: nn.Module, graph: ModelGraph, spec: Spec) -> Described | str:
    """Return the model as its config describes it; or why to trace it, "" if it has no config.

    Args:
        model: The live model.
        graph: The graph of the live model.
        spec: The plan file, with whatever it leaves open.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, _config_class()):
        return ""
    content = config.to_dict()
    try:
        told = from_mapping(content)
    except MeshplanError as error:
        return error.problems[0].what
    found = Described(told, lambda blocks: from_mapping(with_blocks(content, blocks, "config")))
    return _runs_otherwise(config) or _is_other(model, graph, told) or _untold(spec, told) or found


def _config_class() -> Any:
    """Return transformers' config class; () if transformers is not loaded."""
    module: Any = sys.modules.get("transformers.configuration_utils")
    return () if module is None else (module.PreTrainedConfig,)


def _runs_otherwise(config: Any) -> str:
    """Return what the config asks for that an analytic estimate does not cover; "" if nothing."""
    if config.use_cache:
        return "its config has use_cache: true, and the cache takes memory: set use_cache=False"
    attention = config._attn_implementation
    if attention != _ATTENTION:
        return f"its attention is '{attention}', and a config is estimated with '{_ATTENTION}' only"
    experts = getattr(config, "_experts_implementation", None)
    has_experts = any("expert" in name for name in config.to_dict())
    if has_experts and experts != _EXPERTS:
        return f"its experts run as '{experts}', and a config is estimated with '{_EXPERTS}' only"
    if getattr(config, "attention_dropout", 0):
        return "attention_dropout is on, which an estimate from a config does not cover"
    return ""


def _is_other(model: nn.Module, graph: ModelGraph, told: ModelGraph) -> str:
    """Return how the model differs from its config; "" if it does not."""
    with built_on(torch.device("meta")):
        try:
            again = type(model)(model.config)
        except Exception as error:  # A class of the user may take any arguments.
            return f"it cannot be built from its config alone: {type(error).__name__}"
    if not is_alike(model, again, but=_OF_NO_STEP):
        return "it was changed after it was built from its config, or a part is in eval mode"
    for module in model.modules():
        if not _runs_its_own(type(module)):
            return f"the forward of {type(module).__name__} was replaced by code of another module"
    if graph.modules != told.modules:
        return "its modules differ from those that its config describes"
    if graph.tensors != told.tensors:
        return "its tensors differ from those of its config in shape, dtype or requires_grad"
    return (
        ""
        if graph.tp_preset == told.tp_preset
        else "its tensor-parallel plan differs from that of its config"
    )


def _runs_its_own(cls: type) -> bool:
    """Return True if a class's forward was defined in the module of the class."""
    owner: Any = next((each for each in cls.__mro__ if "forward" in vars(each)), cls)
    forward = owner.forward
    return bool(getattr(forward, "__module__", None) == owner.__module__)


def _untold(spec: Spec, told: ModelGraph) -> str:
    """Return what the plan states that analytic estimates have no rules for; "" if nothing."""
    if spec.batch.seq_len is None:
        return "the plan states no sequence length: add batch: {seq_len: 2048}"
    given = spec.input
    if given is not None and not is_tokens(given):
        return "the plan states an input that is not token ids"
    trial: Mapping[str, int] = {"dp_shard": 2}
    try:
        return next((each.what for each in refusals(make_plan(with_axes(spec, trial), told))), "")
    except MeshplanError as error:
        return error.problems[0].what
