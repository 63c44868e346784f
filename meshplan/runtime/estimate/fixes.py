"""Find single changes to a plan that would make its step fit into memory.

The memory with each change is estimated like that of the plan. Changes are tried in the order of
what they cost a training run: nothing, a little communication, more computing, more machines. A
change that contradicts the plan or the model is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from meshplan.assign.tensor_parallel.chunked_loss import heads_of
from meshplan.errors import MeshplanError
from meshplan.layout.mesh import DATA_AXES
from meshplan.memory.answer.estimate import Fix, MemoryEstimate, margin
from meshplan.plan.plan import Plan
from meshplan.spec.spec import ActivationCheckpointing, Rule, Selector, Spec
from meshplan.spec.strategies import STRATEGIES

_A_FEW_SECONDS: Final = 8.0
"""Seconds that the search may take if the user does not ask for it."""
_MOST_TIMES: Final = 8
"""Highest factor by which the number of GPUs is multiplied."""
_CHUNKS: Final = 8
"""Number of chunks of a loss. Source: torchtune's default for chunked cross-entropy."""


@dataclass(frozen=True, slots=True)
class _TriedChange:
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
    further: Callable[[], _TriedChange] | None = None
    count: int = 0
    fails: int = 0
    part: Callable[[int], _TriedChange] | None = None
    is_whole: bool = False

    @property
    def num_parts(self) -> int:
        """Highest number of sizes that the binary search for the smallest that fits estimates."""
        return (self.count - self.fails - 1).bit_length() if self.part is not None else 0


def with_fixes(
    plan: Plan,
    estimate: MemoryEstimate,
    again: Callable[[Spec], MemoryEstimate],
    is_asked: bool | None,
    report: Callable[[str], None],
    took_s: float,
) -> MemoryEstimate:
    """Return an estimate that does not fit with single changes to the plan that would fit.

    Changes that only take less memory are added too, marked as not fitting.

    Args:
        plan: The plan that was estimated.
        estimate: The estimate of the plan.
        again: Estimates another spec by the same method, so that the results can be compared.
        is_asked: If True, look for changes; if False, do not; if None, look if that takes at most a
            few seconds, else add a note.
        report: Progress callback.
        took_s: Seconds that the estimate took, to predict how long each change takes.

    Returns:
        The estimate with `fixes`; unchanged if it fits or no limit is known.
    """
    if estimate.fits is not False or is_asked is False:
        return estimate
    found = list(_free(estimate))
    changes = list(changes_of(plan))
    takes_s = took_s * sum(1 + change.num_parts for change in changes)
    if is_asked is None and takes_s > _A_FEW_SECONDS:
        note = f"--fixes looks for single changes that make the plan fit, in about {takes_s:.0f} s"
        return replace(estimate, fixes=tuple(found), notes=(*estimate.notes, note))
    waiting = deque(changes)

    def high_of(change: _TriedChange) -> int | None:
        """Return the upper end, in bytes, of the worst rank's band under a change.

        Return None if the change is impossible, or exceeds the host's memory.
        """
        report(f"trying: {change.text}")
        try:
            other = again(change.spec)
        except MeshplanError:
            return None  # The change contradicts this plan or this model.
        if other.host is not None and other.host.is_over:
            return None
        return other.worst.band[1]

    limit = estimate.limit_bytes
    assert limit is not None
    while waiting:
        change = waiting.popleft()
        high = high_of(change)
        if high is None:
            continue
        if high > limit and change.further is not None:
            waiting.appendleft(change.further())
            continue
        whole = _fix(change, high, limit)
        least = _least(change, high_of, limit) if high <= limit else None
        if least is not None:
            found.append(least)
        if high < estimate.worst.band[1] and (least is None or change.is_whole):
            found.append(whole)
    return replace(estimate, fixes=tuple(found))


def _fix(change: _TriedChange, high: int, limit: int) -> Fix:
    return Fix(change=change.text, setting=change.setting, total_bytes=high, fits=high <= limit)


def _least(
    change: _TriedChange, high_of: Callable[[_TriedChange], int | None], limit: int
) -> Fix | None:
    """Find the smallest part of a change that fits, by binary search.

    Args:
        change: A change that fits.
        high_of: Returns the worst rank's bytes under a change, or None if it is impossible.
        limit: Bytes of a device.

    Returns:
        The part, or None if only the whole change fits.
    """
    fails, fits, found = change.fails, change.count, None
    while change.part is not None and fits - fails > 1:
        middle = (fails + fits) // 2
        part = change.part(middle)
        high = high_of(part)
        if high is not None and high <= limit:
            fits, found = middle, _fix(part, high, limit)
        else:
            fails = middle
    return found


