"""Which microbatches of a long step tell its peak, so that the others may be written in brief."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshplan.memory.stage_work import StageWork
from meshplan.schedules import Action


def decisive(
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
            live += (
                part_of(sent.stage, sent.microbatch).changes["arrived"]
                if sent.kind == "SEND_B"
                else 0
            )
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
