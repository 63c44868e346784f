"""The demo: train the byte model on real text under a plan, then again without any plan.

The text is Python's own language reference, which ships with every Python. Both runs start from
the same initial values and see the same batches, so their losses must agree.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import Problem, SpecError
from meshplan.memory import StateBytes
from meshplan.plan.plan import Plan
from meshplan.runtime import demo_model, demo_moe
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.held_bytes import live_bytes
from meshplan.runtime.base.local_ranks import Send, run_ranks
from meshplan.runtime.demo_model import next_byte_loss
from meshplan.runtime.parallelize import parallelize
from meshplan.runtime.train.step import local_batch, train_step
from meshplan.spec.recipes import OWN_MODELS
from meshplan.spec.spec import Spec
from meshplan.spec.trust import check_code

_MODELS: Final[Mapping[str, Callable[[], nn.Module]]] = MappingProxyType(
    dict(zip(OWN_MODELS, (demo_model.build, demo_moe.build), strict=True))
)
"""Functions that build the byte models, by the `model.entry` with which a plan names the model."""

SEED: Final = 0
MAX_RANKS: Final = 16
_MICRO, _SEQ_LEN = 4, 128
"""Samples per microbatch and bytes per sample if the plan does not state them."""

_OPTIMIZERS: Final[Mapping[str, Callable[..., torch.optim.Optimizer]]] = MappingProxyType(
    {
        "adamw": partial(torch.optim.AdamW, lr=3e-3),
        "adam": partial(torch.optim.Adam, lr=3e-3),
        "sgd": partial(torch.optim.SGD, lr=0.5),
        "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
        "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    }
)

OnStep = Callable[[int, float], None]
"""Callback for (number of the step, counted from 1; its loss)."""


def entry_of(spec: Spec) -> str:
    """Return the key in `_MODELS` of the model to train: the plan's if it has one, or the first."""
    stated = spec.model.entry if spec.model is not None else None
    return stated if stated is not None and stated in _MODELS else next(iter(_MODELS))


def check_demo(plan: Plan, steps: int) -> None:
    """Raise if the demo cannot run the plan on one machine, or if its code is not trusted.

    Raises:
        SpecError: The demo cannot run the plan; the error lists every reason.
    """
    for code, origin in plan.spec.applied_code:
        check_code(code, origin)
    problems = []
    if plan.mesh.world_size > MAX_RANKS:
        what = f"the plan has {plan.mesh.world_size} ranks, and the demo starts at most {MAX_RANKS}"
        fix = "use a smaller mesh, for example with --set mesh.dp_shard=2"
        problems.append(Problem(what, plan.spec.origin("mesh"), fix))
    if plan.spec.optimizer not in _OPTIMIZERS:
        what = f"the demo has no optimizer {plan.spec.optimizer}"
        fix = f"use {', '.join(_OPTIMIZERS)}: --set optimizer=adamw"
        problems.append(Problem(what, plan.spec.origin("optimizer"), fix))
    if steps < 2:
        what = "the demo needs at least 2 steps: the optimizer has no state in the first one"
        problems.append(Problem(what, None, "use --steps 2 or more"))
    if problems:
        raise SpecError(problems)


def tolerance(plan: Plan) -> float:
    """Return the largest absolute difference allowed between the losses of the two runs.

    In float32 only the order of sums differs. With any other dtype, the plan also computes in
    another precision than the run without a plan.
    """
    dtypes = {d for p in plan.assignment.tensors.values() for d in (p.dtype, p.compute_dtype)}
    return 1e-4 if dtypes == {"float32"} else 5e-2


def train_under_plan(
    plan: Plan, steps: int, on_step: OnStep
) -> tuple[list[float], list[StateBytes]]:
    """Train on this machine, in one process per rank of the plan.

    Args:
        on_step: Called in this process with each step's number and loss.

    Returns:
        The loss of every step, and for each rank the bytes of state that it measured right before
        the last optimizer step.

    Raises:
        ApplyError: A rank raised, died or sent nothing for `local_ranks.SILENCE_S` seconds.
    """
    losses: list[float] = []
    state_of_rank: dict[int, StateBytes] = {}
    world, hardware = plan.mesh.world_size, plan.spec.hardware
    per_node = hardware.gpus_per_node if hardware else world
    with closing(run_ranks(world, per_node, _train_rank, plan.spec, steps)) as messages:
        for rank, message in messages:
            if isinstance(message, StateBytes):
                state_of_rank[rank] = message
            else:
                losses.append(message)
                on_step(len(losses), message)
    return losses, [state_of_rank[rank] for rank in range(world)]


def train_alone(plan: Plan, steps: int, on_step: OnStep) -> list[float]:
    """Run the same training in this process, in plain PyTorch; return the loss of every step."""
    torch.manual_seed(SEED)
    model = _MODELS[entry_of(plan.spec)]()
    optimizer = _OPTIMIZERS[plan.spec.optimizer](model.parameters())
    losses = []
    for step, (inputs, targets) in enumerate(_batches(plan, steps)):
        loss = next_byte_loss(model(inputs), targets)
        loss.backward()
        if plan.spec.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.spec.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        on_step(step + 1, losses[-1])
    return losses


def _train_rank(send: Send, spec: Spec, steps: int) -> None:
    """Train on one rank. Rank 0 sends the losses; every rank sends its bytes of state."""
    # FSDP2 warns that in-place changes of a returned view fail; meshplan makes no such change.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    torch.manual_seed(SEED)
    model = parallelize(_MODELS[entry_of(spec)](), spec)
    plan = applied(model).plan
    optimizer = _OPTIMIZERS[plan.spec.optimizer](model.parameters())
    states: list[StateBytes] = []

    def measure(*_: Any) -> None:
        states.append(live_bytes(model, optimizer))

    for step, batch in enumerate(_batches(plan, steps)):
        if step == steps - 1:
            optimizer.register_step_pre_hook(measure)
        inputs, targets = local_batch(model, batch)
        loss = train_step(model, optimizer, inputs, targets, next_byte_loss)
        if torch.distributed.get_rank() == 0:
            send(loss)
    send(states[0])


def _batches(plan: Plan, steps: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each step's global batch: (windows of the text, the same windows one byte later)."""
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
    samples = (plan.micro or _MICRO) * plan.accumulate * plan.num_data_ranks
    seq_len = plan.spec.batch.seq_len or _SEQ_LEN
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(len(text) - seq_len, (samples, 1), generator=generator)
        window = text[starts + torch.arange(seq_len + 1)]
        yield window[:, :-1], window[:, 1:]
