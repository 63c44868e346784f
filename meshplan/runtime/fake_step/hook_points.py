"""Record where FSDP2 would act in a microbatch, while the model runs without FSDP2.

Our hooks are where FSDP2 has its hooks: before and after the forward of a unit, at the gradients of
its outputs, and after the gradients of its inputs. They cast inputs and outputs as FSDP2 does, and
otherwise only record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.assign import Unit
from meshplan.assign.base.types import Reason
from meshplan.memory.log.events import Term
from meshplan.memory.log.microbatch import HookKind, HookPoint
from meshplan.plan.plan import Plan
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.torch_private.private import at_end_of_backward
from meshplan.runtime.torch_private.values import (
    tensors_with_gradient,
    with_floats_as,
    with_tensors_replaced,
)
from meshplan.spec.spec import Precision


class HookPointRecorder:
    """Records the hook points of a microbatch, and the gradients that the microbatch computes.

    Args:
        tracker: The memory tracker that numbers the events.
        params: The trainable parameters, by fqn.
        at: Suffix of every recorded name, which names the pipeline stage; "" without a pipeline.
        hook_points: List that hook points are appended to, for several recorders that share it;
            None for a new list.

    Attributes:
        hook_points: The hook points, in order.
        gradients: The number of the storage of a parameter's first gradient, by name.
        later_gradients: (event, name, number of the storage) of each later gradient of a parameter.
        ready: The index of the event before which a parameter's first gradient existed, by name.
        kept_alive: All gradients, kept alive: when they are freed is decided by the wrapper's
            reduction, which is not part of the trace.
        grad_relayout: (bytes, number of the storage) of each event that redistributes a parameter's
            gradient to the layout of the parameter, by name.
        has_cast: True once a unit has changed the dtype of an input or output.
    """

    def __init__(
        self,
        tracker: MemoryTracker,
        params: Mapping[str, nn.Parameter],
        at: str = "",
        hook_points: list[HookPoint] | None = None,
    ) -> None:
        self._tracker, self._params, self._at = tracker, params, at
        self._ready_at: dict[str, int] = {}
        self._is_ending = False
        self._units: list[_HookedUnit] = []
        self.hook_points = [] if hook_points is None else hook_points
        self.later_gradients: list[tuple[int, str, int]] = []
        self.gradients: dict[str, int] = {}
        self.ready: dict[str, int] = {}
        self.kept_alive: list[torch.Tensor] = []
        self.grad_relayout: dict[str, tuple[tuple[int, int], ...]] = {}
        self.has_cast = False
        for fqn, param in params.items():
            param.register_post_accumulate_grad_hook(partial(self._note_ready, fqn))

    def watch(self, module: nn.Module, unit: Unit, owned: Sequence[str]) -> None:
        """Record hook points where the wrapper of a unit would act.

        Args:
            module: The module that the unit wraps.
            unit: The unit of the plan.
            owned: The fqns of the parameters that the unit would gather and reduce.
        """
        self._units.append(_HookedUnit(module, unit, tuple(owned), self))

    def clear(self) -> None:
        """Discard the record, and all gradients of parameters, before another microbatch."""
        self.hook_points.clear()
        self.gradients, self.ready, self.grad_relayout = {}, {}, {}
        self.later_gradients, self.kept_alive, self._ready_at = [], [], {}
        for param in self._params.values():
            param.grad = None

    def note(self, kind: HookKind, unit: str) -> None:
        """Record a hook point of this kind, of the unit with this fqn, at the current event."""
        self.hook_points.append(HookPoint(self._tracker.num_events, kind, unit + self._at))

    def take(self, fqns: tuple[str, ...]) -> None:
        """Record the gradients of these parameters and set `grad` to None, as a reduction does."""
        for fqn in fqns:
            param = self._params.get(fqn)
            if param is None or param.grad is None:  # The parameter is frozen or unused.
                continue
            gradient, param.grad = param.grad, None
            name, event = fqn + self._at, self._ready_at.pop(fqn, self._tracker.num_events)
            storage = self._tracker.numbers_of(gradient)[0]
            if name in self.gradients:
                self.later_gradients.append((event, name, storage))
            else:
                self.gradients[name], self.ready[name] = storage, event
            self.kept_alive.append(gradient)
            self._relayout(name, param, gradient)

    def _note_ready(self, fqn: str, param: torch.Tensor) -> None:
        # Until `take`, later gradients accumulate into the first, whose event is the one to keep.
        self._ready_at.setdefault(fqn, self._tracker.num_events)
        if param.grad is not None:
            self._tracker.set_term([param.grad], Term.GRADIENTS)

    def _relayout(self, name: str, param: nn.Parameter, gradient: torch.Tensor) -> None:
        """Redistribute a gradient to its parameter's layout; its events go to `grad_relayout`.

        FSDP2 redistributes the gradient when it reduces it, which is not part of the trace.
        """
        if not isinstance(gradient, DTensor) or not isinstance(param, DTensor):
            return
        if gradient.placements == param.placements:
            return
        first = self._tracker.num_events
        self.kept_alive.append(gradient.redistribute(placements=param.placements))
        if events := self._tracker.cut(first):
            self.grad_relayout[name] = tuple((event.delta, event.storage) for event in events)

    def begin_backward(self) -> None:
        """Arrange, when the first unit's backward begins, that the end of backward is recorded."""
        if not self._is_ending:
            self._is_ending = True
            at_end_of_backward(self._end)

    def finish(self) -> None:
        """Record the gradients that belong to no unit, at the end of the microbatch."""
        self.take(tuple(self._params))

    def _end(self) -> None:
        self._is_ending = False
        self.note(HookKind.END_OF_BACKWARD, "")
        self.take(tuple(self._params))
        for unit in self._units:
            unit.is_in_backward = False


