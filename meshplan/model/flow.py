"""One forward pass as data: its tensors, its operations and its module calls, in order.

`runtime.trace.ops` records a forward of a live model on fake tensors. From it, tensor parallelism
learns which dims belong together, and pipelines which values are used across a stage boundary.
torch is not needed: an operation is a name, such as "aten.mm.default", and its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshplan.shown import shown


@shown
@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor among the arguments of an operation.

    Args:
        value: The tensor's `Value.id`.
    """

    value: int


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the forward pass; an in-place write turns it into a new value.

    Args:
        id: Index in `Flow.values`.
        shape: Shape in the recorded forward.
        dtype: Name such as "float32".
        origin: Source of the tensor. A constant is a tensor that is neither computed nor
            registered: an attribute, or one made outside of every recorded operation.
        name: The fqn of a parameter or buffer, the path of an input ("input_ids", "0"), else "".
        digest: Hash of a constant's elements; "" if they are not known.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    origin: Literal["parameter", "buffer", "input", "constant", "op"]
    name: str = ""
    digest: str = ""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Args:
        name: Operator and overload, such as "aten.add.Tensor"; `UPDATE` if the operation stands for
            the effect of an in-place write on another view of the written memory.
        args, kwargs: The arguments as they were passed, tensors as `Ref`.
        outputs: Value ids of the results.
        call: The innermost module call that ran it, as an index in `Flow.calls`.
        is_pointwise: True if every element of the result depends on one element of each argument.
        is_random: True if the operation draws random numbers.
        mutates: Value ids of the overwritten tensors before the write.
        rewrites: Value ids of the same tensors after the write, in the same order; they are also in
            `outputs`.

    Attributes:
        inputs: Value ids of the tensor arguments, each once, in order.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]
    call: int
    is_pointwise: bool = False
    is_random: bool = False
    mutates: tuple[int, ...] = ()
    rewrites: tuple[int, ...] = ()
    inputs: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = (*refs(self.args), *refs(tuple(self.kwargs.values())))
        object.__setattr__(self, "inputs", tuple(dict.fromkeys(found)))


UPDATE = "meshplan.update"
"""Name of the operation (a tensor's old value, the written value) -> the tensor's new value, for a
tensor that shares memory with one that was written in place.
"""


def refs(item: Any) -> Iterator[int]:
    """Yield the value id of every `Ref` in nested tuples, lists and mappings."""
    if isinstance(item, Ref):
        yield item.value
    elif isinstance(item, tuple | list):
        for part in item:
            yield from refs(part)
    elif isinstance(item, Mapping):
        for part in item.values():
            yield from refs(part)


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one module.

    Args:
        id: Index in `Flow.calls`, which is ordered by the start of the calls.
        module: The module's first fqn, "" for the root.
        parent: Id of the enclosing call; None for the call of the root.
        inputs: Pairs (path in the arguments, value id), such as ("0", 3) or ("mask", 7).
        outputs: Pairs (path in the result, value id); ("", 9) if the result is a tensor.
        ops: The operations inside it, as a half-open range (first, end) in `Flow.ops`.
    """

    id: int
    module: str
    parent: int | None
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    ops: tuple[int, int]


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeWrite:
    """An attribute or buffer to which the forward assigned a new tensor for the next forward.

    Args:
        module: The first fqn of the module that has the attribute.
        name: The attribute's name, followed by keys and indices for items of a list or a mapping.
        old, new: Value ids before and after the forward; None if the attribute is no tensor.
    """

    module: str
    name: str
    old: int | None
    new: int | None


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A whole forward pass.

    Args:
        values: Every tensor, by id.
        ops: The operations in the order in which they ran.
        calls: Module calls; the first is the root's.
        changes: Attributes that the forward assigned. In-place writes are in `ops` instead.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    changes: tuple[AttributeWrite, ...] = ()
    _producer: Mapping[int, int] = field(init=False, repr=False, compare=False)
    _users: Mapping[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        producer: dict[int, int] = {}
        users: dict[int, list[int]] = {}
        for number, op in enumerate(self.ops):
            producer.update(dict.fromkeys(op.outputs, number))
            for value in op.inputs:
                users.setdefault(value, []).append(number)
        object.__setattr__(self, "_producer", producer)
        object.__setattr__(self, "_users", {v: tuple(found) for v, found in users.items()})

    def producer(self, value: int) -> int | None:
        """Return the index of the operation that computed a value; None if none did."""
        return self._producer.get(value)

    def users(self, value: int) -> tuple[int, ...]:
        """Return the indices of the operations that read a value."""
        return self._users.get(value, ())

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """Pairs (path, value id) of the model's inputs."""
        return self.calls[0].inputs

    @property
    def outputs(self) -> tuple[tuple[str, int], ...]:
        """Pairs (path, value id) of the model's outputs."""
        return self.calls[0].outputs

    def around(self, call: int) -> Iterator[Call]:
        """Yield the call with this id and its enclosing calls, innermost first."""
        at: int | None = call
        while at is not None:
            yield self.calls[at]
            at = self.calls[at].parent

    def parameters_of(self, op: Op) -> tuple[str, ...]:
        """Return the names of the parameters that an operation reads directly."""
        values = (self.values[v] for v in op.inputs)
        return tuple(v.name for v in values if v.origin == "parameter")
