"""What a plan file asks of the planner: the model, the machine, the limit, the objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from meshplan.cost.calibration import read_profile
from meshplan.cost.profile import Profile
from meshplan.errors import Origin, PlanError, Problem
from meshplan.layout.hardware import SOME_GPU, Cluster, Device, Link, find_device
from meshplan.model.blueprint import from_config
from meshplan.model.graph import ModelGraph
from meshplan.planner.problem.decision import PlanRequest
from meshplan.spec.keys import OBJECTIVE, TIME_LIMIT_S
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import HardwareSpec, Spec
from meshplan.textbook.inputs import read_limit

_FEW: Final = 4
"""Blocks that show what a model allows: the first, the last, and some between."""
Load = Callable[[Sequence[str]], Spec]
"""The plan file with more statements on top."""


def loading(source: Any, overrides: Sequence[str]) -> Load:
    """Reads a plan file, or a mapping, with these statements and more on top."""
    return lambda more: load_spec(source, [*overrides, *more])


def question_of_file(
    source: Any,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: str | Path | None = None,
) -> PlanRequest:
    """What a plan file, or a mapping, asks of the planner.

    Args:
        config: A Hugging Face config, which goes before the plan's own `model`.
        gpu: Name of the device whose memory is the limit, or `memory`, the limit itself.
        profile: What `meshplan calibrate` wrote.
    """
    load = loading(source, overrides)
    spec = load(())
    path, origin = config_of(spec, config)
    graph = from_config(path, origin) if path is not None else None
    if graph is None or not graph.config:
        what = "the planner reads a model from its config, and none is given"
        fix = "add model: {config: PATH} to the plan, or --config PATH"
        raise PlanError(Problem(what, spec.origin("model"), fix))
    assert path is not None
    asked = question_of(load, graph, gpu, memory, Path(profile) if profile is not None else None)
    return with_shorter(asked, path, origin)


def config_of(spec: Spec, config: str | Path | None = None) -> tuple[str | Path | None, Origin]:
    """(the config that a plan's model is from, who named it); None where it is from none.

    Args:
        config: Goes before the plan's own.
    """
    if config is None and spec.model is not None and spec.model.config is not None:
        return Path(spec.source).parent / spec.model.config, spec.origin("model.config")
    return config, Origin("--config")


def with_shorter(question: PlanRequest, config: str | Path, origin: Origin) -> PlanRequest:
    """Beside the model, the same with fewer blocks."""
    return with_made(question, lambda blocks: from_config(config, origin, blocks=blocks))


def with_made(
    question: PlanRequest, make: Callable[[int | tuple[int, ...]], ModelGraph]
) -> PlanRequest:
    """The same, made by whoever can; a model of which nothing repeats has nothing to leave out."""
    if not (shown := _shown(question.graph)):
        return question
    shorter = cache(make)
    return replace(question, few=shorter(shown), shorter=shorter)


def _shown(graph: ModelGraph) -> tuple[int, ...]:
    """Blocks that a trial has: the first ones, and one of every other kind."""
    first: dict[object, int] = {}
    blocks = graph.blocks()
    for number, fqn in enumerate(blocks):
        inside = ((tensor.fqn.removeprefix(fqn), tensor.shape) for tensor in graph.inside(fqn))
        first.setdefault(tuple(inside), number)
    return tuple(sorted({*range(min(_FEW, len(blocks))), *first.values()}))


def question_of(
    load: Load,
    graph: ModelGraph,
    gpu: str | None = None,
    memory: str | int | None = None,
    profile: Path | None = None,
) -> PlanRequest:
    """What a plan file asks of the planner.

    Args:
        profile: What `meshplan calibrate` wrote of the machine.

    Raises:
        SpecError: The device cannot be found, or is stated twice and differs.
        PlanError: It says too little, or the file is no profile.
    """
    measured = read_profile(profile, Origin("--profile")) if profile is not None else None
    spec = load(())
    device, limit, _ = read_limit(gpu, memory, spec)
    if limit is None:
        what = "nothing says how much memory a device has"
        fix = "add gpu: h100-sxm-80gb to hardware, or --gpu"
        raise PlanError(Problem(what, spec.origin("hardware"), fix))
    stated = spec.solve.get("time_limit_s")
    return PlanRequest(
        read=load,
        graph=graph,
        device=device,
        limit_bytes=limit,
        cluster=cluster_of(spec, device, measured),
        profile=measured,
        profile_path=profile,
        objective=spec.solve.get("objective", OBJECTIVE),
        time_limit_s=float(stated) if stated is not None else TIME_LIMIT_S,
    )


def cluster_of(spec: Spec, device: str, profile: Profile | None = None) -> Cluster:
    """The machine that a plan names, or that was measured.

    Args:
        profile: Of its devices, where the plan names none.

    Raises:
        PlanError: It names none, or one whose speed is not known.
    """
    stated = spec.hardware
    if stated is None:
        what = "nothing says which devices there are"
        fix = "add hardware: {nodes: 1, gpus_per_node: 8, gpu: h100-sxm-80gb}"
        raise PlanError(Problem(what, spec.origin("hardware"), fix))
    if device != SOME_GPU:
        found = find_device(device, spec.origin("hardware.gpu"))
    elif profile is not None:
        found = _measured_device(profile, stated)
    else:
        what = "nothing says how fast the devices are"
        fix = (
            "add gpu: h100-sxm-80gb, say, or measure one that is in no table: meshplan calibrate "
            "--out mine.json, then meshplan plan --profile mine.json"
        )
        raise PlanError(Problem(what, spec.origin("hardware"), fix))
    intra, inter = stated.intra_bytes_per_s, stated.inter_bytes_per_s
    return Cluster(
        device=found,
        nodes=stated.nodes,
        gpus_per_node=stated.gpus_per_node,
        intra=Link("intra", intra) if intra else None,
        inter=Link("inter", inter) if inter else None,
    )


def _measured_device(profile: Profile, stated: HardwareSpec) -> Device:
    """The device of a profile, with the memory that the plan states."""
    return Device(
        name=profile.device,
        memory_bytes=stated.memory_bytes or 0,
        peak_flops={profile.dtype: profile.peak_flops},
        memory_bytes_per_s=profile.memory_bytes_per_s,
        intra_bytes_per_s=profile.intra_bytes_per_s,
    )
