"""The keys of plan.yaml in one table: the default of each, and whether the planner may choose it.

Every command uses the default of a key that the plan leaves out, unless a valid lock of
`meshplan plan` has a value for it. A key that is `auto` needs the planner in every command.
docs/reference/plan.md shows this table, beside what each key means (`meanings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.layout.mesh import AXES
from meshplan.spec.spec import AUTO, ActivationCheckpointing, Context, HardwareSpec, Pipeline, Spec


@dataclass(frozen=True, slots=True)
class PlanKey:
    """One key of plan.yaml.

    Args:
        path: Dotted path of the key, as in plan.yaml.
        default: The value if the key is left out, in words.
        chosen: If True, `meshplan plan` chooses the key if it is left out.
    """

    path: str
    default: str
    chosen: bool = False


def _word(value: Any) -> str:
    """Return a value as it is written in plan.yaml."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


_SPEC: Final = Spec()
_HARDWARE: Final = HardwareSpec(gpus_per_node=1)
OBJECTIVE: Final = "time"
TIME_LIMIT_S: Final = 30.0
KEEP: Final = 3
"""Defaults of `solve`: the objective, the time limit in seconds, and how many alternative plans are
kept beside the best one.
"""

KEYS: Final[tuple[PlanKey, ...]] = (
    PlanKey("hardware.nodes", _word(_HARDWARE.nodes)),
    PlanKey("hardware.headroom", f"{_HARDWARE.headroom:g}"),
    PlanKey("hardware.host_memory", "an assumed size, which the answer states"),
    PlanKey("mesh", "all ranks along the axes of the strategy", True),
    *(PlanKey(f"mesh.{axis}", "1", True) for axis in AXES),
    PlanKey("strategy", "implied by the mesh axes: ddp, full_shard or hybrid_shard", True),
    PlanKey("precision", "the model's own dtypes"),
    PlanKey("batch.micro", "global / data ranks / accumulate", True),
    PlanKey("batch.accumulate", "global / data ranks / micro, else 1", True),
    PlanKey("batch.global", "micro x accumulate x data ranks"),
    PlanKey("batch.per_rank", _word(_SPEC.batch.per_rank)),
    PlanKey("input.dtype", "int64 if the model's first layer is an Embedding, else float32"),
    PlanKey("activation_checkpointing", ActivationCheckpointing().mode, True),
    PlanKey("offload", "none", True),
    PlanKey("pipeline.schedule", Pipeline().schedule, True),
    PlanKey("pipeline.virtual", "1, or 2 for a schedule with several stages per rank", True),
    PlanKey("pipeline.microbatches", "the fewest that the schedule accepts", True),
    PlanKey("pipeline.split", "balanced by parameters", True),
    PlanKey("context.attention", Context().attention, True),
    PlanKey("context.balance", "true for all_gather, false for all_to_all"),
    PlanKey("experts.capacity", "1: an even share of tokens per ep rank"),
    PlanKey("tp_plan", _SPEC.tp_plan, True),
    PlanKey("sequence_parallel", _word(_SPEC.sequence_parallel), True),
    PlanKey("loss", _SPEC.loss),
    PlanKey("loss_parallel", _word(_SPEC.loss_parallel)),
    PlanKey("loss_chunks", _word(_SPEC.loss_chunks), True),
    PlanKey("sync_batchnorm", _word(_SPEC.sync_batchnorm)),
    PlanKey("compile", _word(_SPEC.compile)),
    PlanKey("ddp", "PyTorch's defaults"),
    PlanKey("clip_grad_norm", _word(_SPEC.clip_grad_norm)),
    PlanKey("optimizer", _SPEC.optimizer),
    PlanKey("allocator", _SPEC.allocator, True),
    PlanKey(
        "profile",
        "hf-eager for a model of transformers on a GPU that its runs had, in their dtype; else "
        "generic",
    ),
    PlanKey("solve.objective", OBJECTIVE),
    PlanKey("solve.robust", "none"),
    PlanKey("solve.time_limit", f"{TIME_LIMIT_S:g}s"),
    PlanKey("solve.keep", f"{KEEP}"),
    PlanKey("rules", "none"),
)

FREEABLE: Final = tuple(key.path for key in KEYS if key.chosen)
"""Paths of the keys that `--free` may leave to the planner even if the plan states them."""


def check_free(keys: Sequence[str]) -> None:
    """Raise an error if `--free` names keys that the planner does not choose.

    Raises:
        SpecError: Some of the keys are not chosen by the planner.
    """
    unknown = [key for key in keys if key not in FREEABLE]
    if unknown:
        fix = f"free one of {', '.join(FREEABLE)}"
        raise SpecError([Problem(f"'{key}' is not a key that the planner chooses",
                                 Origin("--free"), fix) for key in unknown])  # fmt: skip


def freed(keys: Sequence[str]) -> dict[str, Any]:
    """Return the overrides, by path, that leave keys to the planner; None removes the statement."""
    return {key: AUTO if key.startswith("mesh") else None for key in keys}
