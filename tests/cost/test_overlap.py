"""Gathers of nanotron's products that are sent while a part of the product runs.

Which seeded bug would this catch? Collectives hidden that nothing runs beside; products of the
whole tensor where only a rank's own part is at hand; a collective that takes longer than its
product and is hidden whole; FLOPs of a microbatch for those of a sample.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshplan.cost.collectives import all_gather
from meshplan.cost.rows import Rows, widths_of
from meshplan.cost.types import Sent
from meshplan.memory.decoder.sizes import Shape
from tests.bench.time_frameworks import _chain
from tests.cost.test_step import FP32, REAL, row

HIDDEN, MLP, VOCAB, TOKENS, TP = 512, 1536, 4096, 256, 4
"""Sizes of a model, tokens of a sample, and ranks of tp."""


@pytest.fixture(scope="module")
def block():
    shape = Shape(
        layers=4, hidden=HIDDEN, heads=8, kv_heads=8, head_dim=64, mlp=MLP, vocab=VOCAB,
        activation="silu",
    )  # fmt: skip
    chain = _chain(("nanotron", shape, TP), 4, TOKENS)
    return chain.kinds[chain.order[2]]


def flops(into: int, out: int) -> float:
    return 2.0 * TOKENS * into * out / TP


def test_a_block_hides_what_its_linear_layers_run_beside(block):
    whole = TOKENS * HIDDEN * 2
    qkv, up = flops(HIDDEN, 3 * HIDDEN), flops(HIDDEN, 2 * MLP)
    out, down = flops(HIDDEN, HIDDEN), flops(MLP, HIDDEN)
    assert block.sent_forward.gathers == 4
    assert sorted(block.sent_forward.overlapped) == [(whole, qkv / TP), (whole, up / TP)]
    assert block.sent_backward.gathers == 6
    expected = [(whole, each) for each in (qkv, qkv, up, up, out / TP, down / TP)]
    assert sorted(block.sent_backward.overlapped) == sorted(expected)


@pytest.mark.parametrize("samples", [1, 8])
def test_the_shorter_of_gather_and_product_is_hidden(samples):
    profile = replace(REAL, contention=0.25)
    rows = Rows(row(tp=8, micro=samples), profile, 8, widths_of(FP32))
    num_bytes = 1e8
    wire = float(all_gather(np.array([samples * num_bytes]), rows.along_tp, profile)[0])
    plain = Sent(gathers=2, gather_bytes=2 * num_bytes)
    peak = profile.efficiency * profile.peak_flops
    for share in (0.5, 3.0):
        work = share * wire * peak / samples
        beside = replace(plain, overlapped=((num_bytes, work),))
        saved = rows.sent(plain) - rows.sent(beside)
        assert saved == pytest.approx(0.75 * min(share, 1.0) * wire)
