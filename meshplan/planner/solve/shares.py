"""The parts of a candidate's step time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.solve.config import Candidate
from meshplan.planner.tables.cost_table import CostTable
from meshplan.shown import shown


@shown
@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of a step's time, in seconds, which add up to the step.

    Attributes:
        compute: The model's matrix products, without recomputation.
        traffic: The model's other operations, without recomputation: their memory traffic, and what
            every kernel takes whatever its size.
        recompute: Recomputation in backward.
        tensor_parallel: Exposed communication of tp, ep and cp.
        data: Exposed communication of data ranks.
        launch: Waiting until the host has launched a kernel.
        update: The optimizer on the device.
        pipeline: Pipeline bubbles, and waiting between stages.
        host: The optimizer on the host, and waiting for copies to and from the host.
    """

    compute: float
    recompute: float
    tensor_parallel: float
    data: float
    pipeline: float
    traffic: float = 0.0
    launch: float = 0.0
    update: float = 0.0
    host: float = 0.0


def shares_of(table: CostTable, candidate: Candidate) -> Shares:
    """Return the parts of a candidate's step time."""
    at, row = candidate.row, table.grid[candidate.row]
    option_counts = np.sum([np.array(stage) for stage in candidate.option_counts], axis=0)
    count, taken = option_counts.sum(axis=1), option_counts > 0
    compute, traffic, tensor, host, launch, update = (
        float(part[at] @ count)
        for part in (
            table.compute_s, table.traffic_s, table.tensor_s, table.host_s, table.launch_s,
            table.update_s,
        )
    )  # fmt: skip
    recompute = float((option_counts * table.recompute_s[at])[taken].sum())
    whole = float((option_counts[taken] * table.seconds[at][taken]).sum())
    per_rank = int(row["microbatches"]) / int(row["pp"])
    return Shares(
        compute=(compute - traffic) * per_rank,
        traffic=traffic * per_rank,
        recompute=recompute * per_rank,
        tensor_parallel=tensor * per_rank,
        data=(whole - compute - recompute - tensor - host - launch - update) * per_rank,
        launch=launch * per_rank,
        update=update * per_rank,
        pipeline=candidate.seconds - whole * per_rank,
        host=host * per_rank,
    )
