"""Settings that `meshplan explain` can be asked about, such as "mesh.tp=8".

This module lists the settings, finds out if a plan has a setting, and narrows a space to a setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from meshplan.cost.config import STRATEGY_OPTIONS, offload_of
from meshplan.cost.grid import ACTIVATIONS_ON_HOST, CONTEXT_WORDS, RECOMPUTE, SHARD
from meshplan.errors import Origin, Problem, SpecError
from meshplan.layout.mesh import AXES
from meshplan.planner.problem.decision import Evaluated
from meshplan.planner.space.offload import ONLY_IN_FULL, WORDS
from meshplan.planner.space.space import Freedom, divisors
from meshplan.spec.match import near
from meshplan.spec.spec import STRATEGY_WORDS

FIELDS: Final = (
    *(f"mesh.{axis}" for axis in AXES),
    "strategy", "batch.micro", "activation_checkpointing", "reshard_after_forward", "offload",
    "sequence_parallel", "loss_parallel", "loss_chunks", "allocator", "context.attention",
)  # fmt: skip
"""Fields that the planner chooses and a user can ask about."""

READ_AGAIN: Final = ("loss_parallel", "loss_chunks", "allocator", "context.attention")
"""Subset of `FIELDS` for which the plan file is planned again with the value stated, since the
planner may not try the value by itself."""

STATED: Final = (
    "precision", "optimizer", "tp_plan",
    "experts.capacity", "pipeline.schedule", "pipeline.virtual",
)  # fmt: skip
"""Further fields that a user can ask about. The planner keeps them as stated, or chooses them only
in part."""


_SYNONYMS: Final = {
    "ac": "activation_checkpointing",
    "checkpointing": "activation_checkpointing",
    "recompute": "activation_checkpointing",
    "reshard": "reshard_after_forward",
}


def fields_of(word: str) -> tuple[str, ...]:
    """Return the fields that a user's word stands for: "tp" for mesh.tp, "mesh" for all axes.

    Raises:
        SpecError: The word stands for no field that the planner chooses or that can be stated.
    """
    known = (*FIELDS, *STATED)
    word = _SYNONYMS.get(word, word)
    if word in known:
        return (word,)
    found = tuple(field for field in known if word in field.split("."))
    if found:
        return found
    close = near(word, [*known, *(field.rpartition(".")[2] for field in known)])
    fix = f"did you mean '{close}'?" if close else f"ask about one of {', '.join(known)}"
    raise SpecError(Problem(f"'{word}' is not a key that the planner chooses", Origin(word), fix))


def has(evaluated: Evaluated, path: str, text: str) -> bool:
    """Return True if a plan has a setting. A setting of blocks counts only if all blocks have it.

    Args:
        evaluated: The plan.
        path: Field of the setting, one of `FIELDS`, such as "mesh.tp".
        text: Value of the setting, such as "8".
    """
    plan, a = evaluated.plan, evaluated.plan.assignment
    area, _, axis = path.partition(".")
    if area == "mesh":
        return plan.mesh.size(axis) == int(text)
    if path == "strategy":
        return a.strategy.name == STRATEGY_WORDS[text.lower()]
    if path == "batch.micro":
        return plan.micro == int(text)
    if path == "sequence_parallel":
        return a.sequence_parallel == (text == "true")
    if path == "offload":
        return offload_of(plan) == WORDS[text]
    if path == "loss_parallel":
        return a.loss_parallel == (text == "true")
    if path == "loss_chunks":
        return str(a.chunked_loss.chunks if a.chunked_loss is not None else 1) == text
    if path == "context.attention":
        return a.context is not None and a.context.attention == text
    if path == "allocator":
        return plan.spec.allocator == text
    num_with, num = blocks_with(evaluated, path, text)
    return 0 < num == num_with


def blocks_with(evaluated: Evaluated, path: str, text: str) -> tuple[int, int]:
    """Count the blocks of a plan that have a setting.

    Args:
        evaluated: The plan.
        path: Field of the setting, such as "reshard_after_forward".
        text: Value of the setting, such as "true".

    Returns:
        (blocks with the setting, blocks that choose the field); (0, 0) if the field is not chosen
        by blocks.
    """
    a, blocks = evaluated.plan.assignment, evaluated.plan.graph.blocks()
    chosen: list[str]
    if path == "activation_checkpointing":
        recompute = [a.recompute.get(block) for block in blocks]
        chosen = [each.policy.mode if each else "none" for each in recompute]
    elif path == "reshard_after_forward":
        units = [a.units[block] for block in blocks if block in a.units]
        chosen = [str(unit.reshard_after_forward).lower() for unit in units if unit.is_sharded]
    else:
        return 0, 0
    return chosen.count(text), len(chosen)


def narrowed(free: Freedom, path: str, text: str) -> tuple[Freedom | None, str]:
    """Restrict a space to one setting.

    Args:
        free: The choices that are open.
        path: Field of the setting.
        text: Value of the setting.

    Returns:
        (the restricted choices, ""); (None, reason) if the space does not have the value.

    Raises:
        SpecError: The field has no such value.
    """
    area, _, axis = path.partition(".")
    fixed: dict[str, Any] = {}
    if area == "mesh":
        size = _number(path, text)
        if size not in free.axes[axis]:
            return None, no_mesh(free, path, text)
        fixed = {"axes": {**free.axes, axis: (size,)}}
    elif path == "strategy":
        word = STRATEGY_WORDS.get(text.lower(), "")
        if word not in STRATEGY_OPTIONS:
            fix = f"write one of {', '.join(STRATEGY_OPTIONS)}"
            raise SpecError(Problem(f"'{text}' is not a strategy", Origin(path), fix))
        modes, reshard = STRATEGY_OPTIONS[word]
        hybrid = word.startswith("hybrid") if modes == (SHARD,) else None
        fixed = {"modes": modes, "reshard": reshard, "hybrid": hybrid}
    elif path == "batch.micro":
        fixed = {"micro": (_number(path, text),)}
    elif path == "activation_checkpointing":
        if text not in RECOMPUTE:
            raise _no_value(path, text, RECOMPUTE)
        if RECOMPUTE.index(text) not in free.recompute:
            return None, why_rejected(free, f"{path}={text}") or "the plan states another value"
        fixed = {"recompute": (RECOMPUTE.index(text),)}
    elif path == "offload":
        if text not in WORDS:
            raise _no_value(path, text, tuple(WORDS))
        if WORDS[text] not in free.offload:
            return None, "the plan states another value"
        if WORDS[text] & ACTIVATIONS_ON_HOST and RECOMPUTE.index("full") not in free.recompute:
            return None, ONLY_IN_FULL
        fixed = {"offload": (WORDS[text],)}
    elif text not in ("true", "false"):
        raise _no_value(path, text, ("true", "false"))
    elif path == "sequence_parallel" and text == "false":
        fixed = {
            "sequence_parallel": dict.fromkeys(free.sequence_parallel, False),
            "tensor_settings": tuple(each for each in free.tensor_settings if not each[0]),
        }
    elif path == "sequence_parallel":
        cut = tuple(size for size, is_cut in free.sequence_parallel.items() if is_cut and size > 1)
        if not cut:
            return None, "no size of tp allows sequence_parallel"
        fixed = {
            "axes": {**free.axes, "tp": cut},
            "tensor_settings": tuple(each for each in free.tensor_settings if each[0]),
        }
    else:
        fixed = {"reshard": (int(text == "true"),), "modes": (SHARD,)}
    return replace(free, **fixed), ""


def _number(path: str, text: str) -> int:
    if not text.isdigit() or not int(text):
        fix = "write a whole number of at least 1"
        raise SpecError(Problem(f"'{text}' is not a positive number", Origin(path), fix))
    return int(text)


def _no_value(path: str, text: str, words: Sequence[str]) -> SpecError:
    fix = f"write {', '.join(words[:-1])} or {words[-1]}"
    return SpecError(Problem(f"'{text}' is not a value of {path}", Origin(path), fix))


def why_rejected(free: Freedom, setting: str) -> str:
    """Return the reason with which the space rejected a setting; "" if it did not reject it."""
    path, _, text = setting.partition("=")
    for each in free.rejected:
        what, _, values = each.what.partition("=")
        if what == path and text in values.split(", "):
            return each.why
    return ""


def no_mesh(free: Freedom, path: str, text: str) -> str:
    """Return the reason why no configuration of a space has a setting."""
    found = why_rejected(free, f"{path}={text}")
    if found:
        return found
    if path.startswith("mesh.") and int(text) not in divisors(free.world):
        return f"{free.world} devices do not divide by {text}"
    if path.startswith("mesh.") and free.axes[path.partition(".")[2]] == (1,):
        return f"the plan's mesh has no {path.partition('.')[2]}, or states size 1"
    samples, whose = free.global_, ""
    if samples is None:
        samples, whose = free.of_data_rank, " on one rank"
    if path == "batch.micro" and samples % int(text):
        return f"the {samples:,} samples of a step{whose} do not divide by {text}"
    return f"no configuration of {free.world:,} devices has {path}={text}"


def settings_of(free: Freedom, path: str) -> Iterator[str]:
    """Yield the settings of a field that a space allows, such as "mesh.tp=8".

    Raises:
        SpecError: The planner does not choose this field.
    """
    if path.startswith("mesh."):
        yield from (f"{path}={size}" for size in free.axes[path.partition(".")[2]])
    elif path == "strategy":
        yield from (f"{path}={word}" for word in STRATEGY_OPTIONS)
    elif path == "activation_checkpointing":
        yield from (f"{path}={RECOMPUTE[place]}" for place in free.recompute)
    elif path == "offload":
        yield from (f"{path}={word}" for word, what in WORDS.items() if what in free.offload)
    elif path == "loss_chunks":
        yield from (f"{path}={chunks}" for chunks in free.loss_chunks)
    elif path == "context.attention":
        ways = {way for size, ways in free.contexts.items() if size > 1 for way in ways}
        yield from (f"{path}={CONTEXT_WORDS[way]}" for way in sorted(ways))
    elif path == "allocator":
        yield from (f"{path}={word}" for word in free.allocators)
    elif path in ("reshard_after_forward", "sequence_parallel", "loss_parallel"):
        yield from (f"{path}=true", f"{path}=false")
    else:
        what = f"{path} is kept as the plan states it, or as its default is, so there are no other "
        what += "values to compare"
        raise SpecError(Problem(what, Origin(path), f"ask why-not {path}=VALUE"))
