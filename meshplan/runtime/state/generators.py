"""The random number generators of a process in a training state: Python's, NumPy's and torch's.

These are the generators that a script draws from outside of the model, as for its own batches; each
training forward is seeded by itself (`apply.parameters.randomness`). If the ranks have equal states
of a generator, as after the same seed on all of them, the state is saved once, and goes on under
any plan. States that differ belong to the ranks of one plan, and go on under the same plan only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from meshplan.errors import Problem, StateError
from meshplan.runtime.apply.parameters.randomness import random_states, restore_random
from meshplan.runtime.base.mesh import device_type
from meshplan.state.values import from_json, to_json

_WORD: Final = np.dtype("<u4")
"""A number of the state of a Mersenne twister, as it is saved."""


class _Generator(NamedTuple):
    """One generator of a process.

    Attributes:
        take: Returns its state, as `state.values` can express it.
        restore: Sets it to such a state.
    """

    take: Callable[[], Any]
    restore: Callable[[Any], None]


def _take_python() -> Any:
    version, numbers, gauss = random.getstate()
    return version, np.array(numbers, _WORD).tobytes(), gauss


def _restore_python(state: Any) -> None:
    version, numbers, gauss = state
    random.setstate((version, tuple(np.frombuffer(numbers, _WORD).tolist()), gauss))


def _take_numpy() -> Any:
    state = np.random.get_state()
    if not isinstance(state, tuple):
        return None  # The script has replaced NumPy's Mersenne twister by `set_bit_generator`.
    kind, keys, *rest = state
    return kind, np.asarray(keys, _WORD).tobytes(), *rest


def _restore_numpy(state: Any) -> None:
    kind, keys, *rest = state
    np.random.set_state((kind, np.frombuffer(keys, _WORD), *rest))


def _generators() -> dict[str, _Generator]:
    """Return the generators by name: those of torch are called after their device."""

    def of_torch(place: int) -> _Generator:
        def take() -> bytes:
            return random_states()[place].numpy().tobytes()

        def restore(state: bytes) -> None:
            states = list(random_states())
            states[place] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            restore_random(tuple(states))

        return _Generator(take, restore)

    found = {
        "python": _Generator(_take_python, _restore_python),
        "numpy": _Generator(_take_numpy, _restore_numpy),
        "cpu": of_torch(0),
    }
    return found if device_type() == "cpu" else found | {device_type(): of_torch(1)}


def take_states() -> dict[str, Any]:
    """Return the states of this rank's generators by name, in the form of `state.values`."""
    return {name: to_json(each.take(), name) for name, each in _generators().items()}


def merge_states(ranks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return each generator's state on every rank; a single one if all ranks have the same."""
    return {
        name: [ranks[0][name]]
        if all(each[name] == ranks[0][name] for each in ranks)
        else [each[name] for each in ranks]
        for name in ranks[0]
    }


def states_for(saved: Mapping[str, list[Any]], rank: int, *, same_plan: bool) -> dict[str, Any]:
    """Return the states to which a rank's generators are to be set.

    Args:
        saved: The result of `merge_states`, from a manifest.
        rank: The rank.
        same_plan: True if the state was saved under the plan and on the ranks of this job.

    Raises:
        StateError: A state is not one of its generator. The generators have not changed.
    """
    chosen = {
        name: states[0] if len(states) == 1 else states[rank]
        for name, states in saved.items()
        if len(states) == 1 or same_plan
    }
    before, name = take_states(), ""
    try:
        for name in chosen:
            restore_states({name: chosen[name]})
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"the state has no valid state of the random number generator {name}: {error}"
        raise StateError(Problem(what, fix="load another step, with step=...")) from None
    finally:
        restore_states(before)
    return chosen


def restore_states(states: Mapping[str, Any]) -> None:
    """Set this rank's generators to states by name, in the form of `state.values`."""
    for name, each in _generators().items():
        state = from_json(states.get(name))
        if state is not None:
            each.restore(state)
