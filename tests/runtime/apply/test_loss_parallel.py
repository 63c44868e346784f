"""Loss parallel: cross-entropy over parts of the vocabulary, against one process.

Which seeded bug would this catch? A maximum or a sum that is not taken over all ranks, a target
sought in the wrong part, an option that is ignored, and logits that are gathered after all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import meshplan
from meshplan.api.checking import check_plan
from meshplan.runtime.apply.loss.vocab_parallel_loss import LossParallel
from tests.helpers import models, parity
from tests.helpers.wide import leaving
from tests.runtime.apply.test_parity import assert_same

LOSS: dict[str, Any] = {"version": 1, "loss_parallel": True}
TP4 = {"mesh": {"tp": 4}}
BOTH = {"mesh": {"dp_shard": 2, "tp": 2}}
NORMS = {"match": "**.{norm,norm1,norm2}", "place": {"tp": "sequence_parallel"}}

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp": (4, "own_llama", TP4),
    "tp and shards": (4, "hf_llama", BOTH | {"batch": {"accumulate": 2}}),
    "tied": (4, "hf_llama_tied", BOTH),
    "replicas": (4, "qwen3", {"mesh": {"dp_replicate": 2, "tp": 2}}),
    "sequence parallel": (
        4,
        "own_llama",
        BOTH | {"sequence_parallel": True, "rules": [*models.tp_rules("own_llama"), NORMS]},
    ),
    "parts of the sequence": (4, "own_llama", {"mesh": {"cp": 2, "tp": 2}}),
}


@pytest.mark.parametrize("case", leaving(CASES, lambda number, _: bool(number % 2)))
def test_parity(pool, case):
    world, name, plan = CASES[case]
    assert_same(
        pool(world).run(parity.train, name, LOSS | {"rules": models.tp_rules(name)} | plan)[0]
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2},
    "other index ignored": {"ignore_index": 3},
}


def apart(size: int, options: dict[str, Any], shape: str) -> tuple[float, float]:
    """The largest differences of loss and gradient from `F.cross_entropy` on whole logits."""
    generator = torch.Generator().manual_seed(size)
    whole = torch.randn(6, size, generator=generator) * 4
    target = torch.randint(size, (6,), generator=generator)
    target[1], target[4] = options.get("ignore_index", -100), size - 1
    dim = 1
    if shape == "one":
        whole, target, dim = whole[0], target[0], 0
    elif shape == "classes inside":
        whole, target = whole.unflatten(0, (2, 3)).transpose(1, 2), target.unflatten(0, (2, 3))
    whole.requires_grad_()
    expected = F.cross_entropy(whole, target, **options)
    expected.square().sum().backward()
    mesh = init_device_mesh("cpu", (4,))
    cut = distribute_tensor(whole.detach(), mesh, [Shard(dim)]).requires_grad_()
    with LossParallel():
        loss = F.cross_entropy(cut, target, **options)
    assert not isinstance(loss, DTensor)
    loss.square().sum().backward()
    assert cut.grad.placements == (Shard(dim),)
    return (
        (loss - expected).abs().max().item(),
        (cut.grad.full_tensor() - whole.grad).abs().max().item(),
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_options(pool, options):
    for loss, gradient in pool(4).run(apart, 131, OPTIONS[options], "rows"):
        assert loss <= 1e-5
        assert gradient <= 1e-5


@pytest.mark.parametrize("shape", ["one", "classes inside"])
def test_shapes_and_a_rank_without_a_part(pool, shape):
    """5 words over 4 ranks: 2, 2, 1 and none."""
    for loss, gradient in pool(4).run(apart, 5, {"label_smoothing": 0.1}, shape):
        assert loss <= 1e-6
        assert gradient <= 1e-6


def nothing_kept() -> bool:
    mesh = init_device_mesh("cpu", (4,))
    logits = distribute_tensor(torch.randn(3, 8), mesh, [Shard(1)])
    with LossParallel():
        return bool(F.cross_entropy(logits, torch.full((3,), -100)).isnan())


def test_only_ignored_targets_give_nan_as_in_torch(pool):
    assert pool(4).run(nothing_kept) == [True] * 4


def entropy() -> float:
    """Another use of log_softmax, whose gradient torch's own loss_parallel would get wrong."""
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cut = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    for logits in (whole, cut):
        with LossParallel():
            log = F.log_softmax(logits, -1)
            value = -(log.exp() * log).sum()
        (value.full_tensor() if isinstance(value, DTensor) else value).backward()
    return (cut.grad.full_tensor() - whole.grad).abs().max().item()


def test_other_uses_of_the_logits_are_right(pool):
    assert max(pool(4).run(entropy)) <= 1e-6


