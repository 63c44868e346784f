"""`meshplan verify`: run a plan on local processes, and compare it with training in one process.

Every process builds the same small model. Rank 0 also trains a copy of it without any plan. Losses,
gradient norms and every parameter after SGD must agree. In addition, the bytes of state and the
collectives of one step are measured and compared with those that the layouts predict.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from meshplan.assign import Assignment
from meshplan.errors import MeshplanError, Problem, SpecError
from meshplan.memory import StateBytes, state_bytes
from meshplan.plan.plan import Plan
from meshplan.plan.verdict import (
    HALF,
    ROUNDINGS,
    SINGLE,
    RankReport,
    Shift,
    StateComparison,
    Tolerance,
    TrainingRun,
    Verdict,
)
from meshplan.runtime.apply.parameters.initial_values import initialise
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.held_bytes import live_bytes
from meshplan.runtime.base.local_ranks import Send, Work, run_ranks
from meshplan.runtime.estimate.scale_down import ModelSource, Small, model_of_source
from meshplan.runtime.parallelize import parallelize
from meshplan.runtime.trace.collectives import counting
from meshplan.runtime.trace.sample import sample_inputs, sample_loss
from meshplan.runtime.trace.structure import graph_of
from meshplan.runtime.train.gradient_scale import clip_grad_norm_
from meshplan.runtime.train.one_process import (
    SAFE_SCALE,
    STEPS,
    Batches,
    OneProcess,
    OnStep,
    Trial,
    is_half,
    microbatches_alone,
    num_steps_alone,
    own_statistics,
    parts_for_memory,
    prepare,
    sgd,
    state_of,
    train_alone,
)
from meshplan.runtime.train.state import full_state_dict
from meshplan.runtime.train.step import local_batch, train_step
from meshplan.runtime.verify.module_calls import record_forward
from meshplan.spec.spec import Spec
from meshplan.traffic import Forecast, differences, forecast
from meshplan.units import format_seconds

SEED: Final = 0
_OPTIMIZER: Final = "sgd_momentum"
_LONG_S: Final = 10.0
"""Seconds from which work of the ranks is reported."""


def verify(small: Small, report: Callable[[str], None]) -> Verdict:
    """Run the small plan and compare it with training in one process.

    Args:
        small: The scaled-down plan and model.
        report: Called with a line of text about the progress.

    Returns:
        The verdict, with all comparisons; with only the error text as `refusal` if the plan cannot
        be applied.

    Raises:
        SpecError: The model cannot be trained in one process, so there is no reference.
    """
    sizes = small.spec.mesh
    assert sizes is not None
    assert not isinstance(sizes, str | tuple)
    world = 1
    for size in sizes.values():
        world *= size if isinstance(size, int) else 1
    report(f"{world} processes on this machine's CPU; one of them also trains without the plan")
    common: dict[str, Any] = {
        "world": world, "notes": small.notes, "unmatched": small.unmatched
    }  # fmt: skip
    found: dict[str, Any] = {}
    told: set[str] = set()
    ranks: dict[int, RankReport] = {}
    try:
        with closing(run_ranks(world, world, _verify_rank, small.spec, small.source)) as messages:
            for rank, message in messages:
                if isinstance(message, RankReport):
                    ranks[rank] = message
                elif isinstance(message, Problem):
                    raise SpecError(message)
                elif isinstance(message, Work):
                    if message.seconds >= _LONG_S and message.what not in told:
                        report(f"{message.what}: about {format_seconds(message.seconds)}")
                        told.add(message.what)
                else:
                    found |= message
    except SpecError:
        raise
    except MeshplanError as error:
        refusal = "\n".join(str(problem) for problem in error.problems)
        return Verdict(**common, refusal=refusal)
    if (parts := found.pop("parts")) > 1:
        # The whole batch might not fit in this machine's memory.
        common["notes"] = (*small.notes, f"batch of one process: taken in {parts} parts")
    return Verdict(**common, ranks=tuple(ranks[rank] for rank in range(world)), **found)


def _verify_rank(send: Send, spec: Spec, source: ModelSource) -> None:
    """Train on this rank and send its `RankReport`. Rank 0 also trains alone, and compares."""
    warnings.filterwarnings("ignore")
    # Ranks warn of a rank that they wait for. Here that is rank 0, which says what it does.
    logging.getLogger("meshplan").setLevel(logging.ERROR)
    is_first = dist.get_rank() == 0

    def announce(seconds: float, what: str = "a forward and a backward in one process") -> None:
        send(Work(what, seconds))

    torch.manual_seed(SEED)
    model = _materialise(model_of_source(source)).train()
    _without_dropout(model)
    alone = copy.deepcopy(model)
    shared: list[Any] = [None]
    if is_first:
        try:
            shared = [prepare(copy.deepcopy(alone), spec, announce)]
        except Exception as error:  # The model's own code may raise anything.
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            what = f"the small model cannot be trained in one process: {text}"
            shared = [Problem(what, source.origin)]
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], Problem):
        if is_first:
            send(shared[0])
        return
    trial: Trial = shared[0]
    before = {n: t.detach().clone() for n, t in state_of(model)}
    micro = int(spec.batch.micro or 1)
    spec = replace(spec, loss="mean")  # `sample_loss` is a mean.
    inputs = sample_inputs(model, spec, micro, 0)
    # Ranks that share a core take turns.
    crowd = max(1.0, dist.get_world_size() / (os.cpu_count() or 1))
    announce(micro * trial.sample_s * crowd, "a microbatch of every rank")
    model = parallelize(model, spec, example_inputs=inputs)
    plan = applied(model).plan
    if applied(model).loss_scale != 1.0:
        applied(model).loss_scale = SAFE_SCALE
    samples = micro * plan.accumulate * plan.num_data_ranks
    batches = Batches(alone, plan, trial.shapes, samples)
    if is_first:
        batches = replace(batches, parts=parts_for_memory(copy.deepcopy(alone), plan, samples))
    inputs, targets = local_batch(model, batches.of(0, model))
    forward = record_forward(copy.deepcopy(alone), plan, inputs, targets, sample_loss)
    expected = forecast(plan, forward, dist.get_rank())
    step_s = samples * trial.sample_s
    what = f"each of {num_steps_alone(plan)} steps or more in one process, of {samples} samples"
    on_step = partial(announce, step_s, what)
    single = train_alone(batches, trial.rate, on_step) if is_first else None
    chosen = [single.rate if single is not None else 0.0]
    dist.broadcast_object_list(chosen, src=0)
    predicted = _state_bytes(plan.assignment, trial.unused)
    step_s = step_s / plan.num_data_ranks * crowd
    on_step = partial(announce, step_s, f"each of {STEPS} steps under the plan")
    training, report = _train_together(
        model, plan, expected, predicted, batches, chosen[0], on_step
    )
    state = full_state_dict(model)
    if single is not None:
        tolerance = HALF if is_half(plan) else SINGLE
        send(
            {
                "together": training, "alone": single.training, "rounded": single.rounded,
                "tolerance": tolerance, "mesh": str(plan.mesh),
                "num_tensors": len(plan.assignment.tensors),
                "moved": _compare(before, single, state, tolerance, plan),
                "microbatches": microbatches_alone(alone, plan),
                "own_statistics": tuple(own_statistics(alone, plan)),
                "parts": batches.parts,
            }
        )  # fmt: skip
    send(report)


def _materialise(model: nn.Module) -> nn.Module:
    """Give a model on meta the initial values that one process would draw; return the model."""
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
    """Set every dropout rate to 0, because several processes would draw other masks than one."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _train_together(
    model: nn.Module,
    plan: Plan,
    expected: Forecast,
    predicted: StateBytes,
    batches: Batches,
    rate: float,
    on_step: OnStep,
) -> tuple[TrainingRun, RankReport]:
    """Train under the plan; return losses and norms, and a report of bytes and collectives.

    Args:
        model: The module that `parallelize` returned.
        plan: Its plan.
        expected: The predicted collectives of a step, compared with those of the last step.
        predicted: The predicted bytes of this rank's state.
        batches: The global batches.
        rate: The learning rate.
        on_step: Called before each step.
    """
    optimizer = sgd(model, rate)
    losses: list[float] = []
    norms: list[float] = []
    state_bytes: list[StateBytes] = []

    def measure(*_: Any) -> None:
        if len(losses) < STEPS - 1:
            norms.append(float(clip_grad_norm_(model, float("inf"))))
        else:
            state_bytes.append(live_bytes(model, optimizer))

    optimizer.register_step_pre_hook(measure)
    for step in range(STEPS - 1):
        on_step()
        inputs, targets = local_batch(model, batches.of(step, model))
        losses.append(train_step(model, optimizer, inputs, targets, sample_loss))
    on_step()
    inputs, targets = local_batch(model, batches.of(STEPS - 1, model))
    with counting(plan.mesh) as counted:
        losses.append(train_step(model, optimizer, inputs, targets, sample_loss))
    report = RankReport(
        measured=state_bytes[0],
        predicted=predicted,
        sent=differences(expected, counted),
        num_collectives=sum(counted.values()),
        collective_bytes=sum(route.num_bytes * times for route, times in counted.items()),
        unknown=expected.unknown,
        num_routed=sum(each.count for each in expected.traffic if each.routed),
    )
    return TrainingRun(losses=tuple(losses), norms=tuple(norms)), report


