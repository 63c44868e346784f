"""Count kernels, FLOPs and bytes while a model runs, by block, in forward and backward.

Operators are counted below autograd, where one operator is about one kernel. The FLOPs of matrix
products, convolutions and attention follow from their shapes. All other operators cost the bytes
that they read and write in device memory; views cost nothing. Communication along tp is counted
separately, as are the all-reduces of synchronized BatchNorms. In compiled blocks, operators between
products are counted as the fused kernels that they become (`meshplan.cost.fusion`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from meshplan.cost.fusion import Access, CompiledPass, FusedTraffic
from meshplan.layout.mesh import Mesh
from meshplan.runtime.base.pytree import given_to
from meshplan.runtime.fake_step.cuda_mode import Behaviour
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.torch_private.modes import answer_device
from meshplan.runtime.trace.collectives import sent_by
from meshplan.runtime.trace.flops import ATTENTION, arguments_by_name, flops_of

_ops: Final[Any] = torch.ops.aten
_SENDS_OR_ASKS: Final = ("prim", "c10d", "_c10d_functional", "_dtensor")
_BETWEEN_ACTIVATIONS: Final = frozenset({_ops.bmm, _ops.baddbmm})
"""Products of two activations, as in attention written in plain PyTorch. They are timed like
attention."""
_CONVOLVES: Final = frozenset({_ops.convolution, _ops.convolution_backward})
_LOOKS_UP: Final = frozenset({_ops.embedding, _ops.index_select, _ops.gather, _ops.index})
"""Lookups in a table, which read only as many bytes of the table as they write."""
_OWN_KERNEL: Final = frozenset({_ops.sort, _ops.topk, _ops.cumsum, _ops.nonzero, _ops.scatter,
                                _ops.scatter_add, _ops.index_put, _ops.index_put_, _ops.bincount,
                                _ops.histc})  # fmt: skip
"""Operators without products that torch.compile does not fuse with others."""
_EMPTY: Final = frozenset({_ops.empty, _ops.empty_like, _ops.empty_strided, _ops.new_empty,
                           _ops.new_empty_strided})  # fmt: skip
"""Operators that make memory without values, which a later operator writes."""
_MAKES_NOTHING: Final = _EMPTY | {_ops.detach, _ops.alias, _ops._unsafe_view, _ops.lift_fresh}
"""Operators that start no kernel. `_unsafe_view` is a view that its schema does not declare."""


class OperatorWork(NamedTuple):
    """The sum of the work of several operators.

    Attributes:
        kernels: Number of kernels launched.
        flops: FLOPs of matrix products, convolutions and attention.
        attention_flops: The part of `flops` that is attention.
        product_bytes: Bytes that products and attention read and write.
        moved_bytes: Bytes that all other operators read and write.
        context_bytes: Bytes of the keys and values that attention reads.
        exchanged_bytes: Bytes of the keys, values, queries and outputs of attention.
        all_reduces, all_reduce_bytes: All-reduces along tp: their number, and bytes of the whole
            tensors.
        gathers, gather_bytes: All-gathers and reduce-scatters along tp, which cost the same: their
            number, and bytes of the whole tensors.
        all_to_alls, all_to_all_bytes: All-to-alls along ep: their number, and the bytes that this
            rank sends, including those to itself.
        statistics, statistics_bytes: All-reduces over data ranks, which synchronize BatchNorms:
            their number and bytes.
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
    all_to_alls: float = 0.0
    all_to_all_bytes: float = 0.0
    statistics: float = 0.0
    statistics_bytes: float = 0.0

    def plus(self, other: OperatorWork) -> OperatorWork:
        """Return the sum, field by field."""
        return OperatorWork(*(a + b for a, b in zip(self, other, strict=True)))

    def less(self, other: OperatorWork) -> OperatorWork:
        """Return the difference, field by field."""
        return OperatorWork(*(a - b for a, b in zip(self, other, strict=True)))


class Where(NamedTuple):
    """The place in a microbatch that work is attributed to.

    Attributes:
        is_backward: True for backward, False for forward.
        block: Fqn of the running block; between blocks, of the block that ran last; "" before the
            first one.
        is_after: If True, no block is running.
    """

    is_backward: bool
    block: str
    is_after: bool


