"""torch.compile, block by block: after activation checkpointing, before the data axes."""

from __future__ import annotations

from torch import nn

from meshplan.plan.plan import Plan
from meshplan.runtime.base.fake_mode import is_fake_execution


def compiles(model: nn.Module, plan: Plan) -> bool:
    """Return True if modules are compiled, by the plan or by the user before `parallelize`.

    Callers leave out hooks that read values in that case, because these would be compiled too.

    Assumes: module calls are not intercepted yet.
    """
    # `module.compile()` sets `_compiled_call_impl`; `torch.compile(module)` wraps in `_orig_mod`.
    return plan.spec.compile or any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


def apply_compile(model: nn.Module, plan: Plan) -> None:
    """Compile the modules that the plan names, in place; names and state dict do not change.

    Compilation itself happens when a module first runs, and again for new shapes. In a fake step
    nothing is compiled, so that the tracer sees the operators of the eager code.
    """
    if is_fake_execution():
        return
    for fqn in plan.assignment.compiled:
        model.get_submodule(fqn).compile()
