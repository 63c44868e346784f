"""Where the sequence of a known family is cut, without its code: what `sequence` finds of it.

Written down family by family, as `known` is; tests hold it against the live models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshplan.assign.auto.proof import Refuted
from meshplan.assign.auto.stream import Stream
from meshplan.assign.types import Preset
from meshplan.graph import ModelGraph

_ARGUMENTS: Final[Mapping[str, str]] = {"self_attn": "hidden_states", "mlp": "0", "attn": "0"}
"""Modules that work on whole sequences, and how a block hands it to them."""

_DROPOUTS: Final = ("embd_pdrop", "resid_pdrop", "attn_pdrop")


def known_stream(graph: ModelGraph, preset: Mapping[str, Preset]) -> Stream:
    """What works on parts of the sequence.

    Args:
        preset: The styles that are known.

    Raises:
        Refuted: Something of the model does not, or is not known to.
    """
    blocks = graph.blocks()
    cut = {fqn: said.word for fqn, said in preset.items() if said.word != "R"}
    gathers: list[tuple[str, str]] = []
    summed: list[str] = []
    for block in blocks:
        for fqn, info in graph.modules.items():
            if fqn.rpartition(".")[0] != block:
                continue
            if info.kind == "norm":
                summed += [t.fqn for t in graph.owned(fqn) if not t.is_buffer]
                continue
            inner = [m for m in graph.modules if m.startswith(f"{fqn}.") and graph.owned(m)]
            leaf = fqn.rpartition(".")[2]
            plain = [m for m in inner if graph.modules[m].kind != "norm" and m not in cut]
            if leaf not in _ARGUMENTS or plain:
                raise Refuted(f"{plain[0] if plain else fqn} works on whole sequences, uncut")
            gathers.append((fqn, _ARGUMENTS[leaf]))
    if any(graph.config.get(name) for name in _DROPOUTS):
        raise Refuted("dropout draws random numbers for a part of the sequence")
    return Stream()
