"""A request for a memory estimate, and the model and plan that are made from the request."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from meshplan.errors import Origin, PlanError, SpecError
from meshplan.layout.hardware import SOME_GPU
from meshplan.memory.log.events import EventLog
from meshplan.model.flow import Flow
from meshplan.model.graph import ModelGraph
from meshplan.model.rehearsal import Rehearser
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.estimate.scale_down import ModelSource, model_of_source
from meshplan.runtime.torch_private.fakes import fake_mode
from meshplan.runtime.trace.constants import ConstantPropagation
from meshplan.runtime.trace.rehearse import recorded
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """A request for a memory estimate.

    Args:
        spec: The plan, as declared.
        source: The source from which subprocesses build the model.
        device: Name of the GPU, or "cuda" if none is stated.
        limit_bytes: Bytes that a device may reserve; None if not stated.
        tier: Number of the tier to use: 1, or 3 (2 means 3 too); None for the cheapest that can
            answer.
    """

    spec: Spec
    source: ModelSource
    device: str = SOME_GPU
    limit_bytes: int | None = None
    tier: int | None = None


@dataclass(frozen=True, slots=True)
class FakeStepResult:
    """The fake step of one rank, as a subprocess returns it.

    Args:
        log: Events of the rank's step.
        assumed: Assumptions about inputs, loss and optimizer as (what, value); see `DefaultLoop`.
    """

    log: EventLog
    assumed: tuple[tuple[str, str], ...]


def decided(spec: Spec, source: ModelSource) -> tuple[nn.Module, Plan]:
    """Return (model, plan): the model on meta in training mode, and the plan decided for it.

    Args:
        spec: The plan, as declared.
        source: The source from which the model is built.

    Raises:
        SpecError: The model cannot be built.
        PlanError: The plan does not fit the model.
    """
    model = built_without_memory(source).train()
    return model, decided_of(model, spec, source.origin)


def decided_of(model: nn.Module, spec: Spec, origin: Origin | None) -> Plan:
    """Return the plan decided for an existing model.

    If the spec has derived tensor parallelism or pipeline stages, the model's forward is recorded.

    Args:
        model: The model, on any device.
        spec: The plan, as declared.
        origin: Place where the user named the model; None if there is none.

    Raises:
        PlanError: The plan does not fit the model, or the forward cannot be recorded.
    """
    return PlanDecider(model, spec, origin).decide(spec)


def for_subprocess(plan: Plan) -> Plan:
    """Return a plan without the recorded forward, which nothing reads once the plan is decided.

    The recorded forward takes megabytes, and its operations may have arguments that cannot be
    pickled.
    """
    return replace(plan, graph=replace(plan.graph, flow=None))


class PlanDecider:
    """Decides plans for one live model, whose forward is recorded once for all of them.

    Args:
        model: The model, on any device. It is copied, and its values are not read.
        inputs: A spec that states the inputs on which all plans' forward is recorded.
        origin: Place where the user named the model; None if there is none.
        graph: The graph of the model, if it exists already.
        report: Called with lines on the progress.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Spec,
        origin: Origin | None,
        *,
        graph: ModelGraph | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model = model
        self._inputs, self._origin, self._report = inputs, origin, report
        self._stated_graph = graph

    def decide(self, spec: Spec) -> Plan:
        """Return the plan that a spec declares for the model.

        Raises:
            PlanError: The plan does not fit the model, or the forward cannot be recorded.
        """
        if not spec.reads_flow:
            return make_plan(spec, self._graph)
        if isinstance(self._recorded, PlanError):
            raise PlanError(self._recorded.problems)
        graph, rehearse = self._recorded
        return make_plan(spec, graph, rehearse=rehearse)

    @property
    def flow(self) -> Flow | None:
        """The recorded forward; None if it cannot be recorded."""
        return None if isinstance(self._recorded, PlanError) else self._recorded[0].flow

    @cached_property
    def _graph(self) -> ModelGraph:
        return graph_of(self.model) if self._stated_graph is None else self._stated_graph

    @cached_property
    def _recorded(self) -> tuple[ModelGraph, Rehearser] | PlanError:
        """The graph with the recorded forward, or why the forward cannot be recorded."""
        self._report(f"recording the forward of {type(self.model).__name__}")
        try:
            return recorded(self.model, self._inputs, self._origin)
        except PlanError as error:
            return error


def built_without_memory(source: ModelSource) -> nn.Module:
    """Return the model, built on meta, or on fake tensors if that fails.

    Building on meta fails if the code reads values of tensors, which fake tensors of known content
    have.

    Raises:
        SpecError: The model cannot be built either way.
    """
    if source.config is not None and getattr(source.config, "use_cache", False):
        config = copy.deepcopy(source.config)
        config.use_cache = False  # In training a KV cache would only keep tensors alive.
        source = replace(source, config=config)
    try:
        return model_of_source(source, on_meta=True)
    except SpecError:
        with contextlib.suppress(SpecError), fake_mode(), ConstantPropagation():
            return model_of_source(source)
        raise
