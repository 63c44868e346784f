"""Backward in two halves: first the gradients of received tensors, later those of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.torch_private.private import backward_of_inputs, backward_of_weights


@dataclass(slots=True)
class PendingWeightGrads:
    """Work that the first half of a backward leaves to the second.

    Attributes:
        groups: The parameter groups that torch's `stage_backward_input` returned for weights on a
            path from an output to a received tensor.
        roots: (output, its gradient) for outputs that depend on no received tensor. Their whole
            backward remains to be run.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    roots: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)


def first_half(
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor] | None,
    leaves: list[torch.Tensor],
    weights: Iterable[nn.Parameter],
) -> PendingWeightGrads:
    """Compute the gradients of `leaves` only.

    Args:
        outputs: Tensors that backward starts from.
        gradients: Gradients of the outputs; None for a loss.
        leaves: Tensors received from the previous stage.
        weights: Parameters of the stage.

    Returns:
        The work that remains for `second_half`.

    Raises:
        ApplyError: torch cannot split this backward.
    """
    out = PendingWeightGrads()
    ids = {id(leaf) for leaf in leaves}
    joined: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    pairs = zip(outputs, gradients or [None] * len(outputs), strict=True)
    for output, gradient in pairs:
        # torch splits the backward where weights join a path from an input to an output. It
        # would lose the gradients of an output that depends on weights but on none of the inputs.
        comes_from_input = any(id(variable) in ids for variable in leaves_of(output))
        (joined if comes_from_input else out.roots).append((output, gradient))
    if joined:
        tensors = [tensor for tensor, _ in joined]
        given = None if gradients is None else [g for _, g in joined if g is not None]
        with _refusing():
            out.groups = backward_of_inputs(tensors, given, leaves, weights)
    return out


def second_half(halves: PendingWeightGrads, weights: Iterable[nn.Parameter]) -> None:
    """Compute the gradients of the weights.

    Args:
        halves: The work that `first_half` left.
        weights: Parameters of the stage.
    """
    if halves.roots:
        tensors, gradients = zip(*halves.roots, strict=True)
        torch.autograd.backward(tensors, gradients, retain_graph=bool(halves.groups))
    if halves.groups:
        with _refusing():
            backward_of_weights(weights, halves.groups)


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn a RuntimeError of torch's split backward into an ApplyError.

    torch cannot split, for example, a backward in which a weight is used twice in one chain.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ApplyError(
            Problem(
                "the backward of a stage cannot be split into input gradients and weight "
                f"gradients: {error}",
                fix="use a schedule that does not split the backward: 1F1B or Interleaved1F1B",
            )
        ) from error


def check_weights(
    outputs: list[torch.Tensor], leaves: list[torch.Tensor], weights: Iterable[nn.Parameter]
) -> None:
    """Check that each leaf of the autograd graph is a weight of the stage or a received tensor.

    Args:
        outputs: Tensors that backward starts from.
        leaves: Tensors received from the previous stage.
        weights: Parameters of the stage.

    Raises:
        ApplyError: There is another leaf, whose gradient `second_half` would not compute.
    """
    known = {id(tensor) for tensor in (*leaves, *weights)}
    if any(id(variable) not in known for output in outputs for variable in leaves_of(output)):
        raise ApplyError(
            Problem(
                "the forward of a stage uses a weight that is not among the stage's parameters "
                "when backward begins, and a split backward would lose the gradient of that weight",
                fix="use a schedule that does not split the backward: 1F1B or Interleaved1F1B",
            )
        )


def leaves_of(output: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield each leaf of the autograd graph of a tensor once."""
    if output.grad_fn is None:
        if output.requires_grad:
            yield output
        return
    waiting, seen = [output.grad_fn], {output.grad_fn}
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
