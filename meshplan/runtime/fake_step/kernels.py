"""What a device does while a model runs: kernels, flops and bytes, by block, forward and backward.

Counted below autograd, where an operator is one kernel or nearly so. A product takes what its
shapes say, everything else moves what it reads and makes through the device's memory; views take
nothing. What ranks of tp send each other is counted beside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from meshplan.layout.mesh import Mesh
from meshplan.runtime.base.pytree import given_to
from meshplan.runtime.fake_step.cuda_mode import Behaviour
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.torch_private.modes import device_told
from meshplan.runtime.trace.collectives import sent_by

_ops: Final[Any] = torch.ops.aten
_ATTENTION: Final = frozenset(
    name + end
    for name in (
        f"aten::_scaled_dot_product_{kernel}_attention"
        for kernel in ("flash", "efficient", "cudnn")
    )
    for end in ("", "_backward")
)
_ATTENTION_BACK: Final = 2.5
"""Backward takes five products where forward takes two."""
_SENDS_OR_ASKS: Final = ("prim", "c10d", "_c10d_functional", "_dtensor")
_BETWEEN_ACTIVATIONS: Final = frozenset({_ops.bmm, _ops.baddbmm})
"""Products of two activations, in attention that is spelled out: they reach what attention does."""
_CONVOLVES: Final = frozenset({_ops.convolution, _ops.convolution_backward})
_LOOKS_UP: Final = frozenset({_ops.embedding, _ops.index_select, _ops.gather, _ops.index})
"""They read as much as they make, however large the table."""
_MAKES_NOTHING: Final = frozenset({_ops.empty, _ops.empty_like, _ops.empty_strided, _ops.new_empty,
                                   _ops.new_empty_strided, _ops.detach, _ops.alias,
                                   _ops._unsafe_view, _ops.lift_fresh})  # fmt: skip
"""Operators that start no kernel: `_unsafe_view` is a view whose schema does not say so."""

_TOLD: Final[dict[tuple[Any, ...], float]] = {}
_MOST: Final = 1 << 14


class OperatorWork(NamedTuple):
    """The work of some operators.

    Attributes:
        context_bytes: Of the keys and values that attention reads.
        exchanged_bytes: Of these, of its queries and of what it makes.
        all_reduces, all_reduce_bytes: Along tp, of the whole tensors.
        gathers, gather_bytes: Likewise all_gather and reduce_scatter together, which cost the same.
    """

    kernels: float = 0.0
    flops: float = 0.0
    attention_flops: float = 0.0
    product_bytes: float = 0.0
    moved_bytes: float = 0.0
    context_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    all_reduces: float = 0.0
    all_reduce_bytes: float = 0.0
    gathers: float = 0.0
    gather_bytes: float = 0.0

    def plus(self, other: OperatorWork) -> OperatorWork:
        """Both."""
        return OperatorWork(*(a + b for a, b in zip(self, other, strict=True)))

    def less(self, other: OperatorWork) -> OperatorWork:
        """This without that."""
        return OperatorWork(*(a - b for a, b in zip(self, other, strict=True)))


class Where(NamedTuple):
    """A part of a microbatch.

    Attributes:
        is_backward: Whether backward runs.
        block: The block that runs, or the last that did.
        is_after: Whether it is done, and the next has not begun.
    """

    is_backward: bool
    block: str
    is_after: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One microbatch of one rank.

    Args:
        done: What was done where; of blocks that are alike only those that were run are named.
        shown: By block of the whole model, the one that was run in its place.
        trained: Parameters that got a gradient.
        handed_bytes: The most that any block takes of what has a gradient.
        convolved: Share of the flops that are a convolution's.
        unknown: Operators of whose flops nobody knows.
    """

    done: Mapping[Where, OperatorWork]
    shown: Mapping[str, str]
    trained: Collection[str]
    handed_bytes: int
    convolved: float
    unknown: frozenset[str]

    @property
    def flops(self) -> float:
        """Those of all blocks, and of what is in none."""
        times = Counter(self.shown.values())
        return sum(done.flops * times.get(at.block, 1) for at, done in self.done.items())


