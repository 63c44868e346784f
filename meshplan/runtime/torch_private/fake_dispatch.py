"""A shortcut through the dispatch of FakeTensor, which needs private names of torch.

Before torch runs an operator on fake tensors, it checks a dozen special cases. In the end most
operators run their kernel for meta tensors, or a decomposition into other operators. The choice
depends on the operator alone. We therefore determine it once per operator, and from then on call
the kernel or the decomposition directly, without the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

import torch

from meshplan.runtime.torch_private.modes import Watching, answer_device

Run = Callable[[Any, Any, Any], Any]
_CPU: Final = torch.device("cpu")


class _DispatchStep(Enum):
    """The last step of torch's dispatch of an operator on fake tensors."""

    KERNEL = auto()
    """The operator's kernel for meta tensors; we wrap its results as fake tensors on the CPU."""
    APART = auto()
    """A Python function in torch's `decomposition_table`, which calls other operators."""
    COMPOSITE = auto()
    """`OpOverload.decompose`: the operator is composite, defined by other operators."""
    PRIM = auto()
    """`prim_meta_impl`, the Python function that computes a `prims` operator on meta tensors."""
    RULED = auto()
    """A function for fake tensors only, registered in `torch._subclasses.fake_impls`."""
    LONG = auto()
    """torch's full dispatch, for every operator that none of the above fits."""


_STEPS: Final[dict[Any, _DispatchStep]] = {}


class Dispatcher:
    """Runs operators on the fake tensors of one mode, with the same results as torch but faster.

    Args:
        mode: The active FakeTensorMode, from `fakes.fake_mode`.
        inner: Runs (operator, args, kwargs); called for each operator of a decomposition.
        faked: Makes a fake tensor from a meta tensor and a device.

    Assumes: the operator belongs to torch and writes to none of its arguments. All of its tensor
    arguments are fake tensors of this mode, on the CPU, without known values (`constant`).
    """

    def __init__(self, mode: Any, inner: Run, faked: Callable[[torch.Tensor, Any], Any]) -> None:
        from torch._subclasses import fake_tensor

        self._mode, self._inner = mode, _Inner(inner)
        self._fake, self._faked_as = fake_tensor.FakeTensor, faked

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and return its result as fake tensors."""
        step = _STEPS.get(func)
        if step is None:
            step = _STEPS[func] = _last_step_of(func, self._mode)
        if step is _DispatchStep.LONG or kwargs.get("device") is not None:
            return self._long(func, args, kwargs)
        if step is _DispatchStep.KERNEL:
            return self._of_kernel(func, args, kwargs)
        with self._inner:
            if step is _DispatchStep.APART:
                return _tables()[1][func](*args, **kwargs)
            if step is _DispatchStep.COMPOSITE:
                return func.decompose(*args, **kwargs)
            if step is _DispatchStep.PRIM:
                return func.prim_meta_impl(*args, **kwargs)
            out = _rule_of(func)(self._mode, func, *args, **kwargs)
        return self._long(func, args, kwargs) if out is NotImplemented else out

    def _of_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        given: list[tuple[Any, torch.Tensor]] = []
        with torch._C._DisableTorchDispatch():
            plain_args, plain_kwargs = self._plain(args, given), self._plain(kwargs, given)
            try:
                out = func(*plain_args, **plain_kwargs)
            except NotImplementedError:  # The full dispatch may have another rule.
                out = NotImplemented
        if isinstance(out, torch.Tensor):
            return self._faked(out, given)
        if type(out) in (tuple, list):
            return type(out)(self._faked(each, given) for each in out)
        return self._long(func, args, kwargs)

    def _plain(self, value: Any, given: list[tuple[Any, torch.Tensor]]) -> Any:
        """Return an argument with meta tensors in place of fakes; add each (fake, meta) to `given`.

        A kernel that runs on fakes asks Python for their device at every step, which is slow.
        """
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
        """Run torch's full dispatch without its cache, since `fake_results` caches the result."""
        before, self._mode.cache_enabled = self._mode.cache_enabled, False
        try:
            return func(*args, **kwargs)
        finally:
            self._mode.cache_enabled = before


class _Inner(Watching):
    """A mode, active during a decomposition, that passes each of its operators to `run`."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := answer_device(func, args)) is not None:
            return device
        return self._run(func, args, kwargs or {})


def _tables() -> tuple[Any, Any]:
    """Return two tables of torch by operator: Python kernels for meta tensors, decompositions."""
    from torch._decomp import decomposition_table, meta_table

    return meta_table, decomposition_table


def _last_step_of(func: Any, mode: Any) -> _DispatchStep:
    """Return how torch runs an operator in the end, by the checks of `_dispatch_impl`, in order."""
    from torch._library.simple_registry import singleton
    from torch._subclasses import fake_impls, fake_tensor

    has_python_meta, has_decomposition = _tables()
    if func not in has_python_meta and not mode.cpp_meta_supports_symint(func):
        if func in has_decomposition and fake_tensor.torch_decomp_decompositions(func):
            return _DispatchStep.APART
        if func._can_decompose():
            return _DispatchStep.COMPOSITE
    if func.namespace == "prims":
        return _DispatchStep.PRIM if hasattr(func, "prim_meta_impl") else _DispatchStep.LONG
    if singleton.find(func.name()).fake_impl.kernel:
        return _DispatchStep.LONG
    if _rule_of(func) is not None:
        return _DispatchStep.RULED
    return _DispatchStep.KERNEL if fake_impls.has_meta(func) else _DispatchStep.LONG


def _rule_of(func: Any) -> Any:
    """Return the first function of `fake_impls` that applies to an operator, or None."""
    from torch._subclasses import fake_impls

    checks = fake_impls.op_implementations_checks
    return next((rule for check, rule in checks if check(func)), None)
