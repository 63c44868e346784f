"""`StepClock`: where the seconds of a training step go, also those in which a rank only waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.mesh import device
from meshplan.runtime.base.phases import heard_by
from meshplan.runtime.torch_private.private import at_end_of_backward
from meshplan.runtime.torch_private.values import tensors_with_gradient
from meshplan.runtime.torch_private.waits import around_waits

_PHASES: Final = {
    "forward": "forward", "loss": "forward", "backward": "backward", "step": "optimizer",
}  # fmt: skip
"""Name of a phase in a record, by the name with which `train_step` announces it."""
COMMUNICATION: Final = "communication"
NAMES: Final = ("data", "forward", "backward", COMMUNICATION, "optimizer")
"""The phases of a record."""


class StepClock:
    """Times the phases of steps: on an accelerator with events, on the CPU with its clock.

    "communication" is the time in which the computation stands still because a collective, or a
    pipeline's send or receive, is not finished. On the CPU, the thread of the step waits; on CUDA,
    the stream in which the step computes. What runs meanwhile is not in it: a collective that is
    finished when its result is needed takes no time here. A rank that is early waits for the
    others, so that their delay is in it as well. All other phases are without it, except on CUDA
    for collectives that are called synchronously (exchanges of experts and context, a pipeline's
    loss, clipping): NCCL runs them in the computing stream, and no wait is seen.

    Collectives between the steps, as of an evaluation, are in "data" with all else there.

    Args:
        model: The module that `parallelize` returned.
    """

    def __init__(self, model: nn.Module) -> None:
        self._where = device()
        self._marks: list[tuple[str, Any]] = []
        self._is_own: Callable[[], bool] | None = None
        """Inside a step: returns True where a wait holds up the step's own computation."""
        self._is_queued = False
        # The reducer waits in C++, in a callback at the end of backward.
        self._hooks = [
            module.register_forward_hook(self._before_backward)
            for whole in (model.stage_modules if isinstance(model, PipelinedModule) else [model])
            for module in whole.modules()
            if isinstance(module, DistributedDataParallel)
        ]

    def restart(self) -> None:
        """Begin the first step's "data"."""
        self._marks = [("data", self.now())]

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def taking_step(self) -> Iterator[None]:
        """Hear the phases and the waits of a step inside the `with` block."""
        self._is_own, self._is_queued = _owner(self._where), False
        try:
            with ExitStack() as stack:
                stack.enter_context(heard_by(lambda phase: self._mark(_PHASES[phase])))
                stack.enter_context(around_waits(self._wait))
                yield
        finally:
            self._is_own = None

    def read(self) -> tuple[float, dict[str, float]]:
        """End a step; return its seconds, and those of each phase."""
        end = self.now()
        marks, self._marks = self._marks, [("data", end)]
        phases = dict.fromkeys(NAMES, 0.0)
        for (name, begun), (_, ended) in zip(marks, [*marks[1:], ("", end)], strict=True):
            phases[name] += self.seconds(begun, ended)
        return sum(phases.values()), phases

    def _wait(self, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wait for a collective as `wait` does, and count this time as communication."""
        running = self._marks[-1][0]
        # Waits are nested: a synchronous operator inside of a wait, a reducer's callback.
        if running == COMMUNICATION or self._is_own is None or not self._is_own():
            return wait(*args, **kwargs)
        self._mark(COMMUNICATION)
        try:
            return wait(*args, **kwargs)
        finally:
            self._mark(running)

    def _before_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_own is not None:
            for tensor in tensors_with_gradient(output):
                tensor.register_hook(self._in_backward)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        """Queue a callback before the reducer, which queues its own after the last gradient."""
        if self._is_own is not None and not self._is_queued:
            self._is_queued = True
            at_end_of_backward(self._begin_reduction)

    def _begin_reduction(self) -> None:
        running = self._marks[-1][0]

        def end() -> None:
            self._is_queued = False
            self._mark(running)

        self._mark(COMMUNICATION)
        at_end_of_backward(end)  # Behind the reducer's callback.

    def _mark(self, name: str) -> None:
        self._marks.append((name, self.now()))

    def now(self) -> Any:
        """Return a mark of this moment, on an accelerator in the current stream."""
        if self._where.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._where, enable_timing=True)
        event.record()
        return event

    def seconds(self, begun: Any, ended: Any) -> float:
        """Return the seconds between two marks, when the device has reached them."""
        if self._where.type == "cpu":
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3


def _owner(where: torch.device) -> Callable[[], bool]:
    """Return a test for waits: True in this thread on the CPU, in this stream elsewhere.

    On an accelerator, backward has a thread of its own, which computes in the forward's streams.
    """
    if where.type == "cpu":
        thread = threading.get_ident()
        return lambda: threading.get_ident() == thread
    stream = torch.accelerator.current_stream()
    return lambda: bool(torch.accelerator.current_stream() == stream)
