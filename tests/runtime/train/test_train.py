"""The helpers of the loop: batches, accumulation, clipping, the fp16 loss scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import meshplan
from meshplan.runtime.train import gradient_scale, one_process
from tests.helpers import models, parity
from tests.runtime.apply.test_parity import assert_same
from tests.runtime.apply.test_tensor_parallel import NORMS, PLAIN

MIXTURE = [{"match": ["layers.0", "norm"], "place": "replicate"}]
ACCUMULATE: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("own_llama", {"strategy": "ddp"}),
    "zero1": ("own_llama", {"strategy": "zero1"}),
    "zero2": ("own_llama", {"strategy": "zero2"}),
    "full_shard": ("own_llama", {"strategy": "full_shard"}),
    "hybrid_shard": ("own_llama", {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "mixture": ("own_llama", {"strategy": "hybrid_shard", "mesh": [2, 2], "rules": MIXTURE}),
    "scalars": ("odd", {"strategy": "zero1"}),
    "tp and ddp": ("own_llama", {"mesh": {"dp_replicate": 2, "tp": 2}, "rules": PLAIN}),
}


@pytest.mark.parametrize("case", ACCUMULATE)
def test_accumulation_equals_one_batch(pool, case):
    name, plan = ACCUMULATE[case]
    plan = {"version": 1, "batch": {"accumulate": 2}, **plan}
    assert_same(pool(4).run(parity.train, name, plan)[0])


CLIP: dict[str, tuple[str, dict[str, Any]]] = {
    **{k: ACCUMULATE[k] for k in ("ddp", "zero2", "mixture", "tp and ddp")},
    "scalars": ("odd", {"strategy": "full_shard"}),
    "sequence parallel": (
        "own_llama",
        {
            "mesh": {"dp_shard": 2, "tp": 2},
            "sequence_parallel": True,
            "rules": [*PLAIN, NORMS],
        },
    ),
}


@pytest.mark.parametrize("case", CLIP)
def test_clipping_equals_one_process(pool, case):
    name, plan = CLIP[case]
    plan = {"version": 1, "clip_grad_norm": 0.1, **plan}
    assert_same(pool(4).run(parity.train, name, plan, clip=0.1)[0])


def norms(plan: dict[str, Any], p: float) -> tuple[float, float]:
    """The norm that clipping reports, and that of one process."""
    model = meshplan.parallelize(models.build("own_llama"), plan)
    inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
    models.loss(model(inputs), targets).backward()
    live = meshplan.clip_grad_norm_(model, float("inf"), norm_type=p)
    alone = models.build("own_llama")
    inputs, targets = models.batch("own_llama", 0)
    models.loss(alone(inputs), targets).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9, norm_type=p)
    return live.item(), expected.item()


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_norm_counts_every_element_once(pool, p):
    plan = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "rules": PLAIN}
    for live, expected in pool(4).run(norms, plan, p):
        assert live == pytest.approx(expected, rel=1e-5)


class Pair(NamedTuple):
    tokens: torch.Tensor
    weight: float


def batches() -> list[Any]:
    model = meshplan.parallelize(
        models.build("own_llama"),
        {"version": 1, "mesh": {"dp_replicate": 2, "tp": 2}, "rules": PLAIN},
    )
    tokens = torch.arange(8)
    cut = meshplan.local_batch(model, {"a": tokens, "b": (tokens, [tokens])})
    pair = meshplan.local_batch(model, Pair(tokens, 0.5))
    try:
        meshplan.local_batch(model, torch.zeros(7))
    except meshplan.ApplyError as error:
        message = str(error)
    scalar = meshplan.local_batch(model, torch.tensor(3.0))
    as_list = [cut["a"].tolist(), cut["b"][0].tolist(), cut["b"][1][0].tolist()]
    noted = [*vars(cut["a"]).values(), *vars(pair.tokens).values(), *vars(scalar).values()]
    return [
        as_list, type(cut["b"]).__name__, pair.tokens.tolist(), pair.weight, message, scalar, noted,
    ]  # fmt: skip


def test_local_batch_follows_the_data_axes_only(pool):
    results = pool(4).run(batches)
    for rank, (cut, kind, pair, weight, message, scalar, noted) in enumerate(results):
        half = [0, 1, 2, 3] if rank < 2 else [4, 5, 6, 7]  # tp ranks read the same samples
        assert cut == [half, half, half]
        assert (kind, pair, weight, scalar) == ("tuple", half, 0.5, torch.tensor(3.0))
        assert noted == [0, 0]  # Whole samples were cut: no more need be known of the batch.
        assert message == (
            "meshplan: 1 problem\n"
            "a batch of 7 samples does not divide into 2 data ranks\n"
            "    fix: use a multiple of 2"
        )


def overflow() -> tuple[bool, float, float]:
    """One step whose gradients overflow fp16: it must be skipped on every rank."""
    plan = {"version": 1, "strategy": "full_shard", "precision": "16-mixed"}
    model = meshplan.parallelize(models.build("own_llama"), plan)
    before = {n: p.to_local().clone() for n, p in model.named_parameters()}
    sgd = models.optimizer(model)
    first = model.meshplan.loss_scale
    inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
    on_rank_0 = 1e6 if torch.distributed.get_rank() == 0 else 1.0
    meshplan.train_step(model, sgd, inputs, targets, lambda o, t: models.loss(o, t) * on_rank_0)
    same = all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters())
    return same, first, model.meshplan.loss_scale


def test_fp16_overflow_on_one_rank_skips_the_step_on_all(pool):
    assert pool(2).run(overflow) == [(True, 65536.0, 32768.0)] * 2


def strangers() -> str:
    try:
        meshplan.local_batch(torch.nn.Linear(2, 2), torch.zeros(2))
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_helpers_need_a_parallelized_model():
    assert strangers() == (
        "meshplan: 1 problem\n"
        "this Linear was not parallelized by meshplan\n"
        "    fix: use the module that meshplan.parallelize returned"
    )


def reductions(plan: dict[str, Any]) -> dict[str, int]:
    """How often gradients travel in one accumulated step, by kind of collective."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.namespace == "c10d":
                name = func.overloadpacket.__name__
                counts[name] = counts.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    model = meshplan.parallelize(models.build("own_llama"), plan)
    batch = meshplan.local_batch(model, models.batch("own_llama", 0))
    with Count():
        meshplan.train_step(model, models.optimizer(model), *batch, models.loss)
    return counts


