"""Fit a profile to timings of machines (`meshplan calibrate`), and read and write profile files.

The fit assumes that an operation takes a latency plus its amount divided by a rate, and rejects
timings that do not follow this. `runtime.calibrate`, which needs torch, takes the timings.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from meshplan.cost.grid import Array
from meshplan.cost.profile import GENERIC, Profile
from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.files import read_bytes, write_bytes
from meshplan.layout.hardware import Device
from meshplan.spec.spec import PROFILES

SCHEMA: Final = "profile/1"
LINKS_ARE_A_GUESS: Final = (
    "between devices nothing was measured, and the figure is a guess: torchrun --nproc-per-node 2 "
    "-m meshplan calibrate times what ranks send"
)
"""Entry of `Profile.sources` if each node had one rank, so that the speed inside it is a guess."""
_WORST_SPREAD: Final = 0.10
"""Highest accepted root mean square of `Sample.spread`. A larger spread means that something else
was running on the machine."""
_WORST_LAW: Final = 0.30
"""Highest accepted root mean square of the fit's relative errors. Times further off do not follow a
latency and a rate. A CPU is faster on data that fits into its cache: on a quiet machine, gloo's
collectives are up to 21 % off."""
_MOST_BYTES: Final = 1 << 20
"""Largest size of a profile file."""
_AGAIN: Final = "stop other programs there, and run meshplan calibrate again"


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed operation.

    Args:
        amount: Floating-point operations of a matrix product or of attention; for any other
            operation the bytes that it moves (of a ring collective, those that pass through one
            rank).
        seconds: Seconds of one execution.
        hops: Ranks that a collective passes on the way; 0 for anything but a collective.
        spread: Relative uncertainty of `seconds`, from the difference of even and odd rounds.
    """

    amount: float
    seconds: float
    hops: int = 0
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """All timings of one machine, or of several nodes.

    Args:
        device: The device from the hardware table; if it is not there, one with torch's name.
        dtype: Dtype of the matrix products and of attention.
        launch_s: Seconds that the host takes for each kernel of a training step.
        products, attention: Matrix products and attentions of several sizes.
        moves: Elementwise kernels of several sizes; the amount is bytes read and written.
        copies: Copies from host to device; () if the device uses host memory.
        collectives: All-gathers between the ranks of each node; () if a node has only one rank.
        reductions: Reduce-scatters of up to the same sizes, between the same ranks as
            `collectives`, or as `crossings` if `collectives` is ().
        crossings: All-gathers between one rank of each node, while the other ranks of the nodes
            do the same; () if there is only one node.
        num_nodes: Number of nodes.
        ranks_per_node: Number of ranks of each node.
    """

    device: Device
    dtype: str
    launch_s: float
    products: Sequence[Sample]
    attention: Sequence[Sample]
    moves: Sequence[Sample]
    copies: Sequence[Sample] = ()
    collectives: Sequence[Sample] = ()
    reductions: Sequence[Sample] = ()
    crossings: Sequence[Sample] = ()
    num_nodes: int = 1
    ranks_per_node: int = 1


