"""The textbook closed forms: memory of the training states, and of one layer's activations.

Each formula is written once, as a Python function that uses only arithmetic operators. Given ints
it returns bytes, given sympy symbols expressions, and given `Monomial`s text. Layouts, meshes and
real models are not used here: `memory` estimates the memory of a given plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from meshplan.shown import shown

Quantity: TypeAlias = Any
"""An int, a sympy expression or a Monomial."""

LORA: Final = "lora"
"""The precision of rows whose model is frozen in bf16 and whose adapters are trained in fp32."""

Terms: TypeAlias = dict[str, Quantity]
"""Bytes on one GPU by category. The total is the sum of the values."""


@dataclass(frozen=True, slots=True)
class Monomial:
    """A coefficient times a name: an operand that records the operations applied to it, as text.

    >>> str(8 * (Monomial(1, "a") / (Monomial(1, "n") / Monomial(1, "nodes"))))
    '8*a/(n/nodes)'
    """

    coefficient: int
    name: str

    def __rmul__(self, factor: int) -> Monomial:
        return Monomial(factor * self.coefficient, self.name)

    def __truediv__(self, other: Monomial) -> Monomial:
        divisor = f"({other})" if "/" in other.name else str(other)
        return Monomial(self.coefficient, f"{self.name}/{divisor}")

    def __str__(self) -> str:
        return self.name if self.coefficient == 1 else f"{self.coefficient}*{self.name}"


def share(total: Quantity, parts: Quantity) -> Quantity:
    """Return the size of the largest share if `total` is divided evenly into `parts`.

    Integers are rounded up to whole elements; other numbers give the exact ratio.

    >>> share(10, 4)
    3
    """
    return -(-total // parts) if isinstance(total, int) else total / parts


def ddp_fp32(a: Quantity, n: Quantity, nodes: Quantity) -> Terms:
    """DistributedDataParallel in fp32, 20a: nothing is sharded.

    Args:
        a: Number of parameters.
        n: Number of GPUs.
        nodes: Number of nodes.

    Units: bytes per GPU.

    Source: Adam's two fp32 moments as in ZeRO (Rajbhandari et al. 2020), section 3.1; gradients
        copied into all-reduce buckets of their own size, PyTorch Distributed (Li et al. 2020),
        section 3.2. `gradient_as_bucket_view=True` would save the buckets.
    """
    return {"weights": 4 * a, "gradients": 4 * a, "adam": 8 * a, "buckets": 4 * a}


def ddp_mixed(a: Quantity, n: Quantity, nodes: Quantity) -> Terms:
    """DistributedDataParallel with fp32 master weights and bf16 compute, 18a.

    Units: bytes per GPU.

    Source: Micikevicius et al. 2018, section 3.1, for the master copy; ZeRO (Rajbhandari et al.
        2020), section 3.1, counts 16 bytes (2 + 2 + 12); the bf16 buckets of DDP add 2.
    """
    return {
        "weights": 4 * a,
        "bf16_weights": 2 * a,
        "gradients": 2 * a,
        "adam": 8 * a,
        "buckets": 2 * a,
    }


def zero1(a: Quantity, n: Quantity, nodes: Quantity) -> Terms:
    """ZeRO-1 in fp32, 8a + 8a/n: the optimizer states are sharded over all GPUs.

    Units: bytes per GPU.

    Source: ZeRO (Rajbhandari et al. 2020), section 5.1 (P_os), here with 4-byte weights and
        gradients.
    """
    return {"weights": 4 * a, "gradients": 4 * a, "adam": 8 * share(a, n)}


def zero2(a: Quantity, n: Quantity, nodes: Quantity) -> Terms:
    """ZeRO-2 / SHARD_GRAD_OP in fp32, 4a + 12a/n: gradients are sharded too.

    Units: bytes per GPU.

    Source: ZeRO (Rajbhandari et al. 2020), section 5.2 (P_os+g).
    """
    return {"weights": 4 * a, "gradients": 4 * share(a, n), "adam": 8 * share(a, n)}


def full_shard(a: Quantity, n: Quantity, nodes: Quantity) -> Terms:
    """ZeRO-3 / FULL_SHARD in fp32, 16a/n: everything is sharded over all GPUs.

    Units: bytes per GPU.

    Source: ZeRO (Rajbhandari et al. 2020), section 5.3 (P_os+g+p); PyTorch FSDP (Zhao et al.
        2023), section 3.2.1.
    """
    piece = share(a, n)
    return {"weights": 4 * piece, "gradients": 4 * piece, "adam": 8 * piece}


def hybrid_shard(a: Quantity, n: Quantity, nodes: Quantity) -> Terms:
    """HYBRID_SHARD in fp32, 16a/(n/nodes): sharded inside each node, replicated across nodes.

    Units: bytes per GPU.

    Source: PyTorch FSDP (Zhao et al. 2023), section 3.2.2.
    """
    return full_shard(a, share(n, nodes), 1)


def lora_ddp(a: Quantity, n: Quantity, nodes: Quantity, t: Quantity) -> Terms:
    """LoRA under DistributedDataParallel, 2a + 20t: a bf16 base without gradients or Adam.

    Args:
        a: Number of parameters of the base, which are frozen.
        n: Number of GPUs.
        nodes: Number of nodes.
        t: Number of parameters of the adapters, which are trained in fp32.

    Units: bytes per GPU.

    Source: LoRA (Hu et al. 2021), section 4.2: frozen parameters need no optimizer states; the
        base in 2 bytes a parameter; adapters as in the row of full training, Adam's two fp32
        moments as in ZeRO (Rajbhandari et al. 2020), section 3.1.
    """
    return {"base": 2 * a, **ddp_fp32(t, n, nodes)}


def lora_zero1(a: Quantity, n: Quantity, nodes: Quantity, t: Quantity) -> Terms:
    """LoRA under ZeRO-1, 2a + 8t + 8t/n: only the optimizer states of the adapters are sharded.

    Units: bytes per GPU.

    Source: LoRA (Hu et al. 2021), section 4.2; ZeRO (Rajbhandari et al. 2020), section 5.1.
    """
    return {"base": 2 * a, **zero1(t, n, nodes)}


def lora_zero2(a: Quantity, n: Quantity, nodes: Quantity, t: Quantity) -> Terms:
    """LoRA under ZeRO-2, 2a + 4t + 12t/n: the adapters' gradients are sharded too.

    Units: bytes per GPU.

    Source: LoRA (Hu et al. 2021), section 4.2; ZeRO (Rajbhandari et al. 2020), section 5.2.
    """
    return {"base": 2 * a, **zero2(t, n, nodes)}


def lora_full_shard(a: Quantity, n: Quantity, nodes: Quantity, t: Quantity) -> Terms:
    """LoRA under FULL_SHARD, 2a/n + 16t/n: base and adapters are sharded over all GPUs.

    Units: bytes per GPU.

    Source: LoRA (Hu et al. 2021), section 4.2; ZeRO (Rajbhandari et al. 2020), section 5.3.
    """
    return {"base": 2 * share(a, n), **full_shard(t, n, nodes)}


def lora_hybrid_shard(a: Quantity, n: Quantity, nodes: Quantity, t: Quantity) -> Terms:
    """LoRA under HYBRID_SHARD, 2a/(n/nodes) + 16t/(n/nodes): sharded inside each node.

    Units: bytes per GPU.

    Source: LoRA (Hu et al. 2021), section 4.2; PyTorch FSDP (Zhao et al. 2023), section 3.2.2.
    """
    return lora_full_shard(a, share(n, nodes), 1, t)


@shown
@dataclass(frozen=True, slots=True)
class FormulaRow:
    """One row of the table of training states.

    Args:
        strategy: ddp, zero1, zero2, full_shard or hybrid_shard.
        precision: "fp32"; "mixed" for fp32 master weights and bf16 compute; or "lora" for a frozen
            base in bf16 and adapters in fp32.
        terms: The formula, a function of the numbers of parameters, GPUs and nodes; for "lora",
            also of the number of the adapters' parameters.
    """

    strategy: str
    precision: str
    terms: Callable[..., Terms]

    def evaluate(self, a: Quantity, n: Quantity, nodes: Quantity, t: Quantity = 0) -> Terms:
        """Return the terms, in the type of the operands; only rows of LoRA depend on `t`."""
        return self.terms(a, n, nodes, t) if self.precision == LORA else self.terms(a, n, nodes)

    def total(self, a: Quantity, n: Quantity, nodes: Quantity, t: Quantity = 0) -> Quantity:
        """Return the sum of the terms, in the type of the operands."""
        return sum(self.evaluate(a, n, nodes, t).values())

    def written(self) -> Mapping[str, str]:
        """Return each term as text in a, n, nodes and t, by category: {"weights": "4*a"}."""
        return {name: str(term) for name, term in self._symbolic().items()}

    @property
    def formula(self) -> str:
        """The total as text, with terms that differ only in their coefficient added up.

        >>> [row.formula for row in ROWS[2:4]]
        ['8*a + 8*a/n', '4*a + 12*a/n']
        """
        coefficients: dict[str, int] = {}
        for term in self._symbolic().values():
            coefficients[term.name] = coefficients.get(term.name, 0) + term.coefficient
        return " + ".join(str(Monomial(c, name)) for name, c in coefficients.items())

    @property
    def source(self) -> str:
        """The source in the docstring of `terms`; "" if Python runs without docstrings (-OO)."""
        return " ".join((self.terms.__doc__ or "").partition("Source:")[2].split())

    def _symbolic(self) -> dict[str, Monomial]:
        return self.evaluate(*(Monomial(1, name) for name in ("a", "n", "nodes", "t")))


ROWS: Final = (
    FormulaRow("ddp", "fp32", ddp_fp32),
    FormulaRow("ddp", "mixed", ddp_mixed),
    FormulaRow("zero1", "fp32", zero1),
    FormulaRow("zero2", "fp32", zero2),
    FormulaRow("full_shard", "fp32", full_shard),
    FormulaRow("hybrid_shard", "fp32", hybrid_shard),
)
"""Every row of the table, in the order in which it is shown."""

LORA_ROWS: Final = (
    FormulaRow("ddp", LORA, lora_ddp),
    FormulaRow("zero1", LORA, lora_zero1),
    FormulaRow("zero2", LORA, lora_zero2),
    FormulaRow("full_shard", LORA, lora_full_shard),
    FormulaRow("hybrid_shard", LORA, lora_hybrid_shard),
)
"""The rows of the table if adapters are trained and the model itself is frozen."""
