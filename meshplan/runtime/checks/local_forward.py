"""A check in the first forward that a module sharded by rule computes what it computes unsharded.

Names and sizes show which attributes count heads, where the pieces of a fused weight lie and which
projections belong together. They cannot show what the code does with them: an attention bias built
from `num_heads`, a slice at the whole width, another order of the pieces, or a softmax over sharded
features. The loss falls all the same, only the numbers are wrong. So one module of each kind runs
again after the first forward on the inputs it got, once as it is and once unsharded, on every rank
of tp. A difference is rejected before anything is updated.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.hooks import RemovableHandle

from meshplan.assign import StyleUse
from meshplan.errors import ApplyError, Problem
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.runtime.base.forward_calls import as_written
from meshplan.runtime.base.mesh import full, placement, submesh
from meshplan.runtime.base.module_state import module_state_of
from meshplan.runtime.base.optimizer_steps import before_steps
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.checks.dry_run import dry_run, in_dry_run, noise
from meshplan.runtime.checks.islands import LocalModule, local_modules_of

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF: Final = 5e-2
"""Relative differences that rounding does not reach [Empirical]: a wrong head differs by 0.1 and
more, and the same sum in another order by 1e-6 in single precision."""
_INFINITE, _LEFT_CUT, _INCOMPARABLE = 2.0**98, 2.0**99, 2.0**100
"""Codes above any real difference, for outcomes that are no number."""

_HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs",
)  # fmt: skip


@dataclass(slots=True)
class _PendingProof:
    """The comparisons that are still to be made for one model.

    Attributes:
        waiting: Kinds of modules of which none has been captured yet.
        captured: Modules with captured inputs that are still to be compared.
        proved: Families of which a module was compared successfully.
        undo: Functions that remove what was installed.
    """

    plan: Plan
    mesh: DeviceMesh
    waiting: set[tuple[object, ...]] = field(default_factory=set)
    captured: list[LocalModule] = field(default_factory=list)
    proved: set[tuple[object, ...] | None] = field(default_factory=set)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def settle(self, model: nn.Module) -> None:
        """Compare the captured modules; a module that has not been called yet keeps waiting."""
        captured, self.captured = self.captured, []
        for island in captured:
            _prove(model, island, self)
        if not self.waiting:
            while self.undo:
                self.undo.pop()()


def prove_first_forward(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Capture inputs during the model's first forward, and compare after it.

    Raises:
        ApplyError: From the forward or the optimizer step, if a module computes something else.
    """
    islands = local_modules_of(model, plan)
    if plan.mesh.size("tp") == 1 or not islands:
        return
    proof = _PendingProof(plan, mesh, {island.kind for island in islands})
    is_compiled = bool(plan.assignment.compiled)

    def before(module: nn.Module, args: Any) -> None:
        if not handles:  # Registered late, to run after every hook that watches the forward itself.
            if is_compiled:  # The stance is the process's: a forward that raises must not leave it.
                handles.append(module.register_forward_hook(compile_again, always_call=True))
            handles.append(module.register_forward_hook(after))
            proof.undo += [handle.remove for handle in handles]
        if is_compiled:  # Capturing and comparing must not become part of a compiled graph.
            torch.compiler.set_stance("force_eager")

    def compile_again(module: nn.Module, args: Any, output: Any) -> None:
        torch.compiler.set_stance("default")

    def after(module: nn.Module, args: Any, output: Any) -> None:
        proof.settle(module)

    def step(optimizer: torch.optim.Optimizer) -> None:
        # A pipeline stage ends its forward before hooks of the whole model can see it.
        found = weak()
        mine = {id(p) for p in found.parameters()} if found is not None else set()
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            assert found is not None
            proof.settle(found)

    weak = weakref.ref(model)
    handles: list[RemovableHandle] = []
    proof.undo = [
        *(_capture(model.get_submodule(island.fqn), island, proof) for island in islands),
        model.register_forward_pre_hook(before).remove,
        before_steps(step),
    ]


def _capture(module: nn.Module, island: LocalModule, proof: _PendingProof) -> Callable[[], None]:
    """Capture the first inputs of a module; return a function that undoes the change."""
    forward, own = module.forward, vars(module).get("forward")

    @wraps(forward)
    def first(*args: Any, **kwargs: Any) -> Any:
        if island.kind in proof.waiting and not in_dry_run():
            kept = _keep((args, kwargs))
            if kept is not None:
                proof.waiting.discard(island.kind)
                island.inputs = kept
                proof.captured.append(island)
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            error.add_note(
                f"meshplan: {island.fqn or 'the model'} runs with one rank's shard of its heads or "
                "fused projections; code that assumes all of them cannot be sharded by a rule: "
                "leave the module out of tp, or try tp_plan: auto"
            )
            raise

    def undo() -> None:
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own

    module.forward = first
    return undo


