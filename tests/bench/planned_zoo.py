"""Plan models that are of no transcribed family, run each chosen plan, and price plans by hand.

    python -m tests.bench.planned_zoo [--only 'bert*'] [--ranks 8] [--tight] [--json FILE] [--write]

Each model has the width of its config's default, some have more blocks; it is built on meta, and
planned for 2 nodes of 4 GPUs. Plans that an engineer would write by hand are priced: none that fits
may be faster than the chosen one by more than the planner gives up for a simpler plan. The chosen
plan is then trained on gloo ranks as `meshplan verify` does (fewer blocks, float32): losses, norms
and every parameter against one process, and the bytes of every rank and its collectives against
those predicted. `verify` makes every axis 2; here axes are as long as they are planned, up to
--ranks ranks.

With --tight, a step has two samples, and nodes are joined by slow links: data ranks run out, so
that tensor parallelism and stages have to be chosen.

With --json, results are appended to a file, and models that stand in it are not run again. --write
makes planned_zoo.md of all results. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import math
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

import meshplan
from meshplan.api.source import source_of
from meshplan.errors import MeshplanError
from meshplan.plan.verdict import Verdict
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.simplify import SLACK
from meshplan.planner.solve.search import TOLERANCE
from meshplan.render.base.text import columns
from meshplan.runtime.estimate.scale_down import model_source_of, shrink
from meshplan.runtime.verify.verify import verify
from tests.bench import planned_zoo_models
from tests.bench.planned_zoo_models import INPUTS, MODELS, OWN, SMALL, TOKENS, attribute_of

PAGE: Final = Path(__file__).with_suffix(".md")
LIMIT: Final = SLACK + TOLERANCE
"""Share by which a plan by hand may be faster: what the planner gives up for a simpler plan."""

_GPU: Final = "rtx-4090-24gb"
_SAMPLES, _TIGHT_SAMPLES = 256, 2
"""Samples of a step, ordinarily and with --tight."""
_BY_HAND: Final[Mapping[str, Mapping[str, Any]]] = {
    "ddp": {"mesh": {"dp_replicate": 8}, "strategy": "ddp"},
    "full_shard": {"mesh": {"dp_shard": 8}, "strategy": "full_shard"},
    "full_shard, recomputed": {"mesh": {"dp_shard": 8}, "strategy": "full_shard",
                               "activation_checkpointing": "full"},
    "zero2": {"mesh": {"dp_shard": 8}, "strategy": "zero2"},
    "hybrid_shard": {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "strategy": "hybrid_shard"},
    "hybrid_shard, recomputed": {"mesh": {"dp_replicate": 2, "dp_shard": 4},
                                 "strategy": "hybrid_shard", "activation_checkpointing": "full"},
    "tp 2": {"mesh": {"dp_shard": 4, "tp": 2}, "tp_plan": "auto", "strategy": "full_shard"},
    "tp 4": {"mesh": {"dp_shard": 2, "tp": 4}, "tp_plan": "auto", "strategy": "full_shard"},
    "pp 2": {"mesh": {"pp": 2, "dp_shard": 4}, "strategy": "full_shard",
             "pipeline": {"schedule": "1F1B", "microbatches": 4}},
}  # fmt: skip
"""Plans that engineers write, for 4 samples at a time, or 16 where blocks are recomputed."""


def _cut(pp: int = 1, tp: int = 1, strategy: str = "zero1", **more: Any) -> Mapping[str, Any]:
    """Return a plan by hand for two samples, with stages, tensor parallelism and data ranks."""
    data = 8 // pp // tp
    mesh = {"pp": pp, "dp_shard": data, "tp": tp}
    plan = {"mesh": {axis: size for axis, size in mesh.items() if size > 1}}
    plan |= {"strategy": strategy} if data > 1 else {"strategy": None}
    plan |= {"tp_plan": "auto"} if tp > 1 else {}
    microbatches = _TIGHT_SAMPLES // data
    plan |= {"pipeline": {"schedule": "1F1B", "microbatches": microbatches}} if pp > 1 else {}
    return {**plan, **more}


_TIGHT_BY_HAND: Final[Mapping[str, Mapping[str, Any]]] = {
    "tp 8": _cut(tp=8),
    "tp 4": _cut(tp=4),
    "tp 4, full_shard": _cut(tp=4, strategy="full_shard"),
    "tp 4, sequence parallel": _cut(tp=4, sequence_parallel=True),
    "pp 8": _cut(pp=8),
    "pp 4": _cut(pp=4),
    "pp 4, recomputed": _cut(pp=4, activation_checkpointing="full"),
    "pp 4, tp 2": _cut(pp=4, tp=2),
    "pp 2, tp 4": _cut(pp=2, tp=4),
    "pp 2, tp 2": _cut(pp=2, tp=2),
}
"""Plans that engineers write for two samples on eight GPUs."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What became of one model.

    Args:
        outcome: "ok", "refused" (no plan was found), "not run", "wrong", "beaten" or "error"; `why`
            says why.
        chosen: The chosen mesh and strategy.
        seconds: Seconds of a step under the chosen plan.
        search_s: Seconds that the search took.
        gap: Share by which some plan may be faster.
        ranks: Number of gloo ranks that the chosen plan was trained on.
        apart: Largest difference between the run and one process, as a share of what is allowed.
        loss_apart: Largest difference between losses of the run and of one process, relative to the
            loss.
        held_bytes: Bytes of parameters, gradients and optimizer states that all ranks held.
        sent_bytes: Bytes of the collectives that all ranks issued in a step.
        by_hand: Seconds of each plan by hand, or why it has none.
        samples: Samples of a step.
    """

    name: str
    outcome: str
    chosen: str = ""
    seconds: float = 0.0
    search_s: float = 0.0
    gap: float = 0.0
    ranks: int = 0
    apart: float = 0.0
    loss_apart: float = 0.0
    held_bytes: int = 0
    sent_bytes: int = 0
    by_hand: Mapping[str, float | str] = field(default_factory=dict)
    why: str = ""
    samples: int = _SAMPLES

    @property
    def fitting(self) -> list[float]:
        """Seconds of the plans by hand that fit."""
        return [each for each in self.by_hand.values() if not isinstance(each, str)]


def words_of(name: str, samples: int = _SAMPLES) -> dict[str, Any]:
    """Return a plan of a step of so many samples that leaves everything open."""
    with torch.device("meta"):
        model = getattr(planned_zoo_models, attribute_of(name))()
    more = OWN[name][1] if name in OWN else INPUTS.get(name, {})
    batch: dict[str, Any] = {"global": samples}
    if "input" not in more and getattr(model, "main_input_name", "input_ids") == "input_ids":
        batch["seq_len"] = TOKENS.get(name, 512)
    inter = "10GB/s" if samples == _SAMPLES else "2GB/s"
    return {
        "version": 1, "mesh": "auto", "strategy": "auto", "activation_checkpointing": "auto",
        "precision": "bf16-mixed", "batch": batch, **more,
        "model": {"entry": f"tests.bench.planned_zoo_models:{attribute_of(name)}"},
        "solve": {"time_limit": "120s"},
        "hardware": {"nodes": 2, "gpus_per_node": 4, "inter": inter, "gpu": _GPU},
    }  # fmt: skip


def run(name: str, ranks: int, samples: int = _SAMPLES) -> Planned:
    """Plan a model, price plans by hand, and train the chosen plan on at most `ranks` ranks."""
    words, found = words_of(name, samples), partial(Planned, name, samples=samples)
    began = time.monotonic()
    try:
        decision = meshplan.search_plan(words)
    except MeshplanError as error:
        return found("refused", why="; ".join(each.what for each in error.problems))
    search_s = time.monotonic() - began
    if decision.chosen is None:
        return found("refused", search_s=search_s, why="nothing fits")
    stated, chosen = overrides(decision.chosen.stated), decision.chosen
    mesh = " x ".join(f"{a.name} {a.size}" for a in chosen.plan.mesh.axes if a.size > 1)
    known = {
        "chosen": f"{mesh}, {chosen.plan.assignment.strategy.name}", "search_s": search_s,
        "seconds": chosen.seconds, "gap": decision.gap,
    }  # fmt: skip
    by_hand: dict[str, float | str] = {}
    for plan, more in (_BY_HAND if samples == _SAMPLES else _TIGHT_BY_HAND).items():
        by_hand[plan] = _price(words, more)
    known["by_hand"] = by_hand
    try:
        verdict = _trained(words, stated, ranks)
    except MeshplanError as error:
        return found("not run", **known, why="; ".join(e.what for e in error.problems))
    if verdict.together is None or verdict.alone is None:
        return found("not run", **known, why=str(verdict)[:1500])
    compared = verdict.comparisons()
    known |= {
        "ranks": verdict.world,
        "apart": max(c.difference / c.allowed for c in compared if c.allowed),
        "loss_apart": max(
            c.difference / abs(c.alone) for c in compared if c.what == "loss" and c.alone
        ),
        "held_bytes": sum(sum(astuple(rank.measured)) for rank in verdict.ranks),
        "sent_bytes": sum(rank.collective_bytes for rank in verdict.ranks),
    }
    if not verdict.is_ok:
        return found("wrong", **known, why=str(verdict)[:1500])
    done = found("ok", **known)
    if min(done.fitting, default=math.inf) < chosen.seconds * (1 - LIMIT):
        return replace(done, outcome="beaten")
    return done


def _trained(words: Mapping[str, Any], stated: Sequence[str], ranks: int) -> Verdict:
    """Train a plan on ranks as `meshplan verify` does, with axes as long as `ranks` allows."""
    spec = source_of(words, [*stated, "precision=32-true"]).spec
    name = words["model"]["entry"].partition(":")[2]
    is_smaller = name in map(attribute_of, SMALL)
    entry = f"{words['model']['entry']}_small" if is_smaller else None
    source = model_source_of(spec, entry, None)
    for most in (8, 4):
        small = shrink(spec, source, most_of_axis=most)
        assert isinstance(small.spec.mesh, Mapping)
        if math.prod(small.spec.mesh.values()) <= ranks:
            return verify(small, lambda line: None)
    return verify(shrink(spec, source), lambda line: None)


def _price(words: Mapping[str, Any], more: Mapping[str, Any]) -> float | str:
    """Return the seconds of a plan by hand, or why it has none."""
    data, samples = (
        math.prod(size for axis, size in more["mesh"].items() if axis.startswith("dp")),
        words["batch"]["global"],
    )
    micro = 4 if more.get("activation_checkpointing") != "full" else 16
    micro = min(micro, samples // data)
    batch = dict(words["batch"], micro=micro, accumulate=samples // data // micro)
    del batch["global"]
    plan = {**words, "activation_checkpointing": "none", **more, "batch": batch}
    try:
        decision = meshplan.search_plan(plan)
    except MeshplanError as error:
        return error.problems[0].what
    if decision.chosen is not None:
        return decision.chosen.seconds
    # The last reason is that of the one plan; without one, it does not fit.
    last = decision.rejected[-1:]
    return next((each.why for each in last if each.what == "1 configuration"), "does not fit")


def _table(results: Sequence[Planned]) -> str:
    rows = [(
        "model", "chosen for 2 x 4 GPUs", "step", "search", "gap",
        "ranks", "loss apart", "of limit", "by hand", "best", "",
    )]  # fmt: skip
    for each in results:
        best = min(each.fitting, default=0.0)
        rows.append((
            each.name, each.chosen, f"{each.seconds * 1e3:.0f} ms", f"{each.search_s:.0f} s",
            f"{each.gap:.2%}", str(each.ranks), f"{each.loss_apart:.0e}", f"{each.apart:.2f}",
            f"{len(each.fitting)} of {len(each.by_hand)}",
            f"{best / each.seconds:.2f}" if best else "",
            each.outcome if each.outcome != "ok" else "",
        ))  # fmt: skip
    return "\n".join(columns(rows, "<<>>>>>>>><"))


def _not_run(results: Sequence[Planned]) -> str:
    """Return a sentence that names the models that were not run; "" if all were."""
    names = [name for name in MODELS if name not in {each.name for each in results}]
    return (
        textwrap.fill(f"Not run, or stopped before the end: {', '.join(names)}.", 100)
        if names
        else ""
    )


def _unpriced(results: Sequence[Planned]) -> str:
    """Return a line on each reason why plans by hand have no price, other than memory."""
    lines = []
    for each in results:
        whys = [why for why in each.by_hand.values() if isinstance(why, str)]
        for why in dict.fromkeys(whys):
            if why != "does not fit":
                lines.append(f"- {each.name}, {whys.count(why)} without a price: {why}")
    return re.sub(r"\S*/site-packages/", "", "\n".join(lines))


def page(results: Sequence[Planned]) -> str:
    """Return planned_zoo.md."""
    ordinary = [each for each in results if each.samples == _SAMPLES]
    tight = [each for each in results if each.samples != _SAMPLES]
    ok, tight_ok = (sum(e.outcome == "ok" for e in each) for each in (ordinary, tight))
    return f"""# Plans for models of no known family

