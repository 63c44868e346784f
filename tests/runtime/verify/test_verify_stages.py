"""`meshplan verify` of tensor parallelism within stages that pass sharded values on."""

from __future__ import annotations

import pytest
from torch import nn

import meshplan
from meshplan.errors import Origin
from meshplan.runtime.estimate.scale_down import ModelSource, shrink
from meshplan.runtime.verify.verify import verify


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=16, num_heads=2, d_ff=64, num_layers=4, vocab_size=128, use_cache=False,
        dropout_rate=0.0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


@pytest.mark.parametrize("cuts_sequence", [False, True])
def test_what_stages_of_t5_send_is_as_long_as_predicted(cuts_sequence: bool):
    # Blocks pass a bias of every head on to each other, of which a tp rank has its own heads; with
    # sequence_parallel, the hidden states come from a norm that computes on a shard.
    plan = {
        "version": 1, "mesh": {"pp": 2, "tp": 2}, "tp_plan": "auto",
        "sequence_parallel": cuts_sequence, "batch": {"micro": 4, "seq_len": 16},
        "pipeline": {"microbatches": 2},
    }  # fmt: skip
    source = ModelSource(entry=f"{__name__}:t5", origin=Origin("<test>"))
    verdict = verify(shrink(meshplan.load_spec(plan), source), lambda line: None)
    assert verdict.is_ok, verdict.refusal or verdict.findings()
    assert all(not rank.sent and not rank.unknown for rank in verdict.ranks)
