"""What the data ranks must agree on after each backward: which gradients there are.

A parameter may get a gradient on one rank and none on another: an expert that saw no token, a
branch that was not taken. FSDP2 packs the gradients that a rank has, so packs of other gradients
would be added to one another, without a word where they are of one size. Here a gradient that is
missing counts as zero, and is taken away again if no rank had it: optimizers tell zero from none.

The ranks must also have reduced the same units in the same order, or parameters and gradients of
other units were mixed; and gradients that no unit reduces are averaged.

On the CPU every rank waits for the answer. It is asked just before the unit that was the last to
reduce in the step before, so that it comes while that reduces; if others reduce after it, the ranks
are asked again.
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
"""Steps between comparisons of calls on an accelerator, which must wait for its work to be read."""


class _GradientVote(NamedTuple):
    """What this rank has told the others, and what they will have answered.

    Attributes:
        own: For each trained parameter whether it has a gradient here, and the calls.
        every: The largest of these over all ranks, once `work` is done.
    """

    own: list[int]
    every: torch.Tensor
    work: Any


@dataclass(slots=True)
class _Backward:
    """What happened in the backwards of the running step.

    Attributes:
        real: Parameters that had a gradient of their own when it was reduced, or before, by id.
        filled: Parameters that had none and got zeros.
        reductions: How many units have begun to reduce.
        asked: What was asked before one of them.
    """

    real: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)
    reductions: int = 0
    asked: _GradientVote | None = None


class _Agreement:
    """One model's gradients on this rank."""

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
        """Look again at which parameters are trained."""
        self.params = [param for param in self.all if param.requires_grad]
        # Where some units do not reduce, ranks that called them in another order would send what
        # they tell between other reductions.
        all_reduce = all(any(p.requires_grad for p in own) for own in self.by_unit.values())
        self.may_ask_early = all_reduce and not self.alone and not is_fake_execution()

    def _fill(self, param: nn.Parameter, has_gradient: bool) -> bool:
        """Note one parameter of a unit that is about to reduce; True to fill its gradient."""
        own, backward = id(param), self.backward
        # Folded into one number that is never reset: what differed once always does.
        self.calls = zlib.crc32(self.numbers.get(own, b""), self.calls)
        has_been_filled = own in backward.filled  # In a microbatch before this one.
        if has_gradient or (param.grad is not None and not has_been_filled):
            backward.real.add(own)
        elif param.requires_grad:
            backward.filled.add(own)
        return param.requires_grad and not has_gradient

    def _begin(self) -> None:
        """A unit is about to reduce: ask now if it is likely to be the last one."""
        self.backward.reductions += 1
        # All ranks agreed on the step before, so all ask between the same reductions.
        is_last = self.backward.reductions == self.reductions
        if is_last and self.may_ask_early and device().type == "cpu":
            self.backward.asked = self._ask(self.backward)

    def _finish(self) -> None:
        """After the last backward: average what is alone, compare notes with the other ranks."""
        done, self.backward = self.backward, _Backward()
        if self.has_groups and not done.reductions:
            return
        for param in self.alone:
            self._average(param, done)
        self.steps += 1
        if done.asked is not None:
            exist = self._heard(done.asked)
        if done.asked is None or done.reductions != self.reductions:
            asked = self._ask(done)
            is_due = device().type == "cpu" or self.steps < _EVERY or self.steps % _EVERY == 0
            if not done.filled - done.real and not is_due:
                return  # Nobody waits for an answer that changes nothing here.
            exist = self._heard(asked)
        self.reductions = done.reductions
        for param, exists in zip(self.params, exist, strict=True):
            if not exists:
                param.grad = None

    def _ask(self, done: _Backward) -> _GradientVote:
        missing = done.filled - done.real
        own: list[int] = [id(param) not in missing for param in self.params]
        own += [self.calls, -self.calls]
        every = torch.tensor(own, dtype=torch.int64).to(device())
        work = dist.all_reduce(every, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return _GradientVote(own, every, work)

    def _heard(self, asked: _GradientVote) -> list[int]:
        """For each trained parameter whether it has a gradient on any rank."""
        asked.work.wait()
        *exist, largest, smallest = numbers(asked.every, asked.own)
        if largest != -smallest:
            raise ApplyError(_other_calls())
        return exist

    def _average(self, param: nn.Parameter, done: _Backward) -> None:
        """Averaging what is averaged already changes nothing: gradients may be left standing."""
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
        "the ranks called other units than one another, or in another order, so parameters and "
        "gradients of different modules were mixed",
        fix="draw what decides which modules run (as layerdrop does) from a generator that is "
        "seeded alike on all ranks, or say unit: false for modules that do not always run",
    )


def agree_on_gradients(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> Callable[[], None]:
    """Keep the gradients of the data ranks in step, backward by backward.

    Returns:
        What to call when other parameters are trained than before.

    Assumes: units are wrapped and have their memory.
    """
    if plan.assignment.wrapper == "units" and plan.mesh.size(*GRADIENT_AXES) > 1:
        return _Agreement(model, plan, mesh).renew  # The hooks hold it.
    return lambda: None
