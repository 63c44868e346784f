"""The cp axis in the planner: over how many ranks sequences may be cut, and how attention sees all.

Where a plan does not say, heads are exchanged: with keys and values gathered each rank would hold
those of the whole sequence, and a mask over them. A plan may state that, and then any size does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from meshplan.spec.spec import Context, Spec

EXCHANGES: Final = "all_to_all"


def context_of(spec: Spec) -> Context:
    """How attention is computed where sequences are cut."""
    return spec.context or Context(attention=EXCHANGES)


def contexts_of(
    spec: Spec, sizes: Sequence[int], heads: Sequence[int], refuses: Callable[[int], str]
) -> tuple[tuple[int, ...], list[tuple[str, str]]]:
    """(the sizes that cp may have, what is left out and why).

    Args:
        heads: Of one attention, and of its keys and values; () where nobody knows.
        refuses: Why a size cannot be, "" if it can be.
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
    """Those of `heads` that ranks of cp share out: none, where each computes all of them."""
    return heads if context_of(spec).attention == EXCHANGES else ()


def _words(sizes: Sequence[int]) -> str:
    return f"mesh.cp={', '.join(map(str, sizes))}"
