"""Intercept calls of a model that runs on a part of the sequence, to answer them for the whole.

A torch function mode is active while the model runs, also when checkpointed blocks are recomputed
in backward. It intercepts three calls. `scaled_dot_product_attention` over the sequence attends to
the whole sequence. `torch.arange(n)` and `table[:n]`, from which models make positions, return the
positions or rows of this rank's tokens. A call is about the sequence if its length was that of the
whole sequence when the proof ran the model on the whole, and that of the part when the proof ran it
on a part. Calls in these runs are identified by their place in the model's code. A matching length
alone is not enough.
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
"""A call in the model's code: id of the code object, offset in its bytecode, and maybe a dim."""

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_OPTIONS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

MASKED: Final = Problem(
    "attention over a shard of the sequence was given a mask, which covers this shard alone: a "
    "padding mask, a sliding window, packed samples (position_ids that restart) or a position bias",
    fix="under cp, pass no attention_mask (pad at the end and ignore those targets), and use a "
    "model with plain causal or full attention",
)
"""The problem of attention with a mask: the mask of the whole sequence cannot be derived from the
masks that the model makes for parts.
"""


class AttentionTrial:
    """One run of the proof, which observes every intercepted call; implemented in `proof`.

    Attributes:
        is_whole: True if the model runs on the whole sequence, so that calls are not changed.
        length: Length of the whole sequence.
    """

    is_whole: bool
    length: int

    def seen(self, site: Site, *lengths: int) -> bool:
        """Record a call that asks for these numbers of items; return True if about the sequence."""
        raise NotImplementedError

    def attended(self, form: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Record the inputs and the output of an attention over the sequence.

        Args:
            form: Options of the call: "causal", "masked" and "scale".
            tensors: "queries", "keys", "values" and the output "attention".
        """
        raise NotImplementedError

    def refuse(self, problem: Problem) -> None:
        """Record that a call cannot be answered for the whole sequence."""
        raise NotImplementedError


class SequenceMode(TorchFunctionMode):
    """Torch function mode that answers calls on a part of the sequence for the whole of it.

    Attributes:
        parts: The parts of the sequence.
        lengths: Lengths of a part for which the proof has passed.
        known: True for a call that is about the sequence, else False; by its site and lengths.
        shapes: Heads and widths of keys and values in the run on the whole sequence, by code
            object and bytecode offset of the call.
        trial: The current run of the proof; None in ordinary runs.
        is_fed: True while the forward of the whole model runs. Its hooks pass positions to it and,
            at its end, report `refused` to all ranks.
        refused: The first problem of an ordinary run; None if there is none. The run continues, so
            that no rank waits for another, and the problem is raised on all ranks afterwards.
        is_on: True while the mode is active.
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
        """Return True if a call asks for as many items as the sequence has tokens.

        A call that may do so, but did not occur when the model was tested under cp, is refused.

        Args:
            frame: The frame that makes the call.
            lengths: The number of items that the call asks for; for attention, the numbers of
                queries and of keys.
            dim: The dim of the tensor that the call indexes.
        """
        site = (id(frame.f_code), frame.f_lasti, dim)
        if self.trial is not None:
            self._kept[site[0]] = frame.f_code  # Keeps the id from being reused.
            return self.trial.seen(site, *lengths)
        found = self.known.get((*site, *lengths))
        is_attention = len(lengths) > 1
        if found is None and (is_attention or lengths[-1] in self.lengths):
            self.refuse(
                Problem(
                    f"line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)} "
                    f"{'attends to' if is_attention else 'asks for'} {lengths[-1]} items, but did "
                    "not when meshplan tested the model under cp: it is unknown whether that is "
                    "the sequence length",
                    fix="call the model that parallelize returned, not one of its modules; if you "
                    "already do, pad to another length or leave cp out",
                )
            )
            return is_attention  # Other ranks may wait in this attention's collective.
        return bool(found)

    def refuse(self, problem: Problem) -> None:
        """Report a problem to the proof, or keep it for the end of the forward.

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
    """Return a forward wrapped to run under the mode; nested forwards activate it only once."""

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
    """Activate the mode in every forward of the model's own code, in place.

    The outermost forward would not suffice, since a checkpointed block is recomputed by itself.
    """
    for module in model.modules():
        if module is model or not type(module).__module__.startswith("torch.nn"):
            module.forward = run_with(mode, module.forward)


def _arange(mode: SequenceMode, frame: FrameType, args: Any, kwargs: Any) -> torch.Tensor:
    """Answer `torch.arange(n)` over the sequence with the positions of this rank's tokens."""
    out: torch.Tensor = torch.arange(*args, **kwargs)
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    bounds = {"start": 0, "step": 1} | dict(zip(names, args, strict=False)) | kwargs
    ends = [bounds["start"], bounds.get("end"), bounds["step"]]
    if not all(isinstance(end, int) for end in ends) or ends[0] != 0 or ends[2] != 1:
        return out
    if frame.f_code.co_filename.startswith(_TORCH):
        return out  # torch's own code makes the call.
    if not mode.is_about_sequence(frame, out.numel()):
        return out
    return mode.parts.positions(out.numel(), out.device).to(out.dtype)


def _getitem(mode: SequenceMode, frame: FrameType, args: Any, kwargs: Any) -> Any:
    """Answer `table[:n]` over the sequence with the rows of this rank's tokens."""
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
    """Return n for a slice `[:n]`; None for any other slice."""
    is_plain = entry.start in (None, 0) and entry.step in (None, 1)
    return entry.stop if is_plain and isinstance(entry.stop, int) and entry.stop > 0 else None


def _dims(entries: tuple[Any, ...], ndim: int) -> dict[int, int]:
    """Return the tensor dim of each slice in an index, by the slice's position in the index.

    Empty if the index contains anything but integers, slices, None and Ellipsis.

    Args:
        entries: The index, as a tuple.
        ndim: Number of dims of the indexed tensor.
    """
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
    """Answer attention over the sequence: this rank's queries attend to all tokens."""
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
    """Return (heads, width) of keys and of values, which must be equal on all ranks of cp."""
    return tuple(torch.Size((*t.shape[1:-2], t.shape[-1])) for t in (k, v))


def _as_proved(
    mode: SequenceMode, site: Site, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the shapes that the other ranks exchange.

    A model that makes a mask from its positions may make one on some ranks only, and then repeat
    its key heads on these ranks. Such a rank refuses its call, but still takes part in the
    exchange, with zeros in place of its keys and values.
    """
    proved = mode.shapes.get(site, set())
    is_masked = options.get("attn_mask") is not None
    if not proved or _shapes(k, v) in proved or not (is_masked or mode.trial):
        return k, v
    if is_masked:  # Without a mask this is the trial run, which reports the difference itself.
        mode.refuse(MASKED)
    # The proved shape may have fewer key heads than this rank has query heads.
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
                f"all_to_all distributes whole heads over cp: {parts.size}, which does not divide "
                f"the {heads[0]} heads and {heads[1]} key-value heads on each rank",
                parts.context.reason.origin,
                "set context: {attention: all_gather}",
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
        f"{q.shape[-2]} queries attend to the {k.shape[-2]} tokens of a shard of the sequence, but "
        "cp supports self-attention only",
        fix="leave cp out",
    )


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Parts, options: dict[str, Any]
) -> torch.Tensor:
    """Let each chunk of queries attend to the keys up to its own end.

    Shape: q (..., heads, part, dim), k and v (..., heads, whole, dim) -> (..., heads, part, dim).
    """
    out = []
    numbers = parts.context.chunks(parts.size, parts.rank)
    for number, chunk in zip(numbers, q.chunk(len(numbers), -2), strict=True):
        length = chunk.shape[-2]
        start, stop = number * length, (number + 1) * length
        rows = torch.arange(start, stop, device=q.device)
        keys, values = k[..., :stop, :], v[..., :stop, :]
        # The first chunk attends to itself only, for which kernels need no mask.
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
"""Maps an intercepted function to the function that answers it."""
