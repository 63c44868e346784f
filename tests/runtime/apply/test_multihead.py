"""nn.MultiheadAttention cut by heads: exactly one process, in every way it can be called.

Which seeded bug would this catch? The output bias added by every rank, a mask per head given to the
wrong heads, attention weights of a part of the heads, the fast path of TransformerEncoderLayer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan
from meshplan.runtime.trace.structure import graph_of
from tests.helpers import models, parity
from tests.helpers.graphs import decide, refusal, tp

DIM, HEADS, LENGTH, OTHER, CLASSES = 32, 4, 6, 20, 5


class Encoder(nn.Module):
    """torch's own layer with its feed-forward, causal and padded."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                DIM, HEADS, 48, dropout=0.0, batch_first=True, norm_first=norm_first
            )
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = (x[..., 0] > 0.5) & (torch.arange(LENGTH) > 0)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(x)


class Odd(nn.Module):
    """Cross-attention of other widths, sequence first, masks per head, and weights that count."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(DIM, OTHER)
        self.cross = nn.MultiheadAttention(DIM, HEADS, kdim=OTHER, vdim=OTHER)
        self.plain = nn.MultiheadAttention(
            DIM, HEADS, bias=False, batch_first=True, add_zero_attn=True
        )
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        other = self.widen(x).transpose(0, 1)
        found, mean = self.cross(x.transpose(0, 1), other, other)
        x = x + found.transpose(0, 1)
        slopes = torch.arange(len(x) * HEADS).view(-1, 1, 1) * -0.1
        mask = slopes * torch.arange(LENGTH)
        mask = mask.expand(-1, LENGTH, -1)
        again, every = self.plain(x, x, x, attn_mask=mask, average_attn_weights=False)
        # Squares, because attention weights add up to 1 whatever they are.
        by_head = every * torch.arange(HEADS).view(1, -1, 1, 1)
        one, _ = self.plain(x[0], x[0], x[0], need_weights=False)
        x = x + again + by_head.square().mean() + mean.square().sum(-1, keepdim=True) + one
        return self.head(x)


MODELS = {"encoder": Encoder, "norm first": lambda: Encoder(True), "odd": Odd}
RULES = {
    "encoder": [
        tp("layers.*.self_attn", "packed_colwise"),
        tp("layers.*.linear1", "colwise"),
        tp("layers.*.linear2", "rowwise"),
    ],
    "odd": [tp("{cross,plain}", "packed_colwise")],
}
RULES["norm first"] = RULES["encoder"]


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = MODELS[name]()
        for parameter in model.parameters():  # torch starts these biases at zero.
            if parameter.ndim == 1:
                nn.init.normal_(parameter, std=0.3)
        return model


def train(name: str, mesh: dict[str, int]) -> dict[str, float]:
    alone = build(name)
    plan = {"version": 1, "mesh": mesh, "rules": RULES[name]}
    model = meshplan.parallelize(build(name), plan)
    both = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone)]
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, LENGTH, DIM, generator=generator)
        y = torch.randint(CLASSES, (4, LENGTH), generator=generator)
        live = meshplan.train_step(
            model, both[0], *meshplan.local_batch(model, (x, y)), models.loss
        )
        loss = models.loss(alone(x), y)
        loss.backward()
        both[1].step()
        both[1].zero_grad()
        losses.append(abs(live - loss.item()))
    with torch.inference_mode():
        x = torch.randn(4, LENGTH, DIM, generator=torch.Generator().manual_seed(9))
        model.eval(), alone.eval()
        apart = (model(x) - alone(x)).abs().max().item()
    state = meshplan.full_state_dict(model)
    if torch.distributed.get_rank():
        return {}
    one = alone.state_dict()
    assert state.keys() == one.keys()
    worst = max(float((state[n] - one[n]).abs().max()) for n in one)
    return {"loss": max(losses), "state": worst, "evaluation": apart}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("encoder", {"tp": 4}),
        ("norm first", {"dp_shard": 2, "tp": 2}),
        ("odd", {"tp": 4}),
    ],
)
def test_parity(pool: Any, name: str, mesh: dict[str, int]) -> None:
    apart = pool(4).run(train, name, mesh)[0]
    assert max(apart.values()) <= parity.TOLERANCE, apart


def test_layouts() -> None:
    plan = decide({"mesh": {"tp": 2}}, *RULES["odd"], on=graph_of(build("odd")))
    stored = {fqn: str(p.stored) for fqn, p in plan.tensors.items() if p.stored.axes}
    assert stored == {
        "cross.q_proj_weight": "S(0)@tp",
        "cross.k_proj_weight": "S(0)@tp",
        "cross.v_proj_weight": "S(0)@tp",
        "cross.out_proj.weight": "S(1)@tp",
        "plain.in_proj_weight": "S(0)@tp(3)",
        "plain.out_proj.weight": "S(1)@tp",
    }


@pytest.mark.parametrize(
    ("module", "plan", "message"),
    [
        (
            nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True),
            {"mesh": {"tp": 2}},
            "a adds a bias to its keys (add_bias_kv), which tp cannot shard in this version\n"
            "    fix: leave this module out of tp",
        ),
        (
            nn.MultiheadAttention(DIM, HEADS),
            {"mesh": {"tp": 3}},
            "a: 4 heads of 8 do not divide by tp 3\n    fix: use tp: 2",
        ),
        (
            nn.MultiheadAttention(DIM, HEADS),
            {"mesh": {"tp": 2}, "sequence_parallel": True},
            "a is a MultiheadAttention, which cannot run under sequence_parallel in this version\n"
            "    fix: remove sequence_parallel",
        ),
    ],
)
def test_what_cannot_be(module: nn.Module, plan: dict[str, Any], message: str) -> None:
    model = nn.ModuleDict({"a": module})
    told = refusal(plan, tp("a", "packed_colwise"), on=graph_of(model))
    assert told == f"rules[0].place.tp: {message}"


def test_a_style_on_its_projection_would_do_nothing() -> None:
    told = refusal({"mesh": {"tp": 2}}, tp("plain.out_proj", "rowwise"), on=graph_of(build("odd")))
    assert "'rowwise' cannot be applied to plain.out_proj" in told
