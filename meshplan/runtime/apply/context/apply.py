"""Apply context parallelism to a live model: one step before other wrappers, one step after."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.context.attention import MASKED, SequenceMode, answer_for_whole
from meshplan.runtime.apply.context.batch import Feed, sequence_length
from meshplan.runtime.apply.context.parts import Parts
from meshplan.runtime.apply.context.proof import prove
from meshplan.runtime.base.fake_mode import numbers
from meshplan.runtime.base.mesh import device, raise_first


class ContextParallelism:
    """Context parallelism of one model; does nothing without a cp axis.

    The constructor is the step before other wrappers are applied, `watch` the step after.

    Args:
        model: The model before it is wrapped; its forwards are wrapped in place.
        plan: The plan of the model.
        mesh: The live DeviceMesh.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        self._plan, self._mode = plan, None
        context = plan.assignment.context
        if context is None:
            return
        parts = Parts.of(context, mesh)
        self._mode = SequenceMode(parts)
        self._feed = Feed(model, parts)
        answer_for_whole(model, self._mode)

    def watch(self, model: nn.Module) -> None:
        """Register hooks that prove the model at each new length and pass positions to it.

        Args:
            model: The wrapped model.
        """
        if self._mode is not None:
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            model.register_forward_hook(self._after)

    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        mode = self._mode
        assert mode is not None
        if mode.trial is not None:
            return None
        mode.refused, mode.is_fed = None, True
        hides = self._feed.hides_tokens(args, kwargs)
        if hides is not None:
            mode.refused = MASKED if hides else None
            self._raise_on_all_ranks(mode.refused)
        stated = self._plan.spec.batch.seq_len
        part = stated // mode.parts.size if stated is not None else None
        length = sequence_length((args, kwargs), part)
        local_kwargs = self._feed.with_positions(args, kwargs, length)
        if length not in mode.lengths:
            prove(model, mode, args, kwargs, local_kwargs, length)
        return args, local_kwargs

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Raise on every rank if any rank could not answer a call for the whole sequence."""
        mode = self._mode
        assert mode is not None
        if mode.trial is None:
            mode.is_fed = False
            self._raise_on_all_ranks(mode.refused)

    def _raise_on_all_ranks(self, problem: Problem | None) -> None:
        is_refused = torch.tensor(float(problem is not None), device=device())
        dist.all_reduce(is_refused, op=dist.ReduceOp.MAX)
        if numbers(is_refused, float(problem is not None)):
            raise_first(problem)
