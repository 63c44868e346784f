"""FLOPs of operators by shapes, where torch has no rule of its own."""

from __future__ import annotations

import pytest
import torch

from meshplan.runtime.trace.flops import flops_of

ROWS, FEATURES, OUT, GROUPS = 12, 8, 16, 3


@pytest.mark.parametrize(
    ("a", "b", "products"),
    [
        ((ROWS, FEATURES), (GROUPS, FEATURES, OUT), 1),
        ((FEATURES, ROWS), (ROWS, OUT), 1),
        ((GROUPS, ROWS, FEATURES), (GROUPS, FEATURES, OUT), GROUPS),
    ],
    ids=["groups of rows", "groups along the sum", "batched"],
)
def test_groups_take_what_one_product_over_all_of_them_takes(a, b, products):
    operands = torch.empty(a, device="meta"), torch.empty(b, device="meta")
    flops = flops_of(torch.ops.aten._grouped_mm.default, operands, {}, None)
    assert flops == 2 * products * ROWS * FEATURES * OUT
