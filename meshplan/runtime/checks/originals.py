"""The values that tensors had before a forward first wrote them in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshplan.runtime.base.mesh import local_of


class Switched(TorchFunctionMode):
    """A torch function mode that is entered by `start` and left by `stop`."""

    _is_on = False

    def start(self) -> None:
        """Start watching."""
        self._is_on = True
        self.__enter__()

    def stop(self) -> None:
        """Stop watching; a second call does nothing."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)


def writes_first(name: str) -> bool:
    """Return True if a function of this name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class Originals(Switched):
    """A torch function mode that copies each given tensor before its first in-place write.

    Tensors that are never written are not copied. A write is a call whose name ends in an
    underscore, an item assignment, an in-place operator, or a call with `out=`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def begin(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Start watching these tensors, given as (name, tensor)."""
        self._tensors = {name: local_of(tensor) for name, tensor in tensors}
        self._kept = {}
        self._names = {t.untyped_storage().data_ptr(): n for n, t in self._tensors.items()}
        self.start()

    def end(self, written: Collection[str]) -> dict[str, torch.Tensor]:
        """Stop watching; return the tensors named in `written`, with the values `begin` found.

        A tensor that was replaced by another and not written in place still has these values, so it
        is returned itself; for the others a copy is returned.
        """
        self.stop()
        found = {n: self._kept.get(n, t) for n, t in self._tensors.items() if n in written}
        self._names, self._tensors, self._kept = {}, {}, {}
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        targets = list(args[:1]) if writes_first(name) or name.startswith("__i") else []
        out = kwargs.get("out")
        targets += out if isinstance(out, tuple | list) else [out]
        for target in targets:
            target = local_of(target) if isinstance(target, DTensor) else target
            # Other subclasses of Tensor may have no storage whose address can be looked up.
            if type(target) in (torch.Tensor, nn.Parameter) and target.layout == torch.strided:
                self._keep(target)
        return func(*args, **kwargs)

    def _keep(self, target: torch.Tensor) -> None:
        name = self._names.get(target.untyped_storage().data_ptr())
        if name is not None and name not in self._kept:
            self._kept[name] = self._tensors[name].detach().clone()
