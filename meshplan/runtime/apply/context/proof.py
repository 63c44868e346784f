"""Proof that a model computes the same on parts of the sequence as on the whole sequence.

Before the first forward with a new sequence length, one sample is run twice: on the whole sequence,
as one process would, and on parts, one on each rank of cp. The inputs and the output of every
attention, and every output of the model, must agree. A difference appears if tokens depend on each
other in any way except through the intercepted attention: positions that restart on each rank,
attention written out by hand, convolutions along the sequence, pooling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, MeshplanError, Problem
from meshplan.runtime.apply.context.attention import AttentionTrial, SequenceMode, Site
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.fake_mode import numbers
from meshplan.runtime.base.mesh import local_of, raise_first
from meshplan.runtime.checks.dry_run import dry_run, noise

_TOLERANCE: Final = (1e-3, 1e-1)
"""Largest accepted difference of a token, relative to the mean norm of a token, in (single, half)
precision. Another order of additions stays below it, and a wrong position exceeds it [Empirical].
"""
_FIRST_TOLERANCE: Final = 1e-2
"""Tolerance in half precision for the inputs of the first attention. No operation before it mixes
tokens, so only the last few bits can differ.
"""
_MEAN_TOLERANCE: Final = 1e-5
"""Relative tolerance for a mean over tokens, in single precision."""
_MOST: Final = 32
"""Number of compared tokens, roughly, that are spread evenly over the part."""
_EDGE: Final = 4
"""Number of compared tokens at each end of each chunk of the part."""


_CANNOT: Final = "this model cannot be run on shards of the sequence"

_UNSEEN: Final = Problem(
    f"{_CANNOT}: no call of scaled_dot_product_attention over the sequence was seen",
    fix="set its attention to sdpa (transformers: attn_implementation='sdpa'), or leave cp out",
)


class _Whole(AttentionTrial):
    """The run on the whole sequence: records calls, and attention at the sampled tokens."""

    is_whole = True

    def __init__(self, length: int, sampled: torch.Tensor) -> None:
        self.length, self.sampled = length, sampled
        self.calls: dict[Site, set[tuple[int, ...]]] = {}
        self.attentions: list[tuple[Mapping[str, Any], dict[str, torch.Tensor]]] = []

    def seen(self, site: Site, *lengths: int) -> bool:
        self.calls.setdefault(site, set()).add(lengths)
        return False

    def attended(self, form: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        kept = {name: tensor.index_select(-2, self.sampled) for name, tensor in tensors.items()}
        self.attentions.append((form, kept))


class _PartRun(AttentionTrial):
    """The run on parts: finds calls about the sequence, and compares attention with `whole`."""

    is_whole = False

    def __init__(self, whole: _Whole, part_length: int, sampled: torch.Tensor) -> None:
        self.whole, self.sampled = whole, sampled
        self.length, self.part_length = whole.length, part_length
        self.known: dict[tuple[int, ...], bool] = {}
        self.problems: list[Problem] = []
        self.count = 0

    def seen(self, site: Site, *lengths: int) -> bool:
        if lengths[-1] != self.part_length and len(lengths) == 1:
            return False
        before = self.whole.calls.get(site, set())
        # In the run on the whole sequence, a call that depends on the sequence's length had
        # that length in place of the part's. A call with these same lengths does not depend on it.
        scaled = tuple(self.length if n == self.part_length else n for n in lengths)
        found = lengths[-1] == self.part_length and scaled in before and lengths not in before
        self.known[(*site, *lengths)] = found
        return found

    def attended(self, form: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        number, self.count = self.count, self.count + 1
        if number >= len(self.whole.attentions):
            return
        form_before, before = self.whole.attentions[number]
        if form != form_before:
            self._report(
                f"attention {number + 1} is computed differently on the full sequence "
                f"({_spell(form_before)}) than on a shard ({_spell(form)})",
                "use a model with plain causal or full attention at this length: no sliding "
                "window, padding mask or position bias",
            )
            return
        for name, tensor in tensors.items():
            own = tensor.index_select(-2, self.sampled)
            share = _difference(before[name], own, -2)
            is_first = not number and name != "attention"
            if share > min(_tolerance(own), _FIRST_TOLERANCE if is_first else 1.0):
                shown = "outputs" if name == "attention" else name
                self._report(
                    f"the {shown} of attention {number + 1} differ by {share:.1%} from those on "
                    "the full sequence",
                    "compute positions from position_ids, torch.arange(n) or table[:n] in the "
                    "model's forward, let tokens interact only in scaled_dot_product_attention, "
                    "or leave cp out",
                )
                return

    def refuse(self, problem: Problem) -> None:
        if not self.problems:
            self.problems.append(problem)

    def _report(self, what: str, fix: str) -> None:
        """Report a difference; only the first is kept, since later ones follow from it."""
        self.refuse(Problem(f"{_CANNOT}: {what}", fix=fix))


def prove(
    model: nn.Module,
    mode: SequenceMode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    local_kwargs: dict[str, Any],
    length: int,
) -> None:
    """Run one sample on the whole sequence and on parts, and compare the two runs.

    On success, record `length` in `mode`.

    Args:
        model: The module that `parallelize` returned.
        mode: Receives the calls that are about the sequence.
        args: This rank's positional inputs, as the user passed them.
        kwargs: This rank's keyword inputs, as the user passed them.
        local_kwargs: `kwargs` with the positions of this rank's tokens (`Feed.with_positions`).
        length: Tokens in this rank's part.

    Raises:
        ApplyError: On every rank, if the two runs differ on any rank.
    """
    parts = mode.parts
    first = next(t for _, t in _named((args, kwargs)) if t.ndim > 1 and t.shape[1] == length)
    samples, where = first.shape[0], first.device

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:1] if tensor.ndim and tensor.shape[0] == samples else tensor

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        has_sequence = tensor.ndim > 1 and tensor.shape[1] == length
        return parts.gather(one(tensor), 1) if has_sequence else one(tensor)

    local = _sampled(length, parts.num_local_chunks, where)
    in_whole = _Whole(length * parts.size, parts.positions(length, where)[local])
    # Not in inference mode, where `_nothing_equal` could not write to sharded parameters.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _nothing_equal(model),
    ):
        whole_args, whole_kwargs = mapped((args, kwargs), whole)
        mode.trial = in_whole
        try:
            with dry_run(model):
                expected = model(*whole_args, **whole_kwargs)
            raise_first(None if in_whole.attentions else _UNSEEN)
            in_part = mode.trial = _PartRun(in_whole, length, local)
            with dry_run(model):
                found = _run_part(model, *mapped((args, local_kwargs), one))
        finally:
            mode.trial = None
        problems = [*in_part.problems, *_call_problems(in_whole, in_part)]
        problems += _output_problems(expected, found, in_whole, in_part, parts.group)
    raise_first(next(iter(problems), None))
    mode.known |= in_part.known
    mode.lengths.add(length)


def _run_part(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return model(*args, **kwargs)
    except MeshplanError:
        raise
    except Exception as error:  # User code may raise anything.
        problem = Problem(
            f"{_CANNOT}: on a shard it raises {error!r}, on the full sequence it does not",
            fix="see the traceback above; set context: {balance: false}, which gives every rank "
            "contiguous tokens, or leave cp out",
        )
        raise ApplyError(problem) from error


def _call_problems(whole: _Whole, part: _PartRun) -> Iterator[Problem]:
    if len(whole.attentions) != part.count:
        yield Problem(
            f"{_CANNOT}: it calls attention {part.count} times on a shard, but "
            f"{len(whole.attentions)} times on the full sequence",
            fix="leave cp out",
        )


def _output_problems(
    expected: Any, found: Any, whole: _Whole, part: _PartRun, group: dist.ProcessGroup
) -> Iterator[Problem]:
    """Yield a problem for each output that differs between the part and the whole sequence.

    An output must either have the sequence along one dim, or be a mean over tokens.
    """
    own = dict(_named(found))
    for name, before in _named(expected):
        after = own.get(name)
        if after is None or not before.is_floating_point():
            continue
        dim = _sequence_dim(before, after, whole.length, part.part_length)
        if dim is not None:
            at, there = part.sampled, whole.sampled
            share = _difference(before.index_select(dim, there), after.index_select(dim, at), dim)
            if share > _tolerance(after):
                yield Problem(
                    f"{_CANNOT}: its output differs by {share:.1%} from that on the full sequence",
                    fix="let tokens interact only in scaled_dot_product_attention, or leave cp out",
                )
        elif not _is_mean(before, after, group):
            yield Problem(
                f"the output {name} of shape {list(after.shape)} was computed from this rank's "
                "shard of the sequence, and differs from that of the full sequence",
                fix="compute the loss outside the model (loss_fn) from the outputs of all tokens, "
                "with targets shifted before local_batch, and pass no labels to the model",
            )


def _sequence_dim(
    before: torch.Tensor, after: torch.Tensor, length: int, part_length: int
) -> int | None:
    """Return the only dim in which two tensors' shapes differ, if it is the sequence; else None."""
    if before.ndim != after.ndim:
        return None
    dims = [d for d in range(before.ndim) if before.shape[d] != after.shape[d]]
    if len(dims) != 1 or (before.shape[dims[0]], after.shape[dims[0]]) != (length, part_length):
        return None
    return dims[0]


