"""Initial values of a model on meta: the values that one process would draw, in little memory.

The model's own initialisation first runs on meta, to record which tensors each call writes. It then
runs for real, call by call: a tensor has memory only from the first call that writes it to the
last, so no rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.base.mesh import device


@dataclass(slots=True)
class _InitCall:
    """One call of the model's initialisation and the fqns of the tensors it writes."""

    run: Callable[[], object]
    writes: set[str] = field(default_factory=set)


def initialise(
    model: nn.Module, names: dict[str, tuple[str, ...]], keep: Callable[[str, torch.Tensor], None]
) -> None:
    """Compute the initial value of every tensor on meta.

    The model is initialised by its `init_weights()` if it has one; with transformers' and nanoGPT's
    `_init_weights(module)` as `model.apply` would; otherwise by each module's `reset_parameters()`,
    children first, in the order in which constructors run.

    Args:
        model: The model, which is on meta again afterwards.
        names: All names of each tensor, by its first one.
        keep: Called once per tensor with its fqn and its full value, which is freed afterwards.

    Raises:
        ApplyError: Some tensor is not written by any of these, or only in part.
    """
    _share_random_state()
    on_meta = {
        fqn: tensor for fqn in names if (tensor := _held(model, fqn)) is not None and tensor.is_meta
    }
    steps = _watched(model, on_meta)
    last = {fqn: number for number, step in enumerate(steps) for fqn in step.writes}
    unwritten = [fqn for fqn in on_meta if fqn not in last]
    if unwritten:
        raise ApplyError([_nobody(model, fqn) for fqn in unwritten])
    real: set[str] = set()
    try:
        for number, step in enumerate(steps):
            for fqn in sorted(step.writes - real):
                _hold(model, names[fqn], _blank_like(on_meta[fqn]))
                real.add(fqn)
            step.run()
            for fqn in sorted(f for f in step.writes if last[f] == number):
                value = _held(model, fqn)
                assert value is not None
                _check_written(value, fqn)
                keep(fqn, value.detach())
                _hold(model, names[fqn], on_meta[fqn])
                real.discard(fqn)
    finally:
        for fqn in real:
            _hold(model, names[fqn], on_meta[fqn])


def _share_random_state() -> None:
    """Give every rank the CPU random state of rank 0.

    With different seeds, the shards of one tensor would come from different draws.
    """
    if dist.get_world_size() > 1:
        state = [torch.get_rng_state()]
        dist.broadcast_object_list(state, src=0)
        torch.set_rng_state(state[0])


class _WriteWatch(TorchDispatchMode):
    """Dispatch mode that records the storages that are written while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                if isinstance(value, torch.Tensor):
                    self.written.add(_storage(value))
        return func(*args, **kwargs)


def _storage(tensor: torch.Tensor) -> int:
    """Return an id of the storage, equal for `t` and `t.data`, also on meta."""
    return tensor.untyped_storage()._cdata


def _watched(model: nn.Module, on_meta: dict[str, torch.Tensor]) -> list[_InitCall]:
    """List the calls of the initialisation with the tensors each writes, by a run on meta."""
    fqns = {_storage(tensor): fqn for fqn, tensor in on_meta.items()}
    before = torch.get_rng_state()
    steps = []
    try:
        for run, module in _calls(model):
            watch = _WriteWatch()
            with watch, torch.no_grad():
                run()
            # Some of torch.nn.init do nothing on meta, so a module's own tensors count as written.
            written = watch.written | {_storage(t) for t in _own(module).values() if t.is_meta}
            writes = {fqns[s] for s in written if s in fqns}
            if writes:
                steps.append(_InitCall(run, writes))
    except NotImplementedError:
        # A value was read: the initialisation must run as one call, with memory for all tensors.
        return [_InitCall(lambda: [run() for run, _ in _calls(model)], set(on_meta))]
    finally:
        torch.set_rng_state(before)
    return steps


def _calls(model: nn.Module) -> Iterator[tuple[Callable[[], object], nn.Module]]:
    """Yield the calls that initialise the model, in one process's order, with their module."""
    whole = getattr(model, "init_weights", None)
    if callable(whole) and not callable(getattr(model, "_init_weights", None)):
        yield whole, model
        return
    for module, hook in _children_first(model, None):
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if hook is not None:
            yield partial(_hook_or_reset, module, hook, reset), module
        elif callable(reset):
            yield reset, module


def _hook_or_reset(module: nn.Module, hook: Callable[[nn.Module], object], reset: Any) -> None:
    """Call the model's hook; a module that it leaves blank gets `reset_parameters()`."""
    hook(module)
    own = [t.detach() for t in _own(module).values()]
    if callable(reset) and own and all(_is_blank(t) for t in own):
        reset()


def _children_first(
    module: nn.Module, hook: Any
) -> Iterator[tuple[nn.Module, Callable[[nn.Module], object] | None]]:
    """Yield each module once, with the `_init_weights` of the innermost model around it."""
    seen: set[int] = set()

    def visit(m: nn.Module, around: Any) -> Iterator[tuple[nn.Module, Any]]:
        around = getattr(m, "_init_weights", around)
        for child in m.children():
            yield from visit(child, around)
        if id(m) not in seen:
            seen.add(id(m))
            yield m, around

    yield from visit(module, hook)


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a module itself registers."""
    both = {**module._parameters, **module._buffers}
    return {leaf: tensor for leaf, tensor in both.items() if tensor is not None}


def _held(model: nn.Module, fqn: str) -> torch.Tensor | None:
    module, _, leaf = fqn.rpartition(".")
    return _own(model.get_submodule(module)).get(leaf)


def _hold(model: nn.Module, names: tuple[str, ...], tensor: torch.Tensor) -> None:
    """Register a tensor under all its names."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        table: dict[str, Any] = (
            module._parameters if leaf in module._parameters else module._buffers
        )
        table[leaf] = tensor


def _blank_like(meta: torch.Tensor) -> torch.Tensor:
    """Allocate memory marked as not yet written: NaN, or the largest integer of the dtype."""
    blank = torch.empty(meta.shape, dtype=meta.dtype, device=device())
    if blank.is_floating_point() or blank.is_complex():
        blank.fill_(float("nan"))
    elif blank.dtype != torch.bool:
        blank.fill_(torch.iinfo(blank.dtype).max)
    if isinstance(meta, nn.Parameter):
        return nn.Parameter(blank, requires_grad=meta.requires_grad)
    return blank


def _is_blank(value: torch.Tensor) -> bool:
    """Return True if part of a tensor was never written; False for bool, which has no mark."""
    if value.is_meta or value.dtype == torch.bool or value.numel() == 0:
        return False
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return bool((value == torch.iinfo(value.dtype).max).any())


def _check_written(value: torch.Tensor, fqn: str) -> None:
    if _is_blank(value.detach()):
        raise ApplyError(
            Problem(
                f"{fqn} was on the meta device, and its initialisation leaves some elements unset",
                fix="set all elements in reset_parameters(), or build the model on the CPU",
            )
        )


def _nobody(model: nn.Module, fqn: str) -> Problem:
    owner = type(model.get_submodule(fqn.rpartition(".")[0])).__name__
    return Problem(
        f"{fqn} is on the meta device, and no code initialises it: {owner} has no "
        "reset_parameters() that sets it",
        fix=f"define {owner}.reset_parameters(), define init_weights() on the model, "
        "or build the model on the CPU",
    )
