"""The tensors of a training state on this rank: of the model and of its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from meshplan.errors import Problem, StateError
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.parameters.randomness import stream_of
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import Applied, applied, own_module
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.torch_private.private import reshard
from meshplan.shown import shown
from meshplan.state.boxes import LocalBox
from meshplan.state.held import HeldTensor, held_alone, held_sharded, held_whole, plain_name
from meshplan.state.names import find_renaming
from meshplan.state.safetensors import Bytes

WORDS: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
        torch.int32: "I32", torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32",
        torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
        torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }
)  # fmt: skip
"""The safetensors word of each dtype."""
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType({w: d for d, w in WORDS.items()})
"""The dtype of each safetensors word."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor(HeldTensor):
    """One tensor of the training state, with this rank's shard of it.

    Args:
        local: The shard.
    """

    local: torch.Tensor


def with_values(held: HeldTensor, local: torch.Tensor) -> LiveTensor:
    """Return a tensor that a rank holds, with its shard."""
    return LiveTensor(**{each.name: getattr(held, each.name) for each in fields(held)}, local=local)


class LiveState:
    """The training state of one model on this rank.

    Args:
        model: The module that `parallelize` returned.

    Attributes:
        applied: The plan and what training has seen so far.
        plan: The plan.
        tensors: The model's parameters and persistent buffers on this rank, by name in the plan.
        names: The name in a state of each tensor of the whole model that a state has, by its name
            in the plan.
    """

    def __init__(self, model: nn.Module) -> None:
        self.applied: Applied = applied(model)
        self.plan: Plan = self.applied.given
        self.model = model
        self._rank = dist.get_rank()
        placed = self.plan.assignment.tensors
        self.names = {
            fqn: f"model/{plain_name(fqn)}" for fqn, p in placed.items() if p.info.is_persistent
        }
        first: dict[str, str] = {}
        for fqn, name in self.names.items():
            if (other := first.setdefault(name, fqn)) != fqn:
                what = (
                    f"{other} and {fqn} would be saved under one name, because torch's wrappers "
                    "add what they differ in"
                )
                raise StateError(Problem(what, fix="give one of the two another name"))
        self.tensors: dict[str, LiveTensor] = {}
        self._copies: dict[str, list[torch.Tensor]] = {}
        self._owners: dict[int, str] = {}
        for module in self._modules():
            self._add(module)

    def _modules(self) -> list[nn.Module]:
        """Return the modules of this rank's stages, or the whole model."""
        if isinstance(self.model, PipelinedModule):
            return self.model.stage_modules
        return [own_module(self.model)]

    def _add(self, module: nn.Module) -> None:
        """Add the tensors of one stage's module, or of the whole model."""
        for each in module.modules():
            if isinstance(each, FSDPModule):
                reshard(each)  # A forward without backward leaves units gathered.
        placed = self.plan.assignment.tensors
        live: Iterator[tuple[str, torch.Tensor]]
        for live in (module.named_parameters(), module.named_buffers()):
            for fqn, tensor in live:
                if fqn not in self.names:
                    continue
                self._owners[id(tensor)] = fqn
                self._copies.setdefault(fqn, []).append(tensor)
                if fqn not in self.tensors or placed[fqn].info.is_buffer:
                    # Of the copies on this rank, the last one of a buffer: see `held`.
                    self.tensors[fqn] = self._sharded(self.names[fqn], tensor, fqn)

    def _sharded(self, name: str, tensor: torch.Tensor, fqn: str) -> LiveTensor:
        """Return a tensor that has the shape and the layout of one of the plan's tensors."""
        local = local_of(tensor.detach())
        expected = self.plan.assignment.tensors[fqn].local_shape(self.plan.mesh, self._rank)
        if tuple(local.shape) != expected:
            raise StateError(
                Problem(
                    f"{name} has the local shape {list(local.shape)} on rank {self._rank}, where "
                    f"the plan has {list(expected)}"
                )
            )
        held = held_sharded(name, WORDS[local.dtype], fqn, self.plan, self._rank)
        return with_values(held, local)

    def progress(self) -> dict[str, Any]:
        """Return what training has counted so far, as JSON can express it."""
        stream = stream_of(self._modules()[0])
        return {
            "loss_scale": self.applied.loss_scale,
            "steps_without_overflow": self.applied.steps_without_overflow,
            "seed": stream.seed,
            "forwards": stream.forwards,
        }

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on counting where `progress` ended.

        The number of steps is left out: a new process checks its first step again.
        """
        if self.plan.spec.precision.scales_loss:
            self.applied.loss_scale = float(progress["loss_scale"])
            self.applied.steps_without_overflow = int(progress["steps_without_overflow"])
        for module in self._modules():
            stream = stream_of(module)
            stream.seed, stream.forwards = int(progress["seed"]), int(progress["forwards"])

    def extra_states(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of what modules add to their state dict by `get_extra_state`."""
        for fqn, module in self._stateful():
            yield fqn, module.get_extra_state()

    def set_extra_states(self, states: Mapping[str, Any]) -> None:
        """Give modules back what they have added to their state dict."""
        own = dict(self._stateful())
        renamed = find_renaming(((name,) for name in states), own).names
        for name, state in states.items():
            module = own.get(renamed.get(name, name))
            if module is not None:
                module.set_extra_state(state)

    def _stateful(self) -> Iterator[tuple[str, nn.Module]]:
        for root in self._modules():
            for fqn, module in root.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    yield plain_name(fqn), module

    def copies(self, fqn: str) -> list[torch.Tensor]:
        """Return the tensors of this rank that a name of the plan stands for: one per stage."""
        return self._copies.get(fqn, [])

    def fqn_of(self, parameter: torch.Tensor) -> str:
        """Return the plan's name of one of the optimizer's parameters.

        Raises:
            StateError: The model has no such parameter.
        """
        fqn = self._owners.get(id(parameter))
        if fqn is None:
            what = (
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not in "
                "the model"
            )
            fix = "make the optimizer from model.parameters(), or its module a part of the model"
            raise StateError(Problem(what, fix=fix))
        return fqn

    def state_of(self, fqn: str, word: str, value: torch.Tensor) -> LiveTensor:
        """Return one state of the optimizer of a parameter of this rank.

        Args:
            fqn: The parameter.
            word: The optimizer's name of the state, such as "exp_avg".
            value: The state.

        Raises:
            StateError: Neither is it sharded like the parameter, nor whole on every rank.
        """
        name = f"optimizer/{plain_name(fqn)}/{word}"
        parameter, own = self._copies[fqn][0], local_of(value.detach())
        is_alike = isinstance(value, DTensor) == isinstance(parameter, DTensor)
        if is_alike and isinstance(value, DTensor) and isinstance(parameter, DTensor):
            is_alike = value.placements == parameter.placements
        if is_alike and value.shape == parameter.shape:
            return self._sharded(name, value, fqn)
        if isinstance(value, DTensor):
            is_whole = all(isinstance(p, Replicate) for p in value.placements)
        else:
            is_whole = not isinstance(parameter, DTensor) or value.numel() <= 1
        if not is_whole:
            raise StateError(
                Problem(
                    f"the optimizer's {word} of {fqn} has the shape {list(own.shape)} on rank "
                    f"{self._rank}: it is not sharded like the parameter, so it cannot be loaded "
                    "under another layout",
                    fix="train with an optimizer whose states have the parameters' shapes, such as "
                    "AdamW, or save without the optimizer",
                )
            )
        shape = tuple(own.shape)
        held = held_whole(name, WORDS[own.dtype], shape, fqn, self.plan, self._rank)
        return with_values(held, own)


def whole_tensor(name: str, value: torch.Tensor) -> LiveTensor:
    """Return a tensor that this rank alone saves."""
    own = value.detach()
    return with_values(held_alone(name, WORDS[own.dtype], tuple(own.shape)), own)


def box_bytes(tensor: LiveTensor, box: LocalBox) -> Bytes:
    """Return the bytes of one box of a shard in row-major order."""
    return bytes_of(tensor.local[box.local.slices] if tensor.local.ndim else tensor.local)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a plain tensor in row-major order."""
    data: Bytes = tensor.contiguous().reshape(-1).cpu().view(torch.uint8).numpy()
    return data
