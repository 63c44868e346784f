"""Pipelines on real processes: the numbers of one process, whatever the model and the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan
from meshplan.errors import ApplyError, PlanError
from meshplan.layout.schedules import SCHEDULES
from meshplan.memory import state_bytes
from tests.helpers import models, parity


def plan(mesh: dict[str, int], schedule: str = "1F1B", **more: Any) -> dict[str, Any]:
    pipeline = {"schedule": schedule} | more.pop("pipeline", {})
    return {"version": 1, "mesh": mesh, "pipeline": pipeline, **more}


def assert_equal(pool: Any, world: int, name: str, spec: dict[str, Any], **more: Any) -> None:
    apart = pool(world).run(parity.train, name, spec, **more)
    assert max(result["loss"] for result in apart) <= parity.TOLERANCE
    assert apart[0]["state"] <= parity.TOLERANCE, apart[0]["worst"]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("own_llama", "GPipe"), ("own_llama", "InterleavedZeroBubble"), ("gpt2", "1F1B"),
        ("bert", "LoopedBFS"), ("t5", "1F1B"), ("t5", "ZBVZeroBubble"), ("vit", "Interleaved1F1B"),
        ("resnet", "1F1B"), ("odd", "DualPipeV"), ("odd", "1F1B"),
        ("hf_llama_tied", "Interleaved1F1B"), ("hf_llama_tied", "ZBVZeroBubble"),
    ],
)  # fmt: skip
def test_two_stages_train_as_one_process_does(pool, name, schedule):
    assert_equal(pool, 2, name, plan({"pp": 2}, schedule))


def test_four_stages_clip_and_accumulate_as_one_process_does(pool):
    spec = plan({"pp": 4}, clip_grad_norm=0.1, batch={"accumulate": 2})
    assert_equal(pool, 4, "gpt2", spec, clip=0.1)


@pytest.mark.parametrize(
    "spec",
    [
        plan({"pp": 2, "dp_shard": 2}, activation_checkpointing="full"),
        plan({"pp": 2, "dp_shard": 2}, "InterleavedZeroBubble", clip_grad_norm=0.1),
        pytest.param(plan({"pp": 2, "dp_replicate": 2}, strategy="ddp"), marks=pytest.mark.wide),
        *(
            pytest.param(plan({"pp": 2, "dp_shard": 2}, *more, **others), marks=pytest.mark.wide)
            for more, others in (
                (("DualPipeV",), {"strategy": "zero1"}),
                (("Interleaved1F1B",), {"activation_checkpointing": "selective"}),
            )
        ),
    ],
    ids=lambda spec: f"{spec['pipeline']['schedule']} {spec['mesh']}",
)
def test_stages_are_sharded_replicated_and_recomputed(pool, spec):
    assert_equal(pool, 4, "own_llama", spec, clip=spec.get("clip_grad_norm"))


def test_tied_and_shared_weights_are_sharded_in_every_stage(pool):
    assert_equal(pool, 4, "odd", plan({"pp": 2, "dp_shard": 2}, clip_grad_norm=0.1), clip=0.1)
    spec = plan({"pp": 2, "dp_shard": 2}, "ZBVZeroBubble", clip_grad_norm=0.1)
    assert_equal(pool, 4, "hf_llama_tied", spec, clip=0.1)


@pytest.mark.parametrize(
    "schedule",
    [
        "1F1B",
        *(pytest.param(n, marks=pytest.mark.wide) for n in ("Interleaved1F1B", "ZBVZeroBubble")),
    ],
)
def test_pp_with_shards_and_tp_on_eight_ranks(pool, schedule):
    spec = plan({"pp": 2, "dp_shard": 2, "tp": 2}, schedule, rules=models.tp_rules("own_llama"))
    assert_equal(pool, 8, "own_llama", spec)


@pytest.mark.wide
def test_pp_with_hybrid_shards_and_tp_on_sixteen_ranks(pool):
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert_equal(pool, 16, "own_llama", plan(mesh, rules=models.tp_rules("own_llama")))


class UNet(nn.Module):
    """Skips from every level down to the same level up: values that cross stages they skip."""

    def __init__(self) -> None:
        super().__init__()

        def level(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 3, stride, 1)
            return nn.Sequential(convolution, nn.GroupNorm(2, outputs), nn.SiLU())

        self.down1, self.down2, self.down3 = level(3, 8), level(8, 16, 2), level(16, 32, 2)
        self.middle = level(32, 32)
        self.up3, self.up2, self.up1 = level(64, 16), level(32, 8), level(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(a)
        c = self.down3(b)
        up = self.up3(torch.cat([self.middle(c), c], 1))
        up = self.up2(torch.cat([nn.functional.interpolate(up, scale_factor=2.0), b], 1))
        up = self.up1(torch.cat([nn.functional.interpolate(up, scale_factor=2.0), a], 1))
        return self.out(up)


class BatchNorms(nn.Module):
    """Statistics of a microbatch, in place activations, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x)))


