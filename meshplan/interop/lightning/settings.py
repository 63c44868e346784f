"""Settings that a Trainer of Lightning and a plan both have: taken from the plan, or compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import callbacks

from meshplan.errors import ApplyError, PlanError, Problem
from meshplan.spec.spec import Spec


def check_sync_batchnorm(spec: Spec, *, is_asked: bool) -> None:
    """Raise if the Trainer asks for statistics over all ranks, which the plan does not compute.

    Raises:
        PlanError: `sync_batchnorm` is asked for, and the plan does not state it.
    """
    if is_asked and not spec.sync_batchnorm:
        what = "Trainer(sync_batchnorm=True) was given, but the plan does not state sync_batchnorm"
        fix = "state sync_batchnorm: true in the plan, which does it under the Trainer too"
        raise PlanError(Problem(what, spec.origin("sync_batchnorm"), fix))


def check_averaging(trainer: Any, *, is_sharded: bool) -> None:
    """Raise if a callback averages weights of which each rank has a shard.

    Raises:
        ApplyError: It does.
    """
    names = ("StochasticWeightAveraging", "WeightAveraging")
    # Lightning 2.5 has the first alone.
    kinds = tuple(getattr(callbacks, name) for name in names if hasattr(callbacks, name))
    for each in trainer.callbacks:
        if is_sharded and isinstance(each, kinds):
            what = f"{type(each).__name__} averages whole parameters, and the plan shards them"
            fix = "leave it out and use meshplan.EMA(trainer.strategy.network, optimizer), or "
            fix += "strategy: ddp in the plan"
            raise ApplyError(Problem(what, fix=fix))


def take_settings(trainer: Any, spec: Spec, planned: int) -> None:
    """Take from the plan what the Trainer leaves open; raise where they contradict.

    Args:
        trainer: The Trainer.
        spec: The plan.
        planned: Microbatches of a step under the plan.

    Raises:
        PlanError: Both state a value and they differ, or nothing would act on the plan's value.
    """
    is_automatic = trainer.lightning_module.automatic_optimization
    clip = spec.clip_grad_norm
    if clip is not None:
        origin = spec.origin("clip_grad_norm")
        if not is_automatic:
            what = f"the plan clips gradients at the norm {clip}, which the Trainer leaves to "
            what += "training_step in manual optimization"
            fix = "leave it out, and call self.clip_gradients(optimizer, "
            fix += f'gradient_clip_val={clip}, gradient_clip_algorithm="norm") there'
            raise PlanError(Problem(what, origin, fix))
        given, by = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if given is None:
            trainer.gradient_clip_val = clip
        elif given != clip or (by is not None and str(by.value) != "norm"):
            what = f"the Trainer clips gradients at {given}, but the plan at the norm {clip}"
            fix = "state it in one of them, gradient_clip_val or clip_grad_norm"
            raise PlanError(Problem(what, origin, fix))
    if isinstance(spec.batch.accumulate, Mapping):
        what = "the plan states accumulate by epoch, which a Trainer does not read"
        fix = "leave it out, and pass GradientAccumulationScheduler(scheduling={0: 8, 4: 4})"
        raise PlanError(Problem(what, spec.origin("batch.accumulate"), fix))
    if planned == 1:
        return
    if not is_automatic:
        what = f"the plan accumulates gradients over {planned} microbatches, which the Trainer "
        what += "leaves to training_step in manual optimization"
        fix = "leave out accumulate, and step the optimizer after so many batches there"
        raise PlanError(Problem(what, spec.origin("batch"), fix))
    schedule = callbacks.GradientAccumulationScheduler
    has_schedule = any(isinstance(each, schedule) for each in trainer.callbacks)
    if has_schedule or trainer.accumulate_grad_batches not in (1, planned):
        given = "by a schedule" if has_schedule else f"over {trainer.accumulate_grad_batches}"
        what = f"the Trainer accumulates gradients {given} batches, but the plan over {planned}"
        fix = "state it in one of them, accumulate_grad_batches or batch.accumulate"
        raise PlanError(Problem(what, spec.origin("batch"), fix))
    trainer.accumulate_grad_batches = planned
