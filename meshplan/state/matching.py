"""Compare the tensors of a state with those of a model: missing, unexpected, of another shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from meshplan.errors import Problem
from meshplan.plan.plan import Plan
from meshplan.shown import shown
from meshplan.state.held import HeldTensor, held_sharded, held_whole, is_held, plain_name
from meshplan.state.manifest import Manifest, SavedTensor
from meshplan.state.names import WRAPPERS, Renaming, find_renaming, with_names

_LISTED = 10
"""Names that a message lists."""


@shown
@dataclass(frozen=True, slots=True)
class Matching:
    """The tensors of a state beside those of the model of a plan.

    Args:
        manifest: The state's manifest, with the model's names.
        found: The saved tensor of each tensor of the model, by name in the plan.
        missing: Names that only the model has.
        unexpected: Names that only the state has.
        reshaped: For each tensor of another shape: (name, shape in the state, in the model).
        renaming: The names of the state that were replaced by the model's.
    """

    manifest: Manifest
    found: Mapping[str, SavedTensor]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    renaming: Renaming = field(default_factory=lambda: Renaming({}))

    def problems(self, *, strict: bool) -> Iterator[Problem]:
        """Yield the reasons why the state cannot be loaded into the model.

        Args:
            strict: If False, names that only one of them has are no problem.
        """
        for saved_names, names in self.renaming.clashes:
            what = (
                f"{' and '.join(saved_names)} in the state could each be "
                f"{' or '.join(names)} of the model: without what wrappers of torch add to names "
                f"({', '.join(WRAPPERS)}) they are equal"
            )
            yield Problem(what, None, "rename or remove one of them in the state's file")
        if self.renaming.clashes:
            return
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

    def notes(self) -> Iterator[str]:
        """Yield remarks for the user on how names were matched."""
        if renamed := self.renaming.names:
            pairs = listed(f"{name} as {own}" for name, own in renamed.items())
            yield (
                f"{len(renamed)} tensors were loaded under other names, which differ in what "
                f"wrappers of torch add ({', '.join(WRAPPERS)}): {pairs}"
            )


def match(manifest: Manifest, plan: Plan) -> Matching:
    """Compare a state with the model of a plan, by names, aliases and shapes."""
    placed = plan.assignment.tensors
    renaming = find_renaming(
        (
            (key.partition("/")[2], *tensor.aliases)
            for key, tensor in manifest.tensors.items()
            if key.startswith("model/")
        ),
        (
            plain_name(name)
            for p in placed.values()
            if p.info.is_persistent
            for name in p.info.names
        ),
    )
    manifest = with_names(manifest, renaming.names)
    saved: dict[str, SavedTensor] = {}
    for key, tensor in manifest.tensors.items():
        section, _, name = key.partition("/")
        if section == "model":
            saved |= dict.fromkeys((name, *tensor.aliases), tensor)
    found: dict[str, SavedTensor] = {}
    missing, reshaped, taken = [], [], set()
    for fqn, each in placed.items():
        if not each.info.is_persistent:
            continue
        names = [plain_name(name) for name in each.info.names]
        tensor_name = next((name for name in names if name in saved), None)
        if tensor_name is None:
            missing.append(names[0])
            continue
        tensor = found[fqn] = saved[tensor_name]
        taken |= {id(saved[name]) for name in names if name in saved}
        if tensor.shape != each.info.shape:
            reshaped.append((names[0], tensor.shape, each.info.shape))
    unexpected = [
        key.partition("/")[2]
        for key, tensor in manifest.tensors.items()
        if key.startswith("model/") and id(tensor) not in taken
    ]
    return Matching(manifest, found, tuple(missing), tuple(unexpected), tuple(reshaped), renaming)


def optimizer_states(manifest: Manifest) -> dict[str, dict[str, SavedTensor]]:
    """Return the optimizer's states that are tensors, by parameter and by name."""
    out: dict[str, dict[str, SavedTensor]] = {}
    for key, tensor in manifest.tensors.items():
        section, _, rest = key.partition("/")
        if section == "optimizer":
            parameter, _, word = rest.rpartition("/")
            out.setdefault(parameter, {})[word] = tensor
    return out


def held_by(rank: int, matching: Matching, plan: Plan) -> list[HeldTensor]:
    """Return the tensors of a state as a rank holds them under a plan, optimizer included."""
    states = optimizer_states(matching.manifest)
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
