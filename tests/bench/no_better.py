"""No single change beats the planner's answer: drawn plans, and every change that can be priced.

    python -m tests.bench.no_better --num 200 --seed 0

Plans are drawn (models of 1B to 70B parameters, five cards, 8 to 32 GPUs, left open throughout or
partly pinned) and planned. Then every change that `explain why-not` can price is asked, and every
one that `estimate --fixes` would offer is planned with. None that fits may be faster than the
answer by more than `SLACK`, within which the simplest plan is taken: each search has to beat this
limit, and ends once its lower bound is above it. What changes the training itself (precision,
optimizer, the capacity of experts) is not asked: the planner does not choose it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from meshplan.errors import MeshplanError
from meshplan.planner.answers.explain import Asker
from meshplan.planner.answers.settings import FIELDS
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.offload_variants import fastest_that_fits
from meshplan.planner.objectives.simplify import SLACK
from meshplan.planner.problem.decision import Evaluated
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.search import TOLERANCE
from meshplan.runtime.estimate.changes import changes_of
from tests.bench.planned_models import MODELS, write_plan

CARDS: Final = {
    "h100-sxm-80gb": "50GB/s", "a100-sxm-40gb": "25GB/s", "a100-sxm-80gb": "25GB/s",
    "l40s-48gb": "25GB/s", "rtx-4090-24gb": "12GB/s",
}  # fmt: skip
"""By name, bandwidth between nodes for each GPU."""
NAMES: Final = (
    "GPT-2 XL", "Llama-3.2-1B", "Llama-3.1-8B", "Llama-2-13B", "Llama-3.1-70B", "Mixtral-8x7B",
)  # fmt: skip
_LLAMA_13B: Final = {
    **MODELS["Llama-3.1-8B"], "hidden_size": 5120, "intermediate_size": 13824, "vocab_size": 32000,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
}  # fmt: skip
_PINS: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    ("strategy", ("full_shard", "zero2", "zero1")),
    ("activation_checkpointing", ("none", "selective", "full")),
    ("micro", (1, 2)),
    ("mesh", ("dp_shard", "dp_replicate and dp_shard", "tp and dp_shard")),
    ("offload", ("none", "auto")),
    ("loss_chunks", (1, 8, "auto")),
    ("allocator", ("default", "expandable", "auto")),
    ("loss_parallel", (True,)),
)
_MORE: Final = (
    "loss_chunks=3", "loss_chunks=6", "loss_chunks=12", "loss_chunks=64",
    "context.attention=all_gather", "context.attention=all_to_all",
    "pipeline.schedule=1F1B", "pipeline.schedule=Interleaved1F1B",
    "pipeline.schedule=InterleavedZeroBubble", "pipeline.virtual=2", "pipeline.virtual=4",
)  # fmt: skip
"""What `why-not` can price beside every value of the fields that the planner tells itself."""
LIMIT: Final = SLACK + TOLERANCE
"""Share by which a change may be faster than the answer: that of the simplest plan, and the gap."""


@dataclass(frozen=True, slots=True)
class Better:
    """A change that fits and is faster than the answer.

    Args:
        share: By how much, of the answer's seconds; 0 if by less than the limit.
    """

    setting: str
    share: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One plan.

    Args:
        words: What was drawn.
        num: Changes that were asked, whether or not they fit; 0 where nothing fits.
        best: The one that gains the most; None where none gains anything.
    """

    words: str
    num: int
    best: Better | None = None

    @property
    def is_beaten(self) -> bool:
        return self.best is not None and self.best.share > LIMIT


def draw(seed: int, folder: Path, names: tuple[str, ...] = NAMES) -> tuple[Path, str]:
    """A plan file, and what it is in words."""
    rng = random.Random(seed)
    name = rng.choice(names)
    card = rng.choice(tuple(CARDS))
    nodes = rng.choice((1, 1, 2, 4))
    seq_len = 1024 if name.startswith("GPT") else rng.choice((2048, 4096, 8192, 32768))
    batch: dict[str, Any] = {"global": 8 * nodes * rng.choice((1, 2, 8)), "seq_len": seq_len}
    pins = rng.sample(_PINS, rng.choice((0, 0, 1, 2, 3)))
    fields: dict[str, Any] = {path: rng.choice(values) for path, values in pins}
    if "micro" in fields:
        batch["micro"] = fields.pop("micro")
    if "mesh" in fields:
        fields["mesh"] = dict.fromkeys(fields["mesh"].split(" and "), "auto")
    words = f"{name}, {nodes} x 8 {card}, {batch}, {fields}"
    fields["hardware"] = {"nodes": nodes, "gpus_per_node": 8, "gpu": card, "inter": CARDS[card]}
    MODELS.setdefault("Llama-2-13B", _LLAMA_13B)  # type: ignore[attr-defined]
    path = write_plan(folder, name, batch=batch, solve={"time_limit": "900s"}, **fields)
    return path, words


