"""One loop for every plan: this rank's batch, one step, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.mesh import DATA_AXES
from meshplan.plan import Plan
from meshplan.runtime.applied import Applied, applied
from meshplan.runtime.batch import as_arguments, chunk, chunked, mapped
from meshplan.runtime.checks.steps import StepCheck
from meshplan.runtime.context.batch import local_sequence
from meshplan.runtime.data import params_on_host, reshard_units, set_gradient_sync
from meshplan.runtime.guard import guarded
from meshplan.runtime.host import to_device, to_host
from meshplan.runtime.loss import take_loss
from meshplan.runtime.loss_mode import loss_mode
from meshplan.runtime.loss_weights import Weights
from meshplan.runtime.mesh import device, local_of, shard_axes, submesh, without_partial
from meshplan.runtime.moments import begin
from meshplan.runtime.outside import guard_loss
from meshplan.runtime.peers import check_peers, mean_over_ranks, num_samples
from meshplan.runtime.pipeline.module import PipelinedModule
from meshplan.runtime.pretend import numbers
from meshplan.runtime.selftest import check_loss

_SCALE_WINDOW = 2000
"""Steps without overflow after which the fp16 loss scale doubles (torch.amp.GradScaler's)."""


@guarded()
def local_batch(model: nn.Module, batch: Any) -> Any:
    """This rank's part of a global batch, on this rank's device.

    Args:
        model: What `parallelize` returned.
        batch: A tensor, or a tuple, list or mapping of tensors, each with the samples along
            dim 0. What is not a tensor, or has no dims, is passed on as it is. Under cp the
            tensors whose dim 1 is the sequence are cut along it too (`local_sequence`).

    Raises:
        ApplyError: The samples do not divide over the data ranks, or the sequence not over cp.
    """
    plan = applied(model).plan
    if plan.assignment.context is not None:
        batch = local_sequence(plan, batch)
    ranks = plan.num_data_ranks
    index = plan.mesh.index(dist.get_rank(), DATA_AXES)
    return mapped(batch, lambda t: chunk(t, ranks, "data ranks")[index].to(device()))


@guarded()
def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Any],
) -> float:
    """Forward, backward, one optimizer step, gradients zeroed.

    Args:
        model: What `parallelize` returned.
        optimizer: Made from `model.parameters()` after `parallelize`.
        inputs: This rank's inputs (`local_batch`): a tensor, a tuple of arguments or a mapping
            of keyword arguments.
        targets: This rank's targets: whatever `loss_fn` takes, cut along dim 0 like the inputs.
        loss_fn: Gets the model's output and the targets; returns the mean over the samples, or
            what the plan's `loss` says, or (sum, count): the sum over what it was given, and over
            how many samples or tokens it was taken.

    Returns:
        The loss over the global batch, the same number on every rank: the mean, or the sum under
        `loss: sum`. It is 0 where no token is left to take a mean over.

    The plan says how many microbatches the inputs are cut into (`batch.accumulate`) and at what
    norm gradients are clipped (`clip_grad_norm`).
    """
    state = applied(model)
    guard: AbstractContextManager[object] = nullcontext()
    if not state.is_tested:
        _check_optimizer(model, state.plan, optimizer)
        guard = guard_loss(model, state.plan)
    check_peers((inputs, targets), state.plan, state.mesh)
    weights = Weights(state.plan, state.mesh, state.history, (inputs, targets))
    count = state.plan.accumulate
    parts = zip(chunked(inputs, count), chunked(weights.marked(targets), count), strict=True)
    total: torch.Tensor | float = 0.0
    check = _step_check(model, state, loss_fn, (inputs, targets))

    def take(output: Any, marked: tuple[Any, torch.Tensor | None]) -> torch.Tensor:
        begin("loss")
        target, tokens = marked
        with guard:
            given = take_loss(loss_fn, output, target)
        loss = weights.weigh(given, output, tokens)
        check.see(output, target)
        begin("backward")
        return loss

    for number, (part, target) in enumerate(parts):
        if isinstance(model, PipelinedModule):
            scale, is_last = state.loss_scale / count, number == count - 1
            with loss_mode(state.plan):
                total = total + model.step(part, target, take, scale=scale, is_last=is_last)
            continue
        begin("forward")
        with set_gradient_sync(model, state.plan, number == count - 1), loss_mode(state.plan):
            loss = take(_call(model, part), target)
            (loss * (state.loss_scale / count)).backward()
        # Kept at least as wide as float32: half precision would round the mean.
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
    check.settle()
    begin("step")
    factor = weights.factor(counted)
    if _unscale(model, optimizer, state, factor):
        if state.plan.spec.clip_grad_norm is not None:
            clip_grad_norm_(model, state.plan.spec.clip_grad_norm)
        if is_first and isinstance(model, PipelinedModule):
            _agreed_step(optimizer)
        else:
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state.history.steps += 1
    return float(numbers(mean, 0.0)) * factor


