"""Checkpoints of Lightning as states of meshplan: a folder of safetensors and one manifest.

`epoch=0-step=10.ckpt` is a folder with one state in it. A file of the same name is written anew by
some callbacks: its new state is whole before the one before it is removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import Origin, Problem, StateError
from meshplan.runtime.state.load import load
from meshplan.runtime.state.save import save
from meshplan.runtime.watch.guard import come_together, guarded
from meshplan.state.folder import steps_in

_TENSORS: Final = "meshplan_other_tensors"
"""Key of the LightningModule's tensors outside of the parallelized module."""
_REPLACED: Final = ".replaced"
"""Ending of a checkpoint that is being written anew."""


def save_checkpoint(
    path: str | os.PathLike[str],
    checkpoint: dict[str, Any],
    network: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    others: Mapping[str, torch.Tensor],
) -> None:
    """Write Lightning's checkpoint of a step as a state. All ranks must call this function.

    Args:
        path: Lightning's name of the checkpoint.
        checkpoint: What else Lightning saves: numbers, strings, tensors, lists and mappings.
        network: The module that the plan was applied to.
        optimizers: Its optimizers; none to save the weights only.
        others: Tensors of the LightningModule outside of the network.

    Raises:
        StateError: It cannot be written.
    """
    words = ("state_dict", "optimizer_states")
    rest = {key: value for key, value in checkpoint.items() if key not in words}
    rest[_TENSORS] = dict(others)
    save_over(folder_of(path), network, _only(optimizers), int(checkpoint["global_step"]), rest)


def save_over(
    folder: Path,
    network: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Any,
) -> None:
    """Save a state as the only one in a folder, in place of what it had."""
    with guarded("save_checkpoint"):
        come_together("save_checkpoint")
        replaced = _make_way(folder, step) if dist.get_rank() == 0 else None
        come_together("save_checkpoint")
        save(folder, network, optimizer, step=step, keep=1, extra=extra)
        if replaced is not None:
            _remove(replaced)


def _only(optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    if len(optimizers) > 1:
        raise StateError(
            Problem(
                f"configure_optimizers made {len(optimizers)} optimizers, and a state has one",
                fix="return one optimizer with several parameter groups",
            )
        )
    return optimizers[0] if optimizers else None


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a checkpoint.

    Raises:
        StateError: It is an address.
    """
    if "://" in os.fspath(path):
        what = "a state is a folder that all ranks share, not an address"
        raise StateError(Problem(what, Origin(os.fspath(path)), "name a folder"))
    return Path(os.fspath(path))


def _make_way(folder: Path, step: int) -> Path | None:
    """Move aside what would be newer than the step that is saved; return where it is."""
    if not folder.is_file() and not any(each >= step for each in steps_in(folder)):
        return None
    aside = folder.with_name(folder.name + _REPLACED)
    _remove(aside)
    os.rename(folder, aside)
    return aside


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load_checkpoint(
    path: str | os.PathLike[str],
    network: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    module: nn.Module,
    *,
    strict: bool,
) -> dict[str, Any]:
    """Load a checkpoint under any plan. All ranks must call this function.

    Args:
        path: Lightning's name of the checkpoint.
        network: The module that the plan was applied to.
        optimizers: Its optimizers; none to load the weights only.
        module: The LightningModule.
        strict: If False, names that only the state or only the network has are skipped.

    Returns:
        Values that Lightning saved beside weights and optimizers.

    Raises:
        StateError: It is no state, or not one of this network. Nothing has changed.
    """
    folder = find_saved(path)
    found = load(folder, network, _only(optimizers), strict=strict)
    if not isinstance(found.extra, dict) or "pytorch-lightning_version" not in found.extra:
        raise StateError(
            Problem(
                "this state was not saved by a Trainer",
                Origin(str(found.folder)),
                "load it with meshplan.load(path, trainer.strategy.network)",
            )
        )
    checkpoint = dict(found.extra)
    own = checkpoint.pop(_TENSORS)
    if own:
        module.load_state_dict(own, strict=False)
    return {**checkpoint, "state_dict": {}, "optimizer_states": []}


def find_saved(path: str | os.PathLike[str]) -> Path:
    """Return the folder in which a checkpoint is, also if it was being written anew in a crash.

    Raises:
        StateError: It is a single file.
    """
    folder = folder_of(path)
    if folder.is_file():
        raise StateError(
            Problem(
                "this checkpoint is a single file of Lightning, which has no state of meshplan",
                Origin(os.fspath(folder)),
                "load its weights before the Trainer starts: "
                "model.load_state_dict(torch.load(path, weights_only=True)['state_dict'])",
            )
        )
    aside = folder.with_name(folder.name + _REPLACED)
    return aside if not steps_in(folder) and steps_in(aside) else folder


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, on rank 0."""
    _remove(folder_of(path))
