"""Contradictions between two statements of one plan that can be found without the model.

Which strategy fits which mesh is checked in `strategies`; the model is checked in `assign`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from meshplan.errors import Problem, SpecError
from meshplan.layout.mesh import DATA_AXES
from meshplan.spec.spec import AUTO, MOST_MICROBATCHES, Spec

_ASIDE: Final = frozenset(("gpu", "memory", "host_memory", "intra", "inter", "headroom"))
"""Keys of `hardware` that do not say how many devices there are."""


class ContradictionError(SpecError):
    """Every statement of the plan can be read, but some contradict one another.

    Attributes:
        spec: The plan.
    """

    def __init__(self, problems: Iterable[Problem], spec: Spec) -> None:
        super().__init__(problems)
        self.spec = spec

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[Problem, ...]]]:
        return SpecError, (tuple(self.problems),)


def disagreements(spec: Spec, wrong: Iterable[str] = ()) -> list[Problem]:
    """Return a problem for every pair of statements that cannot both hold.

    Args:
        spec: The plan.
        wrong: Dotted paths of mistakes. A section with one was read in part, so comparing it with
            others would mislead.
    """
    keys = [re.split(r"[.\[]", path) for path in wrong]
    sections = {key[0] for key in keys if key[0] != "hardware" or not set(key[1:2]) & _ASIDE}
    return [
        *_memory(spec),
        *(_devices(spec) if not sections & {"hardware", "mesh"} else ()),
        *(_batch(spec) if not sections & {"hardware", "mesh", "strategy", "batch"} else ()),
    ]


def _memory(spec: Spec) -> Iterator[Problem]:
    """Yield a problem if a GPU and a size both state the memory of a device."""
    hardware = spec.hardware
    if hardware is not None and None not in (hardware.gpu, hardware.memory_bytes):
        what = "'gpu' and 'memory' both state how much memory a device has"
        yield Problem(what, spec.origin("hardware.memory"), "keep one of them")


def _devices(spec: Spec) -> Iterator[Problem]:
    """Yield a problem if the mesh and the hardware disagree on the number of devices."""
    if spec.hardware is None or spec.mesh is None or isinstance(spec.mesh, str):
        return
    if isinstance(spec.mesh, Mapping):
        known = {axis: size for axis, size in spec.mesh.items() if isinstance(size, int)}
        words = " x ".join(f"{axis} {size}" for axis, size in known.items())
        is_free = AUTO in spec.mesh.values()
        product = math.prod(known.values())
    else:
        words, product, is_free = " x ".join(map(str, spec.mesh)), math.prod(spec.mesh), False
    world = spec.hardware.world_size
    have = f"hardware has {spec.hardware.nodes} x {spec.hardware.gpus_per_node} = {world}"
    if is_free and world % product:
        what = (
            f"no size is possible for 'auto': {have} devices, which the product of the other axes, "
            f"{words}, does not divide"
        )
        fix = f"make the product of the other axes a divisor of {world}"
        yield Problem(what, spec.origin("mesh"), fix)
    elif not is_free and product != world:
        what = f"{words} = {product} devices, but {have}"
        yield Problem(what, spec.origin("mesh"), f"make the product {world}, or correct hardware")


def _batch(spec: Spec) -> Iterator[Problem]:
    ranks = _data_ranks(spec)
    if ranks is not None:
        yield from split_batch(spec, ranks)[2]


def split_batch(spec: Spec, num_data_ranks: int) -> tuple[int, int | None, list[Problem]]:
    """Return the microbatches per step and samples per microbatch that `batch` states or implies.

    Any two of micro, accumulate and global imply the third.

    Args:
        spec: The plan.
        num_data_ranks: Number of ranks that read different samples.

    Returns:
        (accumulate, micro, problems with the stated numbers). Micro is None if the plan does not
        determine it. `auto` counts as not stated.
    """
    batch, ranks = spec.batch, num_data_ranks
    micro = batch.micro if isinstance(batch.micro, int) else None
    accumulate = batch.accumulate if isinstance(batch.accumulate, int) else None
    if batch.global_ is None:
        return accumulate or 1, micro, []
    per_microbatch = (micro or 1) * ranks * (accumulate or 1)
    counted, rest = divmod(batch.global_, per_microbatch)
    words = [f"micro {micro}"] if micro else []
    words += [f"accumulate {accumulate}"] if accumulate else []
    words += [f"{ranks} data ranks"]
    product = " x ".join(words) + (f" = {per_microbatch}" if len(words) > 1 else "")
    origin = spec.origin("batch.global")
    if micro and accumulate and (rest or counted != 1):
        what = f"{batch.global_} is not {product}"
        fix = "leave out one of global, micro and accumulate"
        return accumulate, micro, [Problem(what, origin, fix)]
    if rest:
        near = max(1, counted) * per_microbatch
        what = f"{batch.global_} is not a multiple of {product}"
        fix = f"use {near} or {near + per_microbatch}"
        return accumulate or 1, micro, [Problem(what, origin, fix)]
    if micro is None:
        return accumulate or 1, counted, []
    if not accumulate and counted > MOST_MICROBATCHES:
        what = f"{batch.global_} samples are {counted:,} microbatches of micro {micro} on each rank"
        fix = f"write a larger micro: a step has at most {MOST_MICROBATCHES:,} microbatches"
        return MOST_MICROBATCHES, micro, [Problem(what, origin, fix)]
    return accumulate or counted, micro, []


def _data_ranks(spec: Spec) -> int | None:
    """Return the number of ranks that read different samples; None if the plan does not say."""
    if isinstance(spec.mesh, Mapping):
        sizes = [spec.mesh.get(axis, 1) for axis in DATA_AXES]
        known = [size for size in sizes if isinstance(size, int)]
        return math.prod(known) if len(known) == len(sizes) else None
    if isinstance(spec.mesh, tuple):
        return math.prod(spec.mesh)
    is_spread = spec.mesh is None and spec.strategy not in (None, AUTO)
    return spec.hardware.world_size if is_spread and spec.hardware else None
