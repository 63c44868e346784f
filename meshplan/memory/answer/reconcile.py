"""Reconcile the textbook's figure with the estimate: steps that explain every byte between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshplan.assign import Assignment
from meshplan.memory.answer.estimate import RankGroup, ReconcileStep
from meshplan.memory.log.events import Term
from meshplan.textbook.formulas import ROWS, FormulaRow

_STATES: Final = {
    "weights": Term.PARAMETERS,
    "gradients": Term.GRADIENTS,
    "adam": Term.OPTIMIZER,
}
"""Categories of a real step by textbook term, for the terms that both have. All other textbook
terms are subtracted, and their bytes appear in the categories in which a step allocates them."""

_WHY: Final = {
    Term.PARAMETERS: "as the plan shards them: tp, pp, padding, replicated parameters, dtypes",
    Term.GRADIENTS: "gradients that exist at the peak",
    Term.OPTIMIZER: "state of this optimizer, sharded like the parameters",
    Term.BUFFERS: "tensors of the model that are not parameters",
    Term.INPUTS: "inputs and targets of the step",
    Term.GATHERED: "parameters gathered for forward and backward",
    Term.COMMUNICATION: "inputs and outputs of collectives",
    Term.ACTIVATIONS: "tensors saved for backward",
    Term.LOSS: "logits, intermediate tensors of the loss, and their gradients",
    Term.WORKSPACES: "cuBLAS keeps one workspace for each thread",
    Term.TEMPORARIES: "short-lived tensors of operators and of the optimizer",
}


def textbook_row(assignment: Assignment, *, is_mixed: bool) -> FormulaRow:
    """Return the formula of `formulas.ROWS` that matches a plan's strategy.

    Without data axes every rank has the whole model, which is the formula of ddp.
    hybrid_shard_zero2 has no separate formula and uses that of hybrid_shard.
    """
    name = assignment.strategy.name
    name = "hybrid_shard" if name == "hybrid_shard_zero2" else name
    precision = "mixed" if name == "ddp" and is_mixed else "fp32"
    return next(row for row in ROWS if (row.strategy, row.precision) == (name, precision))


def reconcile(
    group: RankGroup, assignment: Assignment, *, is_mixed: bool
) -> tuple[ReconcileStep, ...]:
    """Return the steps from the textbook's figure for this plan to the total of a rank.

    The first step states the textbook's figure itself; the last one ends at the rank's total.

    Args:
        group: The class of ranks whose total is explained.
        assignment: The decisions of the plan, from which the formula and its arguments follow.
        is_mixed: If True, the compute dtype is not the dtype in which parameters are stored.
    """
    row, mesh = textbook_row(assignment, is_mixed=is_mixed), assignment.mesh
    tensors = assignment.tensors.values()
    num_params = sum(p.info.numel for p in tensors if not p.info.is_buffer)
    nodes = mesh.size("dp_replicate") if row.strategy == "hybrid_shard" else 1
    book = row.terms(num_params, mesh.world_size, nodes)
    start = sum(book.values())
    steps = [ReconcileStep(f"textbook: {row.strategy}, {row.formula}", start, start, row.source)]
    for name, delta, why in _deltas(book, group):
        if delta:
            steps.append(ReconcileStep(name, delta, steps[-1].total_bytes + delta, why))
    assert steps[-1].total_bytes == group.peak.total_bytes
    return tuple(steps)


def _deltas(book: dict[str, int], group: RankGroup) -> Iterator[tuple[str, int, str]]:
    for name, size in book.items():
        if name in _STATES:
            term = _STATES[name]
            yield str(term), group.terms.get(term, 0) - size, _WHY[term]
        else:
            yield (
                f"textbook's {name.replace('_', ' ')}",
                -size,
                "counted in the categories that allocate them",
            )
    for term, size in group.terms.items():
        if term not in _STATES.values():
            yield str(term), size, _WHY.get(term, "")
    peak = group.peak
    rounding = peak.allocated_bytes - peak.requested_bytes
    yield "rounding", rounding, "the allocator rounds up to multiples of 512 bytes"
    unused = peak.reserved_bytes - peak.allocated_bytes
    yield "unused in segments", unused, "reserved by the allocator, but free"
    yield "driver", peak.driver_bytes, "outside of torch's allocator: context, communicators"
