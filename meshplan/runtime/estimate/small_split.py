"""Carry a stated split into stages over to a model with fewer blocks.

`pipeline.split` names the blocks with which stages begin, such as `layers.13`. A small model may
have only eight. Its stages begin with blocks of about the same share of the list, in the same
order, so that every stage has the kinds of modules that it has in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from torch import nn

Split = tuple[tuple[str, ...], ...]
_LISTS: Final = (nn.ModuleList, nn.Sequential)


def small_split(split: Split, whole: nn.Module, small: nn.Module) -> tuple[Split, list[str]]:
    """Return (the split with the names of the small model, descriptions of the changes).

    Names that the whole model does not have stay as they are, for the plan's own checks to report.

    Args:
        split: The names of modules, one tuple per stage.
        whole: The user's model.
        small: A copy with fewer blocks in some lists.
    """
    begins: dict[str, list[int]] = {}
    for names in split:
        first: dict[str, int] = {}
        for name in names:
            for fqn, number in _lists_around(name, whole):
                first[fqn] = min(number, first.get(fqn, number))
        for fqn, number in first.items():
            if number not in begins.setdefault(fqn, []):
                begins[fqn].append(number)
    out, notes = [], []
    for names in split:
        renamed: dict[str, None] = {}
        for name in names:
            new = _renamed(name, whole, small, begins)
            if new is not None:
                renamed[new] = None
            if new is not None and new != name:
                notes.append(f"pipeline.split: {name} to {new}")
        out.append(tuple(renamed))
    return tuple(out), notes


def _lists_around(name: str, model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield (fqn of a list, number of the item) for every list that a module is inside."""
    module, path = model, ""
    for part in name.split("."):
        found = module._modules.get(part)
        if found is None:
            return
        if isinstance(module, _LISTS) and part.isdigit():
            yield path, int(part)
        module, path = found, f"{path}.{part}" if path else part


def _renamed(
    name: str, whole: nn.Module, small: nn.Module, begins: Mapping[str, list[int]]
) -> str | None:
    """Return the name of a module in the small model; None if no item there stands for it."""
    path, parts = "", []
    for part in name.split("."):
        if part not in whole._modules:
            return name
        if isinstance(whole, _LISTS) and part.isdigit() and len(whole) != len(small._modules):
            number = _begins(sorted(begins[path]), len(whole), len(small._modules)).get(int(part))
            if number is None:
                return None
            parts.append(str(number))
        else:
            parts.append(part)
        path = f"{path}.{part}" if path else part
        if parts[-1] not in small._modules:
            return name
        whole, small = whole._modules[part], small._modules[parts[-1]]
    return ".".join(parts)


def _begins(numbers: list[int], length: int, small_length: int) -> dict[int, int]:
    """Return {item of the long list: item of the short one}, in the same order, all different.

    >>> _begins([0, 13], 24, 8)
    {0: 0, 13: 4}
    >>> _begins([1, 2, 3, 22], 24, 8)
    {1: 0, 2: 1, 3: 2, 22: 7}
    """
    out: dict[int, int] = {}
    least = 0
    for place, number in enumerate(numbers):
        share = max(least, number * small_length // length)
        out[number] = min(share, small_length - len(numbers) + place)
        least = out[number] + 1
    return out
