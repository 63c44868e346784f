"""Temporary buffers of `unscale`, which checks that all gradients of a scaled loss are finite.

Source: `runtime.train.gradient_scale.unscale`, line by line, and torch 2.13, ATen's
`isfinite`, which compares the tensor with itself and its absolute value with infinity.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.memory.log.events import Term
from meshplan.memory.replay.optimizer import Updated
from meshplan.memory.replay.writer import LogWriter


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


def _number(writer: LogWriter) -> int:
    return writer.make(4, Term.TEMPORARIES)
