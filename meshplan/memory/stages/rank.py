"""The work of a rank: its pass through the schedule, a long one in brief if that tells enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from meshplan.assign.types import Stages
from meshplan.layout.schedules import Action
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.stages.microbatch import StageWork
from meshplan.memory.stages.schedule_pass import Pass


def work_of_rank(
    parts: Mapping[int, StageWork],
    stages: Stages,
    order: Sequence[Action],
    *,
    released: Mapping[Action, tuple[Action, ...]],
    takes_gradients: bool,
    in_brief: bool = False,
    halved: Mapping[int, StageWork] = MappingProxyType({}),
) -> MicrobatchTrace:
    """A whole pass of a rank.

    Args:
        parts: Of its stages, each with the inputs and targets of one microbatch.
        order: What the rank does, as `schedules.actions` has it.
        released: What it sent and no longer holds, as `schedules.released` has it.
        takes_gradients: Whether wrappers take the gradients of every microbatch; else they are
            added to those that are there.
        in_brief: Whether microbatches that cannot make the peak are written in brief.
        halved: Of its stages, where a backward is run in two halves.
    """
    split = {(action.stage, action.microbatch) for action in order if action.kind == "I"}

    def part_of(stage: int, m: int) -> StageWork:
        return halved[stage] if (stage, m) in split else parts[stage]

    whole = {(action.stage, action.microbatch) for action in order}
    if in_brief:
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
    """(stage, microbatch) of those that tell the peak: of what follows the same, the fullest.

    What a unit still has gathered depends on what the rank did before; so that is told too. And so
    are the first two, after which what accumulates is there, and the last, in which all is reduced.
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
