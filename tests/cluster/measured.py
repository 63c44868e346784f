"""Run plans on nodes and hold what is predicted against what was measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import meshplan
from meshplan.cost.calibration import read_profile
from meshplan.model.blueprint import from_mapping
from meshplan.planner.answers.difference import side_of
from meshplan.spec.reader import load_spec
from tests.cluster.plans import CONFIG, PER_NODE, plans_of
from tests.helpers.nodes import INTERFACE, nodes

ROOT: Final = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan at one speed of the links between nodes.

    Args:
        plan: Name of the plan.
        speed: Bandwidth of each node's link to the others, as tc writes it.
        told_s: Predicted seconds of a step; None where the cost model has no figure.
        seconds: Seconds of each measured step, on the slowest rank.
        told_bytes: Predicted bytes of a step that leave each node.
        sent_bytes: Bytes that left each node in a step, by its interface, without headers.
        unknown: Traffic that the forecast does not predict.
    """

    plan: str
    speed: str
    told_s: float | None
    seconds: tuple[float, ...]
    told_bytes: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    unknown: tuple[str, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def bytes_error(self) -> float:
        """The relative error of the bytes of the link that is predicted worst."""
        pairs = zip(self.told_bytes, self.sent_bytes, strict=True)
        return max((abs(told / sent - 1) for told, sent in pairs if sent), default=0.0)


def measure(
    count: int,
    speeds: Sequence[str],
    folder: Path,
    *,
    inside: str,
    plans: Iterable[str] = (),
    steps: int = 3,
    timeout_s: float | None = None,
) -> list[Row]:
    """Run plans on nodes, each plan at each speed, and return a row for each.

    Args:
        count: Number of nodes of `PER_NODE` ranks.
        speeds: Bandwidths of each node's link to the others.
        folder: Folder for the profiles and the figures of the run.
        inside: Bandwidth of what the ranks of one node send to each other, all together.
        plans: Names of plans; () for all.
        steps: Measured steps of each plan at each speed.
        timeout_s: Seconds after which the run is stopped; None for never.
    """
    chosen = [name for name in plans_of(count) if not plans or name in set(plans)]
    job = folder / "job.json"
    facts = {"nodes": count, "inside": inside, "speeds": list(speeds), "plans": chosen,
             "steps": steps, "out": str(folder / "steps.jsonl")}  # fmt: skip
    job.write_text(json.dumps(facts))
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {key: value for key, value in os.environ.items() if key not in ours}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(ROOT)}
    with nodes(count) as made:
        ranks = [
            subprocess.Popen(
                [*made.enter(node), sys.executable, "-m", "torch.distributed.run",
                 f"--nnodes={count}", f"--node-rank={node}", f"--nproc-per-node={PER_NODE}",
                 f"--master-addr={made.host}", "--master-port=29500",
                 "-m", "tests.cluster.worker", str(job)],
                env=environ, cwd=ROOT, stdout=sys.stderr,
            )
            for node in range(count)
        ]  # fmt: skip
        codes = [each.wait(timeout_s) for each in ranks]
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}; their messages are above")
    return read(folder)


def read(folder: Path) -> list[Row]:
    """Return the rows of a run, predicted anew from its profiles."""
    rows = []
    job = folder / "job.json"
    every = plans_of(json.loads(job.read_text())["nodes"])
    for line in (folder / "steps.jsonl").read_text().splitlines():
        facts = json.loads(line)
        name, speed = facts["plan"], facts["speed"]
        rows.append(
            Row(
                plan=name,
                speed=speed,
                told_s=told_seconds(every[name], Path(f"{job}.{speed}.json")),
                seconds=tuple(facts["seconds"]),
                told_bytes=tuple(facts["told_bytes"]),
                sent_bytes=tuple(facts["bytes"]),
                unknown=tuple(facts["unknown"]),
            )
        )
    return rows


def told_seconds(plan: Mapping[str, Any], profile: Path) -> float | None:
    """Return the predicted seconds of a step, as `meshplan diff --profile` does."""
    made = meshplan.make_plan(load_spec(plan), from_mapping(CONFIG))
    return side_of("plan", made, read_profile(profile)).step_s.value


def ranks_of(numbers: Sequence[float]) -> list[float]:
    """Return the rank of each number; equal numbers share the mean of their ranks.

    >>> ranks_of([30.0, 10.0, 10.0])
    [2.0, 0.5, 0.5]
    """
    return [
        sum(other < number for other in numbers) + (numbers.count(number) - 1) / 2
        for number in numbers
    ]


def spearman(rows: Sequence[Row]) -> float:
    """Return the rank correlation of predicted and measured seconds; rows without are left out."""
    known = [row for row in rows if row.told_s is not None]
    told = ranks_of([row.told_s or 0.0 for row in known])
    return statistics.correlation(told, ranks_of([row.median_s for row in known]))


def regret(rows: Sequence[Row]) -> float:
    """Return how much longer the plan takes that is predicted fastest than the fastest one."""
    known = [row for row in rows if row.told_s is not None]
    picked = min(known, key=lambda row: row.told_s or 0.0)
    return picked.median_s / min(row.median_s for row in known) - 1


def table(rows: Sequence[Row]) -> Iterable[str]:
    """Yield the lines of a Markdown table, and what follows from it at each speed."""
    speeds = list(dict.fromkeys(row.speed for row in rows))
    yield (
        "| plan | MB that leave a node: predicted, measured | "
        + " | ".join(f"s at {speed}: predicted, measured" for speed in speeds)
        + " |"
    )
    yield "|---|---|" + "---|" * len(speeds)
    for name in dict.fromkeys(row.plan for row in rows):
        own = [row for row in rows if row.plan == name]
        sent = max(own, key=lambda row: row.bytes_error)
        pairs = zip(sent.told_bytes, sent.sent_bytes, strict=True)
        errors = [abs(told / count - 1) if count else 0.0 for told, count in pairs]
        worst = errors.index(max(errors))
        cells = [f"{sent.told_bytes[worst] / 1e6:.3f}, {sent.sent_bytes[worst] / 1e6:.3f}"]
        for row in own:
            told = "unknown" if row.told_s is None else f"{row.told_s:.2f}"
            cells.append(f"{told}, {row.median_s:.2f}")
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""
    yield "| link between nodes | plans | Spearman | top-1 regret | bytes: median error, largest |"
    yield "|---|---|---|---|---|"
    for speed in speeds:
        own = [row for row in rows if row.speed == speed]
        errors = [row.bytes_error for row in own]
        yield (
            f"| {speed} | {len(own)} | {spearman(own):.3f} | {regret(own):.1%} | "
            f"{statistics.median(errors):.2%}, {max(errors):.2%} |"
        )