@pytest.mark.parametrize(
    ("plan", "kind", "times"),
    [
        # Four blocks and the root: ZeRO-1 reduces them once a step, ZeRO-2 once a microbatch.
        ({"strategy": "zero1"}, "_reduce_scatter_base_", 5),
        ({"strategy": "zero2"}, "_reduce_scatter_base_", 10),
        # Across replicas of shards only the last time; three more are the loss, the notes on which
        # gradients there are, and the first comparison of the replicas; then those of their copies
        # (once to compare, once to tell), of the loss and of forwards beside other samples.
        ({"strategy": "hybrid_shard", "mesh": [2, 2]}, "allreduce_", 5 + 3 + 8),
    ],
)
def test_what_waits_for_the_last_microbatch(pool, plan, kind, times):
    counts = pool(4).run(reductions, {"version": 1, "batch": {"accumulate": 2}, **plan})[0]
    assert counts[kind] == times


def before_and_after() -> list[list[bool]]:
    """By step, whether the loop was tested before and after."""
    plan = {"version": 1, "mesh": {"tp": 2}, "rules": PLAIN}
    model = meshplan.parallelize(models.build("own_llama"), plan)
    batch, sgd = meshplan.local_batch(model, models.batch("own_llama", 0)), models.optimizer(model)
    found = []
    for _ in range(2):
        before = model.meshplan.is_tested
        meshplan.train_step(model, sgd, *batch, models.loss)
        found.append([before, model.meshplan.is_tested])
    return found


def test_a_loop_is_before_and_after_its_first_step_alone(pool):
    assert pool(2).run(before_and_after) == [[[False, True], [True, True]]] * 2


def test_the_norm_of_a_large_gradient_is_added_up_exactly():
    """Torch's own, in float32 on CPU, is half a percent too small; so is what `verify` compares."""
    wide = torch.full((20_000_000,), 1e-6)
    wide[:1000] = 1e-4
    exact = float(wide.double().norm())
    assert abs(float(wide.norm()) / exact - 1) > 1e-4  # Else there is nothing to guard against.
    assert float(gradient_scale._power_sum([wide], 2.0)) ** 0.5 == pytest.approx(exact, rel=1e-6)
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.zeros_like(wide))
    model.weight.grad = wide
    assert float(one_process._gradient_norm(model)) == pytest.approx(exact, rel=1e-6)
