"""Forwards without gradients that a loss runs beside the one which it is trained by.

DPO with adapters computes log-probabilities of its reference that way: it runs `self.model` with
its adapters disabled. TRL's SFTTrainer with label smoothing runs the model that it is given a
second time, for its metrics. On a pipeline no rank can run the model alone, so all stages run such
a forward before the loss is computed, and the last one returns its output when the loss asks for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.interop.trainer_apart import same
from meshplan.runtime.apply.pipeline.answer import as_inputs
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.torch_private.private import intercepted_calls

MOST: Final = 4
"""Forwards beside the first one for one loss."""

_MISSING: Final = object()
Attributes = Mapping[str, Mapping[str, Any]]
"""Values of attributes, by module and name."""


@dataclass(frozen=True)
class ForwardBeside:
    """A forward without gradients that a loss runs beside the one which it is trained by.

    Args:
        names: The values of the first forward's inputs, or of the batch, that it takes; None if it
            takes the same inputs as the first forward.
        constants: Its other inputs, by name.
        attributes: The attributes of modules that the loss changed for it.
    """

    names: tuple[str, ...] | None
    constants: Mapping[str, Any]
    attributes: Attributes

    def inputs(self, batch: Mapping[str, Any], call: Any) -> Any:
        """Return its inputs for a batch, or for a part of one.

        Args:
            batch: The batch.
            call: The inputs of the first forward.
        """
        if self.names is None:
            return call
        given = {**batch, **call}
        return {**{name: given[name] for name in self.names}, **self.constants}

    def run(self, model: PipelinedModule, batch: Mapping[str, Any], call: Any) -> Any:
        """Run it on all stages; return its output on the last one, None on others."""
        with torch.no_grad(), model.with_attributes(self.attributes):
            return model.eval_step(self.inputs(batch, call))


class CalledBeside(BaseException):
    """Raised where the loss runs a forward that is not known. No loss catches it.

    Args:
        forward: The forward.
    """

    def __init__(self, forward: ForwardBeside) -> None:
        super().__init__()
        self.forward = forward


class _Attributes:
    """The attributes of a model's modules, and which parameters are trained, at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = {
            name: {key: list(value) if type(value) is list else value
                   for key, value in vars(module).items()}
            for name, module in model.named_modules()
        }  # fmt: skip
        self._trained = [(each, each.requires_grad) for each in model.parameters()]

    def changed(self) -> Attributes:
        """Return what has changed since.

        Raises:
            ApplyError: Something has that other ranks cannot do likewise.
        """
        found: dict[str, dict[str, Any]] = {}
        for name, module in self._model.named_modules():
            before = self._values.get(name, {})
            for key, value in vars(module).items():
                old = before.get(key, _MISSING)
                if value is old or (_is_plain(value) and type(value) is type(old) and value == old):
                    continue
                if not _is_plain(value):
                    what = f"compute_loss changes {key} of {name or type(module).__name__} for a "
                    what += "forward of trainer.model, which the ranks of other stages do not see"
                    raise ApplyError(Problem(what, fix="use a plan without pp"))
                found.setdefault(name, {})[key] = list(value) if type(value) is list else value
        return found

    def restore(self) -> None:
        """Put plain attributes back, and which parameters are trained."""
        for name, module in self._model.named_modules():
            own = vars(module)
            for key, value in self._values.get(name, {}).items():
                if _is_plain(value):
                    own[key] = list(value) if type(value) is list else value
        for parameter, is_trained in self._trained:
            parameter.requires_grad_(is_trained)


