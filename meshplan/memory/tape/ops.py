"""The operations that transformers are made of, as rows of a tape.

What each one keeps for backward and takes in passing is what torch's formulas say; sizes are those
of the part that one rank computes with. Which operations follow each other is
`memory.decoder.blocks`'.

Source: torch 2.13, tools/autograd/derivatives.yaml and native_functions.yaml; for attention
aten/native/transformers/cuda/attention.cu and flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Final

from meshplan.memory.tape.tape import Grad, RecomputeSpan, Tape, TapeOp

_FP32: Final = 4
_ID: Final = 8
_ROWS_PER_THREAD: Final = 10
_FEW_ROWS: Final = 3072
"""Rows of a table's gradient that a thread sums, and tokens up to which nothing is sorted."""
KERNELS: Final = frozenset({"sdpa"})
"""What recomputation of chosen operations keeps, where nothing is said of products."""


@dataclass(slots=True)
class TapeBuilder:
    """Writes rows to a tape.

    Attributes:
        element_bytes: Of the dtype that is computed in.
        parameter_bytes: Of the dtype that parameters, and their gradients, are seen in.
        is_cuda: Whether kernels of CUDA run, rather than those of CPUs.
        module: The fqn of the module that runs.
        saves: Words of `save:`; the rows that they stand for are `TapeOp.is_kept`.
        tokens: That this rank computes at once.
        samples: Sequences that they are of.
        runs_again: Whether backward runs these rows once more before it needs what they keep.
        in_place: Whether what torch writes in place is written so; see `tape.play`.
    """

    tape: Tape
    element_bytes: int
    parameter_bytes: int
    is_cuda: bool
    _: KW_ONLY
    module: str = ""
    saves: frozenset[str] = KERNELS
    tokens: int = 0
    samples: int = 1
    in_place: bool = True
    runs_again: bool = False

    def at(self, module: str) -> TapeBuilder:
        """The same tape, in another module."""
        # `dataclasses.replace` takes three times as long, and there are thousands of modules.
        return TapeBuilder(
            self.tape, self.element_bytes, self.parameter_bytes, self.is_cuda, module=module,
            saves=self.saves, tokens=self.tokens, samples=self.samples, runs_again=self.runs_again,
            in_place=self.in_place,
        )  # fmt: skip

    def row(
        self,
        op: str,
        reads: tuple[int, ...],
        nbytes: int,
        *,
        keeps: tuple[int, ...] = (),
        keeps_out: bool = False,
        grads: tuple[Grad, ...] = (),
        parameters: tuple[tuple[str, int], ...] = (),
        takes: int = 0,
        takes_back: int = 0,
        is_sent: bool = False,
        is_kept: bool = False,
        flops: float = 0.0,
        weight_bytes: int = 0,
    ) -> int:
        """One operation with one output of `nbytes`."""
        out = self.tape.value(nbytes)
        kept = (*keeps, out) if keeps_out else keeps
        self.tape.add(
            TapeOp(op, self.module, reads, (out,), kept, grads, parameters, takes, takes_back,
                is_sent, is_kept, flops, weight_bytes)
        )  # fmt: skip
        return out

    def write(
        self, op: str, *values: int, takes: int = 0, flops: float = 0.0, weight_bytes: int = 0
    ) -> None:
        """An operation that writes into what is there."""
        self.tape.add(TapeOp(op, self.module, values, takes=takes, flops=flops,
                          weight_bytes=weight_bytes))  # fmt: skip

    def touch(self, *values: int) -> None:
        """Frames hold these until here."""
        for value in values:
            self.tape.touch(value)

    def size(self, value: int) -> int:
        return self.tape.nbytes[value]

    def apart(self, nbytes: int) -> int:
        """Zeros that are written to: a tensor more where something watches torch."""
        return 0 if self.in_place else nbytes

    # Element by element

    def add(self, a: int, b: int) -> int:
        """Both inputs get the output's gradient as it is."""
        return self.row("add", (a, b), self.size(a), grads=(Grad(a, 0), Grad(b, 0)))

    def shift(self, x: int, op: str = "add") -> int:
        """Something that keeps nothing and hands the gradient on: adding a number or a mask."""
        return self.row(op, (x,), self.size(x), grads=(Grad(x, 0),))

    def scale(self, x: int, op: str = "mul") -> int:
        """By a number: nothing is kept, the gradient is new."""
        return self.row(op, (x,), self.size(x), grads=(Grad(x, self.size(x)),))

    def times(self, x: int, known: int) -> int:
        """By a tensor that needs no gradient."""
        return self.row(
            "mul", (x, known), self.size(x), keeps=(known,), grads=(Grad(x, self.size(x)),)
        )

    def mul(self, a: int, b: int) -> int:
        """Both inputs are kept; where one is spread over the other, its gradient is summed."""
        size = max(self.size(a), self.size(b))
        is_spread = self.size(a) != self.size(b)
        return self.row(
            "mul", (a, b), size, keeps=(a, b), takes_back=size if is_spread else 0,
            grads=(Grad(a, self.size(a)), Grad(b, self.size(b))),
        )  # fmt: skip

    def unary(self, op: str, x: int, *, keeps_out: bool = False, takes_back: int = 0) -> int:
        """A function that keeps its input, or its output instead."""
        size = self.size(x)
        return self.row(
            op, (x,), size, keeps=() if keeps_out else (x,), keeps_out=keeps_out,
            grads=(Grad(x, size),), takes_back=takes_back,
        )  # fmt: skip

    def cast(self, x: int, ratio: float) -> int:
        """Another dtype, `ratio` times as wide; the same tensor where it is the same dtype."""
        if ratio == 1:
            return x
        return self.row("_to_copy", (x,), int(self.size(x) * ratio), grads=(Grad(x, self.size(x)),))

    def dropout(self, x: int, p: float) -> int:
        """CUDA keeps a mask of a byte an element, CPUs one of the input's dtype."""
        if not p:
            return x
        elements = self.size(x) // self.element_bytes
        mask = self.tape.value(elements if self.is_cuda else self.size(x))
        out = self.tape.value(self.size(x))
        self.tape.add(
            TapeOp("dropout", self.module, (x,), (mask, out), (mask,), (Grad(x, self.size(x)),))
        )
        return out

    # Views with gradients of their own

    def chunk(self, x: int, *sizes: int) -> tuple[int, ...]:
        """Pieces of one tensor; their gradients are put together in a new one."""
        pieces = tuple(self.tape.value(size, of=x) for size in sizes)
        self.tape.add(TapeOp("split", self.module, (x,), pieces, grads=(Grad(x, self.size(x)),)))
        return pieces

    def slice(self, x: int, nbytes: int) -> int:
        """A part of a tensor; its gradient is one of the whole, of zeros elsewhere."""
        part = self.tape.value(nbytes, of=x)
        self.tape.add(TapeOp("slice", self.module, (x,), (part,), grads=(Grad(x, self.size(x)),)))
        return part

    def cat(self, *parts: int) -> int:
        """The gradients of the parts are views of the whole's."""
        size = sum(self.size(part) for part in parts)
        return self.row("cat", parts, size, grads=tuple(Grad(part, 0) for part in parts))

    # Layers

    def linear(
        self,
        x: int,
        into: int,
        out: int,
        name: str,
        *,
        bias: bool = False,
        is_kept: bool = False,
        weight: str = "",
        parts: Mapping[str, int] = MappingProxyType({}),
        takes: int = 0,
        is_addend: bool = False,
    ) -> int:
        """Keeps its input; the weight is a parameter's.

        Args:
            into, out: Features of this rank's part.
            weight: The fqn of the weight, if it is another module's.
            parts: By fqn of a parameter, the value that is computed with in its place.
            takes: As in `TapeOp`.
            is_addend: Whether ranks add up what it makes: recomputation keeps the sum instead.
        """
        at = self.at(f"{self.module}.{name}" if self.module else name)
        tokens = self.size(x) // (into * self.element_bytes)
        parameters = [(weight or f"{at.module}.weight", into * out * self.parameter_bytes)]
        if bias:
            parameters.append((f"{at.module}.bias", out * self.parameter_bytes))
        own = tuple(parts.values())
        return at.row(
            "mm", (x, *own), tokens * out * self.element_bytes,
            # Of the parts that are no views, a bias is not kept.
            keeps=(x, *(value for fqn, value in parts.items() if fqn == parameters[0][0])),
            grads=(*(Grad(each, self.size(each)) for each in own), Grad(x, self.size(x))),
            parameters=tuple(each for each in parameters if each[0] not in parts),
            takes=takes, is_kept=is_kept or ("mm" in self.saves and not is_addend),
        )  # fmt: skip

    def embedding(self, ids: int, vocab: int, width: int, name: str, *, takes: int = 0) -> int:
        """The gradient of its table is dense."""
        at = self.at(f"{self.module}.{name}" if self.module else name)
        tokens = self.size(ids) // _ID
        return at.row(
            "embedding", (ids,), tokens * width * self.element_bytes, keeps=(ids,), takes=takes,
            takes_back=self._sorted(tokens, vocab, width) if self.is_cuda else 0,
            parameters=((f"{at.module}.weight", vocab * width * self.parameter_bytes),),
        )  # fmt: skip

    def _sorted(self, tokens: int, vocab: int, width: int) -> int:
        """What the gradient of a table takes: indices sorted, rows summed apart in fp32.

        Source: aten/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.
        """
        if tokens <= _FEW_ROWS:
            return 0
        segments = min(tokens, vocab)
        parts = tokens // _ROWS_PER_THREAD + segments
        return _ID * (2 * tokens + 3 * segments + parts) + _FP32 * parts * width

    def layer_norm(self, x: int, width: int, name: str) -> int:
        """Keeps its input, and mean and deviation of every row."""
        at = self.at(f"{self.module}.{name}" if self.module else name)
        tokens = self.size(x) // (width * self.element_bytes)
        statistics = self.tape.value(2 * tokens * (_FP32 if self.is_cuda else self.element_bytes))
        out = self.tape.value(self.size(x))
        size = width * self.parameter_bytes
        parameters = ((f"{at.module}.weight", size), (f"{at.module}.bias", size))
        self.tape.add(
            TapeOp("native_layer_norm", at.module, (x,), (out, statistics), (x, statistics),
                (Grad(x, self.size(x)),), parameters)
        )  # fmt: skip
        return out

    def rms_norm(self, x: int, width: int, name: str) -> int:
        """The fused kernel: keeps its input and one figure of every row."""
        at = self.at(f"{self.module}.{name}" if self.module else name)
        tokens = self.size(x) // (width * self.element_bytes)
        statistics, out = self.tape.value(tokens * _FP32), self.tape.value(self.size(x))
        parameters = ((f"{at.module}.weight", width * self.parameter_bytes),)
        self.tape.add(
            TapeOp("_fused_rms_norm", at.module, (x,), (out, statistics), (x, statistics),
                (Grad(x, self.size(x)),), parameters)
        )  # fmt: skip
        return out

    def attention(
        self,
        q: int,
        k: int,
        v: int,
        heads: int,
        head_dim: int,
        *,
        takes_back: int = 0,
        nbytes: int = 0,
        bias: int | None = None,
        figures: int | None = None,
    ) -> int:
        """One kernel: keeps what it reads, what it makes, and a figure for every row.

        Args:
            nbytes: Of what it makes, where that is no more of queries' size.
            bias: Added to the scores.
            figures: How many are kept, if not one for each row.
        """
        out = self.tape.value(nbytes or self.size(q))
        rows = self.size(q) // (head_dim * self.element_bytes)
        logsumexp = self.tape.value((figures or rows) * _FP32)
        grads = tuple(Grad(each, self.size(each)) for each in (q, k, v))
        reads = (q, k, v) if bias is None else (q, k, v, bias)
        self.tape.add(
            TapeOp("attention", self.module, reads, (out, logsumexp), (*reads, out, logsumexp),
                grads, takes_back=takes_back, is_kept="sdpa" in self.saves)
        )  # fmt: skip
        return out

    # Collectives

    def gather(self, x: int, ranks: int) -> int:
        """The whole of a tensor that ranks hold parts of; its gradient is reduced into parts."""
        if ranks == 1:
            return x
        return self.row(
            "all_gather", (x,), self.size(x) * ranks, is_sent=True, grads=(Grad(x, self.size(x)),)
        )

    def reduce_scatter(self, x: int, ranks: int) -> int:
        """This rank's part of a sum; its gradient is gathered."""
        if ranks == 1:
            return x
        return self.row(
            "reduce_scatter", (x,), self.size(x) // ranks, is_sent=True, is_kept=True,
            grads=(Grad(x, self.size(x)),),
        )  # fmt: skip

    def all_reduce(self, x: int, ranks: int) -> int:
        """A sum that every rank gets; its gradient is everyone's already."""
        if ranks == 1:
            return x
        return self.row(
            "all_reduce", (x,), self.size(x), is_sent=True, is_kept="mm" in self.saves,
            grads=(Grad(x, 0),),
        )  # fmt: skip

    def enter(self, x: int, ranks: int) -> int:
        """Where parts begin to be computed: the gradients of x are summed over ranks."""
        if ranks == 1:
            return x
        alias = self.tape.value(self.size(x), of=x)
        self.tape.add(TapeOp("all_reduce_back", self.module, (x,), (alias,),
                          grads=(Grad(x, self.size(x)),), is_sent=True))  # fmt: skip
        return alias

    def exchange(self, x: int) -> int:
        """Pieces of a tensor to other ranks, and as much of theirs, laid together anew.

        What is sent is stacked first, and what came is in a tensor of its own until it is laid.
        """
        size = self.size(x)
        return self.row("exchange", (x,), size, takes=size, takes_back=size, grads=(Grad(x, size),))

    # Loss

    def cross_entropy(
        self, logits: int, ids: int, element_bytes: int, *, holds: bool = False, casts: bool = True
    ) -> int:
        """The mean over tokens.

        Args:
            element_bytes: Of the logits' dtype.
            holds: Whether the training loop holds what is cast through backward.
            casts: Whether logits are cast to fp32 first.
        """
        wide = self.cast(logits, _FP32 / element_bytes) if casts else logits
        size = self.size(wide)
        probabilities = self.row(
            "_log_softmax", (wide,), size, keeps_out=True, grads=(Grad(wide, size),)
        )
        loss, weight = self.tape.value(_FP32), self.tape.value(_FP32)
        self.tape.add(
            TapeOp("nll_loss_forward", self.module, (probabilities, ids), (loss, weight),
                (probabilities, ids, weight), (Grad(probabilities, size),))
        )  # fmt: skip
        self.tape.touch(wide)
        if holds:
            self.tape.hold(wide, outlives=True)
        return loss

    def recomputed(
        self, start: int, *, keeps_chosen: bool = False, given: tuple[int, ...] = (),
        on_host: bool = False, enters: int = -1,
    ) -> None:  # fmt: skip
        """Run the rows from `start` on again in backward; the last two as in `RecomputeSpan`."""
        end = len(self.tape.rows)
        self.tape.spans.append(
            RecomputeSpan(start, end, True, keeps_chosen, given, on_host, enters)
        )

    def offloaded(self, start: int) -> None:
        """What the rows from `start` on keep waits on the host."""
        self.tape.spans.append(RecomputeSpan(start, len(self.tape.rows), on_host=True))
