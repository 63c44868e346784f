"""Find regions: the modules that are sharded, and how, if one class of dims is sharded.

A region begins with projections whose output features belong to the class (colwise) and ends with
projections that sum over the class (rowwise). Operations between them must not mix positions along
it. This module finds the modules; `proof` and `comparison` check that the region is correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from meshplan.model.dims import DimClasses
from meshplan.model.dims.factors import Factor
from meshplan.model.flow import Call
from meshplan.model.graph import ModelGraph, ModuleInfo, TensorInfo

_PLAIN: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(f"aten.{word}" for word in words.split())
    for kind, words in {
        "linear": "t.default transpose.int mm.default addmm.default view.default "
        "_unsafe_view.default reshape.default add.Tensor add_.Tensor detach.default "
        "alias.default expand.default clone.default bmm.default",
        "conv1d": "addmm.default view.default detach.default alias.default _unsafe_view.default",
        "embedding": "embedding.default detach.default alias.default",
    }.items()
}
"""For each kind of module, the operations that the forward of torch's module of this kind runs. A
module that runs any other operation does more than its kind implies.
"""

NO_PAIR: Final = "no pair of projections shares one of its dims"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The modules and parameters that are sharded if one class of dims is sharded.

    Args:
        factor: The class.
        size: Size of the class, such as the number of heads.
        words: Style names by module fqn.
        pieces: For each module with the style packed_colwise, the number of its pieces.
        parts: For each parameter that is used by code outside of styled modules, the sharded dim.
        num_elements: Number of elements of all parameters that have the class in a dim.
    """

    factor: Factor
    size: int
    words: Mapping[str, str]
    pieces: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    num_elements: int = 0


class NoRegion(Exception):
    """The error that a class of dims cannot be sharded, and why."""


class FlowUses:
    """The places at which a recorded forward uses the modules and parameters of a model.

    Attributes:
        calls: Calls of each module, by fqn.
        values: Value id of each parameter, by fqn.
        summed: Factors that matrix products outside of projections sum over.
        by_factor: For each factor, the fqns of the parameters with a dim that contains it.
    """

    def __init__(self, graph: ModelGraph, classes: DimClasses) -> None:
        self.graph, self.classes, self.flow = graph, classes, classes.flow
        self.calls: dict[str, list[Call]] = {}
        for call in self.flow.calls:
            self.calls.setdefault(call.module, []).append(call)
        self.values: dict[str, int] = {
            v.name: v.id for v in self.flow.values if v.origin == "parameter"
        }
        inside = {
            number
            for module, calls in self.calls.items()
            if graph.modules[module].kind in _PLAIN
            for call in calls
            for number in range(*call.ops)
        }
        self.summed = {
            f for number, dim in classes.summed.items() if number not in inside for f in dim
        }
        self.by_factor: dict[Factor, list[str]] = {}
        for name, value in self.values.items():
            for factor in classes.factors_of(value):
                self.by_factor.setdefault(factor, []).append(name)

    def used_outside(self, tensor: TensorInfo, owners: set[str]) -> bool:
        """Return True if an operation outside of the calls of `owners` reads a parameter."""
        value = self.values.get(tensor.fqn)
        return value is not None and any(
            not any(call.module in owners for call in self.flow.around(self.flow.ops[n].call))
            for n in self.flow.users(value)
        )

    def owners(self, tensor: TensorInfo) -> set[str]:
        """Return the fqns of the modules that have a parameter; if any are called, only these."""
        found = {self.graph.first_name(name.rpartition(".")[0]) for name in tensor.names}
        return {fqn for fqn in found if fqn in self.calls} or found

    def does_more(self, info: ModuleInfo) -> str:
        """Return the name of an operation that is not in `_PLAIN` of its kind; "" if none is."""
        plain = _PLAIN[info.kind]
        for call in self.calls.get(info.fqn, ()):
            for op in self.flow.ops[slice(*call.ops)]:
                if op.name not in plain and op.name != "meshplan.update":
                    return op.name.removeprefix("aten.").partition(".")[0]
        return ""


def find_region(flow_uses: FlowUses, factor: Factor) -> Region:
    """Return the region of one class of dims.

    Raises:
        NoRegion: The class cannot be sharded; the message says why.
    """
    words: dict[str, str] = {}
    pieces: dict[str, int] = {}
    parts: dict[str, int] = {}
    num_elements = 0
    for name in flow_uses.by_factor.get(factor, ()):
        tensor = flow_uses.graph.tensors[name]
        dims = flow_uses.classes.dims[flow_uses.values[name]]
        along = [place for place, dim in enumerate(dims) if factor in dim]
        dim = dims[along[0]]
        outer = flow_uses.classes.sizes_of(dim[: dim.index(factor)])
        num_elements += tensor.numel
        owners = flow_uses.owners(tensor)
        if flow_uses.used_outside(tensor, owners):
            raise NoRegion(f"{name} is used outside of its module's forward")
        for owner in sorted(owners):
            info = flow_uses.graph.modules[owner]
            word = _word(info, tensor, along[0], outer) if _is_plain(flow_uses, info) else None
            if word is None:
                if outer != 1 or len(tensor.names) > 1 or owner not in flow_uses.calls:
                    raise NoRegion(
                        f"{name} shares one of its dims and cannot be sharded along that dim"
                    )
                parts[name] = along[0]
                continue
            if words.setdefault(owner, word) != word:
                raise NoRegion(f"{owner} would be sharded along both of its dims")
            if word == "packed_colwise":
                pieces[owner] = outer
    opens = any(w in ("colwise", "packed_colwise")
                and flow_uses.graph.modules[m].kind != "embedding"
                for m, w in words.items())  # fmt: skip
    if not opens or "rowwise" not in words.values():
        raise NoRegion(NO_PAIR)
    return Region(
        factor=factor,
        size=flow_uses.classes.sizes[factor],
        words=words,
        pieces=pieces,
        parts=parts,
        num_elements=num_elements,
    )


def _is_plain(flow_uses: FlowUses, info: ModuleInfo) -> bool:
    return info.kind in _PLAIN and info.fqn in flow_uses.calls and not flow_uses.does_more(info)


def _word(info: ModuleInfo, tensor: TensorInfo, dim: int, outer: int) -> str | None:
    """Return the style that shards dim `dim` of a module's parameter; None if there is none.

    `outer` is the number of pieces of the dim, each of which is sharded; 1 if it is sharded whole.
    """
    names = {n.rpartition(".")[0]: n.rpartition(".")[2] for n in tensor.names}
    leaf = next((names[m] for m in (info.fqn, *info.aliases) if m in names), "")
    if info.kind == "embedding":
        return "colwise" if (leaf, dim, outer) == ("weight", 1, 1) else None
    out = 0 if info.kind == "linear" or leaf == "bias" else 1
    if leaf not in ("weight", "bias") or len(tensor.shape) > 2:
        return None
    if dim == out:
        return "colwise" if outer == 1 else "packed_colwise"
    return "rowwise" if outer == 1 else None
