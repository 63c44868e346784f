"""A check after the first forward that a tp-sharded module computes the same as unsharded.

The rules of a tp plan infer from names and sizes which attributes count heads, where the pieces of
a fused weight are and which projections belong together. Names and sizes do not show what the code
does: it may build an attention bias from `num_heads`, slice at the full width, order the pieces
differently, or take a softmax over sharded features. The loss would still fall, but with wrong
numbers. So one module of each kind runs again after the first forward, on the inputs it got there,
once sharded and once unsharded, on every rank of tp. A difference raises before anything is
updated.
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
from meshplan.runtime.base.module_state import defined_in, module_state_of
from meshplan.runtime.base.optimizer_steps import before_steps
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.checks.dry_run import dry_run, in_dry_run, noise
from meshplan.runtime.checks.islands import LocalModule, local_modules_of

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF: Final = 5e-2
"""Largest allowed relative differences, `_HALF` for the other dtypes [Empirical]: in single
precision a wrong head differs by 0.1 and more, and the same sum in another order by 1e-6."""
_INFINITE, _LEFT_SHARDED, _INCOMPARABLE = 2.0**98, 2.0**99, 2.0**100
"""Results of `_worst_difference` that are no differences, larger than any difference. They are
numbers so that the maximum over ranks finds them."""

_HOOKS: Final = (
    "_forward_pre_hooks", "_forward_hooks",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs",
)  # fmt: skip


@dataclass(slots=True)
class _PendingProof:
    """The comparisons that are still to be made for one model.

    Attributes:
        plan: The plan applied to the model.
        mesh: The DeviceMesh that the plan is applied on.
        waiting: Kinds (`LocalModule.kind`) of which no module's inputs have been captured yet.
        captured: Modules with captured inputs that are still to be compared.
        proved: Families (`LocalModule.family`) in which a module was compared successfully.
        undo: Functions that remove the installed hooks and replaced forwards.
    """

    plan: Plan
    mesh: DeviceMesh
    waiting: set[tuple[object, ...]] = field(default_factory=set)
    captured: list[LocalModule] = field(default_factory=list)
    proved: set[tuple[object, ...] | None] = field(default_factory=set)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def compare_captured(self, model: nn.Module) -> None:
        """Compare the captured modules; remove the hooks once a module of each kind was captured.

        Raises:
            ApplyError: A module computes other values when sharded.
        """
        captured, self.captured = self.captured, []
        for local_module in captured:
            _prove(model, local_module, self)
        if not self.waiting:
            while self.undo:
                self.undo.pop()()


def prove_first_forward(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Install hooks that compare sharded with unsharded modules after the model's first forward.

    The forward, or the optimizer step with pipeline stages, raises an ApplyError if a module
    computes other values when sharded.
    """
    local_modules = local_modules_of(model, plan)
    if plan.mesh.size("tp") == 1 or not local_modules:
        return
    proof = _PendingProof(plan, mesh, {local_module.kind for local_module in local_modules})
    is_compiled = bool(plan.assignment.compiled)

    def before(module: nn.Module, args: Any) -> None:
        if not handles:  # Hooks registered this late run after all other hooks of the forward.
            if is_compiled:  # The stance is global, so reset it even if the forward raises.
                handles.append(module.register_forward_hook(end_eager, always_call=True))
            handles.append(module.register_forward_hook(after))
            proof.undo += [handle.remove for handle in handles]
        if is_compiled:  # The capturing forwards must not become part of a compiled graph.
            torch.compiler.set_stance("force_eager")

    def end_eager(module: nn.Module, args: Any, output: Any) -> None:
        torch.compiler.set_stance("default")

    def after(module: nn.Module, args: Any, output: Any) -> None:
        proof.compare_captured(module)

    def step(optimizer: torch.optim.Optimizer) -> None:
        # A pipeline stage ends its forward early, so that `after` does not run: compare here.
        found = weak()
        own_ids = {id(p) for p in found.parameters()} if found is not None else set()
        if any(id(p) in own_ids for group in optimizer.param_groups for p in group["params"]):
            assert found is not None
            proof.compare_captured(found)

    weak = weakref.ref(model)
    handles: list[RemovableHandle] = []
    proof.undo = [
        *(
            _capture(model.get_submodule(local_module.fqn), local_module, proof)
            for local_module in local_modules
        ),
        model.register_forward_pre_hook(before).remove,
        before_steps(step),
    ]


