"""Tensor parallelism beyond the recipes: sequence parallel, placements, vocab, gathered use."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshplan
from meshplan.runtime.torch_private.ops import optimizers_at_once
from tests.helpers import models, parity
from tests.helpers.wide import leaving
from tests.runtime.apply.test_parity import assert_same

COLWISE = {"match": "**.{wq,wk,wv,w1,w3}", "place": {"tp": "colwise"}}
ROWWISE = {"match": "**.{wo,w2}", "place": {"tp": "rowwise"}}
VOCAB = {"match": ["embed", "head"], "place": {"tp": "vocab"}}
NORMS = {"match": "**.{norm,norm1,norm2}", "place": {"tp": "sequence_parallel"}}
PLAIN = [COLWISE, ROWWISE, VOCAB]
TP4: dict[str, Any] = {"version": 1, "mesh": {"tp": 4}}
TP2: dict[str, Any] = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}}


def rule(match: object, **place: str) -> dict[str, object]:
    return {"match": match, "place": place}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence parallel": (
        "own_llama",
        TP4 | {"sequence_parallel": True, "rules": [*PLAIN, NORMS]},
    ),
    "sequence parallel and full_shard": (
        "own_llama",
        TP2 | {"sequence_parallel": True, "rules": [*PLAIN, NORMS]},
    ),
    "sequence parallel norms in a replicated stream": (
        "own_llama",
        TP2 | {"rules": [*PLAIN, NORMS]},
    ),
    "S(d) on modules": (
        "own_llama",
        TP2
        | {
            "rules": [
                rule("head", tp="S(0)"),
                rule("embed", tp="S(1)"),
                rule("layers.*.attn.wq", tp="S(1)"),
                rule("layers.*.norm1", tp="S(0)"),
            ]
        },
    ),
    "S(d) and R on parameters": (
        "own_llama",
        TP4
        | {
            "rules": [
                rule({"param": "layers.*.ffn.w*.weight"}, tp="S(0)"),
                rule({"param": "norm.weight"}, tp="S(0)"),
                rule({"param": "head.weight"}, tp="R"),
            ]
        },
    ),
    "parameters held by root and block, uneven": (
        "odd",
        TP2
        | {
            "rules": [
                rule({"param": "bias"}, tp="S(0)"),
                rule({"param": "blocks.*.up.weight"}, tp="S(0)"),
            ]
        },
    ),
    "gathered embedding and colwise head": (
        "own_llama",
        TP2
        | {
            "rules": [
                COLWISE,
                ROWWISE,
                rule("embed", tp="colwise_gather_output"),
                rule("head", tp="colwise_gather_output"),
            ]
        },
    ),
    "conv1d vocab": (
        "gpt2",
        TP4
        | {"rules": models.tp_rules("gpt2") + [rule(["transformer.wte", "lm_head"], tp="vocab")]},
    ),
    "rowwise of a replicated input": (
        "own_llama",
        TP4 | {"rules": [rule("layers.*.attn.wq", tp="rowwise_split_input")]},
    ),
}


@pytest.mark.parametrize("case", leaving(CASES, lambda number, _: bool(number % 3)))
def test_parity(pool, case):
    assert_same(pool(4).run(parity.train, *CASES[case])[0])


class Uneven(nn.Module):
    """A vocabulary and a head that 4 ranks cannot share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, 16, padding_idx=3)
        self.head = nn.Linear(16, 131)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens).tanh())


def uneven(plan: dict[str, Any]) -> float:
    def one(model: nn.Module) -> list[float]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            tokens = torch.arange(48).reshape(4, 12).add(step * 31).remainder(131)
            loss = models.loss(model(tokens), tokens)
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(1)
    alone = Uneven()
    live = meshplan.parallelize(alone, plan)
    torch.manual_seed(1)
    return max(abs(a - b) for a, b in zip(one(live), one(Uneven()), strict=True))


