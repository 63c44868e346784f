"""Numbers as users write them and as they are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.units import (
    format_bytes,
    format_count,
    format_gib,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_memory,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("3e9", 3_000_000_000),
        ("3B", 3_000_000_000),
        ("3 b", 3_000_000_000),
        ("1.5B", 1_500_000_000),
        ("350M", 350_000_000),
        ("7k", 7_000),
        ("1_000", 1_000),
        ("+8", 8),
        (".5e1", 5),
        ("1e18", 10**18),
        ("999999999999999999", 999_999_999_999_999_999),
        (8, 8),
        (3e9, 3_000_000_000),
    ],
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "abc", "nan", "inf", "-inf", "3e9x", "3 GB", "0x10", "1e", "--3", True, None]
)
def test_what_is_no_count(text):
    with pytest.raises(ValueError, match=r" is not a count such as 8, 350M or 3e9$"):
        parse_count(text)


@pytest.mark.parametrize("text", ["0", "-3", "-1e400", "0.0", "1e-999"])
def test_counts_are_positive(text):
    with pytest.raises(ValueError, match=r" is not positive; give a count such as 8, 350M or 3e9$"):
        parse_count(text)


def test_counts_are_whole_and_bounded():
    with pytest.raises(ValueError, match=r"^'3.5' is not a whole number; give a count such as 8"):
        parse_count("3.5")
    with pytest.raises(ValueError, match=r"^'1e400' is larger than 1e18; give a count such as 8"):
        parse_count("1e400")


@given(st.integers(1, 10**18))
def test_every_count_is_read_exactly(count):
    assert parse_count(str(count)) == count
    assert parse_count(f"{count}e0") == count


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80 gib", 80 * 2**30),
        ("1.5KiB", 1536),
        ("512MiB", 512 * 2**20),
        ("2TiB", 2 * 2**40),
        ("7B", 7),
        ("7", 7),
        (".5B", 1),
        (4096, 4096),
    ],
)
def test_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "80G", "80 GiB/s", "big", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r" is not a size such as 80GiB, 80GB or 512MiB$"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("400 Gbit/s", 50e9),
        ("50GB/s", 50e9),
        ("50GBps", 50e9),
        ("1GiB/s", 2.0**30),
        ("3.35TB/s", 3.35e12),
        ("50_000_000_000", 50e9),
    ],
)
def test_bandwidths(text, bytes_per_s):
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        (parse_bandwidth, "50", "50GB/s"),
        (parse_bandwidth, 400, "400GB/s"),
        (parse_memory, "80", "80GiB"),
        (parse_memory, 24, "24GiB"),
    ],
)
def test_a_number_without_its_unit_is_no_silence(parse, text, meant):
    """80 bytes are no memory: that nothing fits into them is no answer."""
    with pytest.raises(ValueError, match=rf"has no unit and would mean .*; write {meant}$"):
        parse(text)
    assert parse_memory("512KiB") == 2**19
    assert parse_memory(2**20) == 2**20


@pytest.mark.parametrize("text", ["400G", "400Gb", "fast", "10Gib/s"])
def test_what_is_no_bandwidth(text):
    with pytest.raises(ValueError, match=r" is not a bandwidth such as 400Gb/s \(bits\) or 50GB/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20, "1.0 MiB"),
        (60_000_000_000, "55.9 GiB"),
        (2**50, "1,048,576.0 GiB"),
        (-(2**31), "-2.0 GiB"),
    ],
)
def test_bytes_are_shown(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_gib_whatever_the_size():
    assert (format_gib(2**20), format_gib(16e9)) == ("0.0 GiB", "14.9 GiB")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1"),
        (999_999, "999,999"),
        (1_000_000, "1.00 M"),
        (9_996_000, "10.0 M"),
        (99_960_000, "100 M"),
        (3_000_000_000, "3.00 B"),
        (70_553_706_496, "70.6 B"),
        (10**12, "1.00 T"),
    ],
)
def test_counts_are_shown(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 us"),
        (0.000_999_6, "1.0 ms"),
        (0.9996, "1.00 s"),
        (59.996, "1 min 0 s"),
        (3725.0, "1 h 2 min"),
    ],
)
def test_seconds_are_shown(seconds, text):
    assert format_seconds(seconds) == text
