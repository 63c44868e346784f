"""Data-parallel strategies as a table, and the mesh that a plan declares.

A strategy determines which data axes it needs, and which of parameter, gradient and optimizer state
are sharded over `dp_shard`. To add a strategy, add an entry to `STRATEGIES` and its spellings to
`spec.STRATEGY_WORDS`. `assign` decides the layout of each tensor.

Source: Rajbhandari et al. 2020 (ZeRO), section 5, for the stages; Zhao et al. 2023 (PyTorch
FSDP), section 3.2.2, for hybrid sharding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.mesh import AXES, DATA_AXES, Axis, Mesh
from meshplan.shown import shown
from meshplan.spec.borrow import expert_loans
from meshplan.spec.spec import Borrow, Spec


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One data-parallel strategy.

    Args:
        name: Canonical name.
        axes: The data axes that the strategy needs.
        cuts: What is sharded over `dp_shard`, among "optimizer", "gradient" and "parameter".
    """

    name: str
    axes: tuple[str, ...]
    cuts: frozenset[str]


@dataclass(frozen=True, slots=True)
class WorldSizeProblem(Problem):
    """The mesh has another number of devices than there are.

    Args:
        needed: Number of devices of the mesh.
    """

    needed: int = 0


_STAGE: Final = (
    frozenset[str](),
    frozenset({"optimizer"}),
    frozenset({"optimizer", "gradient"}),
    frozenset({"optimizer", "gradient", "parameter"}),
)
"""The sharded states, by ZeRO stage (0 to 3)."""

STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Strategy(name="ddp", axes=("dp_replicate",), cuts=_STAGE[0]),
            Strategy(name="zero1", axes=("dp_shard",), cuts=_STAGE[1]),
            Strategy(name="zero2", axes=("dp_shard",), cuts=_STAGE[2]),
            Strategy(name="full_shard", axes=("dp_shard",), cuts=_STAGE[3]),
            Strategy(name="hybrid_shard", axes=DATA_AXES, cuts=_STAGE[3]),
            Strategy(name="hybrid_shard_zero2", axes=DATA_AXES, cuts=_STAGE[2]),
        )
    }
)


def strategy_of(axes: tuple[str, ...], cuts: frozenset[str]) -> str:
    """Return the name of the strategy that shards these states and needs these data axes."""
    return next(s.name for s in STRATEGIES.values() if (s.axes, s.cuts) == (axes, cuts))


def resolve_mesh(
    spec: Spec, world_size: int | None = None, gpus_per_node: int | None = None
) -> tuple[Mesh, Strategy]:
    """Return the concrete mesh and strategy that a plan declares.

    Args:
        spec: The plan.
        world_size: Number of ranks of the running job; None on the command line, where `hardware:`
            gives it.
        gpus_per_node: Number of ranks on one machine of the running job; None on the command line.

    Raises:
        PlanError: The statements contradict each other or the job, or leave a choice open.
    """
    hardware = spec.hardware
    if hardware is not None and world_size in (None, hardware.world_size):
        # The plan's nodes take precedence over the launcher's: 2 x 4 can be tried on one machine.
        world_size, gpus_per_node = hardware.world_size, hardware.gpus_per_node
    _refuse_auto(spec)
    sizes = _sizes(spec, world_size, gpus_per_node)
    strategy = _strategy(spec, sizes)
    mesh = Mesh(tuple(Axis(axis, n) for axis, n in sizes.items()), expert_loans(spec, sizes))
    if world_size is not None and mesh.world_size != world_size:
        raise PlanError(_wrong_product(spec, mesh, world_size))
    return mesh, strategy


def _refuse_auto(spec: Spec) -> None:
    problems = [
        Problem(
            f"'{path}: auto' is left to the planner",
            spec.origin(path),
            f"run meshplan plan, or state {example}",
        )
        for path, example in (
            ("mesh", "the axes, such as mesh: {dp_shard: 8}"),
            ("strategy", "one of " + ", ".join(STRATEGIES)),
            *((f"mesh.{axis}", "the size") for axis in AXES),
        )
        if path in spec.free_fields
    ]
    if problems:
        raise PlanError(problems)
    if spec.mesh is None and spec.strategy is None:
        raise PlanError(
            Problem(
                "the plan states neither 'mesh' nor 'strategy', and needs one of them",
                spec.origin(""),
                "add a line such as strategy: full_shard",
            )
        )