def test_uneven_vocab(pool):
    plan = TP4 | {"rules": [rule(["embed", "head"], tp="vocab")]}
    assert max(pool(4).run(uneven, plan)) <= parity.TOLERANCE


def collectives(plan: dict[str, Any]) -> dict[str, int]:
    """Count the collectives of one backward."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = meshplan.parallelize(models.build("own_llama"), plan)
    inputs, targets = models.batch("own_llama", 0)
    loss = models.loss(model(inputs), targets)
    with CommDebugMode() as counted:
        loss.backward()
    return {str(op).split(".")[-1]: n for op, n in counted.get_comm_counts().items()}


class Shifted(nn.Embedding):
    """Does more than look up, so that addends of what it gives would be shifted once each."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


TABLES: dict[str, Callable[[], nn.Module]] = {
    "padding on another rank": lambda: nn.Embedding(131, 16, padding_idx=49),
    "does more": lambda: Shifted(131, 16),
    "fewer rows than ranks": lambda: nn.Embedding(3, 16),
    "counts": lambda: nn.Embedding(131, 16, scale_grad_by_freq=True),
}


class _Filled(TorchDispatchMode):
    """How many elements the gradients of tables are made with."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.numels.append(out.numel())
        return out


def looked_up(case: str, plan: dict[str, Any]) -> tuple[float, float, list[int], int]:
    """How far output and gradient are from those of one process, and elements of the gradient.

    As it is made, and as the rank holds it.
    """

    def run(model: nn.Module) -> torch.Tensor:
        tokens = torch.arange(48).reshape(4, 12).mul(7).remainder(table.num_embeddings)
        out = model(tokens)
        (out + 1).pow(3).sum().backward()  # What is padded is all zeros.
        return out.detach()

    torch.manual_seed(1)
    table = TABLES[case]()
    alone = nn.Sequential(copy.deepcopy(table))
    live = meshplan.parallelize(nn.Sequential(table), plan)
    with _Filled() as filled:
        outputs = run(live)
    expected = run(alone)
    gradient = live.get_parameter("0.weight").grad
    assert isinstance(gradient, DTensor)
    whole = gradient.full_tensor() - alone.get_parameter("0.weight").grad
    return (
        (outputs - expected).abs().max().item(),
        whole.abs().max().item(),
        filled.numels,
        live.get_parameter("0.weight").to_local().numel(),
    )


@pytest.mark.parametrize("case", TABLES)
def test_a_table_cut_by_rows_gives_what_the_whole_one_does(pool, case):
    """And where its module does nothing else, no rank makes the gradient of all rows."""
    plan = TP4 | {"rules": [rule("0", tp="vocab")]}
    for output, gradient, made, held in pool(4).run(looked_up, case, plan):
        assert output < 1e-6
        assert gradient < 1e-5
        if case.startswith("padding"):
            assert made == [held]


def test_projections_that_read_one_tensor_share_the_gradient_all_reduce(pool):
    plan = TP2 | {"mesh": {"tp": 2}, "rules": PLAIN}
    counts = pool(2).run(collectives, plan)[0]
    # Per block: one for q, k and v together, one for w1 and w3 together; and one for the head.
    assert counts == {"all_reduce": 2 * 4 + 1}


def living(plan: dict[str, Any]) -> list[int]:
    """How many tensors live after each of the steps from the second on.

    gloo's threads may let go of a tensor late, the later the busier the machine.
    """
    model = meshplan.parallelize(models.build("own_llama"), plan)
    sgd = models.optimizer(model)
    batch = meshplan.local_batch(model, models.batch("own_llama", 0))
    counts = []
    for _ in range(4):
        meshplan.train_step(model, sgd, *batch, models.loss)
        counts.append(_num_tensors())
        give_up = time.monotonic() + 10
        while counts[-1] > counts[min(1, len(counts) - 1)] and time.monotonic() < give_up:
            time.sleep(0.05)
            counts[-1] = _num_tensors()
    return counts[1:]


def _num_tensors() -> int:
    gc.collect()
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())


def test_a_step_leaves_no_tensor_behind(pool):
    for plan in (TP2 | {"rules": PLAIN}, {"version": 1, "mesh": {"tp": 4}, "rules": PLAIN}):
        for counts in pool(4).run(living, plan):
            assert len(set(counts)) == 1, counts


class Failing(nn.Module):
    """Raises after its first projection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.fails:
            raise ValueError("no such token")
        return self.down(hidden)


