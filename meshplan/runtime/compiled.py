"""torch.compile, block by block: after activation checkpointing, before the data axes."""

from __future__ import annotations

from torch import nn

from meshplan.plan import Plan
from meshplan.runtime.pretend import is_pretending


def apply_compile(model: nn.Module, plan: Plan) -> None:
    """Compile the modules that the plan says, in place; names and state dict stay as they are.

    Nothing is compiled yet: that happens when a module first runs, and again for new shapes.
    Without numbers nothing is compiled at all: who looks on sees blocks as they are written.
    """
    if is_pretending():
        return
    for fqn in plan.assignment.compiled:
        model.get_submodule(fqn).compile()
