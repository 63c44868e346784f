"""The planner for any nn.Module: what it picks fits by another tier, is the fastest, and runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.cost.grid import OPTIONS
from meshplan.layout.hardware import find_device
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.fastest import decide, fastest_of
from meshplan.planner.problem.decision import Decision, PlanRequest
from meshplan.planner.problem.live_model import TracedChoices
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate
from meshplan.render.plans.sizing import cost_to_json, cost_to_text
from meshplan.runtime.fake_step.costs import Ask, watch
from meshplan.runtime.live.block_traces import BlockTraces
from meshplan.runtime.live.planned import request_of_entry
from meshplan.runtime.live.traced import TracedModel
from meshplan.spec.reader import load_spec
from tests.helpers import planned
from tests.helpers.compiled_figures import check_compiled_figures


def plan_of(name: str, **fields: Any) -> dict[str, Any]:
    stated = planned.INPUTS[name]
    batch = {"global": 64, "micro": "auto"} | stated.get("batch", {}) | fields.pop("batch", {})
    return {
        "version": 1,
        "model": {"entry": f"tests.helpers.planned:large_{name}"},
        "hardware": {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"},
        "mesh": "auto",
        "strategy": "auto",
        "activation_checkpointing": "auto",
        "precision": "bf16-mixed",
        **stated,
        "batch": batch,
        **fields,
    }


@dataclass(frozen=True)
class Asked:
    """A plan file with everything open, on devices where what would be fastest does not fit."""

    path: Path
    job: PlanningProblem
    free: Decision

    @cached_property
    def decision(self) -> Decision:
        return fastest_of(self.job)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """`ask(name, **fields)`: traced once for all tests of this file."""

    @cache
    def of(name: str, text: str) -> Asked:
        path = tmp_path_factory.mktemp(name) / "plan.yaml"
        path.write_text(text)
        return Asked(path, *tight(request_of_entry(path, (), None)))

    return lambda name, **fields: of(name, json.dumps(plan_of(name, **fields)))


def tight(question: PlanRequest, share: float = 0.5) -> tuple[PlanningProblem, Decision]:
    """The same on smaller devices, between what is fastest and what holds the least; the former."""
    traced = question.traced
    assert isinstance(traced, TracedModel)
    free = decide(question)
    assert free.chosen is not None
    most = free.chosen.memory.worst.band[1]
    limit = int(most - share * (most - least_of(question, free.chosen.plan)))
    traced._limit_bytes = limit
    return PlanningProblem(replace(question, limit_bytes=limit)), free


def least_of(question: PlanRequest, plan: Any) -> float:
    """The upper end of what the same plan holds with all blocks run again and fully sharded."""
    mesh = question.read(()).mesh
    mesh = dict(mesh) if isinstance(mesh, Mapping) else {"dp_shard": 4}
    ranks = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    strategy = "full_shard" if "dp_shard" in mesh else plan.spec.strategy
    stated = {
        "mesh": mesh, "strategy": strategy, "activation_checkpointing": "full", "batch.micro": 1,
        "batch.accumulate": plan.spec.batch.global_ // ranks,
    } | ({"tp_plan": "auto"} if "tp" in mesh else {})  # fmt: skip
    spec = question.read(overrides(stated))
    assert question.traced is not None
    return float(question.traced.memory(question.traced.decide(spec)).worst.band[1])


EACH = pytest.mark.parametrize(
    "name", ["unet", *(pytest.param(n, marks=pytest.mark.wide) for n in ("vit", "t5", "odd"))]
)


@EACH
def test_what_is_chosen_fits_by_a_trace_of_the_whole_step(name, ask):
    asked = ask(name)
    decision, chosen = asked.decision, asked.decision.chosen
    assert chosen is not None
    found = checking.estimate_memory(asked.path, overrides(chosen.stated), tier=3)
    assert found.tier == "3"
    peaks = [(g.ranks, g.peak.requested_bytes) for g in chosen.memory.groups]
    assert peaks == [(g.ranks, g.peak.requested_bytes) for g in found.groups]
    assert found.worst.band[1] <= decision.limit_bytes
    assert asked.free.chosen is not None
    if name != "odd":  # Its states alone are the most of what it holds.
        assert chosen.stated != asked.free.chosen.stated
    left_out = {each.what: each.why for each in decision.rejected}
    if name in ("vit", "t5"):
        assert "mesh.tp=2" not in left_out
    else:
        assert "finds no pair of projections" in left_out["mesh.tp=2"]
    assert "not searched" in left_out["activation_checkpointing=selective"]


@EACH
def test_nothing_that_fits_is_faster(name, ask):
    """Against every row, with every choice of every block, each measured."""
    asked = ask(name, mesh={"dp_shard": 4}, strategy="full_shard", batch={"global": 16})
    job, decision = asked.job, asked.decision
    numbers = job.table
    best, num_fit, num_over = float("inf"), 0, 0
    for row in range(len(numbers.grid)):
        evaluated_plans = [
            list(takes_of(numbers, row, kind)) for kind in range(len(numbers.counts))
        ]
        for option_counts in itertools.product(*evaluated_plans):
            seconds = sum(
                count * numbers.seconds[row, kind, option]
                for kind, counts in enumerate(option_counts)
                for option, count in enumerate(counts)
                if count
            )
            step = float(numbers.grid["microbatches"][row] * seconds)
            candidate = Candidate(row, step, (0, len(numbers.order)), (option_counts,), (0.0,))
            if job.measure(numbers, candidate).fits:
                best, num_fit = min(best, step), num_fit + 1
            else:
                num_over += 1
    assert num_fit > 1
    assert num_over > 1
    # What the allocator reserves follows from no figure of blocks, where these are small and many.
    assert decision.best_s <= best * (1.1 if name == "t5" else 1 + 1e-9)
    assert decision.best_s * (1 - decision.gap) <= best * (1 + 1e-9)
    assert decision.chosen is not None
    assert decision.chosen.seconds <= decision.best_s * 1.02


def takes_of(numbers: Any, row: int, kind: int) -> Iterator[tuple[int, ...]]:
    """How many blocks of a kind take each option."""
    offered = np.flatnonzero(np.isfinite(numbers.seconds[row, kind]))
    for counts in itertools.product(range(numbers.counts[kind] + 1), repeat=len(offered)):
        if sum(counts) == numbers.counts[kind]:
            option_counts = [0] * len(OPTIONS)
            for option, count in zip(offered, counts, strict=True):
                option_counts[option] = count
            yield tuple(option_counts)


@EACH
def test_what_is_chosen_runs_as_one_process_does(pool, name, ask):
    chosen = ask(name).decision.chosen
    assert chosen is not None
    runs_as_one(pool, name, chosen.stated)


def runs_as_one(pool: Any, name: str, chosen: Mapping[str, Any]) -> None:
    """On four processes, with the choices of a plan, a small model trains as in one."""
    stated: dict[str, Any] = {"version": 1, "optimizer": "sgd_momentum"}
    for path, value in chosen.items():
        if "[" in path:
            stated.setdefault("rules", []).append(value)
        elif value is not None and not path.startswith("batch"):
            *outer, last = path.split(".")
            inside = stated
            for key in outer:
                inside = inside.setdefault(key, {})
            inside[last] = value
    for apart, state in pool(4).run(planned.trained, name, stated):
        assert max(apart) <= 1e-6
        assert state <= 1e-6


def test_traces_are_kept_by_all_that_blocks_depend_on():
    """Another plan file that the same model is asked about is not answered from the first one's."""
    base = {"version": 1, "mesh": {"tp": 2, "dp_shard": 2}, "precision": "bf16-mixed"}
    place = [{"match": "blocks.*.up", "place": {"tp": "colwise"}}]
    again = [{"match": "blocks.*", "activation_checkpointing": "full"}]

    def of(**more: Any) -> TracedChoices:
        return TracedChoices.of(load_spec(base | more))

    for more in (
        {"tp_plan": "hf"}, {"precision": "32-true"}, {"sequence_parallel": True},
        {"rules": place}, {"loss_chunks": 4}, {"mesh": {"tp": 4}},
    ):  # fmt: skip
        assert of(**more) != of(), more
    for more in ({"tp_plan": "auto"}, {"strategy": "zero2"}, {"rules": again}):
        assert of(**more) == of(), more
    assert of(mesh={"dp_shard": 4}, tp_plan="hf").tp == of(mesh="auto").tp == 1