def is_let_go() -> bool:
    """Whether nobody holds what was given to a forward that has failed."""
    rules = [rule("up", tp="colwise"), rule("down", tp="rowwise")]
    model = meshplan.parallelize(Failing(), {"version": 1, "mesh": {"tp": 2}, "rules": rules})
    model(torch.ones(2, 4))
    model.fails = True
    given = torch.ones(2, 4)
    held = weakref.ref(given)
    with contextlib.suppress(ValueError):
        model(given)
    del given
    gc.collect()
    return held() is None


def test_a_forward_that_fails_leaves_no_tensor_behind(pool):
    assert pool(2).run(is_let_go) == [True, True]


def ties(plan: dict[str, Any]) -> tuple[bool, bool]:
    model = meshplan.parallelize(models.build("hf_llama_tied"), plan)
    embed, head = model.model.embed_tokens, model.lm_head
    return embed.weight is head.weight, isinstance(embed.weight, DTensor)


def laid_otherwise() -> list[str]:
    """Parameters whose gradients do not lie as they do."""
    plan = TP4 | {"mesh": {"tp": 2}, "sequence_parallel": True, "rules": [*PLAIN, NORMS]}
    model = meshplan.parallelize(models.build("own_llama"), plan)
    inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
    models.loss(models.call(model, inputs), targets).backward()
    params = model.named_parameters()
    return [n for n, p in params if p.grad is not None and _placed(p.grad) != _placed(p)]


def _placed(tensor: torch.Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None


def test_gradients_lie_as_their_parameters_do(pool):
    # An optimizer's state is laid out as the first gradient: whole, it would take twice the memory.
    assert pool(2).run(laid_otherwise) == [[], []]


def test_tied_weights_stay_one_tensor(pool):
    plan = TP2 | {"rules": models.tp_rules("hf_llama_tied")}
    assert pool(4).run(ties, plan) == [(True, True)] * 4


def odd_length() -> str:
    plan = TP2 | {"sequence_parallel": True, "rules": [*PLAIN, NORMS]}
    model = meshplan.parallelize(models.build("own_llama"), plan)
    try:
        model(torch.zeros(2, 15, dtype=torch.int64))
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_a_sequence_that_tp_does_not_divide_is_refused_on_every_rank(pool):
    expected = (
        "meshplan: 1 problem\n"
        "sequence_parallel shards the sequence over tp: 2, which does not divide its length 15\n"
        "    fix: pad the sequence to a multiple of 2"
    )
    assert pool(4).run(odd_length) == [expected] * 4


def step_as_on_a_gpu() -> tuple[bool | None, float]:
    """(how the optimizer took the parameters, how far a step moved them)."""
    plan = {"version": 1, "mesh": {"tp": 2}, "rules": models.tp_rules("own_llama")}
    model = meshplan.parallelize(models.build("own_llama"), plan)
    before = [p.detach().clone() for p in model.parameters()]
    with optimizers_at_once():
        optimizer = torch.optim.AdamW(model.parameters())
        batch = meshplan.local_batch(model, models.batch("own_llama", 0))
        meshplan.train_step(model, optimizer, *batch, models.loss)
    moved = [(p - b).abs().max() for p, b in zip(model.parameters(), before, strict=True)]
    return optimizer.param_groups[0]["foreach"], float(sum(m.item() for m in map(whole, moved)))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_plain_parameters_beside_cut_ones_are_stepped_over_where_torch_takes_all_at_once(pool):
    """As it does on GPUs, where it refuses such a mixture."""
    for foreach, moved in pool(2).run(step_as_on_a_gpu):
        assert foreach is False
        assert moved > 0
