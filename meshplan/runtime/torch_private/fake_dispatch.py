"""How torch comes to what an operator makes of fakes: private torch names, as in `private`.

Torch looks through a dozen special cases before it runs what most operators come to in the end:
their kernel for meta tensors, or the operators that they are made of. Which of these it will be
follows from the operator alone, so it is asked once, and torch's own last step is taken at once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

import torch

from meshplan.runtime.torch_private.modes import Watching, device_told

Run = Callable[[Any, Any, Any], Any]
_CPU: Final = torch.device("cpu")


class _Leg(Enum):
    """The last step of torch's way."""

    KERNEL = auto()
    """The kernel for meta tensors; results are where all that is given is."""
    APART = auto()
    """A function of torch that calls other operators."""
    COMPOSITE = auto()
    """The same, of operators that are always taken apart."""
    PRIM = auto()
    """What refs are made of: a function says what it makes."""
    RULED = auto()
    """A function for fakes alone."""
    LONG = auto()
    """All else."""


_LEGS: Final[dict[Any, _Leg]] = {}


class Legs:
    """Runs operators of the fakes of one mode as torch would.

    Args:
        mode: Of `private_fakes.fake_mode`; it is open.
        inner: Runs the operators that another one is made of.
        faked: Makes a fake of a meta tensor, on a device.

    Assumes: an operator of torch's own that writes nothing, given tensors of that mode alone, which
    lie on the CPU and hold no constant.
    """

    def __init__(self, mode: Any, inner: Run, faked: Callable[[torch.Tensor, Any], Any]) -> None:
        from torch._subclasses import fake_tensor

        self._mode, self._inner = mode, _Inner(inner)
        self._fake, self._faked_as = fake_tensor.FakeTensor, faked

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator makes."""
        leg = _LEGS.get(func)
        if leg is None:
            leg = _LEGS[func] = _leg_of(func, self._mode)
        if leg is _Leg.LONG or kwargs.get("device") is not None:
            return self._long(func, args, kwargs)
        if leg is _Leg.KERNEL:
            return self._of_kernel(func, args, kwargs)
        with self._inner:
            if leg is _Leg.APART:
                return _tables()[1][func](*args, **kwargs)
            if leg is _Leg.COMPOSITE:
                return func.decompose(*args, **kwargs)
            if leg is _Leg.PRIM:
                return func.prim_meta_impl(*args, **kwargs)
            out = _rule_of(func)(self._mode, func, *args, **kwargs)
        return self._long(func, args, kwargs) if out is NotImplemented else out

    def _of_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        given: list[tuple[Any, torch.Tensor]] = []
        with torch._C._DisableTorchDispatch():
            plain_args, plain_kwargs = self._plain(args, given), self._plain(kwargs, given)
            try:
                out = func(*plain_args, **plain_kwargs)
            except NotImplementedError:  # Torch knows more ways then.
                out = NotImplemented
        if isinstance(out, torch.Tensor):
            return self._faked(out, given)
        if type(out) in (tuple, list):
            return type(out)(self._faked(each, given) for each in out)
        return self._long(func, args, kwargs)

    def _plain(self, value: Any, given: list[tuple[Any, torch.Tensor]]) -> Any:
        """The same with plain meta tensors: a fake is asked for its device at every turn."""
        kind = type(value)
        if kind is self._fake:
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            meta.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
            given.append((value, meta))
            return meta
        if kind is tuple or kind is list:
            return kind(self._plain(each, given) for each in value)
        if kind is dict:
            return {key: self._plain(each, given) for key, each in value.items()}
        return value

    def _faked(self, made: Any, given: list[tuple[Any, torch.Tensor]]) -> Any:
        if not isinstance(made, torch.Tensor):
            return made
        for fake, meta in given:
            if made is meta:
                return fake
        return self._faked_as(made, _CPU)

    def _long(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Whoever asks remembers what is made; torch need not do so as well."""
        before, self._mode.cache_enabled = self._mode.cache_enabled, False
        try:
            return func(*args, **kwargs)
        finally:
            self._mode.cache_enabled = before


class _Inner(Watching):
    """Open while an operator is taken apart."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_told(func, args)) is not None:
            return device
        return self._run(func, args, kwargs or {})


def _tables() -> tuple[Any, Any]:
    """(operators with a kernel for meta tensors in Python, functions that take operators apart)."""
    from torch._decomp import decomposition_table, meta_table

    return meta_table, decomposition_table


def _leg_of(func: Any, mode: Any) -> _Leg:
    """As `FakeTensorMode._dispatch_impl` comes to it, case by case."""
    from torch._library.simple_registry import singleton
    from torch._subclasses import fake_impls, fake_tensor

    has_python_meta, apart = _tables()
    if func not in has_python_meta and not mode.cpp_meta_supports_symint(func):
        if func in apart and fake_tensor.torch_decomp_decompositions(func):
            return _Leg.APART
        if func._can_decompose():
            return _Leg.COMPOSITE
    if func.namespace == "prims":
        return _Leg.PRIM if hasattr(func, "prim_meta_impl") else _Leg.LONG
    if singleton.find(func.name()).fake_impl.kernel:
        return _Leg.LONG
    if _rule_of(func) is not None:
        return _Leg.RULED
    return _Leg.KERNEL if fake_impls.has_meta(func) else _Leg.LONG


def _rule_of(func: Any) -> Any:
    """For fakes alone; the first that torch would ask."""
    from torch._subclasses import fake_impls

    checks = fake_impls.op_implementations_checks
    return next((rule for check, rule in checks if check(func)), None)
