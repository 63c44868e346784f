"""The ep axis: find the modules that have experts, and check if ep can distribute them.

This module checks shapes: every parameter must have the experts as dim 0, in a number that ep
divides. Only the live module can show that its forward computes with the experts as the dispatch of
tokens requires; `runtime.apply.experts.expert_protocol` checks that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from meshplan.assign.base.cascade import Cascade, Stated
from meshplan.assign.base.missing_axis import no_axis
from meshplan.assign.base.tensor_cuts import Reported, TensorParallel
from meshplan.assign.base.types import ExpertUse, Reason
from meshplan.errors import Problem
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import EXPERT_SHARD, Mesh
from meshplan.layout.styles import EXPERT_STYLE
from meshplan.model.graph import ModelGraph, TensorInfo, around, is_inside
from meshplan.spec.spec import Spec

_FIELD = "place.ep"


@dataclass(slots=True)
class ExpertParallel(Reported):
    """Decisions about ep: uses by module fqn, layouts by parameter fqn, and problems found."""

    uses: dict[str, ExpertUse] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)

    def around(self, name: str) -> ExpertUse | None:
        """Return the decision for the innermost module with experts around this name, or None."""
        if not self.uses:
            return None
        return next((self.uses[m] for m in around(name) if m in self.uses), None)

    def reason(self, fqn: str) -> Reason | None:
        """Return the reason why ep shards this parameter; None if it does not."""
        use = self.around(fqn) if fqn in self.layouts else None
        return use.reason if use else None


def assign_ep(
    spec: Spec, graph: ModelGraph, cascade: Cascade, mesh: Mesh, tp: TensorParallel
) -> ExpertParallel:
    """Return the modules that rules place on ep, each checked, with their parameters' layouts."""
    out = ExpertParallel()
    stated = dict(cascade.modules_with(_FIELD))
    for tensor in graph.parameters:
        found = cascade.param(tensor, _FIELD)
        if found and found.value != "R":
            out.report(
                Problem(
                    "ep is stated for a parameter, but experts are distributed with their module",
                    spec.origin(found.path),
                    f"match the module '{tensor.module}' instead",
                )
            )
    is_borrowed = any(loan.name == "ep" for loan in mesh.loans)
    is_placed = any("ep" in rule.place for rule in spec.rules)
    inside = _inside(graph, stated)
    for fqn, statement in stated.items():
        found_wrong = _problem(graph, mesh, tp, fqn, statement, inside[fqn], is_borrowed)
        if found_wrong is not None:
            what, fix = found_wrong
            out.report(Problem(what, spec.origin(statement.path), fix))
        elif statement.value == EXPERT_STYLE:
            tensors = inside[fqn]
            reason = Reason(statement.text, spec.origin(statement.path))
            out.uses[fqn] = ExpertUse(tensors[0].shape[0], reason, spec.experts.capacity)
            for tensor in tensors:
                out.layouts[tensor.fqn] = Layout.whole(len(tensor.shape)).cut("ep", 0)
    if spec.experts.capacity is not None and mesh.size("ep") == 1:
        what = (
            "'experts.capacity' has no effect without an ep axis: no tokens are sent to other ranks"
        )
        fix = 'add ep to the mesh, such as ep: "2 in dp_shard", or remove experts.capacity'
        out.report(Problem(what, spec.origin("experts.capacity"), fix))
    for problem in _beside(spec, mesh, out, mesh.size("ep") > 1 and not is_placed):
        out.report(problem)
    return out


def _beside(spec: Spec, mesh: Mesh, out: ExpertParallel, cuts_nothing: bool) -> list[Problem]:
    """Return problems of ep as a whole: it shards nothing, or modules are placed inside others."""
    problems = []
    if cuts_nothing:
        what = (
            f"the ep axis of size {mesh.size('ep')} shards nothing: no rule places a module on ep"
        )
        fix = f"add a rule such as {{match: '**.experts', place: {{ep: {EXPERT_STYLE}}}}}"
        problems.append(Problem(what, spec.origin("mesh.ep"), f"{fix}, or remove ep from the mesh"))
    nested = [fqn for fqn in out.uses for around in out.uses if fqn != around and
              is_inside(fqn, around)]  # fmt: skip
    for fqn in nested:
        what = f"'{fqn}' lies inside another module that is placed on ep"
        problems.append(
            Problem(what, out.uses[fqn].reason.origin, "match only one of the two modules")
        )
    return problems


