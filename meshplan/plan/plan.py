"""The `Plan`: a spec applied to one model and one mesh; later packages read it, never change it."""

from __future__ import annotations

import copyreg
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshplan.assign import Assignment, assign
from meshplan.assign.base.cascade import Cascade
from meshplan.assign.base.missing_axis import rules_without_axis
from meshplan.assign.base.not_yet import not_yet
from meshplan.errors import PlanError, Problem, UnstatedError
from meshplan.layout.mesh import DATA_AXES, GRADIENT_AXES, Mesh
from meshplan.model.graph import ModelGraph
from meshplan.model.rehearsal import Rehearser
from meshplan.shown import shown, view
from meshplan.spec.compatibility import clashes
from meshplan.spec.contradictions import split_batch
from meshplan.spec.spec import Spec
from meshplan.spec.strategies import resolve_mesh

if TYPE_CHECKING:
    from meshplan.pictures.base.types import Picture


def unstated(spec: Spec, micro: int | None, *, reads_tokens: bool) -> list[Problem]:
    """Return a problem for each batch size that memory depends on and the plan does not state.

    Args:
        spec: The plan's declarations.
        micro: Samples of one microbatch on one rank; None if not stated.
        reads_tokens: True if the model's input is a sequence of tokens.
    """
    problems = []
    if micro is None:
        what = "the plan states no microbatch size, on which the memory of a rank depends"
        problems.append(Problem(what, spec.origin("batch"), "add batch: {micro: 1}"))
    if reads_tokens and spec.batch.seq_len is None and spec.input is None:
        what = "the plan states no sequence length, on which the memory of a rank depends"
        problems.append(Problem(what, spec.origin("batch"), "add batch: {seq_len: 2048}"))
    return problems


