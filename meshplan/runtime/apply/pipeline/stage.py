"""One pipeline stage: the model's own forward, with placeholders for units of other stages.

A stage is a copy of the module tree that has only this stage's parameters, shared with the model.
Its forward is the model's forward, in which calls of units are intercepted. A unit of this stage
runs normally. A unit of another stage is skipped, and its result is replaced: by the tensors that
this stage received for it, or by poison (NaN) if none were sent because nothing in this stage
depends on the result. Everything between units (masks, residuals, tables) is computed in every
stage from the model's inputs. Wrappers such as FSDP2 see ordinary modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointFunction

from meshplan.assign.base.types import Stages
from meshplan.errors import ApplyError, Problem
from meshplan.model.flow import Call, Flow
from meshplan.model.graph import ModelGraph
from meshplan.model.stage_boundary import Relay
from meshplan.runtime.apply.pipeline.hooks import call_hooks
from meshplan.runtime.base.mesh import device
from meshplan.runtime.base.model_copy import copy_model
from meshplan.runtime.base.pytree import fill, tensors_in
from meshplan.runtime.torch_private.private import intercept_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The work of every stage for inputs of one form (structure, shapes and dtypes).

    Args:
        flow: The recorded forward on such inputs.
        calls: The calls of units, in execution order.
        stages: Stage of each of these calls.
        forms: Pytree structure of each of these calls' results.
        relay: The values that are sent from stage to stage.
        written: Ids of values that are overwritten in place.
        keeps_state: True if code between units writes a buffer or an attribute that the next
            forward reads.
        last: Index of the last stage.
        answer: Pytree structure of the model's output.
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

    @property
    def writes_inputs(self) -> bool:
        """True if the forward overwrites one of its inputs, or a part of it."""
        return any(value in self.written for _, value in self.flow.inputs)

    def sent(self, stage: int) -> tuple[int, ...]:
        """Return the ids of the values that a stage sends to the next one."""
        return self.relay.crossing[stage] if stage < len(self.relay.crossing) else ()


class _StageDone(BaseException):
    """Raised to end a forward once everything that the stage sends is computed.

    It is not an Exception, because the model's code may catch those.
    """


@dataclass(slots=True)
class Replay:
    """The interception of unit calls while one microbatch runs through one stage.

    Attributes:
        stage: Index of the stage.
        program: The program of the current run; None outside of a run.
        received: Tensors from the previous stage, by value id.
        kept: Tensors to be sent to the next stage, by value id.
        _given: Placeholders returned as results of skipped calls so far, by value id.
        _place: Index in `program.calls` of the call that is expected next.
        _is_inside: True while a unit of this stage runs.
        _has_grad: True if gradients were enabled when the forward began.
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
        """Run the stage's forward.

        Args:
            model: The forward of the stage module.
            args: Positional inputs of the microbatch.
            kwargs: Keyword inputs of the microbatch.

        Returns:
            A tuple of the tensors that the stage sends; in the last stage the model's output.

        Raises:
            ApplyError: The forward differs from the recorded one, or code between units fails
                because it needs what a unit of another stage returns.
        """
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
                raise  # Raised by a unit of this stage.
            raise ApplyError(_glue_problem(self.stage, error)) from error
        else:
            if self._place < len(program.calls):
                raise self._strayed(program.calls[self._place].module, "the module was not called")
        if self.stage == program.last:
            paths = [path for path, _ in tensors_in(output)]
            if paths != [path for path, _ in program.flow.outputs]:
                raise self._strayed("the end", "the model returned different tensors")
            return output
        return tuple(self._outgoing(value) for value in program.sent(self.stage))

    def forget(self) -> None:
        """Drop the references to tensors of a finished run."""
        self.kept, self._given = {}, {}

    def call(
        self, fqn: str, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Handle a call of a unit: run it if it is of this stage, else return placeholders.

        Args:
            fqn: The unit's fqn.
            module: The unit, whose hooks are called with placeholders in other stages.
            run: The original call of the unit.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
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
                    "loses the gradients of tensors from other stages",
                    fix="pass use_reentrant=False in the model, or use activation_checkpointing "
                    "in the plan instead",
                )
            )
        self._place += 1
        call = program.calls[place]
        if program.stages[place] != self.stage:
            output = fill(program.forms[place], self._stand_ins(call, args, kwargs))
            call_hooks(module, fqn, args, kwargs, output)
            return output
        self._is_inside = True
        output = run(*args, **kwargs)
        self._is_inside = False
        self._keep(call, output)
        if not program.keeps_state and self.stage < program.last and not self._has_more():
            raise _StageDone
        return output

    def _has_more(self) -> bool:
        """Return True if a later call in the program belongs to this stage too."""
        assert self.program is not None
        return self.stage in self.program.stages[self._place :]

    def _strayed(self, fqn: str, how: str) -> ApplyError:
        return ApplyError(
            Problem(
                f"the forward took a different path than when it was recorded: at '{fqn}', {how}",
                fix="let the model's module calls depend only on the shapes of its inputs, or "
                "leave pp out",
            )
        )

    def _keep(self, call: Call, output: Any) -> None:
        program = self.program
        assert program is not None
        wanted = set(program.sent(self.stage))
        found = [tensor for _, tensor in tensors_in(output)]
        if len(found) != len(call.outputs):
            raise self._strayed(call.module, "the module returned a different number of tensors")
        for (_, value), tensor in zip(call.outputs, found, strict=True):
            if value in wanted and value not in self.kept:
                if isinstance(tensor, DTensor):
                    raise ApplyError(
                        Problem(
                            f"'{call.module}' returns a DTensor, which cannot be sent to the next "
                            "stage",
                            fix="give this module a style with a local output, or cut the pipeline "
                            "elsewhere",
                        )
                    )
                self.kept[value] = tensor.clone() if value in program.written else tensor

    def _outgoing(self, value: int) -> torch.Tensor:
        # A received leaf is cloned, because the backwards of two stages would end in it otherwise.
        # A view is cloned, because FSDP2 warns about views.
        if value in self.received:
            return self.received[value].clone()
        kept = self.kept[value]
        return kept.clone() if kept._is_view() else kept

    def _stand_ins(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[int], torch.Tensor]:
        """Return a function that maps a value id in a skipped call's result to a placeholder."""
        # A unit may return one of its arguments, which exist in this stage.
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
                    # `poison` expands one element; a value written in place needs full memory.
                    self._given[value] = given.contiguous() if value in program.written else given
            return self._given[value]

        return get


