"""A live model that is what its config describes: it can be planned from there, tp and pp included.

That it is so is proved and not assumed. Made again from its config alone, the model has the same
modules with the same attributes and no hooks; its classes run the code that they were published
with; and its graph, tensor by tensor, is the one that the blueprint draws of the config.
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
from meshplan.runtime.trace.sample import is_tokens
from meshplan.spec.spec import Spec

_ATTENTION: Final = "sdpa"
_EXPERTS: Final = "grouped_mm"
"""What a step told from a config takes for granted, in transformers' words."""
_OF_NO_STEP: Final = frozenset({"_is_hf_initialized", "generation_config", "name_or_path"})
"""Attributes by which transformers knows where a model is from; no training step reads them."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model by its config.

    Attributes:
        graph: As the blueprint has it.
        shorter: The same of so many blocks, or of these of its own.
    """

    graph: ModelGraph
    shorter: Callable[[int | tuple[int, ...]], ModelGraph]


def described(model: nn.Module, graph: ModelGraph, spec: Spec) -> Described | str:
    """The model by its config; or why it has to be traced, "" where no config is there to speak of.

    Args:
        graph: Of the model.
        spec: The plan file, whatever it leaves open.
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
    """Of transformers, where that is loaded: a model of it has loaded it."""
    module: Any = sys.modules.get("transformers.configuration_utils")
    return () if module is None else (module.PreTrainedConfig,)


def _runs_otherwise(config: Any) -> str:
    """What the config asks for that a step told from it does not do."""
    if config.use_cache:
        return "its config has use_cache: true, and a cache holds tensors: say use_cache=False"
    attention = config._attn_implementation
    if attention != _ATTENTION:
        return f"its attention is '{attention}', and only '{_ATTENTION}' is told"
    experts = getattr(config, "_experts_implementation", None)
    has_experts = any("expert" in name for name in config.to_dict())
    if has_experts and experts != _EXPERTS:
        return f"its experts are computed by '{experts}', and only '{_EXPERTS}' is told"
    if getattr(config, "attention_dropout", 0):
        return "attention_dropout is on, which is not told"
    return ""


def _is_other(model: nn.Module, graph: ModelGraph, told: ModelGraph) -> str:
    """What the model has that its config does not say."""
    with torch.device("meta"):
        try:
            again = type(model)(model.config)
        except Exception as error:  # Its class is the user's, and may take anything.
            return f"its config alone does not make it: {type(error).__name__}"
    if not is_alike(model, again, but=_OF_NO_STEP):
        return "it was changed after its config had made it, or it does not train"
    for module in model.modules():
        if not _runs_its_own(type(module)):
            return f"{type(module).__name__} runs code of another package"
    if graph.modules != told.modules:
        return "its modules are not those that its config describes"
    if graph.tensors != told.tensors:
        return "its tensors are not those that its config describes, in shape, dtype or training"
    return "" if graph.tp_preset == told.tp_preset else "its tp plan is another"


def _runs_its_own(cls: type) -> bool:
    """Whether a class's forward was written where the class was."""
    owner: Any = next((each for each in cls.__mro__ if "forward" in vars(each)), cls)
    forward = owner.forward
    return bool(getattr(forward, "__module__", None) == owner.__module__)


def _untold(spec: Spec, told: ModelGraph) -> str:
    """What the plan says for which a step told from a config has no rules."""
    if spec.batch.seq_len is None:
        return "the plan does not say how long a sample is"
    given = spec.input
    if given is not None and not is_tokens(given):
        return "its input is stated, and is no tokens"
    trial: Mapping[str, int] = {"dp_shard": 2}
    try:
        return next((each.what for each in refusals(make_plan(with_axes(spec, trial), told))), "")
    except MeshplanError as error:
        return error.problems[0].what