def _sizes(spec: Spec, world_size: int | None, gpus_per_node: int | None) -> dict[str, int]:
    """Return the mesh's axis sizes by name, without ep, and with the size that `auto` implies."""
    if spec.mesh is None:
        return _sizes_from_strategy(spec, world_size, gpus_per_node)
    if isinstance(spec.mesh, tuple):
        return _sizes_from_list(spec, spec.mesh)
    assert not isinstance(spec.mesh, str), "mesh: auto was refused above"
    problems = []
    known = math.prod(n for a, n in spec.mesh.items() if isinstance(n, int) and a != "ep")
    sizes: dict[str, int] = {}
    for axis, size in spec.mesh.items():
        origin = spec.origin(f"mesh.{axis}")
        if axis == "ep":
            continue  # ep borrows ranks that already count in another axis.
        if isinstance(size, int):
            sizes[axis] = size
        elif isinstance(size, Borrow):
            problems.append(
                Problem(f"'{axis}' cannot borrow ranks: only ep can", origin, f"write {axis}: N")
            )
        elif world_size is None:
            problems.append(
                Problem(
                    "'auto' needs the number of devices, which the plan does not state",
                    origin,
                    "add hardware: {nodes: 1, gpus_per_node: 8}, or write the size",
                )
            )
        elif world_size % known:
            problems.append(
                Problem(
                    f"no size is possible for 'auto': {world_size} devices are not a multiple of "
                    f"{known}, the product of the other axes",
                    origin,
                    f"make the product of the other axes a divisor of {world_size}",
                )
            )
        else:
            sizes[axis] = world_size // known
    spread = [axis for axis in sizes if axis in DATA_AXES and sizes[axis] > 1]
    if spread == list(reversed(DATA_AXES)):
        swapped = {**{axis: sizes[axis] for axis in DATA_AXES}, **sizes}
        problems.append(
            Problem(
                "dp_shard comes before dp_replicate, but the ranks of one replica must be adjacent",
                spec.origin("mesh"),
                f"write mesh: {{{', '.join(f'{axis}: {n}' for axis, n in swapped.items())}}}",
            )
        )
    elif spread and "cp" in sizes and list(sizes).index("cp") < list(sizes).index(spread[-1]):
        inner = {**{a: n for a, n in sizes.items() if a in DATA_AXES}, **sizes}
        problems.append(
            Problem(
                f"cp comes before {spread[-1]}, but the ranks that share a sample must be adjacent",
                spec.origin("mesh"),
                f"write mesh: {{{', '.join(f'{axis}: {n}' for axis, n in inner.items())}}}",
            )
        )
    if problems:
        raise PlanError(problems)
    return sizes


def _sizes_from_strategy(
    spec: Spec, world_size: int | None, gpus_per_node: int | None
) -> dict[str, int]:
    """Return axis sizes if no mesh is stated: the strategy's axes cover all devices."""
    origin = spec.origin("strategy")
    strategy = STRATEGIES[spec.strategy or ""]
    if world_size is None:
        raise PlanError(
            Problem(
                f"strategy {strategy.name} needs the number of devices, "
                "which the plan does not state",
                origin,
                "add hardware: {nodes: 1, gpus_per_node: 8}, or mesh: {...}",
            )
        )
    if len(strategy.axes) == 1:
        return {strategy.axes[0]: world_size}
    per_node = gpus_per_node or world_size
    nodes = world_size // per_node
    if nodes < 2 or world_size % per_node:
        raise PlanError(
            Problem(
                f"{strategy.name} shards inside a node and replicates across nodes, but "
                + _not_nodes(world_size, per_node),
                origin,
                "state both sizes, such as mesh: {dp_replicate: 2, dp_shard: 4}, or use full_shard",
            )
        )
    return {"dp_replicate": nodes, "dp_shard": per_node}


