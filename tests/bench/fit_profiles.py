"""Constants of the cost model from published runs, as few as tell models that were left out.

    python -m tests.bench.fit_profiles FILE.jsonl [--only FRAMEWORK] [--same] [--write]
    python -m tests.bench.fit_profiles docs/evidence/h200.json [--write]

Every constant begins as the generic one. The one is freed that makes the errors of left-out models
smallest (one model at a time; one number of nodes and source, where there is one model), then the
next, until that gains less than `GAIN`. What runs cannot tell apart thus stays generic, and the
error beside a profile is that of models that it has not seen. A framework with runs on several
devices has constants for all of them, and for a device its own ones where these tell more.
Jobs that stood still, which the network of one source's cluster did, are left out beforehand.
Steps that `tests.gpu` timed give the constants of hf-eager in the same way.
`--same` leaves the choice of constants as it is and fits their values anew, in a minute.
`--write` puts the constants into `meshplan/cost/profiles.json`, which `plan` reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost import profile as profiles_of
from meshplan.cost.grid import MODES
from meshplan.cost.profile import GENERIC
from tests.bench.mapping import SkipError, checked
from tests.bench.row_check import read_rows
from tests.bench.time_mapping import Case, case_of
from tests.bench.time_planned import PlannedRun, planned_runs, predictor_of
from tests.bench.time_predict import batches, predict

Array = NDArray[Any]
Run = Case | PlannedRun

BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "efficiency": (0.30, 0.95),
    "attention_efficiency": (0.05, 0.90),
    "kernel_s": (1e-6, 1e-5),
    "launch_s": (1e-6, 8e-5),
    "collective_s": (1e-6, 1e-3),
    "collective_rank_s": (0.0, 1e-3),
    "collective_node_s": (0.0, 3e-3),
    "memory_share": (0.30, 0.95),
    "intra_share": (0.20, 0.95),
    "inter_share": (0.05, 0.98),
    "intra_latency_s": (5e-7, 3e-5),
    "inter_latency_s": (1e-6, 1e-3),
    "contention": (0.0, 1.0),
    "contention_alone": (0.0, 1.0),
    "tp_exposed": (0.1, 1.0),
    "crossing_s": (0.0, 2e-2),
    "congestion": (0.0, 1.0),
}
"""What a device can do: no share above its datasheet's, no hop faster than light's electronics."""

LOOSE: Final[Mapping[str, Mapping[str, tuple[float, float]]]] = {
    "deepspeed": {"intra_latency_s": (5e-7, 2e-3)},
    "hf-eager": {"launch_s": (1e-6, 2e-4)},
}
"""Where a framework's runs say why they keep other bounds. Source: deepspeed, the runs' own notes:
processes were bound to the wrong NUMA nodes, so they wait for each other at each collective.
hf-eager, the section "host" of docs/evidence/h200.json: steps that wait for the host take 49 to 69
us for each kernel, of which the cost model counts about 60 %."""


def bounds_of(framework: str, name: str) -> tuple[float, float]:
    return LOOSE.get(framework, {}).get(name, BOUNDS[name])


_GENERIC: Final = {**GENERIC, "contention_alone": GENERIC["contention"]}

PRIOR: Final = 0.02
"""Of a constant at the other end of its bounds, as one relative error among the runs'."""

FEWEST: Final = 6
"""Runs that a profile is fitted to."""
SHIPPED: Final = Path(profiles_of.__file__).with_name("profiles.json")
GAIN: Final = 0.03
"""What a further constant gains at least, in the mean of `_loss` over runs."""
MOST: Final = 120
"""Runs by which constants are chosen; of more runs every n-th counts."""

SETS_ZERO1_AFTER: Final = frozenset({"nanotron", "deepspeed", "megatron"})
"""Frameworks that gather parameters after the update. Source: nanotron, optim/zero.py; DeepSpeed,
runtime/zero/stage_1_and_2.py."""


def load(path: Path) -> list[Run]:
    """Every row of a file that can be told."""
    if path.suffix == ".json":
        return [*planned_runs(path)]
    out: list[Run] = []
    for row in read_rows(path):
        try:
            out.append(case_of(checked(row)))
        except SkipError:
            continue
    return out


