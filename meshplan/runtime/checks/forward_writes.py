"""Handling of parameters and buffers that a forward writes.

Models clamp or normalise weights in their forward, track them with a moving average, count calls,
or renormalise the embeddings they look up. In one process this just works. Under a plan four things
would go wrong, and this module handles each:

- An FSDP unit computes on a gathered copy of its parameters and frees the copy after the forward.
  Written values are copied into the shard before the copy is freed.
- Ranks see different samples. Before the optimizer steps, they compare the values they wrote. A
  parameter whose values differ is rejected by name, and so is a buffer or attribute from which the
  output was computed, such as a codebook. Any other buffer that differs is a statistic: each
  forward starts from the first rank's values, as in DistributedDataParallel, and the user is warned
  once.
- A forward runs once per microbatch, but in one process once per step. Every microbatch starts from
  the values that the first microbatch started from, except for statistics, which carry over.
- Activation checkpointing runs a forward a second time, which writes a second time:
  `runtime.apply.recompute` restores buffers, and a parameter must get the same values as before.

Version counters (`Tensor._version`) reveal writes in every forward. In steps 1, 2, 4, 8, ... values
are compared too, because a write through `.data` does not change the version.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan.errors import ApplyError
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.compile import compiles
from meshplan.runtime.base.digest import checksum
from meshplan.runtime.base.mesh import gathered, local_of, submesh
from meshplan.runtime.base.module_state import plain_attributes, tensor_attributes
from meshplan.runtime.base.optimizer_steps import before_steps, is_due
from meshplan.runtime.checks import write_problems
from meshplan.runtime.checks.kept_numbers import KeptNumbers, KeptValues
from meshplan.runtime.checks.originals import Originals
from meshplan.runtime.checks.places import (
    Left,
    TensorPlace,
    TensorSnapshot,
    changes_every_microbatch,
    frozen,
    is_close,
    is_written,
    places_of,
    sample_of,
    snapshots_of,
)  # fmt: skip
from meshplan.runtime.checks.reach import Reach
from meshplan.runtime.torch_private.private import running_node, set_version, store_gathered


class ForwardWrites:
    """Watches what the forward of one model, or of one pipeline stage, writes on this rank.

    Attributes:
        plan: The model's plan, with its present number of microbatches.
        microbatch: Number of the microbatch that runs next; 0 in loops without microbatches.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        self._model, self.plan, self._mesh = weakref.ref(model), plan, mesh
        self.microbatch = self._steps = 0
        self._is_first = True
        self._places = {place.name: place for place in places_of(model, plan)}
        self._written: dict[str, Left | None] = {}
        self._statistics = {n for n, p in self._places.items() if changes_every_microbatch(p, plan)}
        """Names of tensors whose values may differ between ranks or microbatches."""
        self._shared: dict[str, TensorPlace] = {}
        """Name -> buffer that takes the first data rank's values before each forward."""
        self._starts: dict[str, torch.Tensor] = {}
        """Name -> values at the beginning of the step, for tensors that can be swapped."""
        self._ends: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Name -> (tensor, copy of its values), as the first microbatch left them. Filled only
        while a later microbatch runs."""
        self._memory: dict[str, torch.Tensor] = {}
        """Name -> tensor on the memory into which a unit gathers a written parameter. Between
        forwards FSDP2 may have freed that memory."""
        self._versions: dict[int, list[tuple[torch.Tensor, int]]] = {}
        """Microbatch -> written parameters, each with its version at the end of the forward."""
        self._numbers = KeptNumbers()
        self._start_numbers: KeptValues = {}
        """Numbers outside of tensors that forwards change, as the step found them."""
        self._leaves_attributes = False
        self._optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, bool]()
        self._originals = Originals()
        self._reach = Reach()
        self._reached: set[str] = set()
        """Names of tensors from which the forward's output was computed."""
        self._kept: dict[str, torch.Tensor] = {}
        """Tensors in attributes before the forward that is running, by dotted name."""
        self._plain: dict[tuple[nn.Module, str], Any] = {}
        """Numbers in attributes before the forward that is running."""
        self._kept_sums: dict[str, int] = {}
        """Checksums of the tensors that forwards put into attributes, by dotted name."""
        units = {place.unit for place in self._places.values() if place.unit is not None}
        for unit in (None, *sorted(units)):
            scope = [place for place in self._places.values() if place.unit == unit]
            self._watch(model.get_submodule(unit) if unit else model, unit, scope)
        _by_model[model] = own = weakref.ref(self)  # The model's hooks keep `self` alive.

        def before_step(optimizer: torch.optim.Optimizer) -> None:
            writes = own()
            # A module of the model may outlive it, and its hooks keep `writes`.
            if writes is None or writes._model() is None:
                end()
            else:
                writes.before_step(optimizer)

        end = before_steps(before_step)

    def _watch(self, module: nn.Module, unit: str | None, scope: list[TensorPlace]) -> None:
        """Register forward hooks that find out which tensors a module's forward writes.

        They run after the unit is gathered and before it is freed.

        Args:
            module: The FSDP unit, or the whole model.
            unit: Fqn of the unit; None for the tensors that no unit gathers.
            scope: The tensors to watch.
        """
        snapshots: list[tuple[TensorPlace, TensorSnapshot]] = []

        def is_seen() -> bool:
            # Not in a forward that is recomputed in backward, nor traced by a compiler.
            return not torch.compiler.is_compiling() and running_node() is None

        def enter(*_: Any) -> None:
            if is_seen():
                if unit is None:
                    self._begin()
                self._prepare(scope)
                snapshots[:] = snapshots_of(scope, self._is_due())

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if is_seen():
                before = snapshots[:]
                snapshots.clear()
                for place, snapshot in before:
                    now = place.table.get(place.leaf)
                    if now is not None and (self._written or is_written(now, snapshot)):
                        self._look(place, snapshot, now, module)
                if unit is None:
                    self._finish(output)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        if unit is None:  # Stop watching even if the forward raises.
            module.register_forward_hook(lambda *_: self._stop(), always_call=True)

    def _is_due(self) -> bool:
        """Return True if this forward compares values: in training, in steps 1, 2, 4, 8, ..."""
        return torch.is_grad_enabled() and is_due(self._steps + 1)

    def _repeats(self) -> bool:
        """Return True if this forward is one of several in a training step."""
        return self.plan.num_microbatches > 1 and torch.is_grad_enabled()

    # Around one forward of the whole model.

    def _stop(self) -> None:
        self._originals.stop()
        self._reach.stop()

    def _begin(self) -> None:
        if self._shared:
            group = self._group()
            for place in self._shared.values():
                dist.broadcast(place.tensor, group=group, group_src=0)
        if self._is_due() and self.plan.num_parts > 1:
            self._kept = tensor_attributes(self._own_model())
            self._plain = plain_attributes(self._own_model())
            buffers = ((n, p.tensor) for n, p in self._places.items() if p.is_buffer and p.exists)
            self._reach.begin((*buffers, *self._kept.items()))
        if not self._repeats():
            return
        if not self.microbatch:
            self._versions.clear()
        if self.microbatch:
            self._numbers.put(self._start_numbers)
        else:
            self._start_numbers = self._numbers.values()
            if self._is_first or self._is_due():
                self._numbers.look(self._own_model())
        if self._is_first:  # Before the first forward, any of these tensors may get written.
            self._originals.begin(
                (name, place.tensor)
                for name, place in self._places.items()
                if place.can_be_swapped and name not in self._statistics
            )

    def _prepare(self, scope: list[TensorPlace]) -> None:
        """Let a later microbatch start from the values that the first microbatch started from.

        Only tensors that can be swapped get these values. Of the other written tensors the values
        are kept, to compare them with those that this microbatch writes.
        """
        if not self._repeats():
            return
        begins_anew = self._written.keys() - self._statistics
        for place in scope if begins_anew else ():
            if place.name not in begins_anew or not place.exists:
                continue
            now = place.tensor
            if self.microbatch == 0:
                if place.can_be_swapped:
                    self._starts[place.name] = now.detach().clone()
                continue
            self._ends[place.name] = now, local_of(now).detach().clone()
            if place.name in self._starts:
                # Put in a new tensor, because autograd may have saved `now` in the first
                # microbatch's forward.
                start = self._starts[place.name].clone()
                place.table[place.leaf] = start if place.is_buffer else frozen(start)

    def _look(
        self, place: TensorPlace, snapshot: TensorSnapshot, now: torch.Tensor, module: nn.Module
    ) -> None:
        """Record if the forward wrote a tensor, and keep the written values."""
        name = place.name
        if name in self._ends:
            self._compare_microbatch(place)
        elif is_written(now, snapshot):
            self._note_write(place, snapshot, module)
        if name in self._written and self._repeats() and now.requires_grad:
            self._versions.setdefault(self.microbatch, []).append((now, now._version))

    def before_backward(self, microbatch: int) -> None:
        """Set the versions of written parameters back to those after the microbatch's forward.

        Later microbatches have written the same values into the parameters, which increased their
        versions. Without this, autograd would take the parameters it saved for changed, and raise.
        """
        for tensor, version in self._versions.get(microbatch, ()):
            set_version(tensor, version)

    def _note_write(self, place: TensorPlace, snapshot: TensorSnapshot, module: nn.Module) -> None:
        name, now = place.name, place.tensor
        self._written.setdefault(name, None)
        if place.unit is not None:
            self._keep_in_shard(place, snapshot, module)
        if snapshot.checksum is not None:
            self._written[name] = Left(checksum(local_of(now)), sample_of(now))

    def _keep_in_shard(
        self, place: TensorPlace, snapshot: TensorSnapshot, module: nn.Module
    ) -> None:
        """Copy the values of a unit's gathered parameter into this rank's shard."""
        placed = self.plan.assignment.tensors[place.name]
        if placed.dtype != placed.compute_dtype:
            raise ApplyError(write_problems.cast_problem(place, placed.compute_dtype))
        now = place.tensor
        assert isinstance(now, nn.Parameter)
        self._memory[place.name] = snapshot.tensor.data if snapshot.data is None else snapshot.data
        self._reset_memory(place)
        with torch.no_grad():
            store_gathered(module, now)

    def _reset_memory(self, place: TensorPlace) -> None:
        """Undo `weight.data = ...`: copy the values into the old memory and point to it again.

        FSDP2 keeps gathering the parameter into the old memory, so later forwards would not see the
        gathered values.
        """
        memory, now = self._memory.get(place.name), place.tensor
        if memory is None or isinstance(now, DTensor) or now.data_ptr() == memory.data_ptr():
            return
        memory.copy_(now.detach())
        now.data = memory

    def _compare_microbatch(self, place: TensorPlace) -> None:
        """Compare what a later microbatch left in a tensor with what the first one left.

        If both are equal up to rounding, the first microbatch's tensor and values are put back.
        Otherwise a buffer becomes a statistic, with a warning.

        Raises:
            ApplyError: They differ, and the tensor is a parameter or a buffer from which the output
                was computed.
        """
        tensor, left = self._ends.pop(place.name)
        if is_close(local_of(place.tensor), left):
            self._reset_memory(place)
            place.table[place.leaf] = tensor
            local_of(tensor.data).copy_(left)
        elif place.is_buffer:
            self._refuse_statistic(place.name, "microbatches")
            self._statistics.add(place.name)
            write_problems.warn([place.name], "microbatches")
        else:
            raise ApplyError(write_problems.microbatch_problem(place))

    def _finish(self, output: Any) -> None:
        if self._is_due() and self.plan.num_parts > 1:
            self._reached |= self._reach.end(output)
            for name, tensor in tensor_attributes(self._own_model()).items():
                if self._kept.get(name) is not tensor:
                    self._kept_sums[name] = checksum(tensor)
            now = plain_attributes(self._own_model())
            self._leaves_attributes |= any(now.get(k, v) != v for k, v in self._plain.items())
            self._kept, self._plain = {}, {}
        if self._repeats():
            self._start_numbers |= self._numbers.settle()
        if self._is_first and self._repeats():
            self._is_first = False
            self._starts |= self._originals.end(self._written)

    @property
    def writes(self) -> bool:
        """True if a forward has written anything that a later forward may read.

        Statistics do not count.
        """
        written = self._written.keys() - self._statistics
        return bool(written or self._kept_sums or self._leaves_attributes)

    def check_repeated(self, module: nn.Module) -> None:
        """Check that recomputing a module's forward wrote the same values into its parameters.

        Raises:
            ApplyError: A parameter got other values, such as a moving average of weights, which
                moves twice.
        """
        inside = {id(owner) for owner in module.modules()}
        for name, left in self._written.items():
            place = self._places[name]
            if place.is_buffer or id(place.owner) not in inside:
                continue
            self._reset_memory(place)
            if left is None or not self._is_due():
                continue
            if not is_close(sample_of(place.tensor), left.sample):
                raise ApplyError(write_problems.second_write_problem(place))

    def _own_model(self) -> nn.Module:
        model = self._model()
        assert model is not None  # Its own hook called this.
        return model

    # Across ranks.

    def _group(self) -> dist.ProcessGroup:
        return submesh(self._mesh, GRADIENT_AXES, flat=True).get_group()

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer has parameters of the model.

        The result is cached, and computed again in steps 1, 2, 4, 8, ...
        """
        if optimizer not in self._optimizers or is_due(self._steps + 1):
            optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._optimizers[optimizer] = any(
                id(p) in optimized for p in self._own_model().parameters()
            )
        return self._optimizers[optimizer]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what forwards wrote on the ranks of the data axes and cp.

        Buffers that differ become statistics, which take the first rank's values before each
        forward under FSDP2; the user is warned.

        Raises:
            ApplyError: Ranks wrote different values into one parameter, or into a tensor from which
                the output was computed. The error is raised on every rank.
        """
        if not self._trains(optimizer):
            return
        self._steps += 1
        if not is_due(self._steps) or self.plan.mesh.size(*GRADIENT_AXES) == 1:
            return
        notes = {n: self._note(n) for n in self._written if self._places[n].exists}
        every = gathered({**notes, **self._kept_sums}, self._group())
        names = sorted({name for each in every for name in each})
        differ = [name for name in names if len({each.get(name) for each in every}) > 1]
        wrong = [n for n in differ if n in self._places and not self._places[n].is_buffer]
        if wrong:
            raise ApplyError(write_problems.rank_problem(self._places[wrong[0]], len(wrong)))
        for name in differ:
            self._refuse_statistic(name, "ranks")
        found = [self._places[name] for name in differ if name in self._places]
        if self.plan.assignment.wrapper == "units":
            self._shared |= {place.name: place for place in found}
        new = [place.name for place in found if place.name not in self._statistics]
        self._statistics.update(new)
        if dist.get_rank() == 0:
            write_problems.warn(new, "ranks")

    def _refuse_statistic(self, name: str, between: str) -> None:
        """Raise if the output depends on a tensor whose written values depend on the samples.

        `batch: {per_rank: true}` in the plan allows this.

        Args:
            name: Name of the tensor.
            between: "ranks" or "microbatches", between which the written values differ.
        """
        allowed = self.plan.spec.batch.per_rank
        if name in self._reached and name not in self._statistics and not allowed:
            raise ApplyError(write_problems.statistic_problem(name, between))

    def _note(self, name: str) -> int | None:
        """Return a checksum of the values that this rank wrote; None if there is none yet."""
        place, left = self._places[name], self._written[name]
        # A unit's parameter is sharded again by now, so use the checksum of the gathered values.
        if place.unit is not None:
            return None if left is None else left.checksum
        return checksum(local_of(place.tensor))


