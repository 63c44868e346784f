"""One stage: the model's own forward, with stand-ins for what other stages run.

A stage is a copy of the module tree that shares the parameters it holds and has no others. Its
forward is the model's. Only calls of units are looked at: one of this stage runs as ever, one
of another is not run, and its result is what was received of it, or poison where nobody that
counts reads it. So everything between modules (masks, residuals, tables) is computed here again
from the model's inputs, and every wrapper works on ordinary modules.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointFunction

from meshplan.assign.types import Stages
from meshplan.errors import ApplyError, Problem
from meshplan.model.flow import Call, Flow
from meshplan.model.graph import ModelGraph
from meshplan.model.stage_boundary import Relay
from meshplan.runtime.apply.pipeline.hooks import UnitHooks, numbers_of
from meshplan.runtime.base.mesh import device
from meshplan.runtime.base.pytree import fill, tensors_in
from meshplan.runtime.torch_private.private import intercept_calls

_HooksOf = tuple[nn.Module, UnitHooks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What stages do for inputs of one form.

    Args:
        flow: The forward on these inputs.
        calls: The units' calls, in order.
        stages: Of each call.
        forms: Of each call's result.
        relay: What crosses each cut.
        written: Values that something writes over.
        keeps_state: What stands between units leaves something for the next forward.
        last: The last stage.
        answer: The form of what the model returns.
    """

    flow: Flow
    calls: tuple[Call, ...]
    stages: tuple[int, ...]
    forms: tuple[Any, ...]
    relay: Relay
    written: frozenset[int]
    keeps_state: bool
    last: int
    answer: Any

    def sent(self, stage: int) -> tuple[int, ...]:
        """What a stage hands to the next."""
        return self.relay.crossing[stage] if stage < len(self.relay.crossing) else ()


class _StageDone(BaseException):
    """Everything that leaves the stage is there; not an Exception, which the model may catch."""


