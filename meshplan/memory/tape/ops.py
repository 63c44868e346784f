"""Append the operations of transformers to a tape as ops.

The values that each op saves for backward and the bytes of its workspace follow torch's formulas.
Sizes are those of this rank's shard. `memory.decoder.blocks` puts the operations in order.

Source: torch 2.13, tools/autograd/derivatives.yaml and native_functions.yaml; for attention
aten/native/transformers/cuda/attention.cu and flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Final

from meshplan import kernels
from meshplan.memory.tape.tape import Grad, RecomputeSpan, Tape, TapeOp

_FP32: Final = 4
_ID: Final = 8
KERNELS: Final = frozenset({"sdpa"})
"""Words of `save:` that a `TapeBuilder` assumes by default: attention, but no matrix products."""


@dataclass(slots=True)
class TapeBuilder:
    """Appends ops to a tape. Methods take and return numbers of values.

    Attributes:
        tape: Tape that is written to.
        element_bytes: Bytes of one element in the compute dtype.
        parameter_bytes: Bytes of one element of the parameters and their gradients, as the module
            sees them.
        is_cuda: If True, CUDA kernels run; otherwise CPU kernels.
        module: Fqn of the module that runs the ops.
        saves: Words of `save:`; the ops that these words stand for get `TapeOp.is_kept`.
        tokens: Tokens of a microbatch on this rank.
        samples: Sequences that these tokens belong to.
        in_place: If True, in-place writes of torch's backward formulas are done in place; otherwise
            they make new tensors, as under a dispatch mode.
        is_recomputed: If True, backward recomputes the ops before it uses the values that they
            save.
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
    is_recomputed: bool = False

    def at(self, module: str) -> TapeBuilder:
        """Return a builder for the same tape that writes ops of another module."""
        # `dataclasses.replace` takes three times as long, and there are thousands of modules.
        return TapeBuilder(
            self.tape, self.element_bytes, self.parameter_bytes, self.is_cuda, module=module,
            saves=self.saves, tokens=self.tokens, samples=self.samples,
            is_recomputed=self.is_recomputed,
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
        workspace_bytes: int = 0,
        workspace_backward_bytes: int = 0,
        is_sent: bool = False,
        is_kept: bool = False,
        flops: float = 0.0,
        weight_bytes: int = 0,
    ) -> int:
        """Append an op with one output of `nbytes` bytes, and return the output.

        `keeps_out` adds the output to the saved values. For the other arguments see `TapeOp`.
        """
        out = self.tape.value(nbytes)
        kept = (*keeps, out) if keeps_out else keeps
        self.tape.add(
            TapeOp(
                op,
                self.module,
                reads,
                (out,),
                kept,
                grads,
                parameters,
                workspace_bytes,
                workspace_backward_bytes,
                is_sent,
                is_kept,
                flops,
                weight_bytes,
            )
        )
        return out

    def write(
        self,
        op: str,
        *values: int,
        workspace_bytes: int = 0,
        flops: float = 0.0,
        weight_bytes: int = 0,
    ) -> None:
        """Append an op without outputs, which writes into existing values."""
        self.tape.add(TapeOp(op, self.module, values, workspace_bytes=workspace_bytes, flops=flops,
                          weight_bytes=weight_bytes))  # fmt: skip

    def touch(self, *values: int) -> None:
        """Extend the lifetimes of these values to the last op so far; see `Tape.touch`."""
        for value in values:
            self.tape.touch(value)

    def size(self, value: int) -> int:
        return self.tape.nbytes[value]

    def apart(self, nbytes: int) -> int:
        """Return the bytes of the copy made when a backward writes gradients into new zeros.

        These are 0 if writes are in place (`in_place`), else `nbytes`.
        """
        return 0 if self.in_place else nbytes

    # Element by element

    def add(self, a: int, b: int) -> int:
        """Add two tensors. The gradient of both inputs is the output's gradient, not a copy."""
        return self.row("add", (a, b), self.size(a), grads=(Grad(a, 0), Grad(b, 0)))

    def shift(self, x: int, op: str = "add") -> int:
        """Append an op that saves nothing and passes on its gradient, such as adding a number."""
        return self.row(op, (x,), self.size(x), grads=(Grad(x, 0),))

    def scale(self, x: int, op: str = "mul") -> int:
        """Multiply by a number. Nothing is saved; the gradient is a new tensor."""
        return self.row(op, (x,), self.size(x), grads=(Grad(x, self.size(x)),))

    def times(self, x: int, known: int) -> int:
        """Multiply by a tensor `known` that needs no gradient; only `known` is saved."""
        return self.row(
            "mul", (x, known), self.size(x), keeps=(known,), grads=(Grad(x, self.size(x)),)
        )

    def mul(self, a: int, b: int) -> int:
        """Multiply two tensors, which are both saved.

        If they differ in size, the smaller one is broadcast, and backward sums its gradient.
        """
        size = max(self.size(a), self.size(b))
        is_spread = self.size(a) != self.size(b)
        return self.row(
            "mul", (a, b), size, keeps=(a, b), workspace_backward_bytes=size if is_spread else 0,
            grads=(Grad(a, self.size(a)), Grad(b, self.size(b))),
        )  # fmt: skip

    def unary(
        self, op: str, x: int, *, keeps_out: bool = False, workspace_backward_bytes: int = 0
    ) -> int:
        """Apply a function that saves its input or, with `keeps_out`, its output."""
        size = self.size(x)
        return self.row(
            op, (x,), size, keeps=() if keeps_out else (x,), keeps_out=keeps_out,
            grads=(Grad(x, size),), workspace_backward_bytes=workspace_backward_bytes,
        )  # fmt: skip

    def softmax(self, x: int, nbytes: int, op: str = "_softmax") -> int:
        """Append a softmax of `nbytes` bytes, whose output is saved for backward."""
        return self.row(
            op, (x,), nbytes, keeps_out=True, grads=(Grad(x, nbytes),),
            workspace_backward_bytes=sum(kernels.softmax_backward(nbytes)) if self.is_cuda else 0,
        )  # fmt: skip

    def cast(self, x: int, ratio: float) -> int:
        """Cast to a dtype `ratio` times as wide, and return the result: `x` itself for ratio 1."""
        if ratio == 1:
            return x
        return self.row("_to_copy", (x,), int(self.size(x) * ratio), grads=(Grad(x, self.size(x)),))

    def dropout(self, x: int, p: float) -> int:
        """Apply dropout, which saves a mask: a byte per element, or the input's dtype on CPUs."""
        if not p:
            return x
        elements = self.size(x) // self.element_bytes
        mask = self.tape.value(elements if self.is_cuda else self.size(x))
        out = self.tape.value(self.size(x))
        self.tape.add(
            TapeOp("dropout", self.module, (x,), (mask, out), (mask,), (Grad(x, self.size(x)),))
        )
        return out

    # Views and concatenation

    def chunk(self, x: int, *sizes: int) -> tuple[int, ...]:
        """Split a tensor into views of these bytes; backward concatenates their gradients."""
        pieces = tuple(self.tape.value(size, of=x) for size in sizes)
        self.tape.add(TapeOp("split", self.module, (x,), pieces, grads=(Grad(x, self.size(x)),)))
        return pieces

    def slice(self, x: int, nbytes: int) -> int:
        """Take a slice of a tensor, whose gradient has the size of `x`, with zeros elsewhere."""
        part = self.tape.value(nbytes, of=x)
        self.tape.add(TapeOp("slice", self.module, (x,), (part,), grads=(Grad(x, self.size(x)),)))
        return part

    def cat(self, *parts: int) -> int:
        """Concatenate tensors. Their gradients are views of the output's gradient."""
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
        workspace_bytes: int = 0,
        is_addend: bool = False,
    ) -> int:
        """Apply a linear layer, which saves its input, and return its output.

        Args:
            x: Input of the layer.
            into, out: Input and output features of this rank's shard.
            name: Name of the layer inside the current module.
            bias: If True, the layer has a bias.
            is_kept: If True, selective recomputation saves the output whatever `saves` lists.
            weight: Fqn of the weight, if it belongs to another module.
            parts: For the fqn of a parameter, the value that the layer uses in its place.
            workspace_bytes: Bytes of workspace while the layer runs forward.
            is_addend: If True, the output is a partial sum, which ranks add up; selective
                recomputation then saves the sum instead.
        """
        at = self.at(f"{self.module}.{name}" if self.module else name)
        tokens = self.size(x) // (into * self.element_bytes)
        parameters = [(weight or f"{at.module}.weight", into * out * self.parameter_bytes)]
        if bias:
            parameters.append((f"{at.module}.bias", out * self.parameter_bytes))
        own = tuple(parts.values())
        return at.row(
            "mm",
            (x, *own),
            tokens * out * self.element_bytes,
            # mm saves a weight that is no parameter, for the gradient of x. A bias is never saved.
            keeps=(x, *(value for fqn, value in parts.items() if fqn == parameters[0][0])),
            grads=(*(Grad(each, self.size(each)) for each in own), Grad(x, self.size(x))),
            parameters=tuple(each for each in parameters if each[0] not in parts),
            workspace_bytes=workspace_bytes,
            is_kept=is_kept or ("mm" in self.saves and not is_addend),
        )

    def embedding(
        self, ids: int, vocab: int, width: int, name: str, *, workspace_bytes: int = 0
    ) -> int:
        """Look up token ids in an embedding, whose weight has a dense gradient.

        Args:
            ids: Token ids.
            vocab, width: Rows and columns of the weight on this rank.
            name: Name of the embedding inside the current module.
            workspace_bytes: Bytes of workspace while the lookup runs.
        """
        at = self.at(f"{self.module}.{name}" if self.module else name)
        tokens = self.size(ids) // _ID
        workspace = kernels.embedding_backward(tokens, vocab, width) if self.is_cuda else ()
        return at.row(
            "embedding",
            (ids,),
            tokens * width * self.element_bytes,
            keeps=(ids,),
            workspace_bytes=workspace_bytes,
            workspace_backward_bytes=sum(workspace),
            parameters=((f"{at.module}.weight", vocab * width * self.parameter_bytes),),
        )

    def layer_norm(self, x: int, width: int, name: str) -> int:
        """Apply LayerNorm, which saves its input, and a mean and a deviation for every row."""
        row = 2 * (_FP32 if self.is_cuda else self.element_bytes)
        return self._norm("native_layer_norm", x, width, name, row, ("weight", "bias"))

    def rms_norm(self, x: int, width: int, name: str) -> int:
        """Apply the fused RMSNorm kernel, which saves its input and one number for every row."""
        return self._norm("_fused_rms_norm", x, width, name, _FP32, ("weight",))

    def _norm(
        self, op: str, x: int, width: int, name: str, row_bytes: int, leaves: tuple[str, ...]
    ) -> int:
        """Apply a norm that saves its input, and so many bytes of statistics for every row."""
        at = self.at(f"{self.module}.{name}" if self.module else name)
        rows = self.size(x) // (width * self.element_bytes)
        statistics, out = self.tape.value(rows * row_bytes), self.tape.value(self.size(x))
        size = width * self.parameter_bytes
        self.tape.add(
            TapeOp(op, at.module, (x,), (out, statistics), (x, statistics),
                (Grad(x, self.size(x)),), tuple((f"{at.module}.{leaf}", size) for leaf in leaves))
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
        workspace_backward_bytes: int = 0,
        nbytes: int = 0,
        bias: int | None = None,
        figures: int | None = None,
    ) -> int:
        """Run one attention kernel, which saves inputs, output and a logsumexp for every row.

        Args:
            q, k, v: Queries, keys and values.
            heads: Number of heads of queries that share a head of keys; no size depends on it.
            head_dim: Features of one head of queries.
            workspace_backward_bytes: Bytes of workspace of the backward.
            nbytes: Bytes of the output; 0 for the size of the queries.
            bias: Value that is added to the scores; None for none.
            figures: Number of logsumexp entries that are saved; None for one per row of each head.
        """
        out = self.tape.value(nbytes or self.size(q))
        rows = self.size(q) // (head_dim * self.element_bytes)
        logsumexp = self.tape.value((figures or rows) * _FP32)
        grads = tuple(Grad(each, self.size(each)) for each in (q, k, v))
        reads = (q, k, v) if bias is None else (q, k, v, bias)
        self.tape.add(
            TapeOp(
                "attention",
                self.module,
                reads,
                (out, logsumexp),
                (*reads, out, logsumexp),
                grads,
                workspace_backward_bytes=workspace_backward_bytes,
                is_kept="sdpa" in self.saves,
            )
        )
        return out

    # Collectives

    def gather(self, x: int, ranks: int) -> int:
        """All-gather a tensor sharded over `ranks`; the gradient is reduce-scattered."""
        if ranks == 1:
            return x
        return self.row(
            "all_gather", (x,), self.size(x) * ranks, is_sent=True, grads=(Grad(x, self.size(x)),)
        )

    def reduce_scatter(self, x: int, ranks: int) -> int:
        """Return this rank's shard of the sum of `x` over `ranks`; the gradient is all-gathered."""
        if ranks == 1:
            return x
        return self.row(
            "reduce_scatter", (x,), self.size(x) // ranks, is_sent=True, is_kept=True,
            grads=(Grad(x, self.size(x)),),
        )  # fmt: skip

    def all_reduce(self, x: int, ranks: int) -> int:
        """Return the sum of `x` over `ranks`. The gradient of `x` is the sum's gradient itself."""
        if ranks == 1:
            return x
        return self.row(
            "all_reduce", (x,), self.size(x), is_sent=True, is_kept="mm" in self.saves,
            grads=(Grad(x, 0),),
        )  # fmt: skip

    def enter(self, x: int, ranks: int) -> int:
        """Enter a tensor-parallel region: the gradient of `x` is all-reduced."""
        if ranks == 1:
            return x
        alias = self.tape.value(self.size(x), of=x)
        self.tape.add(TapeOp("all_reduce_back", self.module, (x,), (alias,),
                          grads=(Grad(x, self.size(x)),), is_sent=True))  # fmt: skip
        return alias

    def exchange(self, x: int) -> int:
        """Exchange shards of a tensor with other ranks (all-to-all), and return the result.

        The shards to send are stacked before. The received shards are in a separate tensor until
        they are rearranged.
        """
        size = self.size(x)
        return self.row(
            "exchange",
            (x,),
            size,
            workspace_bytes=size,
            workspace_backward_bytes=size,
            grads=(Grad(x, size),),
        )

    # Loss

    def cross_entropy(
        self, logits: int, ids: int, element_bytes: int, *, holds: bool = False, casts: bool = True
    ) -> int:
        """Compute the mean cross-entropy over tokens and return the loss.

        Args:
            logits: Logits of all tokens.
            ids: Token ids to predict.
            element_bytes: Bytes of one element of the logits.
            holds: If True, the training loop references the cast logits until backward is done.
            casts: If True, logits are cast to float32 first.
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
        """Let backward recompute the ops from number `start` to the last one so far.

        Args:
            start: Number of the first op of the span.
            keeps_chosen: If True, the outputs of ops with `is_kept` are saved rather than
                recomputed.
            given: Values that the span is called with in addition to those that its ops read.
            on_host: If True, `enters`, from which recomputation starts, is kept in host memory.
            enters: First value that the span is called with; -1 for none.
        """
        end = len(self.tape.rows)
        self.tape.spans.append(
            RecomputeSpan(start, end, True, keeps_chosen, given, on_host, enters)
        )

    def offloaded(self, start: int) -> None:
        """Keep the values saved by the ops from number `start` to the last one in host memory."""
        self.tape.spans.append(RecomputeSpan(start, len(self.tape.rows), on_host=True))
