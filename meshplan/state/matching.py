"""Compare the tensors of a state with those of a model: missing, unexpected, of another shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshplan.errors import Problem
from meshplan.plan.plan import Plan
from meshplan.shown import shown
from meshplan.state.held import HeldTensor, held_sharded, held_whole, is_held, plain_name
from meshplan.state.manifest import Manifest, SavedTensor

_LISTED = 10
"""Names that a message lists."""


@shown
@dataclass(frozen=True, slots=True)
class Matching:
    """The tensors of a state beside those of the model of a plan.

    Args:
        found: The saved tensor of each tensor of the model, by name in the plan.
        missing: Names that only the model has.
        unexpected: Names that only the state has.
        reshaped: For each tensor of another shape: (name, shape in the state, in the model).
    """

    found: Mapping[str, SavedTensor]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    def problems(self, *, strict: bool) -> Iterator[Problem]:
        """Yield the reasons why the state cannot be loaded into the model.

        Args:
            strict: If False, names that only one of them has are no problem.
        """
        if strict and (self.missing or self.unexpected):
            parts = [
                f"the {owner} has {len(names)} tensor{'s' * (len(names) > 1)} that the {other} "
                f"lacks ({listed(names)})"
                for owner, other, names in (
                    ("state", "model", self.unexpected),
                    ("model", "state", self.missing),
                )
                if names
            ]
            fix = "build the model that was saved, or pass strict=False to skip them"
            yield Problem(", and ".join(parts), None, fix)
        for name, saved, own in self.reshaped:
            what = f"{name} has the shape {list(saved)} in the state, and {list(own)} in the model"
            yield Problem(what, None, "build the model as it was saved")


def match(manifest: Manifest, plan: Plan) -> Matching:
    """Compare a state with the model of a plan, by names, aliases and shapes."""
    saved: dict[str, SavedTensor] = {}
    for key, tensor in manifest.tensors.items():
        section, _, name = key.partition("/")
        if section == "model":
            saved |= dict.fromkeys((name, *tensor.aliases), tensor)
    found: dict[str, SavedTensor] = {}
    missing, reshaped, taken = [], [], set()
    for fqn, placed in plan.assignment.tensors.items():
        if not placed.info.is_persistent:
            continue
        names = [plain_name(each) for each in placed.info.names]
        tensor_name = next((name for name in names if name in saved), None)
        if tensor_name is None:
            missing.append(names[0])
            continue
        tensor = found[fqn] = saved[tensor_name]
        taken |= {id(saved[name]) for name in names if name in saved}
        if tensor.shape != placed.info.shape:
            reshaped.append((names[0], tensor.shape, placed.info.shape))
    unexpected = [
        key.partition("/")[2]
        for key, tensor in manifest.tensors.items()
        if key.startswith("model/") and id(tensor) not in taken
    ]
    return Matching(found, tuple(missing), tuple(unexpected), tuple(reshaped))


def optimizer_states(manifest: Manifest) -> dict[str, dict[str, SavedTensor]]:
    """Return the optimizer's states that are tensors, by parameter and by name."""
    out: dict[str, dict[str, SavedTensor]] = {}
    for key, tensor in manifest.tensors.items():
        section, _, rest = key.partition("/")
        if section == "optimizer":
            parameter, _, word = rest.rpartition("/")
            out.setdefault(parameter, {})[word] = tensor
    return out


def held_by(rank: int, manifest: Manifest, matching: Matching, plan: Plan) -> list[HeldTensor]:
    """Return the tensors of a state as a rank holds them under a plan, optimizer included."""
    states = optimizer_states(manifest)
    out = []
    for fqn, tensor in matching.found.items():
        if not is_held(fqn, plan, rank):
            continue
        name = plain_name(fqn)
        out.append(held_sharded(f"model/{name}", tensor.dtype, fqn, plan, rank))
        for word, state in states.get(name, {}).items():
            key = f"optimizer/{name}/{word}"
            if state.shape == tensor.shape:
                out.append(held_sharded(key, state.dtype, fqn, plan, rank))
            else:
                out.append(held_whole(key, state.dtype, state.shape, fqn, plan, rank))
    return out


def listed(names: Iterable[str]) -> str:
    """Return the first few names as one text."""
    found = list(names)
    return ", ".join(found[:_LISTED]) + (", ..." if len(found) > _LISTED else "")
