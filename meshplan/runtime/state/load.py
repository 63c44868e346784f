"""`load`: read a training state into a model, under any plan and on any number of ranks.

Everything is checked before the first tensor changes: names, shapes, and the digest of every file,
which the ranks share among them. Each rank then reads only the boxes that its shards consist of.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from meshplan.errors import Origin, Problem, StateError
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.state.agree import agree
from meshplan.runtime.state.background import finish_background, next_board
from meshplan.runtime.state.generators import restore_states, states_for
from meshplan.runtime.state.live import DTYPES, LiveState, LiveTensor
from meshplan.runtime.state.save import Stateful
from meshplan.runtime.train.dataloader import StatefulLoader
from meshplan.runtime.train.fast_dev_run import folder_to_read
from meshplan.runtime.watch.guard import come_together, guarded
from meshplan.shown import shown
from meshplan.state.folder import find_state
from meshplan.state.held import plain_name
from meshplan.state.manifest import Manifest, SavedTensor, changed_file
from meshplan.state.matching import listed, match, optimizer_states
from meshplan.state.reading import StateReader
from meshplan.state.safetensors import digest_of
from meshplan.state.values import from_json


@shown
@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state that was loaded: the result of `load`.

    Args:
        step: Number of optimizer steps after which the state was saved.
        extra: The value that was given to `save`.
        folder: The folder of the state.
        skipped: With `strict=False`, the names that only the state or only the model has.
    """

    step: int
    extra: Any
    folder: Path
    skipped: tuple[str, ...] = ()


@guarded("load")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    step: int | Literal["latest"] = "latest",
    strict: bool = True,
) -> LoadedState:
    """Load a state that `meshplan.save` wrote. All ranks must call this function.

    The plan and the number of ranks may be others than when the state was saved. Weights and the
    optimizer's states are then the same numbers, sharded anew. The random number generators of
    Python, NumPy and torch go on where they were; under another plan, those that were alike on all
    ranks.

    Args:
        path: The folder that was given to `save`.
        model: The module that `parallelize` returned.
        optimizer: Its optimizer, of the same kind as the saved one. If None, only the model is
            loaded.
        scheduler: The learning rate scheduler, or any object with `load_state_dict`.
        data: The loader, which goes on where it was when the state was saved.
        step: The step to load, or "latest": the newest state that is whole.
        strict: If False, names that only the state or only the model has are skipped, and returned.

    Returns:
        The step and the extra value, among others.

    Raises:
        MissingStateError: There is no whole state; this is a FileNotFoundError too.
        StateError: The state is damaged or is not of this model. Nothing has changed.
    """
    come_together("load")
    finish_background()
    board = next_board()
    live = LiveState(model)
    wanted = None if step == "latest" else step
    found: dict[str, Any] = {}

    def read() -> Any:
        if wanted is not None and (type(wanted) is not int or wanted < 0):
            raise StateError(Problem(f"step must be a whole number or 'latest', not {step!r}"))
        found["folder"], found["manifest"] = find_state(folder_to_read(path), wanted)
        return [found["manifest"].step, found["manifest"].digest]

    def compare(parts: list[Any]) -> None:
        rank = next((r for r, part in enumerate(parts) if part != parts[0]), None)
        if rank is not None:
            what = (
                f"rank {rank} finds the state of step {parts[rank][0]}, but rank 0 finds "
                f"{'another one' if parts[rank][0] == parts[0][0] else f'step {parts[0][0]}'}"
            )
            fix = "name a folder that all ranks share"
            raise StateError(Problem(what, Origin(os.fspath(path)), fix))

    agree(board, "read", read, compare)
    folder, manifest = found["folder"], found["manifest"]
    loading = Loading(live, manifest, folder, optimizer, strict=strict)

    def check() -> None:
        for name in sorted(manifest.files)[board.rank :: board.size]:
            if digest_of(folder / name) != manifest.files[name].xxh3:
                raise StateError(changed_file(folder / name))
        loading.check()
        for word, value in (("scheduler", scheduler), ("data", data)):
            if value is None:
                continue
            if manifest.values.get(word) is None:
                what = f"the state was saved without {word}="
                raise StateError(Problem(what, Origin(str(folder)), f"load it without {word}="))
            if not hasattr(value, "load_state_dict"):
                what = f"{word}={value!r} has no load_state_dict"
                raise StateError(Problem(what, fix="pass the object that was given to save"))
        found["values"] = loading.values()
        is_same = (manifest.plan, manifest.world_size) == (live.plan.digest(), board.size)
        saved = manifest.values.get("random", {})  # States of earlier versions have none.
        found["random"] = states_for(saved, board.rank, same_plan=is_same)
        if isinstance(data, StatefulLoader):
            data.check_state(found["values"]["data"])

    agree(board, "check", check)
    agree(board, "load", loading.load)
    values = found["values"]
    live.set_progress(values["progress"])
    live.set_extra_states(values["modules"])
    if scheduler is not None:
        scheduler.load_state_dict(values["scheduler"])
    if data is not None:
        data.load_state_dict(values["data"])
    restore_states(found["random"])
    loading.warn()
    return LoadedState(manifest.step, values["extra"], folder, tuple(loading.skipped))


