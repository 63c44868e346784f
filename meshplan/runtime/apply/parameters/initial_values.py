"""Initial values of a model on meta: the values that one process would draw, in little memory.

The model's own initialisation first runs on meta, to record which tensors each call writes. It then
runs on real memory, call by call. A tensor has memory only from the first call that writes it to
the last one, so no rank ever holds the whole model.
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
from meshplan.runtime.trace.ops import storage_id


@dataclass(slots=True)
class _InitCall:
    """One call of the model's initialisation, and the fqns of the meta tensors that it writes."""

    run: Callable[[], object]
    writes: set[str] = field(default_factory=set)


def initialise(
    model: nn.Module, names: dict[str, tuple[str, ...]], keep: Callable[[str, torch.Tensor], None]
) -> None:
    """Compute the initial value of every tensor on meta.

    The initialisation is the first of these that the model has: `_init_weights(module)` of
    transformers and nanoGPT, called for each module as `model.apply` does; `init_weights()`; the
    `reset_parameters()` of each module, children first, in the order in which constructors run.

    Args:
        model: The model; afterwards its tensors are on meta again.
        names: All names of each tensor, by its fqn, which is the first of them.
        keep: Called once per tensor on meta with its fqn and its full value. The value is freed
            after the call, unless `keep` stores it.

    Raises:
        ApplyError: The initialisation does not write a tensor, or only a part of it.
    """
    _share_random_state()
    on_meta = {
        fqn: tensor
        for fqn in names
        if (tensor := _tensor_at(model, fqn)) is not None and tensor.is_meta
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
                _register(model, names[fqn], _blank_like(on_meta[fqn]))
                real.add(fqn)
            step.run()
            for fqn in sorted(f for f in step.writes if last[f] == number):
                value = _tensor_at(model, fqn)
                assert value is not None
                _check_written(value, fqn)
                keep(fqn, value.detach())
                _register(model, names[fqn], on_meta[fqn])
                real.discard(fqn)
    finally:
        for fqn in real:
            _register(model, names[fqn], on_meta[fqn])


def _share_random_state() -> None:
    """Set the CPU generator of every rank to the state of rank 0's.

    With different states, the shards of one tensor would be parts of different random tensors.
    """
    if dist.get_world_size() > 1:
        state = [torch.get_rng_state()]
        dist.broadcast_object_list(state, src=0)
        torch.set_rng_state(state[0])


class _WriteWatch(TorchDispatchMode):
    """Dispatch mode that records which storages are written while it is active, by `storage_id`."""

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
                    self.written.add(storage_id(value))
        return func(*args, **kwargs)


def _watched(model: nn.Module, on_meta: dict[str, torch.Tensor]) -> list[_InitCall]:
    """Run the initialisation on meta; return its calls with the tensors that each one writes."""
    fqns = {storage_id(tensor): fqn for fqn, tensor in on_meta.items()}
    before = torch.get_rng_state()
    steps = []
    try:
        for run, module in _calls(model):
            watch = _WriteWatch()
            with watch, torch.no_grad():
                run()
            # Some functions of torch.nn.init do nothing on meta, so the tensors of the module that
            # is initialised count as written in any case.
            written = watch.written | {storage_id(t) for t in _own(module).values() if t.is_meta}
            writes = {fqns[s] for s in written if s in fqns}
            if writes:
                steps.append(_InitCall(run, writes))
    except NotImplementedError:
        # The initialisation reads values, which meta tensors lack: it must run as one call, with
        # memory for all tensors.
        return [_InitCall(lambda: [run() for run, _ in _calls(model)], set(on_meta))]
    finally:
        torch.set_rng_state(before)
    return steps


def _calls(model: nn.Module) -> Iterator[tuple[Callable[[], object], nn.Module]]:
    """Yield the calls that initialise the model, each with the module it is for, in order."""
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
    """Call `_init_weights`, then `reset_parameters()` if the module's tensors are still blank."""
    hook(module)
    own = [t.detach() for t in _own(module).values()]
    if callable(reset) and own and all(_is_blank(t) for t in own):
        reset()


def _children_first(
    module: nn.Module, hook: Any
) -> Iterator[tuple[nn.Module, Callable[[nn.Module], object] | None]]:
    """Yield each module once, children first, with the `_init_weights` that applies to it.

    That is the method of the module itself, or of the innermost module around it that has one.

    Args:
        module: The root.
        hook: The `_init_weights` for modules that none is found for.
    """
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
    """Return the parameters and buffers that a module itself registers, by name."""
    both = {**module._parameters, **module._buffers}
    return {leaf: tensor for leaf, tensor in both.items() if tensor is not None}


def _tensor_at(model: nn.Module, fqn: str) -> torch.Tensor | None:
    module, _, leaf = fqn.rpartition(".")
    return _own(model.get_submodule(module)).get(leaf)


def _register(model: nn.Module, names: tuple[str, ...], tensor: torch.Tensor) -> None:
    """Register a tensor in the model under all these names."""
    for name in names:
        holder(model, name)[name.rpartition(".")[2]] = tensor


def holder(model: nn.Module, name: str) -> dict[str, Any]:
    """Return the `_parameters` or `_buffers` dict that contains the tensor of this name."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return module._parameters if leaf in module._parameters else module._buffers


def _blank_like(meta: torch.Tensor) -> torch.Tensor:
    """Return a real tensor like a meta one, filled with a mark that means "not written yet".

    The mark is NaN, or the largest integer of the dtype. Tensors of bool are not filled.
    """
    blank = torch.empty(meta.shape, dtype=meta.dtype, device=device())
    if blank.is_floating_point() or blank.is_complex():
        blank.fill_(float("nan"))
    elif blank.dtype != torch.bool:
        blank.fill_(torch.iinfo(blank.dtype).max)
    if isinstance(meta, nn.Parameter):
        return nn.Parameter(blank, requires_grad=meta.requires_grad)
    return blank


def _is_blank(value: torch.Tensor) -> bool:
    """Return True if any element still has the mark of `_blank_like`; False for bool or meta."""
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
