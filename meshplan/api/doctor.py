"""Function behind `meshplan doctor`: whether this machine can train, and under a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from meshplan.api.checking import check_plan
from meshplan.api.source import Source
from meshplan.errors import PlanError, Problem
from meshplan.launch.command import job_size
from meshplan.launch.machine import (
    Checkup,
    examine_environment,
    examine_limits,
    examine_loading,
    examine_shared_memory,
)
from meshplan.spec.spec import Spec


def examine(source: Source | None = None) -> Iterator[Checkup]:
    """Yield what is found about this machine, topic by topic, and about a plan on it.

    Args:
        source: A plan and its model, which is tried on a fake process group; None for none.

    Raises:
        SpecError: The plan or the model cannot be read.
    """
    from meshplan.runtime import doctor  # torch

    spec = source.spec if source is not None else None
    yield doctor.examine_versions()
    yield doctor.examine_devices()
    yield doctor.examine_links()
    yield examine_shared_memory()
    yield examine_limits()
    yield examine_environment(os.environ)
    yield examine_loading(_num_local_ranks(spec, doctor.num_devices))
    yield doctor.examine_collectives()
    if source is not None and spec is not None:
        yield _examine_plan(source, spec, doctor.num_devices())


def _num_local_ranks(spec: Spec | None, num_devices: Callable[[], int]) -> int:
    """Return the number of ranks of a node: by the plan, else one for each device."""
    if spec is not None:
        try:
            return job_size(spec)[1]
        except PlanError:
            return num_devices() or 1  # `check_plan` reports what is wrong with the mesh.
    return num_devices() or 1


def _examine_plan(source: Source, spec: Spec, num_devices: int) -> Checkup:
    """Check the plan, its model's forward on a fake process group included."""
    checked = check_plan(source)
    facts = {"file": str(source.plan)}
    if checked.plan is not None:
        facts["dry run"] = f"{checked.plan.graph.name} on {checked.plan.mesh}"
    for number, note in enumerate(checked.notes, 1):
        facts[f"note {number}"] = note
    warnings = list(checked.warnings)
    hardware = spec.hardware
    if hardware is not None and num_devices and hardware.gpus_per_node != num_devices:
        what = f"a node of the plan has {hardware.gpus_per_node} GPUs, this machine {num_devices}"
        fix = "correct hardware, or start the job on the machines that it states"
        warnings.append(Problem(what, spec.origin("hardware.gpus_per_node"), fix))
    return Checkup("plan", facts, tuple(checked.problems), tuple(warnings))
