"""Lower bound on the memory of a step whose blocks are compiled.

A compiled block receives the same inputs and returns the same outputs as before. Inside the block,
the compiler fuses chains of elementwise operators, most of whose results then never exist as
tensors, and chooses what it saves for backward. It never computes a matrix product twice, and it
cannot avoid the buffers of collectives. The log of the same step without a compiler is the upper
bound; this module derives the lower bound from that log.

Source: torch 2.13, torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`, which
never recomputes compute-intensive operators; torch/_inductor fuses pointwise operators and
reductions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from meshplan.memory.log.events import EventLog, Storage, Term
from meshplan.model.graph import around

BOUND: Final = (
    "blocks are compiled, and the figures are those of the same blocks without a compiler; "
    "the lower end, 'from', leaves out every tensor that the compiler may fuse away or recompute"
)
_PRODUCTS: Final = ("mm", "bmm", "convolution", "_grouped_mm", "_scaled_dot_product", "_flash",
                    "_efficient")  # fmt: skip
"""Substrings in the names of operators that run as separate kernels, and are never fused."""
_FREE: Final = frozenset({Term.TEMPORARIES, Term.ACTIVATIONS})


def least_of(log: EventLog, compiled: Collection[str]) -> EventLog:
    """Return the log without the tensors inside compiled modules that a compiler may fuse away.

    Results of matrix products, convolutions and attention kernels stay in the log.

    Args:
        log: The step of one rank as it runs without a compiler.
        compiled: Fqns of the compiled modules. The outputs of a compiled module must be logged
            under its parent, because the compiler cannot fuse them away.
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
