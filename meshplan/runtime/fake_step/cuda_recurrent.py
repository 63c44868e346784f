"""Recurrent layers as cuDNN runs them: one operator that saves a buffer of cuDNN for backward.

Only cuDNN knows the size of the buffer. The memory of a step with such a layer therefore has no
exact estimate, only an upper bound, traced inside `trace.bounds.picking`.

Source: torch 2.13, aten/native/cudnn/RNN.cpp, `_cudnn_rnn` and `_cudnn_rnn_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from meshplan.errors import Problem
from meshplan.kernels import RECURRENT_GATES, recurrent_buffers
from meshplan.runtime.torch_private.ops import below_autograd
from meshplan.runtime.trace.bounds import buffer_elements


class _Stack(NamedTuple):
    """The properties of a recurrent layer that determine the sizes of its buffers.

    Attributes:
        kind: "lstm", "gru" or "rnn".
        layers: Number of stacked layers.
        directions: 2 if the layer is bidirectional, else 1.
        has_dropout: True if there is dropout between the stacked layers.
        num_states: Number of state tensors: 2 for an LSTM (hidden and cell state), else 1.
    """

    kind: str
    layers: int
    directions: int
    has_dropout: bool
    num_states: int


def _problem(kind: str) -> Problem:
    return Problem(
        f"{kind} is a recurrent layer: cuDNN keeps a buffer for its backward whose size only cuDNN "
        "knows",
        fix="state mesh, strategy, activation_checkpointing and batch.micro, which the planner "
        "cannot choose here, and run `meshplan estimate`, which gives an upper bound; or replace "
        "the layer",
    )


class _CudnnRnn(torch.autograd.Function):
    """A recurrent layer that saves input, output, states, weights, their flat copy and a buffer."""

    @staticmethod
    def forward(ctx: Any, stack: _Stack, x: Any, *tensors: Any) -> Any:
        states, weights = tensors[: stack.num_states], tensors[stack.num_states :]
        with below_autograd():
            inside = x.contiguous()
            out = x.new_empty((*x.shape[:-1], stack.directions * states[0].shape[-1]))
            last = tuple(state.new_empty(state.shape) for state in states)
            kept, workspace = _buffers(stack, x, weights)
            buffer = x.new_empty((kept,))
            # cuDNN needs all weights in one contiguous tensor, and copies them if they are not, as
            # under FSDP. Whether they are is unknown here, so the copy counts as a bounded buffer.
            flat = x.new_empty((buffer_elements(_numel(weights), _problem(stack.kind)),))
            del inside, workspace
        ctx.stack = stack
        ctx.save_for_backward(x, *states, *weights, out, buffer, flat)
        return (out, *last)

    @staticmethod
    def backward(ctx: Any, gradient: Any, *of_states: Any) -> Any:
        x, *saved = ctx.saved_tensors
        num = ctx.stack.num_states
        states, weights = saved[:num], saved[num:-3]
        with below_autograd():
            _, workspace = _buffers(ctx.stack, x, weights, keeps=False)
            of_x = x.new_empty(x.shape)
            of_inputs = [state.new_empty(state.shape) for state in states]
            flat = x.new_empty((_numel(weights),))
            parts = flat.split([weight.numel() for weight in weights])
            of_weights = [
                part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)
            ]
            del workspace
        found = (of_x, *of_inputs, *of_weights)
        wanted = ctx.needs_input_grad[1:]
        return (
            None,
            *(each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)),
        )


def _numel(tensors: Sequence[Any]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _buffers(
    stack: _Stack, x: Any, weights: Sequence[Any], *, keeps: bool = True
) -> tuple[int, Any]:
    """Return (elements of the buffer saved for backward, the workspace as a tensor).

    Args:
        stack: The layer.
        x: Its input.
        weights: Its weights.
        keeps: If False, as in backward, no buffer is saved, and the number is 0.
    """
    hidden = weights[0].shape[0] // RECURRENT_GATES[stack.kind]
    kept, inside = recurrent_buffers(
        stack.kind, x.shape[:-1].numel(), hidden, stack.layers, stack.directions,
        has_dropout=stack.has_dropout,
    )  # fmt: skip
    problem = _problem(stack.kind)
    workspace = x.new_empty((buffer_elements(inside, problem),))
    return buffer_elements(kept, problem) if keeps else 0, workspace


def _layer(
    kind: str, x: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool = False,
) -> Any:  # fmt: skip
    states = tuple(hx) if kind == "lstm" else (hx,)
    stack = _Stack(
        kind, num_layers, 1 + bidirectional, has_dropout=train and dropout > 0,
        num_states=len(states),
    )  # fmt: skip
    given = x.transpose(0, 1) if batch_first else x
    out, *last = _CudnnRnn.apply(stack, given, *states, *params)
    return (out.transpose(0, 1) if batch_first else out, *last)


def _packed(kind: str, data: Any, batch_sizes: Any, *args: Any) -> Any:
    return _layer(kind, data, *args)


def _cell(kind: str, x: Any, hx: Any, *weights: Any) -> Any:
    states = tuple(hx) if kind == "lstm" else (hx,)
    given = [weight for weight in weights if weight is not None]
    stack = _Stack(kind, 1, 1, has_dropout=False, num_states=len(states))
    _, *last = _CudnnRnn.apply(stack, x, *states, *given)
    return tuple(last) if kind == "lstm" else last[0]


RECURRENT: Mapping[str, Callable[..., Any]] = {
    **{
        f"{op}.{form}": partial(function, kind)
        for op, kind in (
            ("lstm", "lstm"), ("gru", "gru"), ("rnn_tanh", "rnn"), ("rnn_relu", "rnn")
        )
        for form, function in (("input", _layer), ("data", _packed))
    },
    **{f"{kind}_cell": partial(_cell, kind) for kind in ("lstm", "gru")},
}  # fmt: skip
"""A function for each aten operator to replace, by the operator's name and overload."""
