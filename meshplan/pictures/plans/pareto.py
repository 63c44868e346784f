"""All candidates of a search by memory and step time: lower bounds, simulated and chosen plans."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from meshplan.pictures.base.words import counted
from meshplan.units import format_gib, format_seconds

if TYPE_CHECKING:
    from meshplan.planner.problem.decision import Decision, Evaluated

_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Dot:
    """The dot of a plan, or of a configuration's lower bounds.

    Args:
        num_bytes: Peak bytes of the rank that needs most.
        seconds: Seconds of a step.
        words: Description of the plan: of the chosen plan all that matters, of another plan what
            differs from the chosen one; "" for a lower bound.
    """

    num_bytes: int
    seconds: float
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """The facts that `draw_pareto` draws.

    Args:
        bounds: A dot per configuration: no plan of it takes less memory, and none takes less time.
        simulated: Plans whose memory was simulated event by event; their times are predicted.
        chosen: The chosen plan; None if nothing fits.
        limit_bytes: Bytes that one device may use.
        num_configs: Number of configurations in the space.
        is_whole: If True, the search was complete: neither interrupted nor out of time.
    """

    bounds: tuple[Dot, ...]
    simulated: tuple[Dot, ...]
    chosen: Dot | None
    limit_bytes: int
    num_configs: int
    is_whole: bool

    @property
    def frontier(self) -> tuple[Dot, ...]:
        """Simulated plans that no other simulated plan beats in both memory and time."""
        return _frontier(self.simulated)

    @property
    def bound(self) -> tuple[Dot, ...]:
        """Lower bounds that no other bound beats in both: no plan is below and left of them all."""
        return _frontier(self.bounds)

    @property
    def named(self) -> tuple[Dot, ...]:
        """The plans that the picture names: the frontier without the chosen plan, fastest first."""
        others = [dot for dot in self.frontier if dot != self.chosen]
        return tuple(sorted(others, key=lambda dot: dot.seconds)[:_MOST_NAMED])

    @property
    def num_hopeless(self) -> int:
        """Number of configurations whose lower bound already exceeds the limit."""
        return sum(dot.num_bytes > self.limit_bytes for dot in self.bounds)

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        many = counted(self.num_configs, "configuration")
        limit = format_gib(self.limit_bytes)
        if self.chosen is None:
            found = "fits" if self.is_whole else "was found in time to fit"
            return f"None of {many} {found} into {limit}"
        return (
            f"Chosen of {many}: {format_seconds(self.chosen.seconds)} a step and "
            f"{format_gib(self.chosen.num_bytes)} of {limit}"
        )

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        won = f" The star is the plan: {self.chosen.words}." if self.chosen else ""
        return (
            "Seconds of a step against memory of the rank that needs most: "
            f"{counted(len(self.simulated), 'candidate')} simulated, "
            f"{counted(len(self.bounds), 'configuration')} with lower bounds, "
            f"{self.num_hopeless:,} of them beyond the limit of "
            f"{format_gib(self.limit_bytes)}.{won}"
        )


def pareto(decision: Decision) -> Pareto:
    """Return the facts of the picture for a search."""
    chosen = decision.chosen
    evaluated_plans = [*decision.measured, *([chosen] if chosen else []), *decision.alternatives]
    simulated = dict.fromkeys(_dot(evaluated, chosen) for evaluated in evaluated_plans)
    return Pareto(
        bounds=tuple(Dot(bound.num_bytes, bound.seconds) for bound in decision.bounds),
        simulated=tuple(simulated),
        chosen=_dot(chosen, chosen) if chosen else None,
        limit_bytes=decision.limit_bytes,
        num_configs=decision.num_configs,
        is_whole=decision.is_whole,
    )


def _frontier(dots: Sequence[Dot]) -> tuple[Dot, ...]:
    """Return the dots that no other dot beats in both memory and time, least memory first."""
    out: list[Dot] = []
    for dot in sorted(dots, key=lambda d: (d.num_bytes, d.seconds)):
        if not out or dot.seconds < out[-1].seconds:
            out.append(dot)
    return tuple(out)


def _dot(evaluated: Evaluated, chosen: Evaluated | None) -> Dot:
    words = words_of(evaluated)
    if chosen is not None and evaluated is not chosen:
        words = difference(evaluated, chosen) or words
    return Dot(evaluated.memory.worst.band[1], evaluated.seconds, words)


def words_of(evaluated: Evaluated) -> str:
    """Return a line with all that the search decided about a plan.

    Recomputation is a number of blocks, without the rules that name them.
    """
    said = settings_of(evaluated)
    return ", ".join(
        text for path, text in said.items()
        if not (path.startswith("rules[") and ": activation_checkpointing " in text)
    )  # fmt: skip


def difference(evaluated: Evaluated, chosen: Evaluated) -> str:
    """Return a line with the settings in which a plan differs from the chosen one; "" for none."""
    own, other = settings_of(evaluated), settings_of(chosen)
    out = [text for key, text in own.items() if other.get(key) != text]
    out += [f"without {text}" for key, text in other.items() if key not in own]
    return ", ".join(out)


def settings_of(evaluated: Evaluated) -> dict[str, str]:
    """Return the settings of a plan as texts: those that every plan has, and what else is stated.

    Two plans of a search differ in at least one of the texts.
    """
    plan, again = evaluated.plan, evaluated.plan.assignment.recompute
    modes = [each.policy.mode for each in again.values()]
    recomputed = ", ".join(f"{modes.count(m)} blocks {m}" for m in dict.fromkeys(modes))
    out = {
        "mesh": str(plan.mesh),
        "strategy": plan.assignment.strategy.name,
        "batch": f"{counted(plan.micro or 0, 'sample')} a rank × {plan.accumulate}",
    }
    stages = plan.assignment.stages
    if stages is not None:
        units = [stage for _, stage in stages.units]
        runs = itertools.groupby(units.count(stage) for stage in range(stages.num))
        sizes = [(size, len(list(same))) for size, same in runs]
        words = ", ".join(f"{many}×{size}" if many > 1 else f"{size}" for size, many in sizes)
        microbatches = counted(stages.microbatches, "microbatch", "microbatches")
        out["pipeline"] = f"{stages.schedule} of {microbatches}, units by stage: {words}"
    if recomputed:
        out["recompute"] = f"recomputed: {recomputed}"
    for path, value in evaluated.stated.items():
        top = path.split(".")[0]
        if value is None or top in ("mesh", "strategy", "batch", "pipeline"):
            continue
        if path == "activation_checkpointing" and isinstance(value, str):
            continue  # The modes of the blocks say it.
        out[path] = _setting(path, value)
    return out


def _setting(path: str, value: Any) -> str:
    """Return a statement of a plan file as a few words."""
    if path.startswith("rules[") and isinstance(value, Mapping):
        match = value.get("match", "")
        where = match if isinstance(match, str) else ", ".join(map(str, match))
        said = ", ".join(f"{k} {_value(v)}" for k, v in value.items() if k not in ("match", "why"))
        return f"{where}: {said}"
    return f"{path} {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        if any(isinstance(item, list | tuple) for item in value):
            return f"of {len(value)} parts"
        return " ".join(map(_value, value))
    return str(value)
