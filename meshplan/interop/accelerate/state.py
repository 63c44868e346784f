"""`planned_state`: `Accelerator.save_state` and `load_state` with the training state of meshplan.

accelerate saves what its `prepare` was given: each rank's shards of the model, and the optimizer
of the main process alone. A parallelized model is therefore not prepared. Hooks write and read one
state of meshplan in its place, which loads under any plan.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import ApplyError, Origin, Problem
from meshplan.interop.second_strategy import NO_STRATEGY, STRATEGIES, strategy_problems
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.state.load import load
from meshplan.runtime.state.save import Stateful, save
from meshplan.runtime.watch.guard import guarded
from meshplan.state.folder import steps_in

_STATE: Final = "meshplan"
"""Folder of the training state in a folder of `Accelerator.save_state`."""
_STEPS: Final = "scheduler_steps"
"""Key of `PlannedState.scheduler_steps` in a state."""


@guarded("planned_state")
def planned_state(
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
) -> None:
    """Let an Accelerator save and load the training state of a parallelized model.

    `accelerator.save_state(folder)` then also writes `folder/meshplan`, and
    `accelerator.load_state(folder)` reads it, under any plan and on any number of ranks. The random
    number generators go on as `meshplan.load` says, not from accelerate's files of single ranks.

    Args:
        accelerator: The Accelerator, with `mixed_precision="no"`, and without plugins of FSDP,
            DeepSpeed or Megatron-LM, in whose place the plan stands.
        model: The module that `parallelize` returned. It is not passed to `prepare`.
        optimizer: Its optimizer, which is not passed to `prepare` either.
        scheduler: A learning rate scheduler.
        data: The loader, such as that of `meshplan.dataloader`.

    Raises:
        ApplyError: The Accelerator would change what the plan decides, was given this model or
            optimizer, or has another planned state.
    """
    applied(model)  # It was parallelized.
    if problems := _problems(accelerator, model, optimizer):
        raise ApplyError(problems)
    PlannedState(model, optimizer, scheduler, data).register(accelerator)


class PlannedState:
    """The hooks of one Accelerator; its last, of an object with a state dict, loads.

    Args:
        model: The module that `parallelize` returned.
        optimizer: Its optimizer.
        scheduler: A learning rate scheduler that accelerate does not save itself.
        data: A loader that accelerate does not save itself.

    Attributes:
        scheduler_steps: Steps that each scheduler which accelerate saves itself takes in a step of
            the optimizer; None without such a scheduler.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Stateful | None = None,
        data: Stateful | None = None,
    ) -> None:
        self._model, self.optimizer = model, optimizer
        self._scheduler, self._data = scheduler, data
        self.scheduler_steps: int | None = None
        self._source = ""
        self._hooks: list[Any] = []

    def register(self, accelerator: Any) -> None:
        """Let the Accelerator call the hooks."""
        self._hooks = [
            accelerator.register_save_state_pre_hook(self.save),
            accelerator.register_load_state_pre_hook(self.find),
        ]
        accelerator.register_for_checkpointing(self)

    def remove(self, accelerator: Any) -> None:
        """Let the Accelerator forget the hooks."""
        for hook in self._hooks:
            hook.remove()
        others = [each for each in accelerator._custom_objects if each is not self]
        accelerator._custom_objects = others

    def save(self, models: Any, weights: Any, folder: str) -> None:
        """Write the state; accelerate calls this on every rank before it writes its own files."""
        path = os.path.join(folder, _STATE)
        # keep=1 keeps only the state of the highest step, so count on from any state that is there.
        step = max(steps_in(Path(path)), default=0) + 1
        save(
            path, self._model, self.optimizer, step=step, scheduler=self._scheduler,
            data=self._data, keep=1, extra={_STEPS: self.scheduler_steps},
        )  # fmt: skip

    def find(self, models: Any, folder: str) -> None:
        """Remember the folder, which accelerate tells to this hook alone."""
        if not os.path.isdir(os.path.join(folder, _STATE)):
            what = "this folder has no training state of meshplan"
            fix = "call planned_state before accelerator.save_state"
            raise ApplyError(Problem(what, Origin(folder), fix))
        self._source = os.path.join(folder, _STATE)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state is in files of its own."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Load the state, after accelerate has loaded the generators of this rank's number.

        Raises:
            ApplyError: The schedulers of the state count steps in another way.
        """
        found = load(
            self._source, self._model, self.optimizer, scheduler=self._scheduler, data=self._data
        )
        saved = (found.extra or {}).get(_STEPS)
        if None not in (saved, self.scheduler_steps) and saved != self.scheduler_steps:
            what = f"the schedulers of this state take {saved} steps in each step of the "
            what += f"optimizer, one for each data rank, but {self.scheduler_steps} under this plan"
            fix = "use split_batches=True with the batch size of all ranks together, where "
            fix += "schedulers take one step"
            raise ApplyError(Problem(what, Origin(self._source), fix))


def setting_problems(accelerator: Any) -> list[Problem]:
    """Return the settings of an Accelerator that contradict any plan."""
    problems = []
    if accelerator.mixed_precision != "no":
        what = f"the Accelerator has mixed_precision={accelerator.mixed_precision!r}, but the plan "
        what += "decides the precision"
        problems.append(Problem(what, fix='say Accelerator(mixed_precision="no"), and precision: '
                                          "bf16-mixed in the plan"))  # fmt: skip
    kind = accelerator.distributed_type.name
    if from_environment := strategy_problems({}):
        problems += from_environment
    elif kind in STRATEGIES:
        what = f"the Accelerator runs {kind}, but the plan states how the model is sharded"
        problems.append(Problem(what, fix=NO_STRATEGY))
    return problems


def _problems(accelerator: Any, model: nn.Module, optimizer: Any) -> list[Problem]:
    """Return why an Accelerator and a plan do not go together."""
    problems = setting_problems(accelerator)
    fix = "pass model, optimizer, scheduler and loader to planned_state, and prepare none of them"
    prepared = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
    for name, value, known in (
        ("model", model, [part for each in accelerator._models for part in each.modules()]),
        ("optimizer", optimizer, prepared),
    ):
        if value is not None and any(each is value for each in known):
            what = f"the {name} was passed to accelerator.prepare, which would save it by itself"
            problems.append(Problem(what, fix=fix))
    if applied(model).plan.num_data_ranks < applied(model).plan.mesh.world_size:
        # accelerate takes every rank for a data rank.
        for name, each in (
            ("loader", accelerator._dataloaders), ("scheduler", accelerator._schedulers),
        ):  # fmt: skip
            if each:
                what = f"a {name} was passed to accelerator.prepare, which treats every rank as a "
                what += "data rank, but under this plan some ranks share the same samples"
                problems.append(Problem(what, fix=fix))
    if any(isinstance(each, PlannedState) for each in accelerator._custom_objects):
        what = "this Accelerator has a planned state already"
        problems.append(Problem(what, fix="make another Accelerator, or one model of both parts"))
    return problems
