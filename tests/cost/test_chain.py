"""Chains of blocks: work counted against closed forms, memory against the played tape."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshplan.cost.chain import Chain, chain_of, chain_of_tapes, shown_of
from meshplan.cost.grid import RECOMPUTE
from meshplan.errors import PlanError
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.log.events import Term
from meshplan.memory.tape.op import Grad, Tape
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.memory.tape.tape import RecomputeSpan, play
from meshplan.model.blueprint import from_config, from_mapping

HIDDEN, MLP, LAYERS, HEADS, KV, VOCAB, LENGTH = 64, 160, 5, 8, 4, 96, 48
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 97,
    "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH,
}  # fmt: skip


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    out = {}
    for config in (LLAMA, GPT2):
        path = tmp_path_factory.mktemp("configs") / "config.json"
        path.write_text(json.dumps(config))
        out[config["model_type"]] = from_config(path)
    return out


def total(chain: Chain, figure) -> float:
    return sum(figure(chain.kinds[number]) for number in chain.order)


def products(graph) -> int:
    """Elements of the weights that are multiplied with: all matrices but tables of lookups."""
    tables = ("embed_tokens", "wte", "wpe")
    out = sum(t.numel for t in graph.parameters
              if len(t.shape) == 2 and t.module.rpartition(".")[2] not in tables)  # fmt: skip
    tied = [t for t in graph.parameters if t.aliases]
    return out + sum(t.numel for t in tied)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flops_are_those_of_the_products(graphs, family):
    graph = graphs[family]
    chain = chain_of(graph, seq_len=LENGTH, element_bytes=2)
    scores = LAYERS * 2 * LENGTH**2 * HIDDEN
    assert total(chain, lambda k: k.forward.flops) == 2 * LENGTH * products(graph) + scores
    assert total(chain, lambda k: k.scores_flops) == scores
    back = 4 * LENGTH * products(graph) + 2.5 * scores
    assert total(chain, lambda k: k.backward.flops) == back


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_parameter_is_in_one_place(graphs, family):
    graph = graphs[family]
    chain = chain_of(graph, seq_len=LENGTH, element_bytes=2)
    assert total(chain, lambda k: sum(k.numels)) == graph.num_params
    assert [name for name in chain.names if name] == list(graph.blocks())
    # One block is as good as another: a search folds them.
    assert len(chain.kinds) == 3


@pytest.mark.parametrize("again", range(len(RECOMPUTE)), ids=RECOMPUTE)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_bytes_add_up_to_what_forward_leaves(graphs, family, again):
    shape, samples = shape_of(graphs[family]), 3
    chain = chain_of(graphs[family], seq_len=LENGTH, element_bytes=4)
    tape = tape_of(shape, MicrobatchSpec(batch=samples, seq_len=LENGTH, element_bytes=4))
    tape.rows = [row._replace(is_kept=row.op in ("mm", "attention")) for row in tape.rows]
    if again:
        tape.spans = [RecomputeSpan(start, end, True, again == 1) for _, start, end in tape.units]
    work = play(tape, sums_in_place=True)
    names = work.log.phases
    live = before = most = left = 0
    is_done = False
    for delta, storage, phase in work.log.events:
        if work.log.storages[storage].term == Term.GRADIENTS:
            continue
        live += delta
        if names[phase] == "before":
            before = live
        # What the training loop drops before backward makes anything is not saved for it.
        is_done = is_done or (names[phase] == "backward" and delta > 0)
        left = left if is_done else live
        most = max(most, live)
    saved = [samples * chain.kinds[n].saved_bytes[again] for n in chain.order]
    # Tables of angles and positions do not grow with samples, so they are left out.
    tables = LENGTH * (HIDDEN + 16) * 4
    assert -tables <= sum(saved) - (left - before) <= 0
    peaks = [
        sum(saved[: place + 1]) + samples * chain.kinds[n].transient_bytes[again]
        for place, n in enumerate(chain.order)
    ]
    assert -tables <= max(peaks) - (most - before) <= 0


def test_recomputation_stops_at_the_last_tensor_that_is_kept(graphs):
    chain = chain_of(graphs["llama"], seq_len=LENGTH, element_bytes=2)
    (block,) = [kind for kind in chain.kinds if kind.has_options]
    nothing, selective, full = block.recompute
    assert nothing.kernels == 0 == selective.flops
    # The result of the last product is of no use to backward.
    assert full.flops == block.forward.flops - 2 * LENGTH * MLP * HIDDEN
    assert 0 < selective.moved_bytes == full.moved_bytes < block.forward.moved_bytes
    none_saved, selective_saved, full_saved = block.saved_bytes
    assert none_saved > selective_saved > full_saved == LENGTH * HIDDEN * 2


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_cuts_the_work_and_sends_whole_activations(graphs, tp):
    whole = chain_of(graphs["llama"], seq_len=LENGTH, element_bytes=2)
    part = chain_of(graphs["llama"], seq_len=LENGTH, element_bytes=2, tp=tp)
    assert total(part, lambda k: k.forward.flops) * tp == total(whole, lambda k: k.forward.flops)
    (block,) = [kind for kind in part.kinds if kind.has_options]
    size, sent = LENGTH * HIDDEN * 2, block.sent_forward
    assert (sent.all_reduces, sent.gathers) == (2, 0)
    assert sent.all_reduce_bytes == 2 * size
    assert block.boundary_bytes == size
    assert block.sent_backward == sent
    head = part.kinds[part.order[-1]]
    logits = LENGTH * VOCAB * 2
    assert head.sent_forward.gather_bytes == logits
    assert sum(head.numels) == VOCAB * HIDDEN // tp + HIDDEN
    assert sum(part.kinds[part.order[0]].numels) == VOCAB * HIDDEN // tp
    cut = chain_of(graphs["llama"], seq_len=LENGTH, element_bytes=2, tp=tp, cuts_loss=True)
    assert cut.kinds[-1].sent_forward.gather_bytes == 0
    assert cut.kinds[-1].sent_forward.all_reduce_bytes == 4 * LENGTH * 4
    assert head.saved_bytes[0] - cut.kinds[-1].saved_bytes[0] >= (tp - 1) * logits // tp


def test_a_vocabulary_that_does_not_divide_stays_whole(graphs):
    chain = chain_of(graphs["gpt2"], seq_len=LENGTH, element_bytes=2, tp=2)
    assert 97 * HIDDEN in chain.kinds[chain.order[0]].numels


def test_a_tied_table_is_cut_once():
    tied = from_mapping(LLAMA | {"tie_word_embeddings": True})
    chain = chain_of(tied, seq_len=LENGTH, element_bytes=2, tp=2)
    assert chain.kinds[chain.order[0]].numels == (VOCAB * HIDDEN // 2,)
    assert chain.kinds[chain.order[-1]].numels == (HIDDEN,)


def test_sizes_that_tp_does_not_divide_are_refused(graphs):
    with pytest.raises(PlanError, match=r"4 key/value heads do not divide by tp 8"):
        chain_of(graphs["llama"], seq_len=LENGTH, element_bytes=2, tp=8)
    with pytest.raises(PlanError, match="sequence_parallel does not run"):
        chain_of(graphs["llama"], seq_len=LENGTH, element_bytes=2, tp=4, is_sequence=True)


def test_few_blocks(graphs):
    graph = graphs["llama"]
    many = chain_of(graph, seq_len=LENGTH, element_bytes=2)
    for layers in (1, 2):
        fewer = replace(graph, config={**graph.config, "num_hidden_layers": layers})
        chain = chain_of(fewer, seq_len=LENGTH, element_bytes=2)
        assert chain.order == (0, *[1] * layers, 2)
        assert chain.kinds[1].forward == many.kinds[1].forward


WORDS = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("chunks", [2, 8])
def test_a_loss_in_chunks_computes_as_much_in_more_kernels_and_holds_less(chunks):
    """The products are those of forward and backward; each chunk reads the weight anew."""
    graph = from_mapping(WORDS)
    whole = chain_of(graph, seq_len=LENGTH, element_bytes=2).kinds[-1]
    parts = chain_of(graph, seq_len=LENGTH, element_bytes=2, loss_chunks=chunks).kinds[-1]
    assert parts.numels == whole.numels
    both = [kind.forward.flops + kind.backward.flops for kind in (whole, parts)]
    assert both[0] == pytest.approx(both[1])
    assert parts.backward.flops == 0
    per_chunk = (parts.forward.kernels - 10) / chunks
    assert 10 < per_chunk < 20
    weight = 2 * sum(whole.numels)
    read = parts.forward.weight_bytes - parts.backward.weight_bytes
    assert read == pytest.approx((4 * chunks - 4) * weight, rel=0.1)
    assert parts.saved_bytes[0] < whole.saved_bytes[0] / 4
    assert parts.transient_bytes[0] < whole.transient_bytes[0] / (chunks / 1.5)


def test_a_last_block_that_works_otherwise_is_a_kind_of_its_own():
    """Those between are what they are, though they look like the last one too."""
    widths = [1, 1, 1, 1, 3]

    def write(num: int, batch: int) -> Tape:
        w = TapeBuilder(Tape(), 2, 2, is_cuda=True)
        tape, x = w.tape, w.tape.value(LENGTH * batch * 8)
        tape.before[x] = Term.INPUTS
        x = w.at("embed").embedding(x, VOCAB, HIDDEN, "table")
        for number, place in enumerate(shown_of([""] * len(widths))):
            start, at = len(tape.rows), w.at(f"blocks.{number}")
            for product in range(widths[place]):
                x = at.linear(x, HIDDEN, HIDDEN, f"product{product}")
            tape.units.append((f"blocks.{number}", start, len(tape.rows)))
        assert len(tape.units) == num
        tape.loss_start = len(tape.rows)
        w.row("sum", (x,), 4, grads=(Grad(x, w.size(x)),))
        return tape

    chain = chain_of_tapes(write, num_blocks=len(widths), seq_len=LENGTH, element_bytes=2)
    blocks = [chain.kinds[n] for n, name in zip(chain.order, chain.names, strict=True) if name]
    assert [kind.forward.flops for kind in blocks] == [
        2 * LENGTH * HIDDEN**2 * width for width in widths
    ]
