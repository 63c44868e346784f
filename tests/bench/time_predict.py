"""Seconds of many published steps at once, from a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.pipeline import crossing_seconds, pipeline_seconds
from meshplan.cost.profile import Profile, resolve
from meshplan.cost.rows import Rows, widths_of
from meshplan.cost.step import terms
from tests.bench.time_mapping import Case
from tests.bench.time_nanotron import SummedRows

Array = NDArray[Any]


def batches(cases: Sequence[Case]) -> list[list[int]]:
    """Places of cases that share chain, cluster, options and precision: one grid each."""
    out: dict[Any, list[int]] = defaultdict(list)
    for place, case in enumerate(cases):
        key = (case.work, case.cluster.gpus_per_node, case.cluster.inter, case.options,
               case.precision, case.awaited, case.key, case.sums_whole)  # fmt: skip
        out[key].append(place)
    return list(out.values())


def seconds(cases: Sequence[Case], profile: Profile, together: list[list[int]]) -> Array:
    """Of a step of each case; all are of the profile's framework, device and links."""
    out = np.zeros(len(cases))
    for places in together:
        out[places] = _seconds([cases[place] for place in places], profile)
    return out


def _seconds(cases: Sequence[Case], profile: Profile) -> Array:
    first = cases[0]
    grid = np.concatenate([case.grid for case in cases])
    widths, per_node = widths_of(first.precision, first.dtype), first.cluster.gpus_per_node
    rows = (SummedRows if first.sums_whole else Rows)(grid, profile, per_node, widths)
    turn, last = [], []
    for number, kind in enumerate(first.chain.kinds):
        told = terms(
            grid, kind, profile, first.cluster.gpus_per_node, first.precision, dtype=first.dtype,
            is_awaited=number in first.awaited, rows=rows,
        )  # fmt: skip
        options = first.options if kind.has_options else ((0, 1.0),)
        each = told.forward_s + told.backward_s
        turn.append(sum(share * each[:, option] for option, share in options))
        settles = sum(share * told.ends_s[:, option] for option, share in options)
        last.append(settles + told.update_s)
    by_kind, at_end = np.stack(turn, axis=1), np.stack(last, axis=1)
    block = next(kind for kind in first.chain.kinds if kind.has_options)
    crossing = crossing_seconds(grid, block.boundary_bytes, profile, first.cluster.gpus_per_node)
    held = [np.array(case.stages, dtype=float) for case in cases]
    by_rank = [h @ row for h, row in zip(held, by_kind, strict=True)]
    most = np.array([each.max() for each in by_rank])
    total = np.array([each.sum() for each in by_rank])
    ends = np.array([(h @ row).max() for h, row in zip(held, at_end, strict=True)])
    return np.asarray(pipeline_seconds(grid, most, total, crossing) + ends)


def predict(cases: Sequence[Case], facts: Mapping[str, Any], together: list[list[int]]) -> Array:
    """Seconds of a step of each case; links are the cluster's own."""
    out = np.zeros(len(cases))
    links: dict[Any, list[list[int]]] = defaultdict(list)
    for places in together:
        links[cases[places[0]].cluster.inter].append(places)
    for groups in links.values():
        first = cases[groups[0][0]]
        profile = resolve(first.cluster, first.key[0], first.key[2], facts)
        places = [place for group in groups for place in group]
        index = {place: number for number, place in enumerate(places)}
        local = [[index[place] for place in group] for group in groups]
        out[places] = seconds([cases[place] for place in places], profile, local)
    return out
