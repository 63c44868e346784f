"""Evaluate the formulas: the memory of each strategy, the largest model, the fewest GPUs.

The table evaluates `formulas` with ints. For the inverse questions, sympy solves the same
functions for a real number. Because a shard has a whole number of elements, the exact integer is
then searched near this root. sympy is imported only for an inverse question.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.shown import shown
from meshplan.textbook.formulas import LORA_ROWS, ROWS, FormulaRow

STATES_ONLY: Final = (
    "states only: activations, buffers of communication other than DDP's, and the CUDA context "
    "come on top"
)
"""The caveat that is shown with the results."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class StatesRow:
    """One row of the table, with numbers.

    Args:
        row: The formula.
        terms: Bytes by category on the GPU with the largest share.
        memory_bytes: Memory of one GPU; None if not known.
        is_plan: True if this row matches the user's plan file.
    """

    row: FormulaRow
    terms: Mapping[str, int]
    memory_bytes: int | None = None
    is_plan: bool = False

    @property
    def bytes_per_gpu(self) -> int:
        """Bytes of all states on the GPU with the largest share."""
        return sum(self.terms.values())

    @property
    def left_bytes(self) -> int | None:
        """Memory minus states, negative if they do not fit; None if the memory is not known."""
        return None if self.memory_bytes is None else self.memory_bytes - self.bytes_per_gpu

    @property
    def fits(self) -> bool | None:
        """True if the states fit into one GPU's memory; None if the memory is not known."""
        return None if self.left_bytes is None else self.left_bytes >= 0


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to an inverse question for one strategy.

    Args:
        row: The formula.
        solution: The solution by sympy, such as "a = M*n/16", with M the memory of one GPU in
            bytes; "" if the formula does not depend on the unknown.
        value: The largest number of parameters or the smallest number of GPUs; None if no number
            fits into the memory.
    """

    row: FormulaRow
    solution: str
    value: int | None


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class StatesEstimate:
    """The whole result of `estimate`. A number that is not stated is None.

    Args:
        num_params: Number of parameters, without those of adapters.
        num_gpus: Number of GPUs on all nodes together.
        nodes: Number of nodes.
        num_adapter_params: Number of parameters of LoRA adapters, beside which the model is
            frozen; None if the model itself is trained.
        memory_bytes: Memory of one GPU.
        rows: The table; empty unless the numbers of parameters and GPUs are known.
        max_params: Largest model for each row of the table; empty if not asked for.
        min_gpus: Fewest GPUs for each row of the table; empty if not asked for.
        notes: Remarks that the user needs to interpret the numbers, `STATES_ONLY` first.
    """

    num_params: int | None
    num_gpus: int | None
    nodes: int
    memory_bytes: int | None
    num_adapter_params: int | None = None
    rows: tuple[StatesRow, ...] = ()
    max_params: tuple[Answer, ...] = ()
    min_gpus: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_possible(self) -> bool:
        """True if an inverse question has an answer. If none was asked, True if any row fits."""
        answers = (*self.max_params, *self.min_gpus)
        if answers:
            return any(answer.value is not None for answer in answers)
        return not self.rows or any(row.fits is not False for row in self.rows)


def tabulate(
    *,
    num_params: int,
    num_gpus: int,
    nodes: int,
    memory_bytes: int | None = None,
    num_adapter_params: int | None = None,
    plan: tuple[str, str] | None = None,
) -> tuple[StatesRow, ...]:
    """Return every row of the table; `plan` is the (strategy, precision) of the row to mark.

    With `num_adapter_params`, these are the rows of LoRA.

    >>> [row.bytes_per_gpu for row in tabulate(num_params=1000, num_gpus=8, nodes=2)]
    [20000, 18000, 9000, 5500, 2000, 4000]
    """
    return tuple(
        StatesRow(
            row=row,
            terms=row.evaluate(num_params, num_gpus, nodes, num_adapter_params or 0),
            memory_bytes=memory_bytes,
            is_plan=plan == (row.strategy, row.precision),
        )
        for row in rows_of(num_adapter_params)
    )


def rows_of(num_adapter_params: int | None) -> tuple[FormulaRow, ...]:
    """Return the rows of LoRA if a number of adapters' parameters is given, else all others."""
    return ROWS if num_adapter_params is None else LORA_ROWS


def max_params(row: FormulaRow, *, num_gpus: int, nodes: int, memory_bytes: int) -> Answer:
    """Return the largest model whose states fit into `memory_bytes` on each GPU."""
    root, solution = _solve(row, "a", {"n": num_gpus, "nodes": nodes, "M": memory_bytes})
    assert root is not None, "every formula grows with the model"

    def is_over(a: int) -> bool:
        return bool(row.total(a, num_gpus, nodes) > memory_bytes)

    # The root is an upper bound. Shards are rounded up by less than one element per GPU, so the
    # answer is not far below it.
    guess = math.floor(root)
    candidates = range(max(1, guess - 2 * num_gpus), guess + 1)
    value = candidates.start + bisect_left(candidates, True, key=is_over) - 1
    return Answer(row=row, solution=solution, value=value or None)


def min_gpus(
    row: FormulaRow,
    *,
    num_params: int,
    nodes: int,
    memory_bytes: int,
    num_adapter_params: int | None = None,
) -> Answer:
    """Return the smallest number of GPUs, a multiple of `nodes`, on which the states fit."""
    t = num_adapter_params or 0
    root, solution = _solve(row, "n", {"a": num_params, "nodes": nodes, "M": memory_bytes, "t": t})

    def fits(num_gpus: int) -> bool:
        return bool(row.total(num_params, num_gpus, nodes, t) <= memory_bytes)

    most = max(num_params, t) * nodes  # With one element per GPU, more GPUs save nothing.
    if not fits(most):
        return Answer(row=row, solution=solution, value=None)
    least = nodes if root is None else max(nodes, -(-math.ceil(root) // nodes) * nodes)
    candidates = range(least, most + 1, nodes)
    value = candidates[bisect_left(candidates, True, key=fits)]
    return Answer(row=row, solution=solution, value=value)


def _solve(row: FormulaRow, unknown: str, known: Mapping[str, int]) -> tuple[float | None, str]:
    """Solve `row.total = M` for one unknown; return (root, solution as text).

    The result is (None, "") if the formula does not depend on the unknown.
    """
    import sympy

    names = ("a", "n", "nodes", "M", "t")
    symbol = {name: sympy.Symbol(name) for name in names}
    total = row.total(symbol["a"], symbol["n"], symbol["nodes"], symbol["t"])
    if symbol[unknown] not in total.free_symbols:
        return None, ""
    (root,) = sympy.solve(total - symbol["M"], symbol[unknown])
    exact = root.subs({symbol[name]: value for name, value in known.items()})
    above, below = sympy.fraction(sympy.factor(root))
    if above.could_extract_minus_sign():
        above, below = -above, -below
    return exact, f"{unknown} = {above / below}"