def _glue_problem(stage: int, error: Exception) -> Problem:
    first = (str(error).strip() or repr(error)).splitlines()[0]
    return Problem(
        f"stage {stage} cannot run the code between its modules without the outputs of other "
        f"stages' modules: {type(error).__name__}: {first}",
        fix="cut elsewhere (pipeline: {split: [...]}), or leave pp out",
    )


def _is_reentrant() -> bool:
    """Return True if the current call was made inside a reentrant checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def poison(flow: Flow, value: int) -> torch.Tensor:
    """Return a placeholder for a value: one NaN expanded to its shape; zero for integer dtypes."""
    info = flow.values[value]
    return _poison(info.shape, getattr(torch, info.dtype))


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    number = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), number, dtype=dtype, device=device()).expand(shape)


def make_stage(model: nn.Module, graph: ModelGraph, stages: Stages, stage: int) -> nn.Module:
    """Return a copy of the model with only the parameters and buffers of one stage.

    Its parameters are the model's own objects, its buffers are copies. Tensors of other stages are
    replaced by attributes that contain a placeholder.
    """
    # Buffers are copied, because code that writes to one runs in every stage of this rank.
    part = copy_model(model, {id(parameter): parameter for parameter in model.parameters()})
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
                    # Code between units may read the tensor's dtype, or compute results with it
                    # that are not used in this stage.
                    vars(module)[leaf] = _poison(tuple(tensor.shape), tensor.dtype)
                    # The module's own `train` may write into tensors that are missing here, as
                    # adapters that are merged for evaluation do.
                    vars(module)["train"] = partial(_set_mode, module)
    return part


def _set_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """Call `nn.Module.train` itself, in place of a module class's own `train`."""
    return nn.Module.train(module, mode)


def watch_calls(part: nn.Module, units: Iterable[str], replay: Replay) -> None:
    """Route the calls of units, and the stage's forward, through its replay.

    Args:
        part: The stage module.
        units: The fqns of the units.
        replay: The stage's replay.

    Assumes: all wrappers are applied, so that the interception is outside of them.
    """
    for fqn in units:
        module = part.get_submodule(fqn)
        intercept_calls(module, partial(replay.call, fqn, module))
    part.forward = partial(replay.forward, part.forward)
