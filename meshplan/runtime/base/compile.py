"""torch.compile, block by block: after activation checkpointing, before the data axes."""

from __future__ import annotations

from torch import nn

from meshplan.plan.plan import Plan
from meshplan.runtime.base.fake_mode import is_fake_execution


def compiles(model: nn.Module, plan: Plan) -> bool:
    """Whether modules are compiled: by the plan, or by the user before `parallelize`.

    Hooks that look at numbers would become part of what is compiled then.

    Assumes: calls are not intercepted yet.
    """
    # What `module.compile()` sets, and where `torch.compile(module)` keeps what it was given.
    return plan.spec.compile or any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


def apply_compile(model: nn.Module, plan: Plan) -> None:
    """Compile the modules that the plan says, in place; names and state dict stay as they are.

    Nothing is compiled yet: that happens when a module first runs, and again for new shapes.
    Without numbers nothing is compiled at all: who looks on sees blocks as they are written.
    """
    if is_fake_execution():
        return
    for fqn in plan.assignment.compiled:
        model.get_submodule(fqn).compile()
