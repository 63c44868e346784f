"""Run microbatches of a model on fake tensors, and record what they allocate and compute.

`watch` runs all microbatches on one copy of the model, each with its own number of samples and its
own recomputed blocks. Without tp, no process group is needed, because the memory and communication
of FSDP2 and DDP are added later, by rules. `watch_rank` runs one microbatch under a plan as it is.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from meshplan.assign.base.types import Reason, Recompute
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.repeat.repeat_blocks import RepeatedBlocks
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.chunked_loss import apply_chunked_loss
from meshplan.runtime.apply.recompute import apply_recompute
from meshplan.runtime.apply.wrap import applied, cast_parameters
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.fake_step.cuda_mode import Behaviour
from meshplan.runtime.fake_step.equal_blocks import runs_of, short_plan, shortened, shown_of
from meshplan.runtime.fake_step.kernels import KernelCounter, OperatorWork, Where
from meshplan.runtime.fake_step.microbatch import (
    MicrobatchRecorder,
    Observer,
    applied_without_data,
    without_data,
)
from meshplan.runtime.fake_step.step import LossFn, fake_rank, fake_single_rank
from meshplan.spec.spec import ActivationCheckpointing

Fake: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
FULL = ActivationCheckpointing(mode="full")


@dataclass(frozen=True, slots=True)
class MicrobatchCosts:
    """The recorded memory and work of one microbatch.

    Args:
        trace: The memory trace of the whole model.
        done: Work by direction and block. Of many equal blocks only a few run and have an entry.
        shown: For each block of the whole model, the block that ran for it: itself or an equal
            one.
        unknown: Names of operators whose FLOPs are not known.
        convolved: Share of the FLOPs that are convolutions, from 0 to 1.
        is_steady: If True, the model keeps nothing from one microbatch to the next.
        has_cast: If True, a unit changed the dtype of an input or output.
        input_bytes: Most bytes of inputs that require grad, of any block.
    """

    trace: MicrobatchTrace
    done: Mapping[Where, OperatorWork]
    shown: Mapping[str, str]
    unknown: frozenset[str]
    convolved: float
    is_steady: bool
    has_cast: bool
    input_bytes: int

    @property
    def flops(self) -> float:
        """FLOPs of the whole model: all blocks, also those left out, and work outside of blocks."""
        times = Counter(self.shown.values())
        return sum(done.flops * times.get(at.block, 1) for at, done in self.done.items())


@dataclass(frozen=True, slots=True)
class Ask:
    """A microbatch to run.

    Args:
        samples: Number of samples.
        recomputed: Fqns of the blocks that are recomputed in backward.
    """

    samples: int
    recomputed: frozenset[str] = frozenset()


def with_recompute(plan: Plan, recomputed: frozenset[str]) -> Plan:
    """Return the plan with full recomputation of exactly the modules `recomputed`, given by fqn."""
    policy = {
        fqn: Recompute(FULL, Reason("asked")) for fqn in plan.graph.modules if fqn in recomputed
    }
    whole = replace(plan.assignment, recompute=MappingProxyType(policy))
    return replace(plan, assignment=whole)


def watch(
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    device: str,
    asks: Sequence[Ask],
    *,
    is_steady: bool = False,
) -> list[MicrobatchCosts]:
    """Run microbatches of a model one after the other, and return the record of each.

    Of many equal blocks in a row only a few run, and the record is extended to all of them.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        plan: A plan without cp, pp and recomputation, whose units' hook points are recorded. With
            tp, the microbatches run on its first rank.
        inputs: Inputs of the largest microbatch, with the samples along dim 0. Smaller microbatches
            take the first samples.
        targets: Targets of the same samples.
        loss_fn: Maps the model's output and the targets to the loss.
        device: Name of the device whose kernels are emulated, as for `fake_step`.
        asks: The microbatches to run, fastest with equal `recomputed` next to each other.
        is_steady: If True, an earlier call found that this model keeps nothing between
            microbatches, so each needs to run only once.

    Raises:
        ApplyError: The plan has tp, and this process is in a process group already.
    """
    batches = {each.samples: first_samples(each.samples, (inputs, targets)) for each in asks}
    tasks = [_Task(with_recompute(plan, each.recomputed), batches[each.samples]) for each in asks]
    is_rank = plan.mesh.size("tp") > 1
    return _recorded(model, tasks, loss_fn, device, is_rank=is_rank, is_steady=is_steady)


def watch_rank(
    model: nn.Module, plan: Plan, inputs: Any, targets: Any, loss_fn: LossFn, device: str
) -> MicrobatchCosts:
    """Run a microbatch as rank 0 of a plan that may have tp and ep, and return its record.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        plan: A plan without pp and cp. Its recomputation is part of the microbatch.
        inputs: Inputs of the microbatch.
        targets: Targets of the same samples.
        loss_fn: Maps the model's output and the targets to the loss.
        device: Name of the device whose kernels are emulated, as for `fake_step`.

    Raises:
        ApplyError: This process is in a process group already.
    """
    tasks = [_Task(plan, (inputs, targets))]
    (found,) = _recorded(model, tasks, loss_fn, device, is_rank=True, is_steady=False)
    return found


def first_samples(samples: int, batch: Any) -> Any:
    """Return the first samples of a nested batch, along dim 0 of every tensor."""
    return mapped(batch, lambda tensor: tensor[:samples])


class _Task(NamedTuple):
    """A microbatch to record.

    Args:
        plan: The plan, with what is recomputed.
        batch: (inputs, targets).
    """

    plan: Plan
    batch: tuple[Any, Any]


def _recorded(
    model: nn.Module,
    tasks: Sequence[_Task],
    loss_fn: LossFn,
    device: str,
    *,
    is_rank: bool,
    is_steady: bool,
) -> list[MicrobatchCosts]:
    """Record microbatches under plans that differ in what is recomputed.

    Args:
        model: The unsharded model.
        tasks: The microbatches.
        loss_fn: Maps the model's output and the targets to the loss.
        device: Name of the device whose kernels are emulated.
        is_rank: If True, the plan is applied, and its first rank runs the microbatches. If False,
            the plan has only data axes, and no process group is needed.
        is_steady: As for `watch`.
    """
    first = tasks[0].plan
    runs = [] if first.assignment.apply else runs_of(model, first)
    others = {frozenset(plan.assignment.recompute): plan for plan, _ in tasks[1:]}
    others.pop(frozenset(first.assignment.recompute), None)
    if any(runs_of(model, other) != runs for other in others.values()):
        runs = []
    if runs:
        try:
            with shortened(model, runs) as used:
                short = [_Task(short_plan(plan, runs), batch) for plan, batch in tasks]
                seen = _CostWatch(model, short, loss_fn, device, runs, is_rank=is_rank).all(
                    is_steady=is_steady
                )
            if not used:
                return seen
        except Exception:  # The model's code may rely on all its blocks and raise anything.
            seen = []  # Run the whole model below, where a genuine error is raised again.
    return _CostWatch(model, tasks, loss_fn, device, (), is_rank=is_rank).all(is_steady=is_steady)


class _CostWatch:
    """A copy of a model that runs microbatches, with hooks that record them.

    Args:
        model: The model, shortened if `runs` is not empty.
        tasks: The microbatches, with plans for that model.
        loss_fn: Maps the model's output and the targets to the loss.
        device: Name of the device whose kernels are emulated.
        runs: The runs of equal blocks that were shortened.
        is_rank: As for `_recorded`.
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: Sequence[_Task],
        loss_fn: LossFn,
        device: str,
        runs: Sequence[RepeatedBlocks],
        *,
        is_rank: bool,
    ) -> None:
        self._model, self._tasks, self._loss_fn = model, tasks, loss_fn
        self._device, self._runs, self._is_rank = device, runs, is_rank
        self._plan, self._is_several = tasks[0].plan, len(tasks) > 1
        self._shown = shown_of(self._plan.graph.blocks(), runs)
        self._observer = Observer(self._counter, tuple(dict.fromkeys(self._shown.values())))

    def all(self, *, is_steady: bool) -> list[MicrobatchCosts]:
        """Return the record of each microbatch, as it runs from the second time on."""
        with warnings.catch_warnings(), self._copied() as (copied, fake):
            warnings.simplefilter("ignore")
            self._microbatches = MicrobatchRecorder(
                copied, self._plan, self._loss_fn, self._observer, self._runs
            )
            # Tensors that a microbatch leaves behind exist from the beginning of the next one. A
            # single microbatch shows that only if it runs twice.
            twice = not self._is_several and not is_steady
            found = self._each(copied, fake, twice=twice)
            is_steady = is_steady or not any(left for _, left in found)
            if not is_steady and not twice:
                found = self._each(copied, fake, twice=True)
            return [replace(seen, is_steady=is_steady) for seen, _ in found]

    @contextmanager
    def _copied(self) -> Iterator[tuple[nn.Module, Fake]]:
        """Enter a fake mode; yield a copy of the model, watched, and what makes tensors fake."""
        # Several microbatches recompute different blocks, one after the other.
        plan = with_recompute(self._plan, frozenset()) if self._is_several else self._plan
        bare = without_data(plan)
        if self._is_rank:
            with fake_rank(self._model, bare, 0, self._device) as (model, mesh, fake, behaviour):
                watch = partial(self._observer.watch, plan=plan, behaviour=behaviour)
                wrapped = applied_without_data(model, bare, mesh, watch)
                applied(wrapped).is_tested = True
                yield wrapped, fake
            return
        with fake_single_rank(self._model, self._device) as (model, fake, behaviour):
            cast_parameters(model.train(), bare)
            apply_chunked_loss(model, bare)()
            self._observer.watch(model, plan, behaviour)
            yield model, fake

    def _each(
        self, model: nn.Module, fake: Fake, *, twice: bool
    ) -> list[tuple[MicrobatchCosts, tuple[int, ...]]]:
        """Return (record, sizes of tensors left by earlier microbatches) of each microbatch."""
        out = []
        is_applied = self._is_rank and not self._is_several
        is_new = self._is_rank  # Layers of tp find out the placements of their inputs.
        for plan, batch in self._tasks:
            with nullcontext(False) if is_applied else _again(model, plan) as looks_first:
                for _ in range(1 + (twice or looks_first or is_new)):
                    found = self._once(*mapped(batch, fake))
            out.append(found)
            is_new = False
        return out

    def _once(self, inputs: Any, targets: Any) -> tuple[MicrobatchCosts, tuple[int, ...]]:
        microbatches, observer = self._microbatches, self._observer
        trace = microbatches.repeated(microbatches.run(inputs, targets))
        counter = observer.tracker
        assert isinstance(counter, KernelCounter)
        seen = MicrobatchCosts(
            trace=trace,
            done=MappingProxyType(dict(counter.done)),
            shown=MappingProxyType(self._shown),
            unknown=frozenset(counter.unknown),
            convolved=counter.convolved_share,
            is_steady=False,
            has_cast=observer.recorder.has_cast,
            input_bytes=observer.block_recorder.input_bytes,
        )
        return seen, microbatches.left()

    def _counter(self, names: Mapping[nn.Module, str], behaviour: Behaviour) -> KernelCounter:
        mesh = self._plan.mesh if self._is_rank else None
        is_compiled = self._plan.spec.compile
        return KernelCounter(names, behaviour, self._shown.values(), mesh, is_compiled=is_compiled)


@contextmanager
def _again(model: nn.Module, plan: Plan) -> Iterator[bool]:
    """Recompute the plan's blocks inside the `with` block.

    Yields:
        True if a recomputed block has buffers: its first run then differs from later ones.
    """
    forwards = {fqn: vars(model.get_submodule(fqn)) for fqn in plan.assignment.recompute}
    before = {fqn: attributes.get("forward") for fqn, attributes in forwards.items()}
    apply_recompute(model, plan)
    try:
        yield any(any(True for _ in model.get_submodule(fqn).buffers()) for fqn in forwards)
    finally:
        for fqn, attributes in forwards.items():
            attributes.pop("forward", None)
            if before[fqn] is not None:
                attributes["forward"] = before[fqn]