def by_framework(cases: Sequence[Run]) -> dict[str, list[Run]]:
    out: dict[str, list[Run]] = defaultdict(list)
    for case in cases:
        out[case.key[0]].append(case)
    return dict(out)


def free_constants(cases: Sequence[Run]) -> list[str]:
    """What these runs can tell: no link that none of them uses."""
    names = ["efficiency", "attention_efficiency", "kernel_s", "launch_s", "memory_share"]
    grids = np.concatenate([case.grid for case in cases])
    nodes = max(case.cluster.nodes for case in cases)
    if (grids["tp"] > 1).any() or (grids["dp_shard"] * grids["dp_replicate"] > 1).any():
        names += ["intra_share", "contention"]
    if (grids["tp"] > 1).any():
        names += ["intra_latency_s", "tp_exposed", "collective_s"]
    if any((case.grid["tp"] > case.cluster.gpus_per_node).any() for case in cases):
        names.append("collective_node_s")
    if nodes > 1:
        names += ["inter_share", "inter_latency_s", "congestion"]
    if (grids["pp"] > 1).any() and len(cases) > 40:
        names += ["crossing_s", "collective_rank_s"]
    if any(_is_alone(case) for case in cases) and len(cases) > 40:
        names.append("contention_alone")
    return names


def _is_alone(case: Run) -> bool:
    """Whether DDP sums gradients of ranks that lie on a node each."""
    grid = case.grid
    is_summed = (grid["mode"] == MODES.index("ddp")) & (grid["dp_replicate"] > 1)
    return bool((is_summed & (grid["tp"] >= case.cluster.gpus_per_node)).any())


class Fit:
    """The values of some constants, by least squares of relative errors.

    Args:
        cases: Runs of one framework.
        names: The constants that are free; all others are generic.
    """

    def __init__(self, cases: Sequence[Run], names: Sequence[str]) -> None:
        self.cases, self.names = list(cases), list(names)
        framework = self.cases[0].key[0]
        bounds = np.array([bounds_of(framework, name) for name in self.names]).reshape(-1, 2)
        self.low, self.high = bounds[:, 0], bounds[:, 1]
        self.real = np.array([case.real_s for case in self.cases])
        self._seconds = _predictor(self.cases)

    def facts(self, values: Array) -> dict[str, Any]:
        """As a row of `profiles.json`."""
        constants = {name: float(v) for name, v in zip(self.names, values, strict=True)}
        return {
            "constants": constants,
            "gathers_once": self.cases[0].key[0] in SETS_ZERO1_AFTER,
        }

    def errors(self, values: Array) -> Array:
        """Relative errors of the runs."""
        return np.asarray(self._seconds(self.facts(values)) / self.real - 1)

    def run(self) -> Array:
        """The best values."""
        if not self.names:
            return np.zeros(0)
        spread = self.high - self.low
        generic = np.array([_GENERIC[name] for name in self.names])
        # What no run tells stays what it is for devices that nobody measured.
        usual = np.clip((generic - self.low) / np.maximum(spread, 1e-30), 0, 1)

        def errors(unit: Array) -> Array:
            told = np.log1p(self.errors(self.low + unit * spread))
            return np.concatenate([told, PRIOR * (unit - usual)])

        tried = [least_squares(errors, start) for start in self._starts(usual)]
        best = min(tried, key=lambda unit: _cost(errors(unit)))
        return np.asarray(self.low + best * spread)

    def _starts(self, usual: Array) -> Iterator[Array]:
        """From where to look: what hides something else has no slope there."""
        begin = np.clip(usual, 0.01, 0.99)
        yield begin
        for names in _HIDING:
            if found := [n for n, name in enumerate(self.names) if name in names]:
                corner = begin.copy()
                corner[found] = 0.4
                yield corner


