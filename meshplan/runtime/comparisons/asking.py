"""Call the user's loss function in addition to the training's calls, without side effects.

Every call gets copies of the tensors, so that it may write into them. After the call, the state of
the function and the random generators are restored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.apply.loss.vocab_parallel_loss import take_loss
from meshplan.runtime.apply.parameters.randomness import undisturbed
from meshplan.runtime.base.pytree import fill, given_to, opaque_in, shape_of, tensors_in
from meshplan.runtime.comparisons.closures import kept
from meshplan.runtime.torch_private.private import group_sequences
from meshplan.runtime.watch.guard import fails_together, is_lost_connection

LossFn = Callable[[Any, Any], Any]
_WIDE_ENOUGH: Final = 32
"""Casts to a floating-point dtype of fewer bits go to float32 instead, if `ask` converts the
inputs."""


@dataclass(frozen=True, slots=True)
class LossCall:
    """The result of one call of a loss function.

    Attributes:
        returned: The return value.
        dtype: The coarsest dtype to which the function rounded its inputs; float64 if to none.
        is_random: True if the function drew random numbers.
    """

    returned: Any
    dtype: torch.dtype
    is_random: bool


def ask(loss_fn: LossFn, output: Any, targets: Any, dtype: torch.dtype | None = None) -> LossCall:
    """Call a loss function on copies of an output and targets.

    Args:
        loss_fn: The user's loss function.
        output: Output of the model.
        targets: Targets of the same samples.
        dtype: Dtype that all floating-point tensors are converted to; None leaves them as they are.

    Raises:
        Exception: Whatever the function raises.
    """
    drawn: list[bool] = []
    rounding = _Rounding(is_widened=dtype is not None)
    copies = _copied(output, dtype), _copied(targets, dtype)
    with kept(loss_fn), undisturbed(drawn), uncompiled(), rounding:
        given = take_loss(loss_fn, *copies)
    return LossCall(given, rounding.coarsest, drawn[0])


def refuse_alone(error: Exception) -> None:
    """Raise `error` unless every rank had an error in the same extra call of the user's code.

    All ranks may ignore an error that they had together. If only some ranks had one, the others may
    wait in a collective that these ranks did not reach, so the error must end the training. A rank
    with an error waits here for the others.
    """
    if is_lost_connection(error) or not fails_together(error, range(dist.get_world_size())):
        raise error


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code eagerly inside the `with` block: torch would compile it for other sizes."""
    is_compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        yield


class Watched:
    """Observes side effects of the training's own calls of a loss function.

    Attributes:
        sends: True if a call ran collectives, such as an all-reduce in the user's loss. No extra
            calls are possible then: ranks may make different numbers of them, and their collectives
            would be matched with other collectives of other ranks.
        writes: True if a call wrote into its arguments, so that the loss cannot be computed again
            from them.
    """

    def __init__(self) -> None:
        self.sends = self.writes = False

    @contextmanager
    def call(self, output: Any, targets: Any) -> Iterator[None]:
        """Observe the call of the loss function that the `with` block makes."""
        tensors = [tensor for _, tensor in tensors_in((output, targets))]
        # With sharded logits or a chunked loss, meshplan runs collectives inside the call.
        is_own = any(isinstance(tensor, LazyLogits | DTensor) for tensor in tensors)
        begun, versions = group_sequences(), _versions(tensors)
        yield
        self.sends |= not is_own and group_sequences() != begun
        self.writes |= _versions(tensors) != versions


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [t._version for t in tensors if not isinstance(t, LazyLogits) and not t.is_inference()]


def _copied(item: Any, dtype: torch.dtype | None) -> Any:
    """Return a nested value with copies of its tensors, except `LazyLogits`, which have no memory.

    A value that cannot be rebuilt from its tensors is returned uncopied.
    """

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, LazyLogits):
            return tensor
        is_cast = dtype is not None and tensor.is_floating_point()
        return tensor.detach().to(dtype if is_cast else tensor.dtype, copy=True)

    form = shape_of(item, copied)
    return item if any(opaque_in(form)) else fill(form)


class _Rounding(TorchDispatchMode):
    """A torch dispatch mode that records the coarsest dtype to which an operator rounds its inputs.

    Args:
        is_widened: If True, casts to half precision are replaced by casts to float32, because the
            tolerance for half precision would hide real differences.
    """

    def __init__(self, *, is_widened: bool) -> None:
        super().__init__()
        self._is_widened = is_widened
        self.coarsest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_widened:
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        given = max(map(_bits, given_to((args, kwargs))), default=0)
        for tensor in given_to(out):
            if 0 < _bits(tensor) < min(given, torch.finfo(self.coarsest).bits):
                self.coarsest = tensor.dtype
        return out


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float32 if is_half and torch.finfo(value).bits < _WIDE_ENOUGH else value


def _bits(tensor: torch.Tensor) -> int:
    return torch.finfo(tensor.dtype).bits if tensor.is_floating_point() else 0


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype with the largest rounding error; all must be floating-point."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
