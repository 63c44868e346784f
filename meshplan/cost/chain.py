"""Read a model as a chain of blocks, and the cost of each kind of block, from the ops of a tape.

An op of a tape has the values that it reads, makes, saves and sends (`memory.tape.ops`). FLOPs and
bytes moved follow from their sizes; the saved bytes follow from playing the tape. Equal blocks are
one kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from meshplan.cost.fused_reading import FusedReading
from meshplan.cost.reading import Reading, TapeSection, is_chosen
from meshplan.cost.tallies import sent, tally
from meshplan.cost.tapes import decoder_tape
from meshplan.cost.types import BlockKind as Kind
from meshplan.cost.types import Chain as Chain
from meshplan.cost.types import Sent as Sent
from meshplan.cost.types import Tally as Tally
from meshplan.errors import PlanError, Problem
from meshplan.layout.optimizers import product_flops
from meshplan.memory.decoder.experts import Spread
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.decoder.tp_ops import TpPlanOnTape
from meshplan.memory.tape.tape import Tape, TapeOp
from meshplan.model.graph import ModelGraph, is_inside

BEFORE: Final = "(before the blocks)"
AFTER: Final = "(after the blocks)"
Triple = tuple[float, float, float]
"""One number for each kind of recomputation, by index into `grid.RECOMPUTE`."""


def chain_of(
    graph: ModelGraph,
    *,
    seq_len: int,
    element_bytes: int,
    tp: int = 1,
    ep: int = 1,
    is_sequence: bool = False,
    is_cuda: bool = True,
    cuts_loss: bool = False,
    loss_chunks: int = 1,
    styled: TpPlanOnTape | None = None,
    saves: Mapping[int, frozenset[str]] = MappingProxyType({}),
    is_compiled: bool = False,
) -> Chain:
    """Return the chain of a decoder of a known family, as one rank of tp and ep computes it.

    Args:
        graph: The model, as `blueprint` returns it.
        seq_len: Tokens of one sample, before cp splits them.
        element_bytes: Bytes per element of the compute dtype.
        tp: Ranks along tp.
        ep: Ranks along ep. Each is assumed to receive equally many tokens.
        is_sequence: If True, activations between blocks are sharded along the sequence over tp.
        is_cuda: If True, CUDA kernels run.
        cuts_loss: If True, the loss is computed on logits that stay sharded over the vocabulary.
        loss_chunks: Number of chunks of tokens for which head and loss are computed one by one.
        styled: The plan's tensor-parallel styles by module; None shards whatever can be sharded.
        saves: By number of a block, the words of `save:` whose ops selective recomputation saves;
            blocks that are left out save `spec.PRODUCTS`.
        is_compiled: If True, each block is compiled with `torch.compile`.

    Raises:
        PlanError: The model is of no known family, or tp or ep does not divide its sizes.
    """
    shape = shape_of(graph)
    sizes = {
        "attention heads": shape.heads,
        "key/value heads": shape.kv_heads,
        "columns of the feed-forward": shape.mlp,
    }
    if is_sequence:
        sizes["tokens"] = seq_len
    if shape.experts % ep:
        what = f"{shape.experts} experts do not divide by ep {ep}"
        raise PlanError(Problem(what, fix="choose another size for ep"))
    if problems := [
        Problem(f"{size} {name} do not divide by tp {tp}", fix="choose another size for tp")
        for name, size in sizes.items()
        if size % tp
    ]:
        raise PlanError(problems)

    block_keys = tuple((shape.is_sparse(n), saves.get(n)) for n in range(shape.layers))
    shown = shown_of(block_keys)
    few = replace(
        shape,
        layers=len(shown),
        dense=frozenset(place for place, n in enumerate(shown) if n in shape.dense),
    )
    saved = {place: saves[n] for place, n in enumerate(shown) if n in saves}

    def write(_: int, batch: int) -> Tape:
        run = MicrobatchSpec(batch=batch, seq_len=seq_len, element_bytes=element_bytes, tp=tp,
                  is_sequence=is_sequence and tp > 1, is_cuda=is_cuda,
                  spread=Spread(ep), loss_chunks=loss_chunks, saves=saved)  # fmt: skip
        if styled is not None:
            return tape_of(few, replace(run, styled=styled.of_any_block(), is_chain=True))
        return decoder_tape(few, run, cuts_loss=cuts_loss)

    return chain_of_tapes(
        write,
        num_blocks=shape.layers,
        seq_len=seq_len,
        element_bytes=element_bytes,
        block_keys=block_keys,
        is_compiled=is_compiled,
    )


def with_optimizer(chain: Chain, graph: ModelGraph, optimizer: str) -> Chain:
    """Return a chain with the FLOPs of the optimizer's matrix products.

    Args:
        chain: The chain.
        graph: The model.
        optimizer: The optimizer's name in a plan. Only Muon's step multiplies matrices.
    """
    if not product_flops(optimizer, (1, 1)):
        return chain
    flops, tensors = Counter[str](), graph.tensors
    for fqn, part in parts_of(graph).items():
        flops[part] += product_flops(optimizer, tensors[fqn].shape) * tensors[fqn].trainable
    kinds: dict[Kind, int] = {}
    order = []
    for number, part in zip(chain.order, parts_of_places(chain), strict=True):
        # Several places may follow the blocks: the first of them stands for all.
        kind = replace(chain.kinds[number], step_flops=float(flops.pop(part, 0)))
        order.append(kinds.setdefault(kind, len(kinds)))
    return replace(chain, kinds=tuple(kinds), order=tuple(order))


def parts_of(graph: ModelGraph) -> dict[str, str]:
    """Return {fqn of a parameter: its block, or `BEFORE` or `AFTER` if it is in none}."""
    blocks, out, part = graph.blocks(), {}, BEFORE
    for info in graph.parameters:
        block = next((each for each in blocks if is_inside(info.fqn, each)), "")
        part = block or (BEFORE if part == BEFORE else AFTER)
        out[info.fqn] = part
    return out


def parts_of_places(chain: Chain) -> tuple[str, ...]:
    """Return the part of the model that each place of a chain is, as in `parts_of`."""
    part, out = BEFORE, []
    for name in chain.names:
        part = name or (BEFORE if part == BEFORE else AFTER)
        out.append(part)
    return tuple(out)


def chain_of_tapes(
    write: Callable[[int, int], Tape],
    *,
    num_blocks: int,
    seq_len: int,
    element_bytes: int,
    keeps: Callable[[TapeOp], bool] = is_chosen,
    block_keys: Sequence[Hashable] = (),
    is_compiled: bool = False,
) -> Chain:
    """Return the chain of a model with few kinds of blocks, read from tapes that `write` makes.

    Args:
        write: Maps (number of blocks, samples) to the tape of a microbatch. The `units` of the tape
            are the blocks that `shown_of` selects.
        num_blocks: Blocks of the whole model.
        seq_len: Tokens of one sample.
        element_bytes: Bytes per element of the compute dtype.
        keeps: Returns True if selective recomputation saves the results of an op.
        block_keys: For each block, a key that is equal for blocks of one kind; () if all are equal.
        is_compiled: If True, each block is compiled with `torch.compile`.

    Assumes: apart from the first and the last block, blocks with the same key are equal.
    """
    block_keys = block_keys or (None,) * num_blocks
    shown = shown_of(block_keys)
    # The cost of two samples minus that of one is the cost per sample; the rest occurs once.
    read = FusedReading if is_compiled else Reading
    one, two = (
        read(write(len(shown), batch), seq_len, element_bytes, keeps=keeps) for batch in (1, 2)
    )
    places = list(zip(one.places(), two.places(), strict=True))
    found = _fold([_kind(*pair) for pair in places], [block_keys[n] for n in shown])
    blocks = [n for n, kind in enumerate(found) if kind.has_options]
    before, after = found[: blocks[0]], found[blocks[-1] + 1 :]
    # Let an inner block stand for its kind if there is one, since the first and the last block may
    # save other tensors.
    standing = {block_keys[n]: blocks[place] for place, n in enumerate(shown)}
    standing |= {block_keys[n]: blocks[place] for place, n in [*enumerate(shown)][1:-1]}
    inner = [found[standing[block_key]] for block_key in block_keys]
    inner[0], inner[-1] = found[blocks[0]], found[blocks[-1]]
    name = places[blocks[0]][0].name.rpartition(".")[0]
    kinds: dict[Kind, int] = {}
    order = [kinds.setdefault(kind, len(kinds)) for kind in (*before, *inner, *after)]
    names = [""] * len(before) + [f"{name}.{n}" for n in range(num_blocks)] + [""] * len(after)
    return Chain(kinds=tuple(kinds), order=tuple(order), names=tuple(names))


def _kind(one: TapeSection, two: TapeSection) -> Kind:
    """Return the kind of a section of a tape, read with one sample (`one`) and with two (`two`)."""
    return Kind(
        name=one.name,
        has_options=one.is_block,
        numels=one.numels,
        forward=tally(one.forward, two.forward),
        backward=tally(one.backward, two.backward),
        recompute=tuple(map(tally, one.recompute, two.recompute)),  # type: ignore[arg-type]
        sent_forward=sent(one.forward, two.forward),
        sent_backward=sent(one.backward, two.backward),
        sent_recompute=tuple(map(sent, one.recompute, two.recompute)),  # type: ignore[arg-type]
        saved_bytes=_fewest(one.saved_bytes, two.saved_bytes),
        transient_bytes=_fewest(one.transient_bytes, two.transient_bytes),
        # Floats, because a numpy integer column times a large Python int overflows.
        boundary_bytes=float(one.boundary_bytes),
        context_bytes=float(one.context_bytes),
        exchanged_bytes=float(one.exchanged_bytes),
        scores_flops=float(one.scores_flops),
        expert_numel=one.expert_numel,
        num_experts=one.num_experts,
    )


def _fewest(one: Sequence[int], two: Sequence[int]) -> Triple:
    """Return a lower bound of the bytes per sample, valid for any number of samples.

    Args:
        one: Bytes with one sample, by index into `grid.RECOMPUTE`.
        two: Bytes with two samples, likewise.

    The first sample may need more than a further sample, because some tensors, such as rotary
    angles, exist once. It may also need less, because a batch of one is gathered without a copy.
    """
    a, b, c = (float(min(x, y - x)) for x, y in zip(one, two, strict=True))
    return a, b, c


def shown_of(block_keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the blocks to put on a tape: the first, the last, and one of each kind between."""
    last, between = len(block_keys) - 1, dict[Hashable, int]()
    for number in range(1, last):
        between.setdefault(block_keys[number], number)
    return tuple(dict.fromkeys((0, *between.values(), last)))