def _keep(inputs: Any) -> Any:
    """Copy inputs so that the first forward cannot change them; None if they cannot be copied."""
    try:
        with torch.no_grad():
            return _mapped(inputs, lambda t: t.detach().clone())
    except (RuntimeError, TypeError):
        return None  # Such as a cache with results of earlier layers: another module will do.


def _mapped(value: Any, change: Any) -> Any:
    """Copy a nested value, with `change` applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(v, change) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    return copy.deepcopy(value)


def _prove(model: nn.Module, island: LocalModule, proof: _PendingProof) -> None:
    """Compare one module with its unsharded self; every rank takes part and every rank raises."""
    module = model.get_submodule(island.fqn)
    tp = submesh(proof.mesh, ("tp",))
    parts = _parts(model, island, proof.plan, tp)
    failure: Exception | None = None
    with torch.no_grad():
        with dry_run(module):
            own = _run(module, island, {fqn: part for fqn, (part, _) in parts.items()})
        with dry_run(module), _uncut(module, island, proof.plan, tp):
            try:
                every = _run(module, island, {fqn: whole for fqn, (_, whole) in parts.items()})
                apart = _apart(own, every, tp, may_be_cut=island.is_enclosed)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                failure, apart = error, _INCOMPARABLE
    island.inputs = None  # Frees a whole activation that is not needed any more.
    worst = torch.tensor(apart, device=proof.mesh.device_type)
    for axis in proof.mesh.mesh_dim_names or ():
        if axis != "pp":  # Ranks that differ along pp have other modules.
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=proof.mesh.get_group(axis))
    if worst <= 1.0:
        proof.proved.add(island.family)
    elif worst < _INCOMPARABLE or island.family not in proof.proved - {None}:
        raise ApplyError(_problem(island, module, proof.plan, worst.item())) from failure


def _problem(island: LocalModule, module: nn.Module, plan: Plan, worst: float) -> Problem:
    changed = ", ".join(f"{name} {value}" for name, value in island.whole.items())
    cut = f" (in one process: {changed})" if changed else ""
    what = f"{island.fqn or 'the model'} ({type(module).__name__}) "
    if worst == _INCOMPARABLE:
        what += "cannot be compared with its unsharded computation"
    elif worst == _LEFT_CUT:
        what += "returns features that are sharded along tp, and no enclosing module combines them"
    else:
        what += (
            f"computes other values when its heads, fused projections or features are sharded{cut}"
        )
    inner = (use.reason for f, use in plan.assignment.styles.items() if is_inside(f, island.fqn))
    fix = "leave all of its projections out of tp, or try tp_plan: auto"
    return Problem(what, next(inner).origin, fix)


def _parts(
    model: nn.Module, island: LocalModule, plan: Plan, tp: DeviceMesh
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return every parameter of the module, sharded as by tp and unsharded, by fqn in the module.

    Both are gathered over the data axes. Constant weights are replaced by noise (`dry_run.noise`).
    """
    out = {}
    for fqn, parameter in model.get_submodule(island.fqn).named_parameters():
        placed = plan.assignment.tensors.get(f"{island.fqn}.{fqn}".removeprefix("."))
        whole = full(parameter.detach())
        telling = noise(fqn, whole, whole.shape[-1] if whole.ndim else 1)
        whole = whole if telling is None else telling
        if placed is not None and whole.is_floating_point():
            whole = whole.to(getattr(torch, placed.compute_dtype))
        part = whole
        if (
            placed is not None
            and isinstance(parameter, DTensor)
            and "tp" in (parameter.device_mesh.mesh_dim_names or ())
        ):
            where = Replicate() if placed.gathered_axes else placement(placed.computed, "tp")
            part = distribute_tensor(whole, tp, [where], src_data_rank=None)
        out[fqn] = (part, whole)
    return out


def _run(module: nn.Module, island: LocalModule, values: Mapping[str, torch.Tensor]) -> list[Any]:
    """Run a module with these parameters; return its output tensors and those it keeps."""
    assert island.inputs is not None
    args, kwargs = _mapped(island.inputs, torch.Tensor.clone)
    with _hidden(module, values), as_written():
        before = {key: _stamp(value) for key, value in module_state_of(module).items()}
        out = [tensor for _, tensor in tensors_in(module.forward(*args, **kwargs))]
        # Modules may keep an auxiliary loss for later, or tensors from which one is computed.
        for key, value in sorted(module_state_of(module).items(), key=lambda item: item[0]):
            if isinstance(value, torch.Tensor) and _stamp(value) != before.get(key):
                out.append(value.clone())
    return out


