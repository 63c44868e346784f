"""Build a model's graph from its config.json, or from a parameter count: no torch, no weights.

This package has the names, order and shapes of the modules of eleven decoder families as in
transformers 5, fused three-dimensional expert weights included, and the defaults of keys that a
config leaves out. It does not guess: an unknown family, another head than the causal language
model, or sizes that do not fit together are errors. Dtypes are torch's default, float32; the
dtype for training is up to the plan.

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


class OtherModelError(SpecError):
    """A config of a model that cannot be built from the config alone."""


def from_params(num_params: int) -> ModelGraph:
    """Return a graph of which only the number of parameters is known: one tensor without dims.

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
        origin: The place where the user named the path, for problems with the file itself.
        blocks: A number of blocks to build instead of the config's own, or the indices of those of
            its blocks to build; None builds all.

    Raises:
        SpecError: The file cannot be read, or describes nothing that can be built.
    """
    file = config_file(path)
    content = read_json(file, origin)
    if blocks is not None:
        content = with_blocks(content, blocks, str(file))
    return from_mapping(content, file=str(file))


def with_blocks(
    content: Mapping[str, Any], blocks: int | Sequence[int], file: str
) -> Mapping[str, Any]:
    """Return a config with another number of blocks, or with some of its blocks in their order."""
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


def from_mapping(config: Mapping[str, Any], file: str = "<config>") -> ModelGraph:
    """Return the graph of the model that a config's content describes.

    Raises:
        OtherModelError: The model is of a family, or has a head, that only transformers builds.
        SpecError: The config is wrong; the error carries every problem found.
    """
    supported = sorted([*FAMILIES, "gpt2"])
    otherwise = (
        "for any other model, give the model itself (model: {entry: PKG.MOD:FN} in the plan, with "
        "torch), or its number of parameters (--params)"
    )
    model_type = config.get("model_type")
    if model_type not in supported:
        missing = "the key is missing"
        what = missing if model_type is None else f"model_type {model_type!r} is not supported"
        fix = f"supported are {', '.join(supported)}; {otherwise}"
        raise OtherModelError(Problem(what, Origin(file, "model_type"), fix))
    family = FAMILIES.get(model_type)
    causal_lm = f"{family.prefix}ForCausalLM" if family else "GPT2LMHeadModel"
    facts = Facts(config, family.defaults if family else GPT2_DEFAULTS, file)
    stated = config.get("architectures")
    if stated and stated != [causal_lm]:
        what, fix = (
            f"{stated} is not {causal_lm}",
            f"only {causal_lm} is supported for {model_type}; {otherwise}",
        )
        raise OtherModelError(Problem(what, Origin(file, "architectures"), fix))
    build = GraphBuilder(f"transformers.models.{model_type}.modeling_{model_type}")
    build.module("", causal_lm)
    if family:
        build_decoder(family, facts, build)
    else:
        build_gpt2(facts, build)
    graph = build.graph(causal_lm, facts.sizes)
    return replace(graph, outline=_outline(graph, config), notes=facts.notes())


_KEEPING = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Switches that make a forward keep, and return, more than passes from block to block."""


def _outline(graph: ModelGraph, config: Mapping[str, Any]) -> Flow | None:
    """Return the order in which modules run, unless the config changes what passes between them."""
    if any(config.get(key) for key in _KEEPING):
        return None
    if "transformer" in graph.modules:
        drops = graph.config["embd_pdrop"] != 0
        return gpt2_outline(graph.modules, graph.tensors, drops=drops)
    family = FAMILIES[str(config["model_type"])]
    return decoder_outline(graph.modules, graph.tensors, scales=family.scales)
