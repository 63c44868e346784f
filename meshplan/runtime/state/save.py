"""`save`: write the training state of all ranks into one folder, or nothing.

Each rank writes the shards that only it has; ranks with equal copies share the work. Rank 0 then
writes the manifest and gives the folder its name. With `asynchronous`, the shards are copied to
host memory first, and a thread does the rest while the model trains on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.errors import Origin, Problem, StateError
from meshplan.runtime.comparisons.drift import check_drift
from meshplan.runtime.state.agree import agree, agree_on_folder
from meshplan.runtime.state.background import finish_background, in_background, next_board
from meshplan.runtime.state.generators import merge_states, take_states
from meshplan.runtime.state.live import (
    LiveState,
    LiveTensor,
    box_bytes,
    whole_tensor,
)
from meshplan.runtime.train.fast_dev_run import num_dev_batches
from meshplan.runtime.watch.board import Board
from meshplan.runtime.watch.guard import come_together, guarded
from meshplan.state.boxes import TensorBox
from meshplan.state.folder import (
    abandon_folder,
    begin_folder,
    finish_folder,
    folder_of,
    incomplete,
    remove_old,
)
from meshplan.state.held import plain_name, written_by
from meshplan.state.manifest import Manifest, SavedFile, SavedPiece, SavedTensor
from meshplan.state.safetensors import Bytes, TensorEntry, write
from meshplan.state.values import to_json
from meshplan.version import __version__


class Stateful(Protocol):
    """An object whose state is part of a training state: a scheduler, the position in the data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@guarded("save")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    extra: Any = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Path:
    """Save the training state as `path/step-00000010`. All ranks must call this function.

    The state can be loaded under any other plan, on any number of ranks. It appears as a whole or
    not at all, whatever happens meanwhile, and states that exist are not changed.

    Args:
        path: A folder that all ranks share. It is made if it does not exist.
        model: The module that `parallelize` returned.
        optimizer: Its optimizer.
        step: Number of optimizer steps taken so far. A step can be saved once only.
        scheduler: A learning rate scheduler, or any object with `state_dict` and `load_state_dict`.
        data: A loader whose position in the data is saved: any object with `state_dict` and
            `load_state_dict` whose state is equal on all ranks.
        extra: Numbers, strings, tensors, and lists and mappings of them; rank 0's is saved.
        keep: If given, only the newest `keep` states are kept. Older ones are removed after this
            one is whole.
        asynchronous: If True, return as soon as the tensors are copied to host memory. At most one
            state is written at a time: the next call of `save` or `load` waits for it, and raises
            its error if it could not be written.

    Returns:
        The folder of the state. With `asynchronous` it may not exist yet.

    Raises:
        StateError: The state cannot be written, and nothing has changed. Or it is written, but
            older ones cannot be removed.
        ApplyError: Copies of a parameter on several ranks are no longer equal.
    """
    come_together("save")
    finish_background()
    state = LiveState(model)
    if state.applied.is_averaged:
        what = "the model has its averaged weights, from which a training cannot go on"
        fix = "end the block `with ema.averaged()`, or write them with meshplan.save_pretrained"
        raise StateError(Problem(what, fix=fix))
    check_drift(model, state.plan, state.applied.mesh)
    board = next_board()
    task = _Save(agree_on_folder(board, path), step, keep, state, board)
    if num_dev_batches() is not None and (saved := folder_of(task.path, step)).exists():
        return saved  # Later epochs of a fast development run take no steps.
    objects = {"scheduler": scheduler, "data": data, "extra": extra}

    def prepare() -> Any:
        for name, number, least in (("step", step, 0), ("keep", keep, 1)):
            if number is not None and (type(number) is not int or number < least):
                what = f"{name} must be a whole number of at least {least}, not {number!r}"
                raise StateError(Problem(what))
        task.collect(optimizer, objects, copied=asynchronous)
        return [str(task.path), step, task.own_values]

    agree(task.board, "begin", prepare, task.begin)
    if asynchronous:
        in_background(task.write_all)
    else:
        task.write_all()
    return folder_of(task.path, step)


