"""Why a plan is what it is: the same search again, with something else held.

The answer to "why not" is the best that there is with it, what it costs and where, or how much
memory is missing, or why it is not in the space at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from meshplan.cost.grid import MODES, RECOMPUTE
from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.mesh import AXES
from meshplan.planner.decision import Question, Way
from meshplan.planner.job import Job
from meshplan.planner.numbers import memory_bounds
from meshplan.planner.row import Candidate, Row
from meshplan.planner.search import search
from meshplan.planner.space import STRATEGIES, Freedom, divisors
from meshplan.spec import STRATEGY_WORDS

FIELDS: Final = (
    *(f"mesh.{axis}" for axis in AXES if axis != "ep"),
    "strategy", "batch.micro", "activation_checkpointing", "reshard_after_forward",
)  # fmt: skip
"""What can be asked about."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the seconds of a step go.

    Attributes:
        compute: What the model's own operations take.
        recompute: What runs again.
        tensor_parallel: What tp sends.
        data: What data ranks send and nothing hides, and the optimizer.
        pipeline: Bubbles, and what stages wait for.
    """

    compute: float
    recompute: float
    tensor_parallel: float
    data: float
    pipeline: float


NAMES: Final[Mapping[str, str]] = {
    "compute": "kernels that reach less",
    "recompute": "recomputation",
    "tensor_parallel": "what tp sends in the way",
    "data": "gathering and reducing that nothing hides",
    "pipeline": "bubbles of the pipeline",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """One setting, held.

    Args:
        setting: As it was asked.
        seconds: Of the best step with it; None where there is none.
        base_s: Of the best step without.
        way: The best with it.
        shares, base_shares: Where the seconds go.
        missing_bytes: What is missing where nothing fits: of the plan that comes nearest.
        why: Why it is not in the space.
    """

    setting: str
    base_s: float | None = None
    seconds: float | None = None
    way: Way | None = None
    shares: Shares | None = None
    base_shares: Shares | None = None
    missing_bytes: int | None = None
    why: str = ""


def why_not(
    question: Question, setting: str, told: Callable[[str], None] = lambda text: None
) -> WhyNot:
    """What the plan would be with one setting held.

    Args:
        setting: As "mesh.tp=8".

    Raises:
        SpecError: It is no setting that the planner chooses.
        PlanError: The plan says too little.
    """
    path, equals, text = setting.partition("=")
    if not equals or path not in FIELDS:
        fix = f"ask about one of {', '.join(FIELDS)}, such as mesh.tp=8"
        raise SpecError(Problem(f"'{setting}' is nothing that is planned", Origin(path), fix))
    base = Job(question)
    held, why = narrowed(base.free, path, text)
    if held is None:
        return WhyNot(setting=setting, why=why)
    job = Job(question, held)
    try:
        grid = job.grid
    except PlanError:
        return WhyNot(setting=setting, why=_no_mesh(base.free, path, text))
    told(f"{len(base.grid):,} configurations, {len(grid):,} of them with {setting}")
    first, second = _best(base), _best(job)
    base_s = first[0].seconds if first else None
    base_shares = _shares(base, first[0]) if first else None
    if second is None:
        return WhyNot(setting=setting, base_s=base_s, missing_bytes=_missing(job))
    candidate, way = second
    return WhyNot(
        setting=setting,
        base_s=base_s,
        seconds=candidate.seconds,
        way=way,
        shares=_shares(job, candidate),
        base_shares=base_shares,
    )


def narrowed(free: Freedom, path: str, text: str) -> tuple[Freedom | None, str]:
    """(the freedom with one choice held, "") or (None, why it cannot be)."""
    area, _, axis = path.partition(".")
    held: dict[str, Any] = {}
    if area == "mesh":
        size = _number(path, text)
        if size not in free.axes[axis]:
            return None, _no_mesh(free, path, text)
        held = {"axes": {**free.axes, axis: (size,)}}
    elif path == "strategy":
        word = STRATEGY_WORDS.get(text.lower(), "")
        if word not in STRATEGIES:
            raise SpecError(Problem(f"'{text}' is no strategy", Origin(path)))
        modes, reshard = STRATEGIES[word]
        hybrid = word.startswith("hybrid") if MODES[modes[0]] == "shard" else None
        held = {"modes": modes, "reshard": reshard, "hybrid": hybrid}
    elif path == "batch.micro":
        held = {"micro": (_number(path, text),)}
    elif path == "activation_checkpointing":
        if text not in RECOMPUTE:
            raise SpecError(Problem(f"'{text}' is none of {', '.join(RECOMPUTE)}", Origin(path)))
        if RECOMPUTE.index(text) not in free.recompute:
            return None, _why_rejected(free, f"{path}={text}") or "the plan states another"
        held = {"recompute": (RECOMPUTE.index(text),)}
    else:
        if text not in ("true", "false"):
            raise SpecError(Problem(f"'{text}' is neither true nor false", Origin(path)))
        held = {"reshard": (int(text == "true"),), "modes": (MODES.index("shard"),)}
    return replace(free, **held), ""


def _number(path: str, text: str) -> int:
    if not text.isdigit() or not int(text):
        raise SpecError(Problem(f"'{text}' is no positive number", Origin(path)))
    return int(text)


def _why_rejected(free: Freedom, setting: str) -> str:
    """The reason that was found when the space was made."""
    path, _, text = setting.partition("=")
    for each in free.rejected:
        what, _, values = each.what.partition("=")
        if what == path and text in values.split(", "):
            return each.why
    return ""


def _no_mesh(free: Freedom, path: str, text: str) -> str:
    found = _why_rejected(free, f"{path}={text}")
    if found:
        return found
    if path.startswith("mesh.") and int(text) not in divisors(free.world):
        return f"{free.world} devices do not divide by {text}"
    if path.startswith("mesh.") and free.axes[path.partition(".")[2]] == (1,):
        return "the plan's mesh does not have that axis, or not more than one rank of it"
    return "no mesh and batch of this many devices has it"


def _best(job: Job) -> tuple[Candidate, Way] | None:
    numbers = job.numbers(job.profile)
    found = search(numbers, job.capacity, lambda candidate: job.measure(numbers, candidate))
    if found.best is None or found.measured is None:
        return None
    way = found.measured.result
    assert isinstance(way, Way)
    return found.best, way


def _missing(job: Job) -> int | None:
    """Bytes that the plan which holds the least would hold too many."""
    numbers = job.numbers(job.profile)
    row = int(np.argmin(memory_bounds(numbers)))
    smallest = Row(numbers, row, float("inf")).smallest()
    job.capacity = float("inf")  # So that it is measured to its end.
    way = job.measure(numbers, smallest).result
    if not isinstance(way, Way):
        return None
    return way.memory.worst.band[1] - job.question.limit_bytes


def _shares(job: Job, candidate: Candidate) -> Shares:
    """Where the seconds of a candidate go."""
    numbers = job.numbers(job.profile)
    at, row = candidate.row, numbers.grid[candidate.row]
    takes = np.sum([np.array(stage) for stage in candidate.takes], axis=0)
    count = takes.sum(axis=1)
    compute, tensor = float(numbers.compute_s[at] @ count), float(numbers.tensor_s[at] @ count)
    taken = takes > 0
    recompute = float((takes * numbers.again_s[at])[taken].sum())
    whole = float((takes[taken] * numbers.seconds[at][taken]).sum())
    stages = int(row["pp"])
    per_rank = int(row["microbatches"]) / stages
    data = whole - compute - recompute - tensor
    pipeline = candidate.seconds - whole * per_rank
    return Shares(
        compute=compute * per_rank,
        recompute=recompute * per_rank,
        tensor_parallel=tensor * per_rank,
        data=data * per_rank,
        pipeline=pipeline,
    )


def settings_of(free: Freedom, path: str) -> Iterator[str]:
    """Every other value of a field, as settings."""
    if path.startswith("mesh."):
        yield from (f"{path}={size}" for size in free.axes[path.partition(".")[2]])
    elif path == "strategy":
        yield from (f"{path}={word}" for word in STRATEGIES)
    elif path == "activation_checkpointing":
        yield from (f"{path}={RECOMPUTE[place]}" for place in free.recompute)
    elif path == "reshard_after_forward":
        yield from (f"{path}=true", f"{path}=false")
    elif path == "batch.micro":
        own = free.global_ or 0
        yield from (f"{path}={size}" for size in divisors(own) if size <= 16)
    else:
        what, fix = f"'{path}' is nothing that is planned", f"ask about {', '.join(FIELDS)}"
        raise SpecError(Problem(what, Origin(path), fix))
