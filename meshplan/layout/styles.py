"""Tensor-parallel styles as data: the named dim that is sharded, and the layout of activations.

A style defines, for one kind of module, which dim of the parameters the axis shards, and the
layouts of the input and of the output, each outside the module and inside its computation. `assign`
reads the dim, `runtime.apply.tensor_parallel` the layouts. To add a style, add its entries to
`_rows`.

Activation layouts are written as placements on one axis: "R" (replicated), "S(-1)" (sharded along
the last dim), "P" (partial sums), and "outside": the layout of activations between styled modules,
usually "R", and "S(1)" (sharded along the sequence) under `sequence_parallel: true`. "gathered" is
"R" for an input that an enclosing module has all-gathered; the backward of that all-gather sums the
ranks' partial gradients.

Source: Megatron-LM (Shoeybi et al. 2019, section 3) for colwise and rowwise; Korthikanti et al.
2022, section 4.2 for sequence_parallel; the names are those of transformers' tp plans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshplan.shown import shown


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The computation of one kind of module under tensor parallelism.

    Args:
        name: The style's name in plan.yaml.
        kind: The `ModuleInfo.kind` that the style applies to.
        cut_dim: The named dim of the parameters that the axis shards, such as "out"; None if the
            parameters are replicated.
        input: (layout outside the module, layout that the module computes with).
        output: (layout that the module computes, layout outside the module).
        gradient: "P" if each rank has a partial sum of the output's gradient, else "".
    """

    name: str
    kind: str
    cut_dim: str | None
    input: tuple[str, str]
    output: tuple[str, str]
    gradient: str = ""


def _rows() -> dict[tuple[str, str], Style]:
    out: dict[tuple[str, str], Style] = {}

    def row(
        name: str, kinds: str, cut: str | None, input: tuple[str, str], output: tuple[str, str]
    ) -> None:
        for kind in kinds.split():
            out[name, kind] = Style(name=name, kind=kind, cut_dim=cut, input=input, output=output)

    # Pairs of layouts: (outside, computed with) for inputs, (computed, outside) for outputs.
    whole, ready, cut = ("outside", "R"), ("R", "R"), ("S(-1)", "S(-1)")
    scatter, gather, add = ("outside", "S(-1)"), ("S(-1)", "R"), ("P", "outside")
    into_seq, from_seq, heads = ("outside", "S(1)"), ("S(1)", "outside"), ("S(-2)", "S(-2)")
    # fmt: off
    #   name                              kinds            cut dim  input     output
    row("colwise",                        "linear conv1d", "out",   whole,    cut)
    row("colwise",                        "embedding",     "embed", ready,    cut)
    row("packed_colwise",                 "linear conv1d", "out",   whole,    cut)
    row("packed_colwise",                 "mha",           "out",   whole,    add)
    row("colwise_gather_output",          "linear conv1d", "out",   whole,    gather)
    row("colwise_gather_output",          "embedding",     "embed", ready,    gather)
    row("rowwise",                        "linear conv1d", "in",    cut,      add)
    row("rowwise_split_input",            "linear conv1d", "in",    scatter,  add)
    row("vocab",                          "embedding",     "vocab", ready,    add)
    row("vocab",                          "linear",        "out",   whole,    gather)
    row("sequence_parallel",              "norm",          None,    into_seq, from_seq)
    row("replicated_with_grad_allreduce", "norm",          None,    heads,    heads)
    # fmt: on
    return out


STYLES: Final[Mapping[tuple[str, str], Style]] = MappingProxyType(_rows())
"""Every style that a plan can name, by (name, module kind)."""

GATHERED: Final = "gathered"
"""Layout of an input that an enclosing module has all-gathered over tp, and so is replicated. The
partial gradients of the ranks are summed in the backward of that all-gather.
"""

