"""The tensors of a training state on this rank: of the model and of its optimizer.

Where this rank's shard lies in the whole tensor follows from the plan's layouts. The states of an
optimizer that have a parameter's shape are sharded like the parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from meshplan.assign import Placed
from meshplan.errors import Problem, StateError
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Mesh
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.parameters.randomness import stream_of
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import Applied, applied, own_module
from meshplan.runtime.base.mesh import local_of
from meshplan.shown import shown
from meshplan.state.boxes import LocalBox, TensorBox, local_boxes

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

_WRAPPERS: Final = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)(?:\.|$)")
"""Names that torch.compile and torch's checkpoint wrapper put into those of a module's tensors."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """One tensor of the training state, as far as this rank holds it.

    Args:
        name: Its name in a state, `model/NAME` or `optimizer/PARAMETER/STATE`.
        shape: Its global shape.
        local: This rank's shard of it.
        boxes: Where the shard lies in the whole tensor.
        copies: The axes along which all ranks have equal copies of this shard.
        aliases: Further names of the tensor, if it is tied.
        is_shared: False if a rank's copy may differ from the others: that of the first rank counts.
        is_counted: False if another pipeline stage saves the tensor for this one.
    """

    name: str
    shape: tuple[int, ...]
    local: torch.Tensor
    boxes: tuple[LocalBox, ...]
    copies: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_shared: bool = True
    is_counted: bool = True

    @property
    def dtype(self) -> str:
        """The safetensors word for its dtype."""
        return WORDS[self.local.dtype]


def plain_name(name: str) -> str:
    """Return a name without those parts that wrappers of torch have put into it.

    >>> plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub("", name).removesuffix(".")


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
        self.plan: Plan = self.applied.plan
        self.model = model
        self._rank = dist.get_rank()
        self._place = self.plan.mesh.index(self._rank, ("pp",))
        placed = self.plan.assignment.tensors
        self.names = {
            fqn: f"model/{plain_name(fqn)}" for fqn, p in placed.items() if p.info.is_persistent
        }
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
                each.reshard()  # A forward without backward leaves units gathered.
        placed = self.plan.assignment.tensors
        live: Iterator[tuple[str, torch.Tensor]]
        for live in (module.named_parameters(), module.named_buffers()):
            for fqn, tensor in live:
                found = placed.get(fqn)
                if found is None or fqn not in self.names:
                    continue
                self._owners[id(tensor)] = fqn
                self._copies.setdefault(fqn, []).append(tensor)
                if fqn not in self.tensors or found.info.is_buffer:
                    # Of the copies on this rank, a buffer's last one: earlier stages end their
                    # forward early and may not have updated it.
                    self.tensors[fqn] = self._live(self.names[fqn], tensor, found)

    def _live(self, name: str, tensor: torch.Tensor, placed: Placed) -> LiveTensor:
        """Return a tensor that has the shape and the layout of one of the plan's tensors."""
        layout, shape, mesh = placed.stored, placed.info.shape, self.plan.mesh
        local = local_of(tensor.detach())
        expected = layout.local_shape(shape, mesh, self._rank)
        if tuple(local.shape) != expected:
            raise StateError(
                Problem(
                    f"{name} has the local shape {list(local.shape)} on rank {self._rank}, where "
                    f"the plan has {list(expected)}"
                )
            )
        return LiveTensor(
            name=name,
            shape=shape,
            local=local,
            boxes=local_boxes(layout, shape, mesh, self._rank),
            copies=_copies(layout, mesh),
            aliases=tuple(map(plain_name, placed.info.aliases)),
            is_shared=not placed.info.is_buffer,
            is_counted=self._is_counted(placed),
        )

    def _is_counted(self, placed: Placed) -> bool:
        """Return True if this rank's pipeline stages are the ones that save the tensor."""
        stages = self.plan.assignment.stages
        if stages is None:
            return True
        holders = stages.tensors[placed.info.fqn]
        return stages.rank_of(holders[-1 if placed.info.is_buffer else 0]) == self._place

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
        for fqn, module in self._stateful():
            if fqn in states:
                module.set_extra_state(states[fqn])

    def _stateful(self) -> Iterator[tuple[str, nn.Module]]:
        for root in self._modules():
            for fqn, module in root.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    yield plain_name(fqn), module

    def copies(self, fqn: str) -> list[torch.Tensor]:
        """Return the tensors of this rank that a name of the plan stands for: one per stage."""
        return self._copies.get(fqn, [])

    def fqn_of(self, parameter: torch.Tensor) -> str | None:
        """Return the plan's name of a parameter of the model; None if it has no such parameter."""
        return self._owners.get(id(parameter))

    def state_of(self, fqn: str, word: str, value: torch.Tensor) -> LiveTensor:
        """Return one state of the optimizer of a parameter of this rank.

        Args:
            fqn: The parameter.
            word: The optimizer's name of the state, such as "exp_avg".
            value: The state.

        Raises:
            StateError: Neither is it sharded like the parameter, nor whole on every rank.
        """
        placed = self.plan.assignment.tensors[fqn]
        name = f"optimizer/{plain_name(fqn)}/{word}"
        parameter, own = self._copies[fqn][0], local_of(value)
        is_alike = isinstance(value, DTensor) == isinstance(parameter, DTensor)
        if is_alike and isinstance(value, DTensor) and isinstance(parameter, DTensor):
            is_alike = value.placements == parameter.placements
        if is_alike and value.shape == parameter.shape:
            return replace(self._live(name, value, placed), aliases=(), is_shared=True)
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
        whole = Layout.whole(len(shape))
        return LiveTensor(
            name=name,
            shape=shape,
            local=own.detach(),
            boxes=local_boxes(whole, shape, self.plan.mesh, self._rank),
            copies=_copies(whole, self.plan.mesh),
            is_counted=self._is_counted(placed),
        )


