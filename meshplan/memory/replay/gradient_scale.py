"""Temporary tensors of `runtime.train.gradient_scale`, line by line: of `unscale` and clipping.

Clipping allocates a few scalars for each gradient and for the total norm. `unscale` checks that all
gradients of a scaled loss are finite.

Source of the check: torch 2.13, ATen's `isfinite`, which compares the tensor with itself and its
absolute value with infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.memory.log.events import Term
from meshplan.memory.replay.optimizer import Updated
from meshplan.memory.replay.writer import LogWriter

_NUMBER: Final = 4
"""Bytes of a norm: norms are added up in single precision."""


def unscale(writer: LogWriter, params: Sequence[Updated]) -> None:
    """Play one call of `runtime.train.gradient_scale.unscale`.

    Args:
        writer: The log to write to.
        params: The parameters that have a gradient.
    """
    here = [param for param in params if not param.on_host]
    there = [param for param in params if param.on_host]
    finite = _are_finite(writer, here) if here else _number(writer)
    if there:
        own = _are_finite(writer, there, on_host=True)
        copied = _number(writer)
        writer.free(own)
        both = _number(writer)
        writer.free_all((finite, copied))
        finite = both
    writer.free(finite)


def _are_finite(writer: LogWriter, params: Sequence[Updated], *, on_host: bool = False) -> int:
    def make(size: int) -> int:
        return writer.make(size, Term.TEMPORARIES, on_host=on_host)

    flags = []
    for param in params:
        absolute = make(param.num_bytes)
        is_below = make(param.numel)
        is_number = make(param.numel)
        both = make(param.numel)
        writer.free_all((is_number, is_below, absolute))
        flags.append(make(1))
        writer.free(both)
    stacked = make(len(flags))
    writer.free_all(flags)
    every = make(1)
    writer.free(stacked)
    out = make(4)
    writer.free(every)
    return out


def clip(
    writer: LogWriter, gradients: Mapping[tuple[tuple[str, ...], bool], Sequence[Updated]]
) -> None:
    """Play one call of `runtime.train.gradient_scale.clip_grad_norm_`.

    Args:
        writer: The log to write to.
        gradients: Parameters that have a gradient, by (mesh axes that shard them, True if they are
            on the host). Norms of gradients on the host are computed there, and copied to the
            device to be added up.
    """
    powers = []
    for (_, there), alike in sorted(gradients.items()):
        power = _power_sum(writer, [p for p in alike if p.numel], on_host=there)
        powers.append(_number(writer) if there else power)
        if there:
            writer.free(power)
    zero = _number(writer)
    stacked = _number(writer, len(powers) + 1)
    writer.free(zero)
    power, norm, added, inverse = (_number(writer) for _ in range(4))
    scaled = _number(writer)
    writer.free_all((inverse, added))
    factor = _number(writer)
    writer.free(scaled)
    if any(there for _, there in gradients):
        writer.free(_number(writer, on_host=True))
    writer.free_all((*powers, stacked, power, factor, norm))


def _power_sum(writer: LogWriter, parts: Sequence[Updated], *, on_host: bool) -> int:
    """Allocate the norms of these gradients, and return the storage of the sum of their squares."""
    if not parts:
        return _number(writer)
    number = partial(_number, writer, on_host=on_host)
    sizes = [DTYPE_BYTES[part.dtype] for part in parts]
    norms = [writer.make(size, Term.TEMPORARIES, on_host=on_host) for size in sizes]
    if set(sizes) != {_NUMBER}:
        wide = [number() for size in sizes if size != _NUMBER]
        writer.free_all(n for n, size in zip(norms, sizes, strict=True) if size != _NUMBER)
        norms = [n for n, size in zip(norms, sizes, strict=True) if size == _NUMBER] + wide
    stacked = number(len(parts))
    writer.free_all(norms)
    squared = number(len(parts))
    out = number()
    writer.free_all((squared, stacked))
    return out


def _number(writer: LogWriter, count: int = 1, *, on_host: bool = False) -> int:
    return writer.make(_NUMBER * count, Term.TEMPORARIES, on_host=on_host)
