"""Training in one process without any plan: the reference that `verify` compares a plan with.

How far two correct trainings may drift apart depends on the model. A sum in another order rounds
differently, and half precision rounds at every step. A deep network amplifies such differences, and
so does an activation close to a kink, such as that of ReLU at 0. So the process also trains a
second time, with simulated rounding. The two trainings differ by the effect of rounding alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.plan.verdict import TrainingRun
from meshplan.runtime.base.batch import chunked, mapped, part_of, taken_together
from meshplan.runtime.base.batch_agreement import num_samples
from meshplan.runtime.trace.sample import call, results, sample_inputs, sample_loss, sample_targets
from meshplan.spec.spec import Spec

STEPS: Final = 3
"""Number of training steps. The checks of the first steps are over in the third, which therefore
issues the collectives of an ordinary step."""
_RELATIVE_UPDATE: Final = 0.02
"""Norm of the first update relative to that of the weights: far above rounding, but stable."""
_MOMENTUM: Final = 0.9
SAFE_SCALE: Final = 2.0**8
"""An fp16 loss scale at which no gradient here overflows: a skipped step would prove nothing."""
_MOST_GROWTH: Final = 1.5
"""Ratio of a loss to that of the untrained model, above which training counts as unstable."""
_NOISY: Final = 3
"""Number of trainings with noise if the plan computes in float32. A single one may miss a kink."""
_NOISE: Final = 2.0**-22
"""Standard deviation of the noise, relative to the root mean square of the tensor."""
_SLOWER: Final = 0.25
"""Factor by which the learning rate is lowered after an unstable training."""
_TRIES: Final = 6
"""Largest number of learning rates tried."""
WHOLE_BYTES: Final = 2 * 2**30
"""Most bytes saved for backward with which one process takes a global batch at once."""
_ALIKE: Final = 2**10
"""Units in the last place of the largest result, up to which results count as equal."""

OnStep = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Batches:
    """Global batches of random numbers, the same for the plan and for one process.

    Args:
        model: The model of one process, from whose forward the inputs are derived.
        plan: The plan that is verified.
        shapes: Shapes of the model's results, with samples along dim 0, as `prepare` returns them.
        samples: Number of samples in a global batch.
        parts: Number of parts in which one process takes a global batch (`parts_for_memory`).
    """

    model: nn.Module
    plan: Plan
    shapes: list[tuple[int, ...]]
    samples: int
    parts: int = 1

    def of(self, step: int, model: nn.Module) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Return (inputs, targets) of a step, with inputs in the dtype of the `model` given."""
        inputs = sample_inputs(self.model, self.plan.spec, self.samples, step)
        inputs = in_dtype_of(model, inputs)
        a = self.plan.assignment
        classes = a.loss_parallel or a.chunked_loss is not None
        return inputs, sample_targets(self.shapes, self.samples, step, are_classes=classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProcess:
    """Training in one process, and the effect of the plan's precision on it.

    Args:
        rate: The highest learning rate tried at which training is stable, or else the lowest.
        model: The model after the last step.
        training: Losses and gradient norms.
        rounded: Losses and gradient norms of each training with simulated rounding.
        moved_by_rounding: {name: largest distance of a parameter or buffer after the last step of
            a training in `rounded` from that of `model`}.
    """

    rate: float
    model: nn.Module
    training: TrainingRun
    rounded: tuple[TrainingRun, ...]
    moved_by_rounding: Mapping[str, float]


def in_dtype_of(model: nn.Module, inputs: Any) -> Any:
    """Convert floating-point inputs to the dtype of the model's first floating-point parameter."""
    stored = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(stored, torch.float32)

    def fit(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return mapped(inputs, fit)


class Trial(NamedTuple):
    """Facts about a model from one forward and backward.

    Attributes:
        shapes: Shapes of the model's results for two samples.
        rate: Learning rate at which one step changes the weights by 2 %, measured by their norm.
        unused: Names of the trainable parameters that got no gradient.
        sample_s: Seconds of the forward and backward of one sample.
    """

    shapes: list[tuple[int, ...]]
    rate: float
    unused: frozenset[str]
    sample_s: float


def prepare(
    model: nn.Module, spec: Spec, announce: Callable[[float], None] = lambda seconds: None
) -> Trial:
    """Run one forward and backward of a model, for what training it needs to know.

    Args:
        model: The model; its gradients are deleted.
        spec: The plan's spec, which states the inputs.
        announce: Called after the first forward with the seconds that the rest may take.

    Raises:
        ValueError: The output has no floating-point tensors of samples, the forward is random, or
            no parameter gets a gradient.
    """
    inputs = in_dtype_of(model, sample_inputs(model, spec, 2, 0))
    began = time.monotonic()
    first = results(call(model, inputs))
    forward_s = time.monotonic() - began
    announce(4 * forward_s)
    second = results(call(model, inputs))
    if not first or any(t.shape[0] != 2 for t in first):
        raise ValueError("its output has no floating-point tensors with the samples along dim 0")
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise ValueError("its forward draws random numbers: two calls on the same inputs differ")
    shapes = [tuple(t.shape) for t in first]
    began = time.monotonic()
    targets = sample_targets(shapes, 2, 0, are_classes=spec.loss_parallel or spec.loss_chunks != 1)
    sample_loss(first, targets).backward()
    sample_s = (forward_s + time.monotonic() - began) / 2
    moved = [p for p in model.parameters() if p.grad is not None]
    named = model.named_parameters()
    unused = frozenset(name for name, p in named if p.requires_grad and p.grad is None)
    gradients = torch.stack([p.grad.norm() for p in moved if p.grad is not None]).norm()
    weights = torch.stack([p.detach().norm() for p in moved]).norm()
    model.zero_grad()
    if not gradients > 0:
        raise ValueError("no parameter gets a gradient")
    return Trial(shapes, float(_RELATIVE_UPDATE * weights / gradients), unused, sample_s)


def train_alone(batches: Batches, rate: float, on_step: OnStep = lambda: None) -> OneProcess:
    """Train copies of the model, at ever lower learning rates until every training is stable.

    Args:
        batches: The global batches.
        rate: The learning rate to begin with; at most `_TRIES` are tried.
        on_step: Called before each step.
    """
    plan = batches.plan
    untrained = _untrained_losses(copy.deepcopy(batches.model), batches, on_step)
    for number in range(_TRIES):
        rate *= _SLOWER if number else 1.0
        model = copy.deepcopy(batches.model)
        trainings = [_train(model, batches, rate, on_step)]
        moved: dict[str, float] = {}
        for seed in range(1 if is_half(plan) else _NOISY):
            rounded = copy.deepcopy(batches.model)
            with _rounding(rounded, plan, seed) as round_stored:
                trainings.append(_train(rounded, batches, rate, on_step, round_stored))
            # Keep only the distances: several copies of the model may not fit in memory.
            after = dict(state_of(rounded))
            for name, value in state_of(model):
                apart = float((after[name].detach().double() - value.detach().double()).norm())
                moved[name] = max(moved.get(name, 0.0), apart)
        if all(_is_stable(training, untrained) for training in trainings):
            break
    return OneProcess(
        rate=rate,
        model=model,
        training=trainings[0],
        rounded=tuple(trainings[1:]),
        moved_by_rounding=moved,
    )


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every parameter and every persistent buffer."""
    yield from model.named_parameters()
    saved = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def num_steps_alone(plan: Plan) -> int:
    """Return the number of steps in one process if the first learning rate is stable."""
    return STEPS * (2 + (1 if is_half(plan) else _NOISY))


def _is_stable(training: TrainingRun, untrained: list[float]) -> bool:
    """Return True if no loss is NaN or far above that of the untrained model on the same batch."""
    pairs = zip(training.losses, untrained, strict=True)
    return all(loss <= _MOST_GROWTH * before for loss, before in pairs)


def _untrained_losses(model: nn.Module, batches: Batches, on_step: OnStep) -> list[float]:
    """Return the losses of the batches of all steps before any training."""
    losses = []
    for step in range(STEPS):
        on_step()
        parts = _parts(model, batches, step)
        with torch.no_grad():
            found = [sample_loss(call(model, inputs), targets) for inputs, targets, _ in parts]
        losses.append(float(torch.stack(found).mean()))
    return losses


def _train(
    model: nn.Module,
    batches: Batches,
    rate: float,
    on_step: OnStep,
    after_step: Callable[[], None] = lambda: None,
) -> TrainingRun:
    """Train `STEPS` steps in plain PyTorch.

    The global batch is cut only if running it whole would change the result or take too much memory
    (`_parts`).

    Args:
        model: The model, which is changed.
        batches: The global batches.
        rate: The learning rate.
        on_step: Called before each step.
        after_step: Called after each optimizer step.
    """
    plan, optimizer = batches.plan, sgd(model, rate)
    losses, norms = [], []
    scale = SAFE_SCALE if plan.spec.precision.scales_loss else 1.0
    for step in range(STEPS):
        on_step()
        loss, parts = 0.0, _parts(model, batches, step)
        for inputs, targets, keeps_statistics in parts:
            kept = {} if keeps_statistics else {n: b.clone() for n, b in model.named_buffers()}
            part = sample_loss(call(model, inputs), targets) / len(parts)
            (part * scale).backward()
            loss += float(part.detach())
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.data.copy_(kept[name])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        if plan.spec.clip_grad_norm is not None:
            norm = _gradient_norm(model)
            nn.utils.clip_grads_with_norm_(model.parameters(), plan.spec.clip_grad_norm, norm)
        if step < STEPS - 1:
            norms.append(float(_gradient_norm(model)))
        optimizer.step()
        after_step()
        optimizer.zero_grad()
        losses.append(loss)
    return TrainingRun(losses=tuple(losses), norms=tuple(norms))


def _gradient_norm(model: nn.Module) -> torch.Tensor:
    """Return the norm of all gradients, added up in float64: see `gradient_scale`."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = (torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients)
    return sum(squares, torch.zeros((), dtype=torch.float64)).sqrt().float()


def parts_for_memory(model: nn.Module, plan: Plan, samples: int) -> int:
    """Return in how many parts one process takes a global batch, so that its memory suffices.

    It is 1 if the batch is small, or if results of a sample depend on the samples beside it. Only
    without such dependence is the gradient of the batch the mean of those of its parts; otherwise a
    plan's own microbatches change the result, which a reference cut in the same way would hide.

    Args:
        model: A copy of the model, whose buffers the forwards may change.
        plan: The plan that is verified.
        samples: Number of samples in a global batch.
    """
    tried = 4
    inputs = in_dtype_of(model, sample_inputs(model, plan.spec, tried, 0))
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        together = results(call(model, inputs))
    for held in state_of(model):
        saved.pop(held[1].untyped_storage().data_ptr(), None)
    needed = samples * sum(saved.values()) / tried
    fitting = (n for n in range(1, samples + 1) if samples % n == 0 and needed <= n * WHOLE_BYTES)
    parts = next(fitting, samples)
    if parts == 1:
        return 1
    with torch.no_grad():
        halves = [results(call(model, each)) for each in chunked(inputs, 2)]
    for whole, *half in zip(together, *halves, strict=True):
        allowed = _ALIKE * torch.finfo(whole.dtype).eps * float(whole.detach().abs().max())
        apart = (whole.detach() - torch.cat(half)).abs().max()
        if not float(apart) <= allowed:
            return 1
    return parts


def _parts(
    model: nn.Module, batches: Batches, step: int
) -> list[tuple[Any, tuple[torch.Tensor, ...], bool]]:
    """Cut the global batch of a step into parts that run separately; return them as tuples.

    Each part is (inputs, targets, keeps_statistics). If `keeps_statistics` is False, the buffers
    that the forward changes must be restored. That is so for parts of data ranks other than 0 if
    norms are not synchronized, because only the running statistics of rank 0 are saved.
    """
    plan, batch = batches.plan, batches.of(step, model)
    if batches.parts > 1:
        return [(*part, True) for part in chunked(batch, batches.parts)]
    count, ranks = microbatches_alone(model, plan), plan.num_data_ranks
    if not own_statistics(model, plan):
        return [(*part, True) for part in taken_together(batch, ranks, count)]

    rows = num_samples(batch)

    def cut(rank: int, number: int) -> Any:
        def one(tensor: torch.Tensor) -> torch.Tensor:
            own = part_of(tensor, ranks, rank, "data ranks", rows)
            return part_of(own, count, number, "microbatches", rows)

        return mapped(batch, one)

    return [(*cut(r, number), r == 0) for number in range(count) for r in range(ranks)]


def microbatches_alone(model: nn.Module, plan: Plan) -> int:
    """Return the number of microbatches that one process must cut its batch into for equal results.

    It is 1 unless the model trains with BatchNorm, whose statistics, and so whose results, depend
    on which samples run together.
    """
    if not any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
        return 1
    return plan.num_microbatches


def own_statistics(model: nn.Module, plan: Plan) -> list[str]:
    """Return fqns of the modules whose statistics cover only the samples of one data rank."""
    if plan.mesh.size(*DATA_AXES) == 1:
        return []
    found = [n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    found += [n for n, m in model.named_modules() if plan.graph.tracks_statistics(n) and m.training]
    return [name for name in dict.fromkeys(found) if name not in plan.assignment.synchronized]


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return SGD with momentum. Adam would turn rounding errors into steps of full size."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=rate, momentum=_MOMENTUM)


def is_half(plan: Plan) -> bool:
    """Return True if any tensor is stored or computed with in fewer than 32 bits."""
    words = {w for p in plan.assignment.tensors.values() for w in (p.dtype, p.compute_dtype)}
    kinds = [d for d in (getattr(torch, word) for word in words) if d.is_floating_point]
    return any(torch.finfo(kind).bits < 32 for kind in kinds)


@contextmanager
def _rounding(model: nn.Module, plan: Plan, seed: int) -> Iterator[Callable[[], None]]:
    """Simulate the plan's precision: round weights, outputs of modules, and gradients of both.

    Values are rounded to the plan's dtypes and converted back, so that the model still computes in
    its own dtype. If the plan computes in float32, outputs get noise instead, because the rounding
    of a sum in another order cannot be predicted. The noise is a few units in the last place of a
    typical element.

    Args:
        model: A copy of the model, changed for the time of the context.
        plan: The plan, with the stored and the computed dtype of every parameter.
        seed: Seed of the noise.

    Yields:
        A function that rounds the parameters to their stored dtype, to call after each step.
    """
    tensors = plan.assignment.tensors
    names = [n for n, p in model.named_parameters() if n in tensors and p.is_floating_point()]
    computed = {n: getattr(torch, tensors[n].compute_dtype) for n in names}
    coarsest = max(computed.values(), key=lambda kind: torch.finfo(kind).eps)
    forward, is_inside = model.forward, False
    generator = torch.Generator().manual_seed(seed)

    def disturbed(t: torch.Tensor) -> torch.Tensor:
        if coarsest.itemsize < 4 or not t.is_floating_point():
            return _round(t, coarsest)
        size = t.detach().square().mean().sqrt() * _NOISE
        return t + size * torch.randn(t.shape, generator=generator).to(t.dtype)

    def rounded(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return forward(*args, **kwargs)
        own = dict(model.named_parameters())
        weights = {n: _round(own[n], kind) for n, kind in computed.items()}
        is_inside = True
        try:
            return functional_call(model, weights, args, kwargs)
        finally:
            is_inside = False

    def leave(module: nn.Module, _args: Any, output: Any) -> Any:
        return mapped(output, disturbed) if _is_plain(output) else output

    def round_stored() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in tensors:
                    parameter.copy_(_round(parameter, getattr(torch, tensors[name].dtype)))

    handles = [m.register_forward_hook(leave) for m in model.modules()]
    round_stored()
    model.forward = rounded
    try:
        yield round_stored
    finally:
        del model.forward
        for handle in handles:
            handle.remove()


def _is_plain(output: Any) -> bool:
    return isinstance(output, torch.Tensor) or type(output) in (tuple, list)


def _round(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Round a floating-point tensor to a dtype and convert it back; its gradient is rounded too."""
    return tensor.to(kind).to(tensor.dtype) if tensor.is_floating_point() else tensor
