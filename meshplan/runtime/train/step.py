"""`local_batch`, `train_step` and contexts for the loss: a training loop that suits every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.context.batch import sequence_of_rank
from meshplan.runtime.apply.data.data import reshard_units, set_gradient_sync
from meshplan.runtime.apply.loss.loss_mode import loss_mode
from meshplan.runtime.apply.loss.loss_weights import Weights, weighing
from meshplan.runtime.apply.loss.vocab_parallel_loss import is_on, take_loss
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied, own_module
from meshplan.runtime.base.batch import as_arguments, chunked, mapped, part_of
from meshplan.runtime.base.batch_agreement import (
    check_batches_agree,
    mean_over_ranks,
    num_samples,
)
from meshplan.runtime.base.digest import mark
from meshplan.runtime.base.fake_mode import is_fake_execution, numbers
from meshplan.runtime.base.mesh import device, gathered
from meshplan.runtime.base.phases import begin
from meshplan.runtime.checks.detours import explaining_mixed_losses
from meshplan.runtime.checks.forward_writes import begin_microbatch
from meshplan.runtime.checks.outside import guard_loss
from meshplan.runtime.checks.tp_replicas import check_loss
from meshplan.runtime.comparisons.batches import compared
from meshplan.runtime.comparisons.given import note_size
from meshplan.runtime.comparisons.optimizers import unknown_to_model
from meshplan.runtime.comparisons.steps import StepCheck
from meshplan.runtime.train.gradient_scale import clip_grad_norm_, unscale
from meshplan.runtime.train.run import recorded
from meshplan.runtime.watch.guard import guarded


@guarded()
def local_batch(model: nn.Module, batch: Any) -> Any:
    """Return this rank's part of a global batch, on this rank's device.

    Args:
        model: The module that `parallelize` returned.
        batch: A tensor, or a tuple, list or mapping of tensors, each with the samples along dim 0.
            Items that are not tensors, or have no dims, or one row for all samples, are passed on
            unchanged. Under cp, tensors
            whose dim 1 is the sequence are also cut along it (`sequence_of_rank`).

    Raises:
        ApplyError: The samples do not divide over the data ranks, or the sequence not over cp.
    """
    plan = applied(model).plan
    batch, whole = sequence_of_rank(plan, batch)
    ranks, index = data_rank(model)

    rows = num_samples(batch)

    def local(tensor: torch.Tensor) -> torch.Tensor:
        own = part_of(tensor, ranks, index, "data ranks", rows).to(device())
        return own if own is tensor else mark(own, whole)

    return mapped(batch, local)


class DataRank(NamedTuple):
    """A rank among those that read samples of their own.

    Args:
        num_replicas: Number of these ranks. Ranks along tp, pp and cp read the samples of one.
        rank: Index of this rank among them, from 0.
    """

    num_replicas: int
    rank: int


def data_rank(model: nn.Module) -> DataRank:
    """Return which part of the samples this rank reads, for a sampler or a loop of one's own.

    Args:
        model: The module that `parallelize` returned.

    Raises:
        ApplyError: The model was not parallelized.

    Example:
        >>> sampler = DistributedSampler(data, *meshplan.data_rank(model), shuffle=True)
    """
    plan = applied(model).plan
    return DataRank(plan.num_data_ranks, plan.mesh.index(dist.get_rank(), DATA_AXES))


@recorded
@guarded("train_step")
@weighing()
def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Any],
) -> float:
    """Run forward, backward and one optimizer step, and zero the gradients.

    Args:
        model: The module that `parallelize` returned.
        optimizer: An optimizer made from `model.parameters()` after `parallelize`.
        inputs: This rank's inputs (`local_batch`): a tensor, a tuple of arguments or a mapping of
            keyword arguments.
        targets: This rank's targets in any form that `loss_fn` takes, cut along dim 0 like the
            inputs.
        loss_fn: Called with the model's output and the targets. Returns the mean loss over the
            samples, or the form of loss that the plan's `loss` states, or (sum, count): the sum of
            the losses, and the number of samples or tokens in that sum.

    Returns:
        The loss over the global batch, equal on all ranks: the mean, or the sum under `loss: sum`.
        It is 0 if the batch has no token that counts.

    The plan states the number of microbatches that the inputs are cut into (`batch.accumulate`) and
    the norm at which gradients are clipped (`clip_grad_norm`).
    """
    state = applied(model)
    guard: AbstractContextManager[object] = nullcontext()
    if not state.is_tested:
        check_optimizer(model, state.plan, optimizer)
        guard = guard_loss(model, state.plan)
    check_batches_agree((inputs, targets), state.plan, state.mesh, state.history.steps + 1)
    weights = Weights(state.plan, state.mesh, state.history, (inputs, targets))
    count = state.plan.accumulate
    parts = zip(chunked(inputs, count), chunked(weights.marked(targets), count), strict=True)
    total: torch.Tensor | float = 0.0
    check = StepCheck(model, state.plan, loss_fn, state.history, (inputs, targets))

    def take(output: Any, marked: tuple[Any, torch.Tensor | None]) -> torch.Tensor:
        begin("loss")
        target, tokens = marked
        with guard, check.calling(output, target):
            given = take_loss(loss_fn, output, target)
        loss = weights.weigh(given, output, tokens)
        check.see(output, target, given)
        begin("backward")
        return loss

    for number, (part, target) in enumerate(parts):
        if isinstance(model, PipelinedModule):
            scale, is_last = state.loss_scale / count, number == count - 1
            with compared(), loss_mode(state.plan):
                total = total + model.step(
                    part, target, take, scale=scale, is_last=is_last, number=number
                )
            continue
        begin_microbatch(own_module(model), number)
        begin("forward")
        with set_gradient_sync(model, state.plan, number == count - 1), loss_mode(state.plan):
            with compared():
                output = _call(model, part)
            loss = take(output, target)
            del output
            with nullcontext() if is_on() else explaining_mixed_losses():
                (loss * (state.loss_scale / count)).backward()
        # Sum in float32 at least: half precision would round the mean.
        total = total + loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
    if not state.is_tested and state.plan.mesh.size("tp") > 1:
        assert isinstance(total, torch.Tensor)
        check_loss(total, state.plan, state.mesh)
    is_first, state.is_tested = not state.is_tested, True
    assert isinstance(total, torch.Tensor)
    weights.agree()
    mean, counted = mean_over_ranks(
        total / count, (inputs, targets), state.plan, state.mesh, weights.count
    )
    check.finish()
    if is_first and not is_fake_execution():
        note_size((inputs, targets), state.plan)
    begin("step")
    factor = weights.factor(counted)
    if unscale(model, optimizer, state, factor):
        if state.plan.spec.clip_grad_norm is not None:
            clip_grad_norm_(model, state.plan.spec.clip_grad_norm)
        with compared():
            if is_first and isinstance(model, PipelinedModule):
                agreed_step(optimizer.step)
            else:
                optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state.history.steps += 1
    return float(numbers(mean, 0.0)) * factor


def agreed_step(step: Callable[[], Any]) -> None:
    """Call the optimizer's first step; raise on all ranks if a check before it fails on one."""
    failure: ApplyError | None = None
    try:
        step()
    except ApplyError as error:
        failure = error
    failures = gathered(str(failure) if failure else "")
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text:
            raise ApplyError(Problem(f"the first step failed on rank {rank}: {text}"))


