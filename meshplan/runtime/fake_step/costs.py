"""Run microbatches of a model on fake tensors, and record what they allocate and compute.

`watch` runs all microbatches on one copy of the model, each with its own number of samples and its
own recomputed blocks. No process group is needed, because the memory and communication of FSDP2 and
DDP are added later, by rules. `watch_rank` runs one microbatch as a rank of tp.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from meshplan.assign.base.types import Reason, Recompute
from meshplan.memory.log.events import Term
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.repeat.repeat_blocks import RepeatedBlocks, repeat_blocks
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.chunked_loss import apply_chunked_loss
from meshplan.runtime.apply.loss.loss_mode import loss_mode
from meshplan.runtime.apply.recompute import apply_recompute
from meshplan.runtime.apply.wrap import cast_parameters
from meshplan.runtime.base.batch import as_arguments, mapped
from meshplan.runtime.base.phases import begin, heard_by
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.fake_step.cuda_mode import Behaviour
from meshplan.runtime.fake_step.equal_blocks import Edges, runs_of, short_plan, shortened, shown_of
from meshplan.runtime.fake_step.hook_points import BlockRecorder
from meshplan.runtime.fake_step.kernels import KernelCounter, OperatorWork, Where
from meshplan.runtime.fake_step.microbatch import (
    Observer,
    hook_points_of,
    note_state,
    trace_microbatch,
    trace_of,
    without_data,
)
from meshplan.runtime.fake_step.step import LossFn, fake_single_rank, names_of
from meshplan.spec.spec import ActivationCheckpointing

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
        plan: A plan without tp, cp, pp and recomputation, whose units' hook points are recorded.
        inputs: Inputs of the largest microbatch, with the samples along dim 0. Smaller microbatches
            take the first samples.
        targets: Targets of the same samples.
        loss_fn: Maps the model's output and the targets to the loss.
        device: Name of the device whose kernels are emulated, as for `fake_step`.
        asks: The microbatches to run, fastest with equal `recomputed` next to each other.
        is_steady: If True, an earlier call found that this model keeps nothing between
            microbatches, so each needs to run only once.
    """
    plans = [with_recompute(plan, each.recomputed) for each in asks]
    batches = {each.samples: first_samples(each.samples, (inputs, targets)) for each in asks}
    runs = [] if plan.assignment.apply else runs_of(model, plans[0])
    others = {each.recomputed: other for each, other in zip(asks, plans, strict=True)}
    others.pop(asks[0].recomputed)
    if any(runs_of(model, other) != runs for other in others.values()):
        runs = []
    if runs:
        try:
            with shortened(model, runs) as used:
                short = [short_plan(each, runs) for each in plans]
                seen = _CostWatch(model, short, batches, loss_fn, device, runs).all(
                    asks, is_steady=is_steady
                )
            if not used:
                return seen
        except Exception:  # The model's code may rely on all its blocks and raise anything.
            seen = []  # Run the whole model below, where a genuine error is raised again.
    return _CostWatch(model, plans, batches, loss_fn, device, ()).all(asks, is_steady=is_steady)


