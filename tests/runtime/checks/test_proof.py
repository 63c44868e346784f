"""What cuts by name and size cannot know is proved on the first forward, or refused.

Which seeded bug would this catch? A proof that never runs, that compares a module with itself, or
that refuses what is right: dropout, caches, recomputation, half precision.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from tests.helpers import attention_models as own
from tests.helpers import models, parity
from tests.helpers.graphs import tp
from tests.runtime.apply.test_compile import without_code_generation
from tests.runtime.apply.test_packed import FUSED, GPT2
from tests.runtime.apply.test_parity import assert_same


class Slopes(own.FusedAttention):
    """A bias per head that is made from the number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        steps = torch.arange(x.shape[1])
        slopes = 2.0 ** -torch.arange(1, self.num_heads + 1)
        bias = slopes[:, None, None] * (steps[None, :] - steps[:, None])
        return self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(-2))


class Interleaved(own.FusedAttention):
    """A weight whose name says one after the other, and whose code takes it head by head."""

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))
        q, k, v = (t.transpose(1, 2) for t in fused.unbind(-2))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Sliced(own.GatedMlp):
    """Takes every second feature: another order than one piece after the other."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.down(F.silu(both[..., ::2]) * both[..., 1::2])


class Dropping(own.FusedAttention):
    """Right when cut, but random in train mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


KINDS = {"slopes": Slopes, "interleaved": Interleaved, "dropping": Dropping}


def alone(kind: type[nn.Module]) -> str:
    """An attention module that is the whole model."""
    rules = [tp("qkv", "packed_colwise"), tp("out", "rowwise")]
    torch.manual_seed(0)
    model = meshplan.parallelize(kind(own.HEADS), {"version": 1, "mesh": {"tp": 2}, "rules": rules})
    try:
        model(torch.randn(2, 5, own.DIM))
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_a_model_that_is_one_attention_module(pool: Any) -> None:
    assert pool(2).run(alone, own.FusedAttention) == [""] * 2
    assert "the model (Slopes) computes other values" in pool(2).run(alone, Slopes)[0]


def first_forward(kind: str, mesh: dict[str, int]) -> str:
    """What the first forward says; a second one must run as if nothing had been proved."""
    torch.manual_seed(0)
    model = own.Decoder(KINDS.get(kind, own.FusedAttention), own.HEADS)
    if kind == "sliced":
        for layer in model.layers:
            layer.mlp = Sliced()
    model = meshplan.parallelize(model, {"version": 1, "mesh": mesh, "rules": FUSED})
    before = [vars(m).keys() - {"forward"} for m in model.modules()]
    inputs, _ = own.batch(0)
    try:
        model(inputs)
    except meshplan.ApplyError as error:
        return str(error)
    assert [vars(m).keys() - {"forward"} for m in model.modules()] == before
    assert not any("forward" in vars(m) for m in model.modules() if hasattr(m, "num_heads"))
    assert all(m.training for m in model.modules())
    return ""


@pytest.mark.parametrize(
    ("kind", "at"),
    [("slopes", "layers.0.attn (Slopes)"), ("interleaved", "layers.0.attn (Interleaved)"),
     ("sliced", "layers.0.mlp (Sliced)")],
)  # fmt: skip
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp_shard": 2, "tp": 2}])
def test_what_computes_something_else_is_refused(
    pool: Any, kind: str, at: str, mesh: dict[str, int]
) -> None:
    told = pool(4).run(first_forward, kind, mesh)
    assert len(set(told)) == 1, told
    assert f"{at} computes other values when its heads, fused projections or features" in told[0]
    assert "fix: leave all of its projections out of tp, or try tp_plan: auto" in told[0]


@pytest.mark.parametrize("kind", ["fused", "dropping"])
def test_what_is_right_passes(pool: Any, kind: str) -> None:
    assert pool(4).run(first_forward, kind, {"dp_shard": 2, "tp": 2}) == [""] * 4


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation(pool: Any, policy: str) -> None:
    plan = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "rules": GPT2}
    plan["activation_checkpointing"] = policy
    assert_same(pool(4).run(parity.train, "gpt2", plan)[0])


