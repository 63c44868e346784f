"""Steps on CUDA, imagined on CPU: what its kernels save, take and put on streams of their own.

Which seeded bug would this catch? An operator that saves what CPU saves, one that is not put back,
a recomputation that takes another path than forward did, a stream that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshplan.kernels import recurrent_buffers
from meshplan.memory import EventLog, StateBytes, Term, reserve
from meshplan.plan.plan import make_plan
from meshplan.runtime.base.mesh import device_type
from meshplan.runtime.fake_step.cuda_kernels import Kernels, attention_kind
from meshplan.runtime.fake_step.cuda_mode import behaving_as
from meshplan.runtime.fake_step.cuda_workspace import taken_inside
from meshplan.runtime.fake_step.step import fake_rank, fake_single_rank
from meshplan.runtime.torch_private.fakes import fake_mode
from meshplan.runtime.trace.bounds import UnknownBufferError, everything, picking
from meshplan.runtime.trace.constants import ConstantPropagation
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers import exact

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
aten = torch.ops.aten


def saved_bytes(make: Callable[..., torch.Tensor], *args: torch.Tensor) -> int:
    """Of the distinct storages that backward of `make(*args)` needs."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = make(*args)
    own = {arg.untyped_storage()._cdata for arg in args} | {out.untyped_storage()._cdata}
    del out
    return sum(s.nbytes() for key, s in kept.items() if key not in own)


@contextmanager
def cuda(device: str = "cuda") -> Iterator[None]:
    with fake_mode(), behaving_as(device):
        yield


