"""What published PyTorch runs did besides the plan: their frameworks' profiles, from their code.

Which seeded bug would this catch? Gradients that wait in bf16, logits that are cast where the loss
takes them as they are, a wrapper around a model that runs bare, norms that keep what a fused kernel
keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.log.events import EventLog, Term
from meshplan.model.blueprint import from_mapping
from tests.bench.frameworks import native
from tests.bench.frameworks.torchtitan import Training, tape_of

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}  # fmt: skip
BLOCK = 512 * (512 + 2 * 256 + 512) + 3 * 512 * 1024 + 2 * 512
TOTAL = 2 * 8192 * 512 + 4 * BLOCK + 512
HOW = Training(batch=4, tokens=1024, recompute="full", is_compiled=True)
LOGITS = 4 * 1024 * 8192 * 2


def peak(log: EventLog) -> dict[Term, int]:
    """Bytes by term when most are live."""
    live, most, at = 0, 0, 0
    for number, event in enumerate(log.events):
        live += event.delta
        if live > most:
            most, at = live, number
    out: dict[Term, int] = dict.fromkeys(Term, 0)
    for event in log.events[: at + 1]:
        out[log.storages[event.storage].term] += event.delta
    return out


def made(log: EventLog, op: str) -> list[int]:
    """Sizes of what an operation made."""
    return [e.delta for e in log.events if e.delta > 0 and log.storages[e.storage].op == op]


def kempner(accumulate: int, how: Training = HOW, **mesh: int) -> EventLog:
    return native.log_of(CONFIG, mesh, how, native.KEMPNER, accumulate=accumulate)


def test_gradients_wait_whole_in_what_they_are_reduced_in() -> None:
    assert peak(kempner(2, dp_shard=4))[Term.GRADIENTS] == pytest.approx(4 * TOTAL, rel=0.01)
    assert peak(kempner(1, dp_shard=4))[Term.GRADIENTS] < TOTAL
    # Without data ranks nothing is wrapped, and with tp the older rule is nearer.
    assert peak(kempner(2, dp_shard=1))[Term.GRADIENTS] < 3 * TOTAL


def test_a_loss_of_bf16_logits_takes_four_of_them() -> None:
    """Logits, which the loop holds, their logarithms, and the gradient of each."""
    few, many = (peak(kempner(2, replace(HOW, batch=b), dp_shard=4)) for b in (8, 16))
    kept = 6 * 4 * 1024 * 512 * 2  # What each block, the last norm and the head begin with.
    more = sum(many.values()) - sum(few.values())
    assert more == pytest.approx(2 * (4 * LOGITS + kept), rel=0.005)
    assert max(made(kempner(2, dp_shard=4), "_log_softmax")) == LOGITS
    assert max(made(kempner(2, dp_shard=1), "_log_softmax")) == 2 * LOGITS


def bare(how: Training) -> EventLog:
    return native.log_of(CONFIG, {"dp_shard": 1}, how, native.TORCHTUNE)


def test_one_process_has_no_wrapper() -> None:
    terms = peak(bare(replace(HOW, recompute="none")))
    assert terms[Term.PARAMETERS] == pytest.approx(2 * TOTAL, rel=0.01)
    assert terms[Term.OPTIMIZER] == pytest.approx(4 * TOTAL, rel=0.01)
    assert terms[Term.GATHERED] == terms[Term.COMMUNICATION] == 0


def test_norms_in_fp32_keep_it() -> None:
    """Two bytes more for what is scaled, two for the width, for each of nine norms."""
    eager = replace(HOW, recompute="none", is_compiled=False)
    profile = replace(native.TORCHTUNE, norms_in_fp32=False)
    fused = native.log_of(CONFIG, {"dp_shard": 1}, eager, profile)
    more = sum(peak(bare(eager)).values()) - sum(peak(fused).values())
    one = 4 * 1024 * 512 * 2
    assert more == pytest.approx(9 * 2 * one, rel=0.15)
    assert not made(bare(HOW), "rsqrt_mul")


def test_a_fused_loss_keeps_the_logits_alone() -> None:
    chunked = replace(HOW, recompute="none", chunks=8)
    assert not made(bare(chunked), "_log_softmax")
    assert made(bare(replace(chunked, is_compiled=False)), "_log_softmax")
    assert peak(bare(chunked))[Term.LOSS] < 1.2 * LOGITS


@pytest.mark.parametrize("tp", [1, 2])
def test_tp_cuts_what_products_make_of_all_tokens(tp: int) -> None:
    """Queries, keys, values and both inner widths; what goes back to the stream is whole."""
    tape = tape_of(shape_of(from_mapping(CONFIG)), replace(HOW, tp=tp))
    made = [
        tape.nbytes[row.makes[0]] for row in tape.rows
        if row.op == "mm" and row.module.startswith("model.layers.0.")
    ]  # fmt: skip
    cut, whole = (512, 256, 256, 1024, 1024), (512, 512)
    widths = [*(width // tp for width in cut), *whole]
    assert sorted(made) == sorted(4 * 1024 * 2 * width for width in widths)
