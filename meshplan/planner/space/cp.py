"""The sizes of cp that a plan leaves open, and how attention reads the whole sequence.

Unless the plan states otherwise, cp ranks exchange heads (all-to-all). If keys and values were
gathered instead, each rank would keep the keys and values of the whole sequence, and a mask over
them. A plan may state `context.attention: all_gather`, and then any size is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from meshplan.spec.spec import Context, Spec

EXCHANGES: Final = "all_to_all"


def context_of(spec: Spec) -> Context:
    """Return the context settings of a plan; if it has none, those that the planner would write."""
    return spec.context or Context(attention=EXCHANGES)


def contexts_of(
    spec: Spec, sizes: Sequence[int], heads: Sequence[int], refuses: Callable[[int], str]
) -> tuple[tuple[int, ...], list[tuple[str, str]]]:
    """Return the sizes that cp may have, and (value, reason) for each value left out.

    Args:
        spec: The spec of the plan file.
        sizes: Sizes of cp that the mesh leaves open.
        heads: (number of heads, number of key/value heads) of the attention; () if not known.
        refuses: Returns the reason why the model does not allow a size of cp; "" if it does.
    """
    allowed, out = [size for size in sizes if size == 1], []
    if allowed and spec.context is not None:
        allowed = []
        out.append(("mesh.cp=1", "the plan states how attention over parts of a sequence is done"))
    more = [size for size in sizes if size > 1]
    kind = context_of(spec).attention
    uneven = [size for size in more if kind == EXCHANGES and any(n % size for n in heads)]
    if not heads and more:
        return tuple(allowed), [*out, (_words(more), refuses(more[0]) or "its heads are not known")]
    for size in (size for size in more if size not in uneven):
        if why := refuses(size):
            out.append((_words([size]), why))
        else:
            allowed.append(size)
    if spec.context is None and max(allowed, default=1) > 1:
        why = "each rank would hold the keys and values of the whole sequence; a plan may state it"
        out.append(("context.attention=all_gather", why))
    if uneven:
        counts = " and ".join(map(str, dict.fromkeys(heads)))
        out.append((_words(uneven), f"{counts} heads do not divide by it"))
    return tuple(allowed), out


def shared_heads(spec: Spec, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of heads that cp must divide; () if each cp rank computes all heads."""
    return heads if context_of(spec).attention == EXCHANGES else ()


def _words(sizes: Sequence[int]) -> str:
    return f"mesh.cp={', '.join(map(str, sizes))}"
