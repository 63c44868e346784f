"""Traces of a model in which the shape of some tensors depends on values, as upper bounds.

A model that masks frames at random, or routes what a mask selects, runs other sizes in every step.
Its traces have data-dependent operators select all that they can (`trace.bounds`), so a plan that
fits by them fits in every step. A second trace, with half selected, shows that it is a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from meshplan.errors import PlanError, Problem
from meshplan.memory.log.events import EventLog
from meshplan.runtime.fake_step.cuda_kernels import kernels_of
from meshplan.runtime.fake_step.cuda_mode import CPU
from meshplan.runtime.live.recording import Recording
from meshplan.runtime.trace.bounds import (
    NoBoundError,
    UnknownShapeError,
    bound_of,
    check_grows,
    everything,
    half,
    picking,
)
from meshplan.spec.spec import Spec

T = TypeVar("T")


class Question(NamedTuple, Generic[T]):
    """What a trace answers, so that it can be recorded and recalled.

    Attributes:
        spec: The plan under which the model is traced.
        asked: All that the trace depends on besides the model, the device, and what of the spec
            holds for the whole model.
        to_json, from_json: Turn the trace into JSON values, and back.
    """

    spec: Spec
    asked: Any
    to_json: Callable[[T], Any]
    from_json: Callable[[Any], T]


class BoundedTraces:
    """Runs traces of one model: as they are, or at the largest sizes if it has unknown ones.

    Traces that are as they are get recorded, and are recalled when they are asked for again.

    Args:
        report: Called with lines on the progress.
        device: Name of the device whose kernels are emulated.
        recording_of: Returns the recording of the model, and is called at most once; None is
            returned for a model that cannot have one.

    Attributes:
        bound: A sentence that says why the traces are upper bounds; "" if they are exact.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        device: str,
        recording_of: Callable[[], Recording | None] = lambda: None,
    ) -> None:
        self._report, self._device, self._recording_of = report, device, recording_of
        self.bound = ""
        self._problem: Problem | None = None

    @cached_property
    def recording(self) -> Recording | None:
        """The recording of the model; None if it cannot have one."""
        return self._recording_of()

    def run(
        self,
        trace: Callable[[], T],
        logs_of: Callable[[T], Sequence[EventLog]],
        question: Question[T] | None = None,
    ) -> T:
        """Return what a trace returns.

        Args:
            trace: Runs the model on fake tensors; called again for a bound.
            logs_of: Returns the logs of what `trace` returned.
            question: What the trace answers; None if it is not recorded.

        Raises:
            PlanError: The trace failed, or no upper bound can be proved.
        """
        recording = self.recording if question is not None and not self.bound else None
        if recording is None or question is None:
            return self._run(trace, logs_of)
        kernels = self._device if self._device == CPU else kernels_of(self._device)
        key = recording.key_of((kernels, _computed_by(question.spec), question.asked))
        if (data := recording.find(key)) is not None:
            return question.from_json(data)
        found = self._run(trace, logs_of)
        if not self.bound:
            recording.keep(key, question.to_json(found))
        return found

    def _run(self, trace: Callable[[], T], logs_of: Callable[[T], Sequence[EventLog]]) -> T:
        if self._problem is None:
            try:
                return trace()
            except UnknownShapeError as error:
                self._report("tracing with all data-dependent operators at their maximum size")
                (self._problem,), self.bound = error.problems, bound_of(error)
        with picking(everything):
            most = trace()
        with picking(half, has_buffers=False):
            less = trace()
        try:
            for one, other in zip(logs_of(most), logs_of(less), strict=True):
                check_grows(one, other)
        except NoBoundError as error:
            what = f"{self._problem.what}; no upper bound can be proved: {error}"
            raise PlanError(Problem(what, self._problem.origin, self._problem.fix)) from None
        return most


def _computed_by(spec: Spec) -> tuple[Any, ...]:
    """Return what traces depend on of a plan, besides what is decided for tensors and modules.

    They depend neither on the machine nor on the batch.
    """
    return (
        spec.input, spec.batch.seq_len, spec.batch.per_rank, spec.precision, spec.loss,
        spec.loss_chunks, spec.sync_batchnorm, spec.compile, spec.ddp, spec.context, spec.experts,
    )  # fmt: skip