def profile_from(measured: Timings) -> Profile:
    """Fit a profile to timings.

    Constants that do not follow from the timings are those of `GENERIC`; `Profile.sources` says so.

    Args:
        measured: The timings.

    Raises:
        PlanError: Times differ too much between rounds, or do not follow a latency and a rate.
    """
    errors: dict[str, Array] = {}
    spreads: dict[str, Array] = {}

    def affine(name: str, samples: Sequence[Sample]) -> tuple[float, float]:
        """Return (seconds of latency, amount per second), fitted to timings of one kind."""
        # A ring collective takes the latency once per hop, any other operation once.
        columns = np.array([[s.hops or 1.0, s.amount] for s in samples])
        seconds = np.array([s.seconds for s in samples])
        least, slope = _non_negative(columns, seconds)
        errors[name] = columns @ np.array([least, slope]) / seconds - 1
        spreads[name] = np.array([s.spread for s in samples])
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
    inter_hop, inter = GENERIC["inter_latency_s"], intra
    if measured.crossings:
        inter_hop, inter = affine("collectives between nodes", measured.crossings)
    scatters = 1.0
    if measured.reductions:
        # gloo has no reduce-scatter of its own: it all-reduces, which takes twice as long.
        gathers = intra if measured.collectives else inter
        scatters = gathers / affine("reduce-scatters", measured.reductions)[1]
    worst = {name: _root_mean_square(each) for name, each in errors.items()}
    if problems := [
        Problem(
            f"the times of {name} {how} {rms:.0%} {beside}, and at most {most:.0%} is accepted",
            fix=_AGAIN,
        )
        for name in errors
        for rms, most, how, beside in (
            (_root_mean_square(spreads[name]), _WORST_SPREAD, "differ by", "between rounds"),
            (worst[name], _WORST_LAW, "are", "off the best fit of a latency and a rate"),
        )
        if not rms <= most
    ]:
        raise PlanError(problems)
    peak = measured.device.peak_flops.get(measured.dtype, max(flops, attention))
    generic = "all other constants are generic: calibration does not measure them"
    named = ", ".join(f"{name} (off by {rms:.0%})" for name, rms in worst.items())
    links = () if measured.collectives else (LINKS_ARE_A_GUESS,)
    on = "this machine" if measured.num_nodes == 1 else f"{measured.num_nodes} nodes"
    profile = Profile(
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
        inter_bytes_per_s=inter,
        intra_latency_s=hop,
        inter_latency_s=inter_hop,
        reduce_scatter_factor=scatters,
        num_nodes=measured.num_nodes,
        ranks_per_node=measured.ranks_per_node,
        contention=GENERIC["contention"],
        pcie_bytes_per_s=pcie,
        optimizer_bytes=GENERIC["optimizer_bytes"],
        sources=(f"measured on {on}: {named}", *links, generic),
        residual=_root_mean_square(np.concatenate(list(errors.values()))),
        num_runs=sum(map(len, errors.values())),
    )
    # Noise can make a fit exact and senseless, such as a rate without bound.
    if problems := [
        Problem(f"the times give {name} = {_shown(value)}, not {wanted}", fix=_AGAIN)
        for name, (accepts, wanted) in _FIGURES.items()
        if not accepts(value := getattr(profile, name))
    ]:
        raise PlanError(problems)
    return profile


def _root_mean_square(numbers: Array) -> float:
    return float(np.sqrt((numbers**2).mean()))


