"""`Run`: what the steps of a training took, while it trains and in one file at its end."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, MeshplanError, Problem
from meshplan.files import write_bytes
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.mesh import device
from meshplan.runtime.base.optimizer_steps import is_due
from meshplan.runtime.trace.collectives import counting
from meshplan.runtime.train.callbacks import Callback, StepRecord, callbacks_of, is_service
from meshplan.runtime.train.clock import COMMUNICATION, NAMES, StepClock
from meshplan.runtime.train.fast_dev_run import num_dev_batches, own_folder
from meshplan.runtime.train.process import is_main
from meshplan.runtime.train.profiler import ModuleTimes, StepFlops, counting_flops
from meshplan.runtime.watch.guard import guarded
from meshplan.traffic import Route, forecast
from meshplan.version import __version__

_Step = TypeVar("_Step", bound=Callable[..., float])

RUN_FILE: Final = "run.json"
WARM_UP: Final = 10
"""First steps that the medians leave out: torch makes its buffers and meshplan compares more."""

_runs: WeakKeyDictionary[nn.Module, Run] = WeakKeyDictionary()
"""The open run of a model."""


class Run:
    """Records the training steps of a model: `metrics.csv` while it trains, `run.json` at the end.

    All ranks make one, around the loop. Each `train_step` of the model becomes a `StepRecord`, for
    which rank 0 calls the callbacks. At the end, all ranks give their peaks of memory, and rank 0
    writes run.json, which `meshplan compare` holds against what a plan predicts.

    Args:
        folder: Folder for the files, which is made if it does not exist.
        model: The module that `parallelize` returned.
        callbacks: Names of writers ("csv", "tensorboard", "wandb") and `Callback` objects.
        step: Steps that were taken before, as `meshplan.load` returns them in `.step`.
        profile_step: In which step of this run, from 1, the forward of each module is timed; None
            for no step. In a step that `train_step` makes checks in, it waits for the next one.

    Raises:
        ApplyError: The model has an open run, there is no such writer, its package is missing, or
            `profile_step` is less than 1.

    Example:
        >>> with meshplan.Run("runs/first", model) as run:
        ...     for inputs, targets in loader:
        ...         meshplan.train_step(model, optimizer, inputs, targets, loss_fn)
        ...         run.log(lr=scheduler.get_last_lr()[0])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        *,
        callbacks: Sequence[str | Callback] = ("csv",),
        step: int = 0,
        profile_step: int | None = WARM_UP + 1,
    ) -> None:
        state = applied(model)
        if profile_step is not None and profile_step < 1:
            what = f"profile_step is {profile_step}, but the first step of a run is 1"
            raise ApplyError(Problem(what, fix="use 1 or more, or None to time no modules"))
        if model in _runs:
            what = f"the model is recorded in {_runs[model].folder} already"
            raise ApplyError(Problem(what, fix="close that run first"))
        self.folder: Path = own_folder(folder) if is_main() else Path(folder)
        self.step = step
        self._model, self._plan = model, state.given
        self._callbacks = callbacks_of(callbacks)
        if num_dev_batches() is not None:
            self._callbacks = [each for each in self._callbacks if not is_service(each)]
        self._first = step + 1
        self._last: StepRecord | None = None
        self._loss: float | None = None
        self._timings = array("d")
        """Seconds of each step, and of its phases by `NAMES`."""
        self._profile_step = profile_step
        self._routes: Mapping[Route, int] | None = None
        self._flops: StepFlops | None = None
        self._modules: list[dict[str, Any]] | None = None
        self._watched: set[int] = set()
        """Steps that took longer because something was counted or timed in them."""
        self._accumulates = array("q")
        """Parts that the samples of a rank were cut into, of each step."""
        self._counted: int | None = None
        """Number of parts in the step whose FLOPs and collectives were counted; None before it."""
        with guarded("Run"):
            if is_main():
                self.folder.mkdir(parents=True, exist_ok=True)
                for callback in self._callbacks:
                    callback.on_start(self.folder, self._first)
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # Peaks of an earlier run are not of this one.
        _runs[model] = self
        self._clock = StepClock(model)
        self._clock.restart()

    def log(self, **values: float) -> None:
        """Add numbers to the record of the step that was taken last.

        Raises:
            ApplyError: No step was taken yet, or a value is not a number.
        """
        if self._last is None:
            raise ApplyError(
                Problem("log was called before the first step", fix="call it after train_step")
            )
        last, numbers = self._last, dict(self._last.values)
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if not isinstance(value, Real):
                raise ApplyError(Problem(f"{name} is not a number: {value!r}"))
            numbers[name] = value if isinstance(value, int) else float(value)
        self._last = StepRecord(last.step, last.loss, last.seconds, last.phases, numbers)

    def _record(self, take_step: Callable[[], float]) -> float:
        """Take a training step, and keep its record until the next one."""
        self._emit()  # Before the step, so that what writers take counts as "data".
        with self._clock.taking_step(), self._watching():
            loss = take_step()
        self.step += 1
        self._accumulates.append(applied(self._model).plan.accumulate)
        seconds, phases = self._clock.read()
        self._last, self._loss = StepRecord(self.step, loss, seconds, phases), loss
        return loss

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Count collectives and FLOPs of one step, and time the modules of another one.

        Both are steps in which `train_step` compares no ranks. The first is the third step at the
        earliest, when FSDP2 has seen the order of its units. What is compiled shows neither.
        """
        number = self.step + 2 - self._first
        is_checked = is_due(applied(self._model).history.steps + 1)
        if is_checked or self._plan.assignment.compiled:
            yield
        elif self._routes is None and number >= 2:
            self._watched.add(self.step + 1)
            # Modes are active in one thread only, and backward has its own on an accelerator.
            with (
                torch.autograd.set_multithreading_enabled(False),
                counting(self._plan.mesh) as found,
                counting_flops() as flops,
            ):
                yield
            self._routes, self._flops = found, flops
            self._counted = applied(self._model).plan.accumulate
        elif (
            self._modules is None
            and number >= (self._profile_step or math.inf)
            and self._counted in (None, applied(self._model).plan.accumulate)
        ):
            self._watched.add(self.step + 1)
            times = ModuleTimes(self._clock.now, self._clock.seconds)
            with times.timing(self._model):
                yield
            self._modules = times.slowest()
        else:
            yield

    def _emit(self, failure: str = "") -> None:
        if self._last is not None:
            last, self._last = self._last, None
            self._timings.extend((last.seconds, *(last.phases[name] for name in NAMES)))
            if is_main():
                # The other ranks do not wait for one whose callback fails. After a failure, a guard
                # would raise it again.
                with nullcontext() if failure else guarded():
                    for callback in self._callbacks:
                        callback.on_step(last)

    def close(self) -> Mapping[str, Any]:
        """End the run and return the content of run.json. All ranks call it."""
        return self._close("")

    def _close(self, failure: str) -> Mapping[str, Any]:
        if _runs.get(self._model) is not self:
            raise ApplyError(Problem(f"the run in {self.folder} was closed already"))
        del _runs[self._model]
        self._clock.close()
        self._emit(failure)
        summary = self._summary(failure)
        if is_main():
            write_summary(self.folder / RUN_FILE, summary)
            for callback in self._callbacks:
                callback.on_end(summary)
        return summary

    def _summary(self, failure: str) -> dict[str, Any]:
        from meshplan.planner.answers.measured import FORMAT  # slow to import

        every_step = np.frombuffer(self._timings).reshape(-1, 1 + len(NAMES))
        num = len(every_step)
        accumulate = self._counted or (self._accumulates[-1] if num else None)
        alike = [i for i in range(num) if self._accumulates[i] == accumulate]
        unwatched = [i for i in alike if self._first + i not in self._watched]
        # The first steps are slower; they count if there are no others.
        settled = ([i for i in unwatched if i >= first] for first in (WARM_UP, 1, 0))
        timed = every_step[next(filter(None, settled), alike)]
        medians = np.median(timed, axis=0).tolist() if num else []
        flops = self._flops
        phases = dict(zip(NAMES, medians[1:], strict=False))
        own = *_peaks(), phases.get(COMMUNICATION)
        every: list[Any] = [own] * dist.get_world_size()
        if not failure:  # After a failure, other ranks may be gone.
            with guarded("Run.close"):
                dist.all_gather_object(every, own)
        return {
            "format": FORMAT,
            "meshplan": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _device_name(),
            "plan": self._plan.digest(),
            "ranks": dist.get_world_size(),
            "failure": failure,
            "steps": {"first": self._first, "last": self.step, "timed": len(timed)},
            "accumulate": accumulate,
            "loss": self._loss,
            "step_s": medians[0] if medians else None,
            "phases_s": phases,
            "communication_s": [waited for *_, waited in every] if not failure else [],
            "collectives": _listed((self._routes or {}).items()),
            "flops": flops.model_flops if flops is not None else None,
            "recomputed_flops": flops.recomputed_flops if flops is not None else None,
            "modules": self._modules,
            "predicted": _predicted(self._plan) if is_main() else {},
            "peak_bytes": [peak for peak, *_ in every] if not failure else [],
            "reserved_bytes": [reserved for _, reserved, _ in every] if not failure else [],
        }

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _runs.get(self._model) is self:  # `close` was not called inside of the block.
            self._close("" if kind is None else f"{kind.__name__}: {error}")


def _listed(counts: Iterable[tuple[Route, int]]) -> list[dict[str, Any]]:
    return [
        {"kind": route.kind, "axes": list(route.axes), "count": count,
         "bytes": count * route.num_bytes}
        for route, count in counts
    ]  # fmt: skip


def _predicted(plan: Plan) -> dict[str, Any]:
    """Return what is predicted without a search or a trace, else None.

    Seconds and the highest peak are those of the lock beside the plan file; collectives follow from
    the layouts, unless activations are sent too.
    """
    figures: dict[str, float] = {}
    if os.path.isfile(plan.spec.source):
        from meshplan.planner.answers.lock_words import figures_of_lock  # slow to import

        with suppress(MeshplanError):  # A lock of something else predicts nothing.
            figures = figures_of_lock(plan.spec.source, plan)
    sent = forecast(plan)
    return {
        "step_s": figures.get("step_s"),
        "peak_bytes": figures.get("peak_bytes"),
        "collectives": None
        if sent.unknown
        else _listed((each.route, each.count) for each in sent.traffic),
    }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a run.json."""
    write_bytes(path, (json.dumps(summary, indent=2) + "\n").encode(), "the run")


def recorded(train_step: _Step) -> _Step:
    """Let the open run of a model, if any, record each call of `train_step`."""

    @functools.wraps(train_step)
    def taken(model: nn.Module, *args: Any, **kwargs: Any) -> float:
        run = _runs.get(model) if isinstance(model, nn.Module) else None
        if run is None:
            return train_step(model, *args, **kwargs)
        return run._record(lambda: train_step(model, *args, **kwargs))

    return cast(_Step, taken)


def _peaks() -> tuple[int | None, int | None]:
    """Return the largest (allocated, reserved) bytes of this rank so far; None on the CPU."""
    if device().type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _device_name() -> str:
    return torch.cuda.get_device_name() if device().type == "cuda" else device().type
