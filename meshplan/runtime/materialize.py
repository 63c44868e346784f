"""Values before wrapping: every rank must start from the very numbers one process has.

Real tensors are compared across ranks and taken from rank 0 where they differ. Tensors on meta
are initialised module by module, in full, with the same random numbers on every rank; each
rank keeps its own part and frees the rest, so no rank ever holds more than one module whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.plan import Plan
from meshplan.runtime.mesh import device, local_of


@dataclass(slots=True)
class Values:
    """This rank's parts of the initial values, by fqn, for a model that is still on meta."""

    local: dict[str, torch.Tensor] = field(default_factory=dict)

    def fill(self, model: nn.Module, plan: Plan) -> None:
        """Give the wrapped model memory and these values."""
        if not self.local:
            return
        model.to_empty(device=device())
        _retie(model, plan)
        params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        with torch.no_grad():
            for fqn, value in self.local.items():
                name = fqn if fqn in params or fqn in buffers else f"module.{fqn}"
                local_of(params.get(name, buffers.get(name))).copy_(value)  # type: ignore[arg-type]


def agree_on_values(model: nn.Module, plan: Plan) -> Values:
    """Make real values equal on all ranks in place, and compute those that are on meta.

    Returns:
        The values of a model on meta, to be filled in after wrapping; empty for a real model.

    Raises:
        ApplyError: A tensor on meta that nothing initialises.
    """
    tensors = _tensors(model, plan)
    missing = [fqn for fqn, t in tensors.items() if t.is_meta]
    everywhere: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, missing)
    if not any(everywhere):
        _take_from_rank_0(tensors)
        return Values()
    if all(names == everywhere[0] for names in everywhere):
        _take_from_rank_0({f: t for f, t in tensors.items() if not t.is_meta})
        return _initialise(model, plan)
    full = next((rank for rank, names in enumerate(everywhere) if not names), None)
    if full is None:
        raise ApplyError(
            Problem(
                "the ranks have different tensors on meta, and no rank has all values",
                fix="build the model alike on every rank, or with all values on one of them",
            )
        )
    return _receive(tensors, plan, full)


def _tensors(model: nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {fqn: found[fqn].detach() for fqn in plan.assignment.tensors}


def _part(value: torch.Tensor, fqn: str, plan: Plan) -> torch.Tensor:
    """This rank's part of a full value, in the dtype it is stored in."""
    placed = plan.assignment.tensors[fqn]
    slices = placed.stored.slices(placed.info.shape, plan.mesh, dist.get_rank())
    dtype = getattr(torch, placed.dtype)
    part = value[slices].to(dtype=dtype)
    return part.clone() if part.data_ptr() == value.data_ptr() else part.contiguous()


def _take_from_rank_0(tensors: dict[str, torch.Tensor]) -> None:
    """Compare checksums in one collective, then broadcast only what differs."""
    if dist.get_world_size() == 1 or not tensors:
        return
    sums = torch.tensor([_checksum(t) for t in tensors.values()], dtype=torch.int64)
    low, high = sums.to(device()), sums.to(device())
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    differs = (low != high).tolist()
    for tensor, different in zip(tensors.values(), differs, strict=True):
        if different:
            sent = tensor.to(device()).contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)


def _checksum(tensor: torch.Tensor) -> int:
    """A sum of the bits, position-weighted so that a permutation shows."""
    bits = tensor.contiguous().view(-1).view(torch.uint8).to(torch.int64)
    weight = torch.arange(bits.numel(), device=bits.device).remainder_(8191).add_(1)
    return int((bits * weight).sum())


def _receive(tensors: dict[str, torch.Tensor], plan: Plan, source: int) -> Values:
    """One rank has the values: send each tensor once, keep this rank's part."""
    out = Values()
    is_source = dist.get_rank() == source
    for fqn, tensor in tensors.items():
        if is_source:
            full = tensor.to(device()).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device())
        dist.broadcast(full, src=source)
        out.local[fqn] = _part(full, fqn, plan)
    return out


def _initialise(model: nn.Module, plan: Plan) -> Values:
    """Run the model's own initialisation on real memory, a module at a time."""
    _same_random_state()
    out = Values()
    real: dict[int, torch.Tensor] = {}
    names = {
        id(tensor): fqn
        for fqn, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        if fqn in plan.assignment.tensors
    }
    seen = {fqn: 0 for fqn in plan.assignment.tensors}
    for modules, initialise in _steps(model):
        held = _materialise(modules, real)
        try:
            initialise()
            for module, leaf, old in held:
                fqn = names[id(old)]
                value = _get(module, leaf)
                _check_written(value, fqn, module)
                out.local[fqn] = _part(value.detach(), fqn, plan)
                seen[fqn] += 1
                placed = plan.assignment.tensors[fqn]
                if seen[fqn] == len(placed.info.names):
                    real.pop(id(old), None)
        finally:
            for module, leaf, old in held:
                _set(module, leaf, old)
    return out