def whole_keys() -> str:
    plan = {"version": 1, "mesh": {"tp": 2}}
    plan["rules"] = [tp("**.q_proj", "colwise"), tp("**.o_proj", "rowwise")]
    model = meshplan.parallelize(models.build("hf_llama"), plan)
    try:
        model(**models.batch("hf_llama", 0)[0])
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_keys_left_whole_under_cut_queries(pool: Any) -> None:
    for told in pool(2).run(whole_keys):
        assert "self_attn (LlamaAttention) computes other values" in told


def with_caches(precision: str) -> float:
    model = models.build("gpt2")
    model.config.use_cache = True
    plan = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "rules": GPT2, "precision": precision}
    model = meshplan.parallelize(model, plan)
    inputs, _ = models.batch("gpt2", 0)
    out = model(**inputs)
    assert out.past_key_values is not None
    return float((out.logits - models.build("gpt2")(**inputs).logits).detach().abs().max())


def test_caches_and_half_precision(pool: Any) -> None:
    assert max(pool(4).run(with_caches, "32-true")) < 1e-5
    assert max(pool(4).run(with_caches, "bf16-mixed")) < 0.05


class Needs(nn.Module):
    """Code that counts on all heads: the error of torch says nothing about tp."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = own.FusedAttention(own.HEADS)
        self.attn.forward = self.count  # type: ignore[method-assign]

    def count(self, x: Tensor) -> Tensor:
        return self.attn.out(
            self.attn.qkv(x)
            .view(*x.shape[:2], 3, own.HEADS, -1, own.HEAD_DIM)[:, :, 2, :, 0]
            .flatten(-2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


def note() -> list[str]:
    rules = [tp("attn.qkv", "packed_colwise"), tp("attn.out", "rowwise")]
    model = meshplan.parallelize(Needs(), {"version": 1, "mesh": {"tp": 2}, "rules": rules})
    try:
        model(torch.randn(2, 3, own.DIM))
    except RuntimeError as error:
        return error.__notes__
    return []


def test_an_error_inside_names_the_module(pool: Any) -> None:
    assert "meshplan: attn runs with one rank's shard of its heads" in pool(2).run(note)[0][0]


def first_step(kind: type[nn.Module]) -> str:
    """A pipeline ends the forward of a stage early: the comparison waits for the step."""
    rules = {"rules": FUSED, "pipeline": {"schedule": "1F1B", "microbatches": 2}}
    torch.manual_seed(0)
    inputs, targets = own.batch(0)
    plan = {"version": 1, "mesh": {"pp": 2, "tp": 2}, **rules}
    model = own.Decoder(kind, own.HEADS)
    model = meshplan.parallelize(model, plan, example_inputs=(inputs[:2],))
    try:
        meshplan.train_step(
            model, torch.optim.SGD(model.parameters(), 0.1), inputs, targets, models.loss
        )
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_stages_of_a_pipeline(pool: Any) -> None:
    assert pool(4).run(first_step, own.FusedAttention) == [""] * 4
    told = pool(4).run(first_step, Slopes)
    pool(4).close()  # The stages do not fail together, so the group is dead.
    assert all("(Slopes) computes other values when its heads" in text for text in told), told


class NormedAttention(own.SeparateAttention):
    """One kv head, which every rank of tp keeps, and a norm of its own for each head's features."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__(kv_heads)
        self.norm = nn.RMSNorm(own.HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.norm(self.q(x).view(b, s, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.n_rep, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, s, -1))


def one_kv_head(plan: dict[str, Any]) -> float:
    """Largest difference of a first forward from one process."""
    inputs, _ = own.batch(0)
    torch.manual_seed(0)
    expected = own.Decoder(NormedAttention, 1)(inputs)
    torch.manual_seed(0)
    model = own.Decoder(NormedAttention, 1)
    cut = meshplan.parallelize(model, {"version": 1, **plan}, example_inputs=inputs[:2])
    assert cut.meshplan.plan.assignment.attributes
    return float((cut(inputs) - expected).detach().abs().max())


def test_a_norm_of_heads_is_whole_again_although_it_is_sharded(pool: Any) -> None:
    """Between a forward and its proof the data axes have cut what tp leaves whole."""
    plan = {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}
    assert max(pool(4).run(one_kv_head, plan)) < 1e-5


class Pair(nn.Module):
    """A colwise and a rowwise projection, and code between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        if between == "starts at zero":
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.seen.add_(1.0)
        if self.between in BETWEEN:
            h = BETWEEN[self.between](h)
        elif self.between == "kept scalar":
            self.penalty = h.square().mean()
        elif self.between == "kept features":
            self.features = h
        elif self.between == "summed in place":
            self.total.add_(h.detach().square().mean())
        elif self.between == "kept mask":
            self.mask = (x > 0).float()
        return self.down(F.silu(h))


BETWEEN = {
    "softmax": lambda h: h.softmax(-1),
    "order": lambda h: h * h.flip(-1),
    "running sum": lambda h: h.cumsum(-1),
    "width": lambda h: h / h.shape[-1] ** 0.5,
    "mean": lambda h: h - h.mean(-1, keepdim=True),
    "largest": lambda h: h * (h == h.amax(-1, keepdim=True)),
    "neighbours": lambda h: h + h.roll(1, -1),
    "groups of samples": lambda h: h / h.norm(),
    "not a number": lambda h: h / (h.sum(-1, keepdim=True) > 1e9) * 0,
    "starts at zero": lambda h: h.softmax(-1),
    "tokens": lambda h: h - h.mean((0, 1)),
}
TOGETHER = [*list(BETWEEN)[:8], "starts at zero", "kept scalar", "summed in place"]
APART = ["plain", "tokens", "kept mask"]
PAIRS = [tp("**.up", "colwise"), tp("**.down", "rowwise")]


def first_of_pairs(betweens: tuple[str, ...], **fields: Any) -> tuple[str, list[float]]:
    """What the first forward says, and how often each pair counted."""
    torch.manual_seed(0)
    model = nn.Sequential(*map(Pair, betweens)) if len(betweens) > 1 else Pair(*betweens)
    counts = [pair for pair in model.modules() if isinstance(pair, Pair)]
    plan = {"version": 1, "mesh": {"tp": 2}, "rules": PAIRS} | fields
    model = meshplan.parallelize(model, plan)
    try:
        out = model(torch.randn(2, 5, 8))
    except meshplan.ApplyError as error:
        return str(error), []
    masks = [pair.mask for pair in counts if pair.between == "kept mask"]
    assert not any(mask.min() == mask.max() for mask in masks)
    out.square().mean().backward()
    return "", [pair.seen.item() for pair in counts]


@pytest.mark.parametrize("between", TOGETHER)
def test_code_between_a_pair_that_takes_features_together_is_refused(
    pool: Any, between: str
) -> None:
    for told, _ in pool(2).run(first_of_pairs, ("plain", between)):
        assert "1 (Pair) computes other values when its heads, fused projections" in told


@pytest.mark.parametrize("between", ["softmax", "width"])
def test_a_pair_that_is_the_whole_model(pool: Any, between: str) -> None:
    assert pool(2).run(first_of_pairs, ("plain",)) == [("", [1.0])] * 2
    for told, _ in pool(2).run(first_of_pairs, (between,)):
        assert "the model (Pair) computes other values" in told


def test_features_that_are_kept_cut_are_refused(pool: Any) -> None:
    for told, _ in pool(2).run(first_of_pairs, ("plain", "kept features")):
        assert "1 (Pair) returns features that are sharded along tp" in told


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "dp_shard": 2}])
def test_code_between_a_pair_that_keeps_features_apart_passes(
    pool: Any, mesh: dict[str, int]
) -> None:
    world = 2 * len(mesh)
    answers = pool(world).run(first_of_pairs, (*APART, "plain"), mesh=mesh)
    assert answers == [("", [1.0] * 4)] * world


class Refusing(nn.Module):
    """Blocks that raise where they are given one token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(own.FusedAttention(own.HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            raise ValueError("one token")
        for layer in self.layers:
            x = layer(x)
        return x


def stance_after_a_forward_that_raised() -> list[str]:
    rules = [tp("layers.*.qkv", "packed_colwise"), tp("layers.*.out", "rowwise")]
    plan = {"version": 1, "mesh": {"tp": 2}, "rules": rules, "compile": True}
    stances = []
    with without_code_generation():
        model = meshplan.parallelize(Refusing(), plan)
        for tokens in (1, 5):
            with contextlib.suppress(ValueError):
                model(torch.randn(2, tokens, own.DIM))
            stances.append(torch._dynamo.eval_frame._stance.stance)
    return stances


def test_a_first_forward_that_raises_does_not_end_compilation(pool):
    assert pool(2).run(stance_after_a_forward_that_raised) == [["default"] * 2] * 2
