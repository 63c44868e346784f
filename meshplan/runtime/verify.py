"""`meshplan verify`: a plan run on local processes, beside one process that knows of no plan.

Every process builds the same small model; the first one also trains a copy of it alone. Compared
are losses, gradient norms and every parameter after SGD; live bytes with those of the layouts,
and the collectives of one step with those the layouts predict.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshplan.errors import MeshplanError, Problem, SpecError
from meshplan.memory import StateBytes, state_bytes_by_rank
from meshplan.plan import Plan
from meshplan.runtime.applied import applied
from meshplan.runtime.batch import taken_together
from meshplan.runtime.count import counting
from meshplan.runtime.gradient_scale import clip_grad_norm_
from meshplan.runtime.initialise import initialise
from meshplan.runtime.local_ranks import Send, run_ranks
from meshplan.runtime.measure import live_bytes
from meshplan.runtime.parallelize import parallelize
from meshplan.runtime.sample import call, results, sample_inputs, sample_loss, sample_targets
from meshplan.runtime.shrink import Small, Source, model_of_source
from meshplan.runtime.state import full_state_dict
from meshplan.runtime.trace import graph_of
from meshplan.runtime.train import local_batch, train_step
from meshplan.runtime.visits import record_forward
from meshplan.spec import Spec
from meshplan.traffic import Forecast, differences, forecast
from meshplan.verdict import HALF, SINGLE, Moved, RankReport, Tolerance, Training, Verdict

STEPS: Final = 3
"""The third step sends what every later one sends: the self-tests are over."""
SEED: Final = 0
_RELATIVE_UPDATE: Final = 0.02
"""How far, relative to the weights, one step moves: far above rounding, far below divergence."""
_MOMENTUM: Final = 0.9
_OPTIMIZER: Final = "sgd_momentum"
_SAFE_SCALE: Final = 2.0**8
"""An fp16 loss scale that the losses here do not overflow: a skipped step proves nothing."""


def verify(small: Small, told: Callable[[str], None]) -> Verdict:
    """Run the small plan.

    Args:
        told: Is told what is being done.

    Raises:
        SpecError: The model alone cannot be trained, so that there is nothing to compare with.
    """
    sizes = small.spec.mesh
    assert sizes is not None
    assert not isinstance(sizes, str | tuple)
    world = 1
    for size in sizes.values():
        world *= size if isinstance(size, int) else 1
    told(f"{world} processes on the CPU of this machine, and one of them alone")
    common: dict[str, Any] = {
        "world": world, "notes": small.notes, "unmatched": small.unmatched
    }  # fmt: skip
    found: dict[str, Any] = {}
    ranks: dict[int, RankReport] = {}
    try:
        with closing(run_ranks(world, world, _verify_rank, small.spec, small.source)) as messages:
            for rank, message in messages:
                if isinstance(message, RankReport):
                    ranks[rank] = message
                elif isinstance(message, Problem):
                    raise SpecError(message)
                else:
                    found |= message
    except SpecError:
        raise
    except MeshplanError as error:
        refusal = "\n".join(str(problem) for problem in error.problems)
        return Verdict(**common, refusal=refusal)
    return Verdict(**common, ranks=tuple(ranks[rank] for rank in range(world)), **found)


def _verify_rank(send: Send, spec: Spec, source: Source) -> None:
    """One rank's part; rank 0 also trains alone, and compares."""
    warnings.filterwarnings("ignore")
    is_first = dist.get_rank() == 0
    torch.manual_seed(SEED)
    model = _materialise(model_of_source(source)).train()
    _without_dropout(model)
    alone = copy.deepcopy(model)
    shared: list[Any] = [None]
    if is_first:
        try:
            shared = [_prepare(alone, spec)]
        except Exception as error:  # The model's own code may raise anything.
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            shared = [Problem(f"one process cannot train the small model: {text}", source.origin)]
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], Problem):
        if is_first:
            send(shared[0])
        return
    shapes, rate = shared[0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    micro = int(spec.batch.micro or 1)
    spec = replace(spec, loss="mean")  # Which is what the losses here are.
    inputs = sample_inputs(model, spec, micro, 0)
    model = parallelize(model, spec, example_inputs=inputs)
    plan = applied(model).plan
    if applied(model).loss_scale != 1.0:
        applied(model).loss_scale = _SAFE_SCALE
    samples = micro * plan.accumulate * plan.num_data_ranks
    batches = _Batches(alone, plan, shapes, samples)
    inputs, targets = local_batch(model, batches.of(0))
    forward = record_forward(alone, plan, inputs, targets, sample_loss)
    told = forecast(plan, forward, dist.get_rank())
    training, report = _train_together(model, plan, told, batches, rate)
    state = full_state_dict(model)
    if is_first:
        single = _train_alone(alone, plan, batches, rate)
        tolerance = _tolerance(plan)
        after = dict(alone.named_parameters())
        send(
            {
                "together": training, "alone": single, "tolerance": tolerance,
                "mesh": str(plan.mesh), "num_tensors": len(plan.assignment.tensors),
                "moved": _compare(before, after, state, tolerance, plan),
                "microbatches": _microbatches_alone(alone, plan),
            }
        )  # fmt: skip
    send(report)


def _materialise(model: nn.Module) -> nn.Module:
    """A model on meta with the values that one process would draw."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return model
    names = {fqn: info.names for fqn, info in graph_of(model).tensors.items()}
    values: dict[str, torch.Tensor] = {}
    initialise(model, names, lambda fqn, value: values.__setitem__(fqn, value.clone()))
    for fqn, value in values.items():
        is_trained = model.get_parameter(fqn).requires_grad if _is_parameter(model, fqn) else None
        made = value if is_trained is None else nn.Parameter(value, requires_grad=is_trained)
        for name in names[fqn]:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, made)
    return model


def _is_parameter(model: nn.Module, fqn: str) -> bool:
    path, _, leaf = fqn.rpartition(".")
    return leaf in model.get_submodule(path)._parameters


def _without_dropout(model: nn.Module) -> None:
    """Set every drop rate to zero: processes draw other masks than one process does."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _prepare(model: nn.Module, spec: Spec) -> tuple[list[tuple[int, ...]], float]:
    """(shapes of the model's results, a learning rate that moves it visibly)."""
    inputs = sample_inputs(model, spec, 2, 0)
    first = results(call(model, inputs))
    again = results(call(model, inputs))
    if not first or any(t.shape[0] != 2 for t in first):
        raise ValueError("its output holds no numbers per sample to make a loss of")
    if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
        raise ValueError("its forward draws random numbers, so that two runs differ anyway")
    shapes = [tuple(t.shape) for t in first]
    targets = sample_targets(shapes, 2, 0, are_classes=spec.loss_parallel or spec.loss_chunks != 1)
    sample_loss(first, targets).backward()
    moved = [p for p in model.parameters() if p.grad is not None]
    gradients = torch.stack([p.grad.norm() for p in moved if p.grad is not None]).norm()
    weights = torch.stack([p.detach().norm() for p in moved]).norm()
    model.zero_grad()
    if not gradients > 0:
        raise ValueError("no parameter gets a gradient")
    return shapes, float(_RELATIVE_UPDATE * weights / gradients)


@dataclass(frozen=True, slots=True)
class _Batches:
    """The global batches, made from the model as one process has it."""

    model: nn.Module
    plan: Plan
    shapes: list[tuple[int, ...]]
    samples: int

    def of(self, step: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """(inputs, targets) of a step."""
        inputs = sample_inputs(self.model, self.plan.spec, self.samples, step)
        a = self.plan.assignment
        classes = a.loss_parallel or a.chunked_loss is not None
        return inputs, sample_targets(self.shapes, self.samples, step, are_classes=classes)


def _train_together(
    model: nn.Module, plan: Plan, told: Forecast, batches: _Batches, rate: float
) -> tuple[Training, RankReport]:
    """Train under the plan; the last step is counted."""
    optimizer = _sgd(model, rate)
    losses: list[float] = []
    norms: list[float] = []
    held: list[StateBytes] = []

    def measure(*_: Any) -> None:
        if len(losses) < STEPS - 1:
            norms.append(float(clip_grad_norm_(model, float("inf"))))
        else:
            held.append(live_bytes(model, optimizer))

    optimizer.register_step_pre_hook(measure)
    for step in range(STEPS - 1):
        inputs, targets = local_batch(model, batches.of(step))
        losses.append(train_step(model, optimizer, inputs, targets, sample_loss))
    inputs, targets = local_batch(model, batches.of(STEPS - 1))
    with counting(plan.mesh) as counted:
        losses.append(train_step(model, optimizer, inputs, targets, sample_loss))
    predicted = state_bytes_by_rank(plan.assignment, _OPTIMIZER)[dist.get_rank()]
    report = RankReport(
        held=held[0],
        predicted=predicted,
        sent=differences(told, counted),
        num_collectives=sum(counted.values()),
        collective_bytes=sum(route.num_bytes * times for route, times in counted.items()),
        unknown=told.unknown,
        num_routed=sum(each.count for each in told.traffic if each.routed),
    )
    return Training(losses=tuple(losses), norms=tuple(norms)), report


def _train_alone(model: nn.Module, plan: Plan, batches: _Batches, rate: float) -> Training:
    """The same training in plain PyTorch: one process, and one batch wherever that is the same."""
    optimizer = _sgd(model, rate)
    count = _microbatches_alone(model, plan)
    losses, norms = [], []
    for step in range(STEPS):
        loss = 0.0
        for inputs, targets in taken_together(batches.of(step), plan.num_data_ranks, count):
            part = sample_loss(call(model, inputs), targets) / count
            part.backward()
            loss += float(part.detach())
        if plan.spec.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.spec.clip_grad_norm)
        if step < STEPS - 1:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return Training(losses=tuple(losses), norms=tuple(norms))


def _microbatches_alone(model: nn.Module, plan: Plan) -> int:
    """Into how many microbatches the one process must cut its batch to compute the same.

    BatchNorm takes its statistics over what runs together, so its results depend on the cut.
    """
    if not any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
        return 1
    stages = plan.assignment.stages
    return plan.accumulate * (stages.microbatches if stages else 1)


def _sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=rate, momentum=_MOMENTUM)