def _inside(graph: ModelGraph, modules: Collection[str]) -> dict[str, list[TensorInfo]]:
    """Return the tensors inside each of these modules, also those inside by an alias."""
    out: dict[str, list[TensorInfo]] = {fqn: [] for fqn in modules}
    for tensor in graph.tensors.values() if out else ():
        for fqn in {m for name in tensor.names for m in around(name) if m in out}:
            out[fqn].append(tensor)
    return out


def _problem(
    graph: ModelGraph, mesh: Mesh, tp: TensorParallel, fqn: str, statement: Stated,
    tensors: Sequence[TensorInfo], is_borrowed: bool,
) -> tuple[str, str] | None:  # fmt: skip
    """Return (why ep cannot distribute the experts of this module, the fix); None if it can."""
    word = str(statement.value)
    if not is_borrowed:
        lacks = no_axis("ep", mesh, None)
        return lacks.what, lacks.fix
    if word == "R":
        return None
    if word != EXPERT_STYLE:
        return f"'{word}' is not a style of the axis ep", f"write ep: {EXPERT_STYLE}"
    info = graph.modules[fqn]
    name = f"'{fqn}' ({info.type})"
    stack = (
        "use a module with stacked experts (parameters of shape (E, out, in)), as transformers does"
    )
    if not info.has_forward:
        what = f"{name} is a container whose experts are called one by one by the code around it"
        return f"{what}: ep has no single call at which to exchange tokens", stack
    if not tensors:
        return f"{name} has no parameters, and so no experts", "match the module with the experts"
    for tensor in tensors:
        sizes = {t.shape[0] for t in tensors if t.shape}
        if tensor.is_buffer:
            what = f"{name} has the buffer {tensor.fqn}, which may have one value per expert"
            fix = "move the buffer out of the module, or leave these experts out of ep"
            return f"{what}, but ep does not shard buffers", fix
        # Stacked experts have weights of 3 dims; a module with at most 2 dims may be a router.
        beside = [t for t in tensors if t.module == tensor.module]
        if not tensor.shape or len(sizes) > 1 or not any(len(t.shape) > 2 for t in beside):
            shapes = ", ".join(f"{t.fqn.removeprefix(fqn + '.')} {list(t.shape)}" for t in tensors)
            what = (
                f"{name} does not stack its experts: not all parameters have the experts as dim 0"
            )
            return f"{what} ({_short(shapes)})", _nearer(graph, fqn, stack)
        if tensor.aliases:
            names = " and ".join(tensor.names)
            what = f"{names} are one tensor, which ep would shard under only one of these names"
            return what, "leave these experts out of ep"
        cut = tp.cuts.get(tensor.fqn)
        if cut is not None and (cut.layout.axes or cut.is_local):
            what = f"{tensor.fqn} is sharded by both tp ({cut.reason.text}) and ep"
            fix = "remove the placement on tp or the one on ep"
            return f"{what}, which is not available yet in this version", fix
    num = tensors[0].shape[0]
    if num % mesh.size("ep"):
        lent = mesh.size("ep", EXPERT_SHARD)
        divisors = [d for d in range(2, mesh.size("ep")) if num % d == lent % d == 0]
        fix = f"use ep: {divisors[-1]} in dp_shard" if divisors else "leave ep out"
        return f"{name} has {num} experts, which do not divide by ep {mesh.size('ep')}", fix
    return None


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "..."


def _nearer(graph: ModelGraph, fqn: str, otherwise: str) -> str:
    """Return a fix that names a module inside which stacks experts; without one, `otherwise`."""
    for below in graph.modules:
        tensors = [t for t in graph.owned(below) if not t.is_buffer]
        is_stack = any(len(t.shape) > 2 for t in tensors) and all(t.shape for t in tensors)
        is_below = below != fqn and is_inside(below, fqn)
        if is_below and is_stack and len({t.shape[0] for t in tensors}) == 1:
            return f"match '{below}'"
    return otherwise
