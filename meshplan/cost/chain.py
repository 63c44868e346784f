"""A model as a chain of blocks, and what each kind of block costs: read off the rows of a tape.

Rows say what an operation reads, makes, keeps and sends (`memory.tape.ops`); flops and bytes moved
follow from the same sizes, what is saved from playing them. Alike blocks are one kind with a count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from meshplan.cost.reading import Reading, TapeSection, is_chosen
from meshplan.cost.tallies import sent, tally
from meshplan.cost.tapes import decoder_tape
from meshplan.cost.types import BlockKind as Kind
from meshplan.cost.types import Chain as Chain
from meshplan.cost.types import Sent as Sent
from meshplan.cost.types import Tally as Tally
from meshplan.errors import PlanError, Problem
from meshplan.memory.decoder.experts import Spread
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.decoder.tp_ops import TpPlanOnTape
from meshplan.memory.tape.tape import Tape, TapeOp
from meshplan.model.graph import ModelGraph

Triple = tuple[float, float, float]


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
) -> Chain:
    """A decoder of a known family, as one rank of tp and ep computes it.

    Args:
        graph: Of `blueprint`.
        seq_len: Tokens of one sample, before cp cuts them.
        element_bytes: Of the dtype that is computed in.
        ep: Ranks that the experts of a block are spread over, which are sent as many tokens each.
        is_sequence: Whether activations between blocks are cut along the sequence over tp.
        is_cuda: Whether CUDA's kernels run.
        cuts_loss: Whether the loss is computed on logits that stay cut.
        loss_chunks: Parts of the tokens over which head and loss are computed one by one.
        styled: Which modules tp cuts, as a plan has it; None cuts all that can be cut.

    Raises:
        PlanError: The model's operations are not known, or tp does not divide its sizes.
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

    looks = tuple(map(shape.is_sparse, range(shape.layers)))
    shown = shown_of(looks)
    few = replace(
        shape,
        layers=len(shown),
        dense=frozenset(place for place, n in enumerate(shown) if n in shape.dense),
    )

    def write(_: int, batch: int) -> Tape:
        run = MicrobatchSpec(batch=batch, seq_len=seq_len, element_bytes=element_bytes, tp=tp,
                  is_sequence=is_sequence and tp > 1, is_cuda=is_cuda,
                  spread=Spread(ep), loss_chunks=loss_chunks)  # fmt: skip
        if styled is not None:
            return tape_of(few, replace(run, styled=styled.of_any_block(), is_chain=True))
        return decoder_tape(few, run, cuts_loss=cuts_loss)

    return chain_of_tapes(
        write, num_blocks=shape.layers, seq_len=seq_len, element_bytes=element_bytes, looks=looks
    )


def chain_of_tapes(
    write: Callable[[int, int], Tape],
    *,
    num_blocks: int,
    seq_len: int,
    element_bytes: int,
    keeps: Callable[[TapeOp], bool] = is_chosen,
    looks: Sequence[Hashable] = (),
) -> Chain:
    """The chain of a model of few kinds of blocks whose tapes somebody writes.

    Args:
        write: (blocks, samples) -> the tape of a microbatch, its blocks in `units`; those that
            `shown_of` names.
        num_blocks: Of the model.
        keeps: As in `reading.Reading`.
        looks: Of each block, what it has in common with those of its kind; () where all are alike.

    Assumes: blocks between the first and the last one that look alike are alike.
    """
    looks = looks or (None,) * num_blocks
    shown = shown_of(looks)
    one, two = (
        Reading(write(len(shown), batch), seq_len, element_bytes, keeps=keeps) for batch in (1, 2)
    )
    places = list(zip(one.places(), two.places(), strict=True))
    found = _fold([_kind(*pair) for pair in places], [looks[n] for n in shown])
    blocks = [n for n, kind in enumerate(found) if kind.has_options]
    before, after = found[: blocks[0]], found[blocks[-1] + 1 :]
    standing = {looks[n]: blocks[place] for place, n in enumerate(shown)}
    standing |= {looks[n]: blocks[place] for place, n in [*enumerate(shown)][1:-1]}
    inner = [found[standing[look]] for look in looks]
    inner[0], inner[-1] = found[blocks[0]], found[blocks[-1]]
    name = places[blocks[0]][0].name.rpartition(".")[0]
    kinds: dict[Kind, int] = {}
    order = [kinds.setdefault(kind, len(kinds)) for kind in (*before, *inner, *after)]
    names = [""] * len(before) + [f"{name}.{n}" for n in range(num_blocks)] + [""] * len(after)
    return Chain(
        kinds=tuple(kinds), order=tuple(order), names=tuple(names), tied_numel=one.tied_numel
    )


