"""Temporary memory of an optimizer's `step()`, and the sizes of its state.

Source: torch 2.13, torch/optim; each entry was read off a traced step.
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
from meshplan.memory.replay.writer import LogWriter
from meshplan.spec.spec import OPTIMIZER_STATES


@dataclass(frozen=True, slots=True)
class Steps:
    """Temporary memory of a step, in multiples of the parameters' bytes.

    Args:
        together: With foreach, number of lists of temporaries that exist at once. A list has one
            tensor for each parameter of one dtype, and is freed after the next dtype's list is
            made.
        alone: With a for loop, number of temporaries of one parameter that exist at once. The last
            of them is freed after the next parameter's are made.
    """

    together: int
    alone: int


OPTIMIZERS: Final[Mapping[str, Steps]] = MappingProxyType(
    {
        # The root of the second moment; in a for loop also that root over the bias correction.
        "adamw": Steps(1, 2),
        "adam": Steps(1, 2),
        "adamw_fused": Steps(0, 0),  # One kernel updates all tensors in place.
        "adam_fused": Steps(0, 0),
        "rmsprop": Steps(1, 1),
        "adagrad": Steps(2, 1),  # The square root, and the update.
        "sgd": Steps(0, 0),
        "sgd_momentum": Steps(0, 0),
        # One kernel for each parameter updates it, its state and the state's scales in place.
        # Source: bitsandbytes 0.45, csrc/kernels.cu, `kOptimizerStatic8bit2StateBlockwise`.
        "adamw_8bit": Steps(0, 0),
    }
)


_OF_MATRICES: Final = "muon"
"""The optimizer that steps on matrices only; AdamW steps on all other parameters."""
OF_WHOLE_TENSORS: Final = frozenset({"adafactor", "muon"})
"""Optimizers whose temporaries depend on a tensor's shape, not only on its number of local
elements."""


@dataclass(frozen=True, slots=True)
class Updated:
    """A parameter that the optimizer steps on.

    Args:
        fqn: Fqn of the parameter.
        numel: Elements of the parameter's local shard, without padding.
        dtype: Dtype in which the parameter is stored.
        on_host: If True, the parameter is in host memory.
        shape: Shape of the whole parameter.
    """

    fqn: str
    numel: int
    dtype: str
    on_host: bool = False
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


def check_optimizer(name: str, *, is_sharded: bool) -> None:
    """Check that there is a rule for the temporary memory of an optimizer's step.

    Args:
        name: A name of `spec.OPTIMIZER_STATES`.
        is_sharded: True if the optimizer steps on shards of parameters.

    Raises:
        PlanError: There is no rule for the optimizer, or none for sharded parameters.
    """
    if name not in OPTIMIZERS and name not in LOOPS:
        what = f"there is no rule for the temporary memory of a step of the optimizer {name}"
        known = ", ".join((*OPTIMIZERS, *LOOPS))
        fix = f"trace the step with meshplan estimate --tier 3, or use one of {known}"
        raise PlanError(Problem(what, fix=fix))
    if name in OF_WHOLE_TENSORS and is_sharded:
        what = (
            f"there is no rule for what DTensor gathers when the optimizer {name} steps on DTensors"
        )
        fix = "trace the step with meshplan estimate --tier 3, or use strategy: ddp"
        raise PlanError(Problem(what, fix=fix))


def is_uniform(assignment: Assignment) -> bool:
    """Return True if torch steps on all parameters together (foreach).

    torch does if all parameters are plain tensors or all are DTensors, and none is on the host.
    """
    if assignment.offloads_parameters:
        return False
    placed = [p for p in assignment.tensors.values() if not p.info.is_buffer]
    in_units = assignment.wrapper == "units"
    return len({(in_units and p.unit is not None) or bool(p.stored.axes) for p in placed}) == 1


def states_of(param: Updated, name: str, *, has_host: bool = False) -> list[int]:
    """Return the bytes of each state tensor that an optimizer has made for a parameter.

    Args:
        param: The parameter.
        name: A name of `spec.OPTIMIZER_STATES`.
        has_host: If True, host memory is separate from the device's. Step counts are then in host
            memory, and not in the result, unless kernels read them.
    """
    are_here = not has_host or name in READ_BY_KERNELS
    tensors = SHAPED_TENSORS.get(name)
    if tensors is not None:
        kept = tensors(param.shape, param.numel, DTYPE_BYTES[param.dtype])
        return [*kept.on_device, *kept.counters * are_here]
    counters = STEP_COUNTERS.get(name, 0) if are_here else 0
    return [param.num_bytes] * OPTIMIZER_STATES[name] + [4] * counters


def step(writer: LogWriter, params: Sequence[Updated], name: str, *, foreach: bool) -> None:
    """Play one step of an optimizer: allocate and free its temporaries.

    Args:
        writer: The log to write to.
        params: The parameters that have gradients, in order.
        name: A name of `spec.OPTIMIZER_STATES`.
        foreach: If True, parameters of one dtype are updated together, otherwise one after the
            other.
    """
    if name in LOOPS:
        alone = [p for p in params if name != _OF_MATRICES or len(p.shape) == 2]
        play_loop(writer, (_stepped(p, name) for p in alone), name)
        params, name = [p for p in params if p not in alone], "adamw"
    if foreach:
        _together(writer, params, OPTIMIZERS[name].together)
    else:
        _alone(writer, params, OPTIMIZERS[name].alone)


def _stepped(param: Updated, name: str) -> Stepped:
    shape = param.shape if name in OF_WHOLE_TENSORS else (param.numel,)
    return Stepped(shape, DTYPE_BYTES[param.dtype], param.on_host)


def _together(writer: LogWriter, params: Sequence[Updated], times: int) -> None:
    """Play a foreach step, in which a list of temporaries is freed once the next dtype's exists.

    `times` is the number of lists for each dtype.
    """
    storages_of_step: list[list[int]] = [[] for _ in range(times)]
    for dtype in dict.fromkeys(param.dtype for param in params):
        alike = [param for param in params if param.dtype == dtype]
        for number, before in enumerate(storages_of_step):
            storages_of_step[number] = [
                writer.make(param.num_bytes, Term.TEMPORARIES) for param in alike
            ]
            writer.free_all(before)
    for last in storages_of_step:
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
