"""Build a model graph module by module, in definition order.

Source: transformers 5.23, `models/<family>/modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from meshplan.layout.styles import dims_of
from meshplan.model.graph import ModelGraph, ModuleInfo, TensorInfo

_ACTIVATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "silu": "transformers.activations.SiLUActivation",
        "gelu": "transformers.activations.GELUActivation",
        "gelu_new": "transformers.activations.NewGELUActivation",
        "gelu_fast": "transformers.activations.FastGELUActivation",
        "gelu_pytorch_tanh": "transformers.activations.GELUTanh",
        "relu": "torch.nn.modules.activation.ReLU",
    }
)

_TORCH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Linear": "torch.nn.modules.linear",
        "Embedding": "torch.nn.modules.sparse",
        "LayerNorm": "torch.nn.modules.normalization",
        "Dropout": "torch.nn.modules.dropout",
        "ModuleList": "torch.nn.modules.container",
        "Conv1D": "transformers.pytorch_utils",
    }
)


class GraphBuilder:
    """A model graph under construction: modules and tensors are added in definition order."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.modules: dict[str, ModuleInfo] = {}
        self.parameters: dict[str, TensorInfo] = {}
        self.buffers: dict[str, TensorInfo] = {}
        self.tp_preset: dict[str, str] = {}
        self.tp_derived: dict[str, str] = {}

    def graph(self, name: str, config: dict[str, int]) -> ModelGraph:
        tensors = self.parameters | self.buffers
        return ModelGraph(
            name=name,
            modules=MappingProxyType(self.modules),
            tensors=MappingProxyType(tensors),
            config=MappingProxyType(config),
            tp_preset=MappingProxyType(self.tp_preset),
            tp_derived=MappingProxyType(self.tp_derived),
        )

    def module(self, fqn: str, type: str, kind: str = "other", **facts: Any) -> None:
        """Add a module; `facts` are further fields of its ModuleInfo."""
        self.modules[fqn] = ModuleInfo(
            fqn=fqn,
            type=type,
            qualified_type=f"{_TORCH.get(type, self.source)}.{type}",
            kind=kind,
            has_forward=type != "ModuleList",
            **facts,
        )

    def parameter(
        self,
        fqn: str,
        shape: tuple[int, ...],
        dims: tuple[str, ...],
        aliases: tuple[str, ...] = (),
    ) -> None:
        self.parameters[fqn] = TensorInfo(fqn=fqn, shape=shape, dims=dims, aliases=aliases)

    def buffer(self, fqn: str, shape: tuple[int, ...], *, is_persistent: bool = False) -> None:
        self.buffers[fqn] = TensorInfo(
            fqn=fqn,
            shape=shape,
            dims=("",) * len(shape),
            trainable=False,
            is_buffer=True,
            is_persistent=is_persistent,
        )

    def linear(
        self,
        fqn: str,
        out: int,
        into: int,
        *,
        bias: bool = False,
        kind: str = "linear",
        **facts: Any,
    ) -> None:
        """Add a Linear (kind "linear") or transformers' Conv1D (kind "conv1d") and its parameters.

        The weight of a Conv1D is transposed: (into, out).
        """
        shape = (out, into) if kind == "linear" else (into, out)
        self.module(fqn, "Linear" if kind == "linear" else "Conv1D", kind, **facts)
        self.parameter(f"{fqn}.weight", shape, dims_of(kind, "weight", 2))
        if bias:
            self.parameter(f"{fqn}.bias", (out,), dims_of(kind, "bias", 1))

    def embedding(
        self, fqn: str, vocab: int, embed: int, type: str = "Embedding", tied_to: str = ""
    ) -> None:
        self.module(fqn, type, "embedding")
        aliases = (tied_to,) if tied_to else ()
        self.parameter(f"{fqn}.weight", (vocab, embed), dims_of("embedding", "weight", 2), aliases)

    def norm(self, fqn: str, size: int, type: str, bias: bool = False) -> None:
        self.module(fqn, type, "norm")
        self.parameter(f"{fqn}.weight", (size,), dims_of("norm", "weight", 1))
        if bias:
            self.parameter(f"{fqn}.bias", (size,), dims_of("norm", "bias", 1))

    def activation(self, fqn: str, name: object) -> None:
        qualified = _ACTIVATIONS.get(str(name), f"transformers.activations.{name}")
        type = qualified.rpartition(".")[2]
        self.modules[fqn] = ModuleInfo(fqn=fqn, type=type, qualified_type=qualified)
