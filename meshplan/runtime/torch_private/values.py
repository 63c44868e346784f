"""Private names of torch for the tensors in nested inputs and outputs of modules.

Most are functions by which FSDP2's hooks find and cast these tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import _common_utils
from torch.utils._pytree import tree_flatten, tree_unflatten


def tensors_with_gradient(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors that require grad in a module's inputs or outputs, as FSDP2 finds them.

    FSDP2 attaches its backward hooks to these tensors. Private, because FSDP2 alone decides which
    containers it searches: registered pytrees in torch 2.11; dicts, lists, tuples and dataclasses
    in later versions.
    """
    collect = getattr(_common_utils, "collect_grad_tensors", None)
    if collect is not None:
        return tuple(collect(value))
    return tuple(leaf for leaf in tree_flatten(value)[0] if _has_gradient(leaf))


def with_tensors_replaced(value: Any, others: Iterable[torch.Tensor]) -> Any:
    """Return `value` with `others`, in order, in place of `tensors_with_gradient(value)`."""
    replace, rest = getattr(_common_utils, "replace_grad_tensors", None), iter(others)
    if replace is not None:
        return replace(value, rest)
    leaves, spec = tree_flatten(value)
    return tree_unflatten([next(rest) if _has_gradient(leaf) else leaf for leaf in leaves], spec)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def with_floats_as(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors cast by FSDP2's own, private, function."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(partial(_cast_fp_tensor, dtype), value)


def versions_kept(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Return a context in which writes to these tensors leave their version counters unchanged.

    The caller must restore the values before autograd uses the tensors. Private, because torch
    cannot check that the values are restored.
    """
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))
