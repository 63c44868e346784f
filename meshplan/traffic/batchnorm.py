"""Predict the traffic of BatchNorm, whose statistics cover the samples of several ranks.

Source: `runtime.apply.data.batchnorm`. It all-reduces sums with the number of values, then
variances, and in backward the gradients of both.
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
    """Yield the all-reduces of synchronized BatchNorms, for all microbatches."""
    for fqn in plan.assignment.synchronized:
        has_statistics = f"{fqn}.running_mean" in plan.graph.tensors
        for call in forward.of(fqn):
            if has_statistics and not call.is_training:
                continue  # In evaluation mode, it uses its running statistics.
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
    """Yield the broadcasts of running statistics of BatchNorms that are not synchronized.

    Each rank updates them with its own samples, so every forward begins with those of rank 0.

    Source: `runtime.checks.forward_writes`. Under DistributedDataParallel, `data.ddp` counts them.
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
