"""Nothing hangs: what goes wrong on one rank is an error on every rank that names it.

Without the guard each of these jobs would wait for the pool's time-out.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshplan
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.watch import guard, job
from tests.helpers import models, parity
from tests.helpers.pool import PoolError

CULPRIT = 1
SECONDS = 20.0

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "tp and hybrid": {
        "mesh": {"dp_replicate": 2, "tp": 2},
        "rules": models.tp_rules("own_llama"),
    },
}


class Mishap(Exception):
    """What a user's code raises, of a type that nobody else knows."""


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Mishap("in backward")


def loss_that_fails(where: str, fail: Callable[[], None]) -> Callable[..., torch.Tensor]:
    """The loss, failing itself or in its backward, if that is where."""

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if where == "loss":
            fail()
        if where == "backward":
            output = FailInBackward.apply(output)
        return models.loss(output, targets)

    return loss


def failing_step(plan: dict[str, Any], where: str, culprits: tuple[int, ...] = (CULPRIT,)) -> Any:
    """What a step raises when `where` fails on the culprits, and what the next call raises.

    Returns:
        ((type, text, seconds), (type, text)).
    """
    guard.GRACE_S = 0.3 if len(culprits) == 1 else 5.0
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    sgd = models.optimizer(model)
    is_culprit = dist.get_rank() in culprits
    inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
    meshplan.train_step(model, sgd, inputs, targets, models.loss)

    def fail(*_: Any) -> None:
        raise Mishap(f"in {where}")

    if is_culprit and where == "forward":
        inner = model.module if hasattr(model, "module") else model
        inner.layers[2].register_forward_pre_hook(fail)

    loss = loss_that_fails(where, fail) if is_culprit else models.loss

    def loader() -> Any:
        if is_culprit and where == "data":
            fail()
        return inputs, targets

    began = time.monotonic()
    try:
        with meshplan.guarded():
            batch = loader()
            meshplan.train_step(model, sgd, *batch, loss)
    except Exception as error:
        first = (type(error).__name__, str(error), time.monotonic() - began)
    else:
        return "nothing was raised"
    try:
        meshplan.train_step(model, sgd, inputs, targets, models.loss)
    except Exception as error:
        return first, (type(error).__name__, str(error))
    return first, ("", "")


CASES = [
    ("ddp", "forward"), ("ddp", "backward"), ("full_shard", "data"), ("full_shard", "backward"),
    ("tp and hybrid", "forward"), ("tp and hybrid", "loss"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(*case, marks=[pytest.mark.wide] if number % 2 else [])
        for number, case in enumerate(CASES)
    ],
)
def test_a_failure_on_one_rank_is_told_to_all(pool, name, where):
    results = pool(4).run(failing_step, PLANS[name], where, timeout=SECONDS)
    pool(4).close()
    for rank, ((kind, text, seconds), (later, later_text)) in enumerate(results):
        assert seconds < SECONDS / 2
        if rank == CULPRIT:
            assert (kind, text) == ("Mishap", f"in {where}")
        else:
            assert kind == "ApplyError"
            assert f"rank {CULPRIT} failed: Mishap: in {where}" in text
        assert later == "ApplyError"
        assert f"the process group is unusable, because rank {CULPRIT} failed" in later_text


def test_what_fails_on_every_rank_leaves_the_group_alive(pool):
    for where in ("loss", "forward"):
        results = pool(4).run(
            failing_step, PLANS["full_shard"], where, (0, 1, 2, 3), timeout=SECONDS
        )
        for (kind, text, _), later in results:
            assert (kind, text) == ("Mishap", f"in {where}")
            assert "dead" not in later[1]
    assert pool(4).run(dist.get_rank) == [0, 1, 2, 3]
    assert pool(4).run(total_of_ranks) == [6.0] * 4


def fail_after_a_barrier() -> None:
    with meshplan.guarded():
        dist.barrier()
        raise Mishap("everywhere")


def failing_after_a_message() -> str:
    """What a collective gives after all fail alike, where one rank once sent to another."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 2)
    elif dist.get_rank() == 2:
        dist.recv(torch.ones(1), 0)
    with pytest.raises(Mishap):
        fail_after_a_barrier()
    with meshplan.guarded():
        return str(total_of_ranks())


def test_messages_of_two_ranks_do_not_make_a_failure_of_all_deadly(pool):
    assert pool(4).run(failing_after_a_message) == ["6.0"] * 4


def total_of_ranks() -> float:
    dist.all_reduce(total := torch.tensor(float(dist.get_rank())))
    return total.item()


def dying_rank(how: str) -> str:
    """What a step raises when the culprit's process ends between two steps."""
    # Nobody stays for one of whom it is known that it has died.
    guard.GRACE_S = 1.0 if how == "uncaught" else 2 * SECONDS
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, "strategy": "ddp"})
    sgd = models.optimizer(model)
    batch = meshplan.local_batch(model, models.batch("own_llama", 0))
    meshplan.train_step(model, sgd, *batch, models.loss)
    if dist.get_rank() == CULPRIT:
        if how == "uncaught":
            sys.excepthook(Mishap, Mishap("in the loader"), None)
        os._exit(3)
    meshplan.train_step(model, sgd, *batch, models.loss)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("uncaught", f"rank {CULPRIT} failed: Mishap: in the loader"),
        ("killed", f"lost its connection to rank {CULPRIT}, which died or was killed"),
    ],
)
def test_the_end_of_a_process_is_told_to_all(pool, how, words):
    with pytest.raises(PoolError) as caught:
        pool(4).run(dying_rank, how, timeout=SECONDS)
    story = str(caught.value)
    assert "hung" not in story
    assert words in story
    assert "nothing was raised" not in story


