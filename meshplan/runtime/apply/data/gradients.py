"""Agreement of the data ranks, after each backward, on which parameters have a gradient.

A parameter may get a gradient on one rank and none on another: an expert that saw no token, a
branch that was not taken. FSDP2 packs those gradients of a unit that a rank has, so gradients of
different parameters would be added to one another, without an error if the packed sizes are equal.
Here a missing gradient is set to zeros before the reduction. If no rank had a gradient, it is
removed again afterwards, since optimizers treat zero and None differently.

The ranks must also have reduced the same units in the same order; otherwise parameters and
gradients of different units were mixed, and an error is raised. Gradients of parameters that belong
to no unit are averaged here.

The agreement is one all-reduce, called vote here. On the CPU every rank waits for its result. There
it is started just before the unit that was the last to reduce in the previous step, so that both
reductions overlap. If another unit still reduces after that, the ranks vote again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.fake_mode import is_fake_execution, numbers
from meshplan.runtime.base.mesh import device, local_of, submesh
from meshplan.runtime.torch_private.private import on_reduction

_EVERY: Final = 16
"""On an accelerator, steps between checks that all ranks reduced the same units; each check waits
for the device.
"""


class _GradientVote(NamedTuple):
    """An all-reduce of this rank's gradient flags that is in flight.

    Attributes:
        own: For each trained parameter 1 if it has a gradient on this rank, else 0; then the
            checksum of all reductions so far, and its negative.
        every: Maximum of `own` over the data ranks, valid once `work` is done.
        work: Handle of the all-reduce.
    """

    own: list[int]
    every: torch.Tensor
    work: Any


@dataclass(slots=True)
class _Backward:
    """Observations from the backwards of the current step.

    Attributes:
        real: Ids of parameters that had a gradient in one of these backwards, or before them.
        filled: Ids of parameters whose missing gradient was set to zeros in one of them.
        reductions: Number of reductions of units that have begun.
        vote: The vote that was started early, before one of these reductions; None if none was.
    """

    real: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)
    reductions: int = 0
    vote: _GradientVote | None = None


class _Agreement:
    """Hooks and state with which data ranks agree which parameters of one model have gradients."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        self.group = submesh(mesh, GRADIENT_AXES, flat=True).get_group()
        self.ranks = plan.mesh.size(*GRADIENT_AXES)
        placed = plan.assignment.tensors
        live = {
            fqn: model.get_parameter(fqn)
            for fqn, p in placed.items()
            if not p.info.is_buffer and p.info.numel
        }
        self.all = list(live.values())
        self.numbers = {id(p): n.to_bytes(4, "little") for n, p in enumerate(self.all)}
        self.by_unit: dict[str | None, list[nn.Parameter]] = {}
        for fqn, param in live.items():
            self.by_unit.setdefault(placed[fqn].unit, []).append(param)
        self.alone = [param for fqn, param in live.items() if placed[fqn].reduced_alone]
        self.renew()
        self.backward = _Backward()
        self.calls = 0
        self.steps = 0
        self.reductions = 0
        self.has_groups = False
        for fqn in plan.assignment.units:
            unit = model.get_submodule(fqn)
            self.has_groups |= on_reduction(unit, self._fill, self._begin, self._finish)

    def renew(self) -> None:
        """Read again which parameters require a gradient."""
        self.params = [param for param in self.all if param.requires_grad]
        # A vote may start early only if every unit reduces. Otherwise, ranks that call units in
        # different orders would start it between different reductions.
        all_reduce = all(any(p.requires_grad for p in own) for own in self.by_unit.values())
        self.may_vote_early = all_reduce and not self.alone and not is_fake_execution()

    def _fill(self, param: nn.Parameter, has_gradient: bool) -> bool:
        """Record whether a parameter of a unit that is about to reduce has a gradient.

        Args:
            param: The parameter.
            has_gradient: True if the parameter has a gradient waiting to be reduced.

        Returns:
            True if the parameter's gradient must be filled with zeros.
        """
        own, backward = id(param), self.backward
        # The checksum is never reset, so that ranks whose reductions differed once always differ.
        self.calls = zlib.crc32(self.numbers.get(own, b""), self.calls)
        has_been_filled = own in backward.filled  # By an earlier microbatch.
        if has_gradient or (param.grad is not None and not has_been_filled):
            backward.real.add(own)
        elif param.requires_grad:
            backward.filled.add(own)
        return param.requires_grad and not has_gradient

    def _begin(self) -> None:
        """Start the vote if the unit that is about to reduce is likely to be the last one."""
        self.backward.reductions += 1
        # All ranks agreed on `reductions` in the previous step, so all start the vote between the
        # same two reductions.
        is_last = self.backward.reductions == self.reductions
        if is_last and self.may_vote_early and device().type == "cpu":
            self.backward.vote = self._start_vote(self.backward)

    def _finish(self) -> None:
        """After a step's last backward, average gradients outside of units, and remove zeros.

        A gradient is removed if it was filled with zeros on all ranks, because no rank had one.
        """
        done, self.backward = self.backward, _Backward()
        if self.has_groups and not done.reductions:
            return
        for param in self.alone:
            self._average(param, done)
        self.steps += 1
        if done.vote is not None:
            exist = self._result_of(done.vote)
        if done.vote is None or done.reductions != self.reductions:
            vote = self._start_vote(done)
            is_due = device().type == "cpu" or self.steps < _EVERY or self.steps % _EVERY == 0
            if not done.filled - done.real and not is_due:
                return  # This rank filled no gradient, so the vote removes none.
            exist = self._result_of(vote)
        self.reductions = done.reductions
        for param, exists in zip(self.params, exist, strict=True):
            if not exists:
                param.grad = None

    def _start_vote(self, done: _Backward) -> _GradientVote:
        missing = done.filled - done.real
        own: list[int] = [id(param) not in missing for param in self.params]
        own += [self.calls, -self.calls]
        every = torch.tensor(own, dtype=torch.int64).to(device())
        work = dist.all_reduce(every, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return _GradientVote(own, every, work)

    def _result_of(self, vote: _GradientVote) -> list[int]:
        """Wait for a vote; return, per trained parameter, 1 if any rank has a gradient, else 0.

        Raises:
            ApplyError: The ranks reduced different units, or in a different order.
        """
        vote.work.wait()
        *exist, largest, smallest = numbers(vote.every, vote.own)
        if largest != -smallest:
            raise ApplyError(_other_calls())
        return exist

    def _average(self, param: nn.Parameter, done: _Backward) -> None:
        """Average the gradient of a parameter that no unit reduces over the data ranks.

        A gradient that remains from an earlier step is equal on all ranks already, so averaging it
        again does not change it.
        """
        if not param.requires_grad:
            return
        if param.grad is None:
            done.filled.add(id(param))
            param.grad = torch.zeros_like(param)
        gradient = local_of(param.grad)
        dist.all_reduce(gradient, group=self.group)  # gloo has no AVG.
        gradient /= self.ranks


def _other_calls() -> Problem:
    return Problem(
        "the ranks called different units, or the same units in a different order, and collectives "
        "mixed the parameters and gradients of different modules",
        fix="seed the generator that decides which modules run (as in layerdrop) identically on "
        "all ranks, or set unit: false for modules that do not always run",
    )


def agree_on_gradients(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> Callable[[], None]:
    """Make the data ranks agree after each backward on which parameters have a gradient.

    Returns:
        A function to call after parameters were frozen or unfrozen.

    Assumes: `fully_shard` is applied to the units, and their parameters are allocated.
    """
    if plan.assignment.wrapper == "units" and plan.mesh.size(*GRADIENT_AXES) > 1:
        return _Agreement(model, plan, mesh).renew  # The hooks keep it alive.
    return lambda: None
