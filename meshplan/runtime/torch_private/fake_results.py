"""What operators make of fakes, by what they are given: private torch names, as in `private`.

torch remembers the same, and spends more on the question than most operators of fakes take. Here
is asked for less: what a result is made of follows from the shapes, strides and dtypes of what an
operator of torch's own is given, and from nothing else, or it is not remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import torch

from meshplan.runtime.base.pytree import given_to
from meshplan.runtime.torch_private.fake_dispatch import Legs

_ops: Final[Any] = torch.ops.aten
_TELLING: Final = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout,
     torch.memory_format}
)  # fmt: skip
"""Arguments that are what they look like."""
_NUMBERS_TELL: Final = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)
_LIFTS: Final = frozenset({_ops.lift_fresh.default, _ops.lift_fresh_copy.default})
_DETACH: Final = _ops.detach.default
_SHARES: Final = _ops._unsafe_view.default
"""Its result lies where what it is given does, though torch calls it no view."""
_MOST: Final = 1 << 16
_CPU: Final = torch.device("cpu")


class _Made(NamedTuple):
    """A result.

    Attributes:
        of: Which argument it is a view of; None where it has memory of its own.
    """

    of: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _Recipe(NamedTuple):
    """All results; `form` puts several together."""

    form: type | None
    made: tuple[_Made | None, ...]


_KNOWN: Final[dict[tuple[Any, ...], _Recipe | None]] = {}
"""None: to be run each time. Of no model and no mode, so that it lasts."""


class _Asks(Enum):
    """What an operator must know of what it is given."""

    FORMS = auto()
    """Shapes, strides and dtypes: they say all."""
    FORMS_EACH_TIME = auto()
    """The same, but what it makes is not remembered."""
    ALL = auto()


_ASKS: Final[dict[Any, _Asks]] = {}


class Results:
    """Runs operators of the fakes of one mode.

    Args:
        mode: Of `private_fakes.fake_mode`; it is open.
    """

    def __init__(self, mode: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._mode, self._fake = mode, FakeTensor
        self._legs = Legs(mode, self.of, self._faked)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        is_unsafe = mode._allow_unsafe_data_ptr_access
        private: Any = torch._C
        self._guard: Callable[[Any], None] = (
            private._set_warn_deprecated_on_mutable_data_ptr
            if is_unsafe
            else private._set_throw_on_mutable_data_ptr
        )

    def of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator makes."""
        if func is _DETACH and type(args[0]) is self._fake and self._is_plain(args[0]):
            return self._beside(args[0])  # Autograd asks for these more than for all others.
        asks = _ASKS.get(func)
        if asks is None:
            asks = _ASKS[func] = _asked_of(func)
        key = self._key(func, args, kwargs) if asks is not _Asks.ALL else None
        if key is None:
            return func(*args, **kwargs)
        if asks is _Asks.FORMS_EACH_TIME:
            return self._legs.run(func, args, kwargs)
        try:
            recipe = _KNOWN[key]
        except KeyError:
            return self._first(key, func, args, kwargs)
        if recipe is None:
            return self._legs.run(func, args, kwargs)
        return self._again(recipe, args)

    def _first(self, key: tuple[Any, ...], func: Any, args: Any, kwargs: Any) -> Any:
        """Run it, and see what it made."""
        out = self._legs.run(func, args, kwargs)
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = self._recipe(func, args, kwargs, out)
        return out

    # What it is given

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        told: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        fakes = self._tell(args, told)
        if fakes is None:
            return None
        for name, value in kwargs.items():
            told.append(name)
            more = self._tell((value,), told)
            if more is None:
                return None
            fakes += more
        return tuple(told) if fakes else None  # Made of nothing, it may be another mode's.

    def _tell(self, values: Any, told: list[Any]) -> int | None:
        """Add what counts of some arguments; how many are fakes, None where something else does."""
        told.append(len(values))
        fakes = 0
        for value in values:
            kind = type(value)
            if kind is self._fake:
                if not self._is_plain(value):
                    return None
                fakes += 1
                told += (value.shape, value.stride(), value.storage_offset(), value.dtype,
                         value.fake_device, value.requires_grad)  # fmt: skip
            elif kind in _TELLING:
                told += (kind, value)
            elif kind is list or kind is tuple or kind is torch.Size:
                more = self._tell(value, told)
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

    # What it makes

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
        given.add(own._cdata)  # Another result in the same place is none that is known here.
        found = _Made(of, shape, stride, offset, result.dtype, result.fake_device)
        keys: Any = torch._C._dispatch_key_set
        return found if keys(self._fill(found, args)) == keys(result) else None

    def _again(self, recipe: _Recipe, args: Any) -> Any:
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

    def _beside(self, fake: Any) -> Any:
        """Another fake in the same place."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=fake.dtype, device="meta")
            storage = fake.untyped_storage()
            meta.set_(storage, fake.storage_offset(), fake.shape, fake.stride())
        return self._faked(meta, fake.fake_device)

    def _faked(self, meta: torch.Tensor, device: torch.device) -> Any:
        """`FakeTensor(mode, meta, device)`, whose attributes are those of all that it makes.

        They are asked for once: it looks at each of its arguments for longer than it takes to make
        one. What else there is to it is as there.
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
    """Whether shapes, strides and dtypes say all; what writes is run each time."""
    if func.namespace not in ("aten", "prims") or func._schema.is_mutable or func in _LIFTS:
        return _Asks.ALL
    if not _NUMBERS_TELL.isdisjoint(func.tags):
        return _Asks.ALL
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    if func.is_view and has(func.name(), composite):
        return _Asks.FORMS_EACH_TIME  # Its result may be what it is given.
    return _Asks.FORMS


def _spanned(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()
