"""Read from a plan how many samples a step has, and check that the plan states it."""

from __future__ import annotations

import math

from meshplan.errors import PlanError, Problem
from meshplan.spec.spec import Batch, Spec


def of_data_rank(batch: Batch) -> int:
    """Return the samples of a step of one data rank, for plans that state no global batch.

    They are the stated samples of a data rank, or else micro * accumulate; a value that is not
    stated counts as 1.
    """
    if batch.of_data_rank is not None:
        return batch.of_data_rank
    both = (batch.micro, batch.accumulate)
    return math.prod(each for each in both if isinstance(each, int))


def check_batch(spec: Spec, *, reads_tokens: bool = True) -> None:
    """Check that a plan states how many samples a step has, and how long a sample is.

    Args:
        spec: The spec of the plan file.
        reads_tokens: If True, samples are sequences of tokens, whose length must be stated.

    Raises:
        PlanError: The number or the length of samples is not stated.
    """
    batch, problems = spec.batch, []
    is_counted = isinstance(batch.micro, int) and isinstance(batch.accumulate, int)
    if batch.global_ is None and batch.of_data_rank is None and not is_counted:
        what = "the plan states no samples per step, without which plans cannot be compared"
        problems.append(Problem(what, spec.origin("batch"), "add batch: {global: 64}"))
    if reads_tokens and batch.seq_len is None:
        what = "the plan states no sequence length"
        problems.append(Problem(what, spec.origin("batch"), "add batch: {seq_len: 2048}"))
    if problems:
        raise PlanError(problems)
