"""Operators that save other tensors for backward on CUDA than on the CPU.

Some operators of torch run as one kernel on CUDA, but as several smaller operators on the CPU, and
each of these saves tensors. Fake CPU tensors would save what the CPU saves, so these operators are
replaced while a step on CUDA is emulated. They are replaced in torch's dispatcher, because all
calls pass it, including those from C++, from a recomputation in backward and from DTensor. A
function patched in Python would miss those.

All other operators with a derivative in torch 2.13 (autograd/derivatives.yaml) save the same
tensors on both devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from meshplan.runtime.fake_step.cuda_recurrent import RECURRENT
from meshplan.runtime.torch_private.ops import below_autograd

_ops: Final[Any] = torch.ops.aten
_HALVES: Final = (torch.float16, torch.bfloat16)
_MOST_FLASH: Final = 256
"""The largest head dim that flash attention has a kernel for."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The attention kernels that torch uses on a generation of GPUs.

    Args:
        has_flash: If True, there is flash attention, and memory-efficient attention takes bfloat16.
        prefers_cudnn: If True, torch uses cuDNN's attention where it can.
    """

    has_flash: bool = True
    prefers_cudnn: bool = False


def kernels_of(device: str) -> Kernels:
    """Return the attention kernels of a device.

    Args:
        device: A name of `layout.hardware`, such as "a100-80g", or "cuda" for a GPU with flash
            attention and without cuDNN's preference.

    Source: torch 2.13, sdp_utils.cpp: flash from compute capability 8.0 on; cuDNN first on 9.0 and
    10.0, from cuDNN 9.15.1 on.
    """
    words = set(device.lower().split("-"))
    old = {"v100"}
    new = {"h100", "h200", "gh200", "h800", "h20", "b200", "gb200", "b300", "gb300"}
    return Kernels(has_flash=not words & old, prefers_cudnn=bool(words & new))


def replaced(kernels: Kernels) -> Mapping[str, Callable[..., Any]]:
    """Return a function for each aten operator to replace, by the operator's name and overload."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _attention(kernels, *args, **kwargs)

    return MappingProxyType(
        {
            "dropout": _dropout,
            "layer_norm": _layer_norm,
            "_fused_rms_norm": _rms_norm,
            "scaled_dot_product_attention": attention,
            "softmax.int": partial(_softmax, _ops._softmax),
            "log_softmax.int": partial(_softmax, _ops._log_softmax),
            **RECURRENT,
        }
    )


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Run dropout as one kernel that saves a bool mask.

    Source: torch's Dropout.cpp, `is_fused_kernel_acceptable`.
    """
    if not train or p == 0 or not x.numel():
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype)
    out: torch.Tensor = _ops.native_dropout(x, p, train)[0]
    return out


class _RmsNorm(torch.autograd.Function):
    """RMSNorm as one kernel that saves its input and the reciprocal root mean square.

    Source: torch's derivatives.yaml, `_fused_rms_norm`.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        with below_autograd():
            y, inverse = _ops._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, inverse, weight)
        ctx.shape = shape
        ctx.mark_non_differentiable(inverse)
        return y, inverse

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        x, inverse, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        of_x, of_weight = _ops._fused_rms_norm_backward(
            gradient, x, ctx.shape, inverse, weight, wanted
        )
        return of_x, None, of_weight, None


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _RmsNorm.apply(x, shape, weight, eps)


class _LayerNorm(torch.autograd.Function):
    """LayerNorm that saves its statistics in float32; on the CPU they have the input's dtype.

    Source: torch's cuda/layer_norm_kernel.cu, `layer_norm_cuda`.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        with below_autograd():
            y, *statistics = _ops.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, *[each.float() for each in statistics], weight, bias)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, mean, root, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad
        wanted = [needed[0], weight is not None and needed[2], bias is not None and needed[3]]
        of_x, of_weight, of_bias = _ops.native_layer_norm_backward(
            gradient, x, ctx.shape, mean, root, weight, bias, wanted
        )
        return of_x, None, of_weight, of_bias, None


def _layer_norm(
    x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    return _LayerNorm.apply(x, shape, weight, bias, eps)


def _softmax(
    op: Callable[..., torch.Tensor], x: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Run softmax or its logarithm with its cast; from float16 to float32 both are one kernel.

    Source: torch's SoftMax.cpp, `softmax`.
    """
    is_fused = x.dtype == torch.float16 and dtype == torch.float32
    y = x if is_fused or dtype is None else x.to(dtype)
    return op(y, dim, is_fused)