def _is_mean(before: torch.Tensor, after: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return True if an output is one number, and its mean over the parts is that of the whole.

    Return False in half precision, which is too coarse to decide.

    Args:
        before: The output on the whole sequence.
        after: The output on this rank's part.
        group: The ranks of cp.
    """
    mean = after.detach().float().clone()
    dist.all_reduce(mean, group=group)
    mean /= group.size()
    if before.shape != after.shape or before.numel() != 1 or torch.finfo(after.dtype).bits < 32:
        return False
    return bool(numbers((mean - before).abs() <= _MEAN_TOLERANCE * before.abs(), True))


def _difference(before: torch.Tensor, after: torch.Tensor, dim: int) -> float:
    """Return the largest distance between a token in `before` and in `after`.

    It is relative to the mean norm of the tokens in `before`; infinite for NaN or other shapes.

    Args:
        before: Values from the run on the whole sequence.
        after: Values of the same tokens from the run on the part.
        dim: The dim of tokens.
    """
    if before.shape != after.shape:
        return float("inf")
    pairs = torch.stack((before, after)).double().movedim(dim if dim < 0 else dim + 1, 0)
    pairs = pairs.flatten(2)
    norms = pairs[:, 0].norm(dim=-1).mean()
    apart = (pairs[:, 0] - pairs[:, 1]).norm(dim=-1).max()
    share = float(numbers(apart / norms.clamp(min=1e-30), 0.0))
    # NaN would pass every check, as it is not larger than any tolerance.
    return share if share == share else float("inf")


def _tolerance(tensor: torch.Tensor) -> float:
    single, half = _TOLERANCE
    is_half = torch.finfo(tensor.dtype).bits < 32 or torch.is_autocast_enabled(tensor.device.type)
    return half if is_half else single


def _spell(form: Mapping[str, Any]) -> str:
    words = ["causal" if form["causal"] else "not causal"]
    words += ["with a mask"] if form["masked"] else []
    return ", ".join([*words, f"scale {form['scale']}"])


def _sampled(length: int, num_chunks: int, device: torch.device) -> torch.Tensor:
    """Return the indices, within a part of this length, of the tokens that are compared."""
    size = length // num_chunks
    edges = [c * size + e for c in range(num_chunks) for i in range(min(_EDGE, size))
             for e in (i, size - 1 - i)]  # fmt: skip
    spread = range(0, length, max(1, length // _MOST))
    return torch.tensor(sorted({*edges, *spread}), device=device)


def _named(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested tuples, lists and mappings, with their path."""
    if isinstance(value, torch.Tensor):
        yield name, local_of(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _named(item, f"{name}[{number}]")


@contextmanager
def _nothing_equal(model: nn.Module) -> Iterator[None]:
    """Replace weights whose elements are all equal by noise in the context, equal on all replicas.

    A position embedding of zeros, for example, would hide wrong positions.
    """
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        local = local_of(parameter.detach())
        random = noise(name, local, parameter.shape[-1]) if parameter.ndim > 1 else None
        if random is not None:
            before.append((local, local.flatten()[0].clone()))
            local.copy_(random)
    try:
        yield
    finally:
        for local, value in before:
            local.fill_(value)
