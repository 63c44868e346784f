"""timm's families of models, one small one of each, as architectures of the zoo.

    python -m tests.bench.zoo_timm

looks for those that one process can train, and writes them into zoo_recipes.json. timm wants
torchvision for its data loaders alone; a stand-in for it is enough to build models.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

import torch
from torch import nn

PREFIX: Final = "timm/"
CLASSES: Final = 10
RECIPES: Final = tuple(product((64, 128, 224, 256, 384), (False, True)))
"""(edge of the images, whether the model is told so), the smallest first."""
_TRIED: Final = 6
"""Models of a family that are tried, the smallest first."""
_LISTED: Final = 24
"""Names of a family that are looked at: timm lists variants of one size side by side."""
_MOST_NUMEL: Final = 30_000_000


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module of torchvision, with any class in it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = self._make
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = "0.0.0"

    @staticmethod
    def _make(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (nn.Module,), {})


def stand_in_for_torchvision() -> None:
    """Let packages be imported that want torchvision for their data loaders alone."""
    sys.meta_path.append(_StandIn())


def is_there() -> bool:
    """Whether timm is installed."""
    return importlib.util.find_spec("timm") is not None


def create(name: str, recipe: int, device: str = "cpu") -> nn.Module:
    """The model of this name in the zoo."""
    size, is_told = RECIPES[recipe]
    return _create(name.removeprefix(PREFIX), {"img_size": size} if is_told else {}, device)


def batch(recipe: int, samples: int) -> dict[str, torch.Tensor]:
    """Images, as keyword arguments."""
    size, _ = RECIPES[recipe]
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(samples, 3, size, size, generator=generator)}


def families() -> Iterator[tuple[str, list[str]]]:
    """Of each family, the names of its smallest models in the zoo."""
    timm = _timm()
    for family in timm.list_modules():
        numel = {}
        for name in timm.list_models(module=family)[:_LISTED]:
            with contextlib.suppress(Exception):  # What cannot be built is nobody's smallest.
                numel[name] = sum(p.numel() for p in _create(name, {}, "meta").parameters())
        small = sorted((n for n in numel if numel[n] <= _MOST_NUMEL), key=lambda n: numel[n])
        yield family, [PREFIX + name for name in small[:_TRIED]]


def _create(name: str, more: dict[str, int], device: str) -> nn.Module:
    with torch.device(device):
        model: nn.Module = _timm().create_model(name, num_classes=CLASSES, **more)
    return model


def _timm() -> Any:
    if "timm" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        stand_in_for_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm
    return timm


def main() -> None:
    from tests.bench import zoo_models

    kept = json.loads(zoo_models.RECIPES_FILE.read_text())
    for outcome in kept.values():
        for name in [name for name in outcome if name.startswith(PREFIX)]:
            del outcome[name]
    for family, names in families():
        found: Any = "none of its models is small enough"
        for name in names:
            found = zoo_models.survey(name)
            if not isinstance(found, str):
                kept["built"][name] = [*vars(found).values()]
                break
        else:
            kept["not built"][PREFIX + family] = found
        print(family, found, flush=True)
    parts = []
    for outcome, rows in kept.items():
        lines = [f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows)]
        parts.append(f"{json.dumps(outcome)}: {{\n" + ",\n".join(lines) + "\n}")
    zoo_models.RECIPES_FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