def _attention(
    kernels: Kernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run attention by the kernel that torch would choose on CUDA, with the same saved tensors.

    Source: torch 2.13, attention.cpp, `scaled_dot_product_attention`.
    """
    tensors = (query, key, value)
    kind = attention_kind(kernels, *tensors, attn_mask, is_causal, enable_gqa)
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
            mask.logical_not(), -torch.inf
        )
    keeps = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*tensors, mask)
    )
    out: torch.Tensor
    if kind == "flash":
        size = query.shape[-1]
        padded = [torch.nn.functional.pad(t, (0, -size % 8)) if size % 8 else t for t in tensors]
        scale = size**-0.5 if scale is None else scale
        out = _ops._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :size] if size % 8 else out
    if kind == "cudnn":
        out = _ops._scaled_dot_product_cudnn_attention(
            *tensors, mask, keeps, dropout_p, is_causal, False, scale=scale
        )[0]
        return out
    if kind == "efficient":
        bias = None if mask is None else _aligned(mask, query, key)
        out = _ops._scaled_dot_product_efficient_attention(
            *tensors, bias, keeps, dropout_p, is_causal, scale=scale
        )[0]
        return out
    out = _ops._scaled_dot_product_attention_math(
        *tensors, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _aligned(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask expanded to (batch, heads, queries, keys), on rows padded to 16 elements.

    Source: torch's attention.cpp, `preprocess_mask`.
    """
    columns = mask.shape[-1]
    if columns % 16 and columns > 1:
        mask = torch.nn.functional.pad(mask, (0, -columns % 16))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def attention_kind(
    kernels: Kernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> str:
    """Return the kernel by which torch runs attention: "flash", "cudnn", "efficient" or "math".

    The arguments are those of `scaled_dot_product_attention`, in shapes (batch, heads, length, head
    dim).

    Source: torch 2.13, transformers/cuda/sdp_utils.cpp, `select_sdp_backend`.
    """
    order: tuple[str, ...] = ("flash", "efficient", "math")
    if kernels.prefers_cudnn:
        order = ("cudnn", *order)
    head, heads = query.shape[-1], query.shape[1] if query.ndim == 4 else 0
    is_plain = (
        query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and 0 not in (*query.shape, *key.shape)
        and all(t.stride(-1) == 1 for t in (query, key, value))
    )
    if not is_plain:
        return "math"
    are_heads_equal = heads == key.shape[1] == value.shape[1]
    are_grouped = enable_gqa and key.shape[1] == value.shape[1] and heads % key.shape[1] == 0
    are_sizes_equal = head == key.shape[-1] == value.shape[-1]
    is_half = query.dtype in _HALVES
    has_half = is_half if kernels.has_flash else query.dtype == torch.float16
    step = (8 if is_half else 4) if kernels.has_flash or is_half else 1
    able = {
        "flash": kernels.has_flash
        and is_half
        and mask is None
        and are_sizes_equal
        and head <= _MOST_FLASH
        and (are_heads_equal or are_grouped)
        and not (is_causal and query.shape[2] != key.shape[2]),
        "cudnn": has_half
        # cuDNN's backward has no gradient for a bias, and raises if one is required.
        and not (mask is not None and mask.requires_grad and torch.is_grad_enabled())
        and max(head, value.shape[-1]) <= (_MOST_FLASH // 2)
        and head % 8 == value.shape[-1] % 8 == 0
        and key.shape[2] > 1
        and (are_heads_equal or are_grouped),
        "efficient": (has_half or query.dtype == torch.float32)
        and head == key.shape[-1]
        and head % step == value.shape[-1] % step == 0
        and are_heads_equal,
        "math": True,
    }
    return next(kind for kind in order if able[kind])
