"""CPU offload: choose the units and the saved activations that are kept in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshplan.assign.base.cascade import Cascade
from meshplan.assign.base.types import Placed, Reason, Stages, Unit
from meshplan.errors import Problem
from meshplan.model.graph import ModelGraph, is_inside
from meshplan.spec.spec import Spec

_FIELD = "offload"
_ACTIVATIONS = "offload.activations"


def _stated(spec: Spec, cascade: Cascade, fqn: str, part: str) -> tuple[bool | None, str]:
    """Return a module's setting for one part of `offload`, None if not stated, and its path."""
    found = cascade.inherited(fqn, f"{_FIELD}.{part}")
    if found is not None:
        return bool(found.value), found.path
    value = getattr(spec.offload, part)
    return (None if value is None else bool(value)), f"{_FIELD}.{part}"


def _place(path: str) -> str:
    return path.rpartition(".")[0]


def params_on_host(
    spec: Spec, cascade: Cascade, fqn: str, *, is_sharded: bool
) -> tuple[bool, Problem | None]:
    """Return (True if a module's parameters are to be in host memory, a problem with that or None).

    FSDP2's `CPUOffloadPolicy` offloads parameters, gradients and optimizer states together: the
    optimizer creates its states on the device of the parameters, and torch cannot move them for
    the optimizer step.
    """
    params, where = _stated(spec, cascade, fqn, "params")
    optimizer, of_optimizer = _stated(spec, cascade, fqn, "optimizer")
    if optimizer and not params:
        return False, Problem(
            "optimizer states cannot be offloaded alone: torch's optimizers keep them on the "
            "device of the parameters and do not move them for a step",
            spec.origin(of_optimizer),
            "write offload: params, which offloads parameters, gradients and optimizer states",
        )
    if params and optimizer is False and _place(where) == _place(of_optimizer):
        return False, Problem(
            "'optimizer: false' is not possible with offloaded parameters: torch's optimizers keep "
            "their states on the device of the parameters",
            spec.origin(of_optimizer),
            "remove optimizer: false",
        )
    if params and not is_sharded:
        name = f"'{fqn}'" if fqn else "the model"
        return False, Problem(
            f"{name} is not sharded, and FSDP2 offloads only sharded parameters",
            spec.origin(where),
            "use strategy: full_shard, or write offload: none for this module",
        )
    return bool(params), None


def shared_on_host(
    spec: Spec,
    stages: Stages | None,
    tensors: Mapping[str, Placed],
    units: Mapping[str, Unit],
    blocks: Sequence[str],
) -> Iterator[Problem]:
    """Yield a problem for each offloaded parameter that several pipeline stages share."""
    for fqn, holders in stages.tensors.items() if stages is not None else ():
        placed = tensors[fqn]
        unit = units.get(placed.unit) if placed.unit is not None else None
        if len(holders) > 1 and placed.info.trainable and unit is not None and unit.on_host:
            yield Problem(
                f"stages {' and '.join(map(str, holders))} share '{fqn}' and sum its gradients "
                "with an all-reduce on the device, but offloaded gradients are on the host",
                spec.origin(_FIELD),
                f"offload only other modules by a rule, {_beside(blocks)}or use dp_shard instead "
                "of pp",
            )


def _beside(blocks: Sequence[str]) -> str:
    container = blocks[0].rpartition(".")[0] if blocks else ""
    return f"such as match: {container}.*, " if container else ""


def assign_host_activations(
    spec: Spec, graph: ModelGraph, cascade: Cascade, units: Mapping[str, Unit]
) -> tuple[dict[str, Reason], list[Problem]]:
    """Return the modules whose saved activations are offloaded, with the reason of each, by fqn.

    A setting that is stated for a module which contains repeated blocks applies to these blocks.
    For any other module it applies to the module itself.

    Returns:
        (reasons by module fqn, problems found).
    """
    out: dict[str, Reason] = {}
    problems: list[Problem] = []
    blocks = [block for block in graph.blocks() if graph.modules[block].has_forward]
    if spec.offload.activations and not blocks:
        problems.append(
            Problem(
                f"offload.activations applies to the repeated blocks, but {graph.name} has none",
                spec.origin(_ACTIVATIONS),
                "write offload: {activations: true} in a rule that matches the modules",
            )
        )
    for block in blocks:
        is_offloaded, path = _stated(spec, cascade, block, "activations")
        if is_offloaded:
            out[block] = Reason(f"{_FIELD}: activations", spec.origin(path))
    for fqn, stated in cascade.modules_with(_ACTIVATIONS):
        if not stated.value or any(is_inside(block, fqn) for block in blocks):
            continue
        origin = spec.origin(stated.path)
        around = next((outer for outer in out if fqn != outer and is_inside(fqn, outer)), None)
        if not graph.modules[fqn].has_forward:
            kind = graph.modules[fqn].type
            what = f"'{fqn}' is a {kind}, which is never called: it has no activations to offload"
            problems.append(Problem(what, origin, f"match its children, such as '{fqn}.*'"))
        elif around is not None:
            what = f"'{fqn}' lies inside '{around}', whose activations are offloaded as a whole"
            fix = f"write offload: none for '{around}', or remove this setting"
            problems.append(Problem(what, origin, fix))
        else:
            out[fqn] = Reason(f"{_FIELD}: activations", origin)
    for fqn, reason in out.items():
        inner = next((u for u in units if u != fqn and is_inside(u, fqn)), None)
        if inner is not None and fqn:
            # When the forward around it begins, it is not known yet what will be gathered inside.
            problems.append(
                Problem(
                    f"'{inner}' is a separate unit inside '{fqn}', whose activations are "
                    "offloaded, and its gathered weights cannot be distinguished from activations",
                    reason.origin,
                    f"offload the activations of the modules beside '{inner}' instead, or write "
                    f"unit: false for '{inner}'",
                )
            )
            break
    by_origin = {problem.origin: problem for problem in reversed(problems)}
    return out, list(reversed(by_origin.values()))
