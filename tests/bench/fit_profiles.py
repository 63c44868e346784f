"""Constants of the cost model from published runs, one set per framework, device and dtype.

    python -m tests.bench.fit_profiles FILE.jsonl [--write]

Least squares of relative errors within physical bounds, robust where a framework's runs are not
repeatable. Beside the error of the fit stands that of leaving out one group of runs at a time: by
model where there are several, else by the number of nodes. `--write` puts the constants into
`meshplan/cost/profiles.json`, but for fits that are further off than `WORST_RESIDUAL`: these are in
`tests/bench/profiles.json` only.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost import profile as profiles_of
from meshplan.cost.grid import MODES
from meshplan.cost.profile import GENERIC, WORST_RESIDUAL
from tests.bench.mapping import SkipError, checked
from tests.bench.row_check import read_rows
from tests.bench.time_mapping import Case, case_of
from tests.bench.time_predict import batches, predict

Array = NDArray[Any]

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
}
"""What a device can do: no share above its datasheet's, no hop faster than light's electronics."""

LOOSE: Final[Mapping[str, Mapping[str, tuple[float, float]]]] = {
    "megatron-deepspeed": {"intra_latency_s": (5e-7, 6e-4)},
}
"""Where a framework's runs say why they keep other bounds. Source: the runs' own notes: processes
were bound to the wrong NUMA nodes, so they wait for each other at each collective."""

_GENERIC: Final = {**GENERIC, "contention_alone": GENERIC["contention"]}

PRIOR: Final = 0.02
"""Of a constant at the other end of its bounds, as one relative error among the runs'."""

FEWEST: Final = 6
"""Runs that a profile is fitted to."""
SHIPPED: Final = Path(profiles_of.__file__).with_name("profiles.json")
ALL: Final = Path(__file__).with_name("profiles.json")
"""Those that are no profile to plan with, too."""

SETS_ZERO1_AFTER: Final = frozenset({"nanotron", "megatron-deepspeed", "megatron"})
"""Frameworks that gather parameters after the update. Source: nanotron, optim/zero.py; DeepSpeed,
runtime/zero/stage_1_and_2.py."""


def load(path: Path) -> list[Case]:
    """Every row of a file that can be told."""
    out = []
    for row in read_rows(path):
        try:
            out.append(case_of(checked(row)))
        except SkipError:
            continue
    return out


def by_key(cases: Sequence[Case]) -> dict[tuple[str, str, str], list[Case]]:
    out: dict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in cases:
        out[case.key].append(case)
    return dict(out)


def free_constants(cases: Sequence[Case]) -> list[str]:
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
        names += ["inter_share", "inter_latency_s"]
    if (grids["pp"] > 1).any() and len(cases) > 40:
        names += ["crossing_s", "collective_rank_s"]
    if any(_is_alone(case) for case in cases) and len(cases) > 40:
        names.append("contention_alone")
    return names


def _is_alone(case: Case) -> bool:
    """Whether DDP sums gradients of ranks that lie on a node each."""
    grid = case.grid
    is_summed = (grid["mode"] == MODES.index("ddp")) & (grid["dp_replicate"] > 1)
    return bool((is_summed & (grid["tp"] >= case.cluster.gpus_per_node)).any())


def bounds_of(framework: str, name: str) -> tuple[float, float]:
    return LOOSE.get(framework, {}).get(name, BOUNDS[name])


