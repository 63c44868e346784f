"""Record one forward pass of a live model, on meta or real, as a `Flow`.

A copy of the model runs, whose tensors are fake: they have shapes and dtypes but no values or
memory. A model of any size can therefore be recorded on a laptop, and the caller's model does not
change. This module knows torch's operator schemas, and nothing of the use of the record.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshplan.errors import ApplyError, Problem
from meshplan.model.flow import UPDATE, Call, Flow, Op, Ref, Value
from meshplan.runtime.base.batch import as_arguments, mapped
from meshplan.runtime.base.model_copy import copy_model
from meshplan.runtime.base.module_state import changes, module_state_of
from meshplan.runtime.base.pytree import shape_of, tensors_in
from meshplan.runtime.torch_private.fakes import fake_like, fake_mode, untraceable
from meshplan.runtime.torch_private.private import bytes_of
from meshplan.runtime.trace.side_effects import Trace, nothing_left
from meshplan.runtime.trace.trace_errors import place_of

_REAL_BYTES_LIMIT = 4 * 2**30
"""Most bytes of model and inputs that are copied to run with real values."""


def record(model: nn.Module, inputs: Any, forms: dict[int, Any] | None = None) -> Flow:
    """Record one forward pass of `model` in its current mode (train or eval).

    Args:
        model: The model, on meta or real.
        inputs: A tensor, a tuple of arguments or a mapping of keyword arguments. Only shapes
            and dtypes matter, unless the model's control flow reads values.
        forms: A dict to fill with the structure (`pytree.shape_of`) of every module call's result,
            by `Call.id`; None if it is not needed.

    Returns:
        All operations as torch dispatches them below autograd, where composite operators are
        decomposed, and all module calls.

    Raises:
        ApplyError: The model cannot be copied, or its forward fails on these inputs.

    A model whose control flow reads values cannot run on fake tensors. If the model is small and
    not on meta, a real copy runs instead. Otherwise, if only shapes depend on values, the copy runs
    on fake tensors with symbolic sizes, which are recorded as 0.
    """
    try:
        return _record(model, inputs, forms, is_fake=True)
    except ApplyError:
        raise
    except Exception as error:  # The user's forward may raise anything.
        if not _is_small_and_real(model, inputs):
            return _record_open(model, inputs, forms, error)
    try:
        return _record(model, inputs, forms, is_fake=False)
    except ApplyError:
        raise
    except Exception as error:
        raise ApplyError(_problem(model, error)) from error


def _record_open(
    model: nn.Module, inputs: Any, forms: dict[int, Any] | None, error: Exception
) -> Flow:
    """Record one forward pass on fake tensors, with symbolic sizes where sizes depend on values.

    Args:
        model: The model.
        inputs: Inputs of the forward.
        forms: As for `record`.
        error: The error of the run without symbolic sizes, raised if this run fails too.
    """
    if (untraceable(error) or ("", ""))[1] == "shape":
        with contextlib.suppress(Exception):  # The first error makes the better message.
            return _record(model, inputs, forms, is_fake=True, leaves_open=True)
    raise ApplyError(_problem(model, error)) from error


def _problem(model: nn.Module, error: Exception) -> Problem:
    first = (str(error).strip() or repr(error)).splitlines()[0]
    fix = "pass example_inputs that the model's forward accepts"
    if (untraceable(error) or ("", ""))[1] == "shape":
        fix = (
            "let no shape in the forward depend on values (for experts of transformers, set "
            "experts_implementation='grouped_mm')"
        )
    place = place_of(error)
    at = f" at {place}" if place else ""
    return Problem(
        f"the forward of {type(model).__name__} cannot be recorded on the example inputs{at}: "
        f"{type(error).__name__}: {first}",
        fix=fix,
    )


def _is_small_and_real(model: nn.Module, inputs: Any) -> bool:
    tensors = [*model.parameters(), *model.buffers(), *(t for _, t in tensors_in(inputs))]
    return not any(t.is_meta for t in tensors) and (
        sum(t.numel() * t.element_size() for t in tensors) <= _REAL_BYTES_LIMIT
    )


def _record(
    model: nn.Module,
    inputs: Any,
    forms: dict[int, Any] | None,
    *,
    is_fake: bool,
    leaves_open: bool = False,
) -> Flow:
    mode = fake_mode(leaves_open=leaves_open) if is_fake else nullcontext()
    with nothing_left(model) as trace:
        return _run_copy(model, inputs, forms, trace, mode, is_fake=is_fake)


def _run_copy(
    model: nn.Module,
    inputs: Any,
    forms: dict[int, Any] | None,
    trace: Trace,
    mode: AbstractContextManager[object],
    *,
    is_fake: bool,
) -> Flow:
    with torch.no_grad():
        copied, args, kwargs = copy_to_run(model, inputs, mode, is_fake=is_fake)
        recorder = OpRecorder(copied, trace)
        with mode, recorder:
            recorder.begin(args, kwargs)
            copied(*args, **kwargs)
        if forms is not None:
            forms.update(recorder.forms)
        return recorder.flow()


def copy_to_run(
    model: nn.Module, inputs: Any, mode: AbstractContextManager[object], *, is_fake: bool = True
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Copy a model and its inputs for a single run, so that the caller's do not change.

    Args:
        model: The model to copy.
        inputs: A tensor, a tuple of arguments or a mapping of keyword arguments.
        mode: The fake mode that the copies belong to, if `is_fake`.
        is_fake: If True, the copies of parameters, buffers and inputs are fake; if False, real.

    Returns:
        The copy, its positional arguments and its keyword arguments.
    """
    memo: dict[int, Any] = {}
    with mode:
        if is_fake:
            for tensor in (*model.parameters(), *model.buffers()):
                memo[id(tensor)] = fake_like(mode, tensor)
        args, kwargs = _arguments(inputs, is_fake=is_fake)
    # Outside the mode, so that copies of tensors in plain attributes are real.
    return copy_model(model, memo), args, kwargs


