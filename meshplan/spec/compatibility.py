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
    has = isinstance(spec.mesh, Mapping) and spec.mesh.get(name, 1) not in (1, AUTO)
    return f"mesh.{name}" if has else None


def _flag(name: str, spec: Spec) -> str | None:
    return name if getattr(spec, name) else None


def _split_backward(spec: Spec) -> str | None:
    schedule = (
        SCHEDULES.get(spec.pipeline.schedule) if spec.pipeline and _axis("pp", spec) else None
    )
    return "pipeline.schedule" if schedule and schedule.splits_backward else None


def _recompute(spec: Spec) -> str | None:
    if spec.activation_checkpointing.mode not in ("none", AUTO):
        return "activation_checkpointing"
    for rule in spec.rules:
        policy = rule.activation_checkpointing
        if policy and policy.mode not in ("none", AUTO):
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
"""Function that returns the path at which a plan states a feature; None if the plan lacks it."""

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

_UNPROVED: Final = "the combination has not been verified against one process yet"

CLASHES: Final = (
    Clash("cp", "pp", _UNPROVED, "give those ranks to dp_shard instead of cp or pp"),
    Clash("cp", "ep", _UNPROVED, "give those ranks to tp instead of cp, or leave ep out"),
    Clash("cp", "compile",
          "cp intercepts each attention call in Python, which torch.compile cannot trace",
          "leave compile out"),
    Clash("loss_chunks", "pp", _UNPROVED,
          "give those ranks to dp_shard instead of pp, or leave loss_chunks out"),
    Clash("loss_chunks", "cp",
          "cp checks the first forward by its whole logits, which loss_chunks never computes",
          "give those ranks to dp_shard instead of cp, or leave loss_chunks out"),
    Clash("loss_chunks", "loss_parallel",
          "loss_parallel shards the vocabulary over tp; a loss chunk needs the whole vocabulary",
          "keep one of them"),
    Clash("sequence_parallel", "ep",
          "a tp rank's experts would receive only its shard of the tokens and of their gradients",
          "leave sequence_parallel out"),
    Clash("activation_checkpointing", "a schedule that splits the backward",
          "activations would be recomputed in each half of the backward",
          "use schedule: 1F1B or Interleaved1F1B"),
    Clash("offloaded activations", "compile",
          "torch.compile itself chooses the activations that a block saves for backward",
          "leave compile out, or write activation_checkpointing: full instead of the offload"),
    Clash("offloaded activations", "a schedule that splits the backward",
          "activations would be copied back from the host for each half of the backward",
          "use schedule: 1F1B or Interleaved1F1B"),
)  # fmt: skip
"""Every pair of features that a plan must not have together."""


def clashes(spec: Spec) -> Iterator[Problem]:
    """Yield one problem for each pair of `CLASHES` of which the plan states both features."""
    stated = {name: path for name, feature in FEATURES.items() if (path := feature(spec))}
    for clash in CLASHES:
        if clash.left in stated and clash.right in stated:
            yield Problem(
                f"{clash.left} and {clash.right} do not go together: {clash.why}",
                spec.origin(stated[clash.left]),
                clash.instead,
            )