TP = pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("vit", {"tp": 2, "dp_shard": 2}),
        pytest.param("vit", {"tp": 2, "dp_replicate": 2}, marks=pytest.mark.wide),
        pytest.param("vit", {"tp": 4}, marks=pytest.mark.wide),
        pytest.param("t5", {"tp": 2, "dp_shard": 2}, marks=pytest.mark.wide),
    ],
)


@TP
def test_a_plan_with_tp_that_is_chosen_is_the_stated_one(name, mesh, ask):
    """Its seconds and bytes are those of the same plan, stated and traced by itself."""
    asked = ask(name, mesh=mesh)
    decision, chosen = asked.decision, asked.decision.chosen
    assert chosen is not None
    assert decision.num_configs > 1
    assert chosen.plan.mesh.size("tp") == mesh["tp"]
    question = asked.job.request
    traced, spec = question.traced, question.read(overrides(chosen.stated))
    assert isinstance(traced, TracedModel)
    traced.traces(spec).exact.clear()  # What certified the choice.
    composed = traced.memory(traced.decide(spec))
    assert not traced.traces(spec).exact
    stated = search_plan(asked.path, overrides(chosen.stated)).chosen
    assert stated is not None
    # Work that does not grow with the samples, such as T5's position bias, is told apart by
    # extrapolation in the one, and counted as part of the samples' in the other.
    assert chosen.seconds == pytest.approx(stated.seconds, rel=1e-6)
    peaks = [(g.ranks, g.peak) for g in stated.memory.groups]
    assert [(g.ranks, g.peak) for g in composed.groups] == peaks
    assert chosen.memory.worst.band[1] <= decision.limit_bytes