def _predictor(cases: Sequence[Run]) -> Callable[[Mapping[str, Any]], Array]:
    """Return a function from a row of `profiles.json` to the seconds of each run."""
    if planned := [case for case in cases if isinstance(case, PlannedRun)]:
        return predictor_of(planned)
    published = [case for case in cases if isinstance(case, Case)]
    places: dict[Any, list[int]] = defaultdict(list)
    for place, case in enumerate(published):
        places[case.key].append(place)
    chosen = [(each, [published[place] for place in each]) for each in places.values()]
    parts = [(each, some, batches(some)) for each, some in chosen]

    def seconds(facts: Mapping[str, Any]) -> Array:
        told = np.zeros(len(published))
        for each, some, together in parts:
            told[each] = predict(some, facts, together)
        return told

    return seconds


_HIDING: Final = (
    ("launch_s", "collective_s", "collective_rank_s"),
    ("contention", "inter_latency_s"),
)
_ROBUST: Final = 0.05
"""Errors beyond it count ever less: some runs met trouble that no field tells."""


def least_squares(errors: Callable[[Array], Array], start: Array) -> Array:
    """Levenberg-Marquardt in the unit cube, Cauchy's loss by weights.

    Source: Triggs et al. 2000 (bundle adjustment), sections 4 and 6, for weights and damping.
    """
    x, damping = start, 1e-2
    residuals = errors(x)
    cost = _cost(residuals)
    for _ in range(80):
        steps = np.where(x > 0.5, -1e-4, 1e-4)
        slopes = np.stack(
            [(errors(x + step) - residuals) / step.sum() for step in np.diag(steps)], axis=1
        )
        weights = 1 / (1 + (residuals / _ROBUST) ** 2)
        gradient = slopes.T @ (weights * residuals)
        # At a bound, what leads out of the cube does not count.
        free = ~(((x <= 0) & (gradient > 0)) | ((x >= 1) & (gradient < 0)))
        if not free.any():
            break
        normal = (slopes[:, free] * weights[:, None]).T @ slopes[:, free]
        while damping < 1e8:
            scale = np.diag(np.diag(normal) + 1e-9)
            move = np.zeros_like(x)
            move[free] = np.linalg.solve(normal + damping * scale, -gradient[free])
            new = np.clip(x + move, 0, 1)
            tried = errors(new)
            if (better := _cost(tried)) < cost:
                break
            damping *= 4
        else:
            break
        is_done = cost - better < 1e-7 * cost
        x, residuals, cost, damping = new, tried, better, damping / 4
        if is_done:
            break
    return x


def _cost(residuals: Array) -> float:
    return float(np.sum(_loss(residuals)))


def _loss(errors: Array) -> Array:
    return np.log1p((errors / _ROBUST) ** 2)


