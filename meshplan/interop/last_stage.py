"""A loss of a user's own on the last stage of a pipeline, which lacks what other stages have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from meshplan.errors import ApplyError, Problem


@contextmanager
def on_last_stage(name: str) -> Iterator[None]:
    """Let modules raise if a loss runs them that have no values on this stage.

    Args:
        name: Name of the loss in the error.
    """

    def refuse(module: nn.Module, *unused: Any) -> None:
        if any(parameter.is_meta for parameter in module.parameters()):
            kind = type(module).__name__
            article = "an" if kind[0] in "AEIOU" else "a"
            what = f"{name} runs {article} {kind}, but a pipeline's last stage has the "
            what += "model's output, not the parameters of the other stages"
            fix = "run it in the model's forward, or use a plan without pp"
            raise ApplyError(Problem(what, fix=fix))

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
