"""`PipelinedModule`: this rank's stages as one `nn.Module`, with the fqns of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from meshplan.assign.base.types import Stages
from meshplan.errors import ApplyError, Problem
from meshplan.layout.schedules import SCHEDULES, actions, forward_only, released
from meshplan.model.graph import around
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.data.data import set_gradient_sync
from meshplan.runtime.apply.pipeline.answer import as_inputs, broadcast_output
from meshplan.runtime.apply.pipeline.function import apply_to_stages
from meshplan.runtime.apply.pipeline.program import make_program
from meshplan.runtime.apply.pipeline.run import (
    InputForm,
    PipelineStep,
    RemoteFailure,
    StageRuntime,
    end_split_backward,
)
from meshplan.runtime.apply.pipeline.shared import SharedTensors
from meshplan.runtime.base.batch import as_arguments, chunked
from meshplan.runtime.base.fake_mode import numbers
from meshplan.runtime.base.mesh import device, gathered, submesh
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.watch.guard import guarded, note_forward, ranks_of_forward
from meshplan.state.held import plain_name
from meshplan.traffic.sequence import SequenceCuts

_MISSING: Final = object()


class PipelinedModule(nn.Module):
    """This rank's stages of a model.

    Its parameters, buffers and state dict are those that this rank stores, under their names in
    the model. If two stages of this rank have copies of one tensor, the second copy is named
    "NAME@stage3" and left out of the state dict. Train the model with `meshplan.train_step` or
    `step`. With gradients disabled, calling it returns the output on every rank, and `eval_step`
    returns the output on the ranks of the last stage only.

    Args:
        skeleton: The whole model with its parameters on meta, used to record forwards.
        parts: This rank's stages, by stage index.
        plan: The plan of the whole model.
        mesh: The live DeviceMesh.
        names: Keys of the whole model's state dict, in order.

    Attributes:
        watch_batch: Called with (inputs, targets) of every `step`, to compare them across ranks.
        group: The ranks along pp.
        shared: Parameters that several stages hold.
        is_recording: True while a forward of the skeleton is recorded.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        parts: dict[int, StageRuntime],
        *,
        plan: Plan,
        mesh: DeviceMesh,
        names: tuple[str, ...],
    ) -> None:
        super().__init__()
        stages = plan.assignment.stages
        assert stages is not None
        self.training = skeleton.training
        self._hidden = (skeleton,)  # In a tuple, so that it is no submodule.
        self._parts = parts
        self.plan, self.names, self._stages = plan, names, stages
        self.watch_batch: Callable[[Any, Any], None] = lambda inputs, targets: None
        self._schedule = SCHEDULES[stages.schedule]
        self.group = submesh(mesh, ("pp",)).get_group()
        self._place = dist.get_rank(self.group)
        along = (mesh.mesh_dim_names or ()).index("pp")
        self._peers = tuple(mesh.mesh.select(along, self._place).flatten().tolist())
        ranks, virtual = stages.num_ranks, stages.virtual
        orders = actions(self._schedule, ranks, virtual, stages.microbatches)
        self._train, self._released = orders[self._place], released(orders, self._place)
        self._eval = forward_only(self._schedule, ranks, virtual)[self._place]
        self._mates = ranks_of_forward(plan)
        self._forms: dict[Any, InputForm] = {}
        self.is_recording = False
        self._attributes = ""
        """Text of the attributes that `with_attributes` has changed."""
        self._agreed: set[tuple[bool, bool]] = set()
        """(Training mode, gradients enabled) of the passes that ended on all ranks."""
        self.shared = SharedTensors(plan, mesh, {s: p.module for s, p in parts.items()})

    @property
    def stages(self) -> dict[int, nn.Module]:
        """The stage modules of this rank, by stage index."""
        return {stage: part.module for stage, part in self._parts.items()}

    @property
    def pipeline(self) -> Stages:
        """The assignment of units and tensors to stages and of stages to ranks."""
        return self._stages

    @property
    def has_output(self) -> bool:
        """True if this rank holds the last stage."""
        return self._stages.num - 1 in self._parts

    @property
    def stage_modules(self) -> list[nn.Module]:
        """The modules of this rank's stages, each with the fqns of the whole model."""
        return [part.module for part in self._parts.values()]

    @guarded()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for a whole batch on every rank along pp, without gradients.

        Raises:
            ApplyError: Gradients are enabled. A pipeline interleaves the forwards and backwards of
                many microbatches, so no backward can start from the output of a forward.
        """
        if torch.is_grad_enabled():
            raise ApplyError(
                Problem(
                    "a pipelined model was called with gradients enabled, but its schedule "
                    "interleaves the forward and backward of the microbatches",
                    fix="call meshplan.train_step(model, ...) or model.step(inputs, targets, "
                    "loss_fn) to train, and model(inputs) inside torch.no_grad() for the output",
                )
            )
        inputs = as_inputs(self._hidden[0], args, kwargs)
        output = self.eval_step(inputs)
        return broadcast_output(
            output,
            self._form(inputs).program.answer,
            self.group,
            is_source=self.has_output,
            source=dist.get_global_rank(self.group, self._stages.rank_of(self._stages.num - 1)),
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            hidden = vars(self).get("_hidden")
            if hidden is None or not hasattr(hidden[0], name):
                raise
        if name == "generate":
            raise AttributeError(
                "a pipelined model cannot generate, because each token would pass through all "
                "stages: save the model with meshplan.save_pretrained, and generate from it under "
                "a plan without pp, or in one process"
            )
        raise AttributeError(
            f"'{name}' of the model is not on this rank, which holds only some pipeline stages: "
            "use meshplan.train_step(model, ...) to train, model.eval_step(inputs) for the output, "
            "meshplan.full_state_dict(model) for all tensors, model.stages for this rank's modules"
        )

    @property
    def skeleton(self) -> nn.Module:
        """The whole model with its parameters on meta, used to record forwards."""
        return self._hidden[0]

    def record_from(self, skeleton: nn.Module) -> None:
        """Record forwards from another module with the same parameters on meta."""
        self._hidden = (skeleton,)

    @guarded("step")
    def step(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        scale: float = 1.0,
        is_last: bool = True,
        number: int = 0,
    ) -> torch.Tensor:
        """Run forward and backward of one batch in microbatches; gradients accumulate.

        Args:
            inputs: This rank's inputs, the same on every rank along pp.
            targets: The second argument of `loss_fn`, split along dim 0 like the inputs.
            loss_fn: Maps (output, targets) of a microbatch to the mean loss over its samples.
            scale: Multiplies the gradients.
            is_last: If True, the optimizer steps after this batch.
            number: Index of this batch among the batches of one optimizer step, from 0.

        Returns:
            The mean loss over this batch in float64, the same on every rank along pp.
        """
        note_forward(self._mates, is_training=True)
        self.watch_batch(inputs, targets)  # Compares the ranks' batches now and then.
        count = self._stages.microbatches
        cut = chunked(inputs, count)
        wanted = chunked(targets, count)
        form = self._form(cut[0])
        total = torch.zeros((), dtype=torch.float64, device=device())

        def finish(output: Any, m: int) -> torch.Tensor:
            nonlocal total
            loss = loss_fn(output, wanted[m])
            total += loss.detach().double()
            return loss * (scale / count)

        run = PipelineStep(
            self._parts,
            schedule=self._schedule,
            group=self.group,
            peers=self._peers,
            form=form,
            microbatches=[as_arguments(part) for part in cut],
            finish=finish,
            sync=lambda part, is_last_here: self._sync(part, is_last and is_last_here),
            before=number * count,
            released=self._released,
        )
        run.play(self._train)
        self._agree(run, form)
        if is_last:
            if self._schedule.splits_backward:
                for part in self._parts.values():
                    end_split_backward(part)
            self.shared.add_gradients()
        dist.all_reduce(total, group=self.group)
        return total / count

    @guarded("eval_step")
    def eval_step(self, inputs: Any) -> Any:
        """Return the output for a whole batch, without gradients, in the model's current mode.

        Returns:
            The model's output on the ranks of the last stage (`has_output`), None on others. To get
            the output on every rank, call the model itself.
        """
        note_forward(self._mates, is_training=False)
        outputs: list[Any] = []

        def finish(output: Any, m: int) -> None:
            outputs.append(output)

        with torch.no_grad():
            form = self._form(inputs)
            run = PipelineStep(
                self._parts,
                schedule=self._schedule,
                group=self.group,
                peers=self._peers,
                form=form,
                microbatches=[as_arguments(inputs)],
                finish=finish,
            )
            run.play(self._eval)
            self._agree(run, form)
        return outputs[0] if outputs else None

    @contextmanager
    def with_attributes(self, changed: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
        """Run forwards inside with other attributes of modules; enter it on all ranks along pp.

        Args:
            changed: New values, by module and attribute, such as a flag that disables an adapter.
        """
        before: list[tuple[dict[str, Any], str, Any]] = []
        for whole in (self._hidden[0], *self.stage_modules):
            for name, module in whole.named_modules():
                own = vars(module)
                for key, value in changed.get(plain_name(name), {}).items():
                    before.append((own, key, own.get(key, _MISSING)))
                    own[key] = value
        self._attributes = repr(changed) if changed else ""
        try:
            yield
        finally:
            self._attributes = ""
            for own, key, value in before:
                if value is _MISSING:
                    own.pop(key)
                else:
                    own[key] = value

    def _sync(self, part: StageRuntime, is_last: bool) -> None:
        if not self._schedule.splits_backward:
            set_gradient_sync(part.module, part.plan, is_last)
        elif isinstance(part.module, FSDPModule):
            # A split backward triggers none of FSDP2's hooks at its end, so `end_split_backward`
            # reduces the gradients once per step.
            part.module.set_is_last_backward(False)
            part.module.set_reshard_after_backward(False)
            part.module.set_requires_gradient_sync(False)

    def record(self, inputs: Any) -> None:
        """Record the model's forward ahead of a `step` with such inputs."""
        self._form(chunked(inputs, self._stages.microbatches)[0])

    def _form(self, inputs: Any) -> InputForm:
        """Return the `InputForm` of these inputs; record the forward if their form is new."""
        key = (self.training, torch.is_grad_enabled(), self._attributes, _form_of(inputs))
        if key not in self._forms:
            self.is_recording = True
            try:
                program = make_program(self._hidden[0], self._stages, inputs)
            finally:
                self.is_recording = False
            self._forms[key] = InputForm(program, SequenceCuts(self.plan, program.flow))
        return self._forms[key]

    def _agree(self, run: PipelineStep, form: InputForm) -> None:
        """Raise on every rank if a pass failed on one rank, or if a stage's output contained NaN.

        In the first pass in a mode, all ranks exchange their flags; later only the ranks along pp
        do, since data ranks may have other numbers of samples, and so meet a form at other times.
        That suffices: either all ranks with the same stages record a failure, or `PipelineStep`
        raised it at once, or `guarded` tells the others.
        """
        mode = self.training, torch.is_grad_enabled()
        group = self.group if mode in self._agreed else None
        self._agreed.add(mode)
        form.is_new = False
        flags = torch.tensor([run.failure is not None, run.has_poison], device=device()).float()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        failed, has_poison = numbers(flags, [False, False])
        if failed:
            self._forms.clear()  # Exchanged shapes may be incomplete.
            self._agreed.clear()
            is_own = run.failure is not None and not isinstance(run.failure, RemoteFailure)
            own = f"{type(run.failure).__name__}: {run.failure}" if is_own else ""
            failures = gathered((dist.get_rank(), own), group)
            if is_own:
                assert run.failure is not None
                raise run.failure
            rank, text = next((rank, text) for rank, text in failures if text)
            raise ApplyError(Problem(f"the step failed on rank {rank}: {text}"))
        if has_poison:
            raise ApplyError(
                Problem(
                    "the output of a stage or the loss contains NaN: either the model itself "
                    "computes NaN, or a stage uses a tensor that was not sent to it",
                    self._stages.reason.origin,
                    "run the model in one process; if its output is finite there, cut the pipeline "
                    "elsewhere",
                )
            )

    # Overrides of `nn.Module`.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) for the parameters of this rank; all of them are the stages'."""
        if not recurse:
            return
        yield from self._named("named_parameters", prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, buffer) for the buffers of this rank; all of them are the stages'."""
        if not recurse:
            return
        yield from self._named("named_buffers", prefix, remove_duplicate)

    def _named(self, method: str, prefix: str, remove_duplicate: bool) -> Any:
        taken: dict[str, int] = {}
        found: set[int] = set()
        for stage, part in self._parts.items():
            listed = getattr(part.module, method)("", True, remove_duplicate)
            for name, tensor in listed:
                if remove_duplicate and id(tensor) in found:
                    continue
                found.add(id(tensor))
                full = name if taken.setdefault(name, stage) == stage else f"{name}@stage{stage}"
                yield (f"{prefix}.{full}" if prefix else full), tensor

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, and the modules that run in this rank's stages by their names.

        Those between units run in every stage. The stages' own modules have the name of the model.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        taken: dict[str, int] = {}
        for stage, part in self._parts.items():
            runs = _runs_in(stage, self._stages)
            for name, module in part.module.named_modules(memo, "", remove_duplicate):
                if not runs(plain_name(name)):
                    continue
                full = f"{prefix}.{name}" if prefix and name else prefix or name
                is_first = taken.setdefault(name, stage) == stage
                yield full if is_first else f"{full}@stage{stage}", module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors of this rank, by their names in the model."""
        out: dict[str, Any] = {}
        for part in self._parts.values():
            for name, value in part.module.state_dict(*args, **kwargs).items():
                out.setdefault(name, value)
        return out

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the tensors of this rank from a state dict, which may contain other tensors too.

        Raises:
            ApplyError: With `strict`, a tensor of this rank is missing.
        """
        for part in self._parts.values():
            own = part.module.state_dict(keep_vars=True)
            missing = [name for name in own if name not in state_dict]
            if missing and strict:
                raise ApplyError(Problem(f"{missing[0]} is not in the state dict"))
            given = {name: state_dict[name] for name in own if name in state_dict}
            part.module.load_state_dict(given, strict=strict, assign=assign)
        return nn.modules.module._IncompatibleKeys([], [])

    def train(self, mode: bool = True) -> PipelinedModule:
        """Set training or evaluation mode of every stage and of the skeleton; call on all ranks.

        In the next pass, stages tell each other again which of the tensors they send need a
        gradient. That changes if parameters are frozen or unfrozen.
        """
        self.training = mode
        for form in self._forms.values():
            form.metas.clear()
        self._hidden[0].train(mode)
        for part in self._parts.values():
            part.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> PipelinedModule:
        """Call a function on each module of this rank's stages; call it on all ranks.

        Raises:
            ApplyError: The function drew random numbers, which would be alike on all stages.
        """
        return apply_to_stages(self, self.stage_modules, fn)

    def requires_grad_(self, requires_grad: bool = True) -> PipelinedModule:
        """Freeze or unfreeze every parameter; call it on all ranks."""
        super().requires_grad_(requires_grad)
        return self.train(self.training)


def _runs_in(stage: int, stages: Stages) -> Callable[[str], bool]:
    """Return a test of modules by name, True unless they run in other stages only."""
    own = {unit for unit, place in stages.units if place == stage}
    every = {unit for unit, _ in stages.units}
    around_own = {each for unit in own for each in around(unit)}
    around_any = {each for unit in every for each in around(unit)}

    def runs(name: str) -> bool:
        if name in around_any:
            return not name or name in around_own
        above = [each for each in around(name) if each in every]
        return not above or any(each in own for each in above)

    return runs


def _form_of(inputs: Any) -> Any:
    """Return a key of the form of the inputs: structure, shapes, dtypes, values of non-tensors."""
    args, kwargs = as_arguments(inputs)
    tensors = [(p, t.shape, t.dtype) for p, t in (*tensors_in(args), *tensors_in(kwargs))]
    return (tuple(tensors), repr(_without_tensors((args, kwargs))))


def _without_tensors(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return "tensor"
    if isinstance(item, Mapping):
        return {key: _without_tensors(part) for key, part in item.items()}
    if isinstance(item, tuple | list):
        return [_without_tensors(part) for part in item]
    return item
