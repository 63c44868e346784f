"""Build a model's graph from its config.json, or from a parameter count: no torch, no weights.

This package knows the names, order and shapes of the modules of eleven decoder families as in
transformers 5, fused three-dimensional expert weights included, and the default of each key that a
config may leave out. An unknown family, another head than that of the causal language model, and
sizes that do not fit together are errors. All dtypes are torch's default, float32; the plan decides
the dtypes of training.

Source: transformers 5.23, `models/<family>/configuration_*.py` and `modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshplan.errors import Origin, Problem, SpecError
from meshplan.model.blueprint.builder import GraphBuilder
from meshplan.model.blueprint.config import Facts, config_file, read_json
from meshplan.model.blueprint.families import FAMILIES, GPT2_DEFAULTS
from meshplan.model.blueprint.modules import build_decoder, build_gpt2
from meshplan.model.blueprint.outline import decoder_outline, gpt2_outline
from meshplan.model.blueprint.parts import dense_layers
from meshplan.model.flow import Flow
from meshplan.model.graph import ModelGraph, ModuleInfo, TensorInfo


def from_params(num_params: int) -> ModelGraph:
    """Return a graph with one tensor of this many elements, for a model of which nothing is known.

    >>> from_params(3_000_000_000).num_params
    3000000000
    """
    tensor = TensorInfo(fqn="parameters", shape=(num_params,), dims=("",))
    return ModelGraph(
        name=f"{num_params:,} parameters",
        modules=MappingProxyType({"": ModuleInfo(fqn="", type="Module")}),
        tensors=MappingProxyType({tensor.fqn: tensor}),
    )


def from_config(
    path: str | Path,
    origin: Origin | None = None,
    *,
    blocks: int | Sequence[int] | None = None,
) -> ModelGraph:
    """Return the graph of the model that a Hugging Face config.json describes.

    Args:
        path: The file, its directory, or the name of a model in the Hugging Face Hub's local cache.
        origin: The place where the user named the path, for messages about the file itself.
        blocks: A number of blocks to build instead of the number in the config, or the indices of
            the config's blocks that are built; None builds all.

    Raises:
        SpecError: The file cannot be read, or the model in it cannot be built.
    """
    file = config_file(path)
    content = read_json(file, origin)
    if blocks is not None:
        content = with_blocks(content, blocks, str(file))
    return from_mapping(content, file=str(file))


def with_blocks(
    content: Mapping[str, Any], blocks: int | Sequence[int], file: str
) -> Mapping[str, Any]:
    """Return a copy of a config that describes a model with fewer or other blocks.

    Args:
        content: The content of the config.json.
        blocks: The number of blocks, or the indices of the blocks to keep. The copy keeps which of
            these are dense and which have experts.
        file: The file's name for messages.
    """
    model_type = str(content.get("model_type"))
    if model_type not in FAMILIES:
        count = blocks if isinstance(blocks, int) else len(blocks)
        return {**content, "n_layer": count}
    family = FAMILIES[model_type]
    if isinstance(blocks, int) or not family.mixes_dense:
        count = blocks if isinstance(blocks, int) else len(blocks)
        return {**content, "num_hidden_layers": count}
    facts = Facts(content, family.defaults, file)
    dense = dense_layers(family, facts, max(blocks) + 1)
    places = [place for place, number in enumerate(sorted(blocks)) if number in dense]
    content = {**content, "num_hidden_layers": len(blocks)}
    if family.mixes_dense == "first_k_dense_replace":
        return {**content, family.mixes_dense: len(places)}
    return {**content, family.mixes_dense: 1, "mlp_only_layers": places}


def other_model(config: Mapping[str, Any], file: str = "<config>") -> Problem | None:
    """Return why this package cannot build the model of a config; None if it can.

    The model then has another family, or another head than a causal language model's.
    """
    supported = sorted([*FAMILIES, "gpt2"])
    otherwise = (
        "for any other model, install torch and transformers, which then build it, or give the "
        "model itself (model: {entry: PKG.MOD:FN} in the plan), or its number of parameters "
        "(--params)"
    )
    model_type = config.get("model_type")
    if model_type not in supported:
        missing = "the key is missing"
        what = missing if model_type is None else f"model_type {model_type!r} is not supported"
        fix = f"supported are {', '.join(supported)}; {otherwise}"
        return Problem(what, Origin(file, "model_type"), fix)
    stated = config.get("architectures")
    if stated and stated != [_causal_lm(model_type)]:
        what = f"{stated} is not {_causal_lm(model_type)}"
        fix = f"only {_causal_lm(model_type)} is supported for {model_type}; {otherwise}"
        return Problem(what, Origin(file, "architectures"), fix)
    return None


def _causal_lm(model_type: str) -> str:
    family = FAMILIES.get(model_type)
    return f"{family.prefix}ForCausalLM" if family else "GPT2LMHeadModel"


def from_mapping(config: Mapping[str, Any], file: str = "<config>") -> ModelGraph:
    """Return the graph of the model that a config's content describes.

    Raises:
        SpecError: The model has a family or a head that this package cannot build, or the config is
            wrong; the error carries every problem found.
    """
    if (problem := other_model(config, file)) is not None:
        raise SpecError(problem)
    model_type = config["model_type"]
    family = FAMILIES.get(model_type)
    facts = Facts(config, family.defaults if family else GPT2_DEFAULTS, file)
    causal_lm = _causal_lm(model_type)
    build = GraphBuilder(f"transformers.models.{model_type}.modeling_{model_type}")
    build.module("", causal_lm)
    if family:
        build_decoder(family, facts, build)
    else:
        build_gpt2(facts, build)
    graph = build.graph(causal_lm, facts.sizes)
    return replace(graph, outline=_outline(graph, config), notes=facts.notes())


_KEEPING = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Config keys that make a forward return more than the last block's output, such as the hidden
states of all blocks.
"""


def _outline(graph: ModelGraph, config: Mapping[str, Any]) -> Flow | None:
    """Return the outline of the model's forward; None if a key of `_KEEPING` is set."""
    if any(config.get(key) for key in _KEEPING):
        return None
    if "transformer" in graph.modules:
        drops = graph.config["embd_pdrop"] != 0
        return gpt2_outline(graph.modules, graph.tensors, drops=drops)
    family = FAMILIES[str(config["model_type"])]
    return decoder_outline(graph.modules, graph.tensors, scales=family.scales)
