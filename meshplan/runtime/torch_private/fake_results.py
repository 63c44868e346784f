"""A cache of operators' results on fake tensors, which needs private names of torch.

torch has such a cache, but computing its key takes longer than most operators on fake tensors. The
key here is smaller, because we cache fewer results: only those of torch's own operators that depend
on nothing but the shapes, strides and dtypes of the tensors and the values of other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import torch

from meshplan.runtime.base.pytree import given_to
from meshplan.runtime.torch_private.fake_dispatch import Dispatcher

_ops: Final[Any] = torch.ops.aten
_KEY_TYPES: Final = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout,
     torch.memory_format}
)  # fmt: skip
"""Types of arguments whose value becomes part of the cache key."""
_VALUE_TAGS: Final = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)
_LIFTS: Final = frozenset({_ops.lift_fresh.default, _ops.lift_fresh_copy.default})
_DETACH: Final = _ops.detach.default
_SHARES: Final = _ops._unsafe_view.default
"""An operator whose result shares its argument's storage, though torch declares it no view."""
_MOST: Final = 1 << 16
_CPU: Final = torch.device("cpu")


class _Made(NamedTuple):
    """The description of one result of an operator, from which an equal fake tensor can be made.

    Attributes:
        of: Index of the argument that the result is a view of; None if it has a new storage.
        shape: Sizes of the dims.
        stride: Strides of the dims, in elements.
        offset: Storage offset, in elements.
    """

    of: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _Recipe(NamedTuple):
    """The description of all results of one call of an operator.

    Attributes:
        form: Type of the sequence that the operator returns; None if it returns a single result.
        made: Descriptions of the results; None in place of a result that is None.
    """

    form: type | None
    made: tuple[_Made | None, ...]


_KNOWN: Final[dict[tuple[Any, ...], _Recipe | None]] = {}
"""Recipes by cache key; None if the operator must run each time. All models and modes share it."""


class _Asks(Enum):
    """The properties of its arguments that determine an operator's result."""

    FORMS = auto()
    """Shapes, strides, dtypes and plain values such as `dim`; results are cached."""
    FORMS_EACH_TIME = auto()
    """The same properties, but results are not cached: one may be the argument itself."""
    ALL = auto()
    """More than these, such as the values of a tensor, so torch runs the operator each time."""


_ASKS: Final[dict[Any, _Asks]] = {}