def _step_check(model: nn.Module, state: Applied, loss_fn: Any, batch: Any) -> StepCheck:
    """Looks at the first microbatch of this step."""
    stages = state.plan.assignment.stages
    microbatches = state.plan.accumulate * (stages.microbatches if stages is not None else 1)
    samples = num_samples(batch) // microbatches
    first = batch if microbatches == 1 else chunked(batch, microbatches)[0]
    step = state.history.steps + 1
    return StepCheck(model, state.plan, loss_fn, step=step, batch=first, samples=samples)


def _agreed_step(optimizer: torch.optim.Optimizer) -> None:
    """The first step: what the self-test of one stage refuses is raised in all of them."""
    failure: ApplyError | None = None
    try:
        optimizer.step()
    except ApplyError as error:
        failure = error
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, str(failure) if failure else "")
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text:
            raise ApplyError(Problem(f"rank {rank} refuses its first step: {text}"))


@contextmanager
def loss_parallel(model: nn.Module) -> Iterator[None]:
    """Keep the logits cut over the vocabulary, in a loop of one's own.

    Inside, `F.cross_entropy` and `nn.CrossEntropyLoss` on the model's logits are computed on
    parts; outside, the head gathers them. Put forward, loss and backward inside.

    Args:
        model: What `parallelize` returned, under a plan that says `loss_parallel: true`.

    Raises:
        ApplyError: The plan does not say so.
    """
    plan = applied(model).plan
    if not plan.assignment.loss_parallel:
        raise _unsaid(plan, "loss_parallel: true", "add it, with a head that has the style vocab")
    with loss_mode(plan):
        yield


@contextmanager
def chunked_loss(model: nn.Module) -> Iterator[None]:
    """Compute head and loss over parts of the tokens, in a loop of one's own.

    Inside, what the model gives in place of logits has no numbers: `F.cross_entropy` and
    `nn.CrossEntropyLoss` of it compute head and loss together; outside, the head gives whole
    logits. Put forward, loss and backward inside.

    Args:
        model: What `parallelize` returned, under a plan that says `loss_chunks`.

    Raises:
        ApplyError: The plan does not say so, or no cross-entropy was taken inside.
    """
    plan = applied(model).plan
    if plan.assignment.chunked_loss is None:
        raise _unsaid(plan, "loss_chunks", "add loss_chunks: 8")
    with loss_mode(plan):
        yield


def _unsaid(plan: Plan, statement: str, fix: str) -> ApplyError:
    """A mode of the loss was asked for that the plan does not state."""
    origin = plan.spec.origin(statement.partition(":")[0])
    return ApplyError(Problem(f"this model's plan does not say {statement}", origin, fix))


