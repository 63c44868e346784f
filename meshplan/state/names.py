"""Names of a state that differ from the model's in parts that wrappers of torch add.

meshplan saves plain names (`held.plain_name`). A checkpoint from elsewhere may be of a wrapped
model, with names such as `module.layers.0.weight`. Since a model may have a module of its own that
is called `module`, no name is shortened by itself: those that have no equal one on the other side
are compared without such parts on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from meshplan.shown import shown
from meshplan.state.manifest import Manifest

WRAPPERS: Final = ("module", "_orig_mod", "_checkpoint_wrapped_module")
"""Parts of names that DistributedDataParallel, torch.compile and the checkpoint wrapper add."""


@shown
@dataclass(frozen=True, slots=True)
class Renaming:
    """Names of a state by the model's names.

    Args:
        names: {name in the state: name in the model} where they differ.
        clashes: (names in the state, names in the model) that are equal without the wrappers'
            parts, so that it is not known which of them belong together.
    """

    names: Mapping[str, str]
    clashes: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()


def bare_name(name: str) -> str:
    """Return a name without all parts that wrappers may have put into it.

    >>> bare_name("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def find_renaming(saved: Iterable[tuple[str, ...]], own: Iterable[str]) -> Renaming:
    """Find the names of a state that the model has under another name.

    Args:
        saved: The names of each tensor of the state, several if it is tied.
        own: All names of the model.
    """
    own = dict.fromkeys(own)
    by_bare: dict[str, tuple[list[str], list[str]]] = {}
    for name in own:
        by_bare.setdefault(bare_name(name), ([], []))[1].append(name)
    for names in saved:
        is_found = any(name in own for name in names)
        for name in names:
            if (name in own or not is_found) and (group := by_bare.get(bare_name(name))):
                group[0].append(name)
    renamed, clashes = {}, []
    for ours, theirs in by_bare.values():
        others = [name for name in ours if name not in own]
        wanted = [name for name in theirs if name not in ours]
        if len(others) == len(wanted) == 1:
            renamed[others[0]] = wanted[0]
        elif others:
            clashes.append((tuple(ours), tuple(theirs)))
    return Renaming(renamed, tuple(clashes))


def with_names(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """Return a manifest with other names of the model's tensors; the files stay as they are."""
    if not names:
        return manifest

    def key_of(key: str) -> str:
        section, _, rest = key.partition("/")
        if section == "model":
            return f"model/{names.get(rest, rest)}"
        if section == "optimizer":
            parameter, _, word = rest.rpartition("/")
            return f"optimizer/{names.get(parameter, parameter)}/{word}"
        return key

    tensors = {
        key_of(key): replace(each, aliases=tuple(names.get(a, a) for a in each.aliases))
        for key, each in manifest.tensors.items()
    }
    values: dict[str, Any] = dict(manifest.values)
    if optimizer := values.get("optimizer"):
        groups = [
            dict(group, params=[names.get(each, each) for each in group["params"]])
            for group in optimizer["groups"]
        ]
        plain = {names.get(each, each): states for each, states in optimizer["plain"].items()}
        values["optimizer"] = dict(optimizer, groups=groups, plain=plain)
    return replace(manifest, tensors=tensors, values=values)
