"""Build the planner's request from a plan file: model, machine, memory limit and objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from meshplan.cost.calibration import read_profile
from meshplan.cost.profile import Profile
from meshplan.errors import Origin, PlanError, Problem, check_all
from meshplan.layout.hardware import (
    SOME_GPU,
    Cluster,
    Device,
    Link,
    devices,
    find_device,
    usual_link,
)
from meshplan.model.blueprint import from_config
from meshplan.model.graph import ModelGraph
from meshplan.planner.problem.decision import PlanRequest
from meshplan.planner.space.batch import check_batch
from meshplan.spec.keys import OBJECTIVE, TIME_LIMIT_S
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import HardwareSpec, Spec
from meshplan.textbook.inputs import config_of, read_limit

_FEW: Final = 4
"""Number of leading blocks that the shortened model keeps, besides one of each further kind."""
Load = Callable[[Sequence[str]], Spec]
"""A function that reads the plan file with the given "path=value" statements on top."""


def loading(source: Any, overrides: Sequence[str]) -> Load:
    """Return a function that reads a plan file or mapping with statements on top.

    Args:
        source: Path of the plan file, or its content as a mapping.
        overrides: Statements that are always on top; those that the function is called with follow.
    """
    return lambda more: load_spec(source, [*overrides, *more])


def request_of_file(
    source: Any,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: str | Path | None = None,
) -> PlanRequest:
    """Build the request of a plan file, or of a mapping.

    Args:
        source: Path of the plan file, or its content as a mapping.
        overrides: "path=value" statements on top of the plan file.
        config: A Hugging Face config, which takes precedence over the plan's `model`.
        gpu: Name of the device whose memory is the limit; None for the device that the plan names.
        memory: The memory limit itself; None for the memory of the device.
        profile: Path of a file that `meshplan calibrate` wrote; None to use the speeds of known
            devices.

    Raises:
        SpecError: The device is unknown, or an argument contradicts the plan.
        PlanError: There is no config, the plan lacks a statement that planning needs, or the file
            is not a profile.
    """
    load = loading(source, overrides)
    spec = load(())
    path, origin = config_of(spec, config)
    graph = from_config(path, origin) if path is not None else None
    if graph is None or not graph.config:
        what = "the plan states no model config, which the planner needs"
        fix = "add model: {config: PATH} to the plan, or pass --config PATH"
        raise PlanError(Problem(what, spec.origin("model"), fix))
    assert path is not None
    request = request_of(load, graph, gpu, memory, Path(profile) if profile is not None else None)
    return with_shorter(request, path, origin)


def with_shorter(request: PlanRequest, config: str | Path, origin: Origin) -> PlanRequest:
    """Return the request with `few` and `shorter` set, which read the model from a config."""
    return with_made(request, lambda blocks: from_config(config, origin, blocks=blocks))


def with_made(
    request: PlanRequest, make: Callable[[int | tuple[int, ...]], ModelGraph]
) -> PlanRequest:
    """Return the request with `few` and `shorter` set: its model with fewer blocks.

    If the model has no repeated blocks, the request is returned unchanged.

    Args:
        request: The request.
        make: Builds the model with a given number of blocks, or with only the blocks of the given
            indices.
    """
    if not (shown := _shown(request.graph)):
        return request
    shorter = cache(make)
    return replace(request, few=shorter(shown), shorter=shorter)


def _shown(graph: ModelGraph) -> tuple[int, ...]:
    """Return the indices of the blocks that the shortened model keeps.

    They are the first `_FEW` blocks, and the first block of every further kind.
    """
    first: dict[object, int] = {}
    blocks = graph.blocks()
    for number, fqn in enumerate(blocks):
        inside = ((tensor.fqn.removeprefix(fqn), tensor.shape) for tensor in graph.inside(fqn))
        first.setdefault(tuple(inside), number)
    return tuple(sorted({*range(min(_FEW, len(blocks))), *first.values()}))


def request_of(
    load: Load,
    graph: ModelGraph,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: Path | None = None,
) -> PlanRequest:
    """Build the request of a plan file for a given model.

    Args:
        load: Reads the plan file with more statements on top.
        graph: The model.
        gpu: Name of the device whose memory is the limit; None for the device that the plan names.
        memory: The memory limit itself; None for the memory of the device.
        profile: Path of a file that `meshplan calibrate` wrote; None to use the speeds of known
            devices.

    Raises:
        SpecError: The device is unknown, or an argument contradicts the plan.
        PlanError: The plan lacks a statement that planning needs, or the file is not a profile.
    """
    measured = read_profile(profile, Origin("--profile")) if profile is not None else None
    spec = load(())
    device, limit, _ = read_limit(gpu, memory, spec)

    def machine() -> Cluster:
        if limit is None and spec.hardware is not None:
            what = "the plan states no GPU, so its memory is unknown"
            fix = "add gpu: h100-sxm-80gb to hardware, or pass --gpu h100-sxm-80gb"
            raise PlanError(Problem(what, spec.origin("hardware"), fix))
        return cluster_of(spec, device, measured)

    try:
        cluster = machine()
    except PlanError:
        # The search would check the batch later, together with the speeds of the machine.
        check_all(lambda: check_batch(spec, reads_tokens=bool(graph.config)), machine)
        raise
    assert limit is not None
    stated = spec.solve.get("time_limit_s")
    return PlanRequest(
        read=load,
        graph=graph,
        device=device,
        limit_bytes=limit,
        cluster=cluster,
        profile=measured,
        profile_path=profile,
        objective=spec.solve.get("objective", OBJECTIVE),
        time_limit_s=float(stated) if stated is not None else TIME_LIMIT_S,
    )


def cluster_of(spec: Spec, device: str, profile: Profile | None = None) -> Cluster:
    """Return the machine that a plan states, with the device that it names or that was measured.

    Args:
        spec: The spec of the plan file.
        device: A device name of `layout.hardware`, or `SOME_GPU` if the plan names none.
        profile: Measured speeds of the devices, used if the plan names no device.

    Raises:
        PlanError: The plan states no hardware, or no device and no profile give its speeds.
    """
    stated = spec.hardware
    if stated is None:
        what = "the plan states no hardware"
        fix = "add hardware: {nodes: 1, gpus_per_node: 8, gpu: h100-sxm-80gb}"
        raise PlanError(Problem(what, spec.origin("hardware"), fix))
    if device != SOME_GPU:
        found = find_device(device, spec.origin("hardware.gpu"))
    elif profile is not None:
        found = _measured_device(profile, stated)
    else:
        what = "the plan states no GPU, so its speed is unknown"
        fix = (
            "add gpu: h100-sxm-80gb to hardware, or measure the GPU: meshplan calibrate --out "
            "mine.json, then meshplan plan --profile mine.json"
        )
        raise PlanError(Problem(what, spec.origin("hardware"), fix))
    intra, inter = stated.intra_bytes_per_s, stated.inter_bytes_per_s
    return Cluster(
        device=found,
        nodes=stated.nodes,
        gpus_per_node=stated.gpus_per_node,
        intra=Link("intra", intra) if intra else None,
        inter=Link("inter", inter) if inter else usual_link(found),
    )


def _measured_device(profile: Profile, stated: HardwareSpec) -> Device:
    """Return a device with the speeds of a profile and the memory that the plan states."""
    known = devices().get(profile.device)
    return Device(
        name=profile.device,
        memory_bytes=stated.memory_bytes or 0,
        peak_flops={profile.dtype: profile.peak_flops},
        memory_bytes_per_s=profile.memory_bytes_per_s,
        intra_bytes_per_s=profile.intra_bytes_per_s,
        inter_bytes_per_s=known.inter_bytes_per_s if known is not None else None,
        inter_source=known.inter_source if known is not None else "",
    )
