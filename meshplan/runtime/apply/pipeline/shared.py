"""Parameters that several stages hold: tied embeddings, a layer that runs twice.

Each of these stages has a copy with the same initial values. The gradients of all copies are added,
so that the optimizer makes the same step on each copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan.plan.plan import Plan
from meshplan.runtime.base.fake_mode import numbers
from meshplan.runtime.base.mesh import device, local_of, submesh, without_partial


class SharedTensors:
    """The copies of shared parameters on this rank, and the ranks that hold other copies of them.

    Args:
        plan: The plan of the whole model.
        mesh: The live DeviceMesh.
        parts: This rank's stage modules, by stage index.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh, parts: dict[int, nn.Module]) -> None:
        stages = plan.assignment.stages
        assert stages is not None
        pp = submesh(mesh, ("pp",))
        place = pp.get_local_rank()
        self._copies: list[tuple[str, list[nn.Parameter]]] = []
        self._groups: dict[str, ProcessGroup | None] = {}
        self._extra: set[int] = set()
        made: dict[tuple[int, ...], ProcessGroup | None] = {}
        for fqn, holders in plan.assignment.shared.items():
            places = tuple(sorted({stages.rank_of(stage) for stage in holders}))
            if places not in made:
                made[places] = _group_of(places, pp, mesh)
            # Stages of one rank share one parameter object, unless a wrapper replaced it.
            copies = list(
                dict.fromkeys(
                    module.get_parameter(fqn) for stage, module in parts.items() if stage in holders
                )
            )
            if not copies:
                continue
            self._copies.append((fqn, copies))
            self._groups[fqn] = made[places]
            counted = copies[1:] if place == stages.rank_of(holders[0]) else copies
            self._extra.update(id(copy) for copy in counted)

    def is_counted(self, parameter: nn.Parameter) -> bool:
        """Return False if a sum over all ranks must skip this copy, as another copy is counted."""
        return id(parameter) not in self._extra

    def copies(self) -> Iterator[tuple[str, nn.Parameter, ProcessGroup]]:
        """Yield (fqn, this rank's copy, the ranks with a copy) of parameters on several ranks."""
        for fqn, copies in self._copies:
            group = self._groups[fqn]
            if group is not None:
                yield fqn, copies[0], group

    def add_gradients(self) -> None:
        """Set the gradient of every copy to the sum over all copies."""
        if not self._copies:
            return
        for fqn, copies in self._copies:
            group = self._groups[fqn]
            for copy in copies:
                if copy.grad is not None:
                    copy.grad = without_partial(copy.grad)
            present = [copy.grad for copy in copies if copy.grad is not None]
            is_there = torch.tensor(float(bool(present)), device=device())
            if group is not None:
                dist.all_reduce(is_there, op=dist.ReduceOp.MAX, group=group)
            if not numbers(is_there, float(bool(present))):
                continue
            total = torch.zeros_like(local_of(copies[0].detach()))
            for gradient in present:
                total += local_of(gradient)
            if group is not None:
                dist.all_reduce(total, group=group)
            for copy in copies:
                if copy.grad is not None:
                    # In place: a new tensor would be allocated while the old gradient, a slice
                    # of the unit's reduced gradients, lives as long as that buffer.
                    local_of(copy.grad).copy_(total)
                else:
                    copy.grad = _like(copy, total.clone() if len(copies) > 1 else total)


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the parameter's layout and these local values."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _group_of(places: tuple[int, ...], pp: DeviceMesh, mesh: DeviceMesh) -> ProcessGroup | None:
    """Return the group of ranks at these positions along pp; None if this rank is not in it.

    Also None if there is only one position. All ranks of the job must call this, since torch
    requires every rank to create every group.

    Args:
        places: Positions along pp.
        pp: The mesh of pp.
        mesh: The whole mesh.
    """
    if len(places) == 1:
        return None
    if len(places) == pp.size():
        return pp.get_group()
    names = mesh.mesh_dim_names or ()
    columns = mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, pp.size()).tolist()
    found, _ = dist.new_subgroups_by_enumeration(
        [[column[place] for place in places] for column in columns]
    )
    return found if pp.get_local_rank() in places else None
