"""Find where activations of a known family are sharded along the sequence, without its code.

`sequence` derives the same from a recorded forward. Here it is written down family by family, as
the styles in `known` are; tests compare both on live models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshplan.assign.auto.proof import Refuted
from meshplan.assign.auto.stream import Stream
from meshplan.assign.base.types import Preset
from meshplan.model.graph import ModelGraph

_ARGUMENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "self_attn": {"self_attn": "hidden_states", "mlp": "0"},
    "attn": {"attn": "0", "mlp": "0"},
}
"""For each family, which is recognised by the name of its attention module: the modules of a block
that compute on whole sequences, and the argument (name or position) that is their input.
"""

_OPENING: Final = ("colwise", "packed_colwise")


def known_stream(graph: ModelGraph, preset: Mapping[str, Preset]) -> Stream:
    """Return where activations are sharded along the sequence, and where they are gathered.

    Args:
        graph: The model.
        preset: The known styles, by module fqn.

    Raises:
        Refuted: A module cannot compute on shards of the sequence, or is not known.
    """
    cut = {fqn: entry.word for fqn, entry in preset.items() if entry.word != "R"}
    blocks = graph.blocks()
    if not blocks:
        raise Refuted(
            "the model has no repeated blocks between which the sequence could be sharded"
        )
    depth = blocks[0].count(".") + 1
    of_block: dict[str, list[str]] = {block: [] for block in blocks}
    around: list[str] = []
    for fqn in graph.modules:
        block = ".".join(fqn.split(".")[:depth])
        if block not in of_block:
            around.append(fqn)
        elif fqn != block:
            of_block[block].append(fqn)
    gathers: list[tuple[str, str]] = []
    norms: list[str] = []
    counts = False
    for block, inner in of_block.items():
        leaves = [fqn[len(block) + 1 :] for fqn in inner]
        arguments = next((_ARGUMENTS[leaf] for leaf in leaves if leaf in _ARGUMENTS), {})
        counts |= "attn" in arguments
        gathers += [(f"{block}.{leaf}", arguments[leaf]) for leaf in leaves if leaf in arguments]
        for fqn, leaf in zip(inner, leaves, strict=True):
            is_norm = graph.modules[fqn].kind == "norm"
            if not graph.owned(fqn):
                continue
            if "." not in leaf and is_norm:
                norms.append(fqn)
            elif leaf.partition(".")[0] not in arguments:
                raise Refuted(f"auto has no rule for {fqn} on shards of the sequence")
            elif fqn not in cut and not is_norm:
                raise Refuted(f"{fqn} takes the whole sequence and is not sharded")
    if graph.config.get("resid_pdrop"):
        raise Refuted("dropout would draw random numbers for a shard of the sequence only")
    heads = {fqn for fqn in around if fqn in cut and graph.modules[fqn].kind == "linear"}
    tables = {fqn for fqn in around if fqn in cut} - heads
    # GPT-2's code reshapes the output of its last norm by the number of tokens, so the sequence is
    # gathered after the last block.
    ends = counts or not heads
    if not ends:
        norms += [fqn for fqn in around if graph.modules[fqn].kind == "norm"]
    return Stream(
        cuts=((blocks[0], "0"),),
        gathers=tuple(sorted(gathers)),
        ends=(blocks[-1],) if ends else (),
        inside=frozenset(fqn for fqn, word in cut.items() if word in _OPENING),
        whole=frozenset(tables | heads if ends else tables),
        summed=tuple(t.fqn for fqn in norms for t in graph.owned(fqn) if not t.is_buffer),
    )
