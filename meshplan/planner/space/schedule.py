"""The pipeline schedules that the planner tries, and those that a plan may state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from meshplan.cost.grid import SCHEDULE_WORDS
from meshplan.errors import PlanError, Problem
from meshplan.layout.schedules import SCHEDULES
from meshplan.planner.space.fixed import AS_STATED
from meshplan.spec.spec import AUTO, Spec
from meshplan.spec.strategies import STRATEGIES

_HALVED: Final = "InterleavedZeroBubble"
_TRIED: Final = ("1F1B", "Interleaved1F1B", _HALVED)
"""Schedules that are tried if the plan leaves the schedule open."""
_KNOWN: Final = (*_TRIED, "GPipe")
_LEFT_OUT: Final = {
    "GPipe": "it takes as long as 1F1B and keeps more",
    **{
        word: f"it is at most 1% faster than {_HALVED}, and one rank has both ends of the model"
        for word, row in SCHEDULES.items()
        if row.is_v
    },
}
"""{schedule that is not tried if the plan leaves the schedule open: reason}."""


def schedules_of(
    spec: Spec, pipelines: Sequence[int], keeps_from_rounds: str
) -> tuple[tuple[int, ...], tuple[tuple[str, str], ...]]:
    """Return the schedules to search, and the schedules left out with the reasons.

    Args:
        spec: The spec of the plan file.
        pipelines: Sizes that pp may have.
        keeps_from_rounds: Reason why no rank may have several stages; "" if ranks may.

    Returns:
        (indices into `cost.grid.SCHEDULE_WORDS`, pairs of (names left out, reason)).

    Raises:
        PlanError: The stated schedule cannot be planned.
    """
    virtual, is_stated = stated_virtual(spec), _is_stated(spec)
    words = tuple(_words(spec, virtual)) if not is_stated else (_stated(spec),)
    if (
        is_stated
        and (own := SCHEDULES[words[0]].virtual) is not None
        and virtual not in (None, own)
    ):
        what = f"{words[0]} has {own} stages per rank, not virtual: {virtual}"
        fix = "say schedule: Interleaved1F1B, or leave virtual out"
        raise PlanError(Problem(what, spec.origin("pipeline.virtual"), fix))
    out = []
    halves = _keeps_from_halves(spec)
    if max(pipelines, default=1) > 1:
        if keeps_from_rounds:
            out = [word for word in words if SCHEDULES[word].virtual is None]
        if halves:
            out += [word for word in words if word == _HALVED and word not in out]
    left = tuple(SCHEDULE_WORDS.index(word) for word in words if word not in out)
    if not left:
        what = f"the planner cannot plan {out[0]}: {keeps_from_rounds or halves}"
        fix = f"say schedule: 1F1B, or {AS_STATED}"
        raise PlanError(Problem(what, spec.origin("pipeline.schedule"), fix))
    reasons = dict.fromkeys(out, keeps_from_rounds or halves)
    if not is_stated and max(pipelines, default=1) > 1:
        reasons |= _LEFT_OUT
    by_reason: dict[str, list[str]] = {}
    for word, why in reasons.items():
        by_reason.setdefault(why, []).append(word)
    return left, tuple((", ".join(words), why) for why, words in by_reason.items())


def _keeps_from_halves(spec: Spec) -> str:
    """Return the reason why backward may not be split into halves (zero bubble); "" if it may."""
    modes = [r.activation_checkpointing for r in spec.rules]
    if "activation_checkpointing" in spec.origins:
        modes.append(spec.activation_checkpointing)
    if any(mode is not None and mode.mode not in ("none", AUTO) for mode in modes):
        return "what is recomputed would be recomputed in each half of a backward"
    stated = STRATEGIES.get(spec.strategy or "")
    reshards = stated is not None and "parameter" in stated.cuts
    if reshards or any(rule.reshard_after_forward for rule in spec.rules):
        return "parameters stay gathered to the end of a step, and the plan gives some back"
    if spec.compile:
        return "a compiled block has one backward, which nothing splits in two halves"
    if True in (spec.offload.params, spec.offload.optimizer, spec.offload.activations):
        return "what halves of a backward and the host wait for has no figures"
    if any(rule.unit is False for rule in spec.rules):
        return "what is of no unit is averaged as soon as its gradient is there"
    return ""


def stated_virtual(spec: Spec) -> int | None:
    """Return the stages per rank that the plan states; None if it states none."""
    if spec.pipeline is None:
        return None
    is_stated = "pipeline.virtual" in spec.origins or spec.pipeline.virtual > 1
    return spec.pipeline.virtual if is_stated else None


def stated_schedule(spec: Spec) -> str | None:
    """Return the schedule that the plan states; None if it leaves the schedule open.

    A pipeline that names neither a schedule nor `virtual` counts as stating the default, 1F1B.
    """
    return spec.pipeline.schedule if spec.pipeline is not None and _is_stated(spec) else None


def _is_stated(spec: Spec) -> bool:
    """Return True if the plan states a schedule.

    A pipeline without a schedule has the default, 1F1B. The default counts as stated unless
    `virtual` is stated.
    """
    if spec.pipeline is None or spec.pipeline.schedule == AUTO:
        return False
    return "pipeline.schedule" in spec.origins or stated_virtual(spec) is None


def _stated(spec: Spec) -> str:
    assert spec.pipeline is not None
    word = spec.pipeline.schedule
    if word not in _KNOWN:
        what = f"the planner does not search plans with the schedule {word}"
        known = f"{', '.join(_KNOWN[:-1])} or {_KNOWN[-1]}"
        fix = f"say schedule: auto, or {known}, or {AS_STATED}"
        raise PlanError(Problem(what, spec.origin("pipeline.schedule"), fix))
    return word


def _words(spec: Spec, virtual: int | None) -> Iterator[str]:
    """Yield the schedules of `_TRIED` that allow this number of stages per rank; all for None."""
    for word in _TRIED:
        if virtual is None or (SCHEDULES[word].virtual is None) == (virtual > 1):
            yield word
