"""The single changes to a plan that may take less memory, in the order of what they cost.

That order is the usual one of a training run: changes that cost nothing, a little communication,
more computing, and more machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from meshplan.assign.tensor_parallel.chunked_loss import heads_of
from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.spec.spec import ActivationCheckpointing, Rule, Selector, Spec
from meshplan.spec.strategies import STRATEGIES

_MOST_TIMES: Final = 8
"""Highest factor by which the number of GPUs is multiplied."""
_CHUNKS: Final = 8
"""Number of chunks of a loss. Source: torchtune's default for chunked cross-entropy."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change to a plan, and its smaller and stronger variants.

    Args:
        text: Description of the change.
        setting: The line of plan.yaml that makes the change.
        spec: The plan with the change.
        further: Returns a stronger change, to try if this one does not fit; None if there is none.
        count: Size of the change, in the units of `part`, such as a number of blocks.
        fails: Largest size that is known not to fit, or 0.
        part: Returns the change with a given size, to search for the smallest size that fits; None
            if the change has no smaller variants.
        is_whole: If True, the change itself is offered in addition to its smallest part that fits.
    """

    text: str
    setting: str
    spec: Spec
    further: Callable[[], PlanChange] | None = None
    count: int = 0
    fails: int = 0
    part: Callable[[int], PlanChange] | None = None
    is_whole: bool = False

    @property
    def key(self) -> str:
        """The key of plan.yaml that the change sets."""
        return self.setting.partition(":")[0]

    @property
    def num_parts(self) -> int:
        """Highest number of sizes that the binary search for the smallest that fits estimates."""
        return (self.count - self.fails - 1).bit_length() if self.part is not None else 0


def changes_of(plan: Plan) -> Iterator[PlanChange]:
    """Yield single changes to a plan that may take less memory, those with the least cost first."""
    spec, assignment = plan.spec, plan.assignment
    if assignment.wrapper == "ddp" and not spec.ddp.get("gradient_as_bucket_view", False):
        ddp = MappingProxyType({**spec.ddp, "gradient_as_bucket_view": True})
        yield PlanChange(
            "keep gradients in DDP's buckets",
            "ddp: {gradient_as_bucket_view: true}",
            replace(spec, ddp=ddp),
        )
    apart = _large_of_the_root(plan)
    if apart:
        match = tuple(Selector("glob", fqn) for fqn in apart)
        rules = (*spec.rules, Rule(index=len(spec.rules), match=match, unit=True))
        setting = f"rules: [{{match: [{', '.join(apart)}], unit: true}}]"
        words = " and ".join(apart)
        yield PlanChange(f"gather {words} separately", setting, replace(spec, rules=rules))
    if assignment.mesh.size("tp") > 1 and not assignment.loss_parallel:
        yield PlanChange(
            "compute the loss on logits sharded over the vocabulary",
            "loss_parallel: true",
            replace(spec, loss_parallel=True),
        )
    if spec.loss_chunks == 1 and not assignment.loss_parallel and len(heads_of(plan.graph)) == 1:
        yield PlanChange(
            f"compute head and loss in {_CHUNKS} chunks of the tokens",
            f"loss_chunks: {_CHUNKS}",
            replace(spec, loss_chunks=_CHUNKS),
        )
    yield from _batches(plan)
    yield from _strategies(plan)
    if not assignment.recompute:
        for mode, words in (
            ("selective", "recompute cheap operations"),
            ("full", "checkpoint every block"),
        ):
            policy = ActivationCheckpointing(mode=mode)  # type: ignore[arg-type]
            blocks = plan.graph.blocks() if mode == "full" else ()
            yield PlanChange(
                words,
                f"activation_checkpointing: {mode}",
                replace(spec, activation_checkpointing=policy),
                count=len(blocks),
                part=partial(_first_blocks, spec, blocks) if blocks else None,
                is_whole=True,
            )
    elif spec.activation_checkpointing.mode != "full" or spec.activation_checkpointing.every > 1:
        policy = ActivationCheckpointing(mode="full")
        yield PlanChange(
            "checkpoint every block",
            "activation_checkpointing: full",
            replace(spec, activation_checkpointing=policy),
        )
    yield from _offloads(plan)
    yield from _more_machines(plan)


def _offloads(plan: Plan) -> Iterator[PlanChange]:
    """Yield changes that offload parameters or activations to the host.

    These changes come before those that add devices, but copies cost time.
    """
    spec, a = plan.spec, plan.assignment
    offload = spec.offload
    if any(unit.is_sharded and not unit.on_host for unit in a.units.values()):
        also = ", activations: true" if offload.activations else ""
        yield PlanChange(
            "offload parameters and optimizer states to the host",
            f"offload: {{params: true{also}}}" if also else "offload: params",
            replace(spec, offload=replace(offload, params=True, optimizer=None)),
        )
    if plan.graph.blocks() and not a.host_activations:
        also = "params: true, " if offload.params else ""
        yield PlanChange(
            "offload the activations that blocks save to the host",
            f"offload: {{{also}activations: true}}",
            replace(spec, offload=replace(offload, activations=True)),
        )


def _first_blocks(spec: Spec, blocks: Sequence[str], count: int) -> PlanChange:
    """Return the change that checkpoints the first `count` of `blocks`."""
    numbers: dict[str, list[str]] = {}
    for fqn in blocks[:count]:
        container, _, number = fqn.rpartition(".")
        numbers.setdefault(container, []).append(number)
    globs = [
        ".".join(filter(None, (container, _range(each)))) for container, each in numbers.items()
    ]
    policy = ActivationCheckpointing(mode="full")
    match = tuple(Selector("glob", glob) for glob in globs)
    rule = Rule(index=len(spec.rules), match=match, activation_checkpointing=policy)
    written = ", ".join(f'"{glob}"' for glob in globs)
    return PlanChange(
        f"checkpoint {count} of {len(blocks)} blocks",
        f"rules: [{{match: [{written}], activation_checkpointing: full}}]",
        replace(spec, rules=(*spec.rules, rule)),
    )


def _range(names: Sequence[str]) -> str:
    """Return a glob that matches exactly these children of one container: "{0..3}" or "{0,2}"."""
    if len(names) == 1:
        return names[0]
    if [*names] == [str(n) for n in range(int(names[0]), int(names[0]) + len(names))]:
        return f"{{{names[0]}..{names[-1]}}}"
    return f"{{{','.join(names)}}}"


def _large_of_the_root(plan: Plan) -> list[str]:
    """Return the fqns of modules with a tenth or more of the root FSDP unit's parameters.

    These parameters stay gathered from the beginning of the forward to the end of the backward,
    unless the module gets its own unit.
    """
    a = plan.assignment
    if a.wrapper != "units" or not a.units or a.stages is not None:
        return []
    root = a.units.get("")
    if root is None or not root.is_sharded:
        return []
    held: dict[str, int] = {}
    for placed in a.tensors.values():
        if placed.unit == "" and len(placed.info.names) == 1:
            module = placed.info.fqn.rpartition(".")[0]
            held[module] = held.get(module, 0) + placed.info.numel
    total = sum(held.values())
    return [module for module, size in held.items() if module and 10 * size >= total]


def _batches(plan: Plan) -> Iterator[PlanChange]:
    """Yield the change to half the samples per microbatch, which is halved again if needed."""
    if plan.micro is not None and plan.micro % 2 == 0:
        yield _halved(plan.spec, plan.micro, plan.micro, plan.accumulate)


def _halved(spec: Spec, first: int, micro: int, count: int) -> PlanChange:
    half, twice = micro // 2, 2 * count
    return PlanChange(
        f"micro batch {first} to {half}, accumulated {twice} times",
        f"batch: {{micro: {half}, accumulate: {twice}}}",
        replace(spec, batch=replace(spec.batch, micro=half, accumulate=twice)),
        None if half % 2 else lambda: _halved(spec, first, half, twice),
    )


def _strategies(plan: Plan) -> Iterator[PlanChange]:
    """Yield the strategies that shard more states, over the ranks that the plan has."""
    spec, mesh, now = plan.spec, plan.mesh, plan.assignment.strategy
    if mesh.size(*DATA_AXES) == 1:
        return
    axes, sizes = now.axes, spec.mesh
    if not now.cuts:  # Ranks that only replicate.
        axes = ("dp_shard",)
        if isinstance(sizes, Mapping):
            sizes = MappingProxyType(
                {"dp_shard" if axis == "dp_replicate" else axis: n for axis, n in sizes.items()}
            )
    words = {"optimizer": "optimizer states", "gradient": "gradients", "parameter": "parameters"}
    for later in STRATEGIES.values():
        if later.axes == axes and later.cuts > now.cuts:
            last = [word for state, word in words.items() if state in later.cuts][-1]
            yield PlanChange(
                f"shard {last} over data ranks",
                f"strategy: {later.name}",
                replace(spec, strategy=later.name, mesh=sizes),
            )


def _more_machines(plan: Plan) -> Iterator[PlanChange]:
    """Yield the change to twice as many ranks along dp_shard, doubled again if needed."""
    if plan.mesh.size("dp_shard") > 1 and not plan.mesh.loans:
        yield _times(plan, 2)


def _times(plan: Plan, times: int) -> PlanChange:
    """Return the change to `times` as many GPUs; its smaller variants use whole nodes."""
    shard, hardware = plan.mesh.size("dp_shard"), plan.spec.hardware
    step = 1
    if hardware is not None:
        alike = plan.mesh.world_size // shard
        step = hardware.gpus_per_node // math.gcd(hardware.gpus_per_node, alike)
    change = _on(plan, times * shard)
    more = partial(_times, plan, 2 * times) if times < _MOST_TIMES else None
    if shard % step:
        return replace(change, further=more)
    return replace(
        change,
        further=more,
        count=times * shard // step,
        fails=times // 2 * shard // step,
        part=lambda count: _on(plan, count * step),
    )


def _on(plan: Plan, shard: int) -> PlanChange:
    """Return the change to `shard` ranks along dp_shard, with the same batch on each rank."""
    spec, mesh = plan.spec, plan.mesh
    before = mesh.size("dp_shard")
    sizes = {axis.name: shard if axis.name == "dp_shard" else axis.size for axis in mesh}
    world = mesh.world_size // before * shard
    hardware, batch = spec.hardware, spec.batch
    if hardware is not None:
        hardware = replace(hardware, nodes=-(-world // hardware.gpus_per_node))
    if batch.global_ is not None:
        batch = replace(batch, global_=batch.global_ * shard // before)
    settings = ", ".join(f"{axis}: {size}" for axis, size in sizes.items())
    return PlanChange(
        f"{world} GPUs",
        f"mesh: {{{settings}}}",
        replace(spec, mesh=MappingProxyType(sizes), hardware=hardware, batch=batch),
    )
