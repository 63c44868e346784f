"""Folders of a Trainer: checkpoints that are written over others, as the Trainer does."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import nn

from meshplan.errors import StateError
from meshplan.runtime.state.pretrained import save_pretrained
from meshplan.runtime.train.fast_dev_run import num_dev_batches
from meshplan.runtime.watch.guard import come_together, guarded
from meshplan.state.folder import find_state

STATE: Final = "meshplan"
"""Folder of the training state in a checkpoint of the Trainer."""
_REPLACED: Final = "replaced-"
"""Beginning of the name of a checkpoint that is being written anew."""
_NEW: Final = "incomplete-weights"
"""Folder of weights that take the place of others once they are whole."""
_WEIGHTS: Final = "*.safetensors*"
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d+)")


def save_over(model: nn.Module, path: str) -> None:
    """Write the weights as a checkpoint of Hugging Face, in place of those in the folder.

    All ranks must call this function. Weights that are there stay until the new ones are whole.

    Args:
        model: The module that `parallelize` returned.
        path: The folder.
    """
    if num_dev_batches() is not None:
        save_pretrained(model, path)
        return
    with guarded("save_model"):
        folder = Path(path)
        new = folder / _NEW
        if dist.get_rank() == 0:
            shutil.rmtree(new, ignore_errors=True)
        come_together("save_model")
        save_pretrained(model, new)
        if dist.get_rank() == 0:
            _move_over(new, folder)
        come_together("save_model")


def _move_over(new: Path, folder: Path) -> None:
    files = [each.relative_to(new) for each in new.rglob("*") if each.is_file()]
    for parent in {each.parent for each in files if each.match(_WEIGHTS)}:
        for old in (folder / parent).glob(_WEIGHTS):
            if old.relative_to(folder) not in files:
                old.unlink()  # Weights before in more files, or in one.
    for each in files:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / each, folder / each)
    shutil.rmtree(new)


@contextmanager
def in_place_of(folder: str) -> Iterator[None]:
    """Write a checkpoint inside; one of the same name stays aside until the new one is whole.

    All ranks must call this function.
    """
    if num_dev_batches() is not None:
        yield
        return
    aside = Path(folder).with_name(_REPLACED + Path(folder).name)
    is_main = dist.get_rank() == 0
    come_together("save_checkpoint")
    if is_main and os.path.isdir(folder):
        if aside.is_dir() and not _is_whole(folder):
            shutil.rmtree(folder)  # Cut off when it was written; what it replaces is still aside.
        else:
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
    come_together("save_checkpoint")
    yield
    if is_main:
        shutil.rmtree(aside, ignore_errors=True)


def last_whole(path: str) -> str | None:
    """Return the newest checkpoint in a folder that was written to its end; None without one."""
    found = {}
    for name in os.listdir(path) if os.path.isdir(path) else ():
        if match := _CHECKPOINT.fullmatch(name):
            found[int(match[1])] = os.path.join(path, name)
    newest_first = (found[step] for step in sorted(found, reverse=True))
    return next((folder for folder in newest_first if _is_whole(folder)), None)


def _is_whole(folder: str) -> bool:
    try:
        json.loads(Path(folder, "trainer_state.json").read_text(encoding="utf-8"))
        find_state(Path(folder, STATE), None)
    except (OSError, ValueError, StateError):
        return False
    return True
