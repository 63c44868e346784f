"""A request for a memory estimate, and the model and plan that are made from the request."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace

from torch import nn

from meshplan.errors import Origin, SpecError
from meshplan.layout.hardware import SOME_GPU
from meshplan.memory.log.events import EventLog
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
    if not spec.reads_flow:
        return make_plan(spec, graph_of(model))
    graph, rehearse = recorded(model, spec, origin)
    return make_plan(spec, graph, rehearse=rehearse)


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