CLASSES = {"UNet": UNet, "BatchNorms": BatchNorms}


def train_images(name: str, spec: dict[str, Any], sizes: tuple[int, ...]) -> tuple[float, float]:
    """Steps on images of these sizes, against one process with the same microbatches."""
    torch.manual_seed(0)
    alone = CLASSES[name]()
    torch.manual_seed(0)
    example = torch.zeros(2, 3, 16, 16)
    model = meshplan.parallelize(CLASSES[name](), spec, example_inputs=example)
    count = model.meshplan.plan.assignment.stages.microbatches
    pair = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    apart = 0.0
    for step, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 3, size, size, generator=generator)
        with torch.device("meta"):
            shape = CLASSES[name]()(x.to("meta")).shape
        y = torch.randn(shape, generator=generator)
        loss = meshplan.train_step(model, pair[1], x, y, nn.functional.mse_loss)
        expected = 0.0
        for number in range(count):
            part = nn.functional.mse_loss(alone(x.chunk(count)[number]), y.chunk(count)[number])
            (part / count).backward()
            expected += part.item() / count
        pair[0].step()
        pair[0].zero_grad()
        apart = max(apart, abs(loss - expected))
    live = meshplan.full_state_dict(model)
    own = alone.state_dict()
    assert not live or live.keys() == own.keys()
    return apart, max((float((live[n] - t).abs().max()) for n, t in own.items() if live), default=0)


@pytest.mark.parametrize("schedule", [n for n in SCHEDULES if n != "GPipe"])
def test_skips_cross_stages_and_shapes_may_change(pool, schedule):
    spec = plan({"pp": 2}, schedule, pipeline={"microbatches": 4})
    loss, state = pool(2).run(train_images, "UNet", spec, (16, 16, 24, 16))[0]
    assert max(loss, state) <= parity.TOLERANCE


def test_batch_statistics_are_those_of_the_microbatches(pool):
    spec = plan({"pp": 2}, pipeline={"microbatches": 4, "split": [["first"], ["second", "out"]]})
    loss, state = pool(2).run(train_images, "BatchNorms", spec, (16, 16))[0]
    assert max(loss, state) <= parity.TOLERANCE


def behave(schedule: str) -> dict[str, Any]:
    """What a pipelined model answers besides training; whatever raises, raises on every rank."""
    model = meshplan.parallelize(models.build("hf_llama_tied"), plan({"pp": 2}, schedule))
    alone = models.build("hf_llama_tied")
    inputs, _ = models.batch("hf_llama_tied", 0, 6)
    out: dict[str, Any] = {"names": [n for n, _ in model.named_parameters()]}
    out["state"] = sorted(model.state_dict())
    out["empty"] = sum(p.numel() for p in model._hidden[0].parameters() if not p.is_meta)
    for name, call in {
        "forward": lambda: model(**inputs),
        "divide": lambda: meshplan.train_step(
            model, models.optimizer(model), *models.batch("hf_llama_tied", 0, 7), models.loss
        ),
    }.items():
        try:
            call()
        except ApplyError as error:
            out[name] = str(error)
    for mode in (True, False):
        answer = model.train(mode).eval_step(inputs)
        expected = alone.train(mode)(**inputs).logits
        assert (answer is not None) == model.has_output
        out[f"eval {mode}"] = float((answer.logits - expected).abs().max()) if answer else 0.0
    model.load_state_dict({n: torch.zeros_like(t) for n, t in alone.state_dict().items()})
    out["loaded"] = max(float(p.detach().abs().max()) for p in model.parameters())
    return out


