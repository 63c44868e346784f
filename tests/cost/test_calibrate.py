"""Calibration: constants that made the times are found, and times that none made are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from meshplan.cli.app import main
from meshplan.cost.calibration import (
    LINKS_ARE_A_GUESS,
    Sample,
    Timings,
    profile_from,
    read_profile,
    write_profile,
)
from meshplan.cost.profile import GENERIC, on_cluster
from meshplan.errors import PlanError
from meshplan.layout.hardware import Cluster, Device, Link, find_device
from meshplan.render.profile import profile_to_text

H100 = find_device("h100-sxm-80gb")


def times(least, rate, amounts, noise=0.0, hops=0):
    rng = np.random.default_rng(0)
    made = [max(hops, 1) * least + amount / rate for amount in amounts]
    return tuple(
        Sample(amount, seconds * float(np.exp(noise * rng.normal())), hops)
        for amount, seconds in zip(amounts, made, strict=True)
    )


GIGAS = [1e9 * 2**n for n in range(6)]
MADE = Timings(
    device=H100,
    dtype="bfloat16",
    launch_s=5e-6,
    products=times(4e-6, 700e12, [1e12 * 2**n for n in range(6)]),
    attention=times(8e-6, 450e12, [1e11 * 2**n for n in range(6)]),
    moves=times(3e-6, 2.7e12, GIGAS),
    copies=times(1e-5, 50e9, GIGAS),
    collectives=times(3e-6, 350e9, GIGAS, hops=7),
)


def test_constants_that_made_the_times_are_found(tmp_path):
    told = profile_from(MADE)
    assert told.efficiency == pytest.approx(700 / 989, rel=1e-3)
    assert told.attention_efficiency == pytest.approx(450 / 989, rel=1e-3)
    assert told.memory_bytes_per_s == pytest.approx(2.7e12, rel=1e-3)
    assert told.intra_bytes_per_s == pytest.approx(350e9, rel=1e-3)
    assert told.intra_latency_s == pytest.approx(3e-6, rel=1e-2)
    assert told.pcie_bytes_per_s == pytest.approx(50e9, rel=1e-3)
    assert told.launch_s == 5e-6
    assert told.residual < 1e-6
    path = tmp_path / "profile.json"
    write_profile(told, path)
    assert read_profile(path) == told


def test_a_device_that_is_not_in_the_table_is_its_own_peak():
    told = profile_from(replace(MADE, device=Device(name="mine", memory_bytes=0), collectives=()))
    assert told.peak_flops == pytest.approx(700e12, rel=1e-3)
    assert told.efficiency == pytest.approx(1.0)
    assert told.intra_bytes_per_s == told.memory_bytes_per_s


def test_what_one_machine_shows_is_taken_to_a_cluster_of_such():
    told = profile_from(MADE)
    nodes = Cluster(device=H100, nodes=4, gpus_per_node=8, inter=Link("", 50e9))
    assert on_cluster(told, nodes).inter_bytes_per_s == 50e9 * GENERIC["inter_share"]
    assert on_cluster(told, replace(nodes, nodes=1, inter=None)) == told
    with pytest.raises(PlanError, match="add inter"):
        on_cluster(told, replace(nodes, inter=None))
    with pytest.raises(PlanError, match="was measured on h100-sxm-80gb, not on a100"):
        on_cluster(told, replace(nodes, device=find_device("a100-sxm-80gb")))


def test_links_between_nodes_are_measured_apart_from_those_inside():
    """Ranks on several nodes were timed as one ring, whose speed was written as that of a node."""
    several = replace(
        MADE,
        collectives=times(3e-6, 300e9, GIGAS, hops=7),
        crossings=times(2e-5, 30e9, GIGAS, hops=3),
        reductions=times(6e-6, 150e9, GIGAS, hops=7),
        num_nodes=4,
        ranks_per_node=8,
    )
    told = profile_from(several)
    assert (told.intra_bytes_per_s, told.inter_bytes_per_s) == pytest.approx((300e9, 30e9))
    assert (told.intra_latency_s, told.inter_latency_s) == pytest.approx((3e-6, 2e-5), rel=1e-2)
    assert told.reduce_scatter_factor == pytest.approx(2, rel=1e-3)
    assert "between nodes    30 GB/s for each device" in "\n".join(profile_to_text(told))
    # What was measured holds, also where the plan states a bandwidth or none.
    nodes = Cluster(device=H100, nodes=4, gpus_per_node=8, inter=Link("", 50e9))
    assert on_cluster(told, nodes) == on_cluster(told, replace(nodes, inter=None)) == told
    # Ranks of a node share its link.
    with pytest.raises(PlanError, match="measured with 8 ranks on each node, and the plan has 4"):
        on_cluster(told, replace(nodes, gpus_per_node=4))


def test_one_rank_on_each_node_measures_the_links_between_nodes_only():
    alone = replace(
        MADE, collectives=(), crossings=times(2e-5, 40e9, GIGAS, hops=3),
        reductions=times(2e-5, 40e9, GIGAS, hops=3), num_nodes=4,
    )  # fmt: skip
    told = profile_from(alone)
    assert told.inter_bytes_per_s == pytest.approx(40e9)
    assert told.reduce_scatter_factor == pytest.approx(1)
    assert told.intra_bytes_per_s == H100.intra_bytes_per_s * GENERIC["intra_share"]
    assert LINKS_ARE_A_GUESS in told.sources


def test_a_profile_that_could_not_be_read_is_not_made():
    """Two sizes that took equally long give a rate without bound, and a fit that is exact."""
    same = replace(MADE, collectives=tuple(Sample(a, 1e-3, 7) for a in (1e6, 4e6)))
    with pytest.raises(PlanError, match="the times give intra_bytes_per_s = inf, not"):
        profile_from(same)


@pytest.mark.parametrize("name", ["products", "attention", "moves", "copies", "collectives"])
def test_noise_is_refused_by_name(name):
    noisy = [
        replace(s, seconds=s.seconds * (1.6 if n % 2 else 0.6))
        for n, s in enumerate(getattr(MADE, name))
    ]
    words = {"moves": "elementwise operations", "copies": "copies from the host"}
    with pytest.raises(PlanError, match=rf"times of {words.get(name, name)} are \d\d% off"):
        profile_from(replace(MADE, **{name: noisy}))


def test_rounds_that_differ_are_refused_and_sizes_that_do_are_told():
    """What fits a cache is faster at any time; what else runs on the machine is not."""
    cached = [
        replace(s, seconds=s.seconds * (0.7 if n < 2 else 1)) for n, s in enumerate(MADE.moves)
    ]
    told = profile_from(replace(MADE, moves=cached))
    assert "products (off by 0%)" in told.sources[0]
    assert "elementwise operations (off by 17%)" in told.sources[0]
    busy = [replace(s, spread=0.2) for s in MADE.moves]
    with pytest.raises(PlanError, match="elementwise operations differ by 20% between rounds"):
        profile_from(replace(MADE, moves=busy))


def test_times_that_fall_with_size_have_no_constants():
    samples = tuple(Sample(amount, 1.0 / amount) for amount in GIGAS)
    with pytest.raises(PlanError, match=r"products are .* off"):
        profile_from(replace(MADE, products=samples))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    with pytest.raises(PlanError, match="cannot be read"):
        read_profile(path)
    path.write_text("{}")
    with pytest.raises(PlanError, match="is not a profile"):
        read_profile(path)
    write_profile(profile_from(MADE), path)
    facts = json.loads(path.read_text())
    del facts["profile"]["launch_s"]
    path.write_text(json.dumps(facts))
    with pytest.raises(PlanError, match="another version of meshplan, and differs in: launch_s"):
        read_profile(path)


def test_this_machine_is_timed(monkeypatch):
    from meshplan.runtime import calibrate

    monkeypatch.setattr(calibrate, "ROUNDS", 2)
    told = calibrate.measure(large=False)
    for samples in (told.products, told.attention, told.moves):
        assert len(samples) > 2
        assert all(sample.seconds > 0 and sample.spread >= 0 for sample in samples)
        assert sorted(s.amount for s in samples)[-1] > sorted(s.amount for s in samples)[0]
    assert told.launch_s > 0
    assert told.collectives == ()


def test_an_accelerator_runs_bursts_and_a_whole_training_step(monkeypatch):
    """The accelerator is the CPU under another name; its clock counts executions."""
    from meshplan.runtime import calibrate

    class Device:
        type = "accelerator"

    clock = {"now": 0.0}
    monkeypatch.setattr(calibrate, "ROUNDS", 4)
    monkeypatch.setattr(calibrate, "_synchronize", lambda device: None)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock["now"])
    runs = []

    def work(name, seconds):
        def run():
            runs.append(name)
            clock["now"] += seconds

        return calibrate._TimedWork(1.0, run)

    short, long = work("short", 0.001), work("long", 0.04)
    found = calibrate._timed(Device(), [short, long])
    assert found[id(short)] == pytest.approx([0.001] * 4)
    assert found[id(long)] == pytest.approx([0.04] * 4)
    warm = ["short"] * 2 + ["long"] * 2
    assert runs == warm + (["short"] * 10 + ["long"]) * 4


def test_a_sample_is_as_certain_as_its_rounds():
    """Of products on a CPU the shortest counts, of collectives and on accelerators the median."""
    import torch

    from meshplan.runtime.calibrate import _sample, _TimedWork

    seconds = [1.0, 3.0, 1.2, 2.0, 5.0, 2.5]  # Even rounds: 1, 1.2, 5; odd ones: 3, 2, 2.5.
    product, gather = _TimedWork(8.0, list), _TimedWork(8.0, list, hops=3)
    for both in (seconds, [*seconds[1:], seconds[0]]):
        assert _sample(product, both, torch.device("cpu")) == Sample(8.0, 1.0, 0, 1.0)
        found = _sample(gather, both, torch.device("cpu"))
        assert found == Sample(8.0, 2.25, 3, pytest.approx((2.5 / 1.2 - 1) / 2))
    assert _sample(product, [3.0], torch.device("cpu")) == Sample(8.0, 3.0, 0, 0.0)
    assert _sample(product, seconds, torch.device("meta")).seconds == found.seconds


def test_collectives_are_timed_until_they_are_certain(monkeypatch):
    """Rounds go on while one is uncertain, and at most for `_MOST_S`."""
    from meshplan.runtime import calibrate

    gather, scatter = (calibrate._TimedWork(1.0, list, hops=1) for _ in range(2))
    steady, uneven = [1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 2.0]
    monkeypatch.setattr(calibrate, "_MOST_S", 20.0)
    for first, second, goes_on in (
        (steady, steady, False), (steady, uneven, True), (uneven, steady, True),
        (steady * 4, uneven, False),
    ):  # fmt: skip
        seconds = {id(gather): first, id(scatter): second}
        assert calibrate._are_unsettled([gather, scatter], seconds) == goes_on
    assert not calibrate._are_unsettled([], {})


def test_operations_take_turns_by_kind():
    from meshplan.runtime.calibrate import _by_turns

    assert "".join(_by_turns(["aaa", "b", "", "cc"])) == "abcaca"


def test_the_kernels_of_a_training_step_are_counted_as_in_a_plan(monkeypatch):
    """Norms are one kernel forward and two backward, of which torch has one operator on the CPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from meshplan.runtime import calibrate

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            is_view = func.is_view or any(w in str(func) for w in ("detach", "_unsafe_view"))
            self.count += not is_view
            return func(*args, **(kwargs or {}))

    def norm(x, shape, weight, eps):
        return torch.layer_norm(x, shape, weight, None, eps or 1e-6)

    monkeypatch.setattr(torch.nn.functional, "rms_norm", norm)
    block = calibrate._SmallBlock()
    x = torch.randn(1, 16, block.WIDTH, requires_grad=True)
    with Counted() as forward:
        out = block(x * 1)
    with Counted() as backward:
        out.backward(torch.ones_like(out))
    around, norms = 1 + 1 + 1, 2  # `x * 1`, its backward, the ones.
    assert forward.count + backward.count - around + norms == block.KERNELS


