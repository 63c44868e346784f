"""One cell of the zoo: an architecture under a layout, trained on real ranks, against one process.

Two steps of SGD in float32; every parameter has a learning rate with which the largest gradient
moves it alike, so that a wrong gradient shows wherever it is. A sample's numbers may depend on the
others of its batch (contrastive heads, statistics over the batch): the reference then takes the
mean over the same parts of the batch as the layout does, which is what data parallelism is defined
as. BatchNorm runs on its running statistics.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

import meshplan
from tests.bench import zoo_models as zoo
from tests.helpers.pool import Pool, PoolError

TOLERANCE: Final = 1e-5
ILL: Final = 1e-3
"""Beyond this, rounding says nothing: a wrong number could hide behind it."""
DOUBLE: Final = 1e-7
"""In double precision, with room for what a model computes in single precision whatever it gets."""
STEPS: Final = 2
UPDATE: Final = 1e-2
"""Largest change of each parameter in the first step: every gradient then weighs alike."""
SMALL: Final = 1e-3
"""Gradients below this share of the largest are not blown up further: they may be noise."""
TIMEOUT_S: Final = 90.0

LAYOUTS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "full_shard": (2, {"strategy": "full_shard"}),
    "hybrid_shard": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp": (2, {"mesh": {"tp": 2}, "tp_plan": "auto"}),
    "tp_full_shard": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}),
}
"""(ranks, plan) of each column."""
PARTS: Final = {"full_shard": 2, "hybrid_shard": 4, "tp": 1, "tp_full_shard": 2, "pp": 2}
"""Into how many parts a column cuts the batch."""

OUTCOMES: Final = ("pass", "refused", "not yet", "wrong", "error", "timeout")


class Cell(NamedTuple):
    """What became of one cell."""

    name: str
    layout: str
    outcome: str
    difference: float = 0.0
    why: str = ""


class Reference(NamedTuple):
    """Training in one process: what every layout must reproduce."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    rates: dict[str, float]


@functools.lru_cache(maxsize=2)
def reference(name: str, parts: int, is_double: bool = False) -> Reference:
    """Losses, final state, and the learning rate of each parameter."""
    model, batch = _model_and_batch(name, is_double)
    first = zoo.gradients(model, batch, parts)
    largest = {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in first.items()}
    floor = SMALL * max(largest.values())
    rates = {n: UPDATE / max(value, floor) for n, value in largest.items()}
    sgd = optimizer(model, rates)
    losses = []
    for _ in range(STEPS):
        losses.append(_step(model, batch, parts))
        sgd.step()
        sgd.zero_grad(set_to_none=True)
    return Reference(losses, {n: t.clone() for n, t in model.state_dict().items()}, rates)


def _model_and_batch(name: str, is_double: bool) -> tuple[torch.nn.Module, Any]:
    model = zoo.build(name)
    batch = zoo.inputs_of(name, model)
    return (model.double(), _doubled(batch)) if is_double else (model, batch)