@TP
def test_a_plan_with_tp_that_is_chosen_runs_as_one_process_does(pool, name, mesh, ask):
    asked = ask(name, mesh=mesh).decision.chosen
    assert asked is not None
    runs_as_one(pool, name, asked.stated)


def test_shards_of_different_sizes_are_planned_as_the_first_rank_has_them(tmp_path):
    """No rank stores more than the first one, and what is chosen is traced on all of them."""
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan_of("t5_of_1026_tokens", mesh={"tp": 4})))
    question = request_of_entry(path, (), None)
    chosen = decide(question).chosen
    assert chosen is not None
    traced, spec = question.traced, question.read(overrides(chosen.stated))
    assert isinstance(traced, TracedModel)
    traced.traces(spec).exact.clear()  # What certified the choice.
    composed = traced.memory(traced.decide(spec))
    found = [(g.ranks, g.peak.requested_bytes) for g in chosen.memory.groups]
    assert len(found) > 1
    first = composed.groups[0].peak.requested_bytes
    assert first == found[0][1] == max(size for _, size in found)
    assert [(g.ranks, g.peak.requested_bytes) for g in composed.groups] == [
        (ranks, first) for ranks, _ in found
    ]


@pytest.mark.parametrize("mesh", [{"tp": 2, "dp_shard": 2}, {"tp": 4}])
def test_microbatches_with_tp_are_composed(mesh, ask):
    """With some blocks recomputed and with samples that were not traced: as in the whole step."""
    question = ask("vit").job.request
    traced, blocks = question.traced, question.graph.blocks()
    assert isinstance(traced, TracedModel)
    stated = {
        "mesh": mesh, "tp_plan": "auto", "strategy": "full_shard" if len(mesh) > 1 else None,
        "batch.micro": 5, "batch.accumulate": 2, "batch.global": None,
        "activation_checkpointing": "none",
        "rules[0]": {"match": list(blocks[::2]), "activation_checkpointing": "full"},
    }  # fmt: skip
    spec = question.read(overrides(stated))
    assert traced.refuses(spec) == ""
    found = traced.memory(traced.decide(spec))
    assert not traced.traces(spec).exact
    whole = checking.estimate_memory(ask("vit").path, overrides(stated), tier=3)
    peaks = [(g.ranks, g.peak.requested_bytes) for g in whole.groups]
    assert [(g.ranks, g.peak.requested_bytes) for g in found.groups] == peaks


