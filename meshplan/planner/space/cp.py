"""The sizes of cp that a plan leaves open, and how attention reads the whole sequence.

Ranks of cp either exchange heads (all-to-all), or gather keys and values. In the first case, their
number must divide the heads. In the second, each rank holds the keys and values of the whole
sequence, and a mask over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from meshplan.cost.grid import CONTEXT_WORDS
from meshplan.spec.spec import Context, Spec

EXCHANGE: Final = CONTEXT_WORDS.index("all_to_all")


def context_of(spec: Spec) -> Context:
    """Return the plan's context settings, or those with which cp is tried: all-to-all of heads."""
    return spec.context or Context(attention=CONTEXT_WORDS[EXCHANGE])


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
        refused = dict[str, str]()
        for word in words:
            if word == CONTEXT_WORDS[EXCHANGE] and any(number % size for number in heads):
                refused[word] = f"{numbers} heads do not divide by it"
            elif why := refuses(size, replace(own, attention=word)):
                refused[word] = why
        if ways := tuple(CONTEXT_WORDS.index(word) for word in words if word not in refused):
            allowed[size] = ways
        else:
            left.append((size, "; with ".join(_reasons(refused))))
        whys = refused | whys
    for why in dict.fromkeys(why for _, why in left):
        out.append((_words([size for size, other in left if other == why]), why))
    if max(allowed, default=1) > 1 and spec.context is None:
        found = {way for size, ways in allowed.items() if size > 1 for way in ways}
        without = [word for way, word in enumerate(CONTEXT_WORDS) if way not in found]
        live = "ranks of a live model exchange heads; a plan may state it"
        out += [(f"context.attention={word}", whys.get(word, live)) for word in without]
    return allowed, out


def _reasons(refused: Mapping[str, str]) -> Iterator[str]:
    """Yield why each way of attention was refused; equal reasons once, the first without a name."""
    known: set[str] = set()
    for word, why in refused.items():
        if why not in known:
            yield f"context.attention: {word}, {why}" if known else why
        known.add(why)


def _words(sizes: Sequence[int]) -> str:
    return f"mesh.cp={', '.join(map(str, sizes))}"
