"""The data flow of a forward, from the config of a model of a known family.

The ops are the rows of the tape that `memory.decoder.microbatch` makes for the memory estimate.
"""

from __future__ import annotations

from typing import Final

from meshplan.errors import PlanError
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import shape_of
from meshplan.model.flow import Call, Flow, Op, Ref, Value
from meshplan.model.graph import ModelGraph

_ANY: Final = MicrobatchSpec(batch=1, seq_len=16, element_bytes=2)
"""Arbitrary sizes, because the data flow does not depend on them."""


def layout_flow(graph: ModelGraph) -> Flow | None:
    """Return the data flow of a forward without its loss; None without a config of known family."""
    if not graph.config:
        return None
    try:
        tape = tape_of(shape_of(graph), _ANY)
    except PlanError:
        return None
    values = [Value(id=n, shape=(), dtype="", origin="op") for n in range(len(tape.nbytes))]
    known: dict[str, int] = {}
    calls = [Call(id=0, module="", parent=None, inputs=(), outputs=(), ops=(0, 0))]
    places = {"": 0}
    ops = []
    for row in tape.rows[: tape.loss_start]:
        if row.module not in places:
            places[row.module] = len(calls)
            calls.append(
                Call(id=len(calls), module=row.module, parent=0, inputs=(), outputs=(), ops=(0, 0))
            )
        for fqn, _ in row.parameters:
            if fqn not in known:
                known[fqn] = len(values)
                values.append(
                    Value(id=len(values), shape=(), dtype="", origin="parameter", name=fqn)
                )
        reads = (*row.reads, *(known[fqn] for fqn, _ in row.parameters))
        ops.append(
            Op(
                name=row.op,
                args=tuple(map(Ref, reads)),
                kwargs={},
                outputs=row.makes,
                call=places[row.module],
            )
        )
    return Flow(values=tuple(values), ops=tuple(ops), calls=tuple(calls))
