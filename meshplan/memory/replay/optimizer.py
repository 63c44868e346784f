"""What an optimizer takes for itself while it steps, and gives back.

Source: torch 2.13, torch/optim; each row was read off a traced step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshplan.assign import Assignment
from meshplan.errors import PlanError, Problem
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.optimizers import SHAPED_TENSORS
from meshplan.memory.answer.states import READ_BY_KERNELS, STEP_COUNTERS
from meshplan.memory.log.events import Term
from meshplan.memory.replay.loops import LOOPS, Stepped, play_loop
from meshplan.memory.replay.shards import offloads_params
from meshplan.memory.replay.writer import LogWriter
from meshplan.spec.spec import OPTIMIZER_STATES


@dataclass(frozen=True, slots=True)
class Steps:
    """How many times a parameter's bytes a step takes.

    Args:
        together: Of all parameters of one dtype at once (foreach): this many lists, each of which
            is held until those of the next dtype have theirs.
        alone: Of one parameter after the other (for loop): this many at once, of which the last
            is held until the next parameter has its own.
    """

    together: int
    alone: int


OPTIMIZERS: Final[Mapping[str, Steps]] = MappingProxyType(
    {
        "adamw": Steps(1, 2),  # The root of the second moment; also divided by its bias.
        "adam": Steps(1, 2),
        "adamw_fused": Steps(0, 0),  # One kernel reads and writes all in place.
        "adam_fused": Steps(0, 0),
        "rmsprop": Steps(1, 1),
        "adagrad": Steps(2, 1),  # The root, and the update.
        "sgd": Steps(0, 0),
        "sgd_momentum": Steps(0, 0),
        # One kernel for each tensor reads and writes all in place, scales too.
        # Source: bitsandbytes 0.45, csrc/kernels.cu, `kOptimizerStatic8bit2StateBlockwise`.
        "adamw_8bit": Steps(0, 0),
    }
)


_OF_MATRICES: Final = "muon"
"""Steps on these alone; AdamW takes all others."""
_OF_WHOLE_TENSORS: Final = frozenset({"adafactor", "muon"})
"""What they take depends on more of a tensor than how many elements a rank has."""


@dataclass(frozen=True, slots=True)
class Updated:
    """A parameter that the optimizer holds: its local part, unpadded, and whether on the host.

    Args:
        shape: Of the whole parameter.
    """

    fqn: str
    numel: int
    dtype: str
    on_host: bool = False
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


def check_optimizer(name: str, assignment: Assignment | None = None) -> None:
    """Refuse what is not in the tables.

    Args:
        assignment: What it is to step on; None for whatever a planner may come to.

    Raises:
        PlanError: Nothing is known of its step, or not of its step on parameters in parts.
    """
    if name not in OPTIMIZERS and name not in LOOPS:
        what = f"the replay of a step does not know what the optimizer {name} takes while it steps"
        fix = "trace the whole step instead, or use one of " + ", ".join((*OPTIMIZERS, *LOOPS))
        raise PlanError(Problem(what, fix=fix))
    if name in _OF_WHOLE_TENSORS and (assignment is None or _are_in_parts(assignment)):
        what = (
            f"the replay of a step does not know what DTensor gathers where {name} steps on "
            "parameters that lie in parts"
        )
        raise PlanError(Problem(what, fix="trace the whole step instead, or use strategy: ddp"))


def _are_in_parts(a: Assignment) -> bool:
    return a.wrapper == "units" or any(p.stored.axes for p in a.tensors.values())


def is_uniform(assignment: Assignment) -> bool:
    """Whether torch takes all parameters together: all plain or all DTensors, none on a host."""
    if offloads_params(assignment):
        return False
    placed = [p for p in assignment.tensors.values() if not p.info.is_buffer]
    in_units = assignment.wrapper == "units"
    return len({(in_units and p.unit is not None) or bool(p.stored.axes) for p in placed}) == 1


def states_of(param: Updated, name: str, *, has_host: bool = False) -> list[int]:
    """Bytes of each tensor that is kept of one parameter from the second step on."""
    are_here = not has_host or name in READ_BY_KERNELS
    tensors = SHAPED_TENSORS.get(name)
    if tensors is not None:
        kept = tensors(param.shape, param.numel, DTYPE_BYTES[param.dtype])
        return [*kept.here, *kept.counters * are_here]
    counters = STEP_COUNTERS.get(name, 0) if are_here else 0
    return [param.num_bytes] * OPTIMIZER_STATES[name] + [4] * counters


def step(writer: LogWriter, params: Sequence[Updated], name: str, *, foreach: bool) -> None:
    """Play one step over the parameters that have gradients."""
    if name in LOOPS:
        alone = [p for p in params if name != _OF_MATRICES or len(p.shape) == 2]
        play_loop(writer, (_stepped(p, name) for p in alone), name)
        params, name = [p for p in params if p not in alone], "adamw"
    if foreach:
        _together(writer, params, OPTIMIZERS[name].together)
    else:
        _alone(writer, params, OPTIMIZERS[name].alone)


def _stepped(param: Updated, name: str) -> Stepped:
    shape = param.shape if name in _OF_WHOLE_TENSORS else (param.numel,)
    return Stepped(shape, DTYPE_BYTES[param.dtype], param.on_host)


def _together(writer: LogWriter, params: Sequence[Updated], times: int) -> None:
    """Dtype by dtype, list by list: each list of one dtype is freed when the next has its own."""
    held: list[list[int]] = [[] for _ in range(times)]
    for dtype in dict.fromkeys(param.dtype for param in params):
        alike = [param for param in params if param.dtype == dtype]
        for number, before in enumerate(held):
            held[number] = [writer.make(param.num_bytes, Term.TEMPORARIES) for param in alike]
            writer.free_all(before)
    for last in held:
        writer.free_all(last)


def _alone(writer: LogWriter, params: Sequence[Updated], times: int) -> None:
    before = None
    for param in params if times else ():
        size, where = param.num_bytes, param.on_host
        now = [writer.make(size, Term.TEMPORARIES, on_host=where) for _ in range(times)]
        writer.free_all(now[:-1])
        writer.free(before)
        before = now[-1]
    writer.free(before)