`python -m tests.bench.planned_zoo --json FILE --write`: {len(ordinary)} of {len(MODELS)} models
were run, {ok} are ok. Steps are those that the planner predicts for two nodes of four
{_GPU}. The chosen plan then trained for three steps on gloo "ranks", of which a run allowed 2, 4
or 8 (`--ranks`). "loss apart": the largest difference of a loss from that of one process, relative
to the loss; "of limit": the largest difference of a loss, a gradient norm or a parameter, as a
share of what `meshplan verify` allows. Bytes that ranks held and sent are equal to those predicted.
"by hand": how many of {len(_BY_HAND)} plans written by hand fit and are priced; "best": the seconds
of the fastest of them, as a multiple of those of the chosen plan.

```
{_table(ordinary)}
```
{_unpriced(ordinary)}

{_not_run(ordinary)}

## Two samples in a step

With `--tight`, data ranks run out at two, and nodes are joined by slow links, so that stages and
tensor parallelism have to be chosen: {len(tight)} of {len(MODELS)} models were run,
{tight_ok} are ok. The plan trained on as many ranks as it is for; by hand are
{len(_TIGHT_BY_HAND)} plans with both. A plan by hand may be up to 2 % faster: of plans so near
to each other the simplest is chosen.

```
{_table(tight)}
```
{_unpriced(tight)}

