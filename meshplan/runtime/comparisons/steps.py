"""Check in steps 1, 2, 4, 8, ... that the parts of a step combine to the step of one process.

One check is not enough: the parts of one batch may happen to contain equal numbers of unmasked
tokens, which shows nothing about the next batch.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.context.batch import sequence_length
from meshplan.runtime.apply.data import gather
from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.apply.loss.loss_weights import History, num_parts
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import own_module
from meshplan.runtime.base.batch import chunked
from meshplan.runtime.base.batch_agreement import num_samples
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import raise_first
from meshplan.runtime.base.module_state import contents, users_hooks
from meshplan.runtime.base.optimizer_steps import is_due
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.checks.forward_writes import writes_in_forward
from meshplan.runtime.comparisons.asking import LossFn, Watched, ask, refuse_alone
from meshplan.runtime.comparisons.few import FewSamples
from meshplan.runtime.comparisons.given import (
    compares_ranks,
    is_distinctive,
    number_of,
    repeated_axis,
    same_samples,
    slots,
)
from meshplan.runtime.comparisons.halves import WIDE, Three, loss_problem, three_of, value_of
from meshplan.runtime.comparisons.independence import SampleFindings, compare_forwards
from meshplan.runtime.comparisons.mixing import follows_statistics, mixing_problem, name_mixing
from meshplan.runtime.comparisons.samples import largest, samples_of
from meshplan.runtime.comparisons.tokens import (
    AMOUNTS,
    Uneven,
    amounts_of,
    lone_problem,
    sequence_problem,
    uneven_of,
)

_OFTEN: Final = 16
"""Last of the steps that all compare forwards if the forward reads values of the batch."""
_LITTLE: Final = 1 << 16
"""Most elements of an output whose loss is also compared by halves of the tokens, after halves of
the samples have been compared. These show almost every mistake, so larger outputs are skipped."""


class StepCheck:
    """Compares the parts of one step with the whole batch.

    `train_step` makes one for each step. It runs the loss function inside `calling`, calls `see`
    after it, and calls `finish` before the optimizer steps. If no check is due, nothing is done.

    Args:
        model: The module that `parallelize` returned.
        plan: The plan that the model runs under.
        loss_fn: The loss function of the step.
        history: Observations from earlier steps.
        batch: This rank's inputs and targets.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: LossFn,
        history: History,
        batch: tuple[Any, Any],
    ) -> None:
        self._model, self._plan, self._loss_fn = model, plan, loss_fn
        self._history, self._step = history, history.steps + 1
        is_due_now = is_due(self._step) or (history.asks_values and self._step <= _OFTEN)
        is_due_now |= history.is_doubtful
        self._is_on = is_due_now and num_parts(plan) > 1 and not is_fake_execution()
        self._gathered = gather.num_gathered
        self._watched = Watched()
        self._problem: Problem | None = None
        self._if_uneven = Uneven()
        self._has_compared = False
        self._has_seen = False
        self._kept: list[Any] = []
        if self._is_on:
            microbatches = num_parts(plan) // plan.mesh.size(*GRADIENT_AXES)
            self._batch = batch
            self._samples = num_samples(batch) // microbatches
            self._few = FewSamples(plan, self._samples)
            self._amounts = [amounts_of(part) for part in chunked(batch[1], microbatches)]

    def calling(self, output: Any, targets: Any) -> AbstractContextManager[None]:
        """Return a context manager around the training's own call of the loss function.

        It observes side effects of the call (`Watched`).
        """
        if not self._is_on:
            return nullcontext()
        self._kept = self._kept_by_modules()
        return self._watched.call(output, targets)

    def see(self, output: Any, targets: Any, given: Any) -> None:
        """Compare the loss of the first microbatch with the losses of its halves.

        `finish` raises what is found here. Of later microbatches only a few samples are kept.

        Args:
            output: Output of the model for the microbatch.
            targets: Targets of the microbatch.
            given: Return value of the loss function for the microbatch.
        """
        if not self._is_on:
            return
        self._few.keep(output, targets)
        if self._has_seen:
            return
        kept, self._has_seen = self._kept_by_modules(), True
        if gather.num_gathered != self._gathered or self._watched.sends:
            return
        plan, samples = self._plan, self._samples

        known = None if self._watched.writes else given
        # A loss may take from the model, once, what its forward has left there.
        is_apart = plan.num_microbatches > 1 and self._kept == kept
        if known is not None and is_apart and not plan.spec.batch.per_rank:
            self._problem = repeat_problem(self._loss_fn, output, targets, known, plan)
            if self._problem is not None:
                return

        def three(tokens: int | None = None, most: int = WIDE) -> Three | None:
            return three_of(self._loss_fn, output, targets, known, samples, tokens, most)

        is_cut = plan.assignment.context is not None
        of_tokens = three(self._part_length()) if is_cut else None
        if of_tokens is not None:
            self._has_compared = True
            self._problem = of_tokens.confirms(sequence_problem(of_tokens, plan))
        of_samples = three() if not is_cut or (samples > 1 and self._problem is None) else None
        if of_samples is not None:
            self._has_compared = True
            judge = loss_problem if samples > 1 else lone_problem
            self._problem = self._problem or of_samples.confirms(judge(of_samples, plan))
        if not is_cut and samples == 1:
            of_tokens = of_samples
        elif not is_cut and plan.spec.loss == "mean":
            rows = [t for _, t in tensors_in(targets) if t.ndim > 1]
            of_tokens = three(rows[0].shape[1], _LITTLE) if rows else None
        if of_tokens is not None:
            found = uneven_of(of_tokens, plan)
            is_sure = any(of_tokens.confirms(each) for each in found.problems.values())
            self._if_uneven = found if is_sure else Uneven({}, found.is_over)

    def _part_length(self) -> int:
        """Return how many tokens of each sample this rank has, of those that cp splits."""
        stated = self._plan.spec.batch.seq_len
        part = stated // self._plan.mesh.size("cp") if stated is not None else None
        return sequence_length(self._batch[0], part)

    def finish(self) -> None:
        """Make the comparisons that involve several ranks, and raise on all ranks what one found.

        All ranks must call this, before the optimizer steps.

        Raises:
            ApplyError: The parts of the step would not combine to the step of one process.
        """
        if not self._is_on:
            return
        is_gathered = gather.num_gathered != self._gathered
        given = number_of(self._batch, is_whole=False) if compares_ranks(self._plan) else 0
        columns = list(zip(*self._amounts, strict=True))
        is_wrong, is_uncompared, cannot_run, *maxima = largest(
            self._problem is not None,
            self._has_seen and not self._has_compared and not self._watched.sends,
            is_gathered or self._leaves_traces(),
            *(amount in self._if_uneven.problems for amount in AMOUNTS),
            *(not is_over for is_over in self._if_uneven.is_over),
            *map(max, columns),
            *(-min(column) for column in columns),
            *(slots(given, self._plan) if given else ()),
        )
        of_amounts, given_to = maxima[: 4 * len(AMOUNTS)], maxima[4 * len(AMOUNTS) :]
        if given:
            self._refuse_repeated_samples(given_to)
        if is_wrong:
            raise_first(self._problem)
        may_call = not is_gathered and not self._watched.sends
        problem, is_of_samples = self._few.problem(self._loss_fn, may_call=may_call)
        if problem is not None:
            raise ApplyError(problem)
        for amount in AMOUNTS:
            would_be_wrong, is_not_over, most, least = of_amounts[amount :: len(AMOUNTS)]
            if would_be_wrong and not is_not_over and most != -least and not is_of_samples:
                raise_first(self._if_uneven.problems.get(amount))
        if not cannot_run and (is_uncompared or self._asks_forward()):
            self._compare_forwards(is_uncompared=bool(is_uncompared))

    def _refuse_repeated_samples(self, digests: list[float]) -> None:
        """Raise if all ranks along a data axis were given the same samples; all ranks must call it.

        From the second step on, only a repetition raises: ranks may draw equal samples by chance.

        Args:
            digests: For each data rank, a digest of a sample of its batch's elements.
        """
        axis = repeated_axis(digests, self._plan)
        if axis is not None:
            own_digests = slots(number_of(self._batch, is_whole=True), self._plan)
            cannot_compare, *all_digests = largest(not is_distinctive(self._batch), *own_digests)
            axis = None if cannot_compare else repeated_axis(all_digests, self._plan)
        is_repeated, self._history.is_doubtful = self._history.is_doubtful, axis is not None
        if axis is not None and (self._step == 1 or is_repeated):
            raise ApplyError(same_samples(axis, num_samples(self._batch), self._plan))

    def _compare_forwards(self, *, is_uncompared: bool) -> None:
        # If losses are compared too, use two parts: the losses of the first and the last part only
        # combine to the loss of all parts if there are no others.
        most = 2 if is_uncompared else num_parts(self._plan)
        turn = self._step.bit_length() - 1 if is_due(self._step) else self._step
        samples = samples_of(self._batch, self._samples, self._plan, most=most, turn=turn)
        if samples is None:
            return
        # With pipeline stages, another number of samples needs a new recording of the forward.
        asks_fewer = self._plan.assignment.stages is None or self._step == 1
        found = compare_forwards(
            self._model,
            self._plan,
            samples,
            self._loss_fn if is_uncompared else None,
            asks_fewer=asks_fewer,
        )
        found = found or SampleFindings()
        mixes, is_wrong, asks_values = largest(
            found.mixes, found.problem is not None, found.asks_values
        )
        self._history.asks_values |= bool(asks_values)
        if mixes:
            self._refuse_mixing(found, name_mixing(self._model, self._plan, samples))
        elif is_wrong:
            raise_first(found.problem)

    def _asks_forward(self) -> bool:
        """Return True if this step compares forwards, which costs more than comparing losses.

        Steps 1, 16, 256, 4096, ... do, and every checked step if the forward reads values.
        """
        exponent = self._step.bit_length() - 1
        return self._history.asks_values or (is_due(self._step) and exponent % 4 == 0)

    def _leaves_traces(self) -> bool:
        """Return True if an extra forward could read state that an earlier forward has written.

        Hooks that the user registered count as well, because they may keep state in lists and
        closures, which cannot be restored.
        """
        return any(
            writes_in_forward(part) or any(True for _ in users_hooks(part))
            for part in self._parts()
        )

    def _parts(self) -> list[nn.Module]:
        """Return the user's module, or with a pipeline the modules of this rank's stages."""
        model = self._model
        return model.stage_modules if isinstance(model, PipelinedModule) else [own_module(model)]

    def _kept_by_modules(self) -> list[Any]:
        """Return what modules keep in attributes, to compare it; nothing after the first call."""
        is_asked = self._plan.num_microbatches > 1 and not self._has_seen
        return [contents(part) for part in self._parts()] if is_asked else []

    def _refuse_mixing(self, found: SampleFindings, named: tuple[str, nn.Module] | None) -> None:
        is_norm = named is not None and follows_statistics(named[1])
        # Ranks may name different modules, so only warn if no rank names anything but a norm.
        if not largest(found.mixes and not is_norm)[0]:
            if named is not None and dist.get_rank() == 0 and self._step == 1:
                name, module = named
                warnings.warn(
                    f"'{name}' ({type(module).__name__}) normalises with batch statistics in "
                    "evaluation mode too: each rank uses the statistics of its own samples, as "
                    "under DistributedDataParallel",
                    stacklevel=4,
                )
            return
        if not self._plan.spec.batch.per_rank:
            raise_first(mixing_problem(named, self._plan) if found.mixes and not is_norm else None)


