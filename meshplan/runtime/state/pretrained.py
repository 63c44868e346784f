"""Checkpoints of Hugging Face: written by all ranks, and read straight into their shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import own_module
from meshplan.runtime.base.mesh import full
from meshplan.runtime.comparisons.drift import check_drift
from meshplan.runtime.state.adapters import (
    has_adapters,
    load_adapters,
    peft_model_of,
    save_adapters,
)
from meshplan.runtime.state.agree import agree, agree_on_folder
from meshplan.runtime.state.background import finish_background, next_board
from meshplan.runtime.state.live import WORDS, LiveState, bytes_of
from meshplan.runtime.state.load import Loading
from meshplan.runtime.train.fast_dev_run import folder_to_read
from meshplan.runtime.watch.guard import come_together, guarded
from meshplan.state.held import plain_name
from meshplan.state.pretrained import HEADER, check_empty, file_names, read_pretrained, write_index
from meshplan.state.safetensors import Bytes, TensorEntry, write


@guarded("save_pretrained")
def save_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write the model as a checkpoint of Hugging Face. All ranks must call this function.

    The files have full tensors under the model's own names, so that `from_pretrained` of
    transformers and any other reader of safetensors takes them. Tensors are gathered one after the
    other, and each rank writes a part of them: no rank ever holds the whole model.

    Adapters and their configuration alone are written of a model of peft, as peft does it, for
    `PeftModel.from_pretrained`. They are gathered on rank 0.

    Args:
        model: The module that `parallelize` returned.
        folder: A folder that all ranks share, without a checkpoint yet. If the model has a config
            with `save_pretrained`, as those of transformers do, it is written too.

    Returns:
        The folder.

    Raises:
        StateError: The checkpoint cannot be written, or the folder has one.
        ApplyError: Copies of a parameter on several ranks are no longer equal.
    """
    come_together("save_pretrained")
    finish_background()
    live = LiveState(model)
    check_drift(model, live.plan, live.applied.mesh)
    board = next_board()
    target = agree_on_folder(board, folder)
    if (root := peft_model_of(model)) is not None:
        save_adapters(model, root, board, target)
        return target

    def begin(parts: list[Any]) -> None:
        check_empty(target)
        target.mkdir(parents=True, exist_ok=True)
        root = model.skeleton if isinstance(model, PipelinedModule) else own_module(model)
        found = [getattr(root, "config", None)]
        if callable(can_generate := getattr(root, "can_generate", None)) and can_generate():
            found.append(getattr(root, "generation_config", None))
        for each in found:
            if callable(save := getattr(each, "save_pretrained", None)):
                save(target)

    agree(board, "begin", lambda: None, begin)
    owners = _owners(live)
    writers = sorted(set(owners.values()))
    names = dict(zip(writers, file_names(len(writers)), strict=True))
    placed = live.plan.assignment.tensors
    own = {fqn: rank for fqn, rank in owners.items() if rank == board.rank}
    entries = {
        plain_name(fqn): TensorEntry(
            WORDS[getattr(torch, placed[fqn].dtype)], placed[fqn].info.shape
        )
        for fqn in own
    }
    gathered = _gathered(live, owners)

    def write_own() -> None:
        def content(name: str) -> Iterator[Bytes]:
            yield next(gathered)

        try:
            if entries:
                write(target / names[board.rank], entries, content, HEADER)
        finally:
            for _ in gathered:  # Take part in gathering what other ranks write.
                pass

    def finish(parts: list[Any]) -> None:
        weight_map = {plain_name(fqn): names[rank] for fqn, rank in owners.items()}
        total = sum(
            placed[fqn].info.numel * getattr(torch, placed[fqn].dtype).itemsize for fqn in owners
        )
        write_index(target, weight_map, total)

    agree(board, "write", write_own, finish)
    return target


def _owners(live: LiveState) -> dict[str, int]:
    """Return the rank that writes each tensor of the whole model, by name; equal on all ranks.

    Under a pipeline it is one of those that hold the tensor. Ranks get equally many bytes.
    """
    plan = live.plan
    stages, mesh = plan.assignment.stages, plan.mesh
    places = mesh.indices(("pp",))
    loads = [0] * mesh.world_size
    out = {}
    for fqn in live.names:
        placed = plan.assignment.tensors[fqn]
        place = None
        if stages is not None:
            place = stages.rank_of(stages.tensors[fqn][-1 if placed.info.is_buffer else 0])
        ranks = [rank for rank, at in enumerate(places) if place is None or at == place]
        out[fqn] = min(ranks, key=loads.__getitem__)
        loads[out[fqn]] += placed.info.num_bytes
    return out


def _gathered(live: LiveState, owners: dict[str, int]) -> Iterator[Bytes]:
    """Gather every tensor, one after the other; yield the bytes of those that this rank writes."""
    rank = dist.get_rank()
    for fqn, owner in owners.items():
        copies = live.copies(fqn)
        if copies:
            is_buffer = live.plan.assignment.tensors[fqn].info.is_buffer
            whole = full(copies[-1 if is_buffer else 0].detach())
            if owner == rank:
                yield bytes_of(whole)


@guarded("load_pretrained")
def load_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True
) -> tuple[str, ...]:
    """Load a checkpoint of Hugging Face straight into the shards. All ranks must call this.

    A folder with an adapter of peft is loaded into the adapters of a model of peft.

    Each rank reads only the parts that its shards consist of, so no rank ever holds the whole
    model: build the module on the meta device to save the memory of its initial values as well.

    Args:
        model: The module that `parallelize` returned.
        folder: A folder with `model.safetensors`, or with several files and their index.
        strict: If False, names that only the checkpoint or only the model has are skipped.

    Returns:
        The names that were skipped.

    Raises:
        MissingStateError: The folder has no checkpoint; this is a FileNotFoundError too.
        StateError: The checkpoint is damaged or is not of this model. Nothing has changed.
    """
    come_together("load_pretrained")
    finish_background()
    board, source = next_board(), folder_to_read(folder)
    if (root := peft_model_of(model)) is not None and has_adapters(root, source):
        return load_adapters(model, root, board, source, strict=strict)
    loading: list[Loading] = []

    def check() -> None:
        found = read_pretrained(source)
        loading.append(Loading(LiveState(model), found, source, None, strict=strict))
        loading[0].check()

    agree(board, "check", check)
    agree(board, "load", loading[0].load)
    loading[0].warn()
    return tuple(loading[0].skipped)