def _stamp(value: Any) -> tuple[int, int]:
    """Return the identity of a value and, for a tensor, its version counter."""
    has_version = isinstance(value, torch.Tensor) and not value.is_inference()
    return id(value), value._version if has_version else 0


@contextmanager
def _hidden(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Hide parameters behind instance attributes of the same name."""
    hidden = []
    try:
        for fqn, value in values.items():
            path, _, leaf = fqn.rpartition(".")
            holder = module.get_submodule(path)
            vars(holder)[leaf] = value
            hidden.append((holder, leaf))
        yield
    finally:
        for holder, leaf in hidden:
            vars(holder).pop(leaf, None)


@contextmanager
def _uncut(module: nn.Module, island: LocalModule, plan: Plan, tp: DeviceMesh) -> Iterator[None]:
    """Run the module's code as one process does: without tp's hooks, on unsharded attributes."""

    def inside(fqn: str) -> nn.Module:
        return module.get_submodule(fqn[len(island.fqn) :].removeprefix("."))

    styled = [f for f in plan.assignment.styles if is_inside(f, island.fqn) and f != island.fqn]
    changed = [a for a in plan.assignment.attributes if is_inside(a.module, island.fqn)]
    others = dict.fromkeys(a.module for a in changed if a.module not in (*styled, island.fqn))
    kept = [(m, dict(vars(m))) for m in (module, *map(inside, (*styled, *others)))]
    try:
        for fqn, (m, before) in zip(styled, kept[1:], strict=False):
            vars(m).pop("forward", None)
            for hooks in _HOOKS:
                vars(m)[hooks] = type(before[hooks])()
            if plan.assignment.sequence_parallel:
                _pass_the_sequence(m, plan.assignment.styles[fqn], tp)
        for attribute in changed:
            vars(inside(attribute.module))[attribute.name] = attribute.whole
        vars(module).update(island.whole)
        yield
    finally:
        for m, before in kept:
            vars(m).clear()
            vars(m).update(before)


def _pass_the_sequence(module: nn.Module, use: StyleUse, tp: DeviceMesh) -> None:
    """Gather and split the sequence around a module, because its neighbours work on parts of it."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = next(iter(kwargs), "")
        x = args[0] if args else kwargs[name]
        x = DTensor.from_local(x, tp, [Shard(1)], run_check=False).full_tensor()
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {name: x})

    def leave(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.chunk(tp.size(), 1)[tp.get_local_rank()]

    if use.style.input[0] == "outside" and use.style.input[1] != "S(1)":
        module.register_forward_pre_hook(enter, with_kwargs=True)
    if use.style.output[1] == "outside" and use.style.output[0] != "S(1)":
        module.register_forward_hook(leave)


def _apart(
    own: list[torch.Tensor], every: list[torch.Tensor], tp: DeviceMesh, *, may_be_cut: bool
) -> float:
    """Return the largest difference of this rank's outputs from their slice of the whole ones.

    Args:
        own: Outputs of the sharded module.
        every: Outputs of the unsharded module.
        tp: The tp axis of the mesh.
        may_be_cut: If True, outputs may be sharded along their last dim.

    Returns:
        The difference in units of the tolerance; `_INFINITE` if it is not finite, `_LEFT_CUT` if
        features are sharded but must not be, `_INCOMPARABLE` if there was nothing to compare.
    """
    worst, compared = 0.0, 0
    for part, whole in zip(own, every, strict=True):
        differs = [d for d in range(part.ndim) if part.shape[d] != whole.shape[d]]
        if len(differs) == 1 and whole.shape[differs[0]] == part.shape[differs[0]] * tp.size():
            whole = whole.chunk(tp.size(), differs[0])[tp.get_local_rank()]
        if part.shape != whole.shape or not part.is_floating_point() or not part.numel():
            continue
        compared += 1
        scale = whole.abs().nan_to_num(0, 0).max().clamp_min(torch.finfo(whole.dtype).tiny)
        # Infinities and NaNs may stand in both, as behind a mask.
        is_same = (part == whole) | (part.isnan() & whole.isnan())
        share = ((part - whole).abs().masked_fill(is_same, 0).max() / scale).item()
        allowed = _TOLERANCE.get(whole.dtype, _HALF)
        worst = max(worst, share / allowed if math.isfinite(share) else _INFINITE)
        if worst <= 1.0 and differs == [part.ndim - 1] and not may_be_cut:
            return _LEFT_CUT
    return worst if compared else _INCOMPARABLE