@pytest.mark.parametrize("schedule", ["GPipe", "ZBVZeroBubble"])
def test_a_pipelined_model_is_a_module(pool, schedule):
    told = pool(2).run(behave, schedule)
    names = {n for n, _ in models.build("hf_llama_tied").named_parameters()}
    assert {n for rank in told for n in rank["names"]} == names
    assert {n for rank in told for n in rank["state"]} == names | {"lm_head.weight"}
    for rank in told:
        assert "call meshplan.train_step" in rank["forward"]
        assert "7 samples does not divide into" in rank["divide"]
        assert (rank["empty"], rank["loaded"]) == (0, 0.0)
        assert max(rank["eval True"], rank["eval False"]) <= parity.TOLERANCE


def from_meta(spec: dict[str, Any]) -> float:
    """A model on meta gets the numbers of one process, and the bytes that the plan predicts."""
    torch.manual_seed(3)
    alone = models.BUILDERS["own_llama"]()
    torch.manual_seed(3)
    with torch.device("meta"):
        model = models.BUILDERS["own_llama"]()
    model = meshplan.parallelize(model, spec)
    assignment = model.meshplan.plan.assignment
    rank = torch.distributed.get_rank()
    predicted = state_bytes(assignment, "sgd", rank)
    local = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
    held = sum(p.untyped_storage().nbytes() for p in local)
    assert held == predicted.parameters_bytes, (held, predicted)
    live = meshplan.full_state_dict(model)
    return max((float((live[n] - t).abs().max()) for n, t in alone.state_dict().items() if live),
               default=0.0)  # fmt: skip


def test_a_model_on_meta_gets_the_numbers_of_one_process(pool):
    spec = plan({"pp": 2, "dp_shard": 2}, "Interleaved1F1B", input={"shape": [2, 16]})
    assert pool(4).run(from_meta, spec) == [0.0] * 4


class Forgetful(nn.Module):
    """Hands a number from one module to another past what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output * 2  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)) + self.kept)


class Draws(nn.Module):
    """Draws random numbers between modules, and uses them in two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return self.second(self.first(x + noise) + noise)


class Writes(nn.Module):
    """Writes into what another module gave, and goes on with that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.act(x)
        return self.last(x)


class Counts(nn.Module):
    """Keeps what its modules computed in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.mean.add_(x.detach().mean(0))
        return self.second(x)


HARD = {
    "Forgetful": (Forgetful, [["first"], ["second", "third"]], "used outside, but not returned"),
    "Draws": (Draws, [["first"], ["second"]], "draws random numbers between its modules"),
    "Writes": (Writes, [["first", "act"], ["last"]], "writes in place into a tensor"),
    "Counts": (Counts, [["first"], ["second"]], "into a buffer or an attribute"),
}


def refused(name: str, spec: dict[str, Any]) -> str:
    try:
        meshplan.parallelize(HARD[name][0](), spec, example_inputs=torch.zeros(2, 4))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", HARD)
def test_what_a_stage_could_not_know_is_refused(pool, name):
    _, split, why = HARD[name]
    for told in pool(2).run(refused, name, plan({"pp": 2}, pipeline={"split": split})):
        assert why in told


class Stumbles(nn.Module):
    """Fails in its second half on some inputs, and takes another way on others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if (
                number == 2
                and not x.is_meta
                and type(x) is Tensor
                and float(x.detach().max()) > 9e3
            ):
                raise ValueError("too large")
            x = layer(x)
        return x


def stumble(schedule: str, first: bool) -> list[str]:
    model = meshplan.parallelize(
        Stumbles(), plan({"pp": 2}, schedule), example_inputs=torch.zeros(2, 4)
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    good, bad = torch.ones(8, 4), torch.cat([torch.ones(4, 4), torch.full((4, 4), 1e5)])
    for x in (bad, good) if first else (good, bad):
        try:
            meshplan.train_step(model, sgd, x, x, nn.functional.mse_loss)
            out.append("")
        except (ValueError, ApplyError) as error:
            out.append(str(error))
    return out


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("first", [True, False])
def test_what_one_rank_cannot_do_is_raised_on_all(pool, schedule, first):
    told = pool(2).run(stumble, schedule, first, timeout=30)
    for rank in told:
        assert "too large" in rank[0 if first else 1]
        assert rank[1 if first else 0] == ""
    # Between modules a stage may fail for want of those of other stages: it says what and where.
    both = ["".join(rank) for rank in told]
    assert any("the step failed on rank" in text for text in both)
    assert all("ValueError: too large" in text for text in both)