class Faster(Asker):
    """Answers of `why-not` that are faster than the plan by more than `LIMIT`."""

    def _best(self, problem: PlanningProblem) -> tuple[Evaluated | None, Candidate | None, bool]:
        chosen = self.decision.chosen
        assert chosen is not None
        found = fastest_that_fits(problem, below_s=chosen.seconds * (1 - LIMIT))
        result = found.measured.result if found.measured else None
        assert result is None or isinstance(result, Evaluated)
        return result, found.best, False  # The bytes that are missing are not asked.

    def fastest(self, problem: PlanningProblem) -> Evaluated | None:
        """The fastest plan of a problem; None if it is no faster."""
        return self._best(problem)[0]


def ask(path: Path, words: str, most: int | None = None, seed: int = 0) -> Asked:
    """Plan a file, then ask what would be faster.

    Args:
        most: So many are asked, drawn; None for all of them.
    """
    asker = Faster(request_of_file(path))
    try:
        decision = asker.decision
    except MeshplanError as error:
        return Asked(f"{words}: {error.problems[0].what}", 0)
    if decision.chosen is None or not decision.is_whole:
        return Asked(f"{words}: {'nothing fits' if decision.is_whole else 'not searched whole'}", 0)
    settings = [*(each for field in FIELDS for each in asker.settings(field)), *_MORE]
    if most is not None:
        settings = random.Random(seed).sample(settings, min(most, len(settings)))
    found, num = [Better("", 0.0)], 0
    stated, given = _stated(path), yaml.safe_load(path.read_text())
    for setting in settings:
        if setting.partition("=")[0] in stated:
            continue  # A change of what is stated is no answer to the plan.
        try:
            why_not = asker.why_not(setting)
        except MeshplanError:
            continue
        num += 1
        other = why_not.evaluated
        if "strategy" in stated and other and other.plan.spec.strategy != given["strategy"]:
            continue  # `reshard_after_forward` is part of what the stated strategy says.
        if why_not.seconds is not None and not why_not.is_planned:
            found.append(Better(setting, 1 - why_not.seconds / decision.chosen.seconds))
    for setting, other in _by_fixes(path, asker, stated):
        num += 1
        if other is not None:
            found.append(Better(setting, 1 - other.seconds / decision.chosen.seconds))
    return Asked(words, num, max(found, key=lambda each: each.share))


def _stated(path: Path) -> set[str]:
    """What a plan file pins, by path."""
    plan = yaml.safe_load(path.read_text())
    pinned = {key for key, value in plan.items() if value != "auto" and not isinstance(value, dict)}
    return pinned | {f"batch.{key}" for key in plan["batch"]}


def _by_fixes(
    path: Path, asker: Faster, stated: set[str]
) -> Iterator[tuple[str, Evaluated | None]]:
    """What `--fixes` would offer if the answer did not fit: (change, the faster plan with it)."""
    assert asker.decision.chosen is not None
    for change in changes_of(asker.decision.chosen.plan):
        for key, value in yaml.safe_load(f"{{{change.setting}}}").items():
            if key in ("hardware", "mesh", "batch", *stated):
                break  # Other machines, or what `FIELDS` asks, or what the plan states.
            one = {"rules[0]": value[0]} if key == "rules" else {key: value}
            try:
                problem = PlanningProblem(request_of_file(path, overrides(one)))
                yield f"--fixes: {change.setting}", asker.fastest(problem)
            except MeshplanError:
                continue


def main() -> None:
    """Draw, plan, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, help="ask so many settings of each, drawn")
    given = parser.parse_args()
    began, asked = time.monotonic(), []
    for number in range(given.num):
        seed = given.seed * 10_000 + number
        with tempfile.TemporaryDirectory() as folder:
            one = ask(*draw(seed, Path(folder)), given.most, seed)
        asked.append(one)
        gain = f"{one.best.setting} {one.best.share:+.2%}" if one.best else ""
        print(f"{number} {one.words}: {one.num} asked; {gain}", file=sys.stderr, flush=True)
    planned = [one for one in asked if one.num]
    beaten = [one for one in planned if one.is_beaten]
    most = max((one.best.share for one in planned if one.best), default=0.0)
    print(
        f"{len(asked)} plans drawn, {len(planned)} with an answer; "
        f"{sum(one.num for one in planned):,} changes were asked; {len(beaten)} plans "
        f"beaten by more than {LIMIT:.2%}, the most gained is {most:.2%} "
        f"({(time.monotonic() - began) / 60:.0f} min)"
    )
    for one in beaten:
        print(f"  {one.words}: {one.best}")


if __name__ == "__main__":
    main()