def _non_negative(columns: Array, seconds: Array) -> tuple[float, float]:
    """Return two coefficients >= 0 that fit `columns` to `seconds` by least relative squares."""
    # Dividing each equation by its time makes the errors relative.
    scaled, ones = columns / seconds[:, None], np.ones(len(seconds))
    best, least = (0.0, 0.0), float("inf")
    # With two coefficients, the best non-negative fit is among both together and each alone.
    for chosen in itertools.chain([(0, 1)], [(1,), (0,)]):
        found = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)[0]
        error = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            full = np.zeros(2)
            full[list(chosen)] = found
            best, least = (float(full[0]), float(full[1])), error
    return best


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile file: JSON with the fields of `Profile`."""
    facts = {"schema": SCHEMA, "profile": dataclasses.asdict(profile)}
    write_bytes(path, (json.dumps(facts, indent=1) + "\n").encode(), "the profile")


def read_profile(path: Path, origin: Origin | None = None) -> Profile:
    """Read a profile that `write_profile` wrote.

    Raises:
        PlanError: The file does not exist, is not a profile of this version, or has a value that
            `_FIGURES` does not accept.
    """
    fix = f"measure one, meshplan calibrate --out profile.json, or name one: {', '.join(PROFILES)}"
    try:
        facts = json.loads(read_bytes(path, _MOST_BYTES, "a profile").decode("utf-8"))
    except FileNotFoundError:
        what = f"{path} cannot be read: there is no such file"
        raise PlanError(Problem(what, origin, fix)) from None
    except SpecError as error:
        problem = error.problems[0]
        raise PlanError(Problem(f"{path}: {problem.what}", origin, fix)) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(Problem(f"{path} cannot be read: {error}", origin, fix)) from None
    if not isinstance(facts, Mapping) or facts.get("schema") != SCHEMA:
        raise PlanError(Problem(f"{path} is not a profile ({SCHEMA})", origin, fix))
    stated = facts.get("profile")
    names = {field.name for field in dataclasses.fields(Profile)}
    if not isinstance(stated, Mapping) or stated.keys() != names:
        odd = ", ".join(sorted(stated.keys() ^ names)) if isinstance(stated, Mapping) else "profile"
        raise PlanError(
            Problem(
                f"{path} was written by another version of meshplan, and differs in: {odd}",
                origin,
                fix,
            )
        )
    if problems := [
        Problem(f"{path}: {name} is {_shown(stated[name])}, not {wanted}", origin, fix)
        for name, (accepts, wanted) in _FIGURES.items()
        if not accepts(stated[name])
    ]:
        raise PlanError(problems)
    return Profile(**{**stated, "sources": tuple(stated["sources"])})


def _shown(value: Any) -> str:
    """Return a value as text of at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


_Figure = tuple[Callable[[Any], bool], str]
"""(Test that returns True for an accepted value, description of accepted values)."""


def _between(low: float, high: float, unit: str, *, or_none: bool = False) -> _Figure:
    """Return a test for numbers from `low` to `high`, both included; None passes if `or_none`."""

    def accepts(value: Any) -> bool:
        if value is None:
            return or_none
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= high

    return accepts, f"{unit} from {low:g} to {high:g}"


_SECONDS: Final = _between(0, 60, "seconds")
_SHARE: Final = _between(1e-6, 1, "a share")
_RATE: Final = _between(1e3, 1e18, "bytes a second")
_NAME: Final = (lambda value: isinstance(value, str) and 0 < len(value) < 200, "a name")
_FIGURES: Final[Mapping[str, _Figure]] = {
    **dict.fromkeys(("device", "framework", "dtype"), _NAME),
    "peak_flops": _between(1e6, 1e20, "operations a second"),
    **dict.fromkeys(("efficiency", "attention_efficiency"), _SHARE),
    **dict.fromkeys(
        ("kernel_s", "launch_s", "collective_s", "collective_rank_s", "collective_node_s",
         "intra_latency_s", "inter_latency_s", "crossing_s"), _SECONDS,
    ),
    **dict.fromkeys(
        ("memory_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s", "pcie_bytes_per_s",
         "host_bytes_per_s"), _RATE,
    ),
    "contention": _between(0, 10, "a factor"),
    "contention_alone": _between(0, 10, "a factor", or_none=True),
    "tp_exposed": _between(0, 1, "a share"),
    "streamed_bytes_per_s": _between(0, 1e15, "bytes a second"),
    "congestion": _between(0, 10, "a share"),
    "reduce_scatter_factor": _between(0.01, 100, "a factor"),
    "num_nodes": _between(1, 1e6, "a number of nodes"),
    "ranks_per_node": _between(1, 1e6, "a number of ranks"),
    "optimizer_bytes": _between(0, 1000, "bytes for each parameter"),
    "gathers_once": (lambda value: isinstance(value, bool), "true or false"),
    "sources": (
        lambda value: isinstance(value, list | tuple) and all(isinstance(x, str) for x in value),
        "a list of strings",
    ),
    "assumed_network": (lambda value: value == "", "empty"),
    "residual": _between(0, 1e6, "an error", or_none=True),
    "num_runs": _between(0, 1e9, "a number of runs"),
}  # fmt: skip
"""The accepted values of each field of a profile. The bounds are wide enough for any machine."""
