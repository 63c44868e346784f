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

from meshplan.memory.log.events import COMPILED_OUTPUT, EventLog, Storage, Term
from meshplan.model.graph import around

BOUND: Final = (
    "blocks are compiled, and the figures are those of the same blocks without a compiler; "
    "the lower end, 'from', leaves out every tensor that the compiler may fuse away or recompute"
)
_PRODUCTS: Final = ("mm", "convolution", "attention", "_flash", "_efficient")
"""Substrings in the names of operators that run as separate kernels, and are never fused."""
_FREE: Final = frozenset({Term.TEMPORARIES, Term.ACTIVATIONS})


def least_of(log: EventLog, compiled: Collection[str]) -> EventLog:
    """Return the log without the tensors inside compiled modules that a compiler may fuse away.

    Results of matrix products, convolutions and attention kernels stay in the log.

    Args:
        log: The step of one rank as it runs without a compiler.
        compiled: Fqns of the compiled modules. The outputs of a compiled module, which the compiler
            cannot fuse away, must be logged under its parent or as made by `COMPILED_OUTPUT`.
    """
    kept = [not _may_go(storage, frozenset(compiled)) for storage in log.storages]
    events = tuple(event for event in log.events if kept[event.storage])
    return replace(log, changes=events)


def _may_go(storage: Storage, compiled: frozenset[str]) -> bool:
    # Traces list operators as torch names them, the analytic estimate without namespace.
    namespace, is_traced, name = storage.op.partition(".")
    name = name or namespace
    if storage.term not in _FREE or (is_traced and namespace != "aten"):
        return False
    if not name or name.startswith(("empty", COMPILED_OUTPUT)):
        return False
    if any(word in name for word in _PRODUCTS):
        return False
    return not compiled.isdisjoint(around(storage.module))
