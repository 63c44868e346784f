"""Plan a live model: build the planner's request, and send its answer to all ranks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, MeshplanError, Problem
from meshplan.files import DiskCache
from meshplan.model.graph import ModelGraph
from meshplan.planner.lock.lock import chosen_spec, has_lock, spec_hash
from meshplan.planner.objectives.complete import complete_statements
from meshplan.planner.problem.decision import PlanRequest
from meshplan.planner.problem.request import Load, request_of, with_made
from meshplan.runtime.apply.wrap import exchange
from meshplan.runtime.estimate.request import PlanDecider, built_without_memory
from meshplan.runtime.estimate.scale_down import ModelSource, model_source_of
from meshplan.runtime.live.certify import Certifier
from meshplan.runtime.live.identity import ModelIdentity, identity_of
from meshplan.runtime.live.matches_config import described
from meshplan.runtime.live.priced import priced_as_stated
from meshplan.runtime.live.recording import Recording
from meshplan.runtime.live.traced import TracedModel
from meshplan.runtime.trace.sample import with_dtype
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import InputSpec, Spec

_logger = logging.getLogger("meshplan")


def request_of_model(
    model: nn.Module,
    load: Load,
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: Path | None = None,
    example_inputs: Any = None,
    source: ModelSource | None = None,
    records: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> PlanRequest:
    """Build the request that asks the planner to complete a plan file for a live model.

    Args:
        model: The unsharded model of one process, on any device.
        load: Reads the plan file, with the statements it is given on top.
        gpu: Name of the device whose memory is the limit; None takes the plan's device.
        memory: The memory limit, such as "80GB" or bytes; None takes the device's memory.
        profile: Path of a file that `meshplan calibrate` wrote; None takes the known speeds of the
            device.
        example_inputs: Inputs of the model, used if the plan states none.
        source: Source from which another process can build the model; None if the model exists in
            this process only.
        records: If True, traces are recorded even if nothing is kept on disk.
        report: Called with lines on the progress.

    Raises:
        SpecError: The device cannot be found, or two different devices are stated.
        PlanError: The plan states too little to be planned.
    """
    graph = graph_of(model)
    origin = source.origin if source is not None else None
    request = request_of(load, graph, gpu, memory, profile)
    spec = with_dtype(model, _with_input(load(()), example_inputs))
    decider = PlanDecider(model, spec, origin, graph=graph, report=report)
    entry = source.entry if source is not None else ""
    identify = cache(partial(_identified, model, graph, decider, entry))

    def digest() -> str:
        found = identify()
        return found.digest() if found is not None else ""

    request = replace(request, identity=digest)
    found = described(model, graph, spec)
    if not isinstance(found, str):
        report(f"{type(model).__name__} matches its config, so it is planned from the config")
        certifier = Certifier(
            model,
            device=request.device,
            limit_bytes=request.limit_bytes,
            origin=origin,
            report=report,
        )
        request = replace(request, graph=found.graph, certify=certifier.of)
        if source is not None:
            asked = partial(
                priced_as_stated, source, request.device, request.limit_bytes, report=report
            )
            request = replace(request, price=asked)
        return with_made(request, found.shorter)
    if found:
        report(f"{type(model).__name__} is traced instead of planned from its config: {found}")

    def recording_of() -> Recording | None:
        # Without a folder to keep it in, a recording is worth nothing.
        is_wanted = records or DiskCache.of_user("", 0) is not None
        identity = identify() if is_wanted else None
        return Recording.of_user(identity, report) if identity is not None else None

    traced = TracedModel(
        model,
        decider,
        recording_of,
        spec,
        device=request.device,
        limit_bytes=request.limit_bytes,
        source=source,
        origin=origin,
        report=report,
    )
    return replace(request, traced=traced)


def _identified(
    model: nn.Module, graph: ModelGraph, decider: PlanDecider, entry: str
) -> ModelIdentity | None:
    """Return the identity of a model; None if its forward cannot be recorded."""
    flow = decider.flow
    return identity_of(model, graph, flow, entry) if flow is not None else None


def request_of_entry(
    source: Any,
    more: Sequence[str],
    model: str | None,
    config: Any = None,
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: Path | None = None,
    records: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> PlanRequest:
    """Build the planner's request for the model that `--model`, `--config` or the plan names.

    Args:
        source: Path of the plan file, or its content as a mapping.
        more: Statements on top of the plan file.
        model: Value of the flag `--model`, "pkg.mod:function"; None if it was not given.
        config: Value of the flag `--config`, a path; None if it was not given.
        gpu: Name of the device whose memory is the limit; None takes the plan's device.
        memory: The memory limit, such as "80GB" or bytes; None takes the device's memory.
        profile: Path of a file that `meshplan calibrate` wrote; None takes the known speeds of the
            device.
        records: As for `request_of_model`.
        report: Called with lines on the progress.

    Raises:
        SpecError: The model cannot be built, or the device cannot be found.
        PlanError: The plan states too little to be planned.
    """

    def load(stated: Sequence[str]) -> Spec:
        return load_spec(source, [*more, *stated])

    found = model_source_of(load(()), model, config)
    built = built_without_memory(found).train()
    return request_of_model(
        built, load, gpu=gpu, memory=memory, profile=profile, source=found, records=records,
        report=report,
    )  # fmt: skip


def _with_input(spec: Spec, given: Any) -> Spec:
    """Return the spec with the shape and dtype of the caller's input as its `input`.

    Return the spec unchanged if it states an input, or if the caller's input is not one tensor.
    """
    if isinstance(given, tuple) and len(given) == 1:
        (given,) = given
    if spec.input is not None or not isinstance(given, torch.Tensor):
        return spec
    stated = InputSpec(shape=tuple(given.shape), dtype=str(given.dtype).removeprefix("torch."))
    return replace(spec, input=stated)


def closed_together(model: nn.Module, plan: Any, example_inputs: Any) -> Any:
    """Return the plan without open fields, the same on every rank.

    Rank 0 alone decides: its lock completes the plan, or else its planner does. A collective: all
    ranks must call it, and they exchange the same number of messages even if one fails.

    Args:
        model: The unsharded model of one process.
        plan: The plan as `parallelize` takes it.
        example_inputs: Inputs of the model, used if the plan states none.

    Returns:
        The completed spec; or `plan` itself if it leaves no field open and has no lock.

    Raises:
        MeshplanError: A rank cannot read the plan, or rank 0 cannot plan it.
        ApplyError: The plan leaves fields open, and the ranks read different plans.
    """
    error: MeshplanError | None = None
    outcome = "closed", ""
    try:
        is_plan = isinstance(plan, str | os.PathLike | Mapping)
        spec = load_spec(plan) if is_plan else None
        if spec is not None:
            is_open = spec.free_fields or has_lock(plan)
            outcome = "open" if is_open else "closed", spec_hash(spec)
    except MeshplanError as caught:
        error, outcome = caught, ("error", caught.render())
    outcomes = exchange(outcome, error)
    (kind, own), *_ = outcomes
    other = next((rank for rank, each in enumerate(outcomes) if each[1] != own), None)
    if other is not None and any(each == "open" for each, _ in outcomes):
        what = (
            f"rank {other} read a different plan than rank 0, and a plan with open fields must be "
            "the same on all ranks"
        )
        raise ApplyError(Problem(what, fix="give every rank the same plan file"))
    if kind == "closed":  # `kind` is rank 0's: locks that other ranks see do not count.
        return plan
    return chosen_spec(lambda more: load_spec(plan, more), *_stated(model, plan, example_inputs))


def _stated(
    model: nn.Module, plan: Any, example_inputs: Any
) -> tuple[Mapping[str, Any], str, str | None]:
    """Return on every rank what `complete_statements` returns on rank 0."""
    outcome = "", ""
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = "stated", json.dumps(_choose(model, plan, example_inputs))
        except MeshplanError as caught:
            error, outcome = caught, ("error", caught.render())
        except Exception as caught:  # Report it to the other ranks, then raise it unchanged.
            error, outcome = caught, ("error", f"{type(caught).__name__}: {caught}")
    outcomes = exchange(outcome, error)
    found, source, lock = json.loads(outcomes[0][1])
    return found, source, lock


def _choose(
    model: nn.Module, plan: Any, example_inputs: Any
) -> tuple[dict[str, Any], str, str | None]:
    def load(more: Sequence[str]) -> Spec:
        return load_spec(plan, more)

    def ask(profile: Path | None) -> PlanRequest:
        return request_of_model(model, load, example_inputs=example_inputs, profile=profile)

    stated, source, lock = complete_statements(
        plan, load, graph_of(model), ask=ask, noted=_logger.warning
    )
    return dict(stated), source, lock
