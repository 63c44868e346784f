"""Read from a plan how many samples a step has, and check that the plan states it."""

from __future__ import annotations

import math
from collections.abc import Collection

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


def check_same_batch(spec: Spec, data_ranks: Collection[int]) -> None:
    """Check that the steps of all plans have equally many samples.

    If a plan states the samples of a data rank only, their number in a step depends on the mesh,
    and the seconds of two steps cannot be compared.

    Args:
        spec: The spec of the plan file.
        data_ranks: Numbers of data ranks that the plans have.

    Raises:
        PlanError: Plans differ in the samples of a step.
    """
    if spec.batch.global_ is not None or len(data_ranks) < 2:
        return
    own, least, most = of_data_rank(spec.batch), min(data_ranks), max(data_ranks)
    what = (
        f"the plan states {own} samples for each data rank, so a step has {own * least} to "
        f"{own * most} samples on the meshes that it allows, and their seconds cannot be compared"
    )
    fix = f"write batch: {{global: {own * most}}}, or state the sizes of the mesh"
    raise PlanError(Problem(what, spec.origin("batch"), fix))


def check_batch(spec: Spec, *, reads_tokens: bool = True) -> None:
    """Check that a plan states how many samples a step has, and how long a sample is.

    Args:
        spec: The spec of the plan file.
        reads_tokens: If True, samples are sequences of tokens, whose length must be stated.

    Raises:
        PlanError: The number or the length of samples is not stated.
    """
    batch, problems = spec.batch, []
    is_counted = batch.of_data_rank is not None or isinstance(batch.micro, int)
    if batch.global_ is None and not is_counted:
        what = "the plan states no samples per step, without which plans cannot be compared"
        problems.append(Problem(what, spec.origin("batch"), "add batch: {global: 64}"))
    if reads_tokens and batch.seq_len is None:
        what = "the plan states no sequence length"
        problems.append(Problem(what, spec.origin("batch"), "add batch: {seq_len: 2048}"))
    if problems:
        raise PlanError(problems)