def _is_plain(value: Any) -> bool:
    """Return True for numbers, words, None, and lists of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


@contextmanager
def answering(
    model: PipelinedModule,
    known: Sequence[ForwardBeside],
    outputs: Sequence[Any],
    batch: Mapping[str, Any],
    call: Any,
    *,
    is_search: bool = False,
) -> Iterator[Callable[..., Any]]:
    """Compute a loss on the last stage inside, in which forwards of the Trainer's model return.

    Yields what returns the output of such a forward of the model that the loss is given.

    Args:
        model: The pipelined model. The Trainer's model is its skeleton.
        known: The forwards that all stages have run, in the order of the loss.
        outputs: Their outputs.
        batch: The batch, or the part of it, that the loss is computed for.
        call: The inputs of the first forward among it.
        is_search: True while such forwards are searched for.

    Raises:
        CalledBeside: In a search, the loss runs a forward that is not known.
        ApplyError: It runs another forward than those that are known.
    """
    whole, number = model.skeleton, 0

    def of_trainer(unused: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            what = "compute_loss runs trainer.model beside the model that it is given, and needs "
            what += "gradients of it"
            fix = "run it in torch.no_grad(), or use a plan without pp"
            raise ApplyError(Problem(what, fix=fix))
        return answer(*args, **kwargs)

    def answer(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        given = as_inputs(whole, args, kwargs)
        changed = before.changed()
        if number == len(known) and is_search:
            raise CalledBeside(_forward(given, batch, call, changed))
        one = known[number] if number < len(known) else None
        is_known = one and same(given, one.inputs(batch, call)) and same(changed, one.attributes)
        if not is_known:
            _forward(given, batch, call, changed)  # The error of values that are not the batch's.
            what = "compute_loss runs the model beside in another way than in the first step"
            raise ApplyError(Problem(what, fix="use a plan without pp"))
        number += 1
        return outputs[number - 1]

    with intercepted_calls(whole, of_trainer):
        before = _Attributes(whole)
        try:
            yield answer
        finally:
            before.restore()


def _forward(given: Any, batch: Mapping[str, Any], call: Any, changed: Attributes) -> ForwardBeside:
    """Return the forward of these inputs.

    Raises:
        ApplyError: They are not among the batch.
    """
    if same(given, call):
        return ForwardBeside(None, {}, changed)
    if isinstance(given, Mapping) and isinstance(call, Mapping):
        there = {**batch, **call}
        names = tuple(name for name in given if name in there and same(given[name], there[name]))
        constants = {name: value for name, value in given.items() if name not in names}
        if all(map(_is_plain, constants.values())):
            return ForwardBeside(names, constants, changed)
    what = "compute_loss runs the model beside on other values than those of the batch, but of a "
    what += "pipeline the last stage alone has them"
    raise ApplyError(Problem(what, fix="use a plan without pp"))


@contextmanager
def running(model: nn.Module, skeleton: nn.Module) -> Iterator[None]:
    """Compute losses without gradients on all ranks inside; each may run the Trainer's model.

    Args:
        model: The module that `parallelize` returned.
        skeleton: The Trainer's model.
    """
    if not isinstance(model, PipelinedModule):
        yield
        return

    def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        if model.is_recording:
            return call(*args, **kwargs)
        with model.with_attributes(before.changed()):
            return model(*args, **kwargs)

    with _without_cache(skeleton), intercepted_calls(skeleton, run):
        before = _Attributes(skeleton)
        yield


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Let a model return no keys and values for a next token inside: a pipeline has none.

    The Trainer drops them from outputs, but some of their classes cannot be sent to other ranks.
    """
    every = {id(each): each for module in model.modules() if (each := _config_of(module))}
    try:
        for config in every.values():
            config.use_cache = False
        yield
    finally:
        for config in every.values():
            config.use_cache = True


def _config_of(module: nn.Module) -> Any:
    """Return the config of a module that asks for a cache; None without one."""
    config = getattr(module, "config", None)
    return config if getattr(config, "use_cache", None) is True else None


def unwrap_to(accelerator: Any, wrapped: nn.Module, whole: nn.Module) -> None:
    """Let `accelerator.unwrap_model` return the whole model of a pipeline.

    A loss that was given the pipeline then finds the model's attributes, such as its adapters.
    """
    before = accelerator.unwrap_model

    def unwrap_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_cut = model is wrapped and isinstance(wrapped, PipelinedModule)
        return whole if is_cut else before(model, *args, **kwargs)

    accelerator.unwrap_model = unwrap_model
