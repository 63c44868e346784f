"""Inputs of a model under cp: this rank's part of the sequence, and the positions of its tokens."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.context.parts import Parts
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.digest import digest
from meshplan.runtime.base.fake_mode import numbers
from meshplan.runtime.base.pytree import tensors_in

_IGNORED: Final = -100
"""Target that torch's cross-entropy ignores by default."""


def sequence_length(value: Any, stated: int | None) -> int:
    """Return the length of the sequence in a batch.

    It is the size of dim 1 of the integer tensors with two dims (tokens, masks) or, if there are
    none, of the tensors with three dims (embeddings).

    Args:
        value: A tensor, or a tuple, list or mapping of tensors.
        stated: The sequence length that the plan states; None if it states none. It decides if the
            tensors have several lengths.

    Raises:
        ApplyError: No tensor shows the length, or tensors differ and `stated` is none of their
            lengths.
    """
    tensors = [t for _, t in tensors_in(value)]
    tokens = [t for t in tensors if t.ndim == 2 and not t.is_floating_point()]
    found = {t.shape[1] for t in tokens or tensors if tokens or t.ndim == 3}
    if len(found) == 1:
        return found.pop()
    if stated in found:
        assert stated is not None
        return stated
    what = (
        f"its tensors have the lengths {', '.join(map(str, sorted(found)))}"
        if found
        else "no tensor has the shape (samples, tokens) or (samples, tokens, width)"
    )
    raise ApplyError(
        Problem(
            f"cp shards the sequence, but the sequence length of this batch is unclear: {what}",
            fix="state batch: {seq_len: N} in the plan"
            if found
            else "pass inputs and targets "
            "together, local_batch(model, (inputs, targets)), or leave cp out",
        )
    )


def has_sequence(tensor: torch.Tensor, length: int) -> bool:
    """Return True if dim 1 of a tensor is the sequence.

    Raises:
        ApplyError: A later dim has the length of the sequence.
    """
    others = [d for d, size in enumerate(tensor.shape) if size == length and d > 1]
    if others:
        raise ApplyError(
            Problem(
                f"a tensor of shape {list(tensor.shape)} has the sequence length along dim "
                f"{others[0]}, but cp shards dim 1 only",
                fix="pass no mask of shape (queries, keys); if the sizes are equal by chance, pad "
                "the sequence to another length",
            )
        )
    return tensor.ndim > 1 and tensor.shape[1] == length


def sequence_of_rank(plan: Plan, batch: Any) -> tuple[Any, int | None]:
    """Return this rank's part of the sequence, and a number that identifies the batch before.

    Ranks along cp get different parts, and compare that number. Without cp the batch stays whole,
    and the number is None.
    """
    if plan.assignment.context is None:
        return batch, None
    here, there = digest(batch, is_whole=False)
    return local_sequence(plan, batch), here + (0 if there is None else int(there))


def local_sequence(plan: Plan, batch: Any) -> Any:
    """Return this rank's part of the sequence of a global batch.

    Args:
        plan: The plan of the model.
        batch: A tensor, or a tuple, list or mapping of tensors. Every tensor whose dim 1 has the
            length of the sequence (`sequence_length`) is cut; others are returned whole.

    Raises:
        ApplyError: The length of the sequence is ambiguous, or does not divide into the chunks of
            cp.
    """
    context, size = plan.assignment.context, plan.mesh.size("cp")
    assert context is not None
    rank = plan.mesh.index(dist.get_rank(), ("cp",))
    length, chunks = sequence_length(batch, plan.spec.batch.seq_len), context.num_chunks(size)
    if length % chunks:
        raise ApplyError(
            Problem(
                f"a sequence of length {length} does not divide into the {chunks} chunks of cp",
                fix=f"pad the sequence to a multiple of {chunks}",
            )
        )

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if not has_sequence(tensor, length):
            return tensor
        pieces = tensor.chunk(chunks, 1)
        of_rank = [[pieces[i] for i in context.chunks(size, at)] for at in range(size)]
        if not tensor.is_floating_point() and plan.spec.loss == "mean":
            _warn_if_uneven(of_rank)
        return torch.cat(of_rank[rank], 1)

    return mapped(batch, part)


def _warn_if_uneven(of_rank: list[list[torch.Tensor]]) -> None:
    """Warn if ranks have different numbers of ignored targets.

    The mean over ranks of their mean losses then differs from the mean loss over all targets.

    Args:
        of_rank: For each rank of cp, its pieces of a tensor of targets.
    """
    counts = {sum(int((piece == _IGNORED).sum()) for piece in pieces) for pieces in of_rank}
    if len(counts) > 1:
        warnings.warn(
            f"the ranks of cp have different numbers of targets equal to {_IGNORED}: if the loss "
            "is the mean over the other targets, the mean over ranks differs from that of one "
            "process; set loss: tokens in the plan, or let loss_fn return (sum, count)",
            stacklevel=2,
        )


class Feed:
    """Passes a model the positions of its tokens, if its forward accepts them.

    Args:
        model: The model as the user wrote it, whose forward's signature is read.
        parts: The parts of the sequence.
    """

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._parts = parts

    def hides_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Return True if an `attention_mask` masks out any token; None without a mask."""
        mask = self._given(args, kwargs).get("attention_mask")
        return None if mask is None else not bool(numbers(mask.all(), True))

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that are not None, by name."""
        named = dict(zip(self._names, args, strict=False)) | kwargs
        return {name: value for name, value in named.items() if value is not None}

    def with_positions(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
    ) -> dict[str, Any]:
        """Return the keyword arguments with the positions of this rank's tokens added.

        Positions that the caller passes are left unchanged.

        Balanced parts consist of two chunks, so their positions have a gap. Transformers interprets
        a gap as the border of packed samples, unless a mask is given. An attention mask of ones is
        therefore added.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            length: Tokens in this rank's part.
        """
        given = self._given(args, kwargs)
        if "position_ids" not in self._names:
            return kwargs
        tokens = next(
            t for _, t in tensors_in((args, kwargs)) if t.ndim > 1 and t.shape[1] == length
        )
        positions = self._parts.positions(length, tokens.device)[None]
        out = dict(kwargs)
        has_gap = self._parts.num_local_chunks > 1
        if "position_ids" not in given:
            out["position_ids"] = positions
        elif has_gap and not self._is_one_sample(given["position_ids"], positions):
            return kwargs
        if has_gap and "attention_mask" in self._names and "attention_mask" not in given:
            out["attention_mask"] = torch.ones_like(positions).expand(tokens.shape[0], -1)
        return out

    def _is_one_sample(self, given: Any, positions: torch.Tensor) -> bool:
        """Return True if, on all ranks, every row of the given positions is that of one sample.

        Args:
            given: Positions that the caller passed.
            positions: Positions of this rank's tokens in one sample that starts at 0.
        """
        # A single sample may start at any position, so its positions differ from `positions` by a
        # constant, the same one on all ranks.
        shift = given - positions if isinstance(given, torch.Tensor) else None
        if shift is None or shift.shape[-1:] != positions.shape[-1:]:
            return False
        rows = shift.flatten(0, -2).long()
        ends = torch.cat((rows.amax(-1), -rows.amin(-1)))
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._parts.group)
        high, low = ends.chunk(2)
        return bool(numbers((high == -low).all(), True))