class Fit:
    """One profile."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases, self.names = list(cases), free_constants(cases)
        bounds = [bounds_of(self.cases[0].key[0], name) for name in self.names]
        self.low, self.high = (np.array(column) for column in zip(*bounds, strict=True))
        self.together = batches(self.cases)
        self.real = np.array([case.real_s for case in self.cases])

    def facts(self, values: Array) -> dict[str, Any]:
        """As a row of `profiles.json`."""
        constants = {name: float(v) for name, v in zip(self.names, values, strict=True)}
        return {
            "constants": constants,
            "gathers_once": self.cases[0].key[0] in SETS_ZERO1_AFTER,
        }

    def told(self, values: Array) -> Array:
        return predict(self.cases, self.facts(values), self.together)

    def run(self, start: Array | None = None) -> Array:
        """The best constants."""
        spread = self.high - self.low
        generic = np.array([_GENERIC[name] for name in self.names])
        first = np.clip(generic if start is None else start, self.low + 0.01 * spread,
                        self.high - 0.01 * spread)  # fmt: skip

        # What no run tells stays what it is for devices that nobody measured.
        usual = (generic - self.low) / spread

        def errors(unit: Array) -> Array:
            told = np.log(self.told(self.low + unit * spread) / self.real)
            return np.concatenate([told, PRIOR * (unit - usual)])

        begin = (first - self.low) / spread
        corners = self._corners(begin) if start is None else [begin]
        tried = [least_squares(errors, corner) for corner in corners]
        best = min(tried, key=lambda unit: _cost(errors(unit)))
        return np.asarray(self.low + best * spread)

    def _corners(self, begin: Array) -> Iterator[Array]:
        """From where to look: what hides something else has no slope there."""
        yield begin
        for names in (
            ("launch_s", "collective_s", "collective_rank_s"),
            ("contention", "inter_latency_s"),
        ):
            corner = begin.copy()
            corner[[n for n, name in enumerate(self.names) if name in names]] = 0.4
            yield corner


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
    return float(np.sum(np.log1p((residuals / _ROBUST) ** 2)))


def _model(case: Case) -> tuple[int, int]:
    """Blocks and features: a model of another length is no other model."""
    shape = case.work[1]
    return shape.layers, shape.hidden


def left_out(fit: Fit, best: Array) -> Array:
    """Errors of each run when its group is not fitted."""
    cases = fit.cases
    groups: dict[Any, list[int]] = defaultdict(list)
    models = {_model(case) for case in cases}
    for place, case in enumerate(cases):
        groups[_model(case) if len(models) > 1 else case.cluster.nodes].append(place)
    out = np.full(len(cases), np.nan)
    if len(groups) < 2:
        return out
    for places in groups.values():
        rest = [case for place, case in enumerate(cases) if place not in set(places)]
        if len(rest) < 4:
            continue
        other = Fit(rest)
        start = np.array([dict(zip(fit.names, best, strict=True)).get(n, _GENERIC[n])
                          for n in other.names])  # fmt: skip
        values = other.run(start)
        held = [cases[place] for place in places]
        told = predict(held, other.facts(values), batches(held))
        out[places] = told / np.array([case.real_s for case in held]) - 1
    return out


def figures(errors: Array) -> dict[str, float]:
    size = np.abs(errors[~np.isnan(errors)])
    if not len(size):
        return {}
    return {
        "rms": float(np.sqrt((size**2).mean())),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
    }


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def profile(fit: Fit, best: Array, is_fast: bool) -> dict[str, Any]:
    """A row of `profiles.json`."""
    framework, device, dtype = fit.cases[0].key
    facts = fit.facts(best)
    inside = figures(fit.told(best) / fit.real - 1)
    outside = {} if is_fast else figures(left_out(fit, best))
    groups = sorted({case.group for case in fit.cases})
    return {
        "device": device, "framework": framework, "dtype": dtype,
        "constants": rounded(facts["constants"]), "gathers_once": facts["gathers_once"],
        "residual": round(inside["rms"], 4), "num_runs": len(fit.cases),
        "fitted": rounded(inside), "left_out": rounded(outside), "groups": groups,
        "sources": [f"fitted to {len(fit.cases)} published runs: {', '.join(groups)}"],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fast", action="store_true", help="without leaving groups out")
    options = parser.parse_args(arguments)
    profiles = []
    for key, cases in sorted(by_key(load(options.file)).items()):
        if options.only not in key[0] or len(cases) < FEWEST:
            continue
        fit = Fit(cases)
        told = profile(fit, fit.run(), options.fast)
        profiles.append(told)
        print(*key, len(cases), told["constants"])
        print("    fitted", told["fitted"], " left out", told["left_out"], flush=True)
    if options.write:
        write(profiles)
    return 0


def write(profiles: Sequence[Mapping[str, Any]]) -> None:
    """Beside those of other keys that the files have."""
    known = {_key(row): row for row in json.loads(ALL.read_text())["profiles"]}
    rows = sorted((known | {_key(row): row for row in profiles}).values(), key=_key)
    kept = [row for row in rows if row["residual"] <= WORST_RESIDUAL]
    for path, chosen in ((SHIPPED, kept), (ALL, rows)):
        path.write_text(json.dumps({"profiles": chosen}, indent=1) + "\n")


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["framework"], row["device"], row["dtype"]


if __name__ == "__main__":
    raise SystemExit(main())
