"""A LightningModule that a plan is applied to itself, since its layers are its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def show_stages(module: nn.Module, network: PipelinedModule, path: str) -> None:
    """Let a LightningModule yield the modules, parameters and buffers of this rank's stages.

    The stages of a pipeline are no submodules, and the layers of a LightningModule that is the
    network itself have no values.

    Args:
        module: The LightningModule.
        network: The pipeline.
        path: Its name in the LightningModule, "" if it is the LightningModule itself.
    """

    def tensors_by(method: str) -> Callable[..., Iterator[tuple[str, Any]]]:
        # A function, because a copy of the module must not copy the pipeline.
        def named(
            prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, Any]]:
            inner = ".".join(part for part in (prefix, path) if part)
            if path:
                # torch names the second copy of a tensor otherwise, by its module.
                of_network = (f"{inner}.", f"{inner}@")
                outside = getattr(nn.Module, method)(module, prefix, recurse, remove_duplicate)
                yield from (pair for pair in outside if not pair[0].startswith(of_network))
            if recurse:
                yield from getattr(network, method)(inner, True, remove_duplicate)

        return named

    def named_modules(
        memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if module in memo:
            return
        if remove_duplicate:
            memo.add(module)
        yield prefix, module
        found = network.named_modules(memo, prefix, remove_duplicate)
        yield from (pair for pair in found if pair[1] is not network)

    own: Any = module
    own.named_parameters = tensors_by("named_parameters")
    own.named_buffers = tensors_by("named_buffers")
    if not path:
        own.named_modules = named_modules


@contextmanager
def hidden_stages(module: nn.Module) -> Iterator[None]:
    """Undo `show_stages` inside."""
    names = ("named_parameters", "named_buffers", "named_modules")
    own = vars(module)
    hidden = {name: own.pop(name) for name in names if name in own}
    try:
        yield
    finally:
        own.update(hidden)


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