_SAME, _SAME_OF_HALF = 1e-5, 1e-2
"""Relative differences of two calls that kernels may make which add up in any order."""


def repeat_problem(
    loss_fn: LossFn, output: Any, targets: Any, given: Any, plan: Plan
) -> Problem | None:
    """Call the loss function for the first microbatch again; return why its losses differ.

    One process calls it once in a step, and a step of several microbatches once for each. A
    function that counts its calls, as for a weight that grows, or that keeps a running mean of its
    losses, then gives later microbatches another loss.

    Args:
        loss_fn: The user's loss function.
        output: Output of the model for the microbatch.
        targets: Targets of the microbatch.
        given: Return value of the training's own call.
        plan: The plan that the model runs under.

    Returns:
        None if both calls return the same loss, or cannot be compared: the function is random, or
        returns no loss.
    """
    first = value_of(given, targets)
    try:
        again = ask(loss_fn, output, targets)
    except Exception as error:  # A function that asserts something about its state.
        if any(isinstance(tensor, LazyLogits) for _, tensor in tensors_in(output)):
            refuse_alone(error)  # Other ranks may wait in the head's collectives.
        return None
    second = value_of(again.returned, targets)
    if first is None or second is None or again.is_random:
        return None
    before, after = first[0].loss, second[0].loss
    share = _SAME if torch.finfo(first[1]).bits >= 32 else _SAME_OF_HALF
    if before != before or abs(before - after) <= share * max(abs(before), abs(after)):
        return None
    return Problem(
        f"loss_fn returns {before:.6g} for a microbatch, and {after:.6g} when it is called for it "
        "again: it keeps something from call to call, such as a count or a mean. One process calls "
        f"it once in a step, this plan {plan.num_microbatches} times",
        plan.spec.origin("pipeline.microbatches" if plan.assignment.stages else "batch"),
        "change what it keeps once a step, outside of loss_fn, or take one microbatch",
    )