def _free(estimate: MemoryEstimate) -> Iterator[Fix]:
    """Yield the change to expandable segments, if it takes less memory.

    It needs no new estimate: `packed_bytes` of the existing one has the bytes reserved with them.
    """
    highs = []
    for group in estimate.groups:
        packed = group.packed_bytes
        saved = 0 if packed is None else margin(group.peak.reserved_bytes) - margin(packed)
        highs.append(group.band[1] - max(0, saved))
    assert estimate.limit_bytes is not None
    if max(highs) < estimate.worst.band[1]:
        yield Fix(
            change="use expandable segments in the allocator",
            setting="allocator: expandable",
            total_bytes=max(highs),
            fits=max(highs) <= estimate.limit_bytes,
        )


def changes_of(plan: Plan) -> Iterator[_TriedChange]:
    """Yield single changes to a plan that may take less memory, those with the least cost first."""
    spec, assignment = plan.spec, plan.assignment
    if assignment.wrapper == "ddp" and not spec.ddp.get("gradient_as_bucket_view", False):
        ddp = MappingProxyType({**spec.ddp, "gradient_as_bucket_view": True})
        yield _TriedChange(
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
        yield _TriedChange(f"gather {words} separately", setting, replace(spec, rules=rules))
    if assignment.mesh.size("tp") > 1 and not assignment.loss_parallel:
        yield _TriedChange(
            "compute the loss on logits sharded over the vocabulary",
            "loss_parallel: true",
            replace(spec, loss_parallel=True),
        )
    if spec.loss_chunks == 1 and not assignment.loss_parallel and len(heads_of(plan.graph)) == 1:
        yield _TriedChange(
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
            yield _TriedChange(
                words,
                f"activation_checkpointing: {mode}",
                replace(spec, activation_checkpointing=policy),
                count=len(blocks),
                part=partial(_first_blocks, spec, blocks) if blocks else None,
                is_whole=True,
            )
    elif spec.activation_checkpointing.mode != "full" or spec.activation_checkpointing.every > 1:
        policy = ActivationCheckpointing(mode="full")
        yield _TriedChange(
            "checkpoint every block",
            "activation_checkpointing: full",
            replace(spec, activation_checkpointing=policy),
        )
    yield from _offloads(plan)
    yield from _more_machines(plan)


def _offloads(plan: Plan) -> Iterator[_TriedChange]:
    """Yield changes that offload parameters or activations to the host.

    They come before changes that add devices, but copies cost time.
    """
    spec, a = plan.spec, plan.assignment
    offload = spec.offload
    if any(unit.is_sharded and not unit.on_host for unit in a.units.values()):
        also = ", activations: true" if offload.activations else ""
        yield _TriedChange(
            "offload parameters and optimizer states to the host",
            f"offload: {{params: true{also}}}" if also else "offload: params",
            replace(spec, offload=replace(offload, params=True, optimizer=None)),
        )
    if plan.graph.blocks() and not a.host_activations:
        also = "params: true, " if offload.params else ""
        yield _TriedChange(
            "offload the activations that blocks save to the host",
            f"offload: {{{also}activations: true}}",
            replace(spec, offload=replace(offload, activations=True)),
        )


def _first_blocks(spec: Spec, blocks: Sequence[str], count: int) -> _TriedChange:
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
    return _TriedChange(
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


def _batches(plan: Plan) -> Iterator[_TriedChange]:
    """Yield the change to half the samples per microbatch, which is halved again if needed."""
    if plan.micro is not None and plan.micro % 2 == 0:
        yield _halved(plan.spec, plan.micro, plan.micro, plan.accumulate)


def _halved(spec: Spec, first: int, micro: int, count: int) -> _TriedChange:
    half, twice = micro // 2, 2 * count
    return _TriedChange(
        f"micro batch {first} to {half}, accumulated {twice} times",
        f"batch: {{micro: {half}, accumulate: {twice}}}",
        replace(spec, batch=replace(spec.batch, micro=half, accumulate=twice)),
        None if half % 2 else lambda: _halved(spec, first, half, twice),
    )


def _strategies(plan: Plan) -> Iterator[_TriedChange]:
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
            yield _TriedChange(
                f"shard {last} over data ranks",
                f"strategy: {later.name}",
                replace(spec, strategy=later.name, mesh=sizes),
            )


def _more_machines(plan: Plan) -> Iterator[_TriedChange]:
    """Yield the change to twice as many ranks along dp_shard, doubled again if needed."""
    if plan.mesh.size("dp_shard") > 1 and not plan.mesh.loans:
        yield _times(plan, 2)


def _times(plan: Plan, times: int) -> _TriedChange:
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


def _on(plan: Plan, shard: int) -> _TriedChange:
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
    return _TriedChange(
        f"{world} GPUs",
        f"mesh: {{{settings}}}",
        replace(spec, mesh=MappingProxyType(sizes), hardware=hardware, batch=batch),
    )