def _fold(kinds: Sequence[Kind], block_keys: Sequence[Hashable]) -> list[Kind]:
    """Return the kinds, with a first or last block of equal work given the kind of an inner block.

    An end block that does the same work as an inner block may still save other bytes: no
    recomputation saves the output of the last block, and the op that reads it may save a copy. Such
    a difference, if it is the same under every option, is added to the section next to the block. A
    search is faster with fewer kinds, which is worth this inaccuracy.

    Args:
        kinds: The kind of each section of the tape, in order.
        block_keys: The key of each block on the tape.

    Returns:
        The kind of each section, in order.
    """
    out = list(kinds)
    blocks = [n for n, kind in enumerate(kinds) if kind.has_options]
    middles = dict(zip(block_keys, blocks, strict=True))
    middles |= dict(zip(block_keys[1:-1], blocks[1:-1], strict=True))
    for block_key, n, beside in (
        (block_keys[0], blocks[0], blocks[0] - 1), (block_keys[-1], blocks[-1], blocks[-1] + 1),
    ):  # fmt: skip
        middle = kinds[middles[block_key]]
        alike = replace(
            kinds[n], name=middle.name, saved_bytes=middle.saved_bytes,
            transient_bytes=middle.transient_bytes,
        )  # fmt: skip
        if alike != middle or not 0 <= beside < len(kinds):
            continue
        pairs = zip(kinds[n].saved_bytes, middle.saved_bytes, strict=True)
        more = min(own - usual for own, usual in pairs)
        a, b, c = (max(0.0, saved + more) for saved in out[beside].saved_bytes)
        out[beside] = replace(out[beside], saved_bytes=(a, b, c))
        out[n] = middle
    for block_key, place in middles.items():
        same = [n for n, own in zip(blocks, block_keys, strict=True) if own == block_key]
        middle = kinds[place]
        transient = _least([kinds[n].transient_bytes for n in same])
        as_one = replace(middle, name=kinds[same[0]].name, transient_bytes=transient)
        out = [as_one if kind == middle else kind for kind in out]
    return out


def _least(triples: Sequence[Triple]) -> Triple:
    """Return the smallest number of each column."""
    a, b, c = (min(column) for column in zip(*triples, strict=True))
    return a, b, c
