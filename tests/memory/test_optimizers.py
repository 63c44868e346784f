"""What optimizers keep, by the shape of a parameter, is what torch's optimizers keep.

Which seeded bug would this catch? A factor of the wrong dim, a counter too many, a vector taken for
a matrix, a scale forgotten.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.layout.optimizers import SHAPED_STATES
from meshplan.memory.answer.states import STEP_COUNTERS
from meshplan.memory.log.events import Term
from meshplan.memory.replay.optimizer import OPTIMIZERS as STEPS
from meshplan.memory.replay.optimizer import Updated, states_of, step
from meshplan.memory.replay.writer import LogWriter
from meshplan.plan.plan import check_adafactor, make_plan
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.fake_step.optimizers import OPTIMIZERS
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import OPTIMIZER_STATES

SHAPES = ((6, 10), (7,), (4, 3, 5, 2), ())


def kept(optimizer: torch.optim.Optimizer) -> int:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("word", ["adafactor", "muon"])
def test_states_are_as_large_as_those_of_torch(
    word: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    make: Any = torch.optim.Adafactor
    if word == "muon":
        make = torch.optim.Muon if len(shape) == 2 else torch.optim.AdamW
    assert SHAPED_STATES[word](shape, param.numel(), dtype.itemsize) == kept(make([param]))


@pytest.mark.parametrize(
    ("numel", "num_bytes"),
    [(4095, 8 * 4095), (4096, 2 * (4096 + 4 * 16)), (4097, 2 * (4097 + 4 * 17))],
)
def test_eight_bits_have_a_scale_for_each_block(numel: int, num_bytes: int) -> None:
    assert SHAPED_STATES["adamw_8bit"]((numel,), numel, 4) == num_bytes


@pytest.mark.parametrize("word", SHAPED_STATES)
def test_a_plan_may_name_them(word: str) -> None:
    assert load_spec({"version": 1, "optimizer": word}).optimizer == word


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_what_can_be_traced_keeps_what_the_layouts_say(word: str) -> None:
    """A matrix and a vector, one process: a trace meets the state of the closed form."""
    params = [nn.Parameter(torch.ones(6, 10)), nn.Parameter(torch.ones(7))]
    make, words = OPTIMIZERS[word]
    found = kept(make(params))
    if word in SHAPED_STATES:
        expected = sum(SHAPED_STATES[word](tuple(p.shape), p.numel(), 4) for p in params)
    else:
        counters = 4 * STEP_COUNTERS.get(word, 0)
        expected = sum(OPTIMIZER_STATES[word] * p.nbytes + counters for p in params)
    assert found == expected
    assert words.startswith("torch's ") or word == "lion"


def test_a_fused_step_takes_nothing_and_its_counts_are_read_by_the_kernel() -> None:
    params = [Updated("a", 100, "float32"), Updated("b", 7, "float32")]
    for foreach in (False, True):
        writer = LogWriter()
        step(writer, params, "adamw_fused", foreach=foreach)
        assert writer.log().peak.live_bytes == 0
    assert states_of(params[0], "adamw_fused", has_host=True) == [400, 400, 4]
    assert states_of(params[0], "adamw", has_host=True) == [400, 400]


DTYPES = {
    "one": (torch.float32,) * 3,
    "a narrow one first": (torch.bfloat16, torch.float32, torch.float32),
    "a narrow one last": (torch.float32, torch.float32, torch.bfloat16),
    "between": (torch.float32, torch.bfloat16, torch.float32),
    "three": (torch.float32, torch.bfloat16, torch.float64),
    "three, widest first": (torch.float64, torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("word", sorted(STEPS.keys() & OPTIMIZERS.keys()))
def test_a_step_takes_at_most_what_torch_takes(word: str, foreach: bool, dtypes: str) -> None:
    """Beside what is kept from step to step. Tensors of one dtype are taken together."""
    sizes = zip((1000, 3000, 2000), DTYPES[dtypes], strict=True)
    params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n, dtype in sizes]
    optimizer = OPTIMIZERS[word][0](params)
    if "fused" not in word:
        optimizer.param_groups[0]["foreach"] = foreach
    kept(optimizer)
    states = (t for state in optimizer.state.values() for t in state.values())
    old = [*params, *(param.grad for param in params), *states]
    ledger, writer = MemoryTracker({}), LogWriter()
    with ledger:
        ledger.note([t.detach() for t in old if isinstance(t, torch.Tensor)], Term.OPTIMIZER)
        before = sum(event.delta for event in ledger.log().events)
        optimizer.step()
    told = [Updated("", p.numel(), str(p.dtype).removeprefix("torch.")) for p in params]
    step(writer, told, word, foreach=foreach)
    assert writer.log().peak.live_bytes == ledger.log().peak.live_bytes - before


LION = [nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))]


def test_lion_takes_the_sign_of_the_mix() -> None:
    """Two steps by hand: b1 0.9, b2 0.99."""
    (param,) = LION
    lion = OPTIMIZERS["lion"][0](LION)
    gradients = torch.tensor([[1.0, -1.0], [0.0, 2.0]]), torch.tensor([[-9.5, 1.0], [3.0, -2.0]])
    expected = param.detach().clone()
    momentum = torch.zeros(2, 2)
    for gradient in gradients:
        expected -= 1e-3 * (0.9 * momentum + 0.1 * gradient).sign()
        momentum = 0.99 * momentum + 0.01 * gradient
        param.grad = gradient.clone()
        lion.step()
    torch.testing.assert_close(param.detach(), expected)
    torch.testing.assert_close(lion.state[param]["exp_avg"], momentum)


def test_eight_bits_are_kept_as_separate_tensors() -> None:
    many = Updated("a", 8192, "float32", shape=(64, 128))
    few = Updated("b", 100, "float32", shape=(100,))
    assert states_of(many, "adamw_8bit") == [8192, 128, 8192, 128]
    assert states_of(few, "adamw_8bit") == [400, 400]
    matrix = Updated("c", 60, "float32", shape=(6, 10))
    assert states_of(matrix, "adafactor", has_host=True) == [24, 40]
    assert states_of(matrix, "adafactor") == [24, 40, 4]


@pytest.mark.parametrize(
    ("plan", "is_refused"),
    [
        ({"strategy": "ddp", "mesh": {"dp_replicate": 2}}, False),
        ({"strategy": "full_shard", "mesh": {"dp_shard": 2}}, True),
        ({"strategy": "full_shard", "mesh": {"dp_shard": 1}}, True),  # FSDP2 makes DTensors too.
    ],
)
def test_adafactor_is_traced_on_whole_parameters_alone(plan: Any, is_refused: bool) -> None:
    spec = load_spec({"version": 1, "optimizer": "adafactor", **plan})
    made = make_plan(spec, graph_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    with pytest.raises(PlanError, match="sharded parameters") if is_refused else nullcontext():
        check_adafactor(made)
