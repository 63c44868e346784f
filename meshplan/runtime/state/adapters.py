"""Adapters of peft: files of the adapters alone, as peft itself writes and reads them.

Which tensors belong to an adapter, and under which names its file has them, is peft's knowledge:
it is asked with stand-ins in place of the tensors, so that nothing is gathered for the question.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import MissingStateError, Origin, Problem, SpecError, StateError
from meshplan.files import read_bytes
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import own_module
from meshplan.runtime.state.agree import agree
from meshplan.runtime.state.live import LiveState
from meshplan.runtime.state.load import Loading
from meshplan.runtime.train.state import gather_tensors
from meshplan.runtime.watch.board import Board
from meshplan.state.held import plain_name
from meshplan.state.names import with_names
from meshplan.state.pretrained import check_empty, read_pretrained

CONFIG: Final = "adapter_config.json"
"""The file by which a folder is known to have an adapter."""
_DEFAULT: Final = "default"
"""The adapter whose files are in the folder itself; others have folders of their names."""
_SCALES: Final = (
    "peft_type", "lora_alpha", "use_rslora", "alpha_pattern", "use_dora", "r", "rank_pattern",
)  # fmt: skip
"""Settings of an adapter by which equal tensors compute something else."""
_MOST_BYTES: Final = 1 << 20
"""Largest size of an adapter's config."""


def peft_model_of(model: nn.Module) -> Any:
    """Return the model as its user made it if it is one of peft, else None.

    Args:
        model: The module that `parallelize` returned.
    """
    root = model.skeleton if isinstance(model, PipelinedModule) else own_module(model)
    peft = sys.modules.get("peft")  # Without an import of it, no model is one of peft.
    return root if peft is not None and isinstance(root, peft.PeftModel) else None


def names_of_adapters(root: Any) -> dict[str, dict[str, str]]:
    """Return, for each adapter of a model of peft, {name in its file: name in the state dict}.

    Raises:
        StateError: A file would have tensors that are none of the model's.
    """
    tensors_of: Callable[..., dict[str, torch.Tensor]]
    tensors_of = sys.modules["peft"].get_peft_model_state_dict
    stand_ins = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in root.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    own = {id(stand_in): name for name, stand_in in stand_ins.items()}
    out: dict[str, dict[str, str]] = {}
    for adapter in root.peft_config:
        saved = tensors_of(root, state_dict=dict(stand_ins), adapter_name=adapter)
        if made := [name for name, value in saved.items() if id(value) not in own]:
            what = f"peft computes {made[0]} of adapter {adapter!r} only while it saves, and it "
            what += "cannot be computed from shards"
            fix = "save meshplan.full_state_dict(model), or a state by meshplan.save"
            raise StateError(Problem(what, fix=fix))
        out[adapter] = {name: own[id(value)] for name, value in saved.items()}
    return out


def save_adapters(model: nn.Module, root: Any, board: Board, target: Path) -> None:
    """Gather the adapters on rank 0, which writes them; all ranks must call this.

    Args:
        model: The module that `parallelize` returned.
        root: The model of peft in it.
        board: The messages between the ranks.
        target: A folder without a checkpoint.

    Raises:
        StateError: They cannot be written, or the folder has a checkpoint.
    """

    def begin(parts: list[Any]) -> list[str]:
        for adapter in root.peft_config:
            check_empty(folder_of(target, adapter))
        adapters = names_of_adapters(root)
        return sorted({name for names in adapters.values() for name in names.values()})

    wanted = agree(board, "begin", lambda: None, begin)
    tensors = gather_tensors(model, frozenset(wanted))
    agree(
        board, "write", lambda: None, lambda parts: root.save_pretrained(target, state_dict=tensors)
    )


def load_adapters(
    model: nn.Module, root: Any, board: Board, source: Path, *, strict: bool
) -> tuple[str, ...]:
    """Load the adapters of a folder into the shards; the base stays as it is.

    Args:
        model: The module that `parallelize` returned.
        root: The model of peft in it.
        board: The messages between the ranks.
        source: A folder that peft or `save_pretrained` wrote.
        strict: If False, names that only the folder or only the model has are skipped.

    Returns:
        The names that were skipped.

    Raises:
        StateError: The files are damaged or are not of these adapters. Nothing has changed.
    """
    loadings: list[Loading] = []

    def check() -> None:
        live = LiveState(model)
        for adapter, names in names_of_adapters(root).items():
            folder = folder_of(source, adapter)
            _check_config(root.peft_config[adapter], folder)
            plain = {saved: plain_name(name) for saved, name in names.items()}
            found = with_names(read_pretrained(folder), _changed(plain))
            wanted = frozenset(plain.values())
            loadings.append(Loading(live, found, folder, None, strict=strict, wanted=wanted))
            loadings[-1].check()

    def load() -> None:
        for loading in loadings:
            loading.load()

    agree(board, "check", check)
    agree(board, "load", load)
    for loading in loadings:
        loading.warn()
    return tuple(name for loading in loadings for name in loading.skipped)


def folder_of(path: Path, adapter: str) -> Path:
    """Return the folder of an adapter in the folder that peft writes."""
    return path if adapter == _DEFAULT else path / adapter


def has_adapters(root: Any, path: Path) -> bool:
    """Return True if a folder has files of one of a model's adapters."""
    return any((folder_of(path, adapter) / CONFIG).exists() for adapter in root.peft_config)


def _check_config(config: Any, folder: Path) -> None:
    """Raise a StateError if the tensors of a folder mean something else in this model."""
    path = folder / CONFIG
    own = config.to_dict()
    try:
        saved = json.loads(read_bytes(path, _MOST_BYTES, "an adapter's config").decode("utf-8"))
    except FileNotFoundError:
        problem = Problem("this folder has no adapter", Origin(str(folder)))
        raise MissingStateError(problem) from None
    except (SpecError, ValueError, RecursionError) as error:
        raise StateError(Problem(f"it cannot be read: {error}", Origin(str(path)))) from None
    for key in _SCALES:
        if isinstance(saved, Mapping) and key in saved and key in own:
            now = getattr(own[key], "value", own[key])
            if saved[key] != now:
                what = f"{key} is {saved[key]!r}, but {now!r} in the model"
                fix = "make the model with the config of this folder"
                raise StateError(Problem(what, Origin(str(path)), fix))


def _changed(names: Mapping[str, str]) -> dict[str, str]:
    return {saved: own for saved, own in names.items() if saved != own}