def penalty(keepdim: bool) -> tuple[float, float]:
    """z-loss: differences of the value and of the gradient, where a rank has no part."""
    mesh = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    cut = distribute_tensor(whole.detach(), mesh, [Shard(2)]).requires_grad_()
    values = []
    for logits in (whole, cut):
        with LossParallel():
            options = {"keepdim": True} if keepdim else {}
            found = torch.logsumexp(logits * 3, dim=-1, **options)
        assert found.shape == ((2, 3, 1) if keepdim else (2, 3))
        assert not isinstance(found, DTensor)
        found.square().sum().backward()
        values.append(found.detach())
    apart = (cut.grad.full_tensor() - whole.grad).abs().max().item()
    return (values[0] - values[1]).abs().max().item(), apart


@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_of_cut_logits(pool, keepdim):
    for value, gradient in pool(4).run(penalty, keepdim):
        assert value <= 1e-6
        assert gradient <= 1e-5


class Uneven(nn.Module):
    """A vocabulary that 4 ranks cannot share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, 16)
        self.head = nn.Linear(16, 131)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens).tanh())


def ignoring(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits[:, :-1].flatten(0, 1), targets.flatten())


UNEVEN = LOSS | TP4 | {"rules": [{"match": ["embed", "head"], "place": {"tp": "vocab"}}]}


def uneven() -> tuple[float, dict[str, int], tuple[int, ...]]:
    """A loop of one's own: difference of losses, collectives of a forward, shape of a part."""
    torch.manual_seed(1)
    alone = Uneven()
    torch.manual_seed(1)
    model = meshplan.parallelize(Uneven(), UNEVEN)
    losses = []
    for each in (model, alone):
        sgd = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            tokens = torch.arange(48).reshape(4, 12).add(step * 31).remainder(131)
            targets = tokens[:, 1:].clone()
            targets[step] = -100
            if each is model:
                with meshplan.loss_parallel(model), CommDebugMode() as counted:
                    logits = model(tokens)
                    loss = ignoring(logits, targets)
                    loss.backward()
                shape = tuple(logits.to_local().shape)
            else:
                loss = ignoring(each(tokens), targets)
                loss.backward()
            sgd.step()
            sgd.zero_grad()
            losses.append(loss.item())
    assert type(model(tokens)) is torch.Tensor
    assert model(tokens).shape == (4, 12, 131)
    difference = max(abs(a - b) for a, b in zip(losses[:3], losses[3:], strict=True))
    return difference, {str(op): n for op, n in counted.get_comm_counts().items()}, shape


def test_uneven_vocab_in_a_loop_of_ones_own(pool):
    for rank, (difference, counts, shape) in enumerate(pool(4).run(uneven)):
        assert difference <= parity.TOLERANCE
        assert not any("gather" in op for op in counts), counts
        assert shape == (4, 12, [33, 33, 33, 32][rank])


def refused(kind: str) -> str:
    plan = UNEVEN if kind != "not stated" else UNEVEN | {"loss_parallel": False}
    model = meshplan.parallelize(Uneven(), plan)
    tokens = torch.arange(8).reshape(2, 4)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = logits.flatten(0, 1)
        if kind == "weight":
            return F.cross_entropy(rows, targets.flatten(), weight=torch.ones(131))
        if kind == "probabilities":
            return F.cross_entropy(rows, torch.ones(8, 131) / 131)
        if kind == "in backward":
            return F.cross_entropy(rows, targets.flatten()) + rows.max(-1).values.mean()
        return -F.log_softmax(rows, -1).gather(1, targets.flatten()[:, None]).mean()

    try:
        if kind == "not stated":
            with meshplan.loss_parallel(model):
                pass
        meshplan.train_step(model, models.optimizer(model), tokens, tokens, loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("weight", "loss_parallel does not support cross_entropy with weight"),
        ("probabilities", "cross_entropy with class probabilities as the target"),
        ("gathered by hand", "the loss uses logits sharded over the vocabulary"),
        ("in backward", "the loss uses logits sharded over the vocabulary"),
        ("not stated", "this model's plan does not state loss_parallel: true"),
    ],
)
def test_refusals(pool, kind, says):
    told = pool(4).run(refused, kind)
    assert says in told[0]
    assert told[0] == told[3]


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ({"mesh": {"dp_shard": 2}}, "'loss_parallel' has no effect without a tp axis"),
        (
            TP4 | {"rules": models.tp_rules("own_llama")[:4]},
            "'loss_parallel' needs logits sharded over the vocabulary, but tp shards no head",
        ),
        (
            TP4 | {"rules": [{"match": "layers.*.attn.wq", "place": {"tp": "vocab"}}]},
            "'loss_parallel' needs logits sharded over the vocabulary, but tp shards no head",
        ),
    ],
)
def test_check_refuses(plan, what):
    model = {"model": {"entry": "meshplan.runtime.demo_model:build"}}
    assert [p.what for p in check_plan(LOSS | model | plan).problems] == [what]


def test_the_digest_knows_it():
    model = {"model": {"entry": "meshplan.runtime.demo_model:build"}}
    plan = LOSS | model | TP4 | {"rules": models.tp_rules("own_llama")}
    cut, whole = check_plan(plan).plan, check_plan(plan | {"loss_parallel": False}).plan
    assert cut is not None
    assert whole is not None
    assert cut.digest() != whole.digest()
    assert cut.assignment.styles["head"].style.name == "logits"
