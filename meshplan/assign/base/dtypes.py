"""Models with parameters of several dtypes: find modules and parameters of another dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from meshplan.model.graph import ModelGraph, TensorInfo
from meshplan.spec.spec import Precision

FLOATS: Final = frozenset(("float32", "bfloat16", "float16", "float64"))
"""The dtypes of parameters to which the `precision` of a plan applies."""
UNIFIED: Final = frozenset(("float32", "bfloat16", "float16"))
"""The dtypes of parameters that a `precision` with a master dtype stores in that one dtype."""


class Dtypes:
    """The dtypes of a model's trainable parameters, by module."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._inside: dict[str, Counter[str]] = {}
        words = {tensor.dtype for tensor in _trainable(graph.parameters)}
        self.is_mixed, self._is_complex = len(words) > 1, bool(words - FLOATS)
        main = _most(self._of("")) if self.is_mixed else ""
        self._main = main if main in FLOATS else ""

    def other(self, fqn: str) -> str:
        """Return the dtype of a module's parameters if they have a single, special dtype, else "".

        A dtype is special if most elements of the model have another dtype. If most elements are
        complex, every dtype is special.
        """
        found = self._of(fqn) if self.is_mixed or self._is_complex else {}
        return next(iter(found)) if len(found) == 1 and self._main not in found else ""

    def _of(self, fqn: str) -> Counter[str]:
        if fqn not in self._inside:
            self._inside[fqn] = _count(_trainable(self._graph.inside(fqn)))
        return self._inside[fqn]


def stored_dtype(tensor: TensorInfo, precision: Precision) -> str:
    """Return the dtype in which a parameter is stored: the master dtype, else the model's."""
    return (precision.master if tensor.dtype in FLOATS else None) or tensor.dtype


def main_dtype(tensors: Iterable[TensorInfo], precision: Precision) -> str:
    """Return the stored dtype of most elements of a unit's trainable parameters; "" without any."""
    found: Counter[str] = Counter()
    for tensor in _trainable(tensors):
        found[stored_dtype(tensor, precision)] += tensor.numel
    return _most(found)


def _count(tensors: Iterable[TensorInfo]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[tensor.dtype] += tensor.numel
    return found


def _most(found: Counter[str]) -> str:
    return max(found, key=lambda dtype: found[dtype], default="")


def _trainable(tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    return (t for t in tensors if t.trainable and not t.is_buffer and t.numel)