@dataclass(slots=True)
class _Save:
    """One state that is being saved.

    Attributes:
        path: The folder of all states.
        step: The step that is saved.
        keep: Number of states to keep; None keeps all.
        state: The model on this rank.
        board: The messages between the ranks.
        tensors: The tensors whose shards this rank writes.
        own_values: What this rank tells rank 0: of its optimizer, its position in the data and its
            random number generators.
        values: On rank 0, everything in the state that is no tensor of the model or optimizer.
    """

    path: Path
    step: int
    keep: int | None
    state: LiveState
    board: Board
    tensors: list[LiveTensor] = field(default_factory=list)
    own_values: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def collect(
        self,
        optimizer: torch.optim.Optimizer | None,
        objects: dict[str, Any],
        *,
        copied: bool,
    ) -> None:
        """Find everything that this rank contributes.

        Args:
            optimizer: The optimizer, if it is saved.
            objects: The scheduler, the data and the extra value, by name; each may be None.
            copied: If True, copy the shards to host memory, where training does not change them.
        """
        found = list(self.state.tensors.values())
        own: list[LiveTensor] = []

        def keep(value: Any, name: str) -> str | None:
            if not isinstance(value, torch.Tensor):
                return None
            if isinstance(value, DTensor):
                what = f"{name} is a tensor that is sharded over the ranks"
                raise StateError(Problem(what, fix="save what every rank has: .full_tensor()"))
            own.append(whole_tensor(f"values/{len(own)}", value))
            return own[-1].name

        values: dict[str, Any] = {}
        for name, value in objects.items():
            if name != "extra" and value is not None:
                if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                    what = f"{name} is a {type(value).__name__}, which has no state_dict to save"
                    raise StateError(Problem(what, fix="give it state_dict and load_state_dict"))
                value = value.state_dict()
            values[name] = to_json(value, name, keep)
        groups = None
        if optimizer is not None:
            groups = _optimizer_values(self.state, optimizer, found)
        modules = {
            name: to_json(value, f"the extra state of {name}")
            for name, value in self.state.extra_states()
        }
        self.own_values = {
            "optimizer": groups,
            "data": values["data"],
            "modules": modules,
            "random": take_states(),
        }
        is_first = dist.get_rank() == 0
        self.tensors = written_by(dist.get_rank(), found, self.state.plan.mesh)
        if is_first:
            self.values = values | {"progress": self.state.progress()}
            self.tensors += own
        if copied:
            self.tensors = [
                replace(each, local=each.local.to("cpu", copy=True)) for each in self.tensors
            ]

    def begin(self, parts: list[Any]) -> None:
        """On rank 0, check that all ranks save the same state, and make its folder.

        Args:
            parts: (Path, step, own values) of every rank.
        """
        for rank, (path, step, values) in enumerate(parts):
            if [path, step] != parts[0][:2]:
                what = f"rank {rank} saves step {step} into {path}, but rank 0 saves step "
                raise StateError(Problem(f"{what}{parts[0][1]} into {parts[0][0]}"))
            if (values["optimizer"] is None) != (parts[0][2]["optimizer"] is None):
                ranks = (rank, 0) if values["optimizer"] is None else (0, rank)
                what = "rank {} saves without an optimizer, but rank {} with one".format(*ranks)
                raise StateError(Problem(what, fix="pass the optimizer on every rank, or on none"))
            if values["data"] != parts[0][2]["data"]:
                raise StateError(
                    Problem(
                        f"the state of data on rank {rank} is not that of rank 0",
                        fix="pass a loader whose position does not depend on the rank",
                    )
                )
        self.values["optimizer"] = _merged([values["optimizer"] for _, _, values in parts])
        self.values["random"] = merge_states([values["random"] for _, _, values in parts])
        self.values["modules"] = {}
        for _, _, values in reversed(parts):  # The first rank's value counts.
            self.values["modules"] |= values["modules"]
        begin_folder(self.path, self.step)

    def write_all(self) -> None:
        """Write the files and the manifest. Either all ranks return, or all raise the same error.

        Raises:
            StateError: A rank could not write.
        """
        try:
            agree(self.board, "write", self._write, self._finish)
        except StateError:
            if self.board.rank == 0:
                abandon_folder(incomplete(self.path, self.step))
            raise

    def _write(self) -> Any:
        """Write this rank's file; return its name, its size, its digest and its tensors.

        The name is None if this rank has no elements to write.
        """
        entries: dict[str, TensorEntry] = {}
        content: dict[str, Callable[[], Bytes]] = {}
        tensors = []
        for each in self.tensors:
            pieces = []
            for key, box in each.pieces():
                entries[key] = TensorEntry(each.dtype, box.box.shape)
                content[key] = partial(box_bytes, each, box)
                pieces.append([key, box.box.start, box.box.shape])
            tensors.append([each.name, each.dtype, each.shape, each.aliases, pieces])
        if not entries:
            return [None, 0, "", tensors]
        name = f"rank-{self.board.rank:05d}.safetensors"
        folder = incomplete(self.path, self.step)
        size, xxh3 = write(folder / name, entries, lambda key: (content[key](),))
        return [name, size, xxh3, tensors]

    def _finish(self, parts: list[Any]) -> None:
        """On rank 0, write the manifest, give the folder its name and remove old states."""
        files: dict[str, SavedFile] = {}
        found: dict[str, SavedTensor] = {}
        for name, size, xxh3, tensors in parts:
            if name is not None:
                files[name] = SavedFile(size, xxh3)
            for key, dtype, shape, aliases, pieces in tensors:
                before = found[key].pieces if key in found else ()
                own = (
                    SavedPiece(name, piece, TensorBox(tuple(start), tuple(sizes)))
                    for piece, start, sizes in pieces
                )
                found[key] = SavedTensor(dtype, tuple(shape), (*before, *own), tuple(aliases))
        plan = self.state.plan
        manifest = Manifest(
            step=self.step,
            world_size=self.board.size,
            mesh=plan.mesh.sizes,
            plan=plan.digest(),
            lock=plan.spec.lock,
            versions={"meshplan": __version__, "torch": torch.__version__},
            files=files,
            tensors=found,
            values=self.values,
        )
        finish_folder(incomplete(self.path, self.step), manifest)
        if self.keep is not None:
            self._remove_old(self.keep)

    def _remove_old(self, keep: int) -> None:
        try:
            remove_old(self.path, keep)
        except OSError as error:
            what = (
                f"step {self.step} is saved, but older states cannot be removed: "
                f"{error.strerror or error}"
            )
            place = Origin(str(error.filename or self.path))
            raise StateError(Problem(what, place, "remove them, or save without keep=")) from None