def test_the_verb_writes_a_profile_or_says_why_not(tmp_path, monkeypatch, capsys):
    from meshplan.runtime import calibrate

    path = tmp_path / "profile.json"
    monkeypatch.setattr(calibrate, "measure", lambda: MADE)
    assert main(["calibrate", "--out", str(path), "-q"]) == 0
    assert "fit error 0.0%" in capsys.readouterr().out
    assert read_profile(path).device == H100.name
    path.unlink()
    noisy = tuple(replace(s, seconds=s.seconds * (1 + n % 2)) for n, s in enumerate(MADE.moves))
    monkeypatch.setattr(calibrate, "measure", lambda: replace(MADE, moves=noisy))
    assert main(["calibrate", "--out", str(path), "-q"]) != 0
    assert "calibrate again" in capsys.readouterr().err
    assert not path.exists()


def groups_on_nodes(sizes):
    """The ranks that this rank times collectives with, if it is on a node of `sizes[rank]` ranks.

    Returns:
        (ranks of its node, same rank of each node, messages of what is refused).
    """
    import torch
    import torch.distributed as dist

    from meshplan.runtime import calibrate

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(sizes[dist.get_rank()]))
        try:
            found = calibrate._groups(torch.device("cpu"))
        except PlanError as error:
            return None, None, str(error)
        works = list(calibrate._collectives(torch.device("cpu"), False, found[1] or found[0]))
        assert [work.hops for work in works] == [(found[1] or found[0]).size() - 1] * len(works)
    return *(each and dist.get_process_group_ranks(each) for each in found), ""


