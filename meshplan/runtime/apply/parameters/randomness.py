"""Random numbers of the forward: equal along tp, different on ranks that see other samples.

Ranks of tp compute on the same activations, so dropout of a replicated activation needs the same
mask on all of them; ranks that see other samples should draw other masks. With the global
generator, the result depends on how the program happens to seed it. The model therefore draws from
a stream of its own while it runs in training mode, and the caller's generators are restored
afterwards.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.plan.plan import Plan
from meshplan.runtime.base.fake_mode import numbers
from meshplan.runtime.base.mesh import device, device_type


def give_own_stream(model: nn.Module, plan: Plan) -> None:
    """Make every training forward of `model` draw from a random stream that the plan determines.

    The seed is derived from rank 0's `torch.initial_seed()`, this rank's coordinates on every axis
    but tp, and the number of training forwards before.
    """
    axes = tuple(axis for axis in plan.mesh.names if axis != "tp")
    place = plan.mesh.index(dist.get_rank(), axes)
    base = _seed_of_rank_0()
    before: list[tuple[torch.Tensor, ...]] = []
    count = 0

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal count
        if module.training:
            before.append(random_states())
            _seed_generators(_seed(base, place, count))
            count += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if before:
            restore_random(before.pop())

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _seed_of_rank_0() -> int:
    # Sent in two halves: a seed may use all 64 bits, one more than an int64 tensor can hold.
    seed = torch.initial_seed()
    halves = torch.tensor([seed >> 32, seed & 0xFFFFFFFF], device=device())
    dist.broadcast(halves, src=0)
    high, low = numbers(halves, [0, 0])
    return int(high << 32 | low)


def _seed(*numbers: int) -> int:
    """Hash numbers to a seed, so that the streams of neighbouring numbers are unrelated."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _seed_generators(seed: int) -> None:
    """Seed the CPU's generator and this device's, which `random_states` saves.

    `torch.manual_seed` would visit every kind of device and, at every call, format the stack for
    each that has not been used yet.
    """
    torch.default_generator.manual_seed(seed)
    kind = device_type()
    if kind != "cpu":
        torch.get_device_module(kind).manual_seed(seed)


def random_states() -> tuple[torch.Tensor, ...]:
    """Return the random state of the CPU and, with an accelerator, of this device."""
    kind = device_type()
    if kind == "cpu":
        return (torch.get_rng_state(),)
    return (torch.get_rng_state(), torch.get_device_module(kind).get_rng_state())


def restore_random(states: tuple[torch.Tensor, ...]) -> None:
    """Set the generators to states that `random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device_type()).set_rng_state(states[1])


@contextmanager
def undisturbed(drawn: list[bool]) -> Iterator[None]:
    """Run the code inside without gradients and restore the generators of torch, Python and NumPy.

    Args:
        drawn: Receives, at the end, True if any of the generators was used, else False.
    """
    numpy = sys.modules.get("numpy.random")
    torch_before, host_before = random_states(), random.getstate()
    numpy_before = numpy.get_state() if numpy is not None else None
    is_cached = torch.is_autocast_cache_enabled()
    # Casts that autocast caches without gradients would lack them in training.
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)
        torch_after = random_states()
        is_drawn = any(
            not torch.equal(a, b) for a, b in zip(torch_before, torch_after, strict=True)
        )
        is_drawn = is_drawn or random.getstate() != host_before
        if numpy is not None:
            is_drawn = is_drawn or _numbers_of(numpy.get_state()) != _numbers_of(numpy_before)
            numpy.set_state(numpy_before)
        drawn.append(is_drawn)
        restore_random(torch_before)
        random.setstate(host_before)


def _numbers_of(state: Any) -> tuple[Any, ...]:
    """Convert a state of NumPy's generator, which contains an array, to comparable values."""
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
