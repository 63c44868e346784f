"""The table of devices and how a user names one."""

from __future__ import annotations

import pytest

from meshplan.errors import Origin, SpecError
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.hardware import Cluster, Device, Link, devices, find_device


def test_every_figure_has_a_unit_that_makes_sense_and_a_source():
    for name, device in devices().items():
        assert device.name == name
        assert 16e9 <= device.memory_bytes <= 288e9, name
        assert name.endswith(f"-{device.memory_bytes // 10**9}gb")
        assert device.sources, name
        assert set(device.peak_flops) <= set(DTYPE_BYTES), name
        assert all(10e12 < flops < 10e15 for flops in device.peak_flops.values()), name
        halves = {device.peak_flops[d] for d in ("bfloat16", "float16") if d in device.peak_flops}
        assert len(halves) < 2, name
        assert device.peak_flops.get("float32", 0.0) < min(halves, default=1e18), name
        assert device.memory_bytes_per_s is not None
        assert 500e9 < device.memory_bytes_per_s < 10e12, name
        assert device.intra_bytes_per_s is None or 10e9 < device.intra_bytes_per_s < 1e12, name


def test_a_datasheet_row():
    h100 = find_device("h100-sxm-80gb")
    assert h100.memory_bytes == 80_000_000_000
    assert h100.visible_bytes is not None
    assert 79 * 2**30 < h100.visible_bytes < 80 * 2**30
    assert h100.peak_flops["bfloat16"] == h100.peak_flops["float16"] == 989e12
    assert h100.peak_flops["float32"] == pytest.approx(66.9e12)
    assert h100.memory_bytes_per_s == 3.35e12
    assert h100.intra_bytes_per_s == 450e9


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100-sxm-80gb", "h100-sxm-80gb"),
        ("H100_SXM_80GB", "h100-sxm-80gb"),
        ("a100-40g", "a100-sxm-40gb"),
        ("A100 SXM 80G", "a100-sxm-80gb"),
        ("4090", "rtx-4090-24gb"),
        ("b200", "b200-sxm-180gb"),
        ("gb200", "gb200-186gb"),
        ("mi300x", "mi300x-192gb"),
    ],
)
def test_names_and_what_is_enough_of_one(name, key):
    assert find_device(name).name == key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "h100-80g",
            "gpu 'h100-80g' is ambiguous\n    fix: write one of h100-sxm-80gb, h100-pcie-80gb",
        ),
        (
            "rtx4090",
            "gpu 'rtx4090' is not in the hardware table\n"
            "    fix: did you mean 'rtx-4090-24gb'? If not, state its "
            "facts: memory=48GB,bf16=181e12,hbm=960GB/s",
        ),
        (
            "abacus",
            "gpu 'abacus' is not in the hardware table\n    fix: write a name that `meshplan gpus`",
        ),
        ("", "gpu '' is not in the hardware table\n    fix: write a name that `meshplan gpus`"),
    ],
)
def test_names_that_do_not_say_which(name, message):
    with pytest.raises(SpecError) as caught:
        find_device(name, Origin("--gpu"))
    assert f"meshplan: 1 problem\n--gpu: {message}" in str(caught.value)


def test_a_cluster_counts_its_devices():
    device = Device(name="mine", memory_bytes=24 * 10**9)
    cluster = Cluster(device=device, nodes=2, gpus_per_node=4, inter=Link("ethernet", 12.5e9))
    assert cluster.num_gpus == 8
    assert cluster.intra is None


def test_torch_sees_about_what_the_name_says_in_gib():
    seen = {n: d.visible_bytes / d.memory_bytes for n, d in devices().items() if d.visible_bytes}
    assert len(seen) >= 7
    assert all(1.05 < share < 2**30 / 1e9 for share in seen.values()), seen


def test_a_device_of_ones_own_has_the_facts_that_are_stated():
    own = find_device(" hbm=960GB/s, memory = 48GB,bf16=181T")
    assert own.name == "memory=48GB,bf16=181T,hbm=960GB/s"
    assert find_device(own.name) == own
    assert own.usable_bytes == own.memory_bytes == 48 * 10**9
    assert dict(own.peak_flops) == {"bfloat16": 181e12}
    assert own.memory_bytes_per_s == 960e9
    assert own.size == "44.7 GiB, as stated"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16=181e12", "gpu 'bf16=181e12' does not state its memory"),
        ("memory=48GB,hmb=1TB/s", "has an unknown 'hmb'"),
        ("memory=48GB,memory=24GB", "has twice 'memory'"),
        ("memory=48", "memory: '48' has no unit and would mean 48 bytes; write 48GiB"),
        ("memory=48GB,hbm=960GB", "hbm: '960GB' is not a bandwidth"),
        ("memory=48GB,bf16=-1", "bf16: '-1'"),
        ("memory=", "memory: '' is not a size"),
        ("memory=48GB,", "has an unknown ''"),
    ],
)
def test_facts_that_are_none(text, message):
    with pytest.raises(SpecError) as caught:
        find_device(text, Origin("--gpu"))
    assert message in str(caught.value)
    assert "fix: write memory=48GB,bf16=181e12,hbm=960GB/s" in str(caught.value)
