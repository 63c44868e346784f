"""The part of each tensor of a state that a rank holds, and the rank that saves it.

The plan's layouts determine where a rank's shard lies in the whole tensor. Optimizer states with
the shape of their parameter are sharded like it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from meshplan.assign import Placed
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Mesh
from meshplan.plan.plan import Plan
from meshplan.shown import shown
from meshplan.state.boxes import LocalBox, TensorBox, local_boxes
from meshplan.state.safetensors import BYTES

_WRAPPERS: Final = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)(?:\.|$)")
"""Names that torch.compile and torch's checkpoint wrapper put into those of a module's tensors."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """One tensor of a state, as far as one rank holds it.

    Args:
        name: Its name in a state, `model/NAME` or `optimizer/PARAMETER/STATE`.
        dtype: The safetensors word for its dtype, such as "BF16".
        shape: Its global shape.
        boxes: Where the rank's shard lies in the whole tensor.
        copies: The axes along which all ranks have equal copies of the shard.
        aliases: Further names of the tensor, if it is tied.
        is_shared: False if a rank's copy may differ from the others: that of the first rank counts.
        is_counted: False if another pipeline stage saves the tensor for this one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    copies: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_shared: bool = True
    is_counted: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the rank's shard."""
        return sum(each.box.numel for each in self.boxes) * BYTES[self.dtype]

    def pieces(self) -> Iterator[tuple[str, LocalBox]]:
        """Yield (key, box) for each box of the rank's shard; the key is its name in a file."""
        for number, box in enumerate(self.boxes):
            yield self.name if len(self.boxes) == 1 else f"{self.name}#{number}", box


def plain_name(name: str) -> str:
    """Return a name without those parts that wrappers of torch have put into it.

    >>> plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub("", name).removesuffix(".")


def held_sharded(name: str, dtype: str, fqn: str, plan: Plan, rank: int) -> HeldTensor:
    """Return a tensor that is sharded like a tensor of the plan.

    Args:
        name: The tensor's name in a state.
        dtype: The safetensors word for its dtype.
        fqn: The tensor of the plan that has its shape and its layout.
        plan: The plan.
        rank: The rank.
    """
    placed = plan.assignment.tensors[fqn]
    is_model = name.startswith("model/")
    return HeldTensor(
        name=name,
        dtype=dtype,
        shape=placed.info.shape,
        boxes=local_boxes(placed.stored, placed.info.shape, plan.mesh, rank),
        copies=_copies(placed.stored, plan.mesh),
        aliases=tuple(map(plain_name, placed.info.aliases)) if is_model else (),
        is_shared=not placed.info.is_buffer,
        is_counted=_is_counted(placed, plan, rank),
    )


def held_whole(
    name: str, dtype: str, shape: tuple[int, ...], fqn: str, plan: Plan, rank: int
) -> HeldTensor:
    """Return a tensor of which every rank that has a parameter of the plan has the whole.

    Args:
        name: The tensor's name in a state.
        dtype: The safetensors word for its dtype.
        shape: Its shape.
        fqn: The parameter that it belongs to.
        plan: The plan.
        rank: The rank.
    """
    whole = Layout.whole(len(shape))
    return HeldTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        boxes=local_boxes(whole, shape, plan.mesh, rank),
        copies=_copies(whole, plan.mesh),
        is_counted=_is_counted(plan.assignment.tensors[fqn], plan, rank),
    )


def held_alone(name: str, dtype: str, shape: tuple[int, ...]) -> HeldTensor:
    """Return a tensor that one rank alone saves, whole."""
    whole = TensorBox.whole(shape)
    boxes = (LocalBox(whole, whole),) if whole.numel else ()
    return HeldTensor(name=name, dtype=dtype, shape=shape, boxes=boxes)


def is_held(fqn: str, plan: Plan, rank: int) -> bool:
    """Return True if a rank has a tensor of the plan: all of them do, but for pipeline stages."""
    stages = plan.assignment.stages
    return stages is None or stages.holds(fqn, plan.mesh.index(rank, ("pp",)))


def _is_counted(placed: Placed, plan: Plan, rank: int) -> bool:
    """Return True if the rank's pipeline stages are the ones that save the tensor.

    A buffer is saved by the last stage that has it: earlier ones end their forward early, and may
    not have updated it.
    """
    stages = plan.assignment.stages
    if stages is None:
        return True
    holders = stages.tensors[placed.info.fqn]
    place = plan.mesh.index(rank, ("pp",))
    return stages.rank_of(holders[-1 if placed.info.is_buffer else 0]) == place


def _copies(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes, apart from pp, along which all ranks have equal copies of their shards."""
    used = set(layout.axes)
    out: list[str] = []
    for axis in mesh.names:
        parts = [(loan.rest, loan.name) for loan in mesh.loans if loan.within == axis]
        if axis not in used and axis != "pp":
            out += [part for part in (parts[0] if parts else (axis,)) if part not in used]
    return tuple(out)


_Held = TypeVar("_Held", bound=HeldTensor)


def written_by(rank: int, tensors: Iterable[_Held], mesh: Mesh) -> list[_Held]:
    """Return the tensors whose shards a rank writes; ranks with equal copies share the work.

    A rank with an empty shard of a tensor writes nothing of it. A tensor without elements is
    returned nevertheless, so that the state has its name and shape.

    Args:
        rank: The rank.
        tensors: The tensors that the rank holds. Ranks with copies of the same shards must pass
            them in the same order.
        mesh: The mesh.
    """
    loads: dict[tuple[str, ...], list[int]] = {}
    out = []
    for tensor in tensors:
        if not tensor.is_counted or not (tensor.boxes or 0 in tensor.shape):
            continue
        writer = 0
        if tensor.is_shared and tensor.copies:
            load = loads.setdefault(tensor.copies, [0] * mesh.size(*tensor.copies))
            writer = load.index(min(load))
            load[writer] += tensor.num_bytes
        if mesh.index(rank, tensor.copies) == writer:
            out.append(tensor)
    return out