# Plans and specs are sent between processes, and Python cannot pickle the `MappingProxyType`s in
# them.
def _read_only(items: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(items)


copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (dict(mapping),)))


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A spec applied to one model and one mesh.

    Args:
        spec: The declarations of plan.yaml.
        graph: The model.
        assignment: Every layout, each with the line of the plan that decided it.
        accumulate: Microbatches per optimizer step over which gradients are accumulated.
        micro: Samples per rank and microbatch; None if the plan does not determine it.
    """

    spec: Spec
    graph: ModelGraph
    assignment: Assignment
    accumulate: int = 1
    micro: int | None = None
    by_stage: dict[int, Plan] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Cache of the plans that `restrict` made, by stage."""

    @property
    def mesh(self) -> Mesh:
        return self.assignment.mesh

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.mesh.size(*DATA_AXES)

    @property
    def samples(self) -> int:
        """Samples of a step, summed over ranks; 0 if the plan states no batch size."""
        return (self.micro or 0) * self.accumulate * self.num_data_ranks

    @property
    def num_microbatches(self) -> int:
        """Number of forwards of a rank in one optimizer step: accumulation x pipeline."""
        stages = self.assignment.stages
        return self.accumulate * (1 if stages is None else stages.microbatches)

    def fed(self) -> tuple[int, int]:
        """Return (samples of a microbatch on one rank, tokens per sample).

        Raises:
            UnstatedError: The plan does not state them.
            PlanError: The plan states the sequence length only as a shape in `input`.
        """
        if problems := unstated(self.spec, self.micro, reads_tokens=True):
            raise UnstatedError(problems)
        if self.micro is None or self.spec.batch.seq_len is None:
            what = "the plan states the sequence length only in the example input"
            fix = "add batch: {seq_len: 2048}"
            raise PlanError(Problem(what, self.spec.origin("input"), fix))
        return self.micro, self.spec.batch.seq_len

    @property
    def num_parts(self) -> int:
        """Number of parts of one step's batch: ranks with different tokens x microbatches."""
        return self.mesh.size(*GRADIENT_AXES) * self.num_microbatches

    @property
    def assumed_precision(self) -> str:
        """The precision in words, if the plan states none and computes in float32; else ""."""
        is_stated = "precision" in self.spec.origins or any(r.precision for r in self.spec.rules)
        tensors = self.assignment.tensors.values()
        computed = {p.compute_dtype for p in tensors if not p.info.is_buffer}
        if is_stated or computed != {"float32"}:
            return ""
        return "32-true, the default: everything is computed in float32"

    def draw(self, what: str, **options: Any) -> Picture:
        """Return a picture of the plan; for the arguments see `pictures.main.draw`."""
        picture: Picture = view("draw")(self, what, **options)
        return picture

    def _repr_html_(self) -> str:
        html: str = view("plan_html")(self)
        return html

    def digest(self) -> str:
        """Return a hash of all decisions: ranks with equal digests run the same training step."""
        text = json.dumps(self._decisions(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _decisions(self) -> Mapping[str, Any]:
        a = self.assignment
        return {
            "mesh": [(axis.name, axis.size) for axis in a.mesh],
            "loans": [[loan.name, loan.size, loan.within, loan.rest] for loan in a.mesh.loans],
            "wrapper": [a.wrapper, sorted(a.strategy.cuts), a.sequence_parallel],
            "crossings": [[c.module, c.path, c.change] for c in a.crossings],
            "context": [a.context.attention, a.context.balance] if a.context else None,
            "tensors": {
                fqn: [list(p.info.shape), p.info.dtype, list(p.info.aliases), p.info.trainable,
                      str(p.stored), str(p.gradient), p.dtype, p.compute_dtype,
                      list(p.gathered_axes), p.reduced_alone, p.unit, p.is_local]
                for fqn, p in a.tensors.items()
            },
            "units": {
                fqn: [list(u.shard_axes), u.reshard_after_forward, str(u.precision),
                      u.casts_inputs, u.on_host]
                for fqn, u in a.units.items()
            },
            "styles": {
                fqn: [u.style.name, u.style.input[0], u.style.output[1], u.axis,
                      [(p.size, p.parts) for p in u.pieces], u.is_written]
                for fqn, u in a.styles.items()
            },
            "attributes": [[x.module, x.name, x.whole, x.local] for x in a.attributes],
            "experts": {fqn: [u.num_experts, u.capacity] for fqn, u in a.experts.items()},
            "recompute": {fqn: str(r.policy) for fqn, r in a.recompute.items()},
            "host_activations": list(a.host_activations),
            "compiled": list(a.compiled),
            "chunked_loss": a.chunked_loss and [a.chunked_loss.head, a.chunked_loss.chunks],
            "synchronized": list(a.synchronized),
            "stages": a.stages and [
                a.stages.schedule, a.stages.num_ranks, a.stages.virtual, a.stages.microbatches,
                list(a.stages.units), list(a.stages.free), sorted(a.stages.tensors.items()),
            ],
            "apply": [[fqn, code] for fqn, code, _ in a.apply],
            "allocator": self.spec.allocator,
            "step": [self.accumulate, self.micro, self.spec.clip_grad_norm, dict(self.spec.ddp)],
        }  # fmt: skip


def make_plan(
    spec: Spec,
    graph: ModelGraph,
    *,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    rehearse: Rehearser | None = None,
) -> Plan:
    """Return the plan that a spec declares for a model.

    Args:
        spec: The declarations of plan.yaml.
        graph: The model.
        world_size: Number of ranks of the running job; None uses `hardware:` or the mesh itself.
        gpus_per_node: Number of ranks on one machine of the running job; None uses `hardware:`.
        rehearse: Runs a live model on local shapes, as one rank of tp (`runtime.trace.rehearse`);
            needed for `tp_plan: auto`.

    Raises:
        PlanError: The spec does not work for this model; the error has every problem found.
    """
    assignment = assign(
        spec, graph, world_size=world_size, gpus_per_node=gpus_per_node, rehearse=rehearse
    )
    accumulate, micro, problems = split_batch(spec, assignment.mesh.size(*DATA_AXES))
    stages = assignment.stages
    if stages is not None and micro is not None and micro % stages.microbatches:
        what = f"{micro} samples cannot be divided into {stages.microbatches} pipeline microbatches"
        fix = (
            f"make batch.micro a multiple of {stages.microbatches}, or change pipeline.microbatches"
        )
        problems.append(Problem(what, spec.origin("batch.micro"), fix))
    if problems:
        raise PlanError(problems)
    return Plan(spec=spec, graph=graph, assignment=assignment, accumulate=accumulate, micro=micro)


def check_adafactor(plan: Plan) -> None:
    """Raise a PlanError if a plan with torch's Adafactor shards parameters.

    Adafactor of torch 2.13 computes norms of rows and columns in place, which DTensor lacks.
    """
    if plan.spec.optimizer == "adafactor" and plan.assignment.shards_parameters:
        what = "torch's Adafactor does not support sharded parameters, and this plan shards them"
        fix = "use strategy: ddp in single precision, or another optimizer"
        raise PlanError(Problem(what, plan.spec.origin("optimizer"), fix))


def check_rules(spec: Spec, graph: ModelGraph) -> tuple[list[Problem], list[Problem]]:
    """Return (problems, warnings) with the patterns of the rules, and with nothing else."""
    cascade = Cascade(spec, graph)
    return cascade.problems, cascade.partly_unmatched()


def problems_without_model(spec: Spec) -> list[Problem]:
    """Return the problems of a spec that are certain without a model; rules are not matched."""
    problems = [*not_yet(spec), *clashes(spec)]
    try:
        mesh, _ = resolve_mesh(spec)
        problems += split_batch(spec, mesh.size(*DATA_AXES))[2]
        problems += rules_without_axis(spec, mesh)
    except PlanError as error:
        return [*error.problems, *problems]
    return problems