{_not_run(tight)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="*")
    parser.add_argument("--ranks", type=int, default=8, help="most gloo ranks (default 8)")
    parser.add_argument("--tight", action="store_true", help="two samples in a step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args(arguments)
    done: dict[tuple[str, int], Planned] = {}
    samples = _TIGHT_SAMPLES if args.tight else _SAMPLES
    if args.json is not None and args.json.exists():
        for line in args.json.read_text().splitlines():
            known = Planned(**json.loads(line))
            done[known.name, known.samples] = known
    names = [name for name in MODELS if fnmatch.fnmatch(name, args.only)]
    for name in names:
        if (name, samples) in done:
            continue
        try:
            found = run(name, args.ranks, samples)
        except Exception:
            why = traceback.format_exc()[-1500:]
            found = Planned(name, "error", samples=samples, why=why)
        done[name, samples] = found
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        print(name, found.outcome, found.chosen, found.why, file=sys.stderr, flush=True)
    results = [
        done[key] for key in itertools.product(MODELS, (_SAMPLES, _TIGHT_SAMPLES)) if key in done
    ]
    print(page(results))
    if args.write:
        PAGE.write_text(page(results))
    return int(any(each.outcome not in ("ok", "refused") for each in results))


if __name__ == "__main__":
    sys.exit(main())
