"""Messages about tensors that a forward writes: which, why it is wrong, and what to do instead."""

from __future__ import annotations

import warnings

from meshplan.errors import Problem
from meshplan.runtime.checks.places import TensorPlace


def warn(names: list[str], between: str) -> None:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"meshplan: the forward writes {names[0]}{others}, and the written values differ "
            f"between {between}: each of these computes a statistic of its own samples, as under "
            "DistributedDataParallel; the first rank's values are used and saved. For a statistic "
            "of all samples, compute it from meshplan.gather_batch(...)",
            stacklevel=2,
        )


_AFTER = "write it after optimizer.step(), outside the forward"


def cast_problem(place: TensorPlace, dtype: str) -> Problem:
    rule = f"a rule {{match: '{place.unit}', precision: 32-true}}" if place.unit else "32-true"
    return Problem(
        f"the forward writes {place.name}, but works on a copy of it in {dtype}: the written "
        "values would be rounded or lost",
        fix=f"add {rule}, or {_AFTER}" if place.unit else f"set precision: {rule}, or {_AFTER}",
    )


def statistic_problem(name: str, between: str) -> Problem:
    return Problem(
        f"the forward computes {name} from the samples it gets, and its output from {name}: "
        f"{between} with other samples would train with other values of {name}",
        fix=f"compute {name} from meshplan.gather_batch(...), which returns the samples of all "
        "ranks, or set batch: {per_rank: true} to let each rank and microbatch keep its own value",
    )


def rank_problem(place: TensorPlace, count: int) -> Problem:
    others = f" and {count - 1} more" if count > 1 else ""
    return Problem(
        f"the forward writes {place.name}{others}, and ranks with different samples write "
        "different values, so their copies of the model would diverge",
        fix="compute it from meshplan.gather_batch(...), which is the same on every rank, or "
        f"{_AFTER}",
    )


def microbatch_problem(place: TensorPlace) -> Problem:
    return Problem(
        f"the forward writes {place.name}, and a second microbatch of the same step writes other "
        "values than the first; one process would write once per step",
        fix=f"{_AFTER}, or run the batch as one microbatch (batch.accumulate: 1, no pp)",
    )


def second_write_problem(place: TensorPlace) -> Problem:
    return Problem(
        f"the forward writes {place.name}, but writes other values when it is recomputed in "
        "backward",
        fix=f"exclude its module from activation_checkpointing, or {_AFTER}",
    )
