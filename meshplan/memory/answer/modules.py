"""Of which module every byte of the peak is, blocks that repeat taken together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshplan.memory.answer.estimate import MemoryEstimate, ModuleBytes
from meshplan.memory.log.events import EventLog, Term
from meshplan.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class _NamedBytes:
    """What one name stands for."""

    modules: set[str]
    terms: Counter[Term]


def modules_at_peak(
    log: EventLog, blocks: Collection[str], workspaces_bytes: int = 0
) -> tuple[ModuleBytes, ...]:
    """What lives at the peak, by module; together it is the peak, to the byte.

    Args:
        blocks: The fqns of blocks that repeat; "layers.0.mlp" and "layers.1.mlp" of these are both
            told as "layers.*.mlp".
        workspaces_bytes: What libraries keep all the time, beside the log.

    Returns:
        Those with most bytes first.
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
    """The estimate with the modules of every group.

    Args:
        logs: Of the first rank of each, without the workspaces of libraries.
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
    """The name with a star for the number of a block that it lies in."""
    for outer in _outwards(module):
        if outer in blocks:
            container, _, number = outer.rpartition(".")
            if number.isdigit():
                return f"{container}.*{module[len(outer) :]}".removeprefix(".")
    return module


def _outwards(module: str) -> Iterator[str]:
    """The module and all that it lies in."""
    while module:
        yield module
        module = module.rpartition(".")[0]
