"""Run a model on fake tensors, as one rank of tp would, to check candidates of `tp_plan: auto`.

Inside a styled module shapes are unsharded, as the global shapes of DTensors are. Code around the
module sees the shapes of shards in its inputs or outputs. No process group is needed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from meshplan.errors import ApplyError, Origin, PlanError
from meshplan.model.flow import Flow
from meshplan.model.graph import ModelGraph
from meshplan.model.rehearsal import Rehearsal, Rehearser, Stopped
from meshplan.runtime.torch_private.fakes import fake_mode, quiet_fakes
from meshplan.runtime.trace.inputs import find_example
from meshplan.runtime.trace.ops import OpRecorder, copy_to_run, record
from meshplan.runtime.trace.side_effects import Trace, nothing_left
from meshplan.runtime.trace.sp_boundary import with_argument
from meshplan.runtime.trace.structure import graph_of
from meshplan.runtime.trace.trace_errors import advice_of, alone_problem, place_of
from meshplan.spec.spec import Spec


def recorded(model: nn.Module, spec: Spec, origin: Origin | None) -> tuple[ModelGraph, Rehearser]:
    """Record the forward of a model, and return (graph with this `flow`, rehearser).

    Args:
        model: The model, on any device.
        spec: The plan, which states the inputs.
        origin: Place where the user named the model; None if there is none.

    Raises:
        PlanError: No input of the model is stated, or its forward cannot be recorded.
    """
    inputs = find_example(model, spec)
    try:
        flow = record(model, inputs)
    except ApplyError as error:
        if isinstance(error.__cause__, Exception):
            raise PlanError(alone_problem(error.__cause__, model, origin, inputs)) from None
        raise PlanError(error.problems) from None
    return graph_of(model, flow), rehearser(model, inputs)


def rehearser(model: nn.Module, inputs: Any) -> Rehearser:
    """Return what runs this model on these inputs as a `Rehearsal` describes."""
    return Rehearser(partial(_rehearse, model, inputs))


def _rehearse(model: nn.Module, inputs: Any, what: Rehearsal) -> Flow | Stopped:
    with nothing_left(model) as trace:
        return _run_copy(model, inputs, what, trace)


def _run_copy(model: nn.Module, inputs: Any, what: Rehearsal, trace: Trace) -> Flow | Stopped:
    mode = fake_mode()
    with torch.no_grad():
        copied, args, kwargs = copy_to_run(model, inputs, mode)
        for (fqn, name), value in what.attributes.items():
            setattr(copied.get_submodule(fqn), name, value)
        recorder = OpRecorder(copied, trace)
        for fqn, module in copied.named_modules():
            _at_the_border(recorder, module, fqn, what)
            _along_the_sequence(recorder, module, fqn, what)
        for fqn, dim in what.parts.items():
            _part_inside(recorder, copied, fqn, dim, what.size)
        try:
            with quiet_fakes(), mode, recorder:
                recorder.begin(args, kwargs)
                copied(*args, **kwargs)
        except Exception as error:  # The user's forward may raise anything on sharded shapes.
            first = (str(error).strip() or repr(error)).splitlines()[0]
            text = f"{type(error).__name__}: {first}"
            if advice := advice_of(error, what.size):
                text += f" at {place_of(error)}: {advice}"
            module, num_ops = recorder.progress()
            return Stopped(module=module, num_ops=num_ops, text=text)
        return recorder.flow()


def _at_the_border(recorder: OpRecorder, module: nn.Module, fqn: str, what: Rehearsal) -> None:
    """Make code inside a module see unsharded features, and code around the module see shards."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def whole(x: torch.Tensor) -> torch.Tensor:
            return recorder.stand_in(x, (*x.shape[:-1], x.shape[-1] * what.size))

        if args:
            return (whole(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: whole(kwargs[first])}

    def leave(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return recorder.stand_in(output, (*output.shape[:-1], output.shape[-1] // what.size))

    if fqn in what.takes_part:
        module.register_forward_pre_hook(enter, with_kwargs=True)
    if fqn in what.leaves_part:
        module.register_forward_hook(leave)


def _along_the_sequence(recorder: OpRecorder, module: nn.Module, fqn: str, what: Rehearsal) -> None:
    """Replace the whole sequence by a rank's shard of it, or the shard by the whole sequence.

    `what.cut` and `what.gathered` state for which arguments or outputs of the module.
    """

    def turned(x: torch.Tensor, is_cut: bool) -> torch.Tensor:
        if is_cut and x.shape[1] % what.size:
            raise ValueError(f"a sequence of {x.shape[1]} is not divisible by {what.size}")
        length = x.shape[1] // what.size if is_cut else x.shape[1] * what.size
        return recorder.stand_in(x, (x.shape[0], length, *x.shape[2:]))

    def enter(path: str, is_cut: bool) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_argument(args, kwargs, path, lambda x: turned(x, is_cut))

        module.register_forward_pre_hook(hook, with_kwargs=True)

    for group, is_cut in ((what.cut, True), (what.gathered, False)):
        for path in sorted(path for name, path in group if name == fqn and path is not None):
            enter(path, is_cut)
        if (fqn, None) in group:
            module.register_forward_hook(lambda m, args, out, is_cut=is_cut: turned(out, is_cut))


def _part_inside(recorder: OpRecorder, copied: nn.Module, fqn: str, dim: int, size: int) -> None:
    """Replace a parameter by a tensor of the shape of the rank's shard while its module runs.

    Args:
        recorder: Records the shard as the same value as the parameter.
        copied: The copy of the model that runs.
        fqn: Name of the parameter.
        dim: The sharded dim.
        size: Number of shards.
    """
    owner_name, _, leaf = fqn.rpartition(".")
    owner = copied.get_submodule(owner_name)
    parameter = owner.get_parameter(leaf)
    shape = [n // size if d == dim else n for d, n in enumerate(parameter.shape)]

    def enter(module: nn.Module, args: Any) -> None:
        # An instance attribute hides the parameter of the same name from `self.<leaf>`.
        vars(module)[leaf] = recorder.stand_in(parameter, shape)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        vars(module).pop(leaf, None)

    owner.register_forward_pre_hook(enter)
    owner.register_forward_hook(leave)
