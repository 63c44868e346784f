"""Decide over which samples BatchNorm takes statistics: those of one rank or of all data ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.assign.base.types import Stages
from meshplan.errors import Problem
from meshplan.layout.mesh import GRADIENT_AXES, Mesh
from meshplan.model.graph import ModelGraph, ModuleInfo
from meshplan.spec.spec import Spec


@dataclass(slots=True)
class BatchNorm:
    """Decisions about BatchNorm.

    `synchronized` has the fqns of the modules whose statistics are over all data ranks.
    """

    synchronized: tuple[str, ...] = ()
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def assign_batchnorm(spec: Spec, graph: ModelGraph, mesh: Mesh, stages: Stages | None) -> BatchNorm:
    """Return which BatchNorms to synchronize, with warnings about differences from one process."""
    out = BatchNorm()
    found = [m for m in graph.modules.values() if m.kind in ("batchnorm", "own_batchnorm")]
    splits_samples = mesh.size(*GRADIENT_AXES) > 1
    if spec.sync_batchnorm:
        _synchronize(spec, graph, found, out)
    elif found and splits_samples:
        out.warnings.append(
            Problem(
                f"{_listed(found)}: batch statistics are computed from the samples of one rank "
                "only, so results differ from those of one process",
                None,
                "write sync_batchnorm: true, or use GroupNorm or LayerNorm",
            )
        )
    tracked = [info for info in graph.modules.values() if _tracks_alone(info, graph)]
    if tracked and splits_samples:
        out.warnings.append(
            Problem(
                f"{_listed(tracked)}: running statistics are computed from the samples of one rank "
                "only, so evaluation differs from rank to rank and a saved state dict contains "
                "the statistics of the first rank",
                None,
                "construct them with track_running_stats=False, or use GroupNorm",
            )
        )
    if found and stages is not None and stages.microbatches > 1:
        out.warnings.append(
            Problem(
                f"{_listed(found)}: batch statistics are computed for each of the "
                f"{stages.microbatches} pipeline microbatches, so results are those of one process "
                f"that accumulates gradients over {stages.microbatches} parts of the batch",
                spec.origin("pipeline.microbatches"),
                "use GroupNorm or LayerNorm, or ignore this warning",
            )
        )
    return out


def _listed(found: list[ModuleInfo]) -> str:
    """Return the fqn of the first module and the number of the others, for a message."""
    others = len(found) - 1
    return f"{found[0].fqn} and {others} more" if others else found[0].fqn


def _tracks_alone(info: ModuleInfo, graph: ModelGraph) -> bool:
    """Return True for an InstanceNorm that evaluates with running statistics."""
    return "InstanceNorm" in info.type and graph.tracks_statistics(info.fqn)


def _synchronize(spec: Spec, graph: ModelGraph, found: list[ModuleInfo], out: BatchNorm) -> None:
    origin = spec.origin("sync_batchnorm")
    own = next((info for info in found if info.kind != "batchnorm"), None)
    if not found:
        what = f"'sync_batchnorm' has no effect: {graph.name} has no BatchNorm"
        out.problems.append(Problem(what, origin, "remove sync_batchnorm"))
    elif own is not None:
        out.problems.append(
            Problem(
                f"'sync_batchnorm' cannot be applied to {own.fqn}: {own.type} overrides the "
                "forward of torch's BatchNorm",
                origin,
                "use torch's BatchNorm there, or remove sync_batchnorm",
            )
        )
    else:
        out.synchronized = tuple(info.fqn for info in found)
