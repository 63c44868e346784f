"""What the planner picks, beside the common rule of thumb: `docs/strategy_guide.md`.

    python -m tests.bench.strategy_guide > docs/strategy_guide.md

The rule goes by the model's size and the number of GPUs alone. Beside what the planner picks stands
the best plan with the rule's strategy (the same search with that held), and where that is slower,
for what: every figure and every reason is the planner's own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

from meshplan.api.planning import explain, search_plan
from meshplan.planner.answers.explain import WhyNot
from meshplan.render.base.text import columns
from meshplan.render.plans.explain import verdict
from meshplan.units import format_gib
from tests.bench.planned_models import write_plan
from tests.bench.plans_table import there

SLACK: Final = 0.02
"""As the planner: what is not slower by more is as good."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One cell of the rule of thumb.

    Args:
        words: As people say it.
        strategies: Words of `strategy` that follow it; () for one GPU, where there is none.
    """

    words: str
    strategies: tuple[str, ...]


_ONE: Final = Rule("single GPU", ())
_DDP: Final = Rule("DDP", ("ddp",))
_SOME: Final = Rule("FSDP or ZeRO-2", ("full_shard", "zero2"))
_SOME_FAR: Final = Rule(
    "FSDP or ZeRO-2", ("full_shard", "zero2", "hybrid_shard", "hybrid_shard_zero2")
)
_ALL: Final = Rule("ZeRO-3", ("full_shard",))
_ALL_FAR: Final = Rule("ZeRO-3, hybrid over nodes", ("full_shard", "hybrid_shard"))

SIZES: Final = (
    ("< 500M", "GPT-2 124M", 1024, 512, (_ONE, _DDP, _DDP)),
    ("500M-3B", "Llama-3.2-1B", 4096, 256, (_ONE, _SOME, _SOME_FAR)),
    ("> 3B", "Llama-3.1-8B", 8192, 128, (_ONE, _ALL, _ALL_FAR)),
)
"""(size, model, tokens of a sample, samples of a step, the rule for each of MACHINES)."""
MACHINES: Final = (("one GPU", 1, 1), ("one node", 1, 8), ("4 nodes", 4, 8))
"""(words, nodes, GPUs of each)."""


def rows() -> Iterator[tuple[str, ...]]:
    """One for each size and machine."""
    for size, model, seq_len, samples, rules in SIZES:
        for (words, nodes, each), rule in zip(MACHINES, rules, strict=True):
            print(f"{model}, {words}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder:
                path = write_plan(
                    Path(folder),
                    model,
                    hardware={"nodes": nodes, "gpus_per_node": each, "gpu": "h100-sxm-80gb",
                              "inter": "50GB/s"},
                    batch={"global": samples, "seq_len": seq_len},
                    offload="none",
                )  # fmt: skip
                yield (size, model, words, rule.words, *_row(path, rule))


def _row(path: Path, rule: Rule) -> tuple[str, str, str, str]:
    """(what is picked, its seconds, its memory, how the rule does)."""
    decision = search_plan(path)
    way = decision.chosen
    if way is None:
        end = "nothing fits" if decision.is_whole else "the time was up"
        return end, "", "", "no: it does not fit" if decision.is_whole else ""
    mesh = " x ".join(f"{a.name} {a.size}" for a in way.plan.mesh if a.size > 1) or "one GPU"
    strategy = way.stated["strategy"] if way.plan.num_data_ranks > 1 else "no data ranks"
    again = way.stated.get("activation_checkpointing", "none")
    if any("activation_checkpointing" in str(v) for k, v in way.stated.items() if "rules" in k):
        again = "some blocks recomputed"
    picked = f"{strategy}, {mesh}{there(way)}" + (f", {again}" if again != "none" else "")
    figures = f"{way.seconds:.3f} s", format_gib(way.memory.worst.band[1])
    if not rule.strategies:
        return picked, *figures, "agrees"
    asked = [explain(path, ["why-not", f"strategy={word}"])[0] for word in rule.strategies]
    return picked, *figures, _compared(strategy, rule, asked, way.seconds)


def _compared(strategy: str, rule: Rule, asked: list[WhyNot], chosen_s: float) -> str:
    """How the best plan by the rule does beside the one that was picked."""
    if strategy in rule.strategies:
        return "agrees"
    fits = [each for each in asked if each.seconds is not None]
    if not fits:
        return f"no: {verdict(asked[0])}"
    best = min(fits, key=lambda each: each.seconds or 0.0)
    assert best.seconds is not None
    word = best.setting.partition("=")[2]
    share = best.seconds / chosen_s - 1
    if share <= SLACK:
        return f"as good: {word} {share:+.1%}, and what was picked is as simple"
    return f"no: {word} {verdict(best)}"


def main() -> None:
    header = ("size", "model", "GPUs", "rule of thumb", "picked", "a step", "memory", "the rule")
    print(f"""# Strategies: the planner beside the rule of thumb

The common rule goes by size and number of GPUs: a single GPU while that holds the model, DDP below
500M parameters, FSDP or ZeRO-2 up to 3B, ZeRO-3 above. `python -m tests.bench.strategy_guide` asks
the planner for each of its cells: H100 80 GB, eight a node, 50 GB/s for each GPU between nodes,
bf16-mixed, AdamW, the whole mesh free, nothing offloaded. "As good" is within {SLACK:.0%},
where the planner takes what has fewer axes and fewer different blocks. Times are the model's, not
measured. Planned on {date.today()}.

```""")
    print(*columns([header, *rows()], "<<<<<>><"), sep="\n")
    print("```")


if __name__ == "__main__":
    main()
