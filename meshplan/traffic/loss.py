"""Predict the traffic of a vocabulary-parallel loss.

Source: `runtime.apply.loss.vocab_parallel_loss`. It all-reduces the highest logit of each token,
then three sums per token. Its backward sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import Forward
from meshplan.traffic.types import Traffic, one

SUMS = 3
"""Sums that are all-reduced for each token."""
SINGLE_BYTES = DTYPE_BYTES["float32"]
"""Bytes of one statistic, which is computed in float32 at least."""


def token_losses(plan: Plan, forward: Forward) -> Iterator[Traffic]:
    """Yield the all-reduces of losses along tp, for all microbatches."""
    stages = plan.assignment.stages
    times = plan.accumulate * (stages.microbatches if stages else 1)
    for loss in forward.losses:
        highest = loss.count * max(DTYPE_BYTES[loss.dtype], SINGLE_BYTES)
        for num_bytes, what in ((highest, "highest logits"), (SUMS * highest, "sums over logits")):
            yield one(plan.mesh, "all_reduce", ("tp",), num_bytes, what, times)


def unknown_losses(plan: Plan, forward: Forward | None) -> Iterator[str]:
    """Yield a line of text, with the reason, if this traffic cannot be predicted."""
    if not plan.assignment.loss_parallel:
        return
    what = "what a vocabulary-parallel loss sends"
    if forward is None or not (forward.losses or forward.strays):
        yield f"{what} (needs a recorded loss)"
    elif forward.strays:
        yield f"{what} (it also calls {' and '.join(forward.strays)} on its logits)"
