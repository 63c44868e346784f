"""Break the peak down by module; equal modules of repeated blocks are added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshplan.memory.answer.estimate import MemoryEstimate, ModuleBytes
from meshplan.memory.log.events import EventLog, Term
from meshplan.model.graph import around
from meshplan.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class _NamedBytes:
    """The modules that share a name with a star, such as "layers.*.mlp", and their bytes."""

    modules: set[str]
    terms: Counter[Term]


def modules_at_peak(
    log: EventLog, blocks: Collection[str], workspaces_bytes: int = 0
) -> tuple[ModuleBytes, ...]:
    """Return the bytes that are live at the peak, by module; they add up to the peak exactly.

    Args:
        log: The step of one rank, without cuBLAS's workspaces.
        blocks: Fqns of repeated blocks. Modules inside these, such as "layers.0.mlp" and
            "layers.1.mlp", are reported together as "layers.*.mlp".
        workspaces_bytes: Bytes of cuBLAS's workspaces, which exist during the whole step.

    Returns:
        One entry for each name, largest first.
    """
    blocks, names = frozenset(blocks), dict[str, str]()
    found: dict[str, _NamedBytes] = {}
    for number, size in log.live_at_peak.items():
        storage = log.storages[number]
        name = names.get(storage.module)
        if name is None:
            name = names[storage.module] = _folded(storage.module, blocks)
        row = found.setdefault(name, _NamedBytes(set(), Counter()))
        row.modules.add(storage.module)
        row.terms[storage.term] += size
    if workspaces_bytes:
        row = found.setdefault("", _NamedBytes({""}, Counter()))
        row.terms[Term.WORKSPACES] += workspaces_bytes
    rows = [
        ModuleBytes(name, len(row.modules), MappingProxyType(_in_order(row.terms)))
        for name, row in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.num_bytes, row.module)))


def with_modules(estimate: MemoryEstimate, plan: Plan, logs: Sequence[EventLog]) -> MemoryEstimate:
    """Return the estimate with a breakdown by module in every group.

    Args:
        estimate: The estimate to complete.
        plan: The plan that the estimate is of; its graph names the repeated blocks.
        logs: The step of the first rank of each group, without cuBLAS's workspaces.
    """
    blocks = plan.graph.blocks()
    groups = tuple(
        replace(group, modules=modules_at_peak(log, blocks, group.terms.get(Term.WORKSPACES, 0)))
        for group, log in zip(estimate.groups, logs, strict=True)
    )
    return replace(estimate, groups=groups)


def _in_order(terms: Mapping[Term, int]) -> dict[Term, int]:
    return {term: terms[term] for term in Term if terms.get(term)}


def _folded(module: str, blocks: Collection[str]) -> str:
    """Return the fqn with a star in place of the number of the block that contains the module."""
    for outer in around(module):
        if outer in blocks:
            container, _, number = outer.rpartition(".")
            if number.isdigit():
                return f"{container}.*{module[len(outer) :]}".removeprefix(".")
    return module