def filled(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def test_dropout_keeps_one_byte_for_each_element() -> None:
    with cuda():
        assert saved_bytes(lambda x: F.dropout(x, 0.1), filled(64, 32)) == 64 * 32
        assert saved_bytes(lambda x: F.dropout(x, 0.0), filled(64, 32)) == 0
        assert saved_bytes(lambda x: F.dropout(x, 0.1, False), filled(64, 32)) == 0
    with fake_mode():
        assert saved_bytes(lambda x: F.dropout(x, 0.1), filled(64, 32)) == 4 * 64 * 32


def test_rms_norm_keeps_one_number_for_each_row() -> None:
    with cuda():
        x, w = filled(64, 32, dtype=BF16), filled(32, dtype=BF16)
        assert saved_bytes(lambda x, w: F.rms_norm(x, (32,), w), x, w) == 4 * 64
        F.rms_norm(x, (32,), w).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert w.grad is not None
        assert w.grad.shape == w.shape
        F.rms_norm(x, (32,)).sum().backward()  # Without a weight.
    with fake_mode():
        x, w = filled(64, 32, dtype=BF16), filled(32, dtype=BF16)
        assert saved_bytes(lambda x, w: F.rms_norm(x, (32,), w), x, w) > 4 * 64 * 32


def test_layer_norm_keeps_two_numbers_of_float32_for_each_row() -> None:
    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (32,), w, b)

    with cuda():
        x, w, b = (filled(*shape, dtype=BF16) for shape in ((64, 32), (32,), (32,)))
        assert saved_bytes(norm, x, w, b) == 2 * 4 * 64
        norm(x, w, b).sum().backward()
        for tensor in (x, w, b):
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, BF16)
        F.layer_norm(x, (32,)).sum().backward()  # Without a weight.
    with fake_mode():
        x, w, b = (filled(*shape, dtype=BF16) for shape in ((64, 32), (32,), (32,)))
        assert saved_bytes(norm, x, w, b) == 2 * 2 * 64


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax])
def test_softmax_of_float16_is_not_copied_to_float32(softmax: Any) -> None:
    def in_float32(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = softmax(x, dim=-1, dtype=FP32)
        return out

    for dtype, copies in ((FP16, 0), (BF16, 1), (FP32, 0)):
        with cuda():
            x = filled(64, 32, dtype=dtype)
            ops: list[Any] = []
            with _Names(ops):
                in_float32(x).sum().backward()
            assert ops.count(aten._to_copy.default) == 2 * copies, dtype


class _Names(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, names: list[Any]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(func)
        return func(*args, **(kwargs or {}))


NEW, HOPPER, VOLTA = Kernels(), Kernels(prefers_cudnn=True), Kernels(has_flash=False)


@pytest.mark.parametrize(
    ("kernels", "dtype", "head", "kv_heads", "more", "kind"),
    [
        (NEW, BF16, 64, 8, {}, "flash"),
        (NEW, FP16, 64, 8, {"is_causal": True}, "flash"),
        (NEW, BF16, 20, 8, {}, "flash"),
        (NEW, BF16, 256, 8, {}, "flash"),
        (NEW, BF16, 264, 8, {}, "efficient"),
        (NEW, BF16, 260, 8, {}, "math"),
        (NEW, FP32, 64, 8, {}, "efficient"),
        (NEW, FP32, 6, 8, {}, "math"),
        (NEW, BF16, 64, 8, {"mask": True}, "efficient"),
        (NEW, BF16, 64, 2, {"enable_gqa": True}, "flash"),
        (NEW, BF16, 64, 2, {"enable_gqa": True, "mask": True}, "math"),
        (NEW, FP32, 64, 2, {"enable_gqa": True}, "math"),
        (NEW, torch.float64, 64, 8, {}, "math"),
        (HOPPER, BF16, 64, 8, {}, "cudnn"),
        (HOPPER, BF16, 64, 2, {"enable_gqa": True, "mask": True}, "cudnn"),
        (HOPPER, FP32, 64, 8, {}, "efficient"),
        (HOPPER, BF16, 20, 8, {}, "flash"),
        (VOLTA, FP16, 64, 8, {}, "efficient"),
        (VOLTA, FP32, 6, 8, {}, "efficient"),
        (VOLTA, BF16, 64, 8, {}, "math"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_takes(
    kernels: Kernels, dtype: torch.dtype, head: int, kv_heads: int, more: dict[str, Any], kind: str
) -> None:
    q = torch.empty(2, 8, 16, head, dtype=dtype)
    k = torch.empty(2, kv_heads, 16, head, dtype=dtype)
    mask = torch.empty(16, 16, dtype=torch.bool) if more.pop("mask", False) else None
    assert attention_kind(kernels, q, k, k, mask, **more) == kind


@pytest.mark.parametrize(
    ("device", "dtype", "head", "mask", "expected"),
    [
        # The sum of each row in float32, and a few numbers of the random state.
        ("cuda", BF16, 64, False, 4 * 2 * 8 * 100 + 24),
        ("h100-sxm-80gb", BF16, 64, False, 4 * 2 * 8 * 100 + 16),
        # Rows are rounded to 32.
        ("cuda", FP32, 64, False, 4 * 2 * 8 * 128 + 16),
        # So are those of a mask, to 16 columns.
        ("cuda", FP32, 64, True, 4 * 2 * 8 * 128 + 16 + 4 * 100 * 112),
        # Heads are padded to 24, of query, key and value.
        ("cuda", BF16, 20, False, 4 * 2 * 8 * 100 + 24 + 3 * 2 * 2 * 8 * 100 * 24),
    ],
)
def test_attention_saves_no_scores(
    device: str, dtype: torch.dtype, head: int, mask: bool, expected: int
) -> None:
    with cuda(device):
        q, k, v = (filled(2, 8, 100, head, dtype=dtype) for _ in range(3))
        given = torch.zeros(100, 100, dtype=torch.bool) if mask else None

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, given)

        assert saved_bytes(attend, q, k, v) == expected
        attend(q, k, v).sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape


def test_everything_is_put_back() -> None:
    x = torch.randn(64, 32, dtype=FP32, requires_grad=True)
    before = saved_bytes(lambda x: F.rms_norm(x, (32,)), x)
    with pytest.raises(UnknownBufferError, match="recurrent"), cuda():
        torch.nn.LSTM(8, 8)(torch.zeros(2, 3, 8))
    assert saved_bytes(lambda x: F.rms_norm(x, (32,)), x) == before
    torch.nn.LSTM(8, 8)(torch.zeros(2, 3, 8))
    adam = torch.optim.AdamW([x])
    x.grad = torch.zeros_like(x)
    ops: list[Any] = []
    with _Names(ops):
        adam.step()
    assert not any("_foreach" in str(op) for op in ops)


_RECURRENT: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "lstm": (torch.nn.LSTM, {}),
    "lstm, both ways, by samples": (
        torch.nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}
    ),
    "lstm, projected": (torch.nn.LSTM, {"proj_size": 3}),
    "gru, no biases": (torch.nn.GRU, {"num_layers": 2, "bias": False}),
    "rnn, dropout": (torch.nn.RNN, {"num_layers": 3, "dropout": 0.5}),
    "lstm cell": (torch.nn.LSTMCell, {}),
    "gru cell": (torch.nn.GRUCell, {}),
}  # fmt: skip


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", _RECURRENT)
def test_a_recurrent_layer_gives_what_the_cpu_gives(name: str, is_packed: bool) -> None:
    """Shapes of the outputs and of every gradient; what it keeps is bounded, and never exact."""
    kind, more = _RECURRENT[name]
    if is_packed and "cell" in name:
        pytest.skip("a cell takes one step")

    def shapes() -> list[Any]:
        module = kind(4, 6, **more)  # type: ignore[call-arg]
        x = filled(*((5, 4) if "cell" in name else (5, 5, 4)))
        given: Any = x
        if is_packed:
            data, sizes = filled(15, 4), torch.tensor([5, 4, 3, 2, 1])
            x, given = data, torch.nn.utils.rnn.PackedSequence(data, sizes)
        out = module(given)
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        sum(t.float().sum() for t in made if t.is_floating_point()).backward()  # type: ignore[union-attr]
        grads = [x.grad, *(parameter.grad for parameter in module.parameters())]
        return [tuple(t.shape) for t in (*made, *grads) if t is not None]

    on_cpu = shapes()
    found = []
    for has_buffers in (True, False):
        mode = fake_mode()
        picks = picking(everything, has_buffers=has_buffers)
        with mode, ConstantPropagation(mode), behaving_as("cuda"), picks:
            found.append(shapes())
    assert found == [on_cpu, on_cpu]


def test_what_cudnn_keeps_is_as_reported() -> None:
    """github.com/pytorch/pytorch/issues/2895: four layers of 320 features, 25,000 tokens."""
    reported = {"lstm": 736_000_000, "gru": 864_000_000}
    for kind, num_bytes in reported.items():
        kept, _ = recurrent_buffers(kind, 25_000, 320, 4, 1, has_dropout=False)
        assert 4 * kept == num_bytes
    with cuda(), picking(everything):
        layer, x = torch.nn.LSTM(320, 320, num_layers=4), filled(1000, 25, 320)
        own = sum(4 * p.numel() for p in layer.parameters())
        kept_bytes = saved_bytes(lambda x: layer(x)[0], x)
    with cuda(), picking(everything, has_buffers=False):
        layer, x = torch.nn.LSTM(320, 320, num_layers=4), filled(1000, 25, 320)
        less_bytes = saved_bytes(lambda x: layer(x)[0], x)
    # The buffer, and the weights once more in one piece.
    assert kept_bytes - less_bytes == reported["lstm"] + own - 2 * 4


def test_what_operators_take_for_themselves() -> None:
    def like(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, kv = like(2, 8, 100, 64), like(2, 2, 100, 64)
    flash = aten._scaled_dot_product_flash_attention_backward.default
    sums, of_query = 4 * 2 * 8 * 128, 4 * 2 * 8 * 128 * 64
    assert taken_inside(flash, (q, q, q, q), None) == (sums, of_query)
    assert taken_inside(flash, (q, q, kv, kv), None) == (
        sums,
        of_query,
        *[2 * 8 * 100 * 64 * 2] * 2,
    )
    efficient = aten._scaled_dot_product_efficient_attention_backward.default
    sums, of_query = 4 * 2 * 8 * 100, 4 * 2 * 8 * 2 * (4 + 64 * 64)
    assert taken_inside(efficient, (q.float(), q.float(), q, q), None) == (sums, of_query)
    embedding = aten.embedding_dense_backward.default
    few, many = like(3072, dtype=torch.int64), like(4096, dtype=torch.int64)
    assert taken_inside(embedding, (like(3072, 64), few, 1000), None) == ()
    taken = taken_inside(embedding, (like(4096, 64), many, 1000), None)
    assert taken[-1] == 4 * (409 + 1000) * 64
    softmax = aten._softmax_backward_data.default
    assert taken_inside(softmax, (q, q, -1, BF16), None) == (2 * 2 * 8 * 100 * 64,)
    assert taken_inside(softmax, (q.float(), q, -1, BF16), None) == (4 * 2 * 8 * 100 * 64,)
    put = aten.index_put.default
    assert taken_inside(put, (q, [few], q, False), None) == ()
    assert taken_inside(put, (q, [None, few], q, True), None) == (8 * 2 * 3072,) * 5
    assert taken_inside(aten.mm.default, (q, q), None) == ()


FULL: dict[str, Any] = {"version": 1, "strategy": "full_shard"}
TP: dict[str, Any] = {"version": 1, "mesh": {"tp": 2}, "tp_plan": "auto"}


def imagined(
    apart: ProcessPoolExecutor, model: str, plan: dict[str, Any], device: str, how: str = "default"
) -> tuple[EventLog, StateBytes]:
    answer = apart.submit(exact.imagined, model, plan, how, 2, 0, device).result()
    assert isinstance(answer, tuple), answer
    return answer


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("own_llama", FULL),
        *(
            pytest.param("own_llama", plan, marks=pytest.mark.wide)
            for plan in (
                FULL | {"precision": "bf16-mixed", "activation_checkpointing": "full"},
                TP | {"activation_checkpointing": "full"},
                {"version": 1, "strategy": "ddp"},
            )
        ),
        pytest.param(
            "own_llama",
            FULL | {"precision": "bf16-mixed", "activation_checkpointing": "selective"},
            marks=pytest.mark.wide,
        ),
        pytest.param("gpt2", FULL, marks=pytest.mark.wide),
        pytest.param("t5", FULL | {"precision": "bf16-true"}, marks=pytest.mark.wide),
    ],
)
def test_a_step_runs_on_the_kernels_of_cuda(
    apart: ProcessPoolExecutor, model: str, plan: dict[str, Any]
) -> None:
    is_mixed = "mesh" in plan  # torch refuses to take plain and cut parameters at once.
    log, states = imagined(apart, model, plan, "cuda", "adamw" if is_mixed else "default")
    ops = {storage.op for storage in log.storages}
    assert not any("for_cpu" in op for op in ops)
    assert any("_scaled_dot_product_" in op or "_softmax" in op for op in ops)
    assert any("_foreach" in op for op in ops) != is_mixed
    # Step counts stay on the host.
    assert log.terms_at_peak[Term.OPTIMIZER] == 2 * states.parameters_bytes


def test_gathered_parameters_lie_in_a_pool_of_their_own(apart: ProcessPoolExecutor) -> None:
    log, _ = imagined(apart, "own_llama", FULL, "cuda")
    streams = {storage.stream for storage in log.storages}
    assert len(streams) >= 3, "computing, gathering, reducing"
    alone = replace(log, storages=tuple(s._replace(stream=0) for s in log.storages))
    assert reserve(log).requested_bytes == reserve(alone).requested_bytes
    assert reserve(log).reserved_bytes > reserve(alone).reserved_bytes


def devices_with_a_gpu() -> list[str]:
    """Which devices this process would run on, if it had a GPU: outside, imagining, and after."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        found.append(device_type())
        with fake_single_rank(torch.nn.Linear(2, 2)):
            found.append(device_type())
        plan = make_plan(
            load_spec({"version": 1, "mesh": {"dp_shard": 2}}), graph_of(torch.nn.Linear(2, 2))
        )
        with fake_rank(torch.nn.Linear(2, 2), plan, 0) as (_, mesh, _, _):
            found += [mesh.device_type, device_type()]
        found.append(device_type())
    return found


def test_what_is_imagined_stays_on_the_cpu_of_a_machine_with_a_gpu(
    apart: ProcessPoolExecutor,
) -> None:
    """Tensors without numbers are the CPU's; a mesh of the GPU's would not take them."""
    found = apart.submit(devices_with_a_gpu).result()
    assert found == ["cuda", "cpu", "cpu", "cpu", "cuda"]
