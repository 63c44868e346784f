"""Compiled blocks: what fused kernels read and write, by hand, by a trace, and by Inductor.

Which seeded bug would this catch? A value that is read twice or written for nobody, a kernel that
ends where eager mode happens to run a product, a residual that is never written, results that only
backward needs, and kernels that reach beyond a block.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshplan.cost.chain import chain_of
from meshplan.cost.fusion import Access, CompiledPass, FusedTraffic
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import make_plan
from meshplan.runtime.fake_step.costs import Ask, watch
from meshplan.runtime.fake_step.kernels import OperatorWork
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec

FORWARD, AGAIN, BACKWARD = (
    CompiledPass("block", phase) for phase in ("forward", "again", "backward")
)


def of(*names: str, size: float = 1.0) -> list[Access]:
    return [Access(name, None, size) for name in names]


def test_a_kernel_reads_once_and_writes_what_a_product_needs():
    traffic = FusedTraffic()
    traffic.run(FORWARD, ["x"], ["gate"])
    assert traffic.fuse(FORWARD, of("gate"), of("silu")) == (1, 1)
    traffic.run(FORWARD, ["x"], ["up"])  # Eager mode runs it between the two; fused ones wait.
    assert traffic.fuse(FORWARD, of("silu", "up", "gate"), of("h")) == (0, 1)
    assert traffic.run(FORWARD, ["h"], ["out"]) == 1  # h; nobody needs silu in memory.
    assert traffic.run(FORWARD, ["h", "silu"]) == 1  # Now somebody does.


def test_a_residual_is_written_for_the_next_kernel_and_not_for_backward():
    traffic = FusedTraffic()
    assert traffic.fuse(FORWARD, of("x", "y"), of("sum")) == (1, 2)
    traffic.run(FORWARD, ["sum"], ["z"])
    assert traffic.fuse(FORWARD, of("sum", "z"), of("out")) == (1, 2)
    assert traffic.fuse(BACKWARD, of("g", "out"), of("dx")) == (1, 1)  # out is made again.
    assert traffic.fuse(BACKWARD, of("g", "sum"), of("dy")) == (0, 1)  # sum is in memory.
    assert traffic.fuse(AGAIN, of("x"), of("sum again")) == (1, 1)


def test_constants_are_made_where_they_are_read_until_a_product_writes_them():
    traffic = FusedTraffic()
    assert traffic.fuse(FORWARD, [], of("mask")) == (0, 0)
    assert traffic.fuse(FORWARD, of("x", "mask"), of("y")) == (1, 1)
    traffic.run(FORWARD, ["y"], ["mask"])
    assert traffic.fuse(FORWARD, of("mask"), of("z")) == (1, 1)


def test_kernels_end_with_their_block():
    traffic = FusedTraffic()
    other = CompiledPass("next", "forward")
    assert traffic.fuse(FORWARD, of("x"), of("out")) == (1, 1)
    assert traffic.fuse(other, of("out"), of("normed")) == (1, 2)  # Written, and read.


def test_views_of_one_storage_are_read_apart():
    traffic = FusedTraffic()
    q, k = Access("qkv", "q", 2.0), Access("qkv", "k", 1.0)
    assert traffic.fuse(FORWARD, [q], of("a")) == (1, 2)
    assert traffic.fuse(FORWARD, [k, q], of("b")) == (0, 1)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 97,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
def test_the_traffic_of_a_llama_block_is_what_one_counts_by_hand(tp):
    chain = chain_of(from_mapping(LLAMA), seq_len=32, element_bytes=2, tp=tp, is_compiled=True)
    eager = chain_of(from_mapping(LLAMA), seq_len=32, element_bytes=2, tp=tp)
    block, unfused = chain.kinds[chain.order[2]], eager.kinds[eager.order[2]]
    unit, mlp = 32 * 64 * 2, 4
    norms = 2 + 4  # x and the normed one; x, the sum, what is added and the normed one.
    rotated = 6 / tp  # Of queries and keys: the whole, its two halves, and the result.
    activation = 3 * mlp / tp  # gate and up are read, their product is written.
    residual = 3
    assert block.forward.moved_bytes / unit == pytest.approx(
        norms + rotated + activation + residual, rel=0.01
    )
    # Full recomputation ends with the last value that backward reads: without the residual.
    assert block.recompute[2].moved_bytes < block.forward.moved_bytes
    assert block.forward.moved_bytes < 0.6 * unfused.forward.moved_bytes
    assert block.backward.moved_bytes < 0.6 * unfused.backward.moved_bytes
    assert block.backward.kernels < unfused.backward.kernels
    for same in ("flops", "attention_flops", "product_bytes"):
        assert getattr(block.forward, same) == getattr(unfused.forward, same)
        assert getattr(block.backward, same) == getattr(unfused.backward, same)
    first = chain.order[0]
    assert chain.kinds[first] == eager.kinds[first]  # Only blocks are compiled.


class Gated(nn.Module):
    """A block without attention: a norm, two products that meet, a dropout, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = functional.silu(self.gate(h)) * self.up(h)
        return x + functional.dropout(self.down(h), 0.1, self.training)


