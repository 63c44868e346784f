"""Record a forward in one process: the calls and activations, which layouts do not contain."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from meshplan.layout.styles import LOGITS
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.context.batch import sequence_length
from meshplan.runtime.base.batch import as_arguments, chunked, mapped
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.trace.ops import record
from meshplan.traffic import AttentionCall, Forward, ModuleVisit, TensorUse, TokenLosses

_HARMLESS: Final = frozenset(
    getattr(torch.Tensor, name)
    for name in ("flatten", "view", "reshape", "contiguous", "double", "float", "to", "detach")
)
"""Tensor methods that may be called on sharded logits before the loss without communication."""


def record_forward(
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Forward:
    """Run an unsharded model on the first microbatch of one rank, and return a record of the run.

    Args:
        model: The unsharded model of one process, with its values.
        plan: The plan, which states the number of microbatches and the compute dtypes.
        inputs: This rank's inputs (`local_batch`).
        targets: This rank's targets; None without `loss_fn`.
        loss_fn: Maps (output, targets) to the loss; needed only if the plan has loss_parallel.
    """
    stages = plan.assignment.stages
    for count in (plan.accumulate, stages.microbatches if stages else 1):
        inputs, targets = chunked(inputs, count)[0], chunked(targets, count)[0]
    training = {fqn for fqn, module in model.named_modules() if module.training}
    heads = {f for f, use in plan.assignment.styles.items() if use.style.name == LOGITS.name}
    recorder = _CallRecorder(heads, training)
    with ExitStack() as stack:
        for fqn in plan.assignment.synchronized:
            # One rank's samples alone may be too few for the statistics of a synchronized norm.
            stack.enter_context(_in_evaluation(model.get_submodule(fqn)))
        # Register these hooks before the recorder's, which then records the inputs after the cast.
        _cast_at_units(model, plan, stack)
        recorder.watch(model, stack)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder.saving())
        stack.enter_context(recorder)
        output = _call(model, plan, inputs)
        if heads and loss_fn is not None:
            loss_fn(output, targets)
    forward = recorder.forward()
    args, kwargs = as_arguments(inputs)
    named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    return replace(
        forward,
        has_mask=named.get("attention_mask") is not None,
        length=_length(plan, inputs),
        flow=record(model, inputs) if stages is not None else None,
    )


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    """Put one module, without its children, in evaluation mode inside the `with` block."""
    before, module.training = module.training, False
    try:
        yield
    finally:
        module.training = before


def _length(plan: Plan, inputs: Any) -> int | None:
    """Return the length of this rank's part of the sequence; None without cp."""
    if plan.assignment.context is None:
        return None
    stated = plan.spec.batch.seq_len
    return sequence_length(inputs, stated // plan.mesh.size("cp") if stated else None)


def _call(model: nn.Module, plan: Plan, inputs: Any) -> Any:
    """Return the output of the model, called with parameters cast to the plan's compute dtypes."""
    args, kwargs = as_arguments(inputs)
    placed = plan.assignment.tensors
    cast: dict[str, torch.Tensor] = {}
    for fqn, parameter in model.named_parameters():
        dtype = getattr(torch, placed[fqn].compute_dtype)
        if parameter.dtype != dtype:
            cast[fqn] = parameter.to(dtype)
    return functional_call(model, cast, args, kwargs) if cast else model(*args, **kwargs)


def _cast_at_units(model: nn.Module, plan: Plan, stack: ExitStack) -> None:
    """Register hooks that cast inputs and outputs of units as FSDP2 does; `stack` removes them."""
    for fqn, unit in plan.assignment.units.items():
        taken = unit.precision.param if unit.casts_inputs else None
        given = unit.precision.output
        module = model.get_submodule(fqn)
        if taken:
            hook = _input_cast(getattr(torch, taken))
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        if given:
            stack.callback(module.register_forward_hook(_output_cast(getattr(torch, given))).remove)


def _cast(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _input_cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda module, args, kwargs: mapped((args, kwargs), _cast(dtype))


def _output_cast(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        # A mapping is the output of the whole model. Only the loss reads it, in float32.
        return output if isinstance(output, Mapping) else mapped(output, _cast(dtype))

    return cast


class _CallRecorder(TorchFunctionMode):
    """Records module calls, tensors saved by autograd, attention, and uses of a head's output.

    Args:
        heads: Fqns of modules whose output stays sharded over the vocabulary.
        training: Fqns of modules in training mode.
    """

    def __init__(self, heads: set[str], training: set[str]) -> None:
        super().__init__()
        self._heads, self._training = heads, training
        self._event = 0
        self._calls: list[ModuleVisit] = []
        self._saves: list[int] = []
        self._attentions: list[AttentionCall] = []
        self._losses: list[TokenLosses] = []
        self._strays: dict[str, None] = {}
        self._running: list[str] = []
        self._sources: dict[int, int] = {}
        # Kept alive, so that no id is reused for another tensor.
        self._alive: list[torch.Tensor] = []
        self._logits: dict[int, torch.Tensor] = {}

    def forward(self) -> Forward:
        """Return the record of the calls so far."""
        return Forward(
            calls=tuple(sorted(self._calls, key=lambda call: call.begin)),
            saves=tuple(self._saves),
            attentions=tuple(self._attentions),
            losses=tuple(self._losses),
            strays=tuple(self._strays),
        )

    def _source(self, tensor: torch.Tensor) -> int:
        """Return a number that is equal for equal tensor objects."""
        return self._sources.setdefault(id(tensor), len(self._sources))

    def _now(self) -> int:
        """Return the index of a new event; indices grow by one with each event."""
        self._event += 1
        return self._event

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Record inside the `with` block each event at which autograd saves a tensor."""

        def save(tensor: torch.Tensor) -> torch.Tensor:
            self._saves.append(self._now())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept):
            yield

    def watch(self, model: nn.Module, stack: ExitStack) -> None:
        """Register hooks that record every call of every module; `stack` removes them."""
        for fqn, module in model.named_modules():
            self._watch(fqn, module, stack)

    def _watch(self, fqn: str, module: nn.Module, stack: ExitStack) -> None:
        begun: list[tuple[int, list[tuple[str, torch.Tensor]]]] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = [*tensors_in(args), *tensors_in(kwargs)]
            self._alive += [tensor for _, tensor in found]
            self._running.append(fqn)
            begun.append((self._now(), found))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._running.pop()
            begin, found = begun.pop()
            given = [tensor for _, tensor in found]
            made = [tensor for _, tensor in tensors_in(output)]
            if fqn in self._heads:
                self._logits |= {id(tensor): tensor for tensor in made}
            self._calls.append(
                ModuleVisit(
                    fqn=fqn,
                    sources=tuple(map(self._source, given)),
                    inputs=tuple(map(_seen, given)),
                    outputs=tuple(map(_seen, made)),
                    begin=begin,
                    end=self._now(),
                    is_training=fqn in self._training,
                    paths=tuple(path for path, _ in found),
                )
            )

        stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        begin = self._now() if func is F.scaled_dot_product_attention else 0
        result = func(*args, **kwargs)
        if begin:
            self._attend(begin, args, kwargs)
        given = tensors_in((args, kwargs)) if self._logits else ()
        if any(id(tensor) in self._logits for _, tensor in given):
            self._follow(func, args, kwargs, result)
        return result

    def _attend(self, begin: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a call of scaled_dot_product_attention that began at event `begin`."""
        given = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        tensors = tuple(_seen(given[name]) for name in ("query", "key", "value"))
        fqn = self._running[-1] if self._running else ""
        self._attentions.append(
            AttentionCall(fqn=fqn, tensors=tensors, begin=begin, end=self._now())
        )

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Record the use of a head's logits by one torch function: a loss, harmless, or a stray."""
        if func is F.cross_entropy:
            given = dict(zip(("input", "target"), args, strict=False)) | dict(kwargs)
            logits, target = given["input"], given["target"]
            self._losses.append(TokenLosses(target.numel(), _word(logits.dtype)))
            return
        made = [tensor for _, tensor in tensors_in(result)]
        if func in _HARMLESS:
            self._logits |= {id(tensor): tensor for tensor in made}
        elif made:
            self._strays[getattr(func, "__name__", str(func))] = None


def _seen(tensor: torch.Tensor) -> TensorUse:
    """Return the shape, dtype and `requires_grad` of a tensor."""
    return TensorUse(tuple(tensor.shape), _word(tensor.dtype), tensor.requires_grad)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
