"""Traces of a model in which the shape of some tensors depends on values, as upper bounds.

A model that masks frames at random, or routes what a mask selects, runs other sizes in every step.
Its traces have data-dependent operators select all that they can (`trace.bounds`), so a plan that
fits by them fits in every step. A second trace, with half selected, shows that it is a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

from meshplan.errors import PlanError, Problem
from meshplan.memory.log.events import EventLog
from meshplan.runtime.fake_step.cuda_kernels import kernels_of
from meshplan.runtime.fake_step.cuda_mode import CPU
from meshplan.runtime.live.recording import Recording, key_of
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
    """Traces of one kind, under one plan, that are recorded and recalled.

    Attributes:
        key: Hash of what all of these traces depend on, besides the model and the device.
        to_json, from_json: Turn a trace into JSON values, and back.
    """

    key: str
    to_json: Callable[[T], Any]
    from_json: Callable[[Any], T]

    @classmethod
    def of(
        cls, spec: Spec, about: Any, to_json: Callable[[T], Any], from_json: Callable[[Any], T]
    ) -> Question[T]:
        """Return the question for traces under a plan.

        Args:
            spec: The plan.
            about: What of the plan's decisions for tensors and modules the traces depend on.
            to_json, from_json: As in the class.
        """
        return cls(key_of((_computed_by(spec), about)), to_json, from_json)


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

    def recorded(
        self,
        question: Question[T],
        asked: Sequence[Any],
        trace: Callable[[Sequence[int]], list[T]],
        log_of: Callable[[T], EventLog],
    ) -> list[T]:
        """Return one trace for each thing asked, of which some may be recorded already.

        Args:
            question: The kind of traces.
            asked: What each trace depends on besides the question, such as its samples.
            trace: Makes the traces with the given indices, in one run of the model.
            log_of: Returns the log of a trace.

        Raises:
            PlanError: A trace failed, or no upper bound can be proved.
        """
        log = lambda found: [*map(log_of, found)]  # noqa: E731
        recording = None if self.bound else self.recording
        if recording is None:
            return self.run(partial(trace, range(len(asked))), log)
        kernels = self._device if self._device == CPU else kernels_of(self._device)
        keys = [key_of((kernels, question.key, each)) for each in asked]
        known = [recording.find(key) for key in keys]
        missing = [number for number, data in enumerate(known) if data is None]
        made: dict[int, T] = {}
        if missing:
            found = self.run(partial(trace, missing), log)
            made = dict(zip(missing, found, strict=True))
        if not self.bound:
            for number, each in made.items():
                recording.keep(keys[number], question.to_json(each))
        return [
            made[number] if data is None else question.from_json(data)
            for number, data in enumerate(known)
        ]

    def run(self, trace: Callable[[], T], logs_of: Callable[[T], Sequence[EventLog]]) -> T:
        """Return what a trace returns.

        Args:
            trace: Runs the model on fake tensors; called again for a bound.
            logs_of: Returns the logs of what `trace` returned.

        Raises:
            PlanError: The trace failed, or no upper bound can be proved.
        """
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

    The machine and the batch are not part of it.
    """
    return (
        spec.input, spec.batch.seq_len, spec.batch.per_rank, spec.precision, spec.loss,
        spec.loss_chunks, spec.sync_batchnorm, spec.compile, spec.ddp, spec.context, spec.experts,
    )  # fmt: skip
