"""Check that a live model is what its config describes, so that it can be planned from the config.

The planner searches tp and pp only for models that it knows from a config. Three checks prove that
the live model equals its config: a second model, built from the config alone, has the same modules
with the same attributes and hooks; every class runs the `forward` of its own Python module; and the
live model's graph, tensor by tensor, is the graph that `model.blueprint` makes from the config.
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
from meshplan.spec.spec import InputSpec, Spec

_ATTENTION: Final = "sdpa"
_EXPERTS: Final = "grouped_mm"
"""Implementations of attention and experts that analytic estimates assume, by the names that
transformers gives them."""
OF_NO_STEP: Final = frozenset({"_is_hf_initialized", "generation_config", "name_or_path"})
"""Attributes that record the origin of a transformers model; no training step reads them."""


@dataclass(frozen=True, slots=True)
class Described:
    """A live model that equals its config, as the planner needs it.

    Attributes:
        graph: The graph that `model.blueprint` makes from the config.
        shorter: Makes the graph with fewer blocks: the first n for an int, or the blocks with these
            indices for a tuple.
    """

    graph: ModelGraph
    shorter: Callable[[int | tuple[int, ...]], ModelGraph]


def described(model: nn.Module, graph: ModelGraph, spec: Spec) -> Described | str:
    """Return the graph that the model's config describes, if the model equals its config.

    Args:
        model: The live model.
        graph: The graph of the live model.
        spec: The plan file, which may leave fields open.

    Returns:
        The graph; or the reason, in words, why the model must be traced instead; or "" if it has no
        config of transformers.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, _config_class()):
        return ""
    content = config.to_dict()
    try:
        config_graph = from_mapping(content)
    except MeshplanError as error:
        return error.problems[0].what
    found = Described(
        config_graph, lambda blocks: from_mapping(with_blocks(content, blocks, "config"))
    )
    return (
        _runs_otherwise(config)
        or _difference(model, graph, config_graph)
        or _why_not_analytic(spec, config_graph)
        or found
    )


def _config_class() -> Any:
    """Return (transformers' base class of configs,) for `isinstance`; () if it is not imported."""
    module: Any = sys.modules.get("transformers.configuration_utils")
    return () if module is None else (module.PreTrainedConfig,)


def _runs_otherwise(config: Any) -> str:
    """Return the first setting of the config that analytic estimates do not cover; "" if none."""
    if config.use_cache:
        return "its config has use_cache: true, and the cache takes memory: set use_cache=False"
    attention = config._attn_implementation
    if attention != _ATTENTION:
        return f"its attention is '{attention}', but estimates from a config need '{_ATTENTION}'"
    experts = getattr(config, "_experts_implementation", None)
    has_experts = any("expert" in name for name in config.to_dict())
    if has_experts and experts != _EXPERTS:
        return f"its experts run as '{experts}', but estimates from a config need '{_EXPERTS}'"
    if getattr(config, "attention_dropout", 0):
        return "its attention_dropout is not 0, which estimates from a config do not cover"
    return ""


def _difference(model: nn.Module, graph: ModelGraph, config_graph: ModelGraph) -> str:
    """Return the first difference between the model and its config; "" if they are equal."""
    with built_on(torch.device("meta")):
        try:
            rebuilt = type(model)(model.config)
        except Exception as error:  # A class of the user may take any arguments.
            return f"it cannot be built from its config alone: {type(error).__name__}"
    if not is_alike(model, rebuilt, but=OF_NO_STEP):
        return "it was changed after it was built from its config, or a module is in eval mode"
    for module in model.modules():
        if not _runs_its_own(type(module)):
            return f"the forward of {type(module).__name__} was replaced by code of another file"
    if graph.modules != config_graph.modules:
        return "its modules differ from those that its config describes"
    if graph.tensors != config_graph.tensors:
        return "its tensors differ from those of its config in shape, dtype or requires_grad"
    return (
        ""
        if graph.tp_preset == config_graph.tp_preset
        else "its tensor-parallel plan differs from that of its config"
    )


def _runs_its_own(cls: type) -> bool:
    """Return True if a class and its `forward` were defined in the same Python module."""
    owner: Any = next((each for each in cls.__mro__ if "forward" in vars(each)), cls)
    forward = owner.forward
    return bool(getattr(forward, "__module__", None) == owner.__module__)


def _why_not_analytic(spec: Spec, config_graph: ModelGraph) -> str:
    """Return why analytic estimates cannot handle what the plan states; "" if they can."""
    if spec.batch.seq_len is None:
        return "the plan states no sequence length: add batch: {seq_len: 2048}"
    given = spec.input
    if given is not None and not (isinstance(given, InputSpec) and is_tokens(given)):
        return "the plan states an input that is not token ids"
    trial: Mapping[str, int] = {"dp_shard": 2}
    try:
        return next(
            (each.what for each in refusals(make_plan(with_axes(spec, trial), config_graph))), ""
        )
    except MeshplanError as error:
        return error.problems[0].what
