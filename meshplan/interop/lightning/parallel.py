"""The part that strategies of Trainer and of Fabric share: plan, ranks and collectives."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from meshplan.errors import ApplyError, Origin, PlanError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.mesh import submesh
from meshplan.runtime.parallelize import PlanLike
from meshplan.runtime.train.step import data_rank
from meshplan.spec.spec import Spec
from meshplan.spec.strategies import WorldSizeProblem, resolve_mesh

VARIABLE: Final = "MESHPLAN_PLAN"
"""Environment variable with the path of the plan, if a strategy is given none."""
DEFAULT_PLAN: Final = "plan.yaml"
PRECISIONS: Final = ("", "32-true")
"""Precision words of a Trainer that was given none: they leave the precision to the plan."""


def find_plan(plan: PlanLike | None) -> PlanLike:
    """Return a plan that was given, else the path of the one that a strategy takes by itself.

    Raises:
        PlanError: None was given, and there is no such file.
    """
    if plan is not None:
        return plan
    found = os.environ.get(VARIABLE, DEFAULT_PLAN)
    if not Path(found).is_file():
        what = f"there is no plan: {found} is not a file"
        where = VARIABLE if VARIABLE in os.environ else os.getcwd()
        fix = f"pass MeshplanStrategy('plan.yaml'), or set {VARIABLE} to the path of a plan"
        raise PlanError(Problem(what, Origin(where), fix))
    return found


def check_num_ranks(spec: Spec, devices: int, nodes: int) -> None:
    """Raise before any rank starts if a plan has another number of ranks than the Trainer.

    Raises:
        PlanError: The product of the plan's mesh is not that of devices and nodes.
    """
    if spec.free_fields:
        return  # The planner chooses for the ranks that there are.
    try:
        resolve_mesh(spec, devices * nodes)
    except PlanError as error:
        wrong = [each for each in error.problems if isinstance(each, WorldSizeProblem)]
        if not wrong:
            return  # `parallelize` raises it.
        needed = wrong[0].needed
        what = f"the plan's mesh has {needed} ranks, but devices={devices} and "
        what += f"num_nodes={nodes} make {devices * nodes}"
        fix = f"set devices={needed // nodes}" if needed % nodes == 0 else f"start {needed} ranks"
        fix += ", or change the mesh of the plan"
        raise PlanError(Problem(what, wrong[0].origin, fix)) from None


def precision_word(spec: Spec, given: str) -> str:
    """Return the plan's precision; raise if another one was given.

    Args:
        spec: The plan.
        given: The precision of Trainer or Fabric; its default leaves it to the plan.

    Raises:
        PlanError: Both are stated, and they differ.
    """
    own = spec.precision.word
    if given not in (*PRECISIONS, own):
        stated = f"precision: {own}" if own else "no precision"
        raise PlanError(
            Problem(
                f"precision={given!r} was given, but the plan states {stated}",
                spec.origin("precision"),
                f"leave it out, or state precision: {given} in the plan",
            )
        )
    return own or "32-true"


def refuse_two_scaled(spec: Spec, optimizers: int) -> None:
    """Raise if several optimizers would step on the gradients of a scaled loss.

    The scale is taken out of all gradients of the model at once, while those of another optimizer
    may still be accumulating.

    Raises:
        ApplyError: There are several, and the plan scales the loss.
    """
    if optimizers > 1 and spec.precision.scales_loss:
        what = f"the plan scales the loss for float16, with which {optimizers} optimizers of one "
        what += "model cannot step one by one"
        fix = "use precision: bf16-mixed, or one optimizer with several parameter groups"
        raise ApplyError(Problem(what, spec.origin("precision"), fix))


class PlannedRanks:
    """Members of a strategy that follow from its plan. Mixed into Lightning's strategies.

    Attributes:
        spec: The plan as it was read.
        network: The parallelized module.
    """

    spec: Spec
    _plan: PlanLike
    _network: nn.Module | None
    _timeout: timedelta
    _process_group_backend: str | None
    num_nodes: int

    parallel_devices: Any
    cluster_environment: Any

    @property
    def network(self) -> nn.Module:
        """The module that the plan was applied to, as `meshplan.parallelize` returned it."""
        if self._network is None:
            what = "the plan is not applied yet"
            raise PlanError(Problem(what, fix="read strategy.network once the training has begun"))
        return self._network

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def local_rank(self) -> int:
        """Number of this rank on its machine."""
        return self.cluster_environment.local_rank() if self.cluster_environment is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend that was asked for."""
        return self._process_group_backend

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks that read samples of their own: those along the data axes."""
        return data_rank(self.network)._asdict()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let workers of ranks that need the same samples draw the same random numbers.

        With `seed_everything(workers=True)`, Lightning seeds them by the number of the rank.
        """
        init = getattr(dataloader, "worker_init_fn", None)
        is_lightnings = isinstance(init, partial) and init.func is pl_worker_init_function
        if is_lightnings or (hasattr(dataloader, "worker_init_fn") and init is None):
            dataloader.worker_init_fn = None
            _auto_add_worker_init_fn(dataloader, self.distributed_sampler_kwargs["rank"])
        return dataloader

    def set_world_ranks(self) -> None:
        """Give the cluster environment and Lightning's `rank_zero_only` the rank."""
        environment = self.cluster_environment
        if environment is not None:
            node = environment.node_rank()
            environment.set_global_rank(node * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
            for each in (rank_zero_only, fabric_rank_zero_only):
                setattr(each, "rank", environment.global_rank())  # noqa: B010

    def _join(self) -> None:
        """Start the process group with Lightning's launcher."""
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        backend = self._process_group_backend
        backend = backend or _get_default_process_group_backend_for_device(device)
        _init_dist_connection(
            self.cluster_environment, backend, timeout=self._timeout,
            device_id=None if device.type == "cpu" else device,
        )  # fmt: skip
        # torchrun sets it; a plan that fills nodes reads it.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))

    def _values_group(self) -> dist.ProcessGroup | None:
        """Return the ranks with different samples or tokens; None before the plan is applied."""
        if self._network is None:
            return None
        state = applied(self._network)
        if state.plan.mesh.size(*GRADIENT_AXES) == 1:
            return _alone()
        return submesh(state.mesh, GRADIENT_AXES, flat=True).get_group()

    def _group(self, group: Any) -> Any:
        """Return the ranks to reduce over; the world is what Lightning asks for if not told."""
        return self._values_group() if group in (None, dist.group.WORLD) else group

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks with different samples or tokens, or over `group`."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        group = self._group(group)
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As `reduce`, by Fabric's name."""
        return self.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack a tensor of the ranks with different samples or tokens, or those of `group`."""
        group = self._group(group)
        return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if it is True on all ranks; with `all=False`, on any."""
        number = torch.tensor(int(decision), device=self.root_device)
        op = dist.ReduceOp.MIN if all else dist.ReduceOp.MAX
        return bool(_sync_ddp_if_available(number, None, reduce_op=op))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            ids = None if self.root_device.type == "cpu" else [self.root_device.index]
            dist.barrier(device_ids=ids)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        if not dist.is_initialized():
            return obj
        value = [obj]
        dist.broadcast_object_list(value, src)
        return value[0]


_groups: dict[Any, dist.ProcessGroup] = {}
"""The groups of a single rank, by the world's group."""


def _alone() -> dist.ProcessGroup:
    """Return the group of this rank alone. All ranks call it."""
    world = dist.group.WORLD
    if world not in _groups:
        made, _ = dist.new_subgroups(1)
        _groups[world] = made
    return _groups[world]
