"""Traces of microbatches as JSON, and back: data alone, which reading cannot make run anything."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshplan.memory.log.events import EventLog, Storage, Term
from meshplan.memory.log.microbatch import HookKind, HookPoint, MicrobatchTrace
from meshplan.runtime.fake_step.costs import MicrobatchCosts
from meshplan.runtime.fake_step.kernels import OperatorWork, Where

Json = Mapping[str, Any]


def trace_to_json(trace: MicrobatchTrace) -> Json:
    """Return a trace as JSON values; storages and events by columns."""
    log = trace.log
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(log.storages))}
    return {
        "kinds": [[kind.term.value, *kind[1:]] for kind in kinds],
        "storages": [kinds[each] for each in log.storages],
        "deltas": [delta for delta, _, _ in log.changes],
        "of": [storage for _, storage, _ in log.changes],
        "in": [phase for _, _, phase in log.changes],
        "phases": list(log.phases),
        "host_bytes": log.host_bytes,
        "hook_points": [[event, kind.value, unit] for event, kind, unit in trace.hook_points],
        "gradients": dict(trace.gradients),
        "ready": dict(trace.ready),
        "losses": list(trace.losses),
        "later_gradients": [list(each) for each in trace.later_gradients],
        "num_before": trace.num_before,
        "grad_relayout": {fqn: [*map(list, each)] for fqn, each in trace.grad_relayout.items()},
        "taken": {fqn: list(each) for fqn, each in trace.taken.items()},
        "host": None if trace.host is None else [list(each) for each in trace.host],
    }


def trace_from_json(data: Json) -> MicrobatchTrace:
    """Return the trace that `trace_to_json` was given.

    Raises:
        KeyError, TypeError, ValueError: The JSON is of something else.
    """
    kinds = [Storage(Term(term), *rest) for term, *rest in data["kinds"]]
    columns = data["deltas"], data["of"], data["in"]
    host = data["host"]
    return MicrobatchTrace(
        log=EventLog(
            storages=tuple(kinds[each] for each in data["storages"]),
            changes=tuple(zip(*columns, strict=True)),
            phases=tuple(data["phases"]),
            host_bytes=data["host_bytes"],
        ),
        hook_points=tuple(
            HookPoint(e, HookKind(kind), unit) for e, kind, unit in data["hook_points"]
        ),
        gradients=data["gradients"],
        ready=data["ready"],
        losses=tuple(data["losses"]),
        later_gradients=tuple((event, fqn, n) for event, fqn, n in data["later_gradients"]),
        num_before=data["num_before"],
        grad_relayout={
            fqn: tuple((num_bytes, storage) for num_bytes, storage in each)
            for fqn, each in data["grad_relayout"].items()
        },
        taken={fqn: tuple(each) for fqn, each in data["taken"].items()},
        host=None if host is None else tuple((event, num_bytes) for event, num_bytes in host),
    )


def costs_to_json(costs: MicrobatchCosts) -> Json:
    """Return the record of a microbatch as JSON values."""
    return {
        "trace": trace_to_json(costs.trace),
        "done": [[*where, *done] for where, done in costs.done.items()],
        "shown": dict(costs.shown),
        "unknown": sorted(costs.unknown),
        "convolved": costs.convolved,
        "is_steady": costs.is_steady,
        "has_cast": costs.has_cast,
        "input_bytes": costs.input_bytes,
    }


def costs_from_json(data: Json) -> MicrobatchCosts:
    """Return the record that `costs_to_json` was given.

    Raises:
        KeyError, TypeError, ValueError: The JSON is of something else.
    """
    width = len(Where._fields)
    return MicrobatchCosts(
        trace=trace_from_json(data["trace"]),
        done=MappingProxyType(
            {Where(*row[:width]): OperatorWork(*row[width:]) for row in data["done"]}
        ),
        shown=MappingProxyType(data["shown"]),
        unknown=frozenset(data["unknown"]),
        convolved=data["convolved"],
        is_steady=data["is_steady"],
        has_cast=data["has_cast"],
        input_bytes=data["input_bytes"],
    )