def _optimizer_values(
    state: LiveState, optimizer: torch.optim.Optimizer, tensors: list[LiveTensor]
) -> dict[str, Any]:
    """Return an optimizer's options and plain states as JSON, by the names of its parameters.

    Args:
        state: The model on this rank.
        optimizer: The optimizer.
        tensors: The states that are tensors are appended to this list.
    """
    groups, plain = [], {}
    for number, group in enumerate(optimizer.param_groups):
        names: dict[str, None] = {}
        for parameter in group["params"]:
            fqn = state.fqn_of(parameter)
            name = plain_name(fqn)
            names[name] = None
            if parameter is not state.copies(fqn)[0]:
                continue  # Several stages of this rank have copies, with equal states.
            others = {}
            for word, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors.append(state.state_of(fqn, word, value))
                else:
                    others[word] = to_json(value, f"{word} of {name}")
            if others:
                plain[name] = others
        options = {key: value for key, value in group.items() if key != "params"}
        form = to_json(options, f"optimizer.param_groups[{number}]")
        groups.append({"options": form, "params": list(names)})
    return {"type": type(optimizer).__name__, "groups": groups, "plain": plain}


def _merged(parts: list[Any]) -> Any:
    """Return the optimizer's values of all ranks as one: pipeline stages have other parameters.

    Raises:
        StateError: The ranks have different options.
    """
    if parts[0] is None:
        return None
    groups = [dict(group, params=dict.fromkeys(group["params"])) for group in parts[0]["groups"]]
    plain: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        if len(part["groups"]) != len(groups):
            what = (
                f"the optimizers of rank {rank} and rank 0 have not equally many parameter groups"
            )
            raise StateError(Problem(what, fix="make it alike on all ranks"))
        for number, (group, own) in enumerate(zip(groups, part["groups"], strict=True)):
            if own["options"] != group["options"]:
                what = f"the options of the optimizer's group {number} on rank {rank} are not those"
                raise StateError(Problem(f"{what} of rank 0", fix="make them alike on all ranks"))
            group["params"].update(dict.fromkeys(own["params"]))
        plain |= part["plain"]
    groups = [dict(group, params=list(group["params"])) for group in groups]
    return {"type": parts[0]["type"], "groups": groups, "plain": plain}
