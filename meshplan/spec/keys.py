"""The keys of plan.yaml in one table: what each is where it is left out, and who may choose it.

A key that is left out has its default, in every verb, until `meshplan plan` has chosen it in a lock
that holds; `auto` leaves it to the planner, in every verb. docs/defaults.md is this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.layout.mesh import AXES
from meshplan.spec.spec import AUTO, ActivationCheckpointing, Context, HardwareSpec, Pipeline, Spec


@dataclass(frozen=True, slots=True)
class Key:
    """One row.

    Args:
        path: As in plan.yaml.
        default: What it is where it is left out, in words.
        chosen: Whether `meshplan plan` chooses it where it is left out.
    """

    path: str
    default: str
    chosen: bool = False


def _word(value: Any) -> str:
    """Return a value as plan.yaml has it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


_SPEC: Final = Spec()
_HARDWARE: Final = HardwareSpec(gpus_per_node=1)
OBJECTIVE: Final = "time"
TIME_LIMIT_S: Final = 30.0
KEEP: Final = 3
"""Defaults of `solve`."""

KEYS: Final[tuple[Key, ...]] = (
    Key("hardware.nodes", _word(_HARDWARE.nodes)),
    Key("hardware.headroom", f"{_HARDWARE.headroom:g}"),
    Key("hardware.host_memory", "assumed, and said"),
    Key("mesh", "all ranks along the axes of the strategy", True),
    *(Key(f"mesh.{axis}", "1", True) for axis in AXES),
    Key("strategy", "as the axes of the mesh: ddp, full_shard or hybrid_shard", True),
    Key("precision", "the model's own dtypes"),
    Key("batch.micro", "global / data ranks / accumulate", True),
    Key("batch.accumulate", "global / data ranks / micro, else 1", True),
    Key("batch.global", "micro x accumulate x data ranks"),
    Key("batch.per_rank", _word(_SPEC.batch.per_rank)),
    Key("input.dtype", "int64 if the model's first layer is an Embedding, else float32"),
    Key("activation_checkpointing", ActivationCheckpointing().mode, True),
    Key("offload", "none", True),
    Key("pipeline.schedule", Pipeline().schedule, True),
    Key("pipeline.virtual", "1, or 2 of a schedule with several stages a rank", True),
    Key("pipeline.microbatches", "the fewest that the schedule takes", True),
    Key("pipeline.split", "balanced by parameters", True),
    Key("context.attention", Context().attention, True),
    Key("context.balance", "as the kind of attention needs"),
    Key("experts.capacity", "an even share"),
    Key("tp_plan", _SPEC.tp_plan, True),
    Key("sequence_parallel", _word(_SPEC.sequence_parallel), True),
    Key("loss", _SPEC.loss),
    Key("loss_parallel", _word(_SPEC.loss_parallel)),
    Key("loss_chunks", _word(_SPEC.loss_chunks), True),
    Key("sync_batchnorm", _word(_SPEC.sync_batchnorm)),
    Key("compile", _word(_SPEC.compile)),
    Key("ddp", "PyTorch's own"),
    Key("clip_grad_norm", _word(_SPEC.clip_grad_norm)),
    Key("optimizer", _SPEC.optimizer),
    Key("allocator", _SPEC.allocator, True),
    Key("solve.objective", OBJECTIVE),
    Key("solve.time_limit", f"{TIME_LIMIT_S:g}s"),
    Key("solve.keep", f"{KEEP}"),
    Key("rules", "none"),
)

FREEABLE: Final = tuple(key.path for key in KEYS if key.chosen)
"""Keys that `--free` may give to the planner although the plan states them."""


def check_free(keys: Sequence[str]) -> None:
    """Refuse keys that nobody can leave to the planner.

    Raises:
        SpecError: There are any.
    """
    unknown = [key for key in keys if key not in FREEABLE]
    if unknown:
        fix = f"free one of {', '.join(FREEABLE)}"
        raise SpecError([Problem(f"'{key}' is nothing that the planner chooses",
                                 Origin("--free"), fix) for key in unknown])  # fmt: skip


def freed(keys: Sequence[str]) -> dict[str, Any]:
    """Return statements by path that leave keys to the planner; None takes a statement back."""
    return {key: AUTO if key.startswith("mesh") else None for key in keys}
