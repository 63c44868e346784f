"""What a reshard moves, against every single element; and `plan --retarget`."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from meshplan.api import checking
from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Mesh
from meshplan.planner.answers.reshard import _elements, _PieceKind, _TensorPlacement, reshard
from meshplan.planner.lock.lock import lock_path, overrides, read
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

TINY = LLAMA | {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3,
                "vocab_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def elements(layout, shape, mesh, rank):
    """The numbers of the elements that a rank holds."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    for dim, slices in enumerate(layout.ranges(shape, mesh, rank)):
        whole = np.concatenate([whole[(slice(None),) * dim + (s,)] for s in slices], axis=dim)
    return set(whole.ravel().tolist())


def random_layout(rng, axes):
    axes = [axis for axis in axes if rng.random() < 0.7]
    if axes and rng.random() < 0.3:
        return Layout(((axes[0],), ()), packed=((axes[0], 2),))
    cuts = ([], [])
    for axis in axes:
        cuts[int(rng.integers(2))].append(axis)
    return Layout(tuple(map(tuple, cuts)))


def test_random_layouts_against_every_element():
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(150):
        sizes = [(int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2) for _ in range(2)]
        old, new = (Mesh.of(dict(zip(("pp", "dp_shard", "tp"), s, strict=True))) for s in sizes)
        shape = (2 * int(rng.integers(1, 6)), int(rng.integers(1, 7)))
        sides = [
            _TensorPlacement(random_layout(rng, ("dp_shard", "tp")),
                  tuple(p for p in range(mesh.size("pp")) if rng.random() < 0.6))
            for mesh in (old, new)
        ]  # fmt: skip
        found = _elements(_PieceKind(shape, 4, *sides), old, new)
        for rank in range(new.world_size):
            wanted, held = set(), set()
            if new.index(rank, ("pp",)) in sides[1].places:
                wanted = elements(sides[1].stored, shape, new, rank)
            if rank < old.world_size and old.index(rank, ("pp",)) in sides[0].places:
                held = elements(sides[0].stored, shape, old, rank)
            assert found[rank] == (len(wanted), len(wanted & held))
            kept += len(wanted & held)
    assert kept > 1000


def plan_of(job, world, **fields):
    hardware = {"nodes": 1, "gpus_per_node": world, "gpu": "h100-sxm-80gb"}
    tp_plan = "auto" if "tp" in fields["mesh"] else "none"
    batch = {"global": 48, "seq_len": 64}
    return checking.decide(
        job(TINY, hardware=hardware, strategy=None, tp_plan=tp_plan, batch=batch, **fields)
    )


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"dp_shard": 4}, {"dp_shard": 8}),
        ({"dp_shard": 4, "tp": 2}, {"pp": 2, "dp_shard": 3}),
        ({"pp": 3, "dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_whole_plans_against_every_element(job, one, two):
    old = plan_of(job, math.prod(one.values()), mesh=one)
    new = plan_of(job, math.prod(two.values()), mesh=two)
    found = reshard(old, new)
    moved, needed = [0] * new.mesh.world_size, 0

    def held(plan, fqn, rank):
        stages, placed = plan.assignment.stages, plan.assignment.tensors[fqn]
        if stages is not None and not stages.holds(fqn, plan.mesh.index(rank, ("pp",))):
            return set()
        return elements(placed.stored, placed.info.shape, plan.mesh, rank)

    for fqn, placed in new.assignment.tensors.items():
        if placed.info.is_buffer:
            continue
        for rank in range(new.mesh.world_size):
            wanted = held(new, fqn, rank)
            has = held(old, fqn, rank) if rank < old.mesh.world_size else set()
            moved[rank] += 3 * 4 * len(wanted - has)  # The parameter and two of adamw's.
            needed += 3 * 4 * len(wanted)
    assert found.moved_bytes == sum(moved)
    assert found.needed_bytes == needed
    assert (found.most_bytes, found.most_rank) == (max(moved), moved.index(max(moved)))
    assert found.state_bytes == 12 * new.graph.num_params
    assert 0 < found.moved_bytes < found.needed_bytes


def test_the_same_plan_moves_nothing(job):
    plan = plan_of(job, 8, mesh={"pp": 2, "dp_shard": 4})
    assert reshard(plan, plan).moved_bytes == 0


def test_what_is_not_the_same_training_is_refused(job):
    plan = plan_of(job, 4, mesh={"dp_shard": 4})
    for fields, words in (
        ({"optimizer": "sgd"}, "different optimizers: adamw and sgd"),
        ({"precision": "bf16-true"}, "different dtypes: float32 and bfloat16"),
    ):
        with pytest.raises(PlanError, match=words):
            reshard(plan, plan_of(job, 4, mesh={"dp_shard": 4}, **fields))
    odd = plan_of(job, 4, mesh={"dp_shard": 4}, optimizer="adafactor")
    with pytest.raises(PlanError, match="do not have their parameters' shapes"):
        reshard(odd, odd)
    other = checking.decide(
        job(TINY | {"num_hidden_layers": 2}, mesh={"dp_shard": 8}, strategy=None)
    )
    with pytest.raises(PlanError, match="different models"):
        reshard(plan, other)


def test_retarget(job, capsys):
    hardware = {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb", "inter": "50GB/s"}
    path = job(hardware=hardware)
    assert main(["plan", "-f", str(path), "-q"]) == 0
    before = lock_path(path).read_bytes()
    capsys.readouterr()
    words = ["plan", "-f", str(path), "-q", "--retarget", "nodes=2,gpu=h200"]
    out = path.with_name("other.lock.yaml")
    assert main([*words, "--json", "-o", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert np.prod(list(result["mesh"].values())) == 8
    assert result["limit_bytes"] > 130 * 2**30
    again = result["retarget"]
    assert again["old"]["step_s"] > result["step_s"]
    old = checking.decide(path)
    hardware = ["hardware.nodes=2", "hardware.gpu=h200"]
    new = checking.decide(path, [*hardware, *overrides(result["chosen"])])
    found = reshard(old, new)
    assert again["reshard"]["moved_bytes"] == found.moved_bytes
    assert again["reshard"]["needed_bytes"] == found.needed_bytes
    assert {"what": "mesh.dp_shard", "old": 4, "new": 8} in again["fields"]
    assert lock_path(path).read_bytes() == before
    assert read(out).chosen["mesh"] == result["mesh"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "parameters and optimizer state" in text
    assert lock_path(path).read_bytes() == before
    for bad in ("nodes", "colour=red", "nodes=x"):
        assert main([*words[:-1], bad]) == 2
