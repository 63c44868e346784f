"""Explain a space without configurations.

The reason is what the model or the plan excludes, or a number of samples that no mesh divides.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Final

import numpy as np

from meshplan.errors import Problem
from meshplan.planner.space.enumeration import context_ways, enumerate_grid
from meshplan.planner.space.space import EmptySpaceError, Freedom
from meshplan.spec.spec import Spec

_FIX: Final = "state less, or change batch.global"


def nothing_to_choose(free: Freedom, spec: Spec) -> EmptySpaceError:
    """Return the error for a space without any configuration, with the reason and a fix."""
    rejected = [f"{each.what}: {each.why}" for each in free.rejected]
    pairs = [*itertools.product(free.axes["tp"], free.axes["cp"])]
    if pairs and not any([*context_ways(free, *pair)] for pair in pairs):
        numbers = " and ".join(map(str, dict.fromkeys(free.heads)))
        rejected.append(f"ranks of cp exchange heads, and no tp x cp divides {numbers} heads")
    whys = "; ".join(rejected)
    least = _least_samples(free)
    devices = f"{free.world:,} device{'' if free.world == 1 else 's'}"
    if least is None or free.global_ is None:
        what = f"no mesh of {devices} satisfies the plan"
        problem = Problem(what, spec.origin("mesh"), whys or _FIX)
    else:
        what = (
            f"no mesh of {devices} can split {free.global_:,} samples: "
            f"its data ranks need at least {least:,}"
        )
        fix = f"set batch.global to a multiple of {least:,}, or use fewer devices"
        if least <= free.global_ or not len(enumerate_grid(replace(free, global_=least))):
            what = f"no mesh of {devices} can split {free.global_:,} samples as the plan states"
            fix = _FIX
        problem = Problem(what, spec.origin("batch.global"), fix)
    return EmptySpaceError(problem, free.rejected)


def _least_samples(free: Freedom) -> int | None:
    """Return the fewest samples of a step that some mesh can split; None if no mesh ever can."""
    own = (free.micro or (1,))[0] * (free.accumulate or 1)
    if not free.micro:
        own *= free.pipelined or 1
    grid = enumerate_grid(replace(free, global_=None, of_data_rank=own))
    return own * int(np.min(grid["dp_replicate"] * grid["dp_shard"])) if len(grid) else None