@contextmanager
def loss_parallel(model: nn.Module) -> Iterator[None]:
    """Keep the logits sharded over the vocabulary in a training loop without `train_step`.

    Inside the context, `F.cross_entropy` and `nn.CrossEntropyLoss` compute on the shards of the
    model's logits; outside, the head gathers the logits. Put forward, loss and backward inside.

    Args:
        model: The module that `parallelize` returned, under a plan with `loss_parallel: true`.

    Raises:
        ApplyError: The plan does not state `loss_parallel: true`.
    """
    plan = applied(model).plan
    if not plan.assignment.loss_parallel:
        fix = "add it, and give the model's last projection the style vocab"
        raise _unstated_loss(plan, "loss_parallel: true", fix)
    with loss_mode(plan):
        yield


@contextmanager
def chunked_loss(model: nn.Module) -> Iterator[None]:
    """Compute head and loss in chunks of the tokens in a training loop without `train_step`.

    Inside the context, the model returns a placeholder without values instead of the logits.
    `F.cross_entropy` or `nn.CrossEntropyLoss`, called with it, computes head and loss together.
    Outside, the head returns the full logits. Put forward, loss and backward inside.

    Args:
        model: The module that `parallelize` returned, under a plan with `loss_chunks`.

    Raises:
        ApplyError: The plan does not state `loss_chunks`, or no cross-entropy was computed inside.
    """
    plan = applied(model).plan
    if plan.assignment.chunked_loss is None:
        raise _unstated_loss(plan, "loss_chunks", "add loss_chunks: 8")
    with loss_mode(plan):
        yield


def _unstated_loss(plan: Plan, statement: str, fix: str) -> ApplyError:
    """Return the error for a loss context whose `statement` is missing from the plan."""
    origin = plan.spec.origin(statement.partition(":")[0])
    return ApplyError(Problem(f"this model's plan does not state {statement}", origin, fix))


def check_optimizer(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Raise ApplyError if the optimizer lacks parameters of the model but has others.

    With pp, any parameter outside the model is an error.
    """
    if isinstance(model, PipelinedModule):
        if plan.mesh.size("pp") > 1 and (others := unknown_to_model(optimizer, model)):
            raise ApplyError(_beside_stages(others[0], plan))
    else:
        reshard_units(model, plan)  # A forward without backward leaves units gathered.
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {id(p) for p in model.parameters()}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]
    if missing and optimized - own:
        raise ApplyError(
            Problem(
                f"the optimizer lacks {missing[0]}, but has parameters that are not in the "
                "model: it was created before parallelize, or between a forward and its backward",
                fix="create the optimizer from model.parameters() after parallelize, before the "
                "first forward",
            )
        )


def _beside_stages(parameter: nn.Parameter, plan: Plan) -> Problem:
    """Return the problem of a pipeline's optimizer with a parameter outside the model."""
    return Problem(
        f"the optimizer trains a parameter of shape {list(parameter.shape)} that is not in the "
        "pipelined model: a loss with its own parameters would run on the last stage only",
        plan.spec.origin("mesh.pp"),
        "move the module that owns this parameter into the model",
    )


def _call(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output.

    Raises:
        ApplyError: A sharded parameter was used where no FSDP unit gathers it, or, in the previous
            step, a parameter that DistributedDataParallel waits for got no gradient.
    """
    try:
        return _forward(model, inputs)
    except RuntimeError as error:
        if "find_unused_parameters" in str(error):
            raise ApplyError(
                Problem(
                    "in the previous step, some parameters got no gradient on this rank, and "
                    "DistributedDataParallel waited for them (see the traceback above)",
                    fix="set ddp: {find_unused_parameters: true} in the plan, or freeze the "
                    "parameters that are never used",
                )
            ) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ApplyError(
            Problem(
                "a sharded parameter is used outside the forward of the module that owns it, "
                "where no unit gathers it (see the traceback above)",
                fix="set unit: false for a block whose forward the model does not call, or keep "
                "that parameter replicated",
            )
        ) from error


def _forward(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_arguments(inputs)
    return model(*args, **kwargs)
