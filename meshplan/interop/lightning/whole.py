"""A LightningModule that a plan is applied to itself, since its layers are its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from meshplan.errors import Problem
from meshplan.runtime.apply.pipeline.module import PipelinedModule

OF_SEVERAL_FORWARDS: Final = ("mixed torch.Tensor and DTensor", "calls 'backward'")
"""Words of errors where a backward inside of the one forward that a plan sees has freed shards."""
_NETWORK: Final = "_meshplan_network"


def network_of(module: nn.Module) -> nn.Module | None:
    """Return what applying a plan to a LightningModule returned; None before."""
    found: nn.Module | None = vars(module).get(_NETWORK)
    return found


def keep_network(module: nn.Module, network: nn.Module) -> None:
    """Keep for the next run what applying the plan returned.

    The LightningModule then calls the stages of a pipeline in its forward, while the pipeline
    records the forward that the module has by itself.
    """
    if network_of(module) is not network and isinstance(network, PipelinedModule):
        network.record_from(copy.copy(module))
        module.forward = lambda *args, **kwargs: network(*args, **kwargs)
    # No submodule, because it may be a wrapper of the module.
    vars(module)[_NETWORK] = network


def show_parameters(module: nn.Module, network: PipelinedModule, path: str) -> None:
    """Let `named_parameters` of a LightningModule yield those of a pipeline, too.

    torch asks no child for its parameters, and the stages of a pipeline are no submodules.

    Args:
        module: The LightningModule.
        network: The pipeline.
        path: Its name in the LightningModule, "" if it is the LightningModule itself.
    """

    # A function, because a copy of the module must not copy the pipeline.
    def named_parameters(
        prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if path:
            yield from nn.Module.named_parameters(module, prefix, recurse, remove_duplicate)
        if recurse:
            inner = ".".join(part for part in (prefix, path) if part)
            yield from network.named_parameters(inner, recurse, remove_duplicate)

    own: Any = module
    own.named_parameters = named_parameters


def several_forwards(module: nn.Module) -> Problem:
    """Return the problem of manual optimization of a LightningModule's own layers."""
    names = [
        name
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]
    what = "in manual optimization, training_step runs forward and backward of layers of the "
    what += f"LightningModule itself ({', '.join(names)}), but a plan has to see each forward as "
    what += "one call of a module"
    fix = "put them into one module, self.net = Net(), whose forward(name, ...) returns what the "
    fix += "loss of that name needs, and call self.net(name, ...) once before each manual_backward"
    return Problem(what, fix=fix)