def _kind(one: TapeSection, two: TapeSection) -> Kind:
    """From a batch of one and one of two."""
    return Kind(
        name=one.name,
        has_options=one.is_block,
        numels=one.numels,
        forward=tally(one.forward, two.forward),
        backward=tally(one.backward, two.backward),
        again=tuple(map(tally, one.again, two.again)),  # type: ignore[arg-type]
        sent_forward=sent(one.forward, two.forward),
        sent_backward=sent(one.backward, two.backward),
        sent_again=tuple(map(sent, one.again, two.again)),  # type: ignore[arg-type]
        saved_bytes=_fewest(one.saved_bytes, two.saved_bytes),
        transient_bytes=_fewest(one.transient_bytes, two.transient_bytes),
        # Floats: a column of ints times an int of Python's wraps where the product is too large.
        boundary_bytes=float(one.boundary_bytes),
        context_bytes=float(one.context_bytes),
        exchanged_bytes=float(one.exchanged_bytes),
        scores_flops=float(one.scores_flops),
        expert_numel=one.expert_numel,
        num_experts=one.num_experts,
    )


def _fewest(one: Sequence[int], two: Sequence[int]) -> Triple:
    """No number of samples takes less than so much for each.

    Angles are of no sample, and one sample is gathered without a copy: whether the first takes
    more or one more does depends on the place.
    """
    a, b, c = (float(min(x, y - x)) for x, y in zip(one, two, strict=True))
    return a, b, c


def shown_of(looks: Sequence[Hashable]) -> tuple[int, ...]:
    """Blocks that show all others: the first, the last, and one of each kind between them."""
    last, between = len(looks) - 1, dict[Hashable, int]()
    for number in range(1, last):
        between.setdefault(looks[number], number)
    return tuple(dict.fromkeys((0, *between.values(), last)))


def _fold(kinds: Sequence[Kind], looks: Sequence[Hashable]) -> list[Kind]:
    """Blocks that work alike are one kind; what the ends hold otherwise is charged beside them.

    Nobody keeps what the last block makes for it to be run again, and whoever reads it may keep
    another copy: what every option of an end keeps more than between, or less, is charged there. A
    search over kinds gains more from one kind than it loses by that.

    Args:
        looks: Of each block that is shown.
    """
    out = list(kinds)
    blocks = [n for n, kind in enumerate(kinds) if kind.has_options]
    middles = dict(zip(looks, blocks, strict=True))
    middles |= dict(zip(looks[1:-1], blocks[1:-1], strict=True))
    for look, n, beside in (
        (looks[0], blocks[0], blocks[0] - 1), (looks[-1], blocks[-1], blocks[-1] + 1),
    ):  # fmt: skip
        middle = kinds[middles[look]]
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
    for look, place in middles.items():
        same = [n for n, own in zip(blocks, looks, strict=True) if own == look]
        middle = kinds[place]
        transient = _least([kinds[n].transient_bytes for n in same])
        as_one = replace(middle, name=kinds[same[0]].name, transient_bytes=transient)
        out = [as_one if kind == middle else kind for kind in out]
    return out


def _least(triples: Sequence[Triple]) -> Triple:
    a, b, c = (min(column) for column in zip(*triples, strict=True))
    return a, b, c