@dataclass(slots=True)
class Replay:
    """The run of one microbatch through one stage.

    Attributes:
        stage: Which one.
        program: The present one; None outside of a run.
        received: Values from the stage before.
        kept: Values for the stage behind, and those handed out, by value id.
    """

    stage: int
    program: Program | None = None
    received: Mapping[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    _given: dict[int, torch.Tensor] = field(default_factory=dict)
    _place: int = 0
    _is_inside: bool = False
    _has_grad: bool = False

    def forward(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The stage's forward: what it sends, or the model's output in the last stage."""
        program = self.program
        assert program is not None
        self._place, self._is_inside = 0, False
        self._has_grad = torch.is_grad_enabled()
        self.kept, self._given = {}, {}
        output = None
        try:
            output = model(*args, **kwargs)
        except _StageDone:
            pass
        except ApplyError:
            raise
        except Exception as error:
            if self._is_inside:
                raise  # A module of this stage, which runs as ever.
            raise ApplyError(_glue_problem(self.stage, error)) from error
        else:
            if self._place < len(program.calls):
                raise self._strayed(program.calls[self._place].module, "it was not called")
        if self.stage == program.last:
            paths = [path for path, _ in tensors_in(output)]
            if paths != [path for path, _ in program.flow.outputs]:
                raise self._strayed("the end", "it returned other tensors")
            return output
        return tuple(self._outgoing(value) for value in program.sent(self.stage))

    def forget(self) -> None:
        """Hold no tensor of a run that is over."""
        self.kept, self._given = {}, {}

    def call(
        self, fqn: str, hooks: _HooksOf, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A call of a unit's module."""
        program = self.program
        if program is None or self._is_inside:  # Recomputed in backward, or inside a unit.
            return run(*args, **kwargs)
        place = self._place
        if place >= len(program.calls) or program.calls[place].module != fqn:
            expected = program.calls[place].module if place < len(program.calls) else "nothing"
            raise self._strayed(fqn, f"'{expected}' was expected")
        if self._has_grad and not torch.is_grad_enabled() and _is_reentrant():
            raise ApplyError(
                Problem(
                    f"the model recomputes '{fqn}' by checkpoint(..., use_reentrant=True), which "
                    "cuts off the gradients of what other stages sent",
                    fix="use use_reentrant=False in the model, or leave it to the plan's "
                    "activation_checkpointing",
                )
            )
        self._place += 1
        call = program.calls[place]
        if program.stages[place] != self.stage:
            output = fill(program.forms[place], self._stand_ins(call, args, kwargs))
            module, found = hooks
            found.call(module, fqn, args, kwargs, output)
            return output
        self._is_inside = True
        output = run(*args, **kwargs)
        self._is_inside = False
        self._keep(call, output)
        if not program.keeps_state and self.stage < program.last and not self._has_more():
            raise _StageDone
        return output

    def _has_more(self) -> bool:
        """Whether a later call is of this stage too."""
        assert self.program is not None
        return self.stage in self.program.stages[self._place :]

    def _strayed(self, fqn: str, how: str) -> ApplyError:
        return ApplyError(
            Problem(
                f"the forward took another way than when it was recorded: at '{fqn}', {how}",
                fix="a pipeline needs a forward whose module calls depend on the shapes of its "
                "inputs alone",
            )
        )

    def _keep(self, call: Call, output: Any) -> None:
        program = self.program
        assert program is not None
        wanted = set(program.sent(self.stage))
        found = [tensor for _, tensor in tensors_in(output)]
        if len(found) != len(call.outputs):
            raise self._strayed(call.module, "it returned another number of tensors")
        for (_, value), tensor in zip(call.outputs, found, strict=True):
            if value in wanted and value not in self.kept:
                if isinstance(tensor, DTensor):
                    raise ApplyError(
                        Problem(
                            f"'{call.module}' returns a DTensor, which cannot be sent to the next "
                            "stage",
                            fix="give it a style whose output is local, or cut elsewhere",
                        )
                    )
                self.kept[value] = tensor.clone() if value in program.written else tensor

    def _outgoing(self, value: int) -> torch.Tensor:
        # Neither a leaf, in which a backward would end twice, nor a view, of which FSDP2 warns.
        if value in self.received:
            return self.received[value].clone()
        kept = self.kept[value]
        return kept.clone() if kept._is_view() else kept

    def _stand_ins(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[int], torch.Tensor]:
        """What the result of a call that is not run is made of."""
        # A module may return what it was given: that is here.
        arguments = [tensor for _, tensor in (*tensors_in(args), *tensors_in(kwargs))]
        here = dict(zip((v for _, v in call.inputs), arguments, strict=False))
        program = self.program
        assert program is not None

        def get(value: int) -> torch.Tensor:
            if value in here and len(arguments) == len(call.inputs):
                return here[value]
            if value not in self._given:
                if value in self.received:
                    leaf = self.received[value]
                    is_written = value in program.written
                    self._given[value] = leaf.clone() if is_written else leaf.view_as(leaf)
                else:
                    given = poison(program.flow, value)
                    # What is written over needs memory of its own.
                    self._given[value] = given.contiguous() if value in program.written else given
            return self._given[value]

        return get


def _glue_problem(stage: int, error: Exception) -> Problem:
    first = (str(error).strip() or repr(error)).splitlines()[0]
    return Problem(
        f"stage {stage} cannot run what lies between its modules without those of other stages: "
        f"{type(error).__name__}: {first}",
        fix="cut elsewhere (pipeline: {split: [...]}), or leave pp out",
    )


def _is_reentrant() -> bool:
    """Whether a reentrant checkpoint is running what is called now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def poison(flow: Flow, value: int) -> torch.Tensor:
    """A tensor of the right shape that holds no memory, and NaN where its dtype has that."""
    info = flow.values[value]
    return _poison(info.shape, getattr(torch, info.dtype))


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    number = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), number, dtype=dtype, device=device()).expand(shape)


def make_stage(model: nn.Module, graph: ModelGraph, stages: Stages, stage: int) -> nn.Module:
    """A copy of the model that holds what the stage holds, and nothing else."""
    # Buffers are copied: what writes one runs in every stage of this rank.
    part = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    kept = {
        name
        for tensor in graph.tensors.values()
        if stage in stages.tensors[tensor.fqn]
        for name in tensor.names
    }
    for fqn, module in part.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for leaf, tensor in list(table.items()):
                if tensor is not None and (f"{fqn}.{leaf}" if fqn else leaf) not in kept:
                    del table[leaf]
                    # Code between modules may ask for its dtype, or compute with it what nobody
                    # reads here.
                    vars(module)[leaf] = _poison(tuple(tensor.shape), tensor.dtype)
                    # A `train` of the module's own may write into what is not here, as adapters
                    # that are merged for evaluation do.
                    vars(module)["train"] = partial(_set_mode, module)
    return part


def _set_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """Do what `nn.Module.train` does, past an override of it."""
    return nn.Module.train(module, mode)


def watch_calls(part: nn.Module, own: Mapping[str, frozenset[int]], replay: Replay) -> None:
    """Let the replay decide what the calls of the units do.

    Args:
        own: Per unit, the hooks that it had before it was wrapped.

    Assumes: everything else is applied: what leaves a unit is what its last wrapper returns.
    """
    for fqn, numbers in own.items():
        module = part.get_submodule(fqn)
        hooks = UnitHooks(numbers_of(module) - numbers)
        intercept_calls(module, partial(replay.call, fqn, (module, hooks)))
    part.forward = partial(replay.forward, part.forward)