def _doubled(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.double() if item.is_floating_point() else item
    if isinstance(item, Mapping):
        return {key: _doubled(part) for key, part in item.items()}
    return type(item)(map(_doubled, item)) if isinstance(item, list | tuple) else item


def _step(model: torch.nn.Module, batch: Any, parts: int) -> float:
    total = 0.0
    for number in range(parts):
        phases = zoo.targets().chunk(parts)[number]
        loss = zoo.loss(model(**zoo.part(batch, number, parts)), phases) / parts
        loss.backward()
        total += loss.item()
    return total


def optimizer(model: torch.nn.Module, rates: Mapping[str, float]) -> torch.optim.SGD:
    """SGD with a learning rate per parameter; those without a gradient get none."""
    groups = [
        {"params": [parameter], "lr": rates.get(name, 0.0)}
        for name, parameter in model.named_parameters()
    ]
    return torch.optim.SGD(groups)


def train(name: str, layout: str) -> tuple[str, float, str]:
    """One cell on this rank: (outcome, largest difference, why)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.barrier()  # Ranks may take their time to import the model's code.
        outcome, apart, why = _train(name, layout)
        if outcome not in ("pass", "wrong"):
            return outcome, apart, why  # On every rank, and the group may be gone.
        told = [outcome]
        torch.distributed.broadcast_object_list(told, src=0)
        if told[0] != "wrong":
            return outcome, apart, why
        # A kink, such as that of ReLU at 0, makes much of a rounding error: a wrong number stays
        # one in double precision, and rounding does not.
        again, rest, _ = _train(name, layout, is_double=True)
        if again != "pass" or rest > DOUBLE:
            return outcome, apart, f"{why}; in double precision {rest:.1e} ({again})"
        return "pass", apart, f"{why}, but in double precision all is within {rest:.1e}"


def _train(name: str, layout: str, is_double: bool = False) -> tuple[str, float, str]:
    parts = PARTS[layout] if zoo.entries()[name].coupled else 1
    is_first = torch.distributed.get_rank() == 0
    expected = reference(name, parts, is_double) if is_first else None
    shared = [expected.rates if expected else None]
    torch.distributed.broadcast_object_list(shared, src=0)
    rates = shared[0]
    assert rates is not None
    model, batch = _model_and_batch(name, is_double)
    plan = {"version": 1, **LAYOUTS[layout][1]}
    try:
        wrapped = meshplan.parallelize(model, plan, example_inputs=batch)
        sgd = optimizer(wrapped, rates)
        inputs, targets = meshplan.local_batch(wrapped, (batch, zoo.targets()))
        losses = [
            meshplan.train_step(wrapped, sgd, inputs, targets, zoo.loss) for _ in range(STEPS)
        ]
        state = meshplan.full_state_dict(wrapped)
    except meshplan.MeshplanError as error:
        whats = [problem.what for problem in error.problems]
        kind = "not yet" if any("not available yet" in what for what in whats) else "refused"
        return kind, 0.0, "; ".join(whats)
    if expected is None:
        return "pass", 0.0, ""
    apart, worst = difference(losses, state, expected)
    if apart > TOLERANCE:
        noise = rounding(name, parts, expected)
        if apart > 4 * noise or noise > ILL:
            return "wrong", apart, f"{worst}; rounding alone makes {noise:.1e}"
        return "pass", apart, f"{worst}; rounding alone makes {noise:.1e} in one process"
    return "pass", apart, ""


def difference(
    losses: Sequence[float], state: Mapping[str, torch.Tensor], expected: Reference
) -> tuple[float, str]:
    """(largest difference, relative above 1, and where it is)."""
    if state.keys() != expected.state.keys():
        return float("inf"), f"other keys: {sorted(state.keys() ^ expected.state.keys())[:4]}"
    found = {
        f"loss of step {number}": abs(a - b) / max(1.0, abs(b))
        for number, (a, b) in enumerate(zip(losses, expected.losses, strict=True))
    }
    for key, value in expected.state.items():
        if state[key].shape != value.shape:
            return float("inf"), f"{key} has shape {tuple(state[key].shape)}"
        if value.numel() and not torch.equal(state[key], value):
            apart = (state[key].double() - value.double()).abs().max().item()
            found[key] = apart / max(1.0, value.double().abs().max().item())
    # NaN compares with nothing: it must not pass.
    worst = max(found, key=lambda key: found[key] if found[key] == found[key] else float("inf"))
    value = found[worst]
    return (value if value == value else float("inf")), worst


def rounding(name: str, parts: int, expected: Reference) -> float:
    """How far one process gets from itself when it adds up the batch in another order."""
    if parts > 1:
        return 0.0
    others = [reference.__wrapped__(name, count) for count in (2, zoo.BATCH)]
    return max(difference(o.losses, o.state, expected)[0] for o in others)


def run(pool: Pool, name: str, layout: str, timeout_s: float = TIMEOUT_S) -> Cell:
    """One cell on a pool."""
    try:
        results = pool.run(train, name, layout, timeout=timeout_s)
    except PoolError as error:
        story = str(error).strip()
        failed = re.findall(r"^(\w[\w.]*(?:Error|Exception|NotBuilt|Interrupt)\b.*)$", story, re.M)
        if not failed:
            where = re.search(r"^ *File .*$", story, re.M)  # The innermost frame comes first.
            why = where[0].strip() if where else story.split("\n")[-1]
            return Cell(name, layout, "timeout" if "hung" in story else "error", 0.0, why[:300])
        return Cell(name, layout, "error", 0.0, failed[0][:300])
    outcomes = {result[0] for result in results}
    if outcomes == {"refused", "pass"} or outcomes == {"not yet", "pass"}:
        return Cell(name, layout, "error", 0.0, "refused on some ranks only")
    return Cell(name, layout, *results[0])
