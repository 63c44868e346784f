"""Features that cannot be combined, as data: each pair, why, and the nearest plan that works.

`check` and `parallelize` refuse a plan that has both features of a pair; a planner skips it. Every
pair that is not listed is supported and tested. To support a pair: prove it against one process,
then remove its entry. Restrictions that depend on the model are in `assign`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from meshplan.errors import Problem
from meshplan.layout.schedules import SCHEDULES
from meshplan.spec.spec import AUTO, Spec


@dataclass(frozen=True, slots=True)
class Clash:
    """One pair of features that cannot be combined.

    Args:
        left, right: Names in `FEATURES`; the message points to where `left` is stated.
        why: The reason, as part of a sentence.
        instead: The nearest plan that works.
    """

    left: str
    right: str
    why: str
    instead: str


def _axis(name: str, spec: Spec) -> str | None:
    has = isinstance(spec.mesh, Mapping) and spec.mesh.get(name, 1) != 1
    return f"mesh.{name}" if has else None


def _flag(name: str, spec: Spec) -> str | None:
    return name if getattr(spec, name) else None


def _split_backward(spec: Spec) -> str | None:
    schedule = (
        SCHEDULES.get(spec.pipeline.schedule) if spec.pipeline and _axis("pp", spec) else None
    )
    return "pipeline.schedule" if schedule and schedule.splits_backward else None


def _recompute(spec: Spec) -> str | None:
    if spec.activation_checkpointing.mode != "none":
        return "activation_checkpointing"
    for rule in spec.rules:
        if rule.activation_checkpointing and rule.activation_checkpointing.mode != "none":
            return f"rules[{rule.index}].activation_checkpointing"
    return None


def _offload(part: str, spec: Spec) -> str | None:
    if getattr(spec.offload, part):
        return "offload"
    for rule in spec.rules:
        if rule.offload and getattr(rule.offload, part):
            return f"rules[{rule.index}].offload"
    return None


Feature = Callable[[Spec], str | None]
"""Return the path at which a plan states a feature, None if it does not."""

FEATURES: Final[Mapping[str, Feature]] = MappingProxyType(
    {
        **{axis: partial(_axis, axis) for axis in ("pp", "cp", "tp", "ep")},
        **{
            flag: partial(_flag, flag)
            for flag in ("sequence_parallel", "loss_parallel", "sync_batchnorm", "compile")
        },
        "loss_chunks": lambda spec: "loss_chunks" if spec.loss_chunks not in (1, AUTO) else None,
        "activation_checkpointing": _recompute,
        "offloaded parameters": partial(_offload, "params"),
        "offloaded activations": partial(_offload, "activations"),
        "a schedule that splits the backward": _split_backward,
    }
)

_UNPROVED: Final = "nothing has proved them right together yet"

CLASHES: Final = (
    Clash("cp", "pp", _UNPROVED, "spread those ranks over dp_shard instead of cp or pp"),
    Clash("cp", "ep", _UNPROVED, "spread those ranks over tp instead of cp, or leave ep out"),
    Clash("cp", "compile", "attention over parts is answered call by call, outside of any graph",
          "leave compile out"),
    Clash("loss_parallel", "compile",
          "the compiler cannot trace a loss that is answered call by call",
          "leave loss_parallel or compile out"),
    Clash("loss_chunks", "pp", _UNPROVED,
          "spread those ranks over dp_shard instead of pp, or leave loss_chunks out"),
    Clash("loss_chunks", "cp",
          "the first forward over parts of the sequence is proved by logits that are there",
          "spread those ranks over dp_shard instead of cp, or leave loss_chunks out"),
    Clash("loss_chunks", "loss_parallel",
          "each rank of tp has a part of the vocabulary, and chunks are computed by one rank alone",
          "keep one of them"),
    Clash("sequence_parallel", "ep",
          "experts would get a part of the sequence, and gradients of that part only",
          "leave sequence_parallel out"),
    Clash("activation_checkpointing", "a schedule that splits the backward",
          "what is recomputed would be recomputed in each half",
          "use schedule: 1F1B or Interleaved1F1B"),
    Clash("offloaded activations", "compile",
          "the compiler decides by itself what a block keeps for backward",
          "leave compile out, or say activation_checkpointing: full instead"),
    Clash("offloaded activations", "a schedule that splits the backward",
          "what was copied back for one half would be copied back for the other again",
          "use schedule: 1F1B or Interleaved1F1B"),
)  # fmt: skip
"""Every pair that is refused."""


def clashes(spec: Spec) -> Iterator[Problem]:
    """Yield one problem per refused pair that a plan has."""
    stated = {name: path for name, feature in FEATURES.items() if (path := feature(spec))}
    for clash in CLASHES:
        if clash.left in stated and clash.right in stated:
            yield Problem(
                f"{clash.left} and {clash.right} do not go together: {clash.why}",
                spec.origin(stated[clash.left]),
                clash.instead,
            )
