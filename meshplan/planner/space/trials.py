"""Make trial specs: plans with a single choice, such as tp, that test if the model allows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshplan.cost.grid import ACTIVATIONS_ON_HOST
from meshplan.layout.mesh import DATA_AXES
from meshplan.planner.space.cp import context_of
from meshplan.planner.space.ep import as_trial
from meshplan.planner.space.offload import as_stated
from meshplan.spec.spec import AUTO, Offload, Pipeline, Rule, Spec


def data_axis(spec: Spec) -> str:
    """Return the data axis of trials: the one along which the plan's strategy spreads the ranks."""
    return "dp_replicate" if spec.strategy == "ddp" else "dp_shard"


def with_axes(
    spec: Spec,
    sizes: Mapping[str, int],
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool | None = None,
    experts: tuple[str, ...] = (),
) -> Spec:
    """Return a trial spec: the plan on this mesh, with the other choices at neutral values.

    Args:
        spec: The spec of the plan file.
        sizes: Size of each axis, by name.
        sequence_parallel: If True, tp shards activations along the sequence.
        loss_parallel: If True, tp shards the loss along the vocabulary; None to use what the plan
            states.
        experts: Patterns of the modules whose experts ep shards.
    """
    spec = as_trial(spec, sizes, experts)
    has_tp = sizes.get("tp", 1) > 1
    is_cut = any(size > 1 for axis, size in sizes.items() if axis not in DATA_AXES)
    tp_plan = spec.tp_plan if has_tp else "none"
    if has_tp and tp_plan == "none" and "tp_plan" not in spec.origins:
        tp_plan = AUTO
    return replace(
        spec,
        strategy=None,
        hardware=None,
        offload=Offload(),
        # With data axes alone, the trial may have another wrapper than the plan.
        ddp=spec.ddp if is_cut else MappingProxyType({}),
        tp_plan=tp_plan,
        sequence_parallel=sequence_parallel and has_tp,
        loss_parallel=(spec.loss_parallel if loss_parallel is None else loss_parallel) and has_tp,
        loss_chunks=1 if spec.loss_chunks == AUTO else spec.loss_chunks,
        allocator="default" if spec.allocator == AUTO else spec.allocator,
        batch=replace(spec.batch, micro=sizes.get("pp", 1), accumulate=None, global_=None),
        activation_checkpointing=replace(spec.activation_checkpointing, mode="none", budget=None),
        pipeline=_as_trial(spec.pipeline) if "pp" in sizes else None,
        context=context_of(spec) if sizes.get("cp", 1) > 1 else None,
        # The model of a trial may lack blocks that the rules match.
        rules=tuple(_rule_as_trial(rule, sizes) for rule in spec.rules),
    )


def with_offload(
    spec: Spec, what: int, *, pp: int = 1, ep: int = 1, experts: tuple[str, ...] = ()
) -> Spec:
    """Return a trial spec with this offload, on two data ranks.

    Args:
        spec: The spec of the plan file.
        what: Value of the grid's `offload`.
        pp: Size of pp.
        ep: Size of ep.
        experts: Patterns of the modules whose experts ep shards.
    """
    sizes = {"dp_shard": 2, "pp": pp, "ep": ep}
    spread = {axis: size for axis, size in sizes.items() if size > 1}
    trial = with_axes(spec, spread, experts=experts)
    policy = trial.activation_checkpointing
    if what & ACTIVATIONS_ON_HOST:
        policy = replace(policy, mode="full")
    return replace(trial, offload=as_stated(what), activation_checkpointing=policy)


def _rule_as_trial(rule: Rule, sizes: Mapping[str, int]) -> Rule:
    """Return the rule without its stage, and without what needs axes that the trial lacks.

    The rule becomes optional, so that it may match no module.
    """
    back = rule.reshard_after_forward
    if sizes.get("dp_shard", 1) == 1 or not isinstance(back, bool):
        back = None  # A number of ranks suits one mesh only.
    place = {axis: word for axis, word in rule.place.items() if axis in (*sizes, *DATA_AXES)}
    return replace(rule, optional=True, stage=None, reshard_after_forward=back, place=place)


def _as_trial(pipeline: Pipeline | None) -> Pipeline | None:
    """Return the pipeline settings without those that suit only one number of stages."""
    return pipeline and replace(pipeline, schedule="1F1B", virtual=1, microbatches=AUTO, split=AUTO)