LOGITS: Final = Style(
    name="logits",
    kind="linear",
    cut_dim="out",
    input=("outside", "R"),
    output=("S(-1)", "S(-1)"),
)
"""Style of the output head under `loss_parallel: true`, in place of the style that the plan states.
The logits stay sharded over the vocabulary, as a DTensor of the global shape, for the loss.
"""
GRADIENTS_ADDED: Final = Style(
    name="gradients_added",
    kind="linear",
    cut_dim=None,
    input=("R", "R"),
    output=("R", "R"),
    gradient="P",
)
"""Style of a replicated projection whose result is combined with sharded values only, so that its
gradients are partial sums. A plan cannot state it, because the data flow has to prove it.
"""

STYLE_NAMES: Final = tuple(dict.fromkeys(name for name, _ in STYLES))

PLANNED_STYLES: Final = ("packed_rowwise",)
"""Style names that a plan may contain but this version refuses with "not yet"."""

EXPERT_STYLE: Final = "ep_dispatch_experts"
"""The only style of ep: each rank has some of the experts, and tokens are sent to their ranks."""

_PLACEMENTS: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        ("linear", "out"): "colwise_gather_output",
        ("linear", "in"): "rowwise_split_input",
        ("conv1d", "out"): "colwise_gather_output",
        ("conv1d", "in"): "rowwise_split_input",
        ("embedding", "vocab"): "vocab",
        ("embedding", "embed"): "colwise_gather_output",
    }
)
"""The style of a module whose weight a plan declares as `S(d)`, by (module kind, name of dim d)."""

WEIGHT_DIMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "linear": ("out", "in"),
        "conv1d": ("in", "out"),
        "embedding": ("vocab", "embed"),
    }
)
"""Names of the dims of `weight`, in order, by module kind."""

_PACKED = re.compile(r"^(packed_colwise)\(\s*(\d+(?:\s*,\s*\d+)*)\s*\)$")
_PLACEMENT = re.compile(r"^(?:s|shard)\(\s*(-?\d+)\s*\)$", re.IGNORECASE)


def dims_of(kind: str, name: str, ndim: int) -> tuple[str, ...]:
    """Return the names of the dims of the parameter `name` of a module of this kind, "" if unknown.

    >>> dims_of("conv1d", "weight", 2), dims_of("linear", "bias", 1)
    (('in', 'out'), ('out',))
    """
    weight = WEIGHT_DIMS.get(kind)
    if kind == "norm":
        return ("norm",) * ndim
    if weight and name == "weight" and ndim == len(weight):
        return weight
    if weight and name == "bias" and ndim == 1 and "out" in weight:
        return ("out",)
    return ("",) * ndim


def parse_placement(word: str) -> int | None:
    """Return the dim of a `S(d)` / `Shard(d)` word, None for any other word.

    >>> parse_placement("shard(1)"), parse_placement("colwise")
    (1, None)
    """
    found = _PLACEMENT.match(word.strip())
    return int(found[1]) if found else None


def parse_packed(word: str) -> tuple[str, tuple[int, ...]]:
    """Return the name of a style and the numbers in its brackets: a piece count, or piece sizes.

    >>> parse_packed("packed_colwise(64, 16, 16)"), parse_packed("colwise")
    (('packed_colwise', (64, 16, 16)), ('colwise', ()))
    """
    found = _PACKED.match(word.strip())
    if not found:
        return word, ()
    return found[1], tuple(int(number) for number in found[2].split(","))


def style_for(word: str, kind: str) -> Style | None:
    """Return the style that a plan's word, a style name or `S(d)`, means for this module kind.

    None if this kind has no such style or dim.
    """
    dim = parse_placement(word)
    if dim is not None:
        dims = WEIGHT_DIMS.get(kind, ())
        if not -len(dims) <= dim < len(dims):
            return None
        word = _PLACEMENTS[kind, dims[dim]]
    return STYLES.get((parse_packed(word)[0], kind))


def kinds_of(name: str) -> tuple[str, ...]:
    """Return the module kinds for which a style name exists."""
    return tuple(kind for style, kind in STYLES if style == parse_packed(name)[0])