_by_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ForwardWrites]]
_by_model = weakref.WeakKeyDictionary()


def watch_forward_writes(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Register hooks that handle the tensors that a model's forward writes.

    The module docstring describes the handling. A compiled model gets no hooks.

    Args:
        model: The user's module or a pipeline stage, not wrapped yet: these hooks must run after
            FSDP2's hook gathers a unit and before it frees the unit.
        plan: The plan to apply to the model.
        mesh: The DeviceMesh that the plan is applied on.
    """
    if not compiles(model, plan):
        ForwardWrites(model, plan, mesh)


def writes_in_forward(model: nn.Module) -> bool:
    """Return True if a forward of this model has written anything that a later one may read.

    Statistics, such as the running statistics of norms, do not count.
    """
    writes = _of(model)
    return writes is not None and writes.writes


def _of(model: nn.Module) -> ForwardWrites | None:
    found = _by_model.get(model)
    return None if found is None else found()


def set_microbatches(model: nn.Module, accumulate: int) -> None:
    """Follow a change of the microbatches over which a model accumulates gradients.

    The watch for several microbatches begins with the first forward that is one of several.
    """
    writes = _of(model)
    if writes is not None:
        writes.plan = replace(writes.plan, accumulate=accumulate)


def begin_microbatch(model: nn.Module, number: int) -> None:
    """Set the number, from 0, of the microbatch that the next forward of this model runs."""
    writes = _of(model)
    if writes is not None:
        writes.microbatch = number


def before_backward(model: nn.Module, number: int) -> None:
    """Prepare written parameters for the backward of a microbatch if later forwards ran before."""
    writes = _of(model)
    if writes is not None:
        writes.before_backward(number)


def refuse_second_writes(module: nn.Module) -> None:
    """Raise if a forward just recomputed in backward wrote other values into a parameter.

    Args:
        module: The module whose forward was recomputed.
    """
    for found in tuple(_by_model.values()):
        writes = found()
        if writes is not None:
            writes.check_repeated(module)
