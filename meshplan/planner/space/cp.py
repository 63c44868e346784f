"""The sizes of cp that a plan leaves open, and how attention reads the whole sequence.

Ranks of cp either exchange heads (all-to-all), or gather keys and values. In the first case, their
number must divide the heads. In the second, each rank holds the keys and values of the whole
sequence, and a mask over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from meshplan.cost.grid import CONTEXT_WORDS
from meshplan.spec.spec import Context, Spec

EXCHANGE: Final = CONTEXT_WORDS.index("all_to_all")


def context_of(spec: Spec) -> Context:
    """Return the context settings of a plan; if it has none, those of a trial: heads exchanged."""
    return spec.context or Context(attention="all_to_all")


def contexts_of(
    spec: Spec,
    sizes: Sequence[int],
    heads: Sequence[int],
    refuses: Callable[[int, Context], str],
    *,
    is_traced: bool,
) -> tuple[dict[int, tuple[int, ...]], list[tuple[str, str]]]:
    """Return the sizes that cp may have, with the ways of attention of each.

    Args:
        spec: The spec of the plan file.
        sizes: Sizes of cp that the mesh leaves open.
        heads: (number of heads, number of key/value heads) of the attention; () if not known.
        refuses: Returns the reason why the model does not allow a size of cp with these settings;
            "" if it does.
        is_traced: If True, costs come from traces of a live model.

    Returns:
        ({size of cp: indices into `CONTEXT_WORDS`}, [(value, reason)] for each value left out).
    """
    allowed: dict[int, tuple[int, ...]] = {}
    out: list[tuple[str, str]] = []
    if 1 in sizes and spec.context is None:
        allowed[1] = (EXCHANGE,)
    elif 1 in sizes:
        out.append(("mesh.cp=1", "the plan states how attention over parts of a sequence is done"))
    more, own = [size for size in sizes if size > 1], context_of(spec)
    if not heads and more:
        return allowed, [*out, (_words(more), refuses(more[0], own) or "its heads are not known")]
    words = CONTEXT_WORDS if spec.context is None and not is_traced else (own.attention,)
    numbers = " and ".join(map(str, dict.fromkeys(heads)))
    left, whys = list[tuple[int, str]](), dict[str, str]()
    for size in more:
        ways, why = [], ""
        for word in words:
            if word == CONTEXT_WORDS[EXCHANGE] and any(number % size for number in heads):
                why = f"{numbers} heads do not divide by it"
            elif refused := refuses(size, replace(own, attention=word)):
                whys.setdefault(word, refused)
                why = why or refused
            else:
                ways.append(CONTEXT_WORDS.index(word))
        if ways:
            allowed[size] = tuple(ways)
        else:
            left.append((size, why))
    for why in dict.fromkeys(why for _, why in left):
        out.append((_words([size for size, other in left if other == why]), why))
    for word in CONTEXT_WORDS[1:]:
        if max(allowed, default=1) == 1 or spec.context is not None:
            continue
        if is_traced:
            whys[word] = "ranks of a live model exchange heads; a plan may state it"
        if not any(CONTEXT_WORDS.index(word) in ways for ways in allowed.values()):
            out.append((f"context.attention={word}", whys[word]))
    return allowed, out


def _words(sizes: Sequence[int]) -> str:
    return f"mesh.cp={', '.join(map(str, sizes))}"
