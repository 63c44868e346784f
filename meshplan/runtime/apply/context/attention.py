"""What a model calls while it runs on a part of the sequence, answered for the whole.

A torch function mode is on while the model runs, also when checkpointed blocks run again in
backward. It answers three calls: `scaled_dot_product_attention` over the sequence attends to the
whole of it, and `torch.arange(n)` and `table[:n]`, which models make positions of, give those of
this rank's tokens. Which calls are meant is not guessed from a number: a call is told by the
place in the model's code that makes it, and counts if its length was that of the whole
sequence when the proof ran the model on the whole, and that of the part when it ran on a part.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import CodeType, FrameType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.apply.context.parts import Parts, gather_sequence, to_heads, to_parts

Site = tuple[int, ...]
"""A call in the model's code: its code object, the place in its bytecode, and the dim asked for."""

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_OPTIONS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

MASKED: Final = Problem(
    "attention over a part of the sequence was given a mask, which was made for the part alone: a "
    "padding mask, a sliding window, packed samples (position_ids that start anew) or a position "
    "bias",
    fix="under cp give no attention_mask (pad at the end and ignore those targets), and use models "
    "with plain causal or full attention",
)
"""Masks of parts do not add up to that of the whole."""


class AttentionTrial:
    """One run of the proof, which sees every call; `proof` says what it makes of them.

    Attributes:
        is_whole: Whether the model runs on the whole sequence, and calls are left alone.
        length: Of the whole sequence.
    """

    is_whole: bool
    length: int

    def seen(self, site: Site, *lengths: int) -> bool:
        """Note a call for so many items; whether it is about the sequence."""
        raise NotImplementedError

    def attended(self, form: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Note what an attention over the sequence got and gave."""
        raise NotImplementedError

    def refuse(self, problem: Problem) -> None:
        """Note what cannot be made right."""
        raise NotImplementedError


class SequenceMode(TorchFunctionMode):
    """Answers for the whole sequence.

    Attributes:
        parts: Which part this rank holds.
        lengths: Lengths of parts that the proof has passed.
        known: By site and lengths, whether the call is about the sequence.
        shapes: By site, the heads and widths that keys and values had on the whole sequence.
        trial: The run of the proof that is going on, None in ordinary runs.
        is_fed: Whether the whole model's forward is running, which feeds positions and tells all
            ranks at its end what was refused.
        refused: What an ordinary run could not make right. It goes on all the same, so that no
            rank waits for another, and is told to all after the forward.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.lengths: set[int] = set()
        self.known: dict[tuple[int, ...], bool] = {}
        self.shapes: dict[Site, set[tuple[torch.Size, ...]]] = {}
        self._kept: dict[int, CodeType] = {}
        self.trial: AttentionTrial | None = None
        self.is_fed = False
        self.refused: Problem | None = None
        self.is_on = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is None:
            return func(*args, **kwargs)
        return answer(self, sys._getframe(1), args, kwargs)

    def is_about_sequence(self, frame: FrameType, *lengths: int, dim: int = 0) -> bool:
        """Whether this call is about the sequence; one that the proof never saw is refused."""
        site = (id(frame.f_code), frame.f_lasti, dim)
        if self.trial is not None:
            self._kept[site[0]] = frame.f_code  # Or another could come to have its id.
            return self.trial.seen(site, *lengths)
        found = self.known.get((*site, *lengths))
        is_attention = len(lengths) > 1
        if found is None and (is_attention or lengths[-1] in self.lengths):
            self.refuse(
                Problem(
                    f"line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)} "
                    f"{'attends to' if is_attention else 'asks for'} {lengths[-1]} items, which it "
                    "did not when the model was tested: whether that is the sequence is not known",
                    fix="call the model that parallelize returned, not a part of it; where that "
                    "is so, leave cp out or pad to another length",
                )
            )
            return is_attention  # Other ranks may be about to exchange.
        return bool(found)

    def refuse(self, problem: Problem) -> None:
        """Tell the proof, or keep it for the end of the forward.

        Raises:
            ApplyError: The whole model's forward is not running.
        """
        if self.trial is not None:
            self.trial.refuse(problem)
        elif not self.is_fed:
            raise ApplyError(problem)
        elif self.refused is None:
            self.refused = problem


def run_with(mode: SequenceMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs under the mode, which is on once however forwards are nested."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if mode.is_on:
            return forward(*args, **kwargs)
        mode.is_on = True
        try:
            with mode:
                return forward(*args, **kwargs)
        finally:
            mode.is_on = False

    return run


def answer_for_whole(model: nn.Module, mode: SequenceMode) -> None:
    """Turn the mode on in every forward of the model's own code, in place.

    In every one, and not the outermost only: a checkpointed block is run again by itself.
    """
    for module in model.modules():
        if module is model or not type(module).__module__.startswith("torch.nn"):
            module.forward = run_with(mode, module.forward)


def _arange(mode: SequenceMode, frame: FrameType, args: Any, kwargs: Any) -> torch.Tensor:
    """`torch.arange(n)` over the sequence: the positions of this rank's tokens."""
    out: torch.Tensor = torch.arange(*args, **kwargs)
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    bounds = {"start": 0, "step": 1} | dict(zip(names, args, strict=False)) | kwargs
    ends = [bounds["start"], bounds.get("end"), bounds["step"]]
    if not all(isinstance(end, int) for end in ends) or ends[0] != 0 or ends[2] != 1:
        return out
    if frame.f_code.co_filename.startswith(_TORCH):
        return out  # torch's own code knows nothing of a sequence.
    if not mode.is_about_sequence(frame, out.numel()):
        return out
    return mode.parts.positions(out.numel(), out.device).to(out.dtype)


def _getitem(mode: SequenceMode, frame: FrameType, args: Any, kwargs: Any) -> Any:
    """`table[:n]` over the sequence: the rows of this rank's tokens."""
    table, index = args
    entries = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(entry, slice) for entry in entries) or (
        frame.f_code.co_filename.startswith(_TORCH)
    ):
        return torch.Tensor.__getitem__(table, index)
    new = list(entries)
    for at, dim in _dims(entries, table.ndim).items():
        stop = _from_start(entries[at])
        if stop is None or stop > table.shape[dim]:
            continue
        is_cut = mode.trial is not None or stop < table.shape[dim]
        if is_cut and mode.is_about_sequence(frame, stop, dim=dim):
            table = table.index_select(dim, mode.parts.positions(stop, table.device))
            new[at] = slice(None)
    return torch.Tensor.__getitem__(table, tuple(new) if isinstance(index, tuple) else new[0])


def _from_start(entry: slice) -> int | None:
    """How many items a slice from the start takes; None for any other."""
    is_plain = entry.start in (None, 0) and entry.step in (None, 1)
    return entry.stop if is_plain and isinstance(entry.stop, int) and entry.stop > 0 else None


def _dims(entries: tuple[Any, ...], ndim: int) -> dict[int, int]:
    """The tensor dim of each slice of an index; nothing where a tensor is in it."""
    if any(not (e is None or e is ... or isinstance(e, int | slice)) for e in entries):
        return {}
    out: dict[int, int] = {}
    dim, taken = 0, sum(e is not None and e is not ... for e in entries)
    for at, entry in enumerate(entries):
        if entry is ...:
            dim += ndim - taken
        elif entry is not None:
            if isinstance(entry, slice):
                out[at] = dim
            dim += 1
    return out


def _attention(mode: SequenceMode, frame: FrameType, args: Any, kwargs: Any) -> torch.Tensor:
    """Attention of this rank's tokens to all tokens."""
    given = dict(zip(_OPTIONS, args, strict=False)) | kwargs
    q, k, v = (given.pop(name) for name in _OPTIONS[:3])
    is_over = mode.is_about_sequence(frame, q.shape[-2], k.shape[-2])
    site = (id(frame.f_code), frame.f_lasti)
    if mode.trial is not None and mode.trial.is_whole:
        is_over = q.shape[-2] == k.shape[-2] == mode.trial.length
        mode.shapes.setdefault(site, set()).add(_shapes(k, v))
        out = F.scaled_dot_product_attention(q, k, v, **given)
    elif not is_over or q.shape[-2] != k.shape[-2]:
        if is_over:
            mode.refuse(_other_queries(q, k))
        return F.scaled_dot_product_attention(q, k, v, **given)
    else:
        out = _over_sequence(mode, q, *_as_proved(mode, site, k, v, given), dict(given))
    if is_over and mode.trial is not None:
        form = {
            "causal": bool(given.get("is_causal")),
            "masked": given.get("attn_mask") is not None,
            "scale": given.get("scale"),
        }
        mode.trial.attended(form, {"queries": q, "keys": k, "values": v, "attention": out})
    return out


def _shapes(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Size, ...]:
    """Heads and widths of keys and values: what ranks of cp must agree on to exchange them."""
    return tuple(torch.Size((*t.shape[1:-2], t.shape[-1])) for t in (k, v))


def _as_proved(
    mode: SequenceMode, site: Site, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in the shapes that the other ranks exchange.

    A model that makes a mask of its positions may do so on some ranks only, and then repeat its
    key heads there: what such a rank has is refused, and zeros are exchanged in its place.
    """
    proved = mode.shapes.get(site, set())
    is_masked = options.get("attn_mask") is not None
    if not proved or _shapes(k, v) in proved or not (is_masked or mode.trial):
        return k, v
    if is_masked:  # The proof sees every other difference by itself.
        mode.refuse(MASKED)
    options["enable_gqa"] = True
    first = min(proved)
    made = [
        t.new_zeros((t.shape[0], *shape[:-1], t.shape[-2], shape[-1]))
        for t, shape in zip((k, v), first, strict=True)
    ]
    return made[0], made[1]


def _over_sequence(
    mode: SequenceMode, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    parts = mode.parts
    is_causal = bool(options.pop("is_causal", False))
    if options.pop("attn_mask", None) is not None:
        mode.refuse(MASKED)
    kind = parts.context.attention
    heads = [tensor.shape[-3] if tensor.ndim > 3 else 1 for tensor in (q, k, v)]
    if kind == "all_to_all" and any(count % parts.size for count in heads):
        mode.refuse(
            Problem(
                f"attention has {heads[0]} heads and {heads[1]} key-value heads on each rank, "
                f"which do not divide by cp {parts.size}, and all_to_all gives each rank whole "
                "heads",
                parts.context.reason.origin,
                "say context: {attention: all_gather}",
            )
        )
        kind = "all_gather"
    if kind == "all_to_all":
        q, k, v = (to_heads(tensor, parts) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **options)
        return to_parts(out, parts)
    k, v = gather_sequence(k, parts), gather_sequence(v, parts)
    if not is_causal:
        return F.scaled_dot_product_attention(q, k, v, **options)
    return _causal(q, k, v, parts, options)


def _other_queries(q: torch.Tensor, k: torch.Tensor) -> Problem:
    return Problem(
        f"{q.shape[-2]} queries attend to the {k.shape[-2]} tokens of a part of the sequence, and "
        "cp exchanges self-attention only",
        fix="leave cp out",
    )


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Parts, options: dict[str, Any]
) -> torch.Tensor:
    """Each chunk of queries attends to the keys up to its own end, and to no others."""
    out = []
    numbers = parts.context.chunks(parts.size, parts.rank)
    for number, chunk in zip(numbers, q.chunk(len(numbers), -2), strict=True):
        length = chunk.shape[-2]
        start, stop = number * length, (number + 1) * length
        rows = torch.arange(start, stop, device=q.device)
        keys, values = k[..., :stop, :], v[..., :stop, :]
        # The first chunk attends to itself alone, which kernels know without a mask.
        mask = rows[:, None] >= torch.arange(stop, device=q.device) if start else None
        out.append(
            F.scaled_dot_product_attention(
                chunk, keys, values, attn_mask=mask, is_causal=mask is None, **options
            )
        )
    return torch.cat(out, -2)


_ANSWERS: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.arange: _arange,
    torch.Tensor.__getitem__: _getitem,
    F.scaled_dot_product_attention: _attention,
}