def _same_random_state() -> None:
    """Every rank draws the numbers that rank 0 would draw.

    Seeds that differ from rank to rank would otherwise make a model of patches.
    """
    if dist.get_world_size() == 1:
        return
    state = [torch.get_rng_state()]
    dist.broadcast_object_list(state, src=0)
    torch.set_rng_state(state[0])


def _steps(model: nn.Module) -> Iterator[tuple[list[nn.Module], Callable[[], object]]]:
    """Pairs of (modules to give memory, function that initialises them), in order.

    The order is that of one process, so the random numbers are too: a model with
    `init_weights()` is initialised by it at once; one with `_init_weights(module)` as
    `model.apply` would, children first; any other by each module's `reset_parameters`, in
    definition order, as its constructor did.
    """
    hook = getattr(model, "_init_weights", None)
    whole = getattr(model, "init_weights", None)
    if callable(whole) and not callable(hook):
        yield list(model.modules()), whole
        return
    order = list(_children_first(model)) if callable(hook) else list(model.modules())
    for module in order:
        if not any(t.is_meta for t in _own(module).values()):
            continue
        if callable(hook):
            yield [module], lambda m=module: _reset_then(m, hook)
        elif callable(getattr(module, "reset_parameters", None)):
            yield [module], module.reset_parameters  # type: ignore[misc]
        else:
            name = next(f for f, m in model.named_modules() if m is module)
            leaf = next(iter(_own(module)))
            raise ApplyError(
                Problem(
                    f"{name + '.' if name else ''}{leaf} is on meta and {type(module).__name__} "
                    "has no reset_parameters() to initialise it",
                    fix="define reset_parameters() on that class or init_weights() on the model, "
                    "or build the model on the CPU",
                )
            )


def _reset_then(module: nn.Module, hook: Callable[[nn.Module], object]) -> None:
    """transformers' hook leaves kinds that it does not know as their constructor made them."""
    hook(module)
    unwritten = any(_is_blank(t) for t in _own(module).values())
    reset = getattr(module, "reset_parameters", None)
    if unwritten and callable(reset):
        reset()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def visit(m: nn.Module) -> Iterator[nn.Module]:
        for child in m.children():
            yield from visit(child)
        if id(m) not in seen:
            seen.add(id(m))
            yield m

    yield from visit(module)


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a module holds itself."""
    both = {**module._parameters, **module._buffers}
    return {leaf: tensor for leaf, tensor in both.items() if tensor is not None}


def _get(module: nn.Module, leaf: str) -> torch.Tensor:
    return _own(module)[leaf]


def _set(module: nn.Module, leaf: str, tensor: torch.Tensor) -> None:
    if leaf in module._parameters:
        module._parameters[leaf] = tensor  # type: ignore[assignment]
    else:
        module._buffers[leaf] = tensor


def _materialise(
    modules: list[nn.Module], real: dict[int, torch.Tensor]
) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Swap meta tensors for blank real ones; returns what to put back."""
    held = []
    for module in modules:
        for leaf, old in _own(module).items():
            if not old.is_meta:
                continue
            new = real.get(id(old))
            if new is None:
                blank = torch.empty(old.shape, dtype=old.dtype, device=device())
                _blank(blank)
                new = blank
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(blank, requires_grad=old.requires_grad)
                real[id(old)] = new
            held.append((module, leaf, old))
            _set(module, leaf, new)
    return held


def _blank(tensor: torch.Tensor) -> None:
    """Mark memory as not yet written, where the dtype has a value to say so."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _is_blank(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).any())


def _check_written(value: torch.Tensor, fqn: str, module: nn.Module) -> None:
    if _is_blank(value.detach()):
        raise ApplyError(
            Problem(
                f"{fqn} was on meta, and the initialisation of {type(module).__name__} does not "
                "write all of it",
                fix="fill it in reset_parameters(), or build the model on the CPU",
            )
        )


def _retie(model: nn.Module, plan: Plan) -> None:
    """`to_empty` gives each name a tensor of its own: tied names get the first one's again."""
    inner = model.module if hasattr(model, "module") else model
    for placed in plan.assignment.tensors.values():
        first, *others = placed.info.names
        owner, _, leaf = first.rpartition(".")
        tensor = _get(inner.get_submodule(owner), leaf)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            _set(inner.get_submodule(owner), leaf, tensor)
