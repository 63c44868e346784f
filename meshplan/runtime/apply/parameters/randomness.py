"""Random numbers of the forward: equal along tp, different on ranks with different samples.

Ranks along tp compute on the same activations, so dropout of a replicated activation needs the same
mask on all of them. Ranks with different samples should draw different masks. If the model drew
from the global generators as they are, both would depend on how the program happens to seed them.
Every forward in training mode therefore seeds the generators itself, and restores the caller's
random state afterwards.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from meshplan.plan.plan import Plan
from meshplan.runtime.base.fake_mode import numbers
from meshplan.runtime.base.mesh import device, device_type


@dataclass(slots=True)
class RandomStream:
    """The random numbers of a model's training forwards on this rank.

    Attributes:
        seed: Rank 0's `torch.initial_seed()` when the plan was applied.
        forwards: Number of training forwards so far.
    """

    seed: int
    forwards: int = 0


_streams: WeakKeyDictionary[nn.Module, RandomStream] = WeakKeyDictionary()
"""The stream of each model, or module of a pipeline stage, that a plan was applied to."""


def stream_of(model: nn.Module) -> RandomStream:
    """Return the stream that `give_own_stream` gave to a model or to the module of a stage."""
    return _streams[model]


def give_own_stream(model: nn.Module, plan: Plan) -> None:
    """Register hooks that seed the generators before each training forward and restore them after.

    The seed is derived from rank 0's `torch.initial_seed()`, this rank's position on all mesh axes
    except tp, and the number of training forwards so far.
    """
    axes = tuple(axis for axis in plan.mesh.names if axis != "tp")
    place = plan.mesh.index(dist.get_rank(), axes)
    stream = _streams[model] = RandomStream(_seed_of_rank_0())
    before: list[tuple[torch.Tensor, ...]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if module.training:
            before.append(random_states())
            _seed_generators(_seed(stream.seed, place, stream.forwards))
            stream.forwards += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if before:
            restore_random(before.pop())

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _seed_of_rank_0() -> int:
    # Sent in two halves, because an unsigned seed of 64 bits does not fit into an int64 tensor.
    seed = torch.initial_seed()
    halves = torch.tensor([seed >> 32, seed & 0xFFFFFFFF], device=device())
    dist.broadcast(halves, src=0)
    high, low = numbers(halves, [0, 0])
    return int(high << 32 | low)


def _seed(*numbers: int) -> int:
    """Return a hash of the numbers as a seed, so that similar numbers give unrelated streams."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _seed_generators(seed: int) -> None:
    """Seed the CPU's generator and this device's, the two that `random_states` saves.

    `torch.manual_seed` is slower: it seeds every kind of device, and for each kind that is not
    initialised yet, every call formats the Python stack.
    """
    torch.default_generator.manual_seed(seed)
    kind = device_type()
    if kind != "cpu":
        torch.get_device_module(kind).manual_seed(seed)


def random_states() -> tuple[torch.Tensor, ...]:
    """Return the generator states: of the CPU and, if the device is an accelerator, of it too."""
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
        drawn: At the end, True is appended if any of these generators was used, else False.
    """
    numpy = sys.modules.get("numpy.random")
    torch_before, host_before = random_states(), random.getstate()
    numpy_before = numpy.get_state() if numpy is not None else None
    is_cached = torch.is_autocast_cache_enabled()
    # In training, autocast would reuse a cast weight made here, which has no gradient.
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
    """Return a state of NumPy's generator with its array as bytes, so that `!=` can compare it."""
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
