"""A profile from what was measured on a machine: `meshplan calibrate`.

Knows how times follow from sizes, and refuses what does not follow. Measuring is
`runtime.calibrate`'s, which needs torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.profile import GENERIC, WORST_RESIDUAL, Profile
from meshplan.errors import Origin, PlanError, Problem
from meshplan.hardware import Device

Array = NDArray[Any]

SCHEMA: Final = "profile/1"


@dataclass(frozen=True, slots=True)
class Sample:
    """Something timed.

    Args:
        amount: Operations of a product or of attention; bytes of anything else, as they count for
            a bandwidth: of a ring those that pass through one rank.
        seconds: Of one of it.
        hops: Ranks that a collective passes on the way; 0 for what is no collective.
    """

    amount: float
    seconds: float
    hops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that was timed on one machine.

    Args:
        device: The table's, or what torch calls a device that is not in it.
        launch_s: To start a kernel that does nothing.
        products, attention: By size.
        moves: Elementwise, bytes read and written.
        copies: From host to device; () where there is no host apart.
        collectives: all_gather between ranks of one node; () where there is one rank.
    """

    device: Device
    dtype: str
    launch_s: float
    products: Sequence[Sample]
    attention: Sequence[Sample]
    moves: Sequence[Sample]
    copies: Sequence[Sample] = ()
    collectives: Sequence[Sample] = ()


def profile_from(measured: Measured, origin: Origin | None = None) -> Profile:
    """Constants of this machine; what it cannot show is generic, and the sources say so.

    Raises:
        PlanError: Times follow from no constants: the machine was busy with something else.
    """
    errors: dict[str, Array] = {}

    def affine(name: str, samples: Sequence[Sample]) -> tuple[float, float]:
        """(seconds of nothing, amount per second)."""
        columns = np.array([[s.hops or 1.0, s.amount] for s in samples])
        seconds = np.array([s.seconds for s in samples])
        least, slope = _non_negative(columns, seconds)
        errors[name] = columns @ np.array([least, slope]) / seconds - 1
        return least, (1 / slope if slope > 0 else float("inf"))

    kernel_s, flops = affine("products", measured.products)
    _, attention = affine("attention", measured.attention)
    _, memory = affine("elementwise operations", measured.moves)
    pcie = affine("copies from the host", measured.copies)[1] if measured.copies else memory
    hop, intra = GENERIC["intra_latency_s"], memory
    if measured.collectives:
        hop, intra = affine("collectives", measured.collectives)
    elif measured.device.intra_bytes_per_s:
        intra = measured.device.intra_bytes_per_s * GENERIC["intra_share"]
    worst = {name: float(np.sqrt((each**2).mean())) for name, each in errors.items()}
    if problems := [
        Problem(
            f"the times of {name} are {rms:.0%} off any constants, more than {WORST_RESIDUAL:.0%}",
            origin,
            "stop what else runs on this machine, and calibrate again",
        )
        for name, rms in worst.items()
        if not rms <= WORST_RESIDUAL
    ]:
        raise PlanError(problems)
    peak = measured.device.peak_flops.get(measured.dtype, max(flops, attention))
    generic = "the rest is generic: one machine cannot show it"
    return Profile(
        device=measured.device.name,
        framework="native",
        dtype=measured.dtype,
        peak_flops=peak,
        efficiency=min(1.0, flops / peak),
        attention_efficiency=min(1.0, attention / peak),
        kernel_s=kernel_s,
        launch_s=measured.launch_s,
        collective_s=GENERIC["collective_s"],
        collective_rank_s=GENERIC["collective_rank_s"],
        collective_node_s=GENERIC["collective_node_s"],
        memory_bytes_per_s=memory,
        intra_bytes_per_s=intra,
        inter_bytes_per_s=intra,
        intra_latency_s=hop,
        inter_latency_s=GENERIC["inter_latency_s"],
        contention=GENERIC["contention"],
        pcie_bytes_per_s=pcie,
        optimizer_bytes=GENERIC["optimizer_bytes"],
        sources=(f"measured on this machine: {', '.join(errors)}", generic),
        residual=float(np.sqrt(np.mean(np.concatenate(list(errors.values())) ** 2))),
        num_runs=sum(map(len, errors.values())),
    )


def _non_negative(columns: Array, seconds: Array) -> tuple[float, float]:
    """Least squares of relative errors, no coefficient below zero."""
    scaled, ones = columns / seconds[:, None], np.ones(len(seconds))
    best, least = (0.0, 0.0), float("inf")
    for chosen in itertools.chain([(0, 1)], [(1,), (0,)]):
        found = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)[0]
        error = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            full = np.zeros(2)
            full[list(chosen)] = found
            best, least = (float(full[0]), float(full[1])), error
    return best


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON, every figure in its unit."""
    facts = {"schema": SCHEMA, "profile": dataclasses.asdict(profile)}
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path, origin: Origin | None = None) -> Profile:
    """What `write_profile` wrote.

    Raises:
        PlanError: The file is not there, or is something else.
    """
    fix = "write one with: meshplan calibrate --out profile.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(Problem(f"{path} cannot be read: {error}", origin, fix)) from None
    if not isinstance(facts, Mapping) or facts.get("schema") != SCHEMA:
        raise PlanError(Problem(f"{path} is no profile ({SCHEMA})", origin, fix))
    stated = dict(facts["profile"])
    names = {field.name for field in dataclasses.fields(Profile)}
    if stated.keys() != names:
        odd = ", ".join(sorted(stated.keys() ^ names))
        raise PlanError(Problem(f"{path} is of another version: {odd}", origin, fix))
    return Profile(**stated | {"sources": tuple(stated["sources"])})
