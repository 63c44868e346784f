"""What operators make of fakes is remembered: it is what torch itself would say, to the stride."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn import functional

from meshplan.memory.log.events import EventLog
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.torch_private import fake_dispatch, fake_results
from meshplan.runtime.torch_private.fakes import fake_like, fake_mode
from meshplan.runtime.trace.bounds import everything, half, picking
from meshplan.runtime.trace.constants import ConstantPropagation


class _Many(nn.Module):
    """Views, products, what writes in place, what draws numbers, several results, none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8)
        self.wide, self.drop = nn.Linear(8, 24), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        query, key, value = self.wide(x).chunk(3, -1)
        seen = functional.softmax(query @ key.mT, -1)
        out = self.drop(seen) @ value
        out = out.contiguous().view(-1, 8)[::2]
        top, places = out.topk(2)
        out = torch.cat((out, top, out.gather(1, places).to(torch.bfloat16).float()), 1)
        out = out.clone().add_(1).masked_fill_(out > 0, 0.0)
        return out.unfold(0, 3, 2).sum((0, 2)) / out.var(0).sqrt().clamp_min(1e-6)


def _log(shape: tuple[int, ...], mode: Any, shadows: ConstantPropagation) -> EventLog:
    model = _Many()
    with mode, shadows:
        for name, parameter in list(model.named_parameters()):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, fake_like(mode, parameter))
        ledger = MemoryTracker({module: name for name, module in model.named_modules()})
        x = torch.empty(shape)
        with ledger:
            model(x).square().sum().backward()
    return ledger.log()


def _both(shape: tuple[int, ...]) -> tuple[EventLog, EventLog]:
    """(remembered, as torch says)."""
    mode, other = fake_mode(), fake_mode()
    return _log(shape, mode, ConstantPropagation(mode)), _log(shape, other, ConstantPropagation())


def test_same_log() -> None:
    fake_results._KNOWN.clear()
    for shape in ((2, 4, 9, 9), (3, 4, 9, 9), (2, 4, 9, 9)):
        remembered, told = _both(shape)
        assert remembered == told
    assert sum(recipe is not None for recipe in fake_results._KNOWN.values()) > 50


def _pairs() -> list[tuple[str, Callable[[torch.Tensor], Any]]]:
    """Two things are done with one tensor; what the first was may not answer the second."""
    return [
        ("dtype", lambda x: (x.sum(), x.to(torch.int32).sum())),
        ("stride", lambda x: (x + 1, x.mT.contiguous().mT + 1)),
        ("kind of a number", lambda x: (x.to(torch.int32) * 2, x.to(torch.int32) * 2.0)),
        ("part", lambda x: (x[:2].detach(), x[2:4].detach())),
        ("dim", lambda x: (x.sum(0), x.sum(1))),
        ("keyword", lambda x: (torch.zeros_like(x), torch.zeros_like(x, dtype=torch.int8))),
        ("number of them", lambda x: (torch.cat([x, x]), torch.cat([x, x, x]))),
    ]


@pytest.mark.parametrize(("what", "run"), _pairs(), ids=[what for what, _ in _pairs()])
def test_told_apart(what: str, run: Callable[[torch.Tensor], Any]) -> None:
    mode, other = fake_mode(), fake_mode()
    found = []
    for each, shadows in (
        (mode, ConstantPropagation(mode)),
        (mode, ConstantPropagation(mode)),
        (other, ConstantPropagation()),
    ):
        with each, shadows:
            x = torch.empty(4, 6)
            made = run(x)
        found.append([
            (t.shape, t.stride(), t.storage_offset(), t.dtype, t.untyped_storage().nbytes(),
             t.untyped_storage()._cdata == x.untyped_storage()._cdata)
            for t in made
        ])  # fmt: skip
    assert found[0] == found[1] == found[2]


