"""Outlines: the forward of a model that has not been built, detailed enough to cut it into stages.

In an outline, a whole block is one operation that reads the block's inputs and parameters. What
happens inside a block, which derived styles need, is known only from a recorded forward
(`runtime.trace.ops`); `ModelGraph` therefore keeps both in separate fields.

Source: transformers 5.23, `models/<family>/modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshplan.model.flow import Call, Flow, Op, Ref, Value
from meshplan.model.graph import ModuleInfo, TensorInfo, around


@dataclass(slots=True)
class FlowBuilder:
    """An outline under construction: calls and operations are added in execution order.

    Args:
        tensors: All tensors of the model, by fqn.
    """

    tensors: Mapping[str, TensorInfo]
    _inside: dict[str, list[str]] = field(init=False)
    _values: list[Value] = field(default_factory=list)
    _ops: list[Op] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inside = {}
        for fqn, tensor in self.tensors.items():
            for module in {m for name in tensor.names for m in around(name.rpartition(".")[0])}:
                self._inside.setdefault(module, []).append(fqn)

    def enter(self, module: str, parent: int | None) -> int:
        """Begin the call of a module that calls others, and return the call's id; see `leave`."""
        return self._call(module, parent, (), ())

    def leave(self, call: int, value: int) -> None:
        """End the call with this id; it returns the value with id `value`."""
        begun = self._calls[call]
        self._calls[call] = Call(
            id=call,
            module=begun.module,
            parent=begun.parent,
            inputs=begun.inputs,
            outputs=(("", value),),
            ops=(begun.ops[0], len(self._ops)),
        )

    def given(self, name: str) -> int:
        """Add an input of the model, and return its value id."""
        return self._value("input", name)

    def run(
        self,
        module: str,
        parent: int,
        reads: Iterable[int],
        *,
        is_random: bool = False,
        leaves_out: tuple[str, ...] = (),
    ) -> int:
        """Add the call of a module as one operation, and return the value id of its output.

        Args:
            module: The fqn of the module.
            parent: Id of the enclosing call.
            reads: Value ids of the module's inputs.
            is_random: True if the module draws random numbers.
            leaves_out: Names of parameters and buffers of the module that its forward does not use.
        """
        inputs = tuple(reads)
        own = [
            self._known.setdefault(fqn, self._tensor(fqn))
            for fqn in self._inside.get(module, ())
            if fqn.rpartition(".")[2] not in leaves_out
        ]
        before = len(self._ops)
        call = self._call(module, parent, inputs, ())
        out = self.compute(call, (*inputs, *own), is_random=is_random)
        self._calls[call] = Call(
            id=call,
            module=module,
            parent=parent,
            inputs=self._calls[call].inputs,
            outputs=(("", out),),
            ops=(before, len(self._ops)),
        )
        return out

    def pass_through(self, module: str, parent: int, value: int) -> int:
        """Add the call of a module that returns its input, and return that value's id."""
        self._call(module, parent, (value,), (value,))
        return value

    def compute(self, call: int, reads: Iterable[int], *, is_random: bool = False) -> int:
        """Add an operation that the code of call `call` runs, and return its result's value id."""
        out = self._value("op")
        args = tuple(map(Ref, reads))
        self._ops.append(
            Op(
                name="meshplan.outline",
                args=args,
                kwargs={},
                outputs=(out,),
                call=call,
                is_random=is_random,
            )
        )
        return out

    def flow(self) -> Flow:
        """Return the finished forward."""
        return Flow(values=tuple(self._values), ops=tuple(self._ops), calls=tuple(self._calls))

    def _call(
        self, module: str, parent: int | None, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> int:
        number, at = len(self._calls), len(self._ops)
        self._calls.append(
            Call(
                id=number,
                module=module,
                parent=parent,
                inputs=tuple((str(n), value) for n, value in enumerate(inputs)),
                outputs=tuple(("", value) for value in outputs),
                ops=(at, at),
            )
        )
        return number

    def _tensor(self, fqn: str) -> int:
        return self._value("buffer" if self.tensors[fqn].is_buffer else "parameter", fqn)

    def _value(
        self, origin: Literal["parameter", "buffer", "input", "constant", "op"], name: str = ""
    ) -> int:
        number = len(self._values)
        self._values.append(Value(id=number, shape=(), dtype="", origin=origin, name=name))
        return number


def decoder_outline(
    modules: Mapping[str, ModuleInfo], tensors: Mapping[str, TensorInfo], *, scales: bool = False
) -> Flow:
    """Return the outline of a Llama-like decoder: embedding, rotary angles, blocks, norm, head.

    Args:
        modules: Modules by fqn.
        tensors: Tensors by fqn.
        scales: If True, code between modules multiplies embeddings and logits by constants.
    """
    out = FlowBuilder(tensors)
    root = out.enter("", None)
    ids = out.given("input_ids")
    body = out.enter("model", root)
    x = out.run("model.embed_tokens", body, (ids,))
    if scales:
        x = out.compute(body, (x,))
    angles = out.run("model.rotary_emb", body, (), leaves_out=("original_inv_freq",))
    for block in _blocks(modules, "model.layers"):
        x = out.run(block, body, (x, angles))
    x = out.run("model.norm", body, (x,))
    out.leave(body, x)
    x = out.run("lm_head", root, (x,))
    if scales:
        x = out.compute(root, (x,))
    out.leave(root, x)
    return out.flow()


def gpt2_outline(
    modules: Mapping[str, ModuleInfo], tensors: Mapping[str, TensorInfo], *, drops: bool
) -> Flow:
    """Return the outline of GPT-2, which adds token and position embeddings between modules.

    Args:
        modules: Modules by fqn.
        tensors: Tensors by fqn.
        drops: If True, the dropout after the embeddings has a probability above 0 and so draws
            random numbers; if False, it returns its input.
    """
    out = FlowBuilder(tensors)
    root = out.enter("", None)
    ids = out.given("input_ids")
    body = out.enter("transformer", root)
    words = out.run("transformer.wte", body, (ids,))
    places = out.run("transformer.wpe", body, ())
    x = out.compute(body, (words, places))
    if drops:
        x = out.run("transformer.drop", body, (x,), is_random=True)
    else:
        x = out.pass_through("transformer.drop", body, x)
    for block in _blocks(modules, "transformer.h"):
        x = out.run(block, body, (x,))
    x = out.run("transformer.ln_f", body, (x,))
    out.leave(body, x)
    x = out.run("lm_head", root, (x,))
    out.leave(root, x)
    return out.flow()


def _blocks(modules: Mapping[str, ModuleInfo], at: str) -> Iterable[str]:
    return (fqn for fqn in modules if fqn.rpartition(".")[0] == at)