def _dtype(plan: Plan) -> torch.dtype:
    """The coarsest dtype that anything is stored or computed in."""
    words = {w for p in plan.assignment.tensors.values() for w in (p.dtype, p.compute_dtype)}
    kinds = [d for d in (getattr(torch, word) for word in words) if d.is_floating_point]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)


def _tolerance(plan: Plan) -> Tolerance:
    return HALF if torch.finfo(_dtype(plan)).bits < 32 else SINGLE


def _compare(
    before: dict[str, torch.Tensor],
    after: dict[str, nn.Parameter],
    live: dict[str, torch.Tensor],
    tolerance: Tolerance,
    plan: Plan,
) -> Moved:
    """How far each parameter is from where one process moved it."""
    steps = {name: (p.detach() - before[name]).double() for name, p in after.items()}
    numel = sum(step.numel() for step in steps.values())
    mean_square = sum(float(step.square().sum()) for step in steps.values()) / numel
    shares: list[tuple[float, str]] = []
    wrong: list[tuple[float, str]] = []
    for name, step in steps.items():
        moved = float(step.norm())
        apart = float((live[name].double() - after[name].detach().double()).norm())
        noise = tolerance.noise * (mean_square * step.numel()) ** 0.5
        stored = torch.finfo(getattr(torch, plan.assignment.tensors[name].dtype))
        noise += 4 * stored.eps * float(after[name].detach().norm())
        share = apart / moved if moved else float("inf")
        if not apart <= noise + tolerance.relative * moved:
            wrong.append((share, name))
        if moved > 4 * noise:
            shares.append((share, name))
    wrong.sort(reverse=True)
    return Moved(
        num_judged=len(shares),
        num_still=len(steps) - len(shares),
        wrong=tuple((name, share) for share, name in wrong),
        worst=max((share for share, _ in shares), default=0.0),
    )