def _groups(cases: Sequence[Run]) -> list[list[int]]:
    """Places of cases that are left out together."""
    keys: list[Any] = [case.model for case in cases]
    if len(set(keys)) < 2:
        keys = [(case.group, case.cluster.nodes) for case in cases]
    out: dict[Any, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        out[key].append(place)
    return list(out.values())


def left_out(cases: Sequence[Run], names: Sequence[str]) -> Array:
    """Relative error of each run, by constants that were fitted without its group."""
    out = np.full(len(cases), np.nan)
    for places in _groups(cases):
        rest = [case for place, case in enumerate(cases) if place not in set(places)]
        held = Fit([cases[place] for place in places], names)
        if rest:
            out[places] = held.errors(Fit(rest, names).run())
    return out


def select(cases: Sequence[Run]) -> list[str]:
    """The constants that tell left-out runs better than the generic ones do.

    One is freed after the other; where no single one gains, two at once.
    """
    some = list(cases)[:: -(-len(cases) // MOST)]
    free, names = free_constants(some), list[str]()
    score = _score(left_out(some, names))
    while found := _best(some, names, [(name,) for name in free if name not in names], score):
        names, score = found
    if not names and (found := _best(some, names, list(itertools.combinations(free, 2)), score)):
        names, _ = found
    return names


def _best(
    cases: Sequence[Run], names: list[str], more: Sequence[tuple[str, ...]], score: float
) -> tuple[list[str], float] | None:
    """The constants with the further ones that gain the most, and their score; None if none do."""
    tried = {each: _score(left_out(cases, [*names, *each])) for each in more}
    for each in sorted(tried, key=tried.__getitem__):
        if tried[each] > score - GAIN * len(each):
            return None
        # A constant at the end of its bounds stands for something else.
        if _is_inside(Fit(cases, [*names, *each])):
            return [*names, *each], tried[each]
    return None


def _is_inside(fit: Fit) -> bool:
    """Whether no constant of the best fit is at the end of its bounds."""
    share = (fit.run() - fit.low) / (fit.high - fit.low)
    return bool(((share > 0.01) & (share < 0.99)).all())


def _score(errors: Array) -> float:
    return float(np.nanmean(_loss(errors)))


def figures(errors: Array) -> dict[str, float]:
    size = np.abs(errors[~np.isnan(errors)])
    return rounded({
        "rms": float(np.sqrt((size**2).mean())),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
    })  # fmt: skip


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def profile(cases: Sequence[Run], names: Sequence[str], device: str | None) -> dict[str, Any]:
    """A row of `profiles.json`.

    Args:
        cases: Runs of one framework.
        names: The constants that are fitted.
        device: The only device that the constants are for; None for any.
    """
    fit = Fit(cases, names)
    best = fit.run()
    facts = fit.facts(best)
    inside = figures(fit.errors(best))
    groups = sorted({case.group for case in cases})
    return {
        "framework": cases[0].key[0], "device": device, "dtype": cases[0].key[2],
        "constants": rounded(facts["constants"]), "gathers_once": facts["gathers_once"],
        "residual": inside["rms"], "num_runs": len(cases),
        "fitted": inside, "left_out": figures(left_out(cases, names)), "groups": groups,
        "devices": sorted({case.key[1] for case in cases}),
        "sources": [f"fitted to {len(cases)} {_whose(cases[0])} runs: {', '.join(groups)}"],
    }  # fmt: skip


def _whose(case: Run) -> str:
    return "timed" if isinstance(case, PlannedRun) else "published"


def unstalled(cases: Sequence[Run]) -> list[Run]:
    """The runs whose network did not stand still, as all constants at once tell all runs."""
    if not any(isinstance(case, Case) and math.isfinite(case.stall_s) for case in cases):
        return list(cases)
    some = list(cases)[:: -(-len(cases) // MOST)]
    fit = Fit(some, free_constants(some))
    told = _predictor(cases)(fit.facts(fit.run()))
    return [
        case
        for case, seconds in zip(cases, told, strict=True)
        if not (isinstance(case, Case) and case.is_stalled(float(seconds)))
    ]


def profiles(cases: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """The rows of one framework."""
    names = select(cases)
    everywhere = left_out(cases, names)
    yield profile(cases, names, None)
    devices = sorted({case.key[1] for case in cases})
    for device in devices if len(devices) > 1 else ():
        chosen = [case for case in cases if case.key[1] == device]
        own = select(chosen)
        shared = everywhere[[case.key[1] == device for case in cases]]
        if _score(left_out(chosen, own)) < _score(shared) - GAIN:
            yield profile(chosen, own, device)


def refitted(framework: str, cases: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """The rows that there are of one framework, with the values of their constants fitted anew."""
    for (name, device), row in profiles_of.fitted().items():
        if name == framework:
            chosen = [case for case in cases if device in (None, case.key[1])]
            yield profile(chosen, list(row["constants"]), device)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    found = []
    for framework, cases in sorted(by_framework(load(options.file)).items()):
        if options.only not in framework or len(cases) < FEWEST:
            continue
        cases = unstalled(cases)
        for row in refitted(framework, cases) if options.same else profiles(cases):
            found.append(row)
            chosen = [case for case in cases if row["device"] in (None, case.key[1])]
            generic = figures(Fit(chosen, []).errors(np.zeros(0)))
            print(framework, row["device"], len(chosen), row["constants"])
            print("    fitted", row["fitted"], " left out", row["left_out"], flush=True)
            print("    generic", generic, flush=True)
    if options.write:
        write(found)
    return 0


def write(rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the rows of these frameworks."""
    new = {row["framework"] for row in rows}
    known = json.loads(SHIPPED.read_text())["profiles"]
    kept = [row for row in known if row["framework"] not in new]
    order = sorted([*kept, *rows], key=lambda row: (row["framework"], row["device"] or ""))
    SHIPPED.write_text(json.dumps({"profiles": order}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