class Results:
    """Runs operators on the fake tensors of one mode, with a cache of their results.

    Args:
        mode: The active FakeTensorMode, from `fakes.fake_mode`.
    """

    def __init__(self, mode: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._mode, self._fake = mode, FakeTensor
        self._dispatcher = Dispatcher(mode, self.of, self._faked)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        is_unsafe = mode._allow_unsafe_data_ptr_access
        private: Any = torch._C
        self._guard: Callable[[Any], None] = (
            private._set_warn_deprecated_on_mutable_data_ptr
            if is_unsafe
            else private._set_throw_on_mutable_data_ptr
        )

    def of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an operator's result, as new fake tensors like the cached ones if it is cached."""
        if func is _DETACH and type(args[0]) is self._fake and self._is_plain(args[0]):
            return self._alias_of(args[0])  # The most frequent operator: autograd detaches often.
        asks = _ASKS.get(func)
        if asks is None:
            asks = _ASKS[func] = _asked_of(func)
        key = self._key(func, args, kwargs) if asks is not _Asks.ALL else None
        if key is None:
            return func(*args, **kwargs)
        if asks is _Asks.FORMS_EACH_TIME:
            return self._dispatcher.run(func, args, kwargs)
        try:
            recipe = _KNOWN[key]
        except KeyError:
            return self._first(key, func, args, kwargs)
        if recipe is None:
            return self._dispatcher.run(func, args, kwargs)
        return self._from_recipe(recipe, args)

    def _first(self, key: tuple[Any, ...], func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose key is not in the cache, and add a recipe of its result."""
        out = self._dispatcher.run(func, args, kwargs)
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = self._recipe(func, args, kwargs, out)
        return out

    # The key: a description of the arguments

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        fakes = self._describe(args, parts)
        if fakes is None:
            return None
        for name, value in kwargs.items():
            parts.append(name)
            more = self._describe((value,), parts)
            if more is None:
                return None
            fakes += more
        # Without a fake tensor as argument, we cannot know that the call belongs to this mode.
        return tuple(parts) if fakes else None

    def _describe(self, values: Any, parts: list[Any]) -> int | None:
        """Append a description of arguments to `parts`, which becomes the key.

        Returns:
            The number of fake tensors among the arguments; None if an argument cannot be part of
            a key, so that the operator must run.
        """
        parts.append(len(values))
        fakes = 0
        for value in values:
            kind = type(value)
            if kind is self._fake:
                if not self._is_plain(value):
                    return None
                fakes += 1
                parts += (value.shape, value.stride(), value.storage_offset(), value.dtype,
                         value.fake_device, value.requires_grad)  # fmt: skip
            elif kind in _KEY_TYPES:
                parts += (kind, value)
            elif kind is list or kind is tuple or kind is torch.Size:
                more = self._describe(value, parts)
                if more is None:
                    return None
                fakes += more
            else:
                return None
        return fakes

    def _is_plain(self, fake: Any) -> bool:
        return (
            fake.fake_mode is self._mode
            and fake.constant is None
            and fake.fake_device == _CPU
            and fake.layout is torch.strided
            and not fake.is_conj()
            and not fake.is_neg()
            and not fake.is_inference()
        )

    # The recipe: a description of the results

    def _recipe(self, func: Any, args: Any, kwargs: Any, out: Any) -> _Recipe | None:
        form = type(out) if type(out) in (tuple, list) else None
        results = out if form is not None else (out,)
        given = {t.untyped_storage()._cdata for t in given_to((args, kwargs))}
        made: list[_Made | None] = []
        for result in results:
            if result is None:
                made.append(None)
                continue
            found = self._made(func, args, result, given)
            if found is None:
                return None
            made.append(found)
        return _Recipe(form, tuple(made))

    def _made(self, func: Any, args: Any, result: Any, given: set[int]) -> _Made | None:
        if type(result) is not self._fake or not self._is_plain(result) or result.requires_grad:
            return None
        own = result.untyped_storage()
        shape, stride = tuple(result.shape), tuple(result.stride())
        offset, of = result.storage_offset(), None
        if func.is_view or func is _SHARES:
            tensors = [n for n, arg in enumerate(args) if type(arg) is self._fake]
            if len(tensors) != 1 or args[tensors[0]].dtype != result.dtype:
                return None
            of = tensors[0]
            if args[of] is result or args[of].untyped_storage()._cdata != own._cdata:
                return None
        elif own._cdata in given or offset or own.nbytes() != _spanned(result):
            return None
        given.add(own._cdata)  # Refuse a second result in this storage: no recipe describes it.
        found = _Made(of, shape, stride, offset, result.dtype, result.fake_device)
        keys: Any = torch._C._dispatch_key_set
        return found if keys(self._fill(found, args)) == keys(result) else None

    def _from_recipe(self, recipe: _Recipe, args: Any) -> Any:
        if recipe.form is None:
            (made,) = recipe.made
            return None if made is None else self._fill(made, args)
        return recipe.form(None if m is None else self._fill(m, args) for m in recipe.made)

    def _fill(self, made: _Made, args: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            if made.of is None:
                meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            else:
                meta = torch.empty(0, dtype=made.dtype, device="meta")
                storage = args[made.of].untyped_storage()
                meta.set_(storage, made.offset, made.shape, made.stride)
        return self._faked(meta, made.device)

    def _alias_of(self, fake: Any) -> Any:
        """Return a new fake tensor with the storage, offset, shape and strides of `fake`."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=fake.dtype, device="meta")
            storage = fake.untyped_storage()
            meta.set_(storage, fake.storage_offset(), fake.shape, fake.stride())
        return self._faked(meta, fake.fake_device)

    def _faked(self, meta: torch.Tensor, device: torch.device) -> Any:
        """Return `FakeTensor(mode, meta, device)`, made without the slow constructor.

        The constructor spends most of its time on checks of its arguments. All fake tensors of a
        mode and device have equal attributes, so we construct the first one and copy its attributes
        to all others. The other steps of the constructor are repeated here.
        """
        known = self._attributes.get(device)
        if known is None:
            first = self._fake(self._mode, meta, device)
            self._attributes[device] = dict(vars(first))
            return first
        fake: Any = torch.Tensor._make_subclass(
            self._fake, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard(fake)
        vars(fake).update(known)
        return fake


def _asked_of(func: Any) -> _Asks:
    """Return what determines the result of an operator: `ALL` if it writes to an argument."""
    if func.namespace not in ("aten", "prims") or func._schema.is_mutable or func in _LIFTS:
        return _Asks.ALL
    if not _VALUE_TAGS.isdisjoint(func.tags):
        return _Asks.ALL
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    if func.is_view and has(func.name(), composite):
        return _Asks.FORMS_EACH_TIME  # `reshape`, for one, may return its argument itself.
    return _Asks.FORMS


def _spanned(tensor: torch.Tensor) -> int:
    """Return the bytes of storage from a tensor's first element to its last, both included."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()