def _copies(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes, apart from pp, along which all ranks have equal copies of their shards."""
    used = set(layout.axes)
    out: list[str] = []
    for axis in mesh.names:
        parts = [(loan.rest, loan.name) for loan in mesh.loans if loan.within == axis]
        if axis not in used and axis != "pp":
            out += [part for part in (parts[0] if parts else (axis,)) if part not in used]
    return tuple(out)


def written_here(tensors: Iterable[LiveTensor], mesh: Mesh, rank: int) -> list[LiveTensor]:
    """Return the tensors whose shards this rank writes; ranks with equal copies share the work.

    All ranks with copies of the same shards must pass the same tensors in the same order.
    """
    loads: dict[tuple[str, ...], list[int]] = {}
    out = []
    for tensor in tensors:
        if not tensor.is_counted or not tensor.boxes:
            continue
        mine = 0
        if tensor.is_shared and tensor.copies:
            load = loads.setdefault(tensor.copies, [0] * mesh.size(*tensor.copies))
            mine = load.index(min(load))
            load[mine] += tensor.local.nbytes
        if mesh.index(rank, tensor.copies) == mine:
            out.append(tensor)
    return out


def box_bytes(tensor: LiveTensor, box: LocalBox) -> Any:
    """Return the bytes of one box of a shard in row-major order, as an array of NumPy."""
    part = tensor.local[box.local.slices] if tensor.local.ndim else tensor.local
    return part.contiguous().reshape(-1).cpu().view(torch.uint8).numpy()


def whole_tensor(name: str, value: torch.Tensor) -> LiveTensor:
    """Return a tensor that this rank alone saves."""
    own = local_of(value.detach())
    shape = tuple(own.shape)
    boxes = (LocalBox(TensorBox.whole(shape), TensorBox.whole(shape)),) if math.prod(shape) else ()
    return LiveTensor(name=name, shape=shape, local=own, boxes=boxes)
