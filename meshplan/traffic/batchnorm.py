"""Predict the traffic of BatchNorms, whose statistics are over samples.

Source of the statistics over all data ranks: `runtime.apply.data.batchnorm`: sums and the number of
values, then the variance. Each of them is all-reduced, and so are the gradients of both.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import Forward
from meshplan.traffic.loss import SINGLE_BYTES
from meshplan.traffic.tensor_parallel import is_repeated
from meshplan.traffic.types import Traffic, one


def statistics(plan: Plan, forward: Forward) -> Iterator[Traffic]:
    """Yield what synchronized BatchNorms send, for all microbatches."""
    for fqn in plan.assignment.synchronized:
        has_statistics = f"{fqn}.running_mean" in plan.graph.tensors
        for call in forward.of(fqn):
            if has_statistics and not call.is_training:
                continue  # It uses its running statistics.
            given = call.inputs[0]
            channels = given.shape[1]
            times = 1 + is_repeated(plan, forward, fqn, call.begin) + given.needs_grad
            for count, what in ((channels + 1, "sums"), (channels, "variances")):
                num_bytes = count * max(DTYPE_BYTES[given.dtype], SINGLE_BYTES)
                yield one(
                    plan.mesh, "all_reduce", GRADIENT_AXES, num_bytes, f"{what} of {fqn}",
                    times * plan.accumulate,
                )  # fmt: skip


def kept_statistics(plan: Plan, forward: Forward) -> Iterator[Traffic]:
    """Yield the broadcasts of running statistics that each rank takes of its own samples.

    Every forward begins with the statistics of the first rank.

    Source: `runtime.checks.forward_writes`. DistributedDataParallel sends all buffers itself.
    """
    if plan.assignment.wrapper == "ddp":
        return
    for fqn in plan.graph.modules:
        is_apart = plan.graph.tracks_statistics(fqn) and fqn not in plan.assignment.synchronized
        if is_apart and any(call.is_training for call in forward.of(fqn)):
            for placed in (plan.assignment.tensors[f"{fqn}.running_{x}"] for x in ("mean", "var")):
                num_bytes = placed.info.numel * DTYPE_BYTES[placed.dtype]
                yield one(
                    plan.mesh, "broadcast", GRADIENT_AXES, num_bytes, f"statistics of {fqn}",
                    plan.accumulate,
                )  # fmt: skip
