"""Messages about writes in a forward: which tensor, why that is wrong, and what to do instead."""

from __future__ import annotations

import warnings

from meshplan.errors import Problem
from meshplan.runtime.checks.places import TensorPlace


def warn(names: list[str], between: str) -> None:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"meshplan: the forward writes {names[0]}{others}, and what it writes differs between "
            f"{between}: a statistic of each one's own samples, as DistributedDataParallel has it; "
            "the first rank's is used and saved. To take it over all samples, compute it from "
            "meshplan.gather_batch(...)",
            stacklevel=2,
        )


_AFTER = "write it after optimizer.step(), outside of the forward"


def cast_problem(place: TensorPlace, dtype: str) -> Problem:
    rule = f"a rule {{match: '{place.unit}', precision: 32-true}}" if place.unit else "32-true"
    return Problem(
        f"the forward writes {place.name}, of which it has a copy in {dtype}: what is written "
        "would be rounded, or lost",
        fix=f"add {rule}, or {_AFTER}" if place.unit else f"say precision: {rule}, or {_AFTER}",
    )


def statistic_problem(name: str, between: str) -> Problem:
    return Problem(
        f"the forward writes {name} from the samples that it sees, and its output was computed "
        f"from that: {between} that see other samples would train on other numbers",
        fix="compute it from meshplan.gather_batch(...), which holds the samples of all ranks, or "
        "say batch: {per_rank: true} to let each rank and microbatch keep its own",
    )


def rank_problem(place: TensorPlace, count: int) -> Problem:
    others = f" and {count - 1} more" if count > 1 else ""
    return Problem(
        f"the forward writes {place.name}{others}, and ranks that see other samples write other "
        "numbers, so their copies of the model would part ways",
        fix="compute it from meshplan.gather_batch(...), which is the same on every rank, or "
        f"{_AFTER}",
    )


def microbatch_problem(place: TensorPlace) -> Problem:
    return Problem(
        f"the forward writes {place.name}, and a second microbatch of the same step writes other "
        "numbers than the first, where one process writes once",
        fix=f"{_AFTER}, or take the batch in one piece (batch.accumulate: 1, no pp)",
    )


def again_problem(place: TensorPlace) -> Problem:
    return Problem(
        f"the forward writes {place.name}, and writes other numbers when it runs again in backward",
        fix=f"leave its module out of activation_checkpointing, or {_AFTER}",
    )
