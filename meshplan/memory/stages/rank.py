"""The trace of one rank's pass through its pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from meshplan.assign.base.types import Stages
from meshplan.layout.schedules import Action
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.stages.microbatch import StageWork
from meshplan.memory.stages.schedule_pass import Pass


def trace_of_rank(
    parts: Mapping[int, StageWork],
    stages: Stages,
    order: Sequence[Action],
    *,
    released: Mapping[Action, tuple[Action, ...]],
    takes_gradients: bool,
    summarised: bool = False,
    halved: Mapping[int, StageWork] = MappingProxyType({}),
) -> MicrobatchTrace:
    """Return the trace of a rank's whole pass through its schedule.

    Args:
        parts: Work of one microbatch in each of the rank's stages, inputs and targets included.
        stages: Stages of the whole pipeline.
        order: Actions of the rank, as `schedules.actions` returns them.
        released: For each action, the sends whose buffers are freed before it, as
            `schedules.released` returns them.
        takes_gradients: If True, wrappers take the gradients of every microbatch; otherwise
            gradients are added to those of the first microbatch.
        summarised: If True, summarise the microbatches that cannot contain the peak: write only the
            storages that they leave behind.
        halved: For stages with split backwards, the work with the backward split in two halves.
    """
    split = {(action.stage, action.microbatch) for action in order if action.kind == "I"}

    def part_of(stage: int, m: int) -> StageWork:
        return halved[stage] if (stage, m) in split else parts[stage]

    whole = {(action.stage, action.microbatch) for action in order}
    if summarised:
        whole = _decisive(part_of, order, released)
    pass_ = Pass(parts, part_of, stages, whole, takes_gradients=takes_gradients)
    steps = {
        "F": pass_.forward, "B": pass_.backward, "SEND_F": pass_.send_forward,
        "RECV_F": pass_.receive_forward, "SEND_B": pass_.send_backward,
        "RECV_B": pass_.receive_backward, "I": pass_.first_half, "W": pass_.second_half,
    }  # fmt: skip
    for action in order:
        if action.kind in "FBIW":
            pass_.begin(action, released.get(action, ()))
        steps[action.kind](action.stage, action.microbatch)
    return pass_.end(split_of={stage for stage, _ in split})


def _decisive(
    part_of: Callable[[int, int], StageWork],
    order: Sequence[Action],
    released: Mapping[Action, tuple[Action, ...]],
) -> set[tuple[int, int]]:
    """Return the (stage, microbatch) pairs that can contain the peak.

    Actions are grouped by kind and stage, and by kind and stage of the action before. In each group
    only the action that begins with the most live bytes can contain the peak. The action before it
    is included too, because it determines which units are still gathered. For each kind and stage,
    the first two microbatches are included, because accumulated gradients exist after them, and the
    last one, because it reduces gradients.
    """
    live = 0
    before: Action | None = None
    following: dict[tuple[object, ...], tuple[int, int, tuple[Action, ...]]] = {}
    places: dict[tuple[str, int], list[Action]] = {}
    for place, action in enumerate(order):
        for sent in released.get(action, ()):
            if sent.kind == "SEND_B":
                live += part_of(sent.stage, sent.microbatch).changes["arrived"]
        if action.kind in "FBIW":
            pair = (action, before) if before is not None else (action,)
            key = tuple((each.kind, each.stage) for each in pair)
            following[key] = max(following.get(key, (-1, 0, ())), (live, place, pair))
            places.setdefault((action.kind, action.stage), []).append(action)
            before = action
        live += part_of(action.stage, action.microbatch).changes.get(action.kind, 0)
    chosen = {each for *_, pair in following.values() for each in pair}
    for same in places.values():
        chosen |= {*same[:2], same[-1]}
    return {(each.stage, each.microbatch) for each in chosen}
