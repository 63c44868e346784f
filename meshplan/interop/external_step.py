"""`ExternalStep`: the parts of `train_step`, in the order in which the loop of another tool calls.

Such a loop asks for one microbatch after the other, calls backward itself, and may do something
between the last backward and the optimizer's step, such as logging a norm. `train_step` cannot be
cut there, so its parts are here one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.apply.data.data import set_gradient_sync
from meshplan.runtime.apply.loss.loss_mode import loss_mode
from meshplan.runtime.apply.loss.loss_weights import Weights, not_a_loss
from meshplan.runtime.apply.loss.vocab_parallel_loss import take_loss
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied, own_module, set_accumulate
from meshplan.runtime.base.batch_agreement import (
    check_batches_agree,
    mean_over_ranks,
    num_samples,
)
from meshplan.runtime.base.mesh import device
from meshplan.runtime.checks.forward_writes import begin_microbatch
from meshplan.runtime.checks.outside import guard_loss
from meshplan.runtime.checks.tp_replicas import check_loss
from meshplan.runtime.torch_private.private import intercept_calls
from meshplan.runtime.train.dataloader import targets_of
from meshplan.runtime.train.gradient_scale import unscale
from meshplan.runtime.train.step import agreed_step, check_optimizer


class ExternalStep:
    """The optimizer steps of a parallelized model in the loop of another tool.

    Each microbatch has the weight that it has in one process: the loop divides its loss by their
    number. The ranks' parts of a microbatch are weighted as the plan's `loss` states.

    Args:
        model: The module that `parallelize` returned.

    Attributes:
        model: The same.
        state: Its `Applied`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.state = model, applied(model)
        self._number = 0
        self._samples = 0
        self._is_finite: bool | None = None  # Of the unscaled gradients; None before.
        self._weights: Weights | None = None
        self._output: Any = None
        self._stashed: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._sharded = list(model.parameters())
        self._guard: AbstractContextManager[object] | None = None
        self._is_guarding = False
        self._depth = 0
        if not self.is_pipelined:
            # A function, because a copy of the model must not copy this object.
            intercept_calls(
                model, lambda call, *args, **kwargs: self._around(call, *args, **kwargs)
            )

    @property
    def is_pipelined(self) -> bool:
        """True if the model is cut into pipeline stages."""
        return isinstance(self.model, PipelinedModule)

    @contextmanager
    def microbatch(self, count: int, *, is_last: bool) -> Iterator[None]:
        """Run forward and backward of a microbatch inside; only the last one's completes gradients.

        Args:
            count: Number of microbatches of the step.
            is_last: If True, the optimizer steps after this microbatch.
        """
        set_accumulate(self.model, count)
        plan = self.state.plan
        sync = nullcontext() if self.is_pipelined else self._sync(is_last)
        with sync, loss_mode(plan):
            yield
        self._output = None

    def _sync(self, is_last: bool) -> Any:
        return set_gradient_sync(self.model, self.state.plan, is_last)

    @contextmanager
    def own_microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Run forward and backward of a microbatch inside, in a loop that counts them itself.

        Args:
            is_last: If True, the optimizer steps after this microbatch.
        """
        if not is_last:
            set_accumulate(self.model, max(2, self.state.plan.accumulate))
        begin_microbatch(own_module(self.model), self._number)
        self._number = 0 if is_last else self._number + 1
        with self._sync(is_last):
            yield
        if not is_last:  # A backward outside of this context reduces, as torch assumes.
            self._sync(True)

    def begin(self, batch: Any) -> None:
        """Compare the ranks' batches before a forward; called inside `microbatch`.

        Raises:
            ApplyError: Ranks along tp, pp or cp have different batches, or `loss: tokens` finds no
                tokens to count.
        """
        state = self.state
        check_batches_agree((batch, ()), state.plan, state.mesh, state.history.steps + 1)
        alone = replace(state.plan, accumulate=1)
        self._weights = Weights(alone, state.mesh, state.history, (batch, targets_of(batch)))
        self._samples += num_samples(batch)
        if not self.is_pipelined:
            begin_microbatch(own_module(self.model), self._number)

    @contextmanager
    def guarding_loss(self) -> Iterator[None]:
        """Run forward and loss inside; in the first step, the loss may not use sharded parameters.

        Forwards gather them, and are watched by themselves.
        """
        if self.state.is_tested:
            yield
            return
        self._guard = guard_loss(self.model, self.state.plan)
        try:
            yield
        finally:
            self._suspend()
            self._guard = None

    def _suspend(self) -> None:
        if self._is_guarding and self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._is_guarding = False

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what to call backward on, for the loss of this rank's part of a microbatch.

        Raises:
            ApplyError: It is no loss.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ApplyError(not_a_loss(loss))
        if not self.state.is_tested and self.state.plan.mesh.size("tp") > 1:
            check_loss(loss, self.state.plan, self.state.mesh)
        weights = self._weights
        if weights is not None:
            tokens = weights.marked(())[1]
            loss = weights.weigh(loss, self._output if self._output is not None else loss, tokens)
        self.count()
        return self.scaled(loss)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the fp16 loss scale, to call backward on.

        Raises:
            ApplyError: Its gradients would be added to some that are unscaled already.
        """
        spec, is_unscaled = self.state.plan.spec, self._is_finite is not None
        if spec.precision.scales_loss and is_unscaled and self._has_gradients():
            what = "backward was called between clipping and the optimizer's step: it would add "
            what += "gradients of the scaled loss to gradients that are unscaled already"
            fix = "clip after the last backward of a step, and zero the gradients of a step that "
            fix += "is left out with optimizer.zero_grad(set_to_none=True)"
            raise ApplyError(Problem(what, spec.origin("precision"), fix))
        self._is_finite = None
        scale = self.state.loss_scale
        return loss * scale if scale != 1.0 else loss

    def count(self) -> None:
        """End a microbatch; a loop that weights losses itself calls it after backward."""
        self._number += 1

    def run_pipeline(
        self,
        inputs: Any,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any],
        count: int,
        *,
        is_last: bool,
    ) -> torch.Tensor:
        """Run forward and backward of a microbatch through all stages; keep its gradients aside.

        `release` adds them, since a loop may zero the gradients between its forward and backward.

        Args:
            inputs: Inputs of the model.
            batch: What `loss_fn` takes beside the output, cut along dim 0 like the inputs.
            loss_fn: Maps (output, part of the batch) to the loss.
            count: Number of microbatches of the step.
            is_last: If True, the optimizer steps after this microbatch.

        Returns:
            The mean loss of this rank's samples, the same on every rank along pp.
        """
        model, state, weights = self.model, self.state, self._weights
        assert isinstance(model, PipelinedModule)
        if weights is None:
            what = "a training_step runs forward and backward twice on one microbatch"
            raise ApplyError(Problem(what, fix="use a plan without pp"))
        own, self._weights = weights, None
        if not self._number:
            for parameter in self._parameters():
                parameter.grad = None

        def take(output: Any, marked: tuple[Any, torch.Tensor | None]) -> torch.Tensor:
            target, tokens = marked
            given = take_loss(loss_fn, output, target)
            if isinstance(given, tuple | list):
                what = "meshplan_loss returned (sum, count), which cannot be weighted here"
                raise ApplyError(Problem(what, fix="return the mean, and state loss: tokens"))
            return own.weigh(given, output, tokens)

        loss = model.step(
            inputs, own.marked(batch), take,
            scale=state.loss_scale / count, is_last=is_last, number=self._number,
        )  # fmt: skip
        own.agree()
        self._number += 1
        self._stashed = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for parameter, _ in self._stashed:
            parameter.grad = None
        # Of the whole plan, so that the dtype is the same in all stages.
        tensors = state.plan.assignment.tensors.values()
        return loss if any(each.dtype == "float64" for each in tensors) else loss.float()

    def _parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters, and those that a unit has gathered in their place."""
        return list(dict.fromkeys((*self._sharded, *self.model.parameters())))

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters())

    def release(self) -> None:
        """Put the gradients of `run_pipeline` into place."""
        for parameter, gradient in self._stashed:
            parameter.grad = gradient
        self._stashed = []

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Check and unscale the gradients of a step; do nothing if that is done.

        Clipping needs unscaled gradients too, and may come first.

        Returns:
            True; False if a gradient overflowed float16, so that the optimizer must not step.

        Raises:
            ApplyError: Data ranks have different numbers of samples, or the optimizer does not
                train this model.
        """
        if self._is_finite is not None:
            return self._is_finite
        state = self.state
        if not state.is_tested:
            check_optimizer(self.model, state.plan, optimizer)
        if self._samples:
            every = torch.empty(self._samples, device="meta")
            mean_over_ranks(torch.zeros((), device=device()), every, state.plan, state.mesh)
        self._is_finite = unscale(self.model, optimizer, state, 1.0)
        return self._is_finite

    def take(self, step: Callable[[], Any]) -> None:
        """Let the optimizer step by calling `step`."""
        if self.is_pipelined and not self.state.is_tested:
            agreed_step(step)
        else:
            step()

    def finish(self) -> None:
        """End a step; the next microbatch is the first one of another."""
        self._number = self._samples = 0
        self._weights = self._is_finite = None
        self.state.is_tested = True
        self.state.history.steps += 1

    def _around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model outside of the guard, which also sees what the model's hooks read.

        Its output is kept if a loss over no tokens would need gradients of zero from it.
        """
        self._suspend()
        self._depth += 1
        try:
            output = call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth:
            return output  # A check of the forward has called a copy of the model.
        if self._guard is not None:
            self._guard.__enter__()
            self._is_guarding = True
        if torch.is_grad_enabled() and self.state.plan.spec.loss == "tokens":
            self._output = output
        return output


def pipeline_inputs(batch: Any) -> Any:
    """Return the model's inputs in a batch: a pair's first item, a mapping without its labels.

    Raises:
        ApplyError: The batch is of another form.
    """
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0]
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != "labels"}
    what = f"the model's inputs cannot be told from a batch that is a {type(batch).__name__}"
    if isinstance(batch, tuple | list):
        what += f" of {len(batch)}"
    raise ApplyError(Problem(what, fix="define meshplan_inputs(batch) on the LightningModule"))