def _state_bytes(assignment: Assignment, unused: frozenset[str]) -> StateBytes:
    """Return the predicted bytes of this rank's state.

    A plan cannot know that the model's forward leaves a parameter out, so that the optimizer has no
    state for it. The buffers into which FSDP2 and DDP reduce gradients have a place for it.

    Args:
        assignment: The decisions of the plan.
        unused: Names of the trainable parameters that get no gradient.
    """
    left_out = {fqn for fqn, p in assignment.tensors.items() if unused & {*p.info.names}}
    alone = {fqn for fqn in left_out if assignment.tensors[fqn].unit is None}
    if assignment.wrapper == "ddp":
        alone = set()

    def without(some: set[str]) -> StateBytes:
        tensors = {
            fqn: replace(p, info=replace(p.info, trainable=False)) if fqn in some else p
            for fqn, p in assignment.tensors.items()
        }
        return state_bytes(replace(assignment, tensors=tensors), _OPTIMIZER, dist.get_rank())

    return replace(without(left_out), gradients_bytes=without(alone).gradients_bytes)


def _compare(
    before: dict[str, torch.Tensor],
    single: OneProcess,
    live: dict[str, torch.Tensor],
    tolerance: Tolerance,
    plan: Plan,
) -> StateComparison:
    """Compare each parameter and buffer after the last step with that of one process.

    Args:
        before: Initial values, by name.
        single: Training in one process.
        live: Values after training under the plan, by name (`full_state_dict`).
        tolerance: The differences that rounding may cause.
        plan: The plan.
    """
    after = dict(state_of(single.model))
    trained = {name for name, _ in single.model.named_parameters()}
    steps = {name: (now.detach() - before[name]).double() for name, now in after.items()}
    numel = sum(steps[name].numel() for name in trained)
    mean_square = sum(float(steps[name].square().sum()) for name in trained) / numel
    found: list[Shift] = []
    for name, step in steps.items():
        now = after[name].detach().double()
        moved, apart = float(step.norm()), float((live[name].double() - now).norm())
        noise = 0.0
        if after[name].is_floating_point():
            stored = torch.finfo(getattr(torch, plan.assignment.tensors[name].dtype))
            noise = 4 * stored.eps * float(now.norm())
        if name in trained:
            noise += tolerance.noise * (mean_square * step.numel()) ** 0.5
        allowed = noise + tolerance.relative * moved * after[name].is_floating_point()
        allowed = max(allowed, ROUNDINGS * single.moved_by_rounding[name])
        found.append(
            Shift(
                name=name,
                is_buffer=name not in trained,
                is_visible=moved > 4 * noise,
                moved=moved,
                apart=apart,
                allowed=allowed,
            )
        )
    return StateComparison(shifts=tuple(found))