def watch_rank(
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    device: str,
) -> MicrobatchCosts:
    """Run a microbatch as rank 0 of a plan that may have tp, and return its record.

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
    blocks = plan.graph.blocks()
    shown = shown_of(blocks, runs_of(model, plan))
    is_whole = True

    def make_counter(names: Mapping[nn.Module, str], behaviour: Behaviour) -> KernelCounter:
        nonlocal is_whole
        is_whole = set(blocks) <= set(names.values())
        every = blocks if is_whole else shown.values()
        return KernelCounter(names, behaviour, every, plan.mesh, is_compiled=plan.spec.compile)

    observer = Observer(make_counter, blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = trace_microbatch(model, plan, inputs, targets, loss_fn, 0, device, observer)
    counter, recorder = observer.tracker, observer.block_recorder
    assert isinstance(counter, KernelCounter)
    return MicrobatchCosts(
        trace=trace,
        done=MappingProxyType(dict(counter.done)),
        shown=MappingProxyType({block: block for block in blocks} if is_whole else shown),
        unknown=frozenset(counter.unknown),
        convolved=counter.convolved_share,
        is_steady=False,
        has_cast=recorder.has_cast,
        input_bytes=recorder.input_bytes,
    )


def first_samples(samples: int, batch: Any) -> Any:
    """Return the first samples of a nested batch, along dim 0 of every tensor."""
    return mapped(batch, lambda tensor: tensor[:samples])


class _CostWatch:
    """A copy of a model that runs the asked microbatches, with hooks that record them.

    Args:
        model: The model, shortened if `runs` is not empty.
        plans: The plan of each microbatch, in the order in which they are asked.
        batches: (inputs, targets) by number of samples.
        loss_fn: Maps the model's output and the targets to the loss.
        device: Name of the device whose kernels are emulated.
        runs: The runs of equal blocks that were shortened.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        batches: Mapping[int, Any],
        loss_fn: LossFn,
        device: str,
        runs: Sequence[RepeatedBlocks],
    ) -> None:
        self._model, self._plans, self._batches = model, plans, batches
        self._loss_fn, self._device, self._runs = loss_fn, device, runs
        self._blocks = plans[0].graph.blocks()

    def all(self, asks: Sequence[Ask], *, is_steady: bool) -> list[MicrobatchCosts]:
        """Return the record of each asked microbatch, as it runs from the second time on."""
        plain = without_data(with_recompute(self._plans[0], frozenset()))
        with warnings.catch_warnings(), fake_single_rank(self._model, self._device) as (
            fake_model, fake, behaviour,
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            self._fake, self._wrapped = fake, fake_model
            cast_parameters(fake_model.train(), plain)
            apply_chunked_loss(fake_model, plain)()
            names = names_of(self._wrapped)
            self._tracker = KernelCounter(
                names, behaviour, self._shown().values(), is_compiled=self._plans[0].spec.compile
            )
            self._of_params = note_state(self._tracker, self._wrapped, ())
            self._recorder = hook_points_of(self._wrapped, self._plans[0], self._tracker)
            shown = dict.fromkeys(self._shown().values())
            self._block_recorder = BlockRecorder(
                self._wrapped, self._plans[0], shown, self._tracker, self._recorder
            )
            self._edges = [Edges(self._wrapped, run, self._tracker) for run in self._runs]
            alone = len(asks) == 1 and not is_steady
            found = self._each(asks, twice=alone)
            # Tensors that a microbatch leaves behind exist from the beginning of the next one. A
            # single microbatch shows that only if it runs twice.
            is_steady = is_steady or not any(before for _, before in found)
            if not is_steady and not alone:
                found = self._each(asks, twice=True)
            return [replace(seen, is_steady=is_steady) for seen, _ in found]

    def _each(
        self, asks: Sequence[Ask], *, twice: bool
    ) -> list[tuple[MicrobatchCosts, tuple[int, ...]]]:
        """Return (record, sizes of tensors left by earlier microbatches) of each microbatch."""
        out = []
        for ask, plan in zip(asks, self._plans, strict=True):
            with _again(self._wrapped, plan) as looks_first:
                for _ in range(1 + (twice or looks_first)):
                    found = self._once(ask)
            out.append(found)
        return out

    def _once(self, ask: Ask) -> tuple[MicrobatchCosts, tuple[int, ...]]:
        tracker, recorder = self._tracker, self._recorder
        inputs, targets = mapped(self._batches[ask.samples], self._fake)
        recorder.clear()
        for edge in self._edges:
            edge.clear()
        tracker.note((tensor for _, tensor in tensors_in((inputs, targets))), Term.INPUTS)
        tracker.forget()
        self._block_recorder.clear()
        args, kwargs = as_arguments(inputs)
        with heard_by(tracker.begin), tracker, loss_mode(self._plans[0]):
            begin("forward")
            output = self._wrapped(*args, **kwargs)
            tracker.note((tensor for _, tensor in tensors_in(output)), Term.LOSS)
            begin("loss")
            loss = self._loss_fn(output, targets)
            del output
            begin("backward")
            (loss * 1.0).backward()
            recorder.finish()
        log = tracker.log()
        num_left_out = sum(event.storage in self._of_params for event in log.events)
        trace = replace(
            trace_of(tracker, [recorder], self._of_params, loss),
            taken=dict(self._block_recorder.taken),
        )
        if self._runs:
            trace = repeat_blocks(trace, [edge.found(num_left_out) for edge in self._edges])
        before = tuple(
            event.delta for event in log.events
            if not event.phase and event.storage not in self._of_params
            and log.storages[event.storage].term not in (Term.INPUTS, Term.BUFFERS)
        )  # fmt: skip
        seen = MicrobatchCosts(
            trace=trace,
            done=MappingProxyType(dict(tracker.done)),
            shown=MappingProxyType(self._shown()),
            unknown=frozenset(tracker.unknown),
            convolved=tracker.convolved_share,
            is_steady=False,
            has_cast=recorder.has_cast,
            input_bytes=self._block_recorder.input_bytes,
        )
        return seen, before

    def _shown(self) -> dict[str, str]:
        """Map each block of the whole model to the block that runs for it."""
        return shown_of(self._blocks, self._runs)


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