def test_the_ranks_of_a_node_are_timed_apart_from_those_of_others(pool):
    found = pool(4).run(groups_on_nodes, [2, 2, 2, 2])
    assert [within for within, _, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [across for _, across, _ in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert pool(4).run(groups_on_nodes, [4] * 4) == [([0, 1, 2, 3], None, "")] * 4
    assert pool(4).run(groups_on_nodes, [1] * 4) == [(None, [0, 1, 2, 3], "")] * 4


def test_nodes_with_different_numbers_of_ranks_are_refused_on_every_rank(pool):
    """Ranks of which one alone refused left the others waiting."""
    for _, _, why in pool(4).run(groups_on_nodes, [2, 2, 1, 1]):
        assert "some nodes have 1 ranks and others 2" in why
        assert "start as many ranks on each node" in why


def slow_on_one_rank():
    """The seconds of a collective for which one rank sleeps, and of a product for which it does."""
    import time

    import torch
    import torch.distributed as dist

    from meshplan.runtime import calibrate

    def run():
        if dist.get_rank() == 1:
            time.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "ROUNDS", 4)
        works = [calibrate._TimedWork(1.0, run, hops=1), calibrate._TimedWork(1.0, run)]
        found = calibrate._timed(torch.device("cpu"), works)
    return [min(found[id(work)]) for work in works]


def test_a_collective_takes_as_long_as_its_slowest_group(pool):
    """Groups that share a link had the time of the first one, which had the link for itself."""
    (collective, product), (slow_collective, slow_product) = pool(2).run(slow_on_one_rank)
    assert collective == slow_collective >= 0.05
    assert product < 0.05 <= slow_product