class BlockRecorder:
    """Records the storages that blocks are called with, and the hook points of those without units.

    It is made after the hooks of the units, so that it sees inputs after the unit's cast.

    Args:
        model: The model without wrappers.
        plan: The plan, whose units `recorder` watches already.
        blocks: Fqns of blocks of `model`.
        tracker: The memory tracker that numbers the storages.
        recorder: The recorder of hook points.

    Attributes:
        taken: For each block that ran since `clear`, the storages of the tensors it was given.
        input_bytes: Most bytes of inputs that require grad, of any block that ran since `clear`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        blocks: Collection[str],
        tracker: MemoryTracker,
        recorder: HookPointRecorder,
    ) -> None:
        self._tracker, self._recorder = tracker, recorder
        self.clear()
        for block in blocks:
            module = model.get_submodule(block)
            if block not in plan.assignment.units:
                alone = Unit(
                    fqn=block, shard_axes=(), replicate_axes=(), reshard_after_forward=False,
                    precision=Precision(), reason=Reason("marked"), casts_inputs=False,
                )  # fmt: skip
                # The recorder skips units without parameters, so name one that does not exist: "".
                recorder.watch(module, alone, ("",))
            module.register_forward_pre_hook(partial(self._take, block), with_kwargs=True)

    def clear(self) -> None:
        """Discard the record before another microbatch."""
        self.taken: dict[str, tuple[int, ...]] = {}
        self.input_bytes = 0

    @property
    def has_cast(self) -> bool:
        """True once a unit has changed the dtype of an input or output."""
        return self._recorder.has_cast

    def _take(self, block: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        numbers = [number for tensor in given for number in self._tracker.numbers_of(tensor)]
        differentiated = sum(tensor.nbytes for tensor in given if tensor.requires_grad)
        self.input_bytes = max(self.input_bytes, differentiated)
        before = self.taken.get(block, ())
        self.taken[block] = tuple(dict.fromkeys((*before, *numbers)))


class _HookedUnit:
    """The hooks of one unit.

    Attributes:
        is_in_backward: If True, a gradient of the unit's outputs exists in the running backward, so
            that a forward of the unit is a recomputation.
    """

    def __init__(
        self, module: nn.Module, unit: Unit, owned: tuple[str, ...], recorder: HookPointRecorder
    ) -> None:
        self.is_in_backward = False
        self._fqn, self._owned, self._recorder = unit.fqn, owned, recorder
        precision = unit.precision
        self._taken = _dtype(precision.param) if unit.casts_inputs else None
        self._given = _dtype(precision.output)
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.is_in_backward:  # In recomputation FSDP2 gathers before it casts.
            self._recorder.note(HookKind.BEFORE_FORWARD, self._fqn)
            return self._cast(args, kwargs)
        args, kwargs = self._cast(args, kwargs)
        self._recorder.note(HookKind.BEFORE_FORWARD, self._fqn)
        taken = tensors_with_gradient((args, kwargs)) if torch.is_grad_enabled() else ()
        if not taken or not self._owned:
            return args, kwargs
        # A unit's backward ends when the gradients of all its inputs exist.
        passed = _AfterBackward.apply(self._end_backward, *taken)
        out: tuple[tuple[Any, ...], dict[str, Any]]
        out = with_tensors_replaced((args, kwargs), passed)
        return out

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._recorder.note(HookKind.AFTER_FORWARD, self._fqn)
        if not self.is_in_backward and torch.is_grad_enabled():
            for tensor in tensors_with_gradient(output):
                tensor.register_hook(self._begin_backward)
        return output if self._given is None else self._as(output, self._given)

    def _cast(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._taken is None:
            return args, kwargs
        return self._as(args, self._taken), self._as(kwargs, self._taken)

    def _as(self, value: Any, dtype: torch.dtype) -> Any:
        self._recorder.has_cast |= any(
            tensor.is_floating_point() and tensor.dtype != dtype for _, tensor in tensors_in(value)
        )
        return with_floats_as(value, dtype)

    def _begin_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self.is_in_backward = True
        self._recorder.begin_backward()
        self._recorder.note(HookKind.BEFORE_BACKWARD, self._fqn)
        return gradient

    def _end_backward(self) -> None:
        self._recorder.note(HookKind.AFTER_BACKWARD, self._fqn)
        self._recorder.take(self._owned)


class _AfterBackward(torch.autograd.Function):
    """Return the inputs unchanged; in backward, call `call` when the gradients of all exist."""

    @staticmethod
    def forward(call: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.call()
        return (None, *gradients)


def _dtype(word: str | None) -> torch.dtype | None:
    return getattr(torch, word) if word else None