_GROUPED_MM = torch.ops.aten._grouped_mm.default


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the result of a grouped matmul; on fakes, a new tensor of the right shape.

    torch's fake implementation rejects some dtypes that the real operator accepts.
    """
    is_fake = type(a).__name__ == "FakeTensor"
    offsets = kwargs.get("offs", args[0] if args else None)
    if not is_fake or a.dtype != b.dtype or offsets is None:
        return _GROUPED_MM(a, b, *args, **kwargs)
    if a.ndim == 2 and b.ndim == 2:
        return a.new_empty(offsets.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised CPU tensor of the same shape, strides and dtype.

    The result is an `nn.Parameter` if `tensor` is one. Under a fake mode the result is fake.
    """
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _arguments(inputs: Any, *, is_fake: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return stand_in(tensor.detach()) if is_fake else tensor.detach().clone()

    args, kwargs = as_arguments(inputs)
    return mapped(args, copied), mapped(kwargs, copied)


class OpRecorder(TorchDispatchMode):
    """A dispatch mode that records the operations of a model, and its module calls through hooks.

    Args:
        model: The copy of the model that will run.
        trace: Watches the copy and all tensors that it makes, which must be gone after the run.
    """

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        trace.watch(model)
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._calls: list[Call] = []
        self._open: list[int] = []
        self.forms: dict[int, Any] = {}
        # (tensor, id of its current value) by id of the tensor, which is kept alive so that Python
        # does not reuse its id.
        self._known: dict[int, tuple[torch.Tensor, int]] = {}
        self._is_paused = False
        self._sharing: dict[int, dict[int, torch.Tensor]] = {}
        for name, parameter in model.named_parameters():
            self._new(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self._new(buffer, "buffer", name)
        for fqn, module in model.named_modules():
            self._watch(fqn, module)
        # The model's hooks reference the recorder, so the recorder must not keep the model alive.
        self._model, self._remembered = weakref.ref(model), module_state_of(model)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the tensors in the arguments of the model's forward as inputs."""
        for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            self._new(tensor, "input", path)

    def progress(self) -> tuple[str, int]:
        """Return (fqn of the innermost running module, number of operations recorded so far)."""
        return (self._calls[self._open[-1]].module if self._open else "", len(self._ops))

    def stand_in(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a new tensor of this shape that is recorded as the same value as `tensor`."""
        self._is_paused = True
        new = tensor.new_empty(shape)
        self._is_paused = False
        self._known[id(new)] = (new, self._value(tensor))
        return new

    def flow(self) -> Flow:
        """Return the record of everything so far."""
        model = self._model()
        assert model is not None
        changed = tuple(changes(self._remembered, module_state_of(model), self._value))
        return Flow(
            values=tuple(self._values),
            ops=tuple(self._ops),
            calls=tuple(self._calls),
            changes=changed,
        )

    def _watch(self, fqn: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = (*tensors_in(args), *tensors_in(kwargs))
            call = Call(
                id=len(self._calls),
                module=fqn,
                parent=self._open[-1] if self._open else None,
                inputs=tuple((path, self._value(t)) for path, t in found),
                outputs=(),
                ops=(len(self._ops), len(self._ops)),
            )
            self._open.append(call.id)
            self._calls.append(call)

        def leave(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            number = self._open.pop()
            call = self._calls[number]
            outputs = tuple((path, self._value(t)) for path, t in tensors_in(output))
            self.forms[number] = shape_of(output, self._value)
            ops = (call.ops[0], len(self._ops))
            self._calls[number] = replace(call, outputs=outputs, ops=ops)

        module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(leave, with_kwargs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or self._is_paused:  # `prim.device` and the like only query.
            return func(*args, **kwargs)
        spelled, spelled_kwargs = self._spell(args), self._spell(kwargs)
        result = _grouped_mm(*args, **kwargs) if func is _GROUPED_MM else func(*args, **kwargs)
        written = [t for t in _written(func, args, kwargs) if isinstance(t, torch.Tensor)]
        before = tuple(self._value(t) for t in written)
        outputs = [t for _, t in tensors_in(result)] or written
        ids = tuple(self._new(tensor, "op") for tensor in outputs)
        # Written tensors that are not returned (running statistics, for one) are outputs too.
        unreturned = [t for t in written if not any(t is out for out in outputs)]
        ids += tuple(self._new(tensor, "op") for tensor in unreturned)
        self._ops.append(
            Op(
                name=str(func),
                args=spelled,
                kwargs=spelled_kwargs,
                outputs=ids,
                call=self._open[-1] if self._open else 0,
                is_pointwise=torch.Tag.pointwise in func.tags,
                is_random=torch.Tag.nondeterministic_seeded in func.tags,
                mutates=before,
                rewrites=tuple(self._value(t) for t in written),
            )
        )
        for tensor in written:
            self._update_views(tensor)
        return result

    def _update_views(self, written: torch.Tensor) -> None:
        """Record a new value for every other tensor on the storage of a tensor that was written."""
        new = self._value(written)
        for other in tuple(self._sharing.get(storage_id(written), {}).values()):
            if other is written:
                continue
            old = self._value(other)
            updated = self._new(other, "op")
            self._ops.append(
                Op(
                    name=UPDATE,
                    args=(Ref(old), Ref(new)),
                    kwargs={},
                    outputs=(updated,),
                    call=self._open[-1] if self._open else 0,
                    mutates=(old,),
                    rewrites=(updated,),
                )
            )

    def _spell(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return Ref(self._value(item))
        if isinstance(item, tuple | list):
            return tuple(self._spell(part) for part in item)
        if isinstance(item, dict):
            return {key: self._spell(part) for key, part in item.items()}
        return item

    def _value(self, tensor: torch.Tensor) -> int:
        """Return the id of a tensor's current value; a tensor not seen before is a constant."""
        found = self._known.get(id(tensor))
        return found[1] if found else self._new(tensor, "constant")

    def _new(self, tensor: torch.Tensor, origin: Any, name: str = "") -> int:
        value = Value(
            id=len(self._values),
            # A symbolic size is recorded as 0.
            shape=tuple(n if isinstance(n, int) else 0 for n in tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            origin=origin,
            name=name,
            digest=_digest(tensor) if origin == "constant" else "",
        )
        self._values.append(value)
        if origin == "op" and id(tensor) not in self._known:
            self._trace.watch(tensor)
        self._known[id(tensor)] = (tensor, value.id)
        self._sharing.setdefault(storage_id(tensor), {})[id(tensor)] = tensor
        return value.id


def _digest(tensor: torch.Tensor) -> str:
    """Return a hash of a constant's values; "" if it has none."""
    data = bytes_of(tensor)
    return "" if data is None else hashlib.sha256(data).hexdigest()


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's storage; also on meta, `t` and `t.data` have the same."""
    return tensor.untyped_storage()._cdata


_STATISTICS: Final = ("running_mean", "running_var")
_WRITE_STATISTICS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
        "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
    )
)  # fmt: skip
"""Operators that write the running statistics in training, though their schemas do not declare it
(torch 2.13)."""


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    """Yield the arguments that an operator writes to; None for an optional one that is absent."""
    schema = func._schema
    given = {
        argument.name: args[number] if number < len(args) else kwargs.get(argument.name)
        for number, argument in enumerate(schema.arguments)
    }
    hidden = _STATISTICS if schema.name in _WRITE_STATISTICS and given.get("training", True) else ()
    for argument in schema.arguments:
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if is_declared or argument.name in hidden:
            found = given[argument.name]
            yield from found if isinstance(found, tuple | list) else (found,)
