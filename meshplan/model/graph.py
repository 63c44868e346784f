"""The model as data: its modules, its tensors and the names of their dims.

`blueprint` builds a `ModelGraph` from a config.json, `runtime.trace.structure` from a live
`nn.Module`; all other packages read it. torch is not needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.model.flow import Flow
from meshplan.shown import shown

if TYPE_CHECKING:
    import networkx

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@cache
def pattern_of(fqn: str) -> str:
    """Return a name with each number in it replaced by `*`.

    >>> pattern_of("model.layers.12.mlp")
    'model.layers.*.mlp'
    """
    return _NUMBER.sub(".*", fqn)


def is_inside(fqn: str, around: str) -> bool:
    """Return True if a module or tensor is `around` or below it; everything is below the root."""
    return not around or fqn == around or fqn.startswith(around + ".")


def around(module: str) -> Iterator[str]:
    """Yield a module and its enclosing modules, innermost first, the root last."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One parameter or buffer.

    Args:
        fqn: The first name under which `named_parameters` or `named_buffers` yields it.
        shape: Global shape.
        dtype: Name such as "float32".
        dims: A name per dim ("out", "in", "vocab", "embed", "norm", ...), "" where unknown.
        aliases: Further names of the same tensor object (tied weights).
        trainable: True if the tensor gets a gradient.
        is_buffer: True for a buffer, which has no gradient or optimizer state and is never sharded.
        is_persistent: True if the state dict has the tensor.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    dims: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    is_buffer: bool = False
    is_persistent: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the tensor, `fqn` first."""
        return (self.fqn, *self.aliases)

    @property
    def module(self) -> str:
        """The fqn of the module that has the tensor under its first name."""
        return self.fqn.rpartition(".")[0]


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """One module of the tree.

    Args:
        fqn: Dotted name; "" for the root.
        type: Class name such as "LlamaDecoderLayer".
        qualified_type: Class name with its module path, for `match: {type: pkg.Class}`.
        kind: Category that styles depend on: "linear", "embedding", "conv1d" (transformers'
            transposed linear), "mha" (nn.MultiheadAttention), "norm", "batchnorm" ("own_batchnorm"
            if its forward is not torch's), "container" (ModuleList, Sequential, ModuleDict),
            "other".
        head_dim: For a projection inside an attention module, the size of one head along the dim
            of heads; None if the model does not state it. A shard must not divide a head.
        packed: Number of projections that are concatenated in one weight (3 for QKV); 1 if the
            weight is one projection.
        pieces: Sizes of the fused projections along the output dim, such as (4096, 1024, 1024)
            for q, k and v; () if nothing is fused, or if the sizes are not known.
        sizes: The integer attributes of an attention module that count heads or follow from
            their number, by name (see `heads.ROLES`).
        has_forward: False for ModuleList and ModuleDict, which only contain other modules, are
            never called and so cannot be an FSDP2 unit.
        numbers: Integers above 1 among the instance's attributes, by name. The module's code may
            compute shapes from them.
        aliases: Further names of the same module object (shared submodules).
    """

    fqn: str
    type: str
    qualified_type: str = ""
    kind: str = "other"
    head_dim: int | None = None
    packed: int = 1
    pieces: tuple[int, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    has_forward: bool = True
    numbers: Mapping[str, int] = field(default_factory=dict, compare=False)
    aliases: tuple[str, ...] = ()


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """The module tree and its tensors, in definition order.

    Args:
        name: The model's name for titles.
        modules: Modules by fqn, parents before children, the root "" first.
        tensors: Tensors by fqn; each tied or shared tensor once.
        config: Sizes by config.json key (vocab_size, ...), stated or default; empty without config.
        flow: One recorded forward pass; None if nothing was recorded.
        outline: A coarse forward made from a config, in which each module is one operation that
            reads and returns values. It suffices to find stage boundaries, and for nothing else.
            None if not known.
        tp_preset: The tp plan that transformers ships for this model: style names by module or
            parameter name, with `*` for layer numbers. Empty if transformers has none.
        tp_derived: The styles that `tp_plan: auto` would derive from a recorded forward, by the
            same names, for models of which they are known without one. Empty otherwise.
        notes: Remarks on how the graph was made, for the user.
    """

    name: str
    modules: Mapping[str, ModuleInfo]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, int] = field(default_factory=dict)
    flow: Flow | None = field(default=None, repr=False, compare=False)
    outline: Flow | None = field(default=None, repr=False, compare=False)
    tp_preset: Mapping[str, str] = field(default_factory=dict)
    tp_derived: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    _owned: Mapping[str, tuple[TensorInfo, ...]] = field(init=False, repr=False, compare=False)
    _first_name: Mapping[str, str] = field(init=False, repr=False, compare=False)
    _blocks: list[tuple[str, ...]] = field(
        init=False, repr=False, compare=False, default_factory=list
    )
    """Cached result of `blocks`, in a list that is empty before the first call."""
    _inside: dict[str, tuple[TensorInfo, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Cached result of `inside`, by module."""
    _inner_first: dict[str, int] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Cached result of `inner_first`."""
    _order: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Cached result of `order`."""

    def __post_init__(self) -> None:
        aliases = {alias: m.fqn for m in self.modules.values() for alias in m.aliases}
        object.__setattr__(self, "_first_name", aliases)
        owned: dict[str, list[TensorInfo]] = {}
        for tensor in self.tensors.values():
            for module in dict.fromkeys(name.rpartition(".")[0] for name in tensor.names):
                owned.setdefault(module, []).append(tensor)
        by_module = {module: tuple(tensors) for module, tensors in owned.items()}
        object.__setattr__(self, "_owned", by_module)

    def word_of(self, fqn: str, words: Mapping[str, str]) -> str | None:
        """Return the style of a name in `words` (`tp_preset` or `tp_derived`), or None."""
        return words.get(pattern_of(fqn)) if words else None

    @property
    def parameters(self) -> Iterator[TensorInfo]:
        return (t for t in self.tensors.values() if not t.is_buffer)

    @property
    def dtype(self) -> str:
        """The dtype of the first parameter; "" if there is none."""
        return next((tensor.dtype for tensor in self.parameters), "")

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(t.numel for t in self.parameters)

    def first_name(self, module: str) -> str:
        """Return the fqn of a module, given its fqn or one of its aliases."""
        return self._first_name.get(module, module)

    def owned(self, module: str) -> tuple[TensorInfo, ...]:
        """Return the tensors that are attributes of this very module, tied tensors included."""
        return self._owned.get(module, ())

    def inside(self, module: str) -> tuple[TensorInfo, ...]:
        """Return the tensors of a module and of all modules below it, tied tensors included."""
        return self._all_inside().get(module, ())

    def tracks_statistics(self, module: str) -> bool:
        """Return True if a module keeps running statistics, as BatchNorm does by default."""
        return any(t.is_buffer and t.fqn.endswith(".running_mean") for t in self.owned(module))

    def with_params(self) -> set[str]:
        """Return the fqns of the modules that have a parameter, themselves or in a submodule."""
        inside = self._all_inside().items()
        return {module for module, tensors in inside if not all(t.is_buffer for t in tensors)}

    def _all_inside(self) -> Mapping[str, tuple[TensorInfo, ...]]:
        if not self._inside:
            out: dict[str, list[TensorInfo]] = {}
            for tensor in self.tensors.values():
                holders = (name.rpartition(".")[0] for name in tensor.names)
                for module in dict.fromkeys(m for holder in holders for m in around(holder)):
                    out.setdefault(module, []).append(tensor)
            self._inside.update({module: tuple(tensors) for module, tensors in out.items()})
        return self._inside

    def order(self) -> Mapping[str, int]:
        """Return the index of each module in definition order."""
        if not self._order:
            self._order.update({fqn: place for place, fqn in enumerate(self.modules)})
        return self._order

    def inner_first(self) -> Mapping[str, int]:
        """Return the index of each module in an order that lists inner modules first."""
        if not self._inner_first:
            children: dict[str, list[str]] = {}
            for fqn in self.modules:
                if fqn:
                    children.setdefault(fqn.rpartition(".")[0], []).append(fqn)

            def visit(fqn: str) -> None:
                for child in children.get(fqn, ()):
                    visit(child)
                self._inner_first[fqn] = len(self._inner_first)

            visit("")
        return self._inner_first

    def children(self, module: str) -> tuple[ModuleInfo, ...]:
        """Return the direct children of a module, in definition order."""
        return tuple(m for f, m in self.modules.items() if f and f.rpartition(".")[0] == module)

    def blocks(self) -> tuple[str, ...]:
        """Return the fqns of the repeated blocks, which are sharded and recomputed one by one.

        Blocks are the children of an outermost container, if it has at least two children with
        parameters and these are all of one class. Containers without a forward, such as a
        ModuleList in a ModuleList, are no blocks, but may contain some.
        """
        if not self._blocks:
            self._blocks.append(self._find_blocks())
        return self._blocks[0]

    def _find_blocks(self) -> tuple[str, ...]:
        with_params = self.with_params()
        out: list[str] = []

        def visit(fqn: str) -> None:
            kids = [k for k in by_parent.get(fqn, ()) if k.fqn in with_params]
            types = {k.type for k in kids}
            repeated = self.modules[fqn].kind == "container" and len(kids) > 1 and len(types) == 1
            repeated = repeated and kids[0].has_forward
            if repeated and kids[0].kind in ("other", "mha", "container"):
                out.extend(k.fqn for k in kids)
            else:
                for kid in kids:
                    visit(kid.fqn)

        by_parent: dict[str, list[ModuleInfo]] = {}
        for fqn, info in self.modules.items():
            if fqn:
                by_parent.setdefault(fqn.rpartition(".")[0], []).append(info)
        visit("")
        return tuple(out)

    def to_networkx(self) -> networkx.DiGraph:
        """Return the module tree as a graph, with an edge from each module to each child.

        Nodes have the attributes `info` (ModuleInfo) and `num_params` (number of parameters of the
        module without its submodules).
        """
        import networkx

        graph = networkx.DiGraph(name=self.name)
        counts: dict[str, int] = dict.fromkeys(self.modules, 0)
        for tensor in self.parameters:
            counts[tensor.module] += tensor.numel
        for fqn, info in self.modules.items():
            graph.add_node(fqn, info=info, num_params=counts[fqn])
            if fqn:
                graph.add_edge(fqn.rpartition(".")[0], fqn)
        return graph