class KernelCounter(MemoryTracker):
    """A memory tracker that also counts kernels, FLOPs and bytes.

    Args:
        names: The fqn of every module of the model.
        behaviour: Behaviour of the device that tensors stand for.
        blocks: The fqns of the model's blocks.
        mesh: Mesh of the ranks; None for a single rank.
        is_compiled: If True, each block is compiled with `torch.compile`.

    Attributes:
        done: Work by place, since `forget`.
        unknown: Names of operators outside of aten, whose FLOPs are not known.
        convolved: FLOPs of convolutions, since `forget`.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        behaviour: Behaviour,
        blocks: Collection[str],
        mesh: Mesh | None = None,
        *,
        is_compiled: bool = False,
    ) -> None:
        super().__init__(names, behaviour)
        self._is_compiled = is_compiled
        self._fused = FusedTraffic()
        self._mesh = mesh
        self._blocks = frozenset(blocks)
        self._block_of: dict[str, str] = {}
        self.done: dict[Where, OperatorWork] = defaultdict(OperatorWork)
        self.unknown: set[str] = set()
        self.convolved = 0.0
        self._last = ""

    def forget(self) -> None:
        """Start a new log and a new count."""
        super().forget()
        self.done = defaultdict(OperatorWork)
        self.convolved = 0.0
        self._last = ""
        self._fused = FusedTraffic()

    @property
    def convolved_share(self) -> float:
        """Share of the FLOPs that are convolutions, from 0 to 1."""
        return self.convolved / max(sum(done.flops for done in self.done.values()), 1.0)

    def begin(self, phase: str) -> None:
        """Note that a phase of the step begins, such as "forward"."""
        super().begin(phase)
        if phase == "backward":
            self._last = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := answer_device(func, args)) is not None:
            return device
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented or func.is_view or self.is_muted:
            return out
        if func.namespace in _SENDS_OR_ASKS:
            done = self._sent_along_axis(func, args, kwargs or {}, out)
        else:
            if func.namespace != "aten":
                self.unknown.add(str(func))
            done = _done(func, args, kwargs or {}, out)
            if self._is_compiled and func.overloadpacket in _EMPTY:
                done = OperatorWork()
        if done is not None:
            where = self._where()
            if self._is_compiled:
                done = self._compiled(where, func, given_to((args, kwargs or {})), out, done)
            self.done[where] = self.done[where].plus(done)
            self.convolved += done.flops if func.overloadpacket in _CONVOLVES else 0.0
        return out

    def _sent_along_axis(self, func: Any, args: Any, kwargs: Any, out: Any) -> OperatorWork | None:
        """Return the communication of a collective; None if nothing is sent along an axis."""
        route = sent_by(func, args, kwargs, out, self._mesh) if self._mesh is not None else None
        if route is None:
            return None
        if route.axes == ("tp",):
            if route.kind == "all_reduce":
                return OperatorWork(all_reduces=1, all_reduce_bytes=route.num_bytes)
            return OperatorWork(gathers=1, gather_bytes=route.num_bytes)
        if route.kind == "all_reduce":
            # A microbatch is counted without FSDP2 and DDP, so no gradients are reduced in it.
            return OperatorWork(statistics=1, statistics_bytes=route.num_bytes)
        if route.axes == ("ep",) and route.kind == "all_to_all":
            return OperatorWork(all_to_alls=1, all_to_all_bytes=route.num_bytes)
        return None

    def _compiled(
        self, where: Where, func: Any, given: list[torch.Tensor], out: Any, done: OperatorWork
    ) -> OperatorWork:
        """Return the work of an operator of a model whose blocks are compiled.

        Args:
            where: Where it counts.
            func, out: The operator and its result.
            given: The tensors that it was given.
            done: Its work in eager mode.
        """
        # Only the recomputation of a forward needs gradients in backward.
        again = "again" if torch.is_grad_enabled() else "backward"
        code = CompiledPass(where.block, again if where.is_backward else "forward")
        made = given_to(out)
        is_moving = func.namespace == "aten" and not done.flops
        if where.is_after or not is_moving or func.overloadpacket in _OWN_KERNEL:
            makes = () if where.is_after else map(self._key, made)
            written = self._fused.run(code, [*map(self._key, given)], makes)
            return done._replace(moved_bytes=done.moved_bytes + written)
        reads = [self._access(tensor) for tensor in given if func.overloadpacket not in _EMPTY]
        if func.overloadpacket in _LOOKS_UP:
            reads[0] = reads[0]._replace(nbytes=float(sum(map(_bytes_of, made))))
        kernels, moved = self._fused.fuse(code, reads, map(self._access, made))
        return OperatorWork(kernels, moved_bytes=moved)

    def _key(self, tensor: torch.Tensor) -> Hashable:
        """Return a key of a tensor's memory that no later tensor has."""
        return self.numbers_of(tensor) or tensor.untyped_storage()._cdata

    def _access(self, tensor: torch.Tensor) -> Access:
        return Access(
            self._key(tensor),
            (tensor.storage_offset(), tensor.numel()),
            float(_bytes_of(tensor)),
        )

    def _where(self) -> Where:
        is_backward = self.phases[-1] == "backward"
        # Work outside of all blocks, and of the loss, counts after the block that ran last.
        block = self._around(self._place.module)
        if block and not self._place.is_loss:
            self._last = block
            return Where(is_backward, block, False)
        return Where(is_backward, self._last, True)

    def _around(self, module: str) -> str:
        """Return the innermost block around a module, by fqn; "" if there is none."""
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
    flops = flops_of(func, args, kwargs, out)
    if flops is not None and func._schema.name in ATTENTION:
        named = arguments_by_name(func, args, kwargs)
        done = OperatorWork(1, flops, flops, given_bytes + made_bytes)
        if func._schema.name.endswith("_backward"):
            return done
        keys = float(_bytes_of(named["key"]) + _bytes_of(named["value"]))
        others = float(_bytes_of(named["query"]) + _bytes_of(made[0]))
        return done._replace(context_bytes=keys, exchanged_bytes=keys + others)
    if flops is not None:
        attention = flops if packet in _BETWEEN_ACTIVATIONS else 0.0
        return OperatorWork(_kernels(packet, made), flops, attention, given_bytes + made_bytes)
    if packet in _LOOKS_UP:
        given_bytes = made_bytes + sum(map(_bytes_of, given[1:]))
    return OperatorWork(kernels=1, moved_bytes=given_bytes + made_bytes)


def _kernels(packet: Any, made: list[torch.Tensor]) -> float:
    """Return the number of kernels of a product: 1, or 1 per gradient of a convolution."""
    return float(len(made)) if packet is _ops.convolution_backward else 1.0


def _bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements; an expanded dim counts as size 1."""
    size = tensor.element_size()
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride or not length else 1
    return count * size