def _check_optimizer(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of the parameters that the model had at another time."""
    if not isinstance(model, PipelinedModule):
        reshard_units(model, plan)  # What a forward without a backward left gathered.
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {id(p) for p in model.parameters()}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing and held - own:
        raise ApplyError(
            Problem(
                f"the optimizer does not hold {missing[0]}, but holds parameters that are not in "
                "the model: it was made before parallelize, or between a forward and its backward",
                fix="make it from model.parameters() after parallelize, before the first forward",
            )
        )


def _call(model: nn.Module, inputs: Any) -> Any:
    """The model's output.

    Raises:
        ApplyError: A parameter that lies in parts is used where nothing gathers it, or one that
            DistributedDataParallel waits for got no gradient.
    """
    try:
        return _forward(model, inputs)
    except RuntimeError as error:
        if "find_unused_parameters" in str(error):
            raise ApplyError(
                Problem(
                    "in the step before, some parameters got no gradient on this rank, and "
                    "DistributedDataParallel waited for them (see the traceback above)",
                    fix="say ddp: {find_unused_parameters: true}, or freeze what is never used",
                )
            ) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ApplyError(
            Problem(
                "a parameter that lies in parts is used outside the forward of the module that "
                "holds it, so nothing gathers it there (see the traceback above)",
                fix="say unit: false for a block whose forward the model does not call, or leave "
                "that parameter whole",
            )
        ) from error


def _forward(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_arguments(inputs)
    return model(*args, **kwargs)


@guarded()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`.

    torch's function raises where parameters lie on different meshes; this one counts each
    element once whatever cuts it.

    Args:
        max_norm: The largest norm allowed; infinity only measures.
        norm_type: p of the p-norm; `inf` for the largest element.

    Returns:
        The norm before clipping, the same on every rank.
    """
    mesh = applied(model).mesh
    gradients = _gradients(model)
    pipeline = model if isinstance(model, PipelinedModule) else None
    on_host = _on_host(model)
    by_axes: dict[tuple[tuple[str, ...], bool], list[torch.Tensor]] = {}
    for parameter, gradient in gradients:
        if pipeline is None or pipeline.shared.is_counted(parameter):
            key = shard_axes(gradient), parameter in on_host
            by_axes.setdefault(key, []).append(local_of(gradient))
    powers = []
    for (axes, is_there), parts in sorted(by_axes.items()):
        own = _power_sum(parts, norm_type)
        own = to_device(own) if is_there else own  # Where collectives reach it.
        powers.append(_sum_over(own, axes, mesh, norm_type))
    stacked = torch.stack([*powers, torch.zeros((), device=device())])
    power = stacked.max() if math.isinf(norm_type) else stacked.sum()
    if pipeline is not None:  # The other stages' gradients.
        power = _sum_over(power, ("pp",), mesh, norm_type)
    norm = power if math.isinf(norm_type) else power ** (1.0 / norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    here = [local_of(g) for p, g in gradients if p not in on_host]
    there = [local_of(g) for p, g in gradients if p in on_host]
    if here:
        torch._foreach_mul_(here, factor)
    if there:
        torch._foreach_mul_(there, to_host(factor))
    return norm


def _on_host(model: nn.Module) -> set[nn.Parameter]:
    """The parameters whose gradients lie in the host's memory."""
    return set(params_on_host(model, applied(model).plan))


def _gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Every parameter with its gradient, pending sums done in place.

    Args:
        optimizer: Whose other parameters count too: those of a criterion.
    """
    out = []
    held = optimizer.param_groups if optimizer is not None else ()
    others = (p for group in held for p in group["params"])
    for parameter in dict.fromkeys((*model.parameters(), *others)):
        if parameter.grad is not None:
            parameter.grad = without_partial(parameter.grad)
            out.append((parameter, parameter.grad))
    return out


def _power_sum(parts: Iterable[torch.Tensor], p: float) -> torch.Tensor:
    parts = [part for part in parts if part.numel()]
    if not parts:
        return torch.zeros((), device=device())
    norms = torch.stack([n.float() for n in torch._foreach_norm(parts, p)])
    return norms.max() if math.isinf(p) else (norms**p).sum()


def _sum_over(
    value: torch.Tensor, axes: tuple[str, ...], mesh: DeviceMesh, p: float
) -> torch.Tensor:
    """Along each axis that cuts these gradients, every rank holds other elements: add them."""
    for axis in axes:
        op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
        dist.all_reduce(value, op=op, group=submesh(mesh, (axis,)).get_group())
    return value


def _unscale(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Applied, factor: float
) -> bool:
    """Multiply gradients by what is left of the loss's weight, and undo the fp16 loss scale.

    Returns:
        False when some gradient overflowed and the step is skipped.

    Source: Micikevicius et al. 2018, section 3.2 (dynamic loss scaling).
    """
    is_scaled, factor = state.plan.spec.precision.scales_loss, factor / state.loss_scale
    if factor == 1.0 and not is_scaled:
        return True
    on_host = _on_host(model)
    found = _gradients(model, optimizer)
    here = [local_of(g) for p, g in found if p not in on_host]
    there = [local_of(g) for p, g in found if p in on_host]
    for gradients in (here, there):
        if gradients:
            torch._foreach_mul_(gradients, factor)
    if not is_scaled:
        return True
    finite = _are_finite(here) if here else torch.ones((), device=device())
    if there:
        finite = torch.minimum(finite, to_device(_are_finite(there)))
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if not numbers(finite, 1.0):
        state.loss_scale, state.steps_without_overflow = max(1.0, state.loss_scale / 2), 0
        return False
    state.steps_without_overflow += 1
    if state.steps_without_overflow == _SCALE_WINDOW:
        state.loss_scale, state.steps_without_overflow = state.loss_scale * 2, 0
    return True


def _are_finite(gradients: list[torch.Tensor]) -> torch.Tensor:
    """1 where all of them are finite."""
    return torch.stack([g.isfinite().all() for g in gradients]).all().float()
