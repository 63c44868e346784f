"""Activation checkpointing: rerun `module.forward` in backward instead of saving its activations.

The `forward` of the module instance is replaced, so fqns and the module tree stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.tensor_parallel.local_tensors import makes_addends
from meshplan.runtime.apply.tensor_parallel.tensor_parallel import forget_entered
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import sums_over_ranks
from meshplan.runtime.base.optimizer_steps import is_due
from meshplan.runtime.checks.forward_writes import refuse_second_writes
from meshplan.runtime.checks.kept_numbers import KeptNumbers, KeptValues

_OPS: dict[str, tuple[str, ...]] = {
    "mm": ("mm", "addmm", "_grouped_mm"),
    "bmm": ("bmm", "baddbmm"),
    "conv": ("convolution",),
    "sdpa": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}
"""Names for groups of aten ops in `save:` of a plan, and the ops that each stands for."""

_RECORDS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


def apply_recompute(model: nn.Module, plan: Plan) -> None:
    """Wrap the forward of every module that the plan recomputes, in place."""
    for fqn, recompute in plan.assignment.recompute.items():
        module = model.get_submodule(fqn)
        context: dict[str, Any] = {}
        if recompute.policy.mode == "selective":
            saved = _saved_ops(recompute.policy.kept, recompute.reason.origin)
            # torch.compile would save the tensor of a sum over ranks before the collective's wait,
            # and its graph has no DTensor by which `_contracts_shards` could tell partial sums.
            if recompute.policy.keeps_sums and not plan.spec.compile:
                saved |= sums_over_ranks()
            # Recomputing an FSDP unit that is still gathered calls `record_function` differently
            # than its forward did; torch raises for any op that was not seen in forward.
            SAC_IGNORED_OPS.update(_RECORDS)
            context["context_fn"] = partial(
                create_selective_checkpoint_contexts, partial(_policy, saved)
            )
        module.forward = _recomputed(module, context)


def _recomputed(module: nn.Module, context: dict[str, Any]) -> Callable[..., Any]:
    forward, moving = module.forward, _ForwardState(module)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        twice = forward if torch.compiler.is_compiling() else moving.as_at_first(forward)
        return checkpoint(twice, *args, use_reentrant=False, **context, **kwargs)

    return run


class _ForwardState:
    """State that a module's forward writes: running statistics, counters, averages.

    It covers buffers and `KeptNumbers`. A recomputed forward must read the
    values that the first forward read, or it computes something else, and must not write them a
    second time.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[tuple[bool, ...], list[tuple[nn.Module, str]]] = {}
        self._numbers, self._calls = KeptNumbers(), 0

    def as_at_first(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward so that its second call reads the state that its first call read.

        After the second call, buffers and attributes have the values from before it.
        """
        starts: dict[tuple[nn.Module, str], torch.Tensor] | None = None
        numbers: KeptValues = {}
        kept = self._numbers

        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal starts, numbers
            if starts is None:
                self._calls += 1
                if is_due(self._calls):
                    kept.look(self._module)
                numbers = kept.values()
                starts, output = self._first(forward, args, kwargs)
                numbers |= kept.settle()
                return output
            last = kept.values()
            ends = {(owner, name): owner._buffers[name] for owner, name in starts}
            try:
                kept.put(numbers)
                # Clones, because autograd saves the tensors that this forward reads.
                for (owner, name), start in starts.items():
                    owner._buffers[name] = start.clone()
                return forward(*args, **kwargs)
            finally:  # Also reached if torch stops recomputing early (set_checkpoint_early_stop).
                for (owner, name), end in ends.items():
                    owner._buffers[name] = end
                kept.put(last)
                # A hook of the parent clears the cache of TP inputs, but does not run here: only
                # this module is recomputed.
                forget_entered()
                refuse_second_writes(self._module)

        return call

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._module.modules())

    def _first(
        self, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[dict[tuple[nn.Module, str], torch.Tensor], Any]:
        """Run the first forward; return (previous values of the buffers it wrote, its output)."""
        modes = self._modes()
        places = self._known.get(modes)
        watched = self._all() if places is None else places
        before = {(owner, name): owner._buffers[name] for owner, name in watched}
        starts = {place: b.detach().clone() for place, b in before.items() if b is not None}
        versions = {place: _version_of(b) for place, b in before.items()}
        output = forward(*args, **kwargs)
        if places is None:  # Once per mode, since comparing values waits for the device.
            written = [p for p in starts if not _is_same(p, before[p], starts[p], versions[p])]
            self._known[modes] = written
            starts = {place: starts[place] for place in written}
        return starts, output

    def _all(self) -> list[tuple[nn.Module, str]]:
        return [(owner, name) for owner in self._module.modules() for name in owner._buffers]


def _version_of(buffer: torch.Tensor | None) -> int:
    """Return the tensor's in-place version counter (`Tensor._version`); 0 for None."""
    return 0 if buffer is None else buffer._version


def _is_same(
    place: tuple[nn.Module, str], before: torch.Tensor | None, start: torch.Tensor, version: int
) -> bool:
    """Return True if a buffer is still the same tensor with the same values.

    Fake tensors have no values; for them, return True if nothing was written in place.

    Args:
        place: (module, name) of the buffer.
        before: The tensor that was the buffer before.
        start: A copy of its values at that time.
        version: Its in-place version counter at that time.
    """
    owner, name = place
    now = owner._buffers[name]
    if now is not before or now is None:
        return False
    return _version_of(now) == version if is_fake_execution() else torch.equal(now, start)


def _saved_ops(words: tuple[str, ...], origin: Any) -> frozenset[Any]:
    out: set[Any] = set()
    for word in words:
        names = _OPS.get(word, (word.removeprefix("aten."),))
        found = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
        if not found:
            raise ApplyError(
                Problem(
                    f"'{word}' is not an op whose output can be saved",
                    origin,
                    f"use {', '.join(_OPS)} or the name of an aten op",
                )
            )
        out.update(packet.default for packet in found)
    return frozenset(out)


def _policy(saved: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    if op in saved and not (makes_addends() or _contracts_shards(args)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _contracts_shards(args: tuple[Any, ...]) -> bool:
    """Return True for arguments of a matrix product whose contracted dim is sharded over tp.

    The result is a partial sum. Instead of it, the sum over ranks is saved
    (`spec.ActivationCheckpointing.keeps_sums`).
    """
    left = args[-2] if len(args) > 1 else None
    if not isinstance(left, DTensor):
        return False
    return any(placement.is_shard(left.ndim - 1) for placement in left.placements)
