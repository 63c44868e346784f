"""Check the batches of ranks in custom training loops, at growing intervals.

`train_step` checks its batches itself. In other loops, hooks count forwards and optimizer steps,
and check the batches of some of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import ApplyError
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.batch_agreement import check_batches_agree, num_samples
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import device, submesh
from meshplan.runtime.base.optimizer_steps import before_steps, is_due
from meshplan.runtime.base.parallel_models import ParallelModel, is_stepped, known_models
from meshplan.runtime.checks.dry_run import in_dry_run
from meshplan.runtime.comparisons.given import Given, compares_ranks, note_size, same_samples

_COMPARED: Final[ContextVar[bool]] = ContextVar("compared", default=False)


@contextmanager
def compared() -> Iterator[None]:
    """Keep `BatchWatch` from checking the batches that run inside the `with` block.

    `train_step` uses this, because it has checked its batch already.
    """
    token = _COMPARED.set(True)
    try:
        yield
    finally:
        _COMPARED.reset(token)


class BatchWatch:
    """Checks the batches that ranks get in a custom training loop.

    Ranks of one replica must get the same batch: this is checked in the 1st, 2nd, 4th, 8th, ...
    forward. Data ranks must get different batches: this is checked before the 1st, 2nd, 4th, ...
    optimizer step, for all batches since the previous step. It is not checked per forward, because
    data ranks may run different numbers of forwards.
    """

    def __init__(self, found: ParallelModel) -> None:
        self._found = found
        self._num_seen = 0
        self._has_peers = found.plan.mesh.size("tp", "cp", "pp") > 1
        self._compares_ranks = compares_ranks(found.plan)
        self._steps = 0
        self._samples = 0
        self._is_doubtful = False
        self._given = Given()

    def see(self, inputs: Any, targets: Any, *, is_training: bool = True) -> None:
        """Count a forward, and check its batch if a check is due.

        Args:
            inputs: Inputs of the forward.
            targets: Targets; () if they are not known.
            is_training: If True, the model is in training mode. If False, only the ranks of a
                replica are compared.

        Raises:
            ApplyError: Ranks of a replica were given different batches.
        """
        if _COMPARED.get() or in_dry_run() or is_fake_execution() or not torch.is_grad_enabled():
            return
        self._num_seen += 1
        if self._has_peers and is_due(self._num_seen):
            check_batches_agree((inputs, targets), self._found.plan, self._found.mesh)
        if not is_training:
            return
        if self._num_seen == 1:
            note_size((inputs, targets), self._found.plan, may_be_micro=True)
        self._samples = num_samples((inputs, targets))
        for watch in _watches:
            watch.add((inputs, targets))

    def add(self, batch: Any) -> None:
        """Add the batch of a forward, of any model, to the digest that data ranks compare."""
        if self._compares_ranks and (is_due(self._steps + 1) or self._is_doubtful):
            self._given.add(batch)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that data ranks were given different batches since the last optimizer step.

        Raises:
            ApplyError: All ranks along a data axis were given the same batches, in the first step
                or in two checked steps in a row.
        """
        if _COMPARED.get() or not is_stepped(optimizer, self._found):
            return
        self._steps += 1
        if not (is_due(self._steps) or self._is_doubtful):
            return
        given, self._given = self._given, Given()
        group = submesh(self._found.mesh, GRADIENT_AXES, flat=True).get_group()
        axis = given.repeated_axis(self._found.plan, group, device())
        # Ranks may draw equal samples once by chance. In the first step that is too unlikely.
        is_repeated, self._is_doubtful = self._is_doubtful, axis is not None
        if axis is not None and (self._steps == 1 or is_repeated):
            raise ApplyError(same_samples(axis, self._samples, self._found.plan))


_watches: Final[weakref.WeakSet[BatchWatch]] = weakref.WeakSet()


def watch_batches(model: nn.Module) -> None:
    """Register hooks that check the batches of a model in a custom training loop.

    A pipelined model calls the check itself, once per step.
    """
    found = next(each for each in reversed(known_models()) if each.model() is model)
    plan = found.plan
    watch = BatchWatch(found)
    if compares_ranks(plan) and not is_fake_execution():
        _watches.add(watch)
        weakref.finalize(model, before_steps(watch.before_step))
    if isinstance(model, PipelinedModule):
        model.watch_batch = watch.see
        return

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        # If the model is compiled, the hook must not become part of the graph.
        if not torch.compiler.is_compiling():
            watch.see((args, kwargs), (), is_training=module.training)

    if plan.mesh.size("tp", "cp") > 1 or compares_ranks(plan):
        model.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