def forked_failure() -> str:
    """Both ranks go on after a process that one of them forked has failed."""
    with meshplan.guarded():
        dist.barrier()
    if dist.get_rank() == CULPRIT:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException), meshplan.guarded():
                sys.excepthook(Mishap, Mishap("in the upload"), None)
            os._exit(1)
        os.waitpid(child, 0)
    with meshplan.guarded():
        dist.barrier()
    return "went on"


def test_what_ends_a_forked_process_does_not_end_the_ranks(pool):
    assert pool(4).run(forked_failure, timeout=SECONDS) == ["went on"] * 4


def watched() -> tuple[float, str]:
    """What a rank's watchdog hears of a failure that no connection shows."""
    guard.GRACE_S = 0.2
    with meshplan.guarded():
        dist.barrier()
    job.close_between_ranks = lambda tables, spared_port: 0
    began = time.monotonic()
    try:
        with meshplan.guarded():
            if dist.get_rank() == CULPRIT:
                raise Mishap("unseen")
            while not guard._job.cause and time.monotonic() - began < SECONDS / 2:
                time.sleep(0.01)
    except (Mishap, meshplan.ApplyError) as error:
        return time.monotonic() - began, str(error)
    return 0.0, "nothing was raised"


def test_a_watchdog_hears_of_the_failure(pool):
    results = pool(4).run(watched, timeout=SECONDS)
    pool(4).close()
    for rank, (seconds, text) in enumerate(results):
        assert seconds < SECONDS / 2
        assert text == "unseen" if rank == CULPRIT else f"rank {CULPRIT} failed" in text


def odd_batch(plan: dict[str, Any], size: int, culprits: tuple[int, ...]) -> str:
    """What a step says to a batch of another size on some ranks."""
    guard.GRACE_S = 2.0
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    sgd = models.optimizer(model)
    inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
    meshplan.train_step(model, sgd, inputs, targets, models.loss)
    before = [local_of(p.detach()).clone() for p in model.parameters()]
    if dist.get_rank() in culprits:
        inputs, targets = inputs[:size], targets[:size]
    try:
        meshplan.train_step(model, sgd, inputs, targets, models.loss)
    except meshplan.ApplyError as error:
        after = [local_of(p.detach()) for p in model.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        return str(error) if same else "the parameters were changed"
    return "nothing was raised"


TP = {"mesh": {"tp": 4}, "rules": models.tp_rules("own_llama")}


@pytest.mark.parametrize(
    ("plan", "culprits", "words"),
    [
        ({"strategy": "full_shard"}, (3,), "rank 0 has 2 samples and rank 3 has 1 samples"),
        ({"strategy": "ddp"}, (0, 1), "rank 0 has 1 samples and rank 2 has 2 samples"),
        (TP, (2,), "rank 0 has ((8, 16) int64, (8, 16) int64) and rank 2 has ((1, 16) int64"),
        (PLANS["tp and hybrid"], (1,), "rank 0 has ((4, 16) int64, (4, 16) int64) and rank 1 has"),
    ],
)
def test_batches_that_do_not_fit_together_are_refused(pool, plan, culprits, words):
    texts = pool(4).run(odd_batch, plan, 1, culprits, timeout=SECONDS)
    if plan is PLANS["tp and hybrid"]:
        pool(4).close()  # Only one of the two replicas has the mistake.
    for text in texts:
        assert words in text, text
    assert pool(4).run(total_of_ranks) == [6.0] * 4


def test_a_batch_that_does_not_divide_is_refused_on_all(pool):
    plan = {"strategy": "full_shard", "batch": {"accumulate": 2}}
    guilty = pool(4).run(odd_batch, plan, 1, (2,), timeout=SECONDS)
    pool(4).close()
    assert "a batch of 1 sample does not divide into 2 microbatches" in guilty[2]
    for rank in (0, 1, 3):
        assert "rank 2 failed: a batch of 1 sample does not divide" in guilty[rank]


class Optional(nn.Module):
    """Scalars that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.never = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.body(x)
        if x[0, 0] > 0:
            out = out * self.scale
        if x[0, 0] > 2:
            out = out + self.shift
        return {"out": out}


def used_on_some_ranks(plan: dict[str, Any]) -> float:
    """Largest difference from one process, where no two ranks use the same scalars."""
    torch.manual_seed(1)
    alone = Optional()
    words = {"version": 1, "batch": {"per_rank": True}, **plan}  # It looks at one sample for all.
    model = meshplan.parallelize(copy.deepcopy(alone), words)
    whole = torch.randn(8, 8)
    whole[::2, 0] = torch.tensor([-1.0, 1.0, 3.0, -2.0])

    def loss(output: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return (output["out"] - targets).square().mean()

    def decayed(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)

    sgd, sgd_alone = decayed(model), decayed(alone)
    for _ in range(3):
        meshplan.train_step(
            model, sgd, *meshplan.local_batch(model, (whole, torch.ones(8, 8))), loss
        )
        for part in whole.chunk(4):
            (loss(alone(part), torch.ones(2, 8)) / 4).backward()
        sgd_alone.step()
        sgd_alone.zero_grad()
    live = meshplan.full_state_dict(model)
    if dist.get_rank():
        return 0.0
    return max((live[n] - t).abs().max().item() for n, t in alone.state_dict().items())


@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_scalars_that_only_some_ranks_use(pool, strategy):
    difference = pool(4).run(used_on_some_ranks, {"strategy": strategy}, timeout=SECONDS)[0]
    assert difference <= parity.TOLERANCE