class Attending(nn.Module):
    """A block with attention that Inductor does not know by sight, and a norm by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


WIDTH, LENGTH, SAMPLES = 64, 32, 4


def traced(kind: type[nn.Module], *, is_compiled: bool) -> tuple[OperatorWork, OperatorWork]:
    """The work of an inner block in forward and backward, with float32 on CPU."""
    model = Stack(kind, WIDTH)
    plan = {"version": 1, "mesh": {"dp_shard": 2}, "strategy": "full_shard",
            "batch": {"micro": SAMPLES}, "compile": is_compiled}  # fmt: skip
    made = make_plan(load_spec(plan), graph_of(model))
    x = torch.zeros(SAMPLES, LENGTH, WIDTH)
    (seen,) = watch(model, made, x, x, functional.mse_loss, "cpu", [Ask(SAMPLES)])
    block = seen.shown["layers.2"]
    found = {at.is_backward: done for at, done in seen.done.items()
             if at.block == block and not at.is_after}  # fmt: skip
    return found[False], found[True]


@pytest.mark.parametrize("kind", [Gated, Attending])
def test_products_of_traced_blocks_are_as_without_a_compiler(kind):
    pairs = zip(traced(kind, is_compiled=True), traced(kind, is_compiled=False), strict=True)
    for fused, eager in pairs:
        assert (fused.flops, fused.product_bytes) == (eager.flops, eager.product_bytes)
        assert fused.moved_bytes < 0.7 * eager.moved_bytes
        assert fused.kernels < 0.75 * eager.kernels


def test_the_traffic_of_a_traced_block_is_what_one_counts_by_hand():
    forward, _ = traced(Gated, is_compiled=True)
    unit = SAMPLES * LENGTH * WIDTH * 4
    # x and the normed one; gate, up and their product; x, what is added, and the sum.
    assert forward.moved_bytes / unit == pytest.approx(2 + 3 * 4 + 3, rel=0.05)


def inductor(kind: type[nn.Module]) -> tuple[float, float]:
    """Bytes that the fused kernels of a block move in forward and backward, as Inductor says."""
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    def fused() -> float:
        elements = sum(n for node, n in metrics.nodes_num_elem if not node.is_extern())
        metrics.reset()
        return float(elements) * 4

    block = torch.compile(kind(WIDTH))
    x = torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)
    log = logging.getLogger(inductor_metrics_log.name)
    level = log.level
    log.setLevel(logging.INFO)  # It counts only for its log.
    try:
        with config.patch(force_disable_caches=True):
            metrics.reset()
            out = block(x)
            forward = fused()
            out.square().sum().backward()
            return forward, fused()
    finally:
        log.setLevel(level)


@pytest.mark.wide
@pytest.mark.parametrize("kind", [Gated, Attending])
def test_bytes_are_those_that_inductor_counts(kind):
    """Products have biases, whose gradients are sums that Inductor counts likewise."""
    for told, real in zip(traced(kind, is_compiled=True), inductor(kind), strict=True):
        assert told.moved_bytes == pytest.approx(real, rel=0.25)
