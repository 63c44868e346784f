"""Loops by hand: what ranks of a replica of the model are given, compared at growing intervals.

`train_step` compares in every step; here forwards are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.plan import Plan
from meshplan.runtime.aside import is_aside
from meshplan.runtime.peers import check_peers
from meshplan.runtime.pipeline.module import PipelinedModule
from meshplan.runtime.pretend import is_pretending
from meshplan.runtime.steps import is_due

_COMPARED: Final[ContextVar[bool]] = ContextVar("compared", default=False)


@contextmanager
def compared() -> Iterator[None]:
    """Inside, somebody has compared the batch already."""
    token = _COMPARED.set(True)
    try:
        yield
    finally:
        _COMPARED.reset(token)


class BatchWatch:
    """Compares the batches of a loop by hand, the 1st, 2nd, 4th, 8th, ... that is trained on."""

    def __init__(self, plan: Plan, mesh: DeviceMesh) -> None:
        self._plan, self._mesh = plan, mesh
        self._num_seen = 0

    def see(self, inputs: Any, targets: Any) -> None:
        """Count a batch, and compare it if it is due."""
        if _COMPARED.get() or is_aside() or is_pretending() or not torch.is_grad_enabled():
            return
        self._num_seen += 1
        if is_due(self._num_seen):
            check_peers((inputs, targets), self._plan, self._mesh)


def watch_batches(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Compare what forwards of a model are given along tp and cp, and steps of a pipeline."""
    watch = BatchWatch(plan, mesh)
    if isinstance(model, PipelinedModule):
        model.watch_batch = watch.see
        return

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        watch.see((args, kwargs), ())

    if plan.mesh.size("tp", "cp") > 1:
        model.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
