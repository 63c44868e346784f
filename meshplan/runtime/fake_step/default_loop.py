"""A default training loop for estimates: inputs, targets, loss and optimizer of one rank.

A plan states no training loop, so one is assumed. All assumptions are stated in words, because the
estimate is valid for this loop only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from meshplan.errors import ApplyError, PlanError, Problem
from meshplan.layout.optimizers import called as called_by
from meshplan.memory.analytic.estimate import in_chunks, shares_of_experts
from meshplan.memory.replay.optimizer import OPTIMIZERS as RULES
from meshplan.plan.plan import Plan, check_adafactor, unstated
from meshplan.runtime.apply.context.batch import has_sequence, sequence_length
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.fake_mode import fake_execution
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.fake_step.equal_blocks import runs_of, shortened
from meshplan.runtime.fake_step.optimizers import OPTIMIZERS
from meshplan.runtime.fake_step.step import LossFn, MakeOptimizer
from meshplan.runtime.torch_private.fakes import fake_mode, quiet_fakes
from meshplan.runtime.trace.constants import MOST_NUMBERS, ConstantPropagation
from meshplan.runtime.trace.ops import copy_to_run, stand_in
from meshplan.runtime.trace.sample import call, is_tokens, results, sample_inputs, with_dtype
from meshplan.spec.spec import InputSpec, Spec

_SAMPLES: Final = 2
"""Number of samples for the call that shows what the model returns: few, but not 1, since a dim of
size 1 broadcasts."""

Returned = tuple[str, list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultLoop:
    """The inputs, targets, loss and optimizer that one rank trains with.

    Args:
        inputs: Inputs of a step, for all of its microbatches.
        targets: Targets of the same samples.
        loss_fn: Maps the model's output on a microbatch, and its targets, to the loss.
        make_optimizer: Makes the optimizer from the wrapped model.
        assumed: The assumptions in words, as (what is assumed, its value).
        returned: (name of the output that the loss is computed from, [its shape]); the list is
            empty if the model returns no such tensor.
    """

    inputs: Any
    targets: Any
    loss_fn: LossFn
    make_optimizer: MakeOptimizer
    assumed: tuple[tuple[str, str], ...]
    returned: Returned


def check_stated(spec: Spec, micro: int | None, *, reads_tokens: bool) -> None:
    """Check that a plan states the batch of a step, and an optimizer that can be traced.

    Args:
        spec: The spec of the plan.
        micro: Samples of a microbatch; None if the plan does not state their number.
        reads_tokens: If True, the model's input is token ids, and the plan must state the length of
            a sequence.

    Raises:
        PlanError: A statement is missing, or the optimizer is unknown. Lists all such problems.
    """
    problems = unstated(spec, micro, reads_tokens=reads_tokens)
    if spec.optimizer not in {*OPTIMIZERS, *RULES}:
        problems.append(_untraced(spec))
    if problems:
        raise PlanError(problems)


def _untraced(spec: Spec) -> Problem:
    what = f"the step of optimizer '{spec.optimizer}' cannot be traced"
    fix = f"use one of {', '.join(OPTIMIZERS)}"
    if spec.optimizer in RULES:
        fix += ", or omit --tier: the memory of its step is then computed by rules"
    return Problem(what, spec.origin("optimizer"), fix)


def loop_of(model: nn.Module, plan: Plan, returned: Returned | None = None) -> DefaultLoop:
    """Return the default loop of one rank under a plan.

    Args:
        model: The unsharded model of one process.
        plan: A plan made for this model.
        returned: `DefaultLoop.returned` of another loop of the same model; None to run the model on
            fake tensors to find out what it returns.

    Raises:
        PlanError: The plan does not state the batch of a step, its optimizer cannot be traced, or
            the model returns nothing that a loss could use.
        SpecError: No input of the model is stated, and none follows from the model.
        ApplyError: The sequence length does not divide into the chunks of cp.
    """
    spec, said = _with_length(with_dtype(model, plan.spec))
    few = sample_inputs(model, spec, _SAMPLES, 0, MOST_NUMBERS)
    are_tokens = any(t.ndim == 2 and not t.is_floating_point() for _, t in tensors_in(few))
    check_stated(plan.spec, plan.micro, reads_tokens=are_tokens)
    check_adafactor(plan)
    assert plan.micro is not None
    samples = plan.micro * plan.accumulate
    name, shapes = returned = returned or _returned_by(model, plan, few)
    targets, loss_fn, words = _loss(name, shapes, few, samples)
    inputs = _whole_batch(few, lambda: sample_inputs(model, spec, samples, 0), samples)
    inputs, targets = _local_parts(plan, (inputs, targets))
    parts = [f"{list(t.shape)} {str(t.dtype)[6:]}" for _, t in tensors_in(inputs)]
    make, called = OPTIMIZERS.get(spec.optimizer, (None, called_by(spec.optimizer)))

    def make_optimizer(wrapped: nn.Module) -> torch.optim.Optimizer:
        if make is None:
            raise PlanError(_untraced(spec))
        return make([p for p in wrapped.parameters() if p.requires_grad])

    assumed = [("inputs of a rank's step", ", ".join(parts)), ("loss", words + in_chunks(plan))]
    assumed.append(("optimizer", called))
    if plan.mesh.size("ep") > 1:
        assumed.append(("routing", shares_of_experts(plan)))
    return DefaultLoop(
        inputs=inputs,
        targets=targets,
        loss_fn=loss_fn,
        make_optimizer=make_optimizer,
        assumed=(*assumed, *said),
        returned=returned,
    )


def _with_length(spec: Spec) -> tuple[Spec, tuple[tuple[str, str], ...]]:
    """Return the spec, whose `input` of tokens gets the length `batch.seq_len`, and a note on it.

    The note is a tuple of assumptions, as in `DefaultLoop.assumed`; () if nothing changes.
    """
    given, length = spec.input, spec.batch.seq_len
    if not isinstance(given, InputSpec) or length is None or not is_tokens(given):
        return spec, ()
    if given.shape[1] == length:
        return spec, ()
    words = f"{length} from batch.seq_len, not {given.shape[1]} as in input.shape"
    wanted = replace(given, shape=(given.shape[0], length))
    return replace(spec, input=wanted), (("length of a sequence", words),)


def _whole_batch(few: Any, make: Callable[[], Any], samples: int) -> Any:
    """Return inputs for all samples of a step; on meta if they are too large to keep their values.

    Args:
        few: Inputs with `_SAMPLES` samples.
        make: Makes the inputs of the step with values.
        samples: Number of samples of a step.
    """
    if all(t.numel() // _SAMPLES * samples <= MOST_NUMBERS for _, t in tensors_in(few)):
        return make()
    return mapped(few, lambda t: torch.empty((samples, *t.shape[1:]), dtype=t.dtype, device="meta"))


def _local_parts(plan: Plan, batch: Any) -> Any:
    """Return the batch of one rank of cp, with sequences as short as `local_batch` cuts them."""
    context, size = plan.assignment.context, plan.mesh.size("cp")
    if context is None:
        return batch
    length, chunks = sequence_length(batch, plan.spec.batch.seq_len), context.num_chunks(size)
    if length % chunks:
        what = f"a sequence of {length} does not divide into the {chunks} chunks of cp"
        origin = plan.spec.origin("batch.seq_len")
        raise ApplyError(Problem(what, origin, f"use a multiple of {chunks}"))
    return mapped(batch, lambda t: t.chunk(size, 1)[0].clone() if has_sequence(t, length) else t)


def _returned_by(model: nn.Module, plan: Plan, inputs: Any) -> Returned:
    """Return `_returned` of the model, run without most of its equal blocks if that is possible."""
    runs = [] if plan.assignment.apply else runs_of(model, plan)
    if runs:
        try:
            with shortened(model, runs) as used:
                found = _returned(model, inputs)
            if not used:
                return found
        except Exception:  # The model's code may rely on all its blocks and raise anything.
            runs = []  # Run the whole model below, where a genuine error is raised again.
    return _returned(model, inputs)


def _returned(model: nn.Module, inputs: Any) -> Returned:
    """Return `DefaultLoop.returned`, found by a run of the model on fake tensors."""
    mode = fake_mode()
    shadows = ConstantPropagation(mode)
    fake_model, _, _ = copy_to_run(model, (), mode)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        out = stand_in(tensor)
        shadows.know(out, tensor)
        return out

    with torch.no_grad(), quiet_fakes(), mode, shadows, fake_execution():
        output = call(fake_model, mapped(inputs, fake))
    name, tensor = _made_of(output)
    shapes = [tuple(t.shape) for t in ([tensor] if tensor is not None else [])]
    return name, shapes


def _made_of(output: Any) -> tuple[str, torch.Tensor | None]:
    """Return (name, tensor) of the part of an output that a loss is computed from.

    The name is "loss", "logits" or "output"; the tensor is None if no part can be used.
    """
    for name in ("loss", "logits"):
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return name, found
    if isinstance(output, torch.Tensor) and not output.ndim:
        return "loss", output
    found = next(iter(results(output)), None)
    return "output", found


def _loss(
    name: str, shapes: list[tuple[int, ...]], inputs: Any, samples: int
) -> tuple[Any, LossFn, str]:
    """Return (targets, loss function, description of the loss in words).

    Args:
        name: Name of the output that the loss is computed from.
        shapes: Its shape in a list, as in `DefaultLoop.returned`.
        inputs: Inputs of the model, with as many samples as the shape.
        samples: Number of samples in the targets.
    """
    if not shapes:
        what = "the model returns no floating-point tensor from which a loss could be computed"
        raise PlanError(Problem(what, None, "let its forward return logits, or the loss itself"))
    shape = shapes[0]
    if not shape:
        return (), lambda output, _: _tensor_of(output), "the scalar that the model returns"
    tokens = next((t for _, t in tensors_in(inputs) if t.ndim == 2 and len(shape) == 3), None)
    is_language = (
        tokens is not None and not tokens.is_floating_point() and tuple(tokens.shape) == shape[:2]
    )
    if len(shape) in (2, 3) and (name == "logits" or is_language):
        words = "cross-entropy in float32 over the last dim of "
        targets = _classes(shape[-1], samples, shape[1:-1])
        return targets, _cross_entropy, words + name
    targets = _numbers(samples, shape[1:])
    words = f"mean squared error in float32 of {name} and targets of its shape"
    return targets, _mean_square, words


def _tensor_of(output: Any) -> torch.Tensor:
    found = _made_of(output)[1]
    assert found is not None
    return found


def _cross_entropy(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_tensor_of(output).flatten(0, -2).float(), targets.flatten())


def _mean_square(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(_tensor_of(output).float(), targets)


def _classes(count: int, samples: int, rest: tuple[int, ...]) -> torch.Tensor:
    shape = samples, *rest
    where = "cpu" if math.prod(shape) <= MOST_NUMBERS else "meta"
    return torch.zeros(shape, dtype=torch.int64, device=where)


def _numbers(samples: int, rest: tuple[int, ...]) -> torch.Tensor:
    return torch.empty((samples, *rest), device="meta")
