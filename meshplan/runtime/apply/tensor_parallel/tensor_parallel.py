"""Tensor parallelism: parameters become DTensors, and hooks redistribute activations.

Each module with a tensor-parallel style gets two hooks, for its input and its output; the table
`layout.styles.STYLES` lists the layouts of each style. Applied before activation checkpointing and
before the data axes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from meshplan.assign import Placed, StyleUse
from meshplan.errors import ApplyError, Problem
from meshplan.layout.styles import GATHERED, LOGITS
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.vocab_parallel_loss import leave_logits
from meshplan.runtime.apply.tensor_parallel.local_tensors import (
    compute_locally,
    is_known,
    look_up_own_rows,
    looks_up_own_rows,
    own_part,
    set_local_attributes,
)
from meshplan.runtime.apply.tensor_parallel.multihead import attend_by_heads
from meshplan.runtime.base.compile import compiles
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import activation_placement, extremes, placement, submesh
from meshplan.runtime.base.module_state import hooks_of
from meshplan.runtime.torch_private.ops import as_dtensor
from meshplan.runtime.torch_private.redistribution import Redistribution, redistributed
from meshplan.runtime.trace.sp_boundary import check_even, cross, with_argument


def apply_tensor_parallel(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard the parameters over tp and register the hooks that redistribute activations, in place.

    Assumes: every rank has the same full values, or all are on meta, so that each rank takes its
    own shard without communication.
    """
    if plan.mesh.size("tp") == 1:
        return
    tp = submesh(mesh, ("tp",))
    styled = set(plan.assignment.styles)
    for placed in plan.assignment.tensors.values():
        if placed.tp_reason is None or placed.info.is_buffer:
            continue
        owners = {name.rpartition(".")[0] for name in placed.info.names}
        is_touched = "tp" in placed.computed.axes or placed.gathered_axes or placed.is_local
        if not is_touched and not owners & styled:
            continue  # Replicated, and no sharded computation reads it: it stays a plain tensor.
        distribute(model, placed.info.names, tp, placement(placed.stored, "tp"))
        if placed.gathered_axes:
            for name in placed.info.names:
                _gather_at_use(model, name)
        if placed.is_local:
            _local_at_use(model, placed)
    styles = [(f, model.get_submodule(f), use) for f, use in plan.assignment.styles.items()]
    # Hooks of other code may compute anything with what they see, so they see DTensors.
    hooked = {id(module) for _, module, _ in styles if any(hooks_of(module))}
    for crossing in plan.assignment.crossings:
        cross(model.get_submodule(crossing.module), crossing, tp)
    outside = "S(1)" if plan.assignment.sequence_parallel else "R"
    # Compiled code may use DTensors: their cost on the host is paid once, when it is traced.
    is_compiled = compiles(model, plan)
    for fqn, module, use in styles:
        if isinstance(module, nn.MultiheadAttention):
            attend_by_heads(module, fqn, use, tp)
            continue
        hooks = _StyleHooks(use, tp, outside)
        is_local = not is_compiled and id(module) not in hooked and hooks.suits_local(module)
        if use.style.cut_dim == "vocab" and looks_up_own_rows(module, tp):
            look_up_own_rows(module, fqn, tp)
        elif use.pieces or is_local:
            compute_locally(module, fqn, use, tp)
        hooks.around(module, is_local=is_local)
    if not is_compiled:
        for fqn in {fqn.rpartition(".")[0] for fqn in plan.assignment.styles}:
            model.get_submodule(fqn).register_forward_hook(forget_entered, always_call=True)
    set_local_attributes(model, plan)


