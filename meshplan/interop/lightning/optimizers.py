"""Optimizers of a pipeline, which `configure_optimizers` makes of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.interop.lightning.whole import hidden_stages
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.pytree import tensors_in
from meshplan.state.held import plain_name


class WholeModel:
    """The parameters of a whole model without values, and those of this rank's stages for them.

    Groups of parameters then follow from the modules of the model, as in one process, and are as
    many on all ranks.

    Args:
        module: The LightningModule.
        network: The pipeline.
        path: Its name in the LightningModule, "" if it is the LightningModule itself.
    """

    def __init__(self, module: nn.Module, network: PipelinedModule, path: str) -> None:
        self._module, self._network, self._path = module, network, path
        own: dict[str, list[nn.Parameter]] = {}
        for name, each in network.named_parameters():
            # Two stages of this rank may have copies of a tied weight.
            own.setdefault(plain_name(name).split("@")[0], []).append(each)
        self._own: dict[int, list[nn.Parameter]] = {}
        """The parameters of this rank, by the id of the one without values."""
        self._whole: list[nn.Parameter] = []
        for name, each in network.skeleton.named_parameters(remove_duplicate=False):
            if id(each) not in self._own:
                self._whole.append(each)
            self._own.setdefault(id(each), []).extend(own.get(plain_name(name), ()))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the LightningModule have the whole model inside, in the place of the pipeline."""
        before = []
        for each in self._whole:
            for own in self._own[id(each)]:
                each.requires_grad_(own.requires_grad)
            before.append(each.requires_grad)
        self._put(self._network.skeleton)
        try:
            with hidden_stages(self._module):
                yield
        finally:
            self._put(self._network)
        for each, was_trained in zip(self._whole, before, strict=True):
            if each.requires_grad != was_trained:
                for own in self._own[id(each)]:
                    own.requires_grad_(each.requires_grad)

    def _put(self, network: nn.Module) -> None:
        if self._path:
            parent, _, name = self._path.rpartition(".")
            setattr(self._module.get_submodule(parent), name, network)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the whole model train the parameters of this rank.

        Raises:
            ApplyError: It has other references to the parameters without values.
        """
        groups = optimizer.param_groups
        if not any(id(each) in self._own for group in groups for each in group["params"]):
            return
        kind = type(optimizer)
        rest = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
        has_more = bool(optimizer.state) or any(id(t) in self._own for _, t in tensors_in(rest))
        if has_more and not kind.__module__.startswith("torch.optim."):
            what = f"{kind.__name__} keeps states or references of its own to the parameters that "
            what += "it is made of, but a rank of a pipeline has only some of them"
            fix = "make the states in its first step, or use an optimizer of torch.optim"
            raise ApplyError(Problem(what, fix=fix))
        made = [{**group, "params": self._of_this_rank(group)} for group in groups]
        if has_more:
            # Their `defaults` are all arguments. Schedulers keep the optimizer and its groups.
            given: Mapping[str, Any] = optimizer.defaults
            optimizer.__init__(made, **given)
            return
        for group, own in zip(groups, made, strict=True):
            group["params"] = own["params"]

    def _of_this_rank(self, group: Mapping[str, Any]) -> list[nn.Parameter]:
        return [own for each in group["params"] for own in self._own.get(id(each), [each])]