class KernelCounter(MemoryTracker):
    """A ledger that also counts.

    Args:
        blocks: The fqns of the model's blocks.
        mesh: That the ranks stand in; None where there is but one.

    Attributes:
        done: What was done where, since `forget`.
        unknown: Operators of others: of their flops nobody knows.
        convolved: Flops of convolutions.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        behaviour: Behaviour,
        blocks: Collection[str],
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(names, behaviour)
        self._mesh = mesh
        self._blocks = frozenset(blocks)
        self._block_of: dict[str, str] = {}
        self.done: dict[Where, OperatorWork] = defaultdict(OperatorWork)
        self.unknown: set[str] = set()
        self.convolved = 0.0
        self._last = ""

    def forget(self) -> None:
        """Begin anew, and to count anew."""
        super().forget()
        self.done = defaultdict(OperatorWork)
        self.convolved = 0.0
        self._last = ""

    @property
    def convolved_share(self) -> float:
        """Share of the flops that are a convolution's."""
        return self.convolved / max(sum(done.flops for done in self.done.values()), 1.0)

    def begin(self, phase: str) -> None:
        """Say which phase begins."""
        super().begin(phase)
        if phase == "backward":
            self._last = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_told(func, args)) is not None:
            return device
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented or func.is_view:
            return out
        if func.namespace in _SENDS_OR_ASKS:
            done = self._sent_along_tp(func, args, kwargs or {}, out)
        else:
            if func.namespace != "aten":
                self.unknown.add(str(func))
            done = _done(func, args, kwargs or {}, out)
        if done is not None:
            where = self._where()
            self.done[where] = self.done[where].plus(done)
            self.convolved += done.flops if func.overloadpacket in _CONVOLVES else 0.0
        return out

    def _sent_along_tp(self, func: Any, args: Any, kwargs: Any, out: Any) -> OperatorWork | None:
        """The amounts that a collective of tp sends; None for any other operator."""
        route = sent_by(func, args, kwargs, out, self._mesh) if self._mesh is not None else None
        if route is None or route.axes != ("tp",):
            return None
        if route.kind == "all_reduce":
            return OperatorWork(all_reduces=1, all_reduce_bytes=route.num_bytes)
        return OperatorWork(gathers=1, gather_bytes=route.num_bytes)

    def _where(self) -> Where:
        is_backward = self.phases[-1] == "backward"
        block = self._around(self._place.module)
        if block and not self._place.is_loss:
            self._last = block
            return Where(is_backward, block, False)
        return Where(is_backward, self._last, True)

    def _around(self, module: str) -> str:
        """The block that a module lies in; "" for none."""
        found = self._block_of.get(module)
        if found is None:
            found = module
            while found and found not in self._blocks:
                found = found.rpartition(".")[0]
            self._block_of[module] = found
        return found


def _done(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> OperatorWork | None:
    packet = func.overloadpacket
    if packet in _MAKES_NOTHING:
        return None
    given, made = given_to((args, kwargs)), given_to(out)
    if not made:
        return None
    made_bytes = float(sum(map(_bytes_of, made)))
    given_bytes = float(sum(map(_bytes_of, given)))
    if func._schema.name in _ATTENTION:
        named = _named(func, args, kwargs)
        flops = _attention_flops(func, named)
        done = OperatorWork(1, flops, flops, given_bytes + made_bytes)
        if func._schema.name.endswith("_backward"):
            return done
        keys = float(_bytes_of(named["key"]) + _bytes_of(named["value"]))
        others = float(_bytes_of(named["query"]) + _bytes_of(made[0]))
        return done._replace(context_bytes=keys, exchanged_bytes=keys + others)
    rule: Callable[..., Any] | None = flop_registry.get(packet)
    if rule is not None:
        flops = _told(packet, rule, args, kwargs, out)
        attention = flops if packet in _BETWEEN_ACTIVATIONS else 0.0
        return OperatorWork(_kernels(packet, made), flops, attention, given_bytes + made_bytes)
    if packet in _LOOKS_UP:
        given_bytes = made_bytes + sum(map(_bytes_of, given[1:]))
    return OperatorWork(kernels=1, moved_bytes=given_bytes + made_bytes)


def _told(packet: Any, rule: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> float:
    """What a rule says of an operator: it reads shapes and plain arguments, and nothing else."""
    key = packet, _form(args), _form(kwargs), _form(out)
    if key not in _TOLD:
        if len(_TOLD) >= _MOST:
            _TOLD.clear()
        _TOLD[key] = float(rule(*args, **kwargs, out_val=out))
    return _TOLD[key]


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, dict):
        return tuple((name, _form(each)) for name, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return type(value), value


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of an operator by name."""
    return {
        argument.name: args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
    }


def _attention_flops(func: Any, named: Mapping[str, Any]) -> float:
    """Queries by keys and weights by values; of what is masked as causal nothing is computed."""
    query, key, value = named["query"], named["key"], named["value"]
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
    flops *= 0.5 if named.get("is_causal") else 1.0
    return flops * (_ATTENTION_BACK if func._schema.name.endswith("_backward") else 1.0)


def _kernels(packet: Any, made: list[torch.Tensor]) -> float:
    """The backward of a convolution is a kernel for each gradient."""
    return float(len(made)) if packet is _ops.convolution_backward else 1.0


def _bytes_of(tensor: torch.Tensor) -> int:
    """What a tensor's numbers take, each once however often it is repeated."""
    size = tensor.element_size()
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride or not length else 1
    return count * size
