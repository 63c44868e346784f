"""A recording runs a copy of the model, and nothing of that copy stays behind in a cache.

Which seeded bug would this catch? Fake tensors in a function cache, a global, a class or the
closure of a hook, which the first real forward would find; tables emptied that were filled before.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import meshplan
from meshplan.errors import ApplyError
from meshplan.runtime.trace import side_effects
from meshplan.runtime.trace.ops import record

DIM = 4
TABLES: dict[str, dict[int, tuple[Tensor, Tensor]]] = {"cpu": {}}
OLDEST: list[Tensor] = []
MASK: Tensor | None = None


def memo(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator with a table of its own, in its closure."""
    known: dict[Any, Any] = {}

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        if args not in known:
            known[args] = function(*args)
        return known[args]

    return wrapped


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def table(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x + self.table(x))))


class OfAMethod(Base):
    """The cache holds the module itself, too."""

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _build(self, size: int) -> list[Tensor]:
        return [torch.arange(float(size))]

    def table(self, x: Tensor) -> Tensor:
        return self._build(x.shape[-1])[0]


@functools.cache
def built(size: int) -> Tensor:
    return torch.arange(float(size))


class OfAFunction(Base):
    def table(self, x: Tensor) -> Tensor:
        return built(x.shape[-1])


class OfAParameter(Base):
    """Keyed by what is a stand-in in the recording."""

    def table(self, x: Tensor) -> Tensor:
        return scaled(self.up.bias)


@functools.lru_cache(maxsize=4)
def scaled(bias: Tensor) -> Tensor:
    return bias[:DIM].detach() * 2


class OfADecorator(Base):
    @staticmethod
    @memo
    def _build(size: int) -> Tensor:
        return torch.arange(float(size))

    def table(self, x: Tensor) -> Tensor:
        return self._build(x.shape[-1])


class InATable(Base):
    def table(self, x: Tensor) -> Tensor:
        known = TABLES[x.device.type]
        if x.shape[-1] not in known:
            known[x.shape[-1]] = (torch.arange(float(x.shape[-1])), torch.ones(1))
        return known[x.shape[-1]][0]


class InAGlobal(Base):
    def table(self, x: Tensor) -> Tensor:
        global MASK
        if MASK is None:
            MASK = torch.arange(float(x.shape[-1]))
        return MASK


class InAList(Base):
    def table(self, x: Tensor) -> Tensor:
        if not OLDEST:
            OLDEST.append(torch.arange(float(x.shape[-1])))
        return OLDEST[0]


class InAClass(Base):
    known: ClassVar[Any] = None

    def table(self, x: Tensor) -> Tensor:
        if type(self).known is None:
            type(self).known = torch.arange(float(x.shape[-1]))
        return type(self).known


class InAHook(Base):
    """What hooks keep outside of the model, in a list and in a variable."""

    def __init__(self) -> None:
        super().__init__()
        seen: list[Tensor] = []
        first: Tensor | None = None

        def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            nonlocal first
            seen.append(output)
            first = output if first is None else first
            return output + 0 * first.detach()

        self.up.register_forward_hook(keep)

    def table(self, x: Tensor) -> Tensor:
        return x


class ThenReads(OfAFunction):
    """Fails without numbers after it filled the cache: it is run again for real."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if out.sum() > 0 else out


KINDS = [OfAMethod, OfAFunction, OfAParameter, OfADecorator, InATable, InAGlobal, InAList, InAClass,
         InAHook, ThenReads]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_tests() -> None:
    """What is frozen is not looked through, nor listed: fakes of other tests, and their heaps."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _empty() -> None:
    global MASK
    built.cache_clear()
    TABLES["cpu"].clear()
    OLDEST.clear()
    MASK = InAClass.known = None


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_runs_after_it_was_recorded(kind: type[Base]) -> None:
    x = torch.randn(2, DIM)
    model = kind()
    for _ in range(2):
        flow = record(model, x)
        assert "aten.relu.default" in [op.name for op in flow.ops]
    gc.collect()
    assert not [t for t in gc.get_objects() if type(t).__name__ == "FakeTensor"]
    model(x).sum().backward()
    assert all(type(p.grad) is Tensor for p in model.parameters())


def test_what_a_real_forward_left_stays() -> None:
    x = torch.randn(2, DIM)
    for kind in KINDS:
        kind()(x)
    kept = [*TABLES["cpu"][DIM], OLDEST[0], MASK, InAClass.known]
    for kind in KINDS:
        record(kind(), x)
        record(kind(), torch.randn(2, 1, DIM))
    now = [*TABLES["cpu"][DIM], OLDEST[0], MASK, InAClass.known]
    assert all(a is b for a, b in zip(kept, now, strict=True))


def test_a_recording_does_not_find_what_a_function_cached_before() -> None:
    """Only some ranks may have run the model before, and all must come to one plan."""
    x = torch.randn(2, DIM)
    flows = [record(OfAFunction(), x)]
    OfAFunction()(x)
    flows.append(record(OfAFunction(), x))
    names = [[op.name for op in flow.ops] for flow in flows]
    assert names[0] == names[1]
    assert "aten.arange.default" in names[0]


@functools.cache
def trained() -> nn.Linear:
    return nn.Linear(DIM, DIM)


class OfAModule(Base):
    def table(self, x: Tensor) -> Tensor:
        return trained()(x).detach()


def test_a_module_that_a_function_cached_stays() -> None:
    known = trained()
    record(OfAModule(), torch.randn(2, DIM))
    assert trained() is known


class Box:
    """An object that is no container and no module."""

    value: Any = None


BOX = Box()


class InABox(Base):
    def table(self, x: Tensor) -> Tensor:
        if BOX.value is None:
            BOX.value = torch.arange(float(x.shape[-1]))
        return BOX.value


def test_what_cannot_be_taken_out_is_refused() -> None:
    try:
        with pytest.raises(ApplyError, match="InABox keeps a FakeTensor of shape") as told:
            record(InABox(), torch.randn(2, DIM))
    finally:
        BOX.value = None
    assert "fix: keep it in a buffer" in str(told.value)


def test_a_failure_leaves_nothing_in_a_cache() -> None:
    class Fails(Base):
        def table(self, x: Tensor) -> Tensor:
            built(DIM)
            raise ValueError("no table")

    with pytest.raises(ApplyError, match="no table"):
        record(Fails(), torch.randn(2, DIM))
    assert built.cache_info().currsize == 0


def test_a_run_without_caches_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting takes a tenth of a second: only what is still alive is worth it."""

    def collect() -> int:
        raise AssertionError("nothing is alive")

    class Plain(Base):
        def table(self, x: Tensor) -> Tensor:
            return x

    monkeypatch.setattr(side_effects.gc, "collect", collect)
    record(Plain(), torch.randn(2, DIM))


def after_planning(kind: type[Base]) -> float:
    """Auto records the model, and rehearses it on parts."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, DIM)
    torch.manual_seed(0)
    alone = kind()(x)
    plan = {"version": 1, "mesh": {"tp": 2}, "tp_plan": "auto"}
    built.cache_clear()
    cut = meshplan.parallelize(model, plan, example_inputs=x)
    assert cut.meshplan.plan.assignment.styles
    return float((cut(x) - alone).detach().abs().max())


@pytest.mark.parametrize("kind", [OfAMethod, OfAFunction])
def test_tp_by_auto(pool: Any, kind: type[Base]) -> None:
    assert max(pool(2).run(after_planning, kind)) < 1e-6