@pytest.mark.parametrize("name", ["unet", "vit", "t5"])
@pytest.mark.wide
def test_composed_microbatches_are_those_that_are_traced(name, ask):
    """With any choice of blocks, of a number of samples that was not traced, event by event."""
    question = ask(name).job.request
    traced = question.traced
    assert isinstance(traced, TracedModel)
    blocks = question.graph.blocks()
    traces = traced.traces(question.read(()))
    composer, loop = traces._composer(5), traces._loop(with_micro(question, 5))
    for again in (frozenset(blocks[::2]), frozenset(blocks[:1]), frozenset(blocks)):
        low, high = composer.trace(again)
        (seen,) = watch(
            traced._model, traces.plan, loop.inputs, loop.targets, loop.loss_fn,
            traced._device, [Ask(5, again)],
        )  # fmt: skip
        least, most, truth = (live_bytes(work) for work in (low, high, seen.trace))
        assert max(least) == max(truth) == max(most)
        if low is high:
            assert truth == least
            assert low.hook_points == seen.trace.hook_points


def test_what_was_traced_is_not_traced_again(ask, monkeypatch):
    question = ask("unet").job.request
    traced = question.traced
    assert isinstance(traced, TracedModel)
    traces = traced.traces(question.read(()))
    assert traces.chain
    asked: list[Ask] = []

    def watching(*args: Any, **kwargs: Any) -> Any:
        asked.extend(args[6])
        return watch(*args, **kwargs)

    monkeypatch.setattr("meshplan.runtime.live.block_traces.watch", watching)
    blocks = frozenset(question.graph.blocks())
    for micro, word, again in ((1, "none", frozenset()), (2, "full", blocks)):
        plan = with_micro(question, micro, word)
        traces.exact.clear()
        told = traced.certify(plan)
        assert not asked
        traces.exact.clear()
        with monkeypatch.context() as patch:
            patch.setattr(BlockTraces, "_traced_already", lambda *_: None)
            assert traced.certify(plan) == told
        assert asked.pop() == Ask(micro, again)
    traces.exact.clear()
    traced.certify(with_micro(question, 3))
    assert asked == [Ask(3)]


def with_micro(question: PlanRequest, micro: int, word: str = "none") -> Plan:
    stated = {"mesh": {"dp_shard": 4}, "strategy": "full_shard", "batch.micro": micro,
              "batch.accumulate": 1, "batch.global": 4 * micro,
              "activation_checkpointing": word}  # fmt: skip
    return make_plan(question.read(overrides(stated)), question.graph)


def live_bytes(work: MicrobatchTrace) -> list[int]:
    """After each event."""
    return list(itertools.accumulate(event.delta for event in work.log.events))


@pytest.mark.parametrize(
    ("entry", "precision", "shape"),
    [("Convolves", "16-mixed", [2, 16, 64]), ("Alone", "32-true", [2, 64, 512])],
)
def test_what_multiplies_in_another_dtype_is_planned(entry, precision, shape, tmp_path):
    """Half as wide is faster by what the datasheet says; a product in float32 is a product."""
    seconds = {}
    for word in (precision, "bf16-mixed"):
        path = tmp_path / f"{word}.yaml"
        plan = plan_of("odd", model={"entry": f"tests.helpers.planned:{entry}"}, precision=word)
        path.write_text(json.dumps(plan | {"input": {"shape": shape, "dtype": "fp32"}}))
        decision = search_plan(path)
        assert decision.ladder is not None
        seconds[word] = decision.ladder.roofline_s
    peak = find_device("h100-sxm-80gb").peak_flops
    dtype = {"16-mixed": "float16", "32-true": "float32"}[precision]
    assert seconds[precision] == pytest.approx(
        seconds["bf16-mixed"] * peak["bfloat16"] / peak[dtype]
    )


def test_compiled_blocks_are_planned_as_faster_within_the_memory_of_eager_ones(tmp_path):
    decisions = []
    for is_compiled in (False, True):
        path = tmp_path / f"{is_compiled}.yaml"
        path.write_text(json.dumps(plan_of("vit", compile=is_compiled)))
        decisions.append(search_plan(path))
    check_compiled_figures(*decisions)
    found = checking.estimate_memory(path, overrides(decisions[1].chosen.stated))
    assert found.bound
    assert found.worst.band == decisions[1].chosen.memory.worst.band


