"""Split a model into this rank's stages, and wrap each stage as if it were a whole model."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError
from meshplan.plan.plan import Plan
from meshplan.plan.restrict import restrict
from meshplan.runtime.apply.experts.expert_protocol import reuse_protocols
from meshplan.runtime.apply.parameters.materialize import InitialValues
from meshplan.runtime.apply.pipeline.hooks import hook_problems, leave_hooks_of_output
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.pipeline.run import StageRuntime
from meshplan.runtime.apply.pipeline.stage import Replay, make_stage, watch_calls
from meshplan.runtime.base.compile import compiles
from meshplan.runtime.base.mesh import submesh
from meshplan.runtime.checks.outside import watch_first_forward

Wrap = Callable[[nn.Module, Plan, DeviceMesh, InitialValues], nn.Module]


def apply_pipeline(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, values: InitialValues, wrap: Wrap
) -> PipelinedModule:
    """Build and wrap this rank's stages, and move the parameters of the given model to meta.

    Args:
        model: The whole model.
        plan: The plan of the whole model, with stages.
        mesh: The live DeviceMesh.
        values: Initial values of all tensors that this rank stores, if the model has tensors on
            meta on any rank; empty otherwise.
        wrap: Applies everything except the pipeline to a module, in place.

    Returns:
        The module to train.

    Raises:
        ApplyError: A hook would be called by no stage.
    """
    stages = plan.assignment.stages
    assert stages is not None
    place = dist.get_rank(submesh(mesh, ("pp",)).get_group())
    parts: dict[int, StageRuntime] = {}
    names = tuple(model.state_dict())
    if problems := hook_problems(model, stages):
        raise ApplyError(problems)
    for stage in stages.of_rank(place):
        module = make_stage(model, plan.graph, stages, stage)
        if stage < stages.num - 1:
            leave_hooks_of_output(module)
        part = restrict(plan, stage)
        own = part.assignment.tensors
        reuse_protocols(model, module, part)
        is_compiled = compiles(module, part)  # Wrapping intercepts calls as compiling does.
        wrap(module, part, mesh, InitialValues({f: v for f, v in values.local.items() if f in own}))
        replay = Replay(stage)  # Ends a forward early, but never inside a unit of `part`.
        watch_calls(module, dict.fromkeys(unit for unit, _ in stages.units), replay)
        if not is_compiled:  # An active torch function mode would be compiled in.
            watch_first_forward(module, part)
        parts[stage] = StageRuntime(module, part, replay)
    _empty(model)
    return PipelinedModule(model, parts, plan=plan, mesh=mesh, names=names)


def _empty(model: nn.Module) -> None:
    """Move a model's parameters to meta, so that only this rank's stages keep theirs in memory."""
    hollow: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in hollow:
                    meta = parameter.detach().to("meta")
                    hollow[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
                setattr(module, name, hollow[id(parameter)])
