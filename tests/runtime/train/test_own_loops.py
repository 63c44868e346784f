"""Training loops of one's own give the numbers of one process under every plan, or are refused.

Which seeded bug would this catch? A fused optimizer, a clipping or a GradScaler that takes only
some of the tensors, a norm of one rank's shard that is taken for the whole, values that are
assigned to `.data` and lost, an optimizer that sees one stage or one mesh and goes on.
"""

from __future__ import annotations

import pytest

from tests.helpers import more_own_loops, own_loops  # noqa: F401
from tests.helpers.own_loops import LOOPS, PLANS

PIPELINES = {"pp", "pp_full_shard"}
SHARDED = set(PLANS) - {"ddp", "pp"}
WITHOUT_UNITS = {"ddp"}
WORDS = {
    "Adafactor": (SHARDED, "use an optimizer that updates each element by itself"),
    "Adafactor_foreach": (SHARDED, "use an optimizer that updates each element by itself"),
    "lbfgs": (set(PLANS) - {"ddp", "full_shard", "hybrid"}, "another optimizer"),
    "clip_in_optimizer_hook": (PIPELINES, "set clip_grad_norm in the plan"),
    "gradient_penalty": (set(PLANS) - {"ddp"} - PIPELINES, "use strategy: ddp, without tp"),
    "ema_averaged_model": (set(PLANS), "parallelize a second model with the same plan"),
    "deepcopied": (set(PLANS), "parallelize a second model with the same plan"),
    "cast_after": (set(PLANS), "set precision in the plan"),
    "tied": (WITHOUT_UNITS, ""),
    "graph_retained": (WITHOUT_UNITS, ""),
    "step_in_backward": (WITHOUT_UNITS, ""),
}
"""Where loops are refused, and words of what they are told to write."""

LEFT = {
    ("weight_penalty", None),  # torch's own error names the meshes, or `full_tensor()` is told.
    ("compiled", "tp"), ("compiled", "auto"), ("compiled", "tp_full_shard"), ("compiled", "tp_ddp"),
    *(("compiled", plan) for plan in PIPELINES),
    # A stage without a head cannot make an optimizer of it.
    *(("group_added", plan) for plan in PIPELINES),
}  # fmt: skip
"""Cells without a verdict."""

OFTEN = (
    "AdamW_fused", "AdamW_foreach", "SGD_fused", "Rprop", "clip_norm", "clip_norm_one_by_one",
    "clip_value", "norm_by_item", "scaler_overflow_fused", "decay_by_hand", "hooks_of_optimizer",
)  # fmt: skip
"""Loops that every change runs, under the plans that mix tensors."""

CELLS = [
    pytest.param(
        loop, plan,
        marks=[] if loop in OFTEN and plan in ("tp", "tp_full_shard") else [pytest.mark.wide],
    )
    for loop in LOOPS
    for plan in PLANS
    if not {(loop, plan), (loop, None)} & LEFT
]  # fmt: skip


@pytest.mark.parametrize(("loop", "plan"), CELLS)
def test_a_loop_has_the_numbers_of_one_process(pool, loop, plan):
    found = pool(PLANS[plan][0]).run(own_loops.outcome, loop, plan)
    where, words = WORDS.get(loop, (set(), ""))
    for verdict, text in found:
        if verdict == "refused":
            is_told = plan in where and words in text
            assert is_told or (plan in PIPELINES and "train_step" in text), text
        else:
            assert verdict == "ok", text
            assert plan not in where
    assert len({verdict for verdict, _ in found}) == 1
