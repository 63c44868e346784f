"""One forward pass as data: its tensors, its operations and its module calls, in order.

Recorded by `runtime.trace.ops` from a live model without running a single number. Tensor
parallelism reads from it which dims belong together, pipelines what lives across a cut.
Refuses to know torch: an operation is a name, such as "aten.mm.default", and its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor inside the arguments of an operation.

    Args:
        value: The `Value.id`.
    """

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the forward pass, at one moment: writing into it makes another value.

    Args:
        id: Its place in `Flow.values`.
        shape: What the recorded inputs made of it.
        dtype: Name such as "float32".
        origin: Where it comes from. A constant is a tensor that is neither computed nor
            registered: an attribute, or one made outside of every recorded operation.
        name: The fqn of a parameter or buffer, the path of an input ("input_ids", "0"), else "".
        digest: Of a constant's numbers; "" where they are not known.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    origin: Literal["parameter", "buffer", "input", "constant", "op"]
    name: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Args:
        name: Operator and overload, such as "aten.add.Tensor"; `UPDATE` for what writing into
            a tensor does to the views of it.
        args, kwargs: As they were passed, tensors as `Ref`.
        outputs: Value ids.
        call: The innermost module call that ran it: a place in `Flow.calls`.
        is_pointwise: Every element of the result depends on one element of each argument.
        is_random: It draws random numbers.
        mutates: Value ids that it overwrote, as they were before.
        rewrites: Value ids of the same tensors, as they are after; among `outputs`.
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

    @property
    def inputs(self) -> tuple[int, ...]:
        """Value ids of the arguments, each once, in order."""
        found = (*refs(self.args), *refs(tuple(self.kwargs.values())))
        return tuple(dict.fromkeys(found))


UPDATE = "meshplan.update"
"""(old value, written value) -> the old tensor as it is after memory that it shares was written."""


def refs(item: Any) -> Iterator[int]:
    """The value ids in nested arguments."""
    if isinstance(item, Ref):
        yield item.value
    elif isinstance(item, tuple | list):
        for part in item:
            yield from refs(part)
    elif isinstance(item, Mapping):
        for part in item.values():
            yield from refs(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one module.

    Args:
        id: Its place in `Flow.calls`; calls stand in the order in which they began.
        module: The module's first fqn, "" for the root.
        parent: The call around it; None for the root's.
        inputs: (path in the arguments, value id), such as ("0", 3) or ("mask", 7).
        outputs: (path in the result, value id); ("", 9) where the result is a tensor.
        ops: The operations inside it, as (first, behind the last) in `Flow.ops`.
    """

    id: int
    module: str
    parent: int | None
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    ops: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeWrite:
    """An attribute or buffer that the forward set to something else, for the next one to find.

    Args:
        module: The first fqn of the module that it belongs to.
        name: Its own, with keys and places behind it for what lies in a list or a mapping.
        old, new: Value ids before and after; None where there is no tensor.
    """

    module: str
    name: str
    old: int | None
    new: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A whole forward pass.

    Args:
        values: Every tensor, by id.
        ops: In the order in which they ran.
        calls: Module calls; the first is the root's.
        changes: What it set; writing into a tensor is an operation instead.
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
        """The number of the operation that made a value; None for inputs, weights, constants."""
        return self._producer.get(value)

    def users(self, value: int) -> tuple[int, ...]:
        """The numbers of the operations that read a value."""
        return self._users.get(value, ())

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """(path, value id) of the model's inputs."""
        return self.calls[0].inputs

    @property
    def outputs(self) -> tuple[tuple[str, int], ...]:
        """(path, value id) of what the model returns."""
        return self.calls[0].outputs

    def around(self, call: int) -> Iterator[Call]:
        """A call and those around it, innermost first."""
        at: int | None = call
        while at is not None:
            yield self.calls[at]
            at = self.calls[at].parent

    def parameters_of(self, op: Op) -> tuple[str, ...]:
        """The parameters that an operation reads directly."""
        values = (self.values[v] for v in op.inputs)
        return tuple(v.name for v in values if v.origin == "parameter")
