"""Begin with meshplan: a plan file for a model and a machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.layout.hardware import devices, find_device
from meshplan.model.blueprint.config import config_file, read_json
from meshplan.render.plans.starter import Starter

_MOST_TOKENS: Final = 4096
_TOKENS: Final = 2048
"""Tokens of a sample if the model's config states no maximum."""
_GPUS: Final = 8
_GPU: Final = "h100-sxm-80gb"


def starter(
    *,
    config: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    folder: str | Path = "",
) -> Starter:
    """Return what a new plan states, with the GPUs of this machine where none are named.

    Args:
        config: A Hugging Face config.json, its folder, or a model's name in the Hub's local cache.
        model: "pkg.mod:function" that builds the model; it is called, on the meta device.
        gpu: Name of the GPU.
        nodes: Number of nodes; None for one.
        gpus_per_node: Number of GPUs of each node; None for those that torch sees here.
        folder: Folder of the plan file, from which it names the config.

    Raises:
        SpecError: A name is not known, the config cannot be read, or the model cannot be built.
    """
    if config is not None and model is not None:
        what = "--config and --model both state the model"
        raise SpecError(Problem(what, Origin("--model"), "leave one of them out"))
    for flag, count in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if count is not None and count < 1:
            raise SpecError(Problem(f"{count} is not a number of at least 1", Origin(flag)))
    guesses: list[str] = []
    name, memory_bytes, count = _machine(gpu, gpus_per_node, guesses)
    seq_len, shape = _input(config, model, guesses)
    return Starter(
        config=_as_named(config, folder),
        entry=model,
        gpu=name,
        memory_bytes=memory_bytes,
        nodes=nodes or 1,
        gpus_per_node=count,
        seq_len=seq_len,
        shape=shape,
        guesses=tuple(guesses),
    )


def _machine(gpu: str | None, count: int | None, guesses: list[str]) -> tuple[str | None, int, int]:
    """Return (name of the GPU or None, its memory in bytes, number of GPUs of a node)."""
    device = None if gpu is None else find_device(gpu, Origin("--gpu"))
    if device is None or count is None:
        from meshplan.runtime.calibrate import seen_devices

        seen, num_seen = seen_devices()
        device, count = device or seen, count or num_seen or _GPUS
    if device is None:
        device = find_device(_GPU)
        guesses.append(f"no GPU is seen here: hardware states {count} x {_GPU}, correct it")
    is_listed = device.name in devices()
    return (device.name if is_listed else None), device.usable_bytes, count


def _input(
    config: str | None, model: str | None, guesses: list[str]
) -> tuple[int | None, tuple[int, ...] | None]:
    """Return (tokens of a sample, None), or (None, the shape of an input)."""
    if model is not None:
        from meshplan.runtime.estimate.scale_down import ModelSource, model_of_source
        from meshplan.runtime.trace.sample import likely_shape

        built = model_of_source(ModelSource(entry=model, origin=Origin("--model")), on_meta=True)
        shape = likely_shape(built)
        if shape is None:
            guesses.append("the model's input is not known: write its shape under input")
        elif isinstance(shape, str):
            guesses.append(f"seq_len {_TOKENS} is a guess: write the tokens of your samples")
            return _TOKENS, None
        else:
            guesses.append(f"the input's shape {list(shape)} is a guess from the first layer")
        return None, shape
    content: dict[str, Any] = {}
    if config is None:
        guesses.append("no model is named: write its config or its function under model")
    else:
        content = dict(read_json(config_file(config), Origin("--config")))
    size, channels = content.get("image_size"), content.get("num_channels", 3)
    if isinstance(size, int) and isinstance(channels, int):
        return None, (1, channels, size, size)
    longest = content.get("max_position_embeddings", content.get("n_positions"))
    return min(_MOST_TOKENS, longest) if isinstance(longest, int) else _TOKENS, None


def _as_named(config: str | None, folder: str | Path) -> str | None:
    """Return the name of a config as a plan file in this folder has to write it."""
    if config is None or os.path.isabs(config):
        return config
    is_of_hub = not os.path.exists(config) and config_file(config).exists()
    return config if is_of_hub else os.path.relpath(config, folder or os.curdir)
