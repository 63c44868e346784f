"""The closed forms, in numbers and in symbols, and the questions put to them."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.textbook.formulas import LORA_ROWS, ROWS, FormulaRow
from meshplan.textbook.inverse import max_params, min_gpus, tabulate

a, n, nodes, t = sympy.symbols("a n nodes t", positive=True)

# (strategy, precision) -> the formula as it is printed, and as the textbook adds it up.
TEXTBOOK = {
    ("ddp", "fp32"): ("20*a", 4 * a + 4 * a + 8 * a + 4 * a),
    ("ddp", "mixed"): ("18*a", 4 * a + 2 * a + 2 * a + 8 * a + 2 * a),
    ("zero1", "fp32"): ("8*a + 8*a/n", 4 * a + 4 * a + 8 * a / n),
    ("zero2", "fp32"): ("4*a + 12*a/n", 4 * a + 12 * a / n),
    ("full_shard", "fp32"): ("16*a/n", 16 * a / n),
    ("hybrid_shard", "fp32"): ("16*a/(n/nodes)", 16 * a / (n / nodes)),
    ("ddp", "lora"): ("2*a + 20*t", 2 * a + 4 * t + 4 * t + 8 * t + 4 * t),
    ("zero1", "lora"): ("2*a + 8*t + 8*t/n", 2 * a + 4 * t + 4 * t + 8 * t / n),
    ("zero2", "lora"): ("2*a + 4*t + 12*t/n", 2 * a + 4 * t + 12 * t / n),
    ("full_shard", "lora"): ("2*a/n + 16*t/n", (2 * a + 16 * t) / n),
    ("hybrid_shard", "lora"): (
        "2*a/(n/nodes) + 16*t/(n/nodes)", (2 * a + 16 * t) / (n / nodes)
    ),
}  # fmt: skip

rows = st.sampled_from(ROWS)
every = st.sampled_from((*ROWS, *LORA_ROWS))


def test_rows_are_the_textbook_in_order():
    assert [(row.strategy, row.precision) for row in (*ROWS, *LORA_ROWS)] == list(TEXTBOOK)


@pytest.mark.parametrize(
    "row", [*ROWS, *LORA_ROWS], ids=lambda row: f"{row.strategy}-{row.precision}"
)
def test_symbols_and_print_agree_with_the_textbook(row: FormulaRow):
    written, total = TEXTBOOK[row.strategy, row.precision]
    assert row.formula == written
    symbols = {"a": a, "n": n, "nodes": nodes, "t": t}
    assert sympy.simplify(row.total(*symbols.values()) - total) == 0
    assert sympy.simplify(sympy.sympify(written, symbols) - total) == 0
    for name, term in row.evaluate(*symbols.values()).items():
        assert sympy.simplify(sympy.sympify(row.written()[name]) - sympy.sympify(str(term))) == 0
    assert row.source


@given(
    every, st.integers(1, 10**13), st.integers(1, 10**9), st.integers(1, 100), st.integers(1, 64)
)
def test_ints_are_the_symbols_rounded_up_to_whole_elements(row, num, adapters, per_node, num_nodes):
    num_gpus = per_node * num_nodes
    numbers = {a: num, n: num_gpus, nodes: num_nodes, t: adapters}
    total = row.total(*numbers.values())
    assert isinstance(total, int)
    assert 0 <= total - row.total(*numbers).subs(numbers) < 18


@given(rows, st.integers(1, 10**6), st.integers(1, 16), st.integers(1, 8))
def test_all_gpus_together_hold_the_model_at_least_once(row, num_params, per_node, num_nodes):
    num_gpus = per_node * num_nodes
    assert row.total(num_params, num_gpus, num_nodes) * num_gpus >= 16 * num_params


def test_the_table():
    table = tabulate(num_params=3 * 10**9, num_gpus=8, nodes=2, memory_bytes=16 * 10**9)
    assert [row.bytes_per_gpu for row in table] == [
        60_000_000_000, 54_000_000_000, 27_000_000_000, 16_500_000_000, 6_000_000_000,
        12_000_000_000,
    ]  # fmt: skip
    assert [row.fits for row in table] == [False, False, False, False, True, True]
    assert table[3].left_bytes == -500_000_000
    assert [row.fits for row in tabulate(num_params=1, num_gpus=1, nodes=1)] == [None] * 6


@settings(max_examples=40)
@given(rows, st.integers(1, 9), st.integers(1, 4), st.integers(1, 700))
def test_the_largest_model_is_the_largest(row, per_node, num_nodes, memory_bytes):
    num_gpus = per_node * num_nodes
    found = max_params(row, num_gpus=num_gpus, nodes=num_nodes, memory_bytes=memory_bytes).value
    fitting = (
        size
        for size in range(1, memory_bytes * num_gpus // 16 + num_gpus + 1)
        if row.total(size, num_gpus, num_nodes) <= memory_bytes
    )
    assert found == max(fitting, default=None)


@settings(max_examples=60)
@given(every, st.integers(1, 200), st.integers(1, 300), st.integers(1, 4), st.integers(1, 4000))
def test_the_fewest_gpus_are_the_fewest(row, num_params, adapters, num_nodes, memory_bytes):
    found = min_gpus(
        row, num_params=num_params, num_adapter_params=adapters, nodes=num_nodes,
        memory_bytes=memory_bytes,
    ).value  # fmt: skip
    fitting = (
        num_gpus
        for num_gpus in range(num_nodes, 300 * num_nodes + 1, num_nodes)
        if row.total(num_params, num_gpus, num_nodes, adapters) <= memory_bytes
    )
    assert found == next(fitting, None)


def test_answers_show_what_was_solved():
    by_row = {(row.strategy, row.precision): row for row in ROWS}
    zero1 = by_row["zero1", "fp32"]
    answer = max_params(zero1, num_gpus=8, nodes=1, memory_bytes=80 * 10**9)
    assert (answer.solution, answer.value) == ("a = M*n/(8*n + 8)", 8_888_888_888)
    answer = min_gpus(zero1, num_params=3 * 10**9, nodes=1, memory_bytes=40 * 10**9)
    assert (answer.solution, answer.value) == ("n = 8*a/(M - 8*a)", 2)
    answer = min_gpus(zero1, num_params=3 * 10**9, nodes=1, memory_bytes=24 * 10**9)
    assert answer.value is None
    answer = min_gpus(by_row["ddp", "fp32"], num_params=10**9, nodes=2, memory_bytes=20 * 10**9)
    assert (answer.solution, answer.value) == ("", 2)
