"""Every place where torch waits for a collective, as seen from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def around_waits(around: Callable[..., Any]) -> Iterator[None]:
    """Make each wait for a collective inside the `with` block run `around(wait, *args, **kwargs)`.

    These are `Work.wait`, which synchronous collectives, object collectives, pipelines and FSDP2
    call; `wait_tensor`, with which functional collectives and thereby DTensor end; and on CUDA the
    current stream's wait for an event, with which FSDP2 lets its compute stream wait for its other
    streams. Two functions in which DistributedDataParallel waits in C++ count as a whole: the
    broadcast of buffers, and the agreement on buckets in the second step. Its reducer, which waits
    at the end of backward, is not seen here.

    Private, because no hook of torch reports a wait. The operator is replaced in `_op`, which both
    an overload and its packet call, since callers keep either.
    """
    wait_tensor = torch.ops._c10d_functional.wait_tensor
    replaced = [
        (owner, name, getattr(owner, name))
        for owner, name in (
            (dist.Work, "wait"), (wait_tensor, "_op"), (wait_tensor.default, "_op"),
            (dist, "_broadcast_coalesced"), (dist.Reducer, "_rebuild_buckets"),
        )
    ]  # fmt: skip
    others = [_calling(around, wait) for _, _, wait in replaced]
    if torch.cuda.is_available():
        replaced.append((torch.cuda.Stream, "wait_event", torch.cuda.Stream.wait_event))
        others.append(_waiting_on_stream(around, torch.cuda.Stream.wait_event))
    try:
        for (owner, name, _), other in zip(replaced, others, strict=True):
            setattr(owner, name, other)
        yield
    finally:
        for owner, name, wait in replaced:
            setattr(owner, name, wait)


def _calling(around: Callable[..., Any], wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that, unlike a partial, becomes a method if a class has it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(wait, *args, **kwargs)

    return call


def _waiting_on_stream(around: Callable[..., Any], wait: Callable[..., Any]) -> Callable[..., Any]:
    def wait_event(stream: Any, event: Any) -> None:
        if stream == torch.cuda.current_stream():
            around(wait, stream, event)
        else:  # Another stream's wait holds up no computation of this one.
            wait(stream, event)

    return wait_event
