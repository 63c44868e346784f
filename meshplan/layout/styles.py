"""Tensor-parallel styles as data: the named dim that is sharded, and the layout of activations.

A style says, for one kind of module, which dim of its parameters the axis shards, the layout of
its input outside the module and inside its computation, and the same for its output. `assign` uses
the parameter side, `runtime.apply.tensor_parallel` the activation side. To add a style, add its
entries to `_rows`.

Activation layouts are written as placements on one axis: "R" (replicated), "S(-1)" (sharded along
the last dim), "P" (partial sums), and "outside": the layout of activations between styled modules,
usually "R", and "S(1)" (sharded along the sequence) under `sequence_parallel: true`. "gathered" is
"R" that was gathered for an enclosing module, which also sums the partial gradients.

Source: Megatron-LM (Shoeybi et al. 2019, section 3) for colwise and rowwise; Korthikanti et al.
2022, section 4.2 for sequence_parallel; the names are those of transformers' tp plans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The tensor-parallel computation of one kind of module.

    Args:
        name: The word in plan.yaml.
        kind: The `ModuleInfo.kind` that the style applies to.
        cut_dim: The named dim of the parameters that the axis shards; None shards nothing.
        input: (layout outside, layout computed with).
        output: (layout computed, layout outside).
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

    # Flows: (layout outside, layout computed with) in, (layout computed, layout outside) out.
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
"""Every style by (name, module kind)."""

GATHERED: Final = "gathered"
"""Input layout that is replicated; each rank's partial gradient is summed where it was gathered."""

LOGITS: Final = Style(
    name="logits",
    kind="linear",
    cut_dim="out",
    input=("outside", "R"),
    output=("S(-1)", "S(-1)"),
)
"""The style that replaces the head's own under `loss_parallel: true`. Its output stays sharded, and
carries its global shape, while the loss is computed.
"""
GRADIENTS_ADDED: Final = Style(
    name="gradients_added",
    kind="linear",
    cut_dim=None,
    input=("R", "R"),
    output=("R", "R"),
    gradient="P",
)
"""A projection left replicated whose result meets sharded values only. A plan cannot state it: that
the result meets nothing else has to be proved.
"""

STYLE_NAMES: Final = tuple(dict.fromkeys(name for name, _ in STYLES))

PLANNED_STYLES: Final = ("packed_rowwise",)
"""Words of the format that this version refuses with "not yet"."""

EXPERT_STYLE: Final = "ep_dispatch_experts"
"""The only style of ep: each rank holds some of the experts, and tokens are sent to them."""

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
"""The style for a module whose weight is declared `S(d)`, by (module kind, sharded dim)."""

WEIGHT_DIMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "linear": ("out", "in"),
        "conv1d": ("in", "out"),
        "embedding": ("vocab", "embed"),
    }
)
"""Named dims of `weight` by module kind."""

_PACKED = re.compile(r"^(packed_colwise)\(\s*(\d+(?:\s*,\s*\d+)*)\s*\)$")
_PLACEMENT = re.compile(r"^(?:s|shard)\(\s*(-?\d+)\s*\)$", re.IGNORECASE)


def dims_of(kind: str, name: str, ndim: int) -> tuple[str, ...]:
    """Return the named dims of the parameter `name` of a module of this kind, "" where unknown.

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
    """Split a style into its name and the numbers in brackets: a count of pieces, or their sizes.

    >>> parse_packed("packed_colwise(64, 16, 16)"), parse_packed("colwise")
    (('packed_colwise', (64, 16, 16)), ('colwise', ()))
    """
    found = _PACKED.match(word.strip())
    if not found:
        return word, ()
    return found[1], tuple(int(number) for number in found[2].split(","))


def style_for(word: str, kind: str) -> Style | None:
    """Return the style for a style name or an `S(d)` on a module of this kind; None without one."""
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
