"""Memory that single kernels allocate and free: `meshplan.kernels` beside the allocator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """One kernel: a function that prepares and returns (the call, bytes it returns), and bytes."""

    name: str
    prepare: Callable[[], tuple[Callable[[], Any], int]]
    workspace: tuple[int, ...]


def _attention(backend: str, batch: int, heads: int, kv: int, rows: int, dim: int, dtype: str):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def prepare() -> tuple[Callable[[], Any], int]:
        kind = getattr(torch, dtype)
        q, k, v = (
            torch.randn(batch, rows, h, dim, dtype=kind, device="cuda")
            .transpose(1, 2)
            .requires_grad_()
            for h in (heads, kv, kv)
        )
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != heads)
        grad = torch.randn_like(out)
        bytes_out = sum(t.numel() * t.element_size() for t in (q, k, v))
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), bytes_out

    return prepare


def _embedding(num: int, vocab: int, width: int, dtype: str):
    import torch

    def prepare() -> tuple[Callable[[], Any], int]:
        kind = getattr(torch, dtype)
        weight = torch.randn(vocab, width, dtype=kind, device="cuda", requires_grad=True)
        index = torch.randint(0, vocab, (num,), device="cuda")
        out = torch.nn.functional.embedding(index, weight)
        grad = torch.randn_like(out)
        size = weight.numel() * weight.element_size()
        return lambda: torch.autograd.grad(out, weight, grad, retain_graph=True), size

    return prepare


def _sorted(num: int, dtype: str):
    import torch

    def prepare() -> tuple[Callable[[], Any], int]:
        x = torch.randint(0, 100, (num,), device="cuda").to(getattr(torch, dtype))
        return lambda: torch.sort(x), num * (x.element_size() + 8)

    return prepare


def _index_added(num: int, rows: int, width: int):
    import torch

    def prepare() -> tuple[Callable[[], Any], int]:
        x = torch.zeros(rows, width, device="cuda")
        index = torch.randint(0, rows, (num,), device="cuda")
        value = torch.randn(num, width, device="cuda")
        return lambda: x.index_put_((index,), value, accumulate=True), 0

    return prepare


def kernels() -> Iterator[Kernel]:
    """Yield the kernels, each with the tensors of its workspace as `meshplan.kernels` has them."""
    from meshplan import kernels as table

    for batch, heads, kv, rows, dim in (
        (2, 16, 16, 2048, 64), (1, 32, 32, 4096, 128), (1, 32, 8, 4096, 128),
        (2, 12, 12, 1000, 80), (1, 8, 8, 2048, 256), (1, 14, 2, 513, 96),
    ):  # fmt: skip
        name = f"{batch} x {heads}/{kv} heads of {dim}, {rows} rows"
        workspace = table.flash_backward(batch * heads, rows, rows, dim, 2, is_grouped=kv != heads)
        yield Kernel(
            f"flash attention's backward, {name}",
            _attention("FLASH_ATTENTION", batch, heads, kv, rows, dim, "bfloat16"),
            workspace,
        )
        if kv != heads:
            continue
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            yield Kernel(
                f"memory-efficient attention's backward in {dtype}, {name}",
                _attention("EFFICIENT_ATTENTION", batch, heads, kv, rows, dim, dtype),
                table.efficient_backward(batch * heads, rows, rows, dim, dim, size),
            )
    for num, vocab, width, dtype, size in (
        (3000, 50000, 1024, "float32", 4), (8192, 128256, 2048, "float32", 4),
        (8192, 128256, 2048, "bfloat16", 2), (40000, 1000, 512, "float32", 4),
    ):  # fmt: skip
        workspace = table.embedding_backward(num, vocab, width, element_bytes=size)
        yield Kernel(
            f"embedding's backward in {dtype}, {num} of {vocab} rows of {width}",
            _embedding(num, vocab, width, dtype),
            workspace,
        )
    for num in (4000, 100_000, 3_000_000):
        for dtype, size in (("int64", 8), ("float32", 4)):
            workspace = table.sort(num, size)
            yield Kernel(f"sort of {num} {dtype}", _sorted(num, dtype), workspace)
    for num in (1000, 200_000):
        yield Kernel(
            f"index_put of {num} rows, accumulated", _index_added(num, 5000, 64),
            table.index_add(num),
        )  # fmt: skip


def measured() -> list[dict[str, Any]]:
    """Return a row for each kernel: the most that is held beside inputs and results, in bytes."""
    import torch

    rows = []
    for name, prepare, workspace in kernels():
        row: dict[str, Any] = {"name": name, "predicted": {"requested_bytes": sum(workspace)}}
        try:
            call, results = prepare()
            call()
            torch.cuda.synchronize()
            time.sleep(0.05)  # Autograd's thread still holds the results for a moment.
            held = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            kept = call()
            torch.cuda.synchronize()
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
            row["measured"] = {"requested_bytes": peak - held - results}
            del kept, call
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        torch.cuda.empty_cache()
        rows.append(row)
    return rows