class Loading:
    """One state that is being loaded into one model.

    Args:
        live: The model on this rank.
        manifest: The state's manifest.
        folder: The state's folder.
        optimizer: The optimizer, if it is loaded.
        strict: If False, skip the names that only the state or only the model has.
        wanted: Names of the model that the state must have; None for all of them.

    Attributes:
        skipped: The names that were skipped.
    """

    def __init__(
        self,
        live: LiveState,
        manifest: Manifest,
        folder: Path,
        optimizer: torch.optim.Optimizer | None,
        *,
        strict: bool,
        wanted: Container[str] | None = None,
    ) -> None:
        self._live, self._folder = live, folder
        self._optimizer, self._strict = optimizer, strict
        self._matching = match(manifest, live.plan)
        if wanted is not None:
            missing = tuple(name for name in self._matching.missing if name in wanted)
            self._matching = replace(self._matching, missing=missing)
        self._manifest = self._matching.manifest
        self._reader = StateReader(folder, self._manifest)
        self._states = optimizer_states(self._manifest)
        self._cast: set[tuple[str, str]] = set()
        self.skipped = [*self._matching.missing, *self._matching.unexpected]

    def check(self) -> None:
        """Compare the names and shapes of the state with those of the whole model.

        Raises:
            StateError: They are not those of this model.
        """
        found = self._matching.problems(strict=self._strict)
        problems = [replace(each, origin=Origin(str(self._folder))) for each in found]
        problems += self._optimizer_problems()
        if problems:
            raise StateError(problems)

    def _optimizer_problems(self) -> Iterator[Problem]:
        """Yield the problems of loading the optimizer."""
        if self._optimizer is None:
            return
        origin = Origin(str(self._folder))
        saved = self._manifest.values.get("optimizer")
        if saved is None:
            fix = "load it without an optimizer"
            yield Problem("the state was saved without an optimizer", origin, fix)
            return
        kind = type(self._optimizer).__name__
        if saved["type"] != kind:
            what = f"the state is of the optimizer {saved['type']}, not {kind}"
            yield Problem(what, origin, f"make a {saved['type']}, or load without an optimizer")
            return
        own = [self._names_of(group) for group in self._optimizer.param_groups]
        groups = [group["params"] for group in saved["groups"]]
        if len(own) != len(groups):
            what = f"the state has {len(groups)} parameter groups of the optimizer, not {len(own)}"
            yield Problem(what, origin, "make the optimizer with the same groups")
            return
        home = {name: number for number, names in enumerate(groups) for name in names}
        moved = [
            name
            for number, names in enumerate(own)
            for name in names
            if home.get(name, number) != number
        ]
        if moved:
            what = f"the optimizer has parameters in other groups than the state: {listed(moved)}"
            yield Problem(what, origin, "make the optimizer with the same groups")

    def _names_of(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of the parameters of one of the optimizer's groups."""
        return [plain_name(self._live.fqn_of(parameter)) for parameter in group["params"]]

    def load(self) -> None:
        """Copy the tensors of the state into those of this rank."""
        with torch.no_grad():
            for fqn, tensor in self._live.tensors.items():
                saved = self._matching.found.get(fqn)
                if saved is None:
                    continue
                first, *others = self._live.copies(fqn)
                self._fill(tensor, saved, local_of(first.detach()))
                for other in others:
                    local_of(other.detach()).copy_(local_of(first.detach()))
        if self._optimizer is not None:
            self._load_optimizer(self._optimizer)

    def _fill(self, tensor: LiveTensor, saved: SavedTensor, into: torch.Tensor) -> None:
        """Copy this rank's shard of a saved tensor into a local tensor."""
        dtype = DTYPES[saved.dtype]
        is_direct = into.dtype == dtype and into.device.type == "cpu" and into.is_contiguous()
        part = into if is_direct else torch.empty(into.shape, dtype=dtype)
        data = part.reshape(-1).view(torch.uint8).numpy()
        for box in tensor.boxes:
            self._reader.read(saved, box, data, tuple(part.shape))
        if not is_direct:
            if into.dtype != dtype:
                self._cast.add((saved.dtype, str(into.dtype).removeprefix("torch.")))
            into.copy_(part)

    def _load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        saved = self._manifest.values["optimizer"]
        for group, form in zip(optimizer.param_groups, saved["groups"], strict=True):
            for key, value in from_json(form["options"]).items():
                now = group.get(key)
                if isinstance(now, torch.Tensor):
                    now.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(now, tuple) else value
        for group in optimizer.param_groups:
            is_on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                fqn = self._live.fqn_of(parameter)
                name = plain_name(fqn)
                states = optimizer.state[parameter]
                states.clear()
                states.update(from_json(saved["plain"].get(name, {})))
                for word, tensor in self._states.get(name, {}).items():
                    states[word] = self._state(
                        fqn, word, tensor, parameter, is_on_device=is_on_device
                    )
                if not states:
                    del optimizer.state[parameter]

    def _state(
        self,
        fqn: str,
        word: str,
        saved: SavedTensor,
        parameter: torch.Tensor,
        *,
        is_on_device: bool,
    ) -> torch.Tensor:
        """Return one state of a parameter, as a new tensor."""
        dtype = DTYPES[saved.dtype]
        if not saved.shape:
            # torch keeps counters on the host, unless they are read by kernels.
            where = parameter.device if is_on_device else torch.device("cpu")
            value = torch.empty((), dtype=dtype, device=where)
        elif saved.shape == tuple(parameter.shape):
            value = torch.empty_like(parameter, dtype=dtype)
        else:
            value = parameter.detach().new_empty(saved.shape, dtype=dtype)
        self._fill(self._live.state_of(fqn, word, value), saved, local_of(value))
        return value

    def values(self) -> dict[str, Any]:
        """Return everything in the state that is no tensor of the model or its optimizer."""

        def tensor(key: str) -> torch.Tensor:
            saved = self._manifest.tensors[key]
            value = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
            self._reader.read_whole(saved, value.reshape(-1).view(torch.uint8).numpy())
            return value

        values = self._manifest.values
        others = values.keys() - {"optimizer", "random"}
        return {key: from_json(values[key], tensor) for key in others}

    def warn(self) -> None:
        """Warn of what was cast or skipped, at the caller's line of a guarded function."""
        notes = list(self._matching.notes())
        notes += [
            f"the state's {saved} tensors were cast to {own}, in which this plan keeps them"
            for saved, own in sorted(self._cast)
        ]
        if self.skipped:
            notes.append(f"{len(self.skipped)} tensors were skipped: {listed(self.skipped)}")
        for note in notes:
            warnings.warn(note, stacklevel=4)