def test_default_dtype() -> None:
    mode = fake_mode()
    with mode, ConstantPropagation(mode):
        whole = torch.empty(3, dtype=torch.int64)
        assert (whole / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (whole / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_other_modes_are_left_alone() -> None:
    mode, inner = fake_mode(), fake_mode()
    with mode, ConstantPropagation(mode):
        (torch.empty(2, 3) + 1).relu()
        with inner:
            made = (torch.empty(2, 3) + 1).relu()
    assert made.fake_mode is inner


def test_written_numbers_are_forgotten() -> None:
    mode = fake_mode()
    with mode, ConstantPropagation(mode):
        known = torch.arange(3)
        assert known.max().item() == 2
        unknown = torch.empty(3, dtype=torch.int64) + 1
        known.copy_(unknown)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            known.max().item()


@pytest.mark.parametrize("trains", [True, False])
def test_fake_like(trains: bool) -> None:
    parameter = nn.Parameter(torch.empty(3, 5).mT, requires_grad=trains)
    mode = fake_mode()
    fake = fake_like(mode, parameter)
    assert isinstance(fake, nn.Parameter)
    assert (fake.shape, fake.stride(), fake.dtype) == ((5, 3), (1, 5), torch.float32)
    assert fake.requires_grad is trains
    assert fake.device.type == "cpu"
    assert not isinstance(fake_like(mode, parameter.detach()), nn.Parameter)


def test_modes_are_called_as_they_are() -> None:
    """Torch's wrapper costs as much as an operator; its compiler would hear of nothing."""
    for kind in (MemoryTracker, ConstantPropagation):
        assert not hasattr(kind.__torch_dispatch__, "__wrapped__")


def _operators() -> list[tuple[str, Callable[..., Any]]]:
    """Of each of torch's ways to what an operator makes, some, with their backward."""
    return [
        ("norms", lambda x: functional.group_norm(x, 3) + functional.layer_norm(x, x.shape[1:])),
        ("rms", lambda x: functional.rms_norm(x, x.shape[-1:])),
        ("batch", lambda x: functional.batch_norm(x, None, None, training=True)),
        ("activations", lambda x: functional.silu(x) + functional.gelu(x) + torch.sigmoid(x)),
        ("softmax", lambda x: functional.softmax(x, -1) * functional.log_softmax(x, 1)),
        ("pools", lambda x: functional.interpolate(functional.avg_pool2d(x, 2), scale_factor=2.0)),
        ("numbers", lambda x: 2 - x * 3 + x / 2 - torch.rsub(x, 1) + x.pow(2).clamp(max=1)),
        ("dtypes", lambda x: (x.double() + x).to(torch.bfloat16) * x.to(torch.float32)),
        ("broadcast", lambda x: x[:, :1] * x[..., :1] + x.mean((2, 3), keepdim=True)),
        ("views", lambda x: x.reshape(x.shape[0], -1).unflatten(1, (3, -1)).transpose(1, 2) + 1),
        ("parts", lambda x: torch.cat(x.split((2, 4), 1), 1).repeat(1, 3, 1, 1)),
        ("strided", lambda x: (x.mT * 2 + x.mT).contiguous().flip(0).roll(1, 2).tril()),
        ("channels last", lambda x: x.contiguous(memory_format=torch.channels_last).relu() + x),
        ("attention", lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True)),
        ("convolution", lambda x: functional.conv2d(x, x[:1].expand(4, -1, -1, -1), padding=2)),
        ("losses", lambda x: functional.mse_loss(x, x.detach()) + functional.smooth_l1_loss(x, -x)),
        ("norm of all", lambda x: x.norm() + x.amax((1, 2)).logsumexp(-1).sum()),
        ("where", lambda x: torch.where(x > 0, x, torch.zeros_like(x)).masked_fill(x > 1, 0.5)),
        ("einsum", lambda x: torch.einsum("abcd,abde->abce", x, x.mT).cumsum(-1)),
        ("pad", lambda x: functional.pad(x, (1, 2, 0, 1)).unfold(3, 2, 1).std(-1)),
    ]


@pytest.mark.parametrize(("what", "run"), _operators(), ids=[what for what, _ in _operators()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shorter_ways_lead_to_the_same(
    what: str, run: Callable[..., Any], dtype: torch.dtype
) -> None:
    """Forward and backward, for the first time and then remembered, against torch's own way."""
    fake_results._KNOWN.clear()
    mode, other, found = fake_mode(), fake_mode(), []
    for each, shadows in (
        (mode, ConstantPropagation(mode)),
        (mode, ConstantPropagation(mode)),
        (other, ConstantPropagation()),
    ):
        for shape in ((2, 6, 4, 8), (1, 6, 4, 4)):
            with each, shadows:
                x = torch.empty(shape, dtype=dtype, requires_grad=True)
                ledger = MemoryTracker({})
                with ledger:
                    made = run(x)
                    made.float().square().sum().backward()
                assert x.grad is not None
                found.append((ledger.log(), [_facts(t) for t in (made, made.detach(), x.grad)]))
    assert found[:2] == found[2:4] == found[4:]


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    own: Any = tensor
    keys: Any = torch._C._dispatch_key_set
    attributes = {name: v for name, v in vars(own).items() if name != "fake_mode"}
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device,
            tensor.untyped_storage().nbytes(), tensor.requires_grad, keys(own),
            attributes)  # fmt: skip


def test_most_operators_take_a_shorter_way() -> None:
    fake_results._KNOWN.clear()
    mode = fake_mode()
    with mode, ConstantPropagation(mode):
        for _, run in _operators():
            x = torch.empty((2, 6, 4, 8), requires_grad=True)
            run(x).float().square().sum().backward()
    legs = list(fake_dispatch._STEPS.values())
    assert len(legs) > 80
    assert legs.count(fake_dispatch._DispatchStep.LONG) < len(legs) / 10


def test_a_size_that_depends_on_numbers_is_left_open_where_that_is_asked_for():
    with fake_mode(leaves_open=True):
        found = torch.empty(4).nonzero()
    assert found.shape[1] == 1
    with fake_mode(), pytest.raises(DynamicOutputShapeException):
        torch.empty(4).nonzero()


def test_a_mask_beside_other_indices_picks_as_much_as_it_could():
    x, place = torch.zeros(6, 4, 3), torch.tensor([2])
    mask = torch.tensor([True, False] * 3)
    for share, count in ((everything, 6), (half, 3)):
        mode = fake_mode()
        with mode, ConstantPropagation(mode), picking(share):
            rows, where, column = (fake_like(mode, each) for each in (x, mask, place))
            assert rows[where].shape == (count, 4, 3)
            assert rows[where, column].shape == (count, 3)
