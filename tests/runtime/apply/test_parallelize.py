"""`parallelize` at its boundary: what it takes, what it refuses, and what it leaves alone."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshplan
from tests.helpers import models

SHARD: dict[str, Any] = {"version": 1, "strategy": "full_shard"}
FIX_PRODUCT = "fix: make the product 4, such as dp_shard: 4"


def explode(module: nn.Module) -> None:
    raise RuntimeError("the user's code failed")


def double(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight.mul_(2)


def state_of(model: nn.Module) -> Any:
    """Everything that wrapping could change."""
    return (
        [(n, type(m), list(m._forward_hooks), list(m._forward_pre_hooks), m.forward.__qualname__)
         for n, m in model.named_modules()],
        [(n, id(p), p.data_ptr(), p.dtype) for n, p in model.named_parameters()],
    )  # fmt: skip


def attempt(plans: Any, **options: Any) -> tuple[str, str, bool]:
    """(type, text, whether the model was left alone) of what parallelize raises."""
    sys.argv[:] = ["train.py"]  # a worker has those of pytest
    plan = plans[dist.get_rank()] if isinstance(plans, list) else plans
    model = models.build("own_llama")
    before = state_of(model)
    try:
        meshplan.parallelize(model, plan, **options)
    except Exception as error:
        inputs, targets = models.batch("own_llama", 0, 2)
        models.loss(model(inputs), targets).backward()
        return type(error).__name__, str(error), state_of(model) == before
    return "", "", True


TP2 = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}}
REFUSALS: dict[str, tuple[Any, str, str]] = {
    "wrong product": (
        {"version": 1, "mesh": {"dp_shard": 3}},
        "PlanError",
        "meshplan: 1 problem\n"
        "<mapping>: mesh: the mesh has 3 devices, but 4 are available: WORLD_SIZE is 4\n"
        f"    {FIX_PRODUCT}, or start 3 ranks: torchrun --nproc-per-node 3 train.py",
    ),
    "two statements disagree": (
        {"version": 1, "strategy": "full_shard", "mesh": {"dp_replicate": 2, "dp_shard": 2}},
        "PlanError",
        "meshplan: 1 problem\n"
        "<mapping>: strategy: full_shard uses dp_shard only, but the mesh also has dp_replicate "
        "(mesh: {dp_replicate: 2, dp_shard: 2})\n"
        "    fix: write strategy: hybrid_shard or hybrid_shard_zero2, or write mesh: "
        "{dp_shard: N}",
    ),
    "hybrid on one node": (
        {"version": 1, "strategy": "hybrid_shard"},
        "PlanError",
        "meshplan: 1 problem\n"
        "<mapping>: strategy: hybrid_shard shards inside a node and replicates across nodes, but "
        "the 4 devices are on one node\n"
        "    fix: state both sizes, such as mesh: {dp_replicate: 2, dp_shard: 4}, or use "
        "full_shard",
    ),
    "every mistake at once": (
        TP2
        | {
            "rules": [
                {"match": "layers.*.atn.wq", "place": {"tp": "colwise"}},
                {"match": "norm", "place": {"tp": "colwise"}},
                {"match": "layers.*.attn", "place": {"tp": "rowwise"}},
            ]
        },
        "PlanError",
        "meshplan: 3 problems\n"
        "<mapping>: rules[0].match: 'layers.*.atn.wq' matches no module of ByteLlama\n"
        "    fix: did you mean 'layers.*.attn.wq'?\n"
        "<mapping>: rules[1].place.tp: 'colwise' cannot be applied to norm (RMSNorm): it needs a "
        "linear, conv1d or embedding module\n"
        "    fix: remove the placement, or state 'R'\n"
        "<mapping>: rules[2].place.tp: 'rowwise' cannot be applied to layers.0.attn (Attention): "
        "it needs a linear or conv1d module\n"
        "    fix: match a module that can, such as 'layers.0.attn.wq'",
    ),
    "an axis that cuts nothing": (
        TP2,
        "PlanError",
        "meshplan: 1 problem\n"
        "<mapping>: mesh.tp: the tp axis of size 2 shards nothing: no rule places a module on tp\n"
        "    fix: set tp_plan: auto, or add rules such as {match: 'layers.*.attn.wq', place: {tp: "
        "colwise}}, or remove tp from the mesh",
    ),
    "an op that cannot be kept": (
        SHARD | {"activation_checkpointing": {"mode": "selective", "save": ["mmm"]}},
        "ApplyError",
        "meshplan: 1 problem\n"
        "<mapping>: activation_checkpointing: 'mmm' is not an op whose output can be saved\n"
        "    fix: use mm, bmm, conv, sdpa or the name of an aten op",
    ),
    "code that is not there": (
        SHARD | {"rules": [{"match": "norm", "apply": f"{__name__}:nothing"}]},
        "PlanError",
        "meshplan: 1 problem\n"
        f"<mapping>: rules[0].apply: '{__name__}:nothing' cannot be imported: module "
        f"'{__name__}' has no attribute 'nothing'\n"
        "    fix: name an importable function as 'pkg.mod:function'",
    ),
    "code that fails after wrapping began": (
        TP2
        | {
            "rules": [
                {"match": "head", "place": {"tp": "vocab"}},
                {"match": "norm", "apply": f"{__name__}:explode"},
            ]
        },
        "ApplyError",
        "meshplan: 1 problem\n"
        f"<mapping>: rules[1].apply: '{__name__}:explode' failed on 'norm': "
        "RuntimeError: the user's code failed\n"
        "    fix: correct the function",
    ),
    "ranks that read different plans": (
        [SHARD, SHARD, SHARD | {"strategy": "zero2"}, SHARD],
        "ApplyError",
        "meshplan: 1 problem\n"
        "rank 2 has a different plan than rank 0: its plan file or model differs\n"
        "    fix: give every rank the same plan file and build the same model on all of them",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_and_leaves_the_model_alone(pool, case):
    plan, kind, text = REFUSALS[case]
    for result in pool(4).run(attempt, plan):
        assert result == (kind, text, True)


def test_an_error_on_one_rank_is_told_on_all(pool):
    plans = [SHARD, SHARD, SHARD | {"strategy": "full_shards"}, SHARD]
    results = pool(4).run(attempt, plans)
    problem = (
        "<mapping>: strategy: 'full_shards' is not a strategy\n    fix: did you mean 'full_shard'?"
    )
    assert results[2] == ("SpecError", f"meshplan: 1 problem\n{problem}", True)
    indented = problem.replace("\n", "\n    ")
    told = f"rank 2 cannot apply its plan: meshplan: 1 problem\n    {indented}"
    assert results[0] == results[1] == results[3]
    assert results[0] == ("ApplyError", f"meshplan: 1 problem\n{told}", True)


def test_a_missing_file_on_one_rank_is_told_on_all(pool, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\nstrategy: full_shard\n")
    results = pool(2).run(attempt, [str(path), str(tmp_path / "nowhere.yaml")])
    assert [kind for kind, _, _ in results] == ["ApplyError", "SpecError"]
    assert all(untouched for _, _, untouched in results)


def test_ranks_that_leave_other_things_open_are_told_so(pool):
    results = pool(2).run(attempt, [SHARD, {"version": 1, "strategy": "auto"}])
    told = "rank 1 read a different plan than rank 0, and a plan with open fields must"
    for kind, text, untouched in results:
        assert kind == "ApplyError"
        assert told in text
        assert untouched


def test_code_needs_permission(pool):
    plan = SHARD | {"rules": [{"match": "norm", "apply": f"{__name__}:double"}]}
    kind, text, untouched = pool(2).run(attempt, plan, allow_code=False)[0]
    assert (kind, untouched) == ("PlanError", True)
    assert f"the plan runs code ('{__name__}:double'), and allow_code is False" in text


def shapes(plan: Any) -> dict[str, Any]:
    model = meshplan.parallelize(models.build("own_llama"), plan)
    return {
        "wq": tuple(model.layers[0].attn.wq.weight.to_local().shape),
        "norm": model.norm.weight.full_tensor()[0].item(),
        "axes": model.meshplan.mesh.mesh_dim_names,
        "strategy": model.meshplan.plan.assignment.strategy.name,
        "state": all(isinstance(t, torch.Tensor) for t in model.state_dict().values()),
    }


def test_code_runs_on_the_whole_module(pool):
    plan = SHARD | {"rules": [{"match": "norm", "apply": f"{__name__}:double"}]}
    assert pool(2).run(shapes, plan)[0]["norm"] == 2.0


def as_plan(spec: meshplan.Spec) -> Any:
    from meshplan.runtime.trace.structure import graph_of

    return meshplan.make_plan(spec, graph_of(models.build("own_llama")), world_size=2)


def test_path_mapping_spec_and_plan_mean_the_same(pool, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\nstrategy: full_shard\n")
    spec = meshplan.load_spec(path)
    results = [pool(2).run(shapes, p)[0] for p in (path, str(path), SHARD, spec, as_plan(spec))]
    assert results == [results[0]] * 5
    assert results[0]["wq"] == (32, 64)


def test_a_plan_for_another_model_is_refused(pool):
    from meshplan.runtime.trace.structure import graph_of

    spec = meshplan.load_spec(SHARD)
    plan = meshplan.make_plan(spec, graph_of(models.build("gpt2")), world_size=2)
    kind, text, untouched = pool(2).run(attempt, plan)[0]
    assert (kind, untouched) == ("PlanError", True)
    assert "this Plan was made for another model or mesh (GPT2LMHeadModel on dp_shard 2)" in text


def twice() -> str:
    model = meshplan.parallelize(models.build("own_llama"), SHARD)
    try:
        meshplan.parallelize(model, SHARD)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_the_second_time_is_refused(pool):
    assert "this model is parallelized already" in pool(2).run(twice)[0]


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "DataParallel"])
def test_a_model_of_another_wrapper_is_refused(kind):
    net = torch.nn.Linear(4, 4)
    wrapped = torch.nn.DataParallel(net)
    if kind == "DistributedDataParallel":  # Making one takes a group.
        wrapped = torch.nn.parallel.DistributedDataParallel.__new__(
            torch.nn.parallel.DistributedDataParallel
        )
        torch.nn.Module.__init__(wrapped)
        wrapped.module = net
    with pytest.raises(meshplan.ApplyError, match=rf"this model is wrapped in {kind} already") as e:
        meshplan.parallelize(wrapped, SHARD)
    assert "pass model.module: the plan" in str(e.value)
    with pytest.raises(meshplan.ApplyError, match=rf"0 is wrapped in {kind} already") as e:
        meshplan.parallelize(torch.nn.Sequential(wrapped), SHARD)
    assert "pass the model with 0.module in its place" in str(e.value)


def test_only_modules_are_taken():
    with pytest.raises(TypeError, match=r"parallelize needs an nn\.Module, not dict"):
        meshplan.parallelize({}, SHARD)


def keeps_group() -> bool:
    before = dist.group.WORLD
    meshplan.parallelize(models.build("own_llama"), SHARD)
    return dist.group.WORLD is before


def test_the_callers_group_is_used(pool):
    assert pool(2).run(keeps_group) == [True, True]


def warned() -> list[str]:
    import warnings

    plan = SHARD | {
        "rules": [
            {"match": "layers.*", "place": "shard"},
            {"match": "layers.*", "place": "replicate"},
        ]
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        meshplan.parallelize(models.build("own_llama"), plan)
    return [str(w.message) for w in caught if "rule" in str(w.message)]


def test_a_shadowed_rule_is_a_warning_on_rank_0(pool):
    first, second = pool(2).run(warned)
    assert second == []
    assert first == [
        "<mapping>: rules[0]: this rule decides nothing: every field it states is overridden by "
        "rules[1]\n    fix: remove it, or move it below the rules that override it"
    ]


def test_norms_that_keep_statistics_are_warned_about(pool):
    of_one, tracked, plain = pool(2).run(norms)[0]
    assert "1: batch statistics are computed from the samples of one rank only" in of_one
    assert "1: running statistics are computed from the samples of one rank only" in tracked
    assert "statistics" not in plain


def norms() -> list[str]:
    tracked = nn.InstanceNorm2d(4, track_running_stats=True)
    return [told(norm) for norm in (nn.BatchNorm2d(4), tracked, nn.InstanceNorm2d(4, affine=True))]


def told(norm: nn.Module) -> str:
    import warnings

    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 4, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        meshplan.parallelize(model, {"version": 1, "strategy": "ddp"})
    return "".join(str(w.message) for w in caught)


def refusal(options: dict[str, Any], plan: dict[str, Any]) -> str:
    """What is said of a model with an embedding; "" if it is taken."""
    model = nn.Sequential(nn.Embedding(8, 4, **options), nn.Linear(4, 4), nn.Linear(4, 2))
    try:
        meshplan.parallelize(model, {"version": 1, **plan})
    except meshplan.PlanError as error:
        return str(error)
    return ""


PAIR = [{"match": "1", "place": {"tp": "colwise"}}, {"match": "2", "place": {"tp": "rowwise"}}]
WHOLE_TABLE: dict[str, Any] = {"mesh": {"tp": 2}, "rules": PAIR}
SHARDED_TABLE = WHOLE_TABLE | {"rules": [*PAIR, {"match": "0", "place": {"tp": "vocab"}}]}


def test_sparse_gradients_are_refused_where_ranks_take_dense_ones(pool):
    for text in pool(2).run(refusal, {"sparse": True}, {"strategy": "full_shard"}):
        assert "has sparse gradients, but FSDP units reduce only dense ones" in text
        assert "fix: build it with sparse=False, or use strategy: ddp" in text
    for text in pool(2).run(refusal, {"sparse": True}, SHARDED_TABLE):
        assert "0 (Embedding) has sparse gradients, but its weight is sharded over tp" in text
    for plan in ({"strategy": "ddp"}, WHOLE_TABLE):
        assert pool(2).run(refusal, {"sparse": True}, plan) == ["", ""]


def test_gradients_by_frequency_are_refused_where_the_batch_is_cut(pool):
    options, batch = {"scale_grad_by_freq": True}, {"accumulate": 2}
    for plan in ({"strategy": "ddp"}, WHOLE_TABLE | {"batch": batch}):
        for text in pool(2).run(refusal, options, plan):
            assert "ranks and microbatches see one of 2 parts" in text
    for plan in (WHOLE_TABLE, {"strategy": "ddp", "batch": {"per_rank": True}}):
        assert pool(2).run(refusal, options, plan) == ["", ""]
