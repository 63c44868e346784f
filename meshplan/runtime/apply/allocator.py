"""CUDA's caching allocator as a plan says that it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from meshplan.errors import Problem
from meshplan.runtime.torch_private.ops import set_allocator_settings
from meshplan.spec.spec import Spec

_NAMES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Of the environment, the one that torch reads first."""
_GROWS: Final = "expandable_segments"


def allocator_problems(
    spec: Spec, environment: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    """What the environment says against the plan."""
    name, settings = _stated(environment)
    stated = _words(settings).get(_GROWS, "true")
    if spec.allocator == "expandable" and stated != "true":
        yield Problem(
            f"the plan counts on segments that grow, and {name} says {_GROWS}:{stated}",
            spec.origin("allocator"),
            fix=f"take it out of {name}, or remove 'allocator' from the plan",
        )


def set_allocator(spec: Spec) -> None:
    """Let segments grow from here on, if the plan says so and the environment does not.

    What was allocated before stays as it is: a model on the device already is told for as one whose
    segments grow, and may take a little more.
    """
    settings = with_growth(os.environ)
    if spec.allocator == "expandable" and settings and torch.cuda.is_available():
        set_allocator_settings(settings)


def with_growth(environment: Mapping[str, str]) -> str:
    """What the environment says of the allocator, and that its segments grow; "" if it says so.

    All of it, since torch forgets what it is not told again.
    """
    _, settings = _stated(environment)
    if _GROWS in _words(settings):
        return ""
    return ",".join(filter(None, (settings, f"{_GROWS}:True")))


def _stated(environment: Mapping[str, str]) -> tuple[str, str]:
    """(the variable, what it says)."""
    name = next((name for name in _NAMES if environment.get(name)), _NAMES[0])
    return name, environment.get(name, "").strip().strip(",")


def _words(settings: str) -> dict[str, str]:
    pairs = (word.partition(":") for word in settings.split(","))
    return {key.strip(): value.strip().lower() for key, _, value in pairs}
