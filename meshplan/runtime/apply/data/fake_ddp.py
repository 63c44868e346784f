"""DistributedDataParallel for fake tensors: allocates the same bytes at the same times.

The real class cannot run on fake tensors, because its C++ Reducer reads the memory of tensors. It
allocates little: buckets as large as the gradients, flattened copies of the module's buffers before
a forward, and a copy of the output if it searches for unused parameters.

Source: torch 2.13, csrc/distributed/c10d/reducer.cpp and nn/parallel/distributed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only


class FakeDDP(DistributedDataParallel):
    """A replacement for `DistributedDataParallel(module, **options)` on fake tensors."""

    def __init__(
        self,
        module: nn.Module,
        *,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        **unused: Any,
    ) -> None:
        nn.Module.__init__(self)  # DDP's own __init__ would build the C++ Reducer.
        self.module = module
        self.find_unused_parameters = find_unused_parameters and not static_graph
        self._is_view, self._num_forwards = gradient_as_bucket_view, 0
        self._synchronizes = self._broadcasts = True
        self._has_buffers = broadcast_buffers and any(True for _ in module.buffers())
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        self._used: list[torch.Tensor] = []
        self._notes_use = find_unused_parameters or static_graph
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._fill)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._num_forwards += 1
        # DDP rebuilds the buckets once, in the order in which gradients became ready.
        if self._num_forwards <= 2:
            self._make_buckets()
        if self._has_buffers and self._broadcasts:
            _flatten(list(self.module.buffers()))
        output = self.module(*args, **kwargs)
        self._broadcasts = torch.is_grad_enabled() and self._synchronizes
        if self.find_unused_parameters and self._broadcasts:
            return tree_map_only(torch.Tensor, torch.clone, output)
        return output

    def _make_buckets(self) -> None:
        """Allocate one bucket per dtype; several smaller buckets would take as much in total."""
        self._views = {}
        trained = [p for p in self.module.parameters() if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in trained):
            params = [p for p in trained if p.dtype == dtype]
            bucket = torch.empty(sum(p.numel() for p in params), dtype=dtype)
            views = bucket.split([p.numel() for p in params])
            self._views |= dict(zip(params, views, strict=True))
        if self._notes_use:
            self._used = [torch.empty(len(trained), dtype=torch.int32) for _ in range(2)]

    def _fill(self, param: nn.Parameter) -> None:
        """Make a parameter's gradient a view of its bucket, whose memory is allocated already."""
        if self._synchronizes and self._is_view:
            param.grad = self._views[param].view(param.shape)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before


def _flatten(buffers: list[torch.Tensor]) -> None:
    """Allocate and free the memory of a broadcast of buffers: one flat copy per dtype."""
    flat = [
        torch.cat([b.flatten() for b in buffers if b.dtype == dtype])
        for dtype in dict.fromkeys(b.dtype for b in buffers)
    ]
    del flat
