"""The traffic of BatchNorm whose statistics are over all data ranks.

Source: `runtime.batchnorm`: sums and the number of values, then the variance; each is summed, and
so are the gradients of both.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.graph import DTYPE_BYTES
from meshplan.mesh import GRADIENT_AXES
from meshplan.plan import Plan
from meshplan.traffic.forward import Forward
from meshplan.traffic.loss import SINGLE_BYTES
from meshplan.traffic.tensor_parallel import is_repeated
from meshplan.traffic.types import Traffic, one


def statistics(plan: Plan, forward: Forward) -> Iterator[Traffic]:
    """What synchronized BatchNorms send, for all microbatches."""
    for fqn in plan.assignment.synchronized:
        has_statistics = f"{fqn}.running_mean" in plan.graph.tensors
        for call in forward.of(fqn):
            if has_statistics and not call.is_training:
                continue  # Those that were kept are taken.
            given = call.inputs[0]
            channels = given.shape[1]
            times = 1 + is_repeated(plan, forward, fqn, call.begin) + given.needs_grad
            for count, what in ((channels + 1, "sums"), (channels, "variances")):
                num_bytes = count * max(DTYPE_BYTES[given.dtype], SINGLE_BYTES)
                yield one(
                    plan.mesh, "all_reduce", GRADIENT_AXES, num_bytes, f"{what} of {fqn}",
                    times * plan.accumulate,
                )  # fmt: skip