def _not_nodes(world_size: int, per_node: int) -> str:
    if world_size == 1:
        return "there is one device"
    if world_size <= per_node:
        return f"the {world_size} devices are on one node"
    return f"{world_size} devices are not a multiple of the {per_node} devices of a node"


def _sizes_from_list(spec: Spec, sizes: tuple[int, ...]) -> dict[str, int]:
    """Return axis sizes for a mesh such as `[2, 4]`, whose axis names the strategy implies."""
    axes = STRATEGIES[spec.strategy].axes if spec.strategy else ()
    if len(axes) != len(sizes):
        why = (
            f"{spec.strategy} has {len(axes)} data ax{'is' if len(axes) == 1 else 'es'} "
            f"({', '.join(axes)})"
            if axes
            else "the plan states no strategy that implies the names"
        )
        raise PlanError(
            Problem(
                f"a mesh of {len(sizes)} size{'' if len(sizes) == 1 else 's'} without axis names "
                f"is ambiguous: {why}",
                spec.origin("mesh"),
                "name the axes, such as mesh: {dp_replicate: 2, dp_shard: 4}",
            )
        )
    return dict(zip(axes, sizes, strict=True))


def _strategy(spec: Spec, sizes: Mapping[str, int]) -> Strategy:
    """Return the stated strategy if the mesh agrees with it, else the one the mesh implies."""
    present = tuple(axis for axis in DATA_AXES if axis in sizes)
    spread = tuple(axis for axis in present if sizes[axis] > 1)
    if spec.strategy is None:
        implied = {("dp_shard",): "full_shard", DATA_AXES: "hybrid_shard"}
        return STRATEGIES[implied.get(present, "ddp")]
    strategy = STRATEGIES[spec.strategy]
    # cp can take the place of an axis: it replicates parameters as dp_replicate does if the
    # strategy shards nothing, and else shards them as dp_shard does.
    is_free = sizes.get("cp", 1) > 1
    stand_in = ("dp_shard" if strategy.cuts else "dp_replicate") if is_free else ""
    missing = [axis for axis in strategy.axes if axis not in sizes and axis != stand_in]
    foreign = [axis for axis in spread if axis not in strategy.axes]
    if not missing and not foreign:
        return strategy
    stated = ", ".join(f"{axis}: {size}" for axis, size in sizes.items())
    if foreign:
        what = f"uses {' and '.join(strategy.axes)} only, but the mesh also has {foreign[0]}"
    else:
        what = f"needs the axis {missing[0]}, which the mesh does not have"
    fits = [
        row.name
        for row in STRATEGIES.values()
        if set(spread or present) <= set(row.axes) <= set(present)
    ]
    alternative = f"write strategy: {' or '.join(fits)}" if fits else "leave the strategy out"
    axes = ", ".join(f"{axis}: N" for axis in strategy.axes)
    raise PlanError(
        Problem(
            f"{strategy.name} {what} (mesh: {{{stated}}})",
            spec.origin("strategy"),
            f"{alternative}, or write mesh: {{{axes}}}",
        )
    )


def _wrong_product(spec: Spec, mesh: Mesh, world_size: int) -> Problem:
    sizes = " x ".join(str(axis.size) for axis in mesh)
    product = f"{sizes} = {mesh.world_size}" if len(mesh.axes) > 1 else sizes
    data = math.prod(mesh.size(axis) for axis in DATA_AXES)
    rest = mesh.world_size // data
    fix = f"make the product {world_size}"
    if world_size % rest == 0 and len(mesh.present(DATA_AXES)) == 1:
        fix += f", such as {mesh.present(DATA_AXES)[0]}: {world_size // rest}"
    return WorldSizeProblem(
        f"the mesh has {product} devices, but {world_size} are available",
        spec.origin("mesh" if spec.mesh is not None else "hardware"),
        fix,
        mesh.world_size,
    )