def _capture(
    module: nn.Module, local_module: LocalModule, proof: _PendingProof
) -> Callable[[], None]:
    """Replace a module's forward so that it captures the first inputs; return the undo function.

    Inputs are captured only if no module of this kind has captured any yet.
    """
    forward, own = module.forward, vars(module).get("forward")

    @wraps(forward)
    def first(*args: Any, **kwargs: Any) -> Any:
        if local_module.kind in proof.waiting and not in_dry_run():
            kept = _keep((args, kwargs))
            if kept is not None:
                proof.waiting.discard(local_module.kind)
                local_module.inputs = kept
                proof.captured.append(local_module)
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            error.add_note(
                f"meshplan: {local_module.fqn or 'the model'} runs with one rank's shard of its "
                "heads or "
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
    """Return a copy of inputs, which a forward cannot change; None if they cannot be copied."""
    try:
        with torch.no_grad():
            return _mapped(inputs, lambda t: t.detach().clone())
    except (RuntimeError, TypeError):
        # A cache with results of earlier layers cannot be copied, for example. Then the inputs of
        # another module of this kind are captured.
        return None


def _mapped(value: Any, change: Any) -> Any:
    """Return a copy of a nested value, with `change(tensor)` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(v, change) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    return copy.deepcopy(value)


def _prove(model: nn.Module, local_module: LocalModule, proof: _PendingProof) -> None:
    """Compare a module's sharded with its unsharded outputs; every rank must call this.

    Raises:
        ApplyError: Outputs differ on some rank, or cannot be compared and no module of the same
            family was proved. The error is raised on every rank that has the module.
    """
    module = model.get_submodule(local_module.fqn)
    tp = submesh(proof.mesh, ("tp",))
    parts = _parts(model, local_module, proof.plan, tp)
    failure: Exception | None = None
    with torch.no_grad():
        with dry_run(module):
            sharded = _run(module, local_module, {fqn: part for fqn, (part, _) in parts.items()})
        with dry_run(module), _uncut(module, local_module, proof.plan, tp):
            try:
                unsharded = _run(
                    module, local_module, {fqn: whole for fqn, (_, whole) in parts.items()}
                )
                difference = _worst_difference(
                    sharded, unsharded, tp, may_be_sharded=local_module.is_enclosed
                )
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                failure, difference = error, _INCOMPARABLE
    local_module.inputs = None  # Frees the copied inputs.
    worst = torch.tensor(difference, device=proof.mesh.device_type)
    for axis in proof.mesh.mesh_dim_names or ():
        if axis != "pp":  # Ranks of other pipeline stages have other modules.
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=proof.mesh.get_group(axis))
    if worst <= 1.0:
        proof.proved.add(local_module.family)
    elif worst < _INCOMPARABLE or local_module.family not in proof.proved - {None}:
        raise ApplyError(_problem(local_module, module, proof.plan, worst.item())) from failure


def _problem(local_module: LocalModule, module: nn.Module, plan: Plan, worst: float) -> Problem:
    changed = ", ".join(f"{name} {value}" for name, value in local_module.whole.items())
    cut = f" (in one process: {changed})" if changed else ""
    what = f"{local_module.fqn or 'the model'} ({type(module).__name__}) "
    if worst == _INCOMPARABLE:
        what += "cannot be compared with its unsharded computation"
    elif worst == _LEFT_SHARDED:
        what += "returns features that are sharded along tp, and no enclosing module combines them"
    else:
        what += (
            f"computes other values when its heads, fused projections or features are sharded{cut}"
        )
    inner = (
        use.reason for f, use in plan.assignment.styles.items() if is_inside(f, local_module.fqn)
    )
    fix = "leave all of its projections out of tp, or try tp_plan: auto"
    return Problem(what, next(inner).origin, fix)


def _parts(
    model: nn.Module, local_module: LocalModule, plan: Plan, tp: DeviceMesh
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return {fqn in the module: (parameter sharded along tp, unsharded parameter)}.

    Both are gathered over the data axes. A constant weight is replaced by random values
    (`dry_run.noise`), because zeros would hide differences.
    """
    out = {}
    for fqn, parameter in model.get_submodule(local_module.fqn).named_parameters():
        placed = plan.assignment.tensors.get(f"{local_module.fqn}.{fqn}".removeprefix("."))
        whole = full(parameter.detach())
        random = noise(fqn, whole, whole.shape[-1] if whole.ndim else 1)
        whole = whole if random is None else random
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


def _run(
    module: nn.Module, local_module: LocalModule, values: Mapping[str, torch.Tensor]
) -> list[Any]:
    """Run a module on its captured inputs with the given parameters; return its results.

    The results are the tensors of its output, then those it wrote into buffers or attributes.

    Args:
        module: The module.
        local_module: The module's captured inputs.
        values: Parameters by their fqn in the module.
    """
    assert local_module.inputs is not None
    args, kwargs = _mapped(local_module.inputs, torch.Tensor.clone)
    with _hidden(module, values), as_written():
        before = {key: _stamp(value) for key, value in module_state_of(module).items()}
        out = [tensor for _, tensor in tensors_in(module.forward(*args, **kwargs))]
        # A module may keep an auxiliary loss in an attribute, or tensors to compute it from later.
        for key, value in sorted(module_state_of(module).items(), key=lambda item: item[0]):
            if isinstance(value, torch.Tensor) and _stamp(value) != before.get(key):
                out.append(value.clone())
    return out


def _stamp(value: Any) -> tuple[int, int]:
    """Return (`id` of a value, version counter of a tensor or 0), which changes with a write."""
    has_version = isinstance(value, torch.Tensor) and not value.is_inference()
    return id(value), value._version if has_version else 0


@contextmanager
def _hidden(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Make the module's code see these tensors in place of its parameters inside the `with` block.

    An instance attribute of the same name hides a parameter, because `nn.Module.__getattr__` is
    called only for names that are not found otherwise.

    Args:
        module: The module with the parameters.
        values: The tensors, by the parameters' fqns in the module.
    """
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
def _uncut(
    module: nn.Module, local_module: LocalModule, plan: Plan, tp: DeviceMesh
) -> Iterator[None]:
    """Make the module run as in one process inside the `with` block.

    Modules with a style lose the hooks and the forward that the plan gave them, and the attributes
    that tp changes have their unsharded values. Hooks of other code stay: they may change values.
    Afterwards all is as before.
    """

    def inside(fqn: str) -> nn.Module:
        return module.get_submodule(fqn[len(local_module.fqn) :].removeprefix("."))

    styled = [
        f
        for f in plan.assignment.styles
        if is_inside(f, local_module.fqn) and f != local_module.fqn
    ]
    changed = [a for a in plan.assignment.attributes if is_inside(a.module, local_module.fqn)]
    others = dict.fromkeys(a.module for a in changed if a.module not in (*styled, local_module.fqn))
    kept = [(m, dict(vars(m))) for m in (module, *map(inside, (*styled, *others)))]
    try:
        for fqn, (m, before) in zip(styled, kept[1:], strict=False):
            vars(m).pop("forward", None)
            for hooks in _HOOKS:
                vars(m)[hooks] = type(before[hooks])(
                    (key, hook) for key, hook in before[hooks].items() if not _is_of_plan(hook)
                )
            if plan.assignment.sequence_parallel:
                _pass_the_sequence(m, plan.assignment.styles[fqn], tp)
        for attribute in changed:
            vars(inside(attribute.module))[attribute.name] = attribute.whole
        vars(module).update(local_module.whole)
        yield
    finally:
        for m, before in kept:
            vars(m).clear()
            vars(m).update(before)


def _is_of_plan(hook: Any) -> bool:
    """Return True if applying a plan registered a hook: meshplan, or FSDP2."""
    return defined_in(hook).startswith(("meshplan.", "torch.distributed."))


def _pass_the_sequence(module: nn.Module, use: StyleUse, tp: DeviceMesh) -> None:
    """Register hooks that gather the sequence before a module and split it after the module.

    Under sequence parallelism the neighbouring modules compute on parts of the sequence, so their
    values arrive and leave as parts.
    """

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


def _worst_difference(
    sharded: list[torch.Tensor],
    unsharded: list[torch.Tensor],
    tp: DeviceMesh,
    *,
    may_be_sharded: bool,
) -> float:
    """Return the largest difference of sharded outputs from this rank's slice of unsharded outputs.

    Args:
        sharded: Outputs of the sharded module.
        unsharded: Outputs of the unsharded module, in the same order.
        tp: The tp axis of the mesh.
        may_be_sharded: If True, outputs may be sharded along their last dim.

    Returns:
        The difference divided by the tolerance, so that at most 1 is equal up to rounding;
        `_INFINITE` if it is not finite, `_LEFT_SHARDED` if an output is sharded along its last dim
        but must not be, `_INCOMPARABLE` if no output could be compared.
    """
    worst, compared = 0.0, 0
    for part, whole in zip(sharded, unsharded, strict=True):
        differs = [d for d in range(part.ndim) if part.shape[d] != whole.shape[d]]
        if len(differs) == 1 and whole.shape[differs[0]] == part.shape[differs[0]] * tp.size():
            whole = whole.chunk(tp.size(), differs[0])[tp.get_local_rank()]
        if part.shape != whole.shape or not part.is_floating_point() or not part.numel():
            continue
        compared += 1
        scale = whole.abs().nan_to_num(0, 0).max().clamp_min(torch.finfo(whole.dtype).tiny)
        # Both may contain equal infinities or NaNs, such as those of masked attention scores.
        is_same = (part == whole) | (part.isnan() & whole.isnan())
        share = ((part - whole).abs().masked_fill(is_same, 0).max() / scale).item()
        allowed = _TOLERANCE.get(whole.dtype, _HALF)
        worst = max(worst, share / allowed if math.isfinite(share) else _INFINITE)
        if worst <= 1.0 and differs == [part.ndim - 1] and not may_be_sharded:
            return _LEFT_SHARDED
    return worst if compared else _INCOMPARABLE
