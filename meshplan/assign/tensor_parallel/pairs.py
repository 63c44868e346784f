"""Check that styles that need each other are both stated: pairs of projections, tied weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.assign.base.pieces import out_width
from meshplan.assign.base.tensor_cuts import TensorParallel
from meshplan.assign.base.types import StyleUse
from meshplan.errors import Problem
from meshplan.layout.mesh import Mesh
from meshplan.layout.styles import LOGITS
from meshplan.model.graph import ModelGraph, TensorInfo, is_inside


@dataclass(frozen=True, slots=True)
class _Partner:
    """The styles of which one must stand near a style, and the problem if none does."""

    styles: tuple[str, ...]
    what: str
    fix: str
    is_error: bool = False


_LEAVE_CUT: Final = ("colwise", "packed_colwise")
_LEFT_CUT = _Partner(
    ("rowwise",),
    "leaves its output sharded, but no rowwise module near it consumes that output",
    "make the projection that consumes it rowwise, or use colwise_gather_output",
)
_PARTNERS: Final[Mapping[str, _Partner]] = {
    "colwise": _LEFT_CUT,
    "packed_colwise": _LEFT_CUT,
    "rowwise": _Partner(
        _LEAVE_CUT,
        "expects a sharded input, but no colwise module near it produces one",
        "make the projections that feed it colwise, or use rowwise_split_input",
    ),
    # Without sharded values, each rank has the full gradient, and the sum would be tp times it.
    "replicated_with_grad_allreduce": _Partner(
        _LEAVE_CUT,
        "sums partial gradients over tp, but no colwise module near it has a sharded output",
        "make the projections that feed it colwise, or remove the placement",
        is_error=True,
    ),
}


def check_tied(
    graph: ModelGraph, mesh: Mesh, out: TensorParallel, proved: Collection[str] = ()
) -> None:
    """Report a sharded tied weight if one of the modules that share it has no style.

    `proved` has the fqns of modules that the data flow has proved correct; they are not checked.
    """
    for fqn, cut in out.cuts.items():
        tensor = graph.tensors[fqn]
        if cut.gathered or not cut.layout.axes or mesh.size("tp") == 1 or not tensor.aliases:
            continue
        if any(graph.first_name(name.rpartition(".")[0]) in proved for name in tensor.names):
            continue
        for name in tensor.names:
            module = name.rpartition(".")[0]
            if graph.first_name(module) not in out.styles:
                out.report(Problem(
                    f"{' and '.join(tensor.names)} are one tensor, but only "
                    f"{_styled(tensor, out)} has a tp style",
                    cut.reason.origin,
                    f"give '{module}' a style that shards the tensor identically, such as vocab",
                ))  # fmt: skip


def _styled(tensor: TensorInfo, out: TensorParallel) -> str:
    modules = (name.rpartition(".")[0] for name in tensor.names)
    return ", ".join(m for m in modules if m in out.styles)


def check_pairs(mesh: Mesh, out: TensorParallel, proved: Collection[str] = ()) -> None:
    """Report or warn if no module near a style with a sharded output or input is its counterpart.

    `proved` has the fqns of modules that the data flow has proved correct; they are not checked.
    """
    if mesh.size("tp") == 1:
        return
    inside = _styles_inside(out)
    seen: set[object] = set()
    for fqn, use in out.styles.items():
        is_split = mesh.size("pp") > 1 and leaves_cut(use) and fqn not in proved
        if is_split and around_pair(fqn, out.styles) == "":
            out.report(Problem(
                f"{fqn} leaves its output sharded, and only the whole model contains both {fqn} "
                "and the projection that consumes the output: a pipeline stage cannot run the "
                "whole model to verify the pair",
                use.reason.origin,
                "put both projections and the code between them into one module, write tp_plan: "
                "auto, or leave pp out",
            ))  # fmt: skip
        name = use.style.name
        partner = _PARTNERS.get(name) if fqn not in proved else None
        if partner is None or use.style.kind in ("embedding", "mha") or use.reason in seen:
            continue
        # In attention such as BERT's, q, k and v are one level deeper than the output projection.
        around = fqn.rpartition(".")[0]
        levels = (around, around.rpartition(".")[0])
        if any(inside.get(level, set()).intersection(partner.styles) for level in levels):
            continue
        seen.add(use.reason)
        problem = Problem(f"{fqn} is {name} and {partner.what}", use.reason.origin, partner.fix)
        if partner.is_error:
            out.report(problem)
        else:
            out.warnings.append(problem)


def leaves_cut(use: StyleUse) -> bool:
    """Return True if the module returns a local shard of its features to the code after it."""
    return use.style.output[1] == "S(-1)" and use.style is not LOGITS


def around_pair(fqn: str, styles: Mapping[str, StyleUse]) -> str | None:
    """Return the smallest module that contains a projection and a module with a sharded input.

    Args:
        fqn: The fqn of the projection, whose output is sharded.
        styles: Uses of styles by module fqn, in definition order.

    Returns:
        The fqn of that module; None if no module can take the output. It is the root, "", only if a
        module with a sharded input is a child of the root or is defined after the projection,
        because the root contains all modules.
    """
    takers = [other for other, use in styles.items() if use.style.input[0] == "S(-1)"]
    around = fqn
    while around := around.rpartition(".")[0]:
        if any(is_inside(taker, around) for taker in takers):
            return around
    order = list(styles)
    later = order[order.index(fqn) :]
    return "" if any("." not in taker or taker in later for taker in takers) else None


def check_shared(
    graph: ModelGraph, mesh: Mesh, out: TensorParallel, proved: Collection[str] = ()
) -> None:
    """Report key or value projections with heads shared by ranks beside unsharded queries.

    `proved` has the fqns of modules that the data flow has proved correct; they are not checked.
    """
    tp = mesh.size("tp")
    for fqn, use in out.styles.items():
        if len(use.pieces) != 1 or use.pieces[0].parts == tp or fqn in proved:
            continue
        around = fqn.rpartition(".")[0]
        widths = [
            out_width(graph, graph.modules[other])
            for other, beside in out.styles.items()
            if other.rpartition(".")[0] == around and beside.style.output[1] == "S(-1)"
        ]
        if not any(width and width > use.pieces[0].size for width in widths):
            out.report(Problem(
                f"{fqn}: tp {tp} would share its {use.pieces[0].parts} heads between ranks, but "
                "the query projection beside it is not colwise",
                use.reason.origin,
                "make q, k and v colwise and the output projection rowwise, or none of them",
            ))  # fmt: skip


def _styles_inside(out: TensorParallel) -> dict[str, set[str]]:
    """Return, by module fqn, the style names inside it; for the root, only of its children."""
    inside: dict[str, set[str]] = {}
    for fqn, use in out.styles.items():
        parent = fqn.rpartition(".")[0]
        inside.setdefault(parent, set()).add(use.style.name)
        while parent := parent.rpartition(".")[0]:
            inside.setdefault(parent, set()).add(use.style.name)
    return inside
