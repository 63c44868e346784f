"""What a compiler may spare: the least that a step with compiled blocks can hold.

A compiled block is given its inputs and gives its outputs, as before. In between the compiler
fuses what follows element by element, so that most of it never is a tensor, and keeps for backward
what is cheapest. What products give it does not compute twice, and what is sent it cannot spare.
The log of the same step without a compiler is the most; this makes the least of it.

Source: torch 2.13, torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`: what is
intensive to compute is never recomputed; torch/_inductor fuses pointwise operators and reductions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from meshplan.memory.log.events import EventLog, Storage, Term
from meshplan.model.graph import around

BOUND: Final = (
    "blocks are compiled, and the figures are those of the same blocks run as they are written; "
    "'from' leaves out all that a compiler may fuse away or compute again"
)
_PRODUCTS: Final = ("mm", "bmm", "convolution", "_grouped_mm", "_scaled_dot_product", "_flash",
                    "_efficient")  # fmt: skip
"""What names of operators hold that are called and not fused."""
_FREE: Final = frozenset({Term.TEMPORARIES, Term.ACTIVATIONS})


def least_of(log: EventLog, compiled: Collection[str]) -> EventLog:
    """The log without what operators inside of compiled modules make, but for products.

    Args:
        compiled: Fqns. What such a module hands on must stand under the one around it.
    """
    kept = [not _may_go(storage, frozenset(compiled)) for storage in log.storages]
    events = tuple(event for event in log.events if kept[event.storage])
    return replace(log, changes=events)


def _may_go(storage: Storage, compiled: frozenset[str]) -> bool:
    namespace, _, name = storage.op.partition(".")
    if storage.term not in _FREE or namespace != "aten" or name.startswith("empty"):
        return False
    if any(word in name for word in _PRODUCTS):
        return False
    return not compiled.isdisjoint(around(storage.module))
