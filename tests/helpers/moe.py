"""Mixtures of experts that parity of ep is proved on: transformers' and what people write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers import models

WIDTH, FFN, EXPERTS, TOP_K = 32, 48, 8, 2


class Stack(nn.Module):
    """Experts with biases and a limit, in an order of its own: indices last, width transposed."""

    def __init__(self, count: int, width: int, ffn: int) -> None:
        super().__init__()
        self.experts_here, self.limit = count, 2.0
        self.up = nn.Parameter(torch.empty(count, width, ffn))
        self.up_bias = nn.Parameter(torch.empty(count, ffn))
        self.down = nn.Parameter(torch.empty(count, ffn, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.3)
        nn.init.normal_(self.up_bias, std=0.3)
        nn.init.normal_(self.down, std=0.3)

    def forward(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.experts_here):
            token, slot = torch.where(chosen == expert)
            if not token.numel():
                continue
            middle = torch.clamp(x[token] @ self.up[expert] + self.up_bias[expert], max=self.limit)
            made = F.silu(middle) @ self.down[expert]
            out.index_add_(0, token, made * scores[token, slot, None])
        return out


class Grouped(nn.Module):
    """Experts by torch's grouped matrix product."""

    def __init__(self, count: int, width: int, ffn: int) -> None:
        super().__init__()
        self.count = count
        self.up = nn.Parameter(torch.empty(count, width, ffn))
        self.down = nn.Parameter(torch.empty(count, ffn, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.3)
        nn.init.normal_(self.down, std=0.3)

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        # Not bincount, whose shape depends on numbers: a pipeline records forwards without any.
        each = torch.histc(slots.float(), bins=self.count, min=0, max=self.count - 1)
        ends = each.cumsum(0).to(torch.int32)
        rows = x.repeat_interleave(chosen.shape[-1], 0)[order]
        made = F.grouped_mm(F.gelu(F.grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)
        back = made[order.argsort()].view(*chosen.shape, -1)
        return (back * scores.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    """Router, experts, and a shared expert whose output is added in place."""

    def __init__(self, kind: str, count: int, width: int, ffn: int, favour: int) -> None:
        super().__init__()
        self.kind, self.favour = kind, favour
        self.router = nn.Linear(width, count)
        self.experts = (Stack if kind == "stack" else Grouped)(count, width, ffn)
        self.shared = nn.Sequential(nn.Linear(width, ffn), nn.SiLU(), nn.Linear(ffn, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        if self.favour > 0:  # The first experts get every token, the others none.
            logits = logits + 50.0 * (torch.arange(logits.shape[-1]) < self.favour)
        scores, chosen = logits.softmax(-1).topk(TOP_K, -1)
        if self.favour < 0:
            slots = torch.arange(chosen.numel(), device=x.device)
            chosen = (slots % logits.shape[-1]).view_as(chosen)
            scores = logits.softmax(-1).gather(-1, chosen)
        by_kind = (scores, chosen) if self.kind == "stack" else (chosen, scores)
        out = self.experts(tokens, *by_kind)
        out += self.shared(tokens)
        return out.view_as(x)


class Own(nn.Module):
    """A small model around mixtures.

    Args:
        favour: How many experts get all the tokens; 0 leaves it to the router, and below that
            each gets as many.
    """

    def __init__(
        self,
        kind: str = "stack",
        count: int = EXPERTS,
        ffn: int = FFN,
        favour: int = 0,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Mixture(kind, count, WIDTH, ffn, favour) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, models.VOCAB)
        for block in self.blocks:
            block.experts.requires_grad_(not frozen)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Listed(nn.Module):
    """Experts one by one in a list, called by the block around them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


def _hf(kind: str, implementation: str = "eager") -> nn.Module:
    import transformers as hf

    shape = {
        "vocab_size": models.VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": TOP_K,
        "max_position_embeddings": models.SEQ_LEN, "use_cache": False, "initializer_range": 0.2,
        **models.SPECIAL_TOKENS,
    }  # fmt: skip
    model: nn.Module
    if kind == "mixtral":
        config = hf.MixtralConfig(**shape, intermediate_size=FFN, num_local_experts=EXPERTS)
        model = hf.MixtralForCausalLM(config)
    elif kind == "qwen3_moe":
        config = hf.Qwen3MoeConfig(
            **shape, moe_intermediate_size=FFN, num_experts=EXPERTS, head_dim=8, norm_topk_prob=True
        )
        model = hf.Qwen3MoeForCausalLM(config)
    elif kind == "gpt_oss":
        config = hf.GptOssConfig(
            **shape, intermediate_size=FFN, num_local_experts=EXPERTS, head_dim=8
        )
        model = hf.GptOssForCausalLM(config)
    else:
        shape["num_key_value_heads"] = 4
        config = hf.DeepseekV3Config(
            **shape, intermediate_size=FFN, moe_intermediate_size=FFN, n_routed_experts=EXPERTS,
            n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
            kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        )  # fmt: skip
        model = hf.DeepseekV3ForCausalLM(config)
    model.config._experts_implementation = implementation
    return model


BUILDERS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "mixtral": functools.partial(_hf, "mixtral"),
    "mixtral grouped": functools.partial(_hf, "mixtral", "grouped_mm"),
    "qwen3_moe": functools.partial(_hf, "qwen3_moe", "grouped_mm"),
    "qwen3_moe batched": functools.partial(_hf, "qwen3_moe", "batched_mm"),
    "deepseek_v3": functools.partial(_hf, "deepseek_v3"),
    "gpt_oss": functools.partial(_hf, "gpt_oss"),
    "stack": Own,
    "grouped": functools.partial(Own, "grouped"),
    "even": functools.partial(Own, "grouped", favour=-1),
    "uneven": functools.partial(Own, count=6, ffn=33),
    "one rank gets all": functools.partial(Own, favour=TOP_K),
    "one rank gets all, frozen": functools.partial(Own, favour=TOP_K, frozen=True),
    "grouped, one rank gets all": functools.partial(Own, "grouped", favour=TOP_K),
}


def build(name: str) -> nn.Module:
    """The model on CPU, in train mode, with the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]().train()


def reference(name: str, steps: int, clip: float | None) -> tuple[list[float], nn.Module]:
    """One process: the loss of every step, and the model after the last."""
    model = build(name)
    sgd = models.optimizer(model)
    losses = []
    for step in range(steps):
        inputs, targets = models.batch(name, step)
        loss = models.loss(model(**inputs), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.item())
    return losses, model


def plan(mesh: Mapping[str, Any], *rules: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A plan that spreads every module called `experts`."""
    spread = {"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}
    return {"version": 1, "mesh": dict(mesh), "rules": [spread, *rules], **more}