def distribute(
    model: nn.Module, names: tuple[str, ...], mesh: DeviceMesh, where: Placement
) -> None:
    """Replace a parameter by a DTensor under all its names, so that tied parameters stay tied.

    Args:
        model: The model that holds the parameter.
        names: All names of the parameter; it is read under the first one.
        mesh: The mesh to distribute over, of one axis.
        where: Placement along that axis.
    """
    old = model.get_parameter(names[0])
    # No source rank: all ranks have equal values already, so a broadcast would be wasted.
    new = nn.Parameter(
        distribute_tensor(old.detach(), mesh, [where], src_data_rank=None),
        requires_grad=old.requires_grad,
    )
    for name in names:
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, new)


_LAYS_GRADIENTS: Final = "_meshplan_lays_gradients"
"""Attribute set on a parameter that `align_gradients` has registered its hook on."""


def align_gradients(model: nn.Module, plan: Plan) -> None:
    """Redistribute gradients that no FSDP unit reduces to the placements of their parameter.

    The backward of an embedding with an overridden forward leaves the gradient of the whole
    vocabulary on every rank, and the backward of a norm in a sequence-parallel region leaves
    partial sums. Without these hooks, the optimizer's state would get the layout of the gradient.

    A second call registers hooks only on parameters that have become trainable since.

    Assumes: parameters are allocated already, since moving a DTensor parameter drops its hooks.
    """

    def lay(gradient: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
        assert isinstance(gradient, DTensor)
        # DTensor's own test whether there is anything to do takes 0.1 ms.
        is_laid = gradient.placements == placements
        return gradient if is_laid else gradient.redistribute(placements=placements)

    if plan.mesh.size("tp") == 1:
        return
    for fqn, placed in plan.assignment.tensors.items():
        if placed.unit is None and not placed.info.is_buffer:
            param = model.get_parameter(fqn)
            is_new = param.requires_grad and not hasattr(param, _LAYS_GRADIENTS)
            if isinstance(param, DTensor) and is_new:
                param.register_hook(partial(lay, placements=param.placements))
                setattr(param, _LAYS_GRADIENTS, True)


class _StyleHooks:
    """The hooks that redistribute a module's input and its output, as its style states.

    Redistribution is never asynchronous: an asynchronous collective returns an
    `AsyncCollectiveTensor`, which a compiled block mistakes for the tensor inside it, and the
    gradients are wrong (torch 2.13).

    Attributes:
        use: The tensor-parallel style of the module.
        tp: The mesh of tp.
        arrives: Placement of the input where it comes from.
        wanted: Placement of the input that the module computes with.
        computed: Placement of the output that the module computes.
        leaves: Placement of the output outside of the module.
        entry: Redistribution of the input, if the module computes on local tensors.
        exit: Redistribution of the output, if the module computes on local tensors.
    """

    def __init__(self, use: StyleUse, tp: DeviceMesh, outside: str) -> None:
        """Read the layouts of a style.

        Args:
            use: The style.
            tp: The mesh of tp.
            outside: Layout of activations outside of styled modules: "R", or "S(1)" under
                `sequence_parallel`.
        """
        self.use, self.tp = use, tp
        style = use.style
        self.is_gathered = style.input[0] == GATHERED
        coming = ("R", style.input[1]) if self.is_gathered else style.input
        self.arrives, self.wanted, self.computed, self.leaves = (
            activation_placement(outside if word == "outside" else word)
            for word in (*coming, *style.output)
        )
        # Each rank has the gradient of a replicated input from its own outputs only.
        is_addend = (style.cut_dim == "out" or style.gradient) and self.wanted == Replicate()
        self.entry = Redistribution(
            self.arrives, self.wanted, Partial() if is_addend else self.wanted,
            Partial() if self.is_gathered else self.arrives,
        )  # fmt: skip
        back = self.leaves, Replicate() if self.computed == Partial() else self.computed
        self.exit = Redistribution(
            self.computed, self.leaves, *((Partial(),) * 2 if style.gradient else back)
        )

    def suits_local(self, module: nn.Module) -> bool:
        """Return True if a module computes the same on local tensors as on DTensors."""
        if self.use.style == LOGITS or not (self.entry.is_known and self.exit.is_known):
            return False
        if self.use.style.cut_dim == "vocab" and not looks_up_own_rows(module, self.tp):
            return False
        sizes = (
            (self.entry, getattr(module, "in_features", 0)),
            (self.exit, getattr(module, "out_features", getattr(module, "embedding_dim", 0))),
        )
        # Features are gathered, and their gradients split, in equal parts only.
        is_even = all(
            change.is_nothing or Shard(-1) not in change or size % self.tp.size() == 0
            for change, size in sizes
        )
        return is_even and (bool(self.use.pieces) or is_known(module))

    def around(self, module: nn.Module, *, is_local: bool) -> None:
        """Redistribute the input and the output of a module in each of its calls.

        Around a module that computes on local tensors, its forward is wrapped: hooks that are
        registered later, and those of backward, then see activations as they are outside of it.

        Args:
            module: The module.
            is_local: If True, the module computes on local tensors; if False, on DTensors.
        """
        is_checked = (
            self.use.style.input[0] != "outside" or self.arrives != Shard(1) or is_fake_execution()
        )
        come = self._as_local if is_local else self._as_dtensor

        def first(x: torch.Tensor) -> torch.Tensor:
            nonlocal is_checked
            if not is_checked:
                is_checked = True
                _check_part(x, self.tp)
            return come(x)

        def enter(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return with_argument(args, kwargs, "", first)

        if is_local:
            forward = module.forward

            @wraps(forward)
            def local(*args: Any, **kwargs: Any) -> torch.Tensor:
                args, kwargs = with_argument(args, kwargs, "", first)
                return self._leave_local(forward(*args, **kwargs))

            module.forward = local
            return
        module.register_forward_pre_hook(enter, with_kwargs=True)
        if not self.use.pieces:  # The output of a fused projection is a local tensor already.
            module.register_forward_hook(self._leave_dtensor)

    def _as_local(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of an activation in the layout that the module computes with."""
        if isinstance(x, DTensor):
            laid = x.redistribute(placements=[self.wanted])
            return laid.to_local(grad_placements=[self.entry.new_gradient])
        if Shard(1) == self.wanted != self.arrives:
            check_even(x, self.tp)
        return self._entered(x, "local", lambda: redistributed(x, self.tp, self.entry))

    def _as_dtensor(self, x: torch.Tensor) -> torch.Tensor:
        """Return an activation as a DTensor in the layout that the module computes with."""
        if isinstance(x, DTensor):
            return x.redistribute(placements=[self.wanted])
        if self.arrives != self.wanted:
            if self.wanted == Shard(1):
                check_even(x, self.tp)
            whole = DTensor.from_local(x, self.tp, [self.arrives], run_check=False)
            return whole.redistribute(placements=[self.wanted])

        def as_it_is() -> DTensor:
            if self.is_gathered:
                return as_dtensor(x, self.tp, self.arrives, Partial())
            return DTensor.from_local(x, self.tp, [self.arrives], run_check=False)

        return self._entered(x, "DTensor", as_it_is)

    def _entered(
        self, x: torch.Tensor, kind: str, change: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of `change` for an input, or that of another module with this input.

        q, k and v read the same tensor. They get the same result, so that their gradients are added
        before a single all-reduce instead of after one each.

        Args:
            x: The input.
            kind: What the result is: modules of one kind share it.
            change: Makes the result.
        """
        # Compiled code is traced once, so its tensors must not be cached. An inference tensor has
        # no version counter and no gradients to add.
        if self.arrives != self.wanted or torch.compiler.is_compiling() or x.is_inference():
            return change()
        is_recorded = torch.is_grad_enabled() and x.requires_grad
        key = (id(x), kind, self.tp, self.entry, x._version, is_recorded)
        if key not in _entered:
            while len(_entered) >= _MOST_ENTERED:  # If the parent is never called, nothing clears.
                del _entered[next(iter(_entered))]
            _entered[key] = (x, change())
        return _entered[key][1]

    def _leave_local(self, output: torch.Tensor) -> torch.Tensor:
        if Shard(1) == self.leaves != self.computed:
            check_even(output, self.tp)
        return redistributed(output, self.tp, self.exit)

    def _leave_dtensor(
        self, module: nn.Module, args: tuple[Any, ...], output: DTensor
    ) -> torch.Tensor:
        if self.use.style == LOGITS:
            return leave_logits(output)
        if self.leaves == Shard(1):
            check_even(output, self.tp)
        gradient = [Partial()] if self.use.style.gradient else None
        local = output.redistribute(placements=[self.leaves]).to_local(grad_placements=gradient)
        # torch forbids in-place writes to the result of `to_local`.
        return local.clone() if self.use.is_written else local


def _check_part(x: torch.Tensor, tp: DeviceMesh) -> None:
    """Raise an ApplyError if, under `sequence_parallel`, all ranks of tp got the same sequence.

    Full sequences in place of shards would be counted once per rank, without any other symptom. The
    check runs in the first call of a module. A sequence whose positions are all equal passes, since
    its shards are equal too.
    """
    own = torch.stack((x.detach().float().sum(), x.detach().float().norm()))
    varies = (x != x[:, :1]).any().to(own.dtype)
    low, high = extremes(torch.stack((*own, varies)), tp.get_group())
    if bool(low[2]) and torch.equal(low, high):
        raise ApplyError(
            Problem(
                "sequence_parallel expects a different shard of the sequence on each rank of tp, "
                "but all ranks got the same full sequence",
                fix="give the embedding the style vocab, which shards its output along the "
                "sequence, or leave sequence_parallel out",
            )
        )


_entered: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
"""Inputs of styled modules with what was made of them, while the parent module runs.

The parent keeps the inputs alive anyway. If the results were attributes of the inputs, they would
never be freed: a DTensor references its local tensor where the garbage collector cannot see it.
"""
_MOST_ENTERED: Final = 8
"""Most entries of `_entered`; the oldest is dropped first."""


def forget_entered(*unused: Any) -> None:
    """Clear the cache of styled modules' inputs, after their parent module has run."""
    _entered.clear()


def _local_at_use(model: nn.Module, placed: Placed) -> None:
    """Let the code of a module compute with the local tensor of a parameter in each forward.

    The gradient of a replicated parameter is summed over the ranks of tp.
    """
    gradient = None if placed.computed.axes else Partial()
    fqn = placed.info.fqn
    _at_use(model, fqn, lambda value: own_part(value, fqn, gradient))


def _gather_at_use(model: nn.Module, name: str) -> None:
    """All-gather a sharded parameter inside each forward of the module that holds it."""
    _at_use(model, name, DTensor.full_tensor)


def _at_use(model: nn.Module, name: str, see: Callable[[Any], torch.Tensor]) -> None:
    """Let the module that holds a parameter compute with `see(parameter)` during each forward.

    `forward` is wrapped, instead of hooked, so that a recomputed forward applies `see` again.

    Args:
        model: The model that contains the parameter.
        name: Fully qualified name of the parameter.
        see: Maps the DTensor parameter to the tensor to compute with.
    """
    fqn, _, leaf = name.rpartition(".")
    owner = model.get_submodule(fqn)
    forward = owner.forward

    @wraps(forward)
    def seeing(*args: Any, **kwargs: Any) -> Any:
        # An instance attribute hides the parameter of the same name from `self.<leaf>`. If one
        # exists already it takes precedence: FSDP may have resharded the parameter since.
        hidden = vars(owner).get(leaf)
        value = owner._parameters[leaf] if hidden is None else hidden
        vars(owner)[leaf] = see(value) if hidden is None or isinstance(hidden, DTensor) else hidden
        try:
            return forward(*args, **kwargs)
        finally:
            if hidden is None:
                vars(owner).pop(leaf, None)
            else:
                vars(owner)[leaf] = hidden

    owner.forward = seeing
