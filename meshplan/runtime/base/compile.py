"""torch.compile, block by block: after activation checkpointing, before the data axes."""

from __future__ import annotations

from torch import nn

from meshplan.plan.plan import Plan
from meshplan.runtime.base.fake_mode import is_fake_execution


def compiles(model: nn.Module, plan: Plan) -> bool:
    """Return True if modules are compiled, by the plan or by the user before `parallelize`.

    Callers then register no hooks that read values, because the hooks would be compiled too.

    Assumes: `torch_private.private` has not intercepted module calls yet, because it sets
    `_compiled_call_impl` as well.
    """
    # `module.compile()` sets `_compiled_call_impl`; `torch.compile(module)` wraps in `_orig_mod`.
    return plan.spec.compile or any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


def apply_compile(model: nn.Module, plan: Plan) -> None:
    """Call `compile()` on each module that the plan names; fqns and state dict do not change.

    torch compiles when a module first runs, and again for new shapes. In a fake step nothing is
    compiled, so that the tracer sees the operators of the eager code.
    """
    if is_fake_execution():
        return
    for fqn in plan.assignment.compiled:
        model.get_submodule(fqn).compile()