def test_a_model_without_blocks_is_planned(tmp_path):
    """One sample takes another course than two, so two and three tell the rest."""
    path = tmp_path / "plan.yaml"
    plan = plan_of("odd", model={"entry": "tests.helpers.planned:Alone"})
    path.write_text(json.dumps(plan | {"input": {"shape": [2, 64, 512], "dtype": "fp32"}}))
    decision = search_plan(path)
    assert decision.chosen is not None
    assert decision.chosen.stated["batch.micro"] == 16
    found = checking.estimate_memory(path, overrides(decision.chosen.stated))
    peaks = [each.worst.peak.requested_bytes for each in (found, decision.chosen.memory)]
    assert peaks[0] == peaks[1]
    lost = [each for each in decision.rejected if each.what == "activation_checkpointing=full"]
    assert "has no repeated blocks" in lost[0].why
    # Its samples are no sequences: what they cost is told for samples.
    cost = cost_to_json(decision, 2.0)
    assert cost is not None
    assert cost["gpu_hours_per_million_tokens"] is cost["price_per_million_tokens"] is None
    hours = cost["gpu_hours_per_step"] / decision.samples * 1e6
    assert cost["gpu_hours_per_million_samples"] == pytest.approx(hours)
    assert "GPU-hours per million samples, " in cost_to_text(decision, 2.0)[0]


@pytest.mark.parametrize(
    ("mesh", "strategy", "precision"),
    [
        ({"dp_replicate": 4}, "ddp", "32-true"),
        ({"dp_replicate": 4}, "ddp", "bf16-true"),
        ("auto", "auto", "32-true"),
    ],
)
def test_ddp_in_one_dtype_is_planned(mesh, strategy, precision, tmp_path):
    """No unit casts anything there, with or without wrappers that would."""
    path = tmp_path / "plan.yaml"
    fields = {"entry": "meshplan.runtime.demo_model:ByteLlama"}
    plan = plan_of("odd", model=fields, mesh=mesh, strategy=strategy, precision=precision)
    path.write_text(json.dumps(plan | {"input": {"shape": [2, 32], "dtype": "int64"}}))
    decision = search_plan(path)
    assert not [each.why for each in decision.rejected if "other dtypes" in each.why]
    assert decision.chosen is not None
    found = checking.estimate_memory(path, overrides(decision.chosen.stated))
    told = [each.worst.peak.requested_bytes for each in (found, decision.chosen.memory)]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("entry", "fields", "words"),
    [
        ("tests.helpers.planned:NoProducts", {}, "no matrix multiplication or convolution"),
        ("torch.nn:Identity", {}, "Identity has no parameters to train"),
        ("tests.helpers.planned:Constant", {}, "these inputs does not depend on its parameters"),
        ("tests.helpers.estimated:asking", {"input": None, "batch": {"seq_len": 16}},
         "aten._local_scalar_dense.default"),
        ("tests.helpers.planned:Alone", {"input": None}, "the plan states no input for Alone"),
        ("tests.helpers.planned:Alone", {"optimizer": "muon"}, "on DTensors"),
        ("tests.helpers.planned:Alone", {"activation_checkpointing": "selective"}, "selective"),
        ("tests.helpers.planned:Alone", {"batch": {"global": None}}, "no samples per step"),
        ("tests.helpers.planned:Convolves",
         {"precision": "32-true", "input": {"shape": [2, 16, 64], "dtype": "fp32"}},
         "Convolves convolves in float32, for which cuDNN uses TF32"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said_in_words(entry, fields, words, tmp_path, capsys):
    plan = plan_of("odd", model={"entry": entry}, **{"input": {"shape": [2, 16], "dtype": "fp32"}})
    plan["batch"] = plan["batch"] | fields.pop("batch", {})
    stated = {key: value for key, value in (plan | fields).items() if value is not None}
    stated["batch"] = {key: value for key, value in stated["batch"].items() if value is not None}
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(stated))
    assert main(["plan", "-f", str(path), "-q"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


RANKS = {
    "version": 1,
    "hardware": {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"},
    "mesh": "auto",
    "strategy": "auto",
    "precision": "bf16-mixed",
    "input": {"shape": [2, 3, 8, 8], "dtype": "fp32"},
    "batch": {"global": 8, "micro": "auto"},
}


def test_all_ranks_take_what_the_first_one_chose(pool):
    found = pool(2).run(planned.parallel_while_planning, RANKS)
    assert found[0] == found[1]
    assert found[0][2] == 4


def test_what_the_first_rank_cannot_plan_is_said_on_all(pool):
    plan = RANKS | {"batch": {"micro": "auto"}}
    for text in pool(2).run(planned.fails_while_planning, plan):
        assert "no samples per step" in text
