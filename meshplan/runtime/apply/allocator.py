"""Settings of CUDA's caching allocator that a plan requires."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from meshplan.errors import Problem
from meshplan.runtime.torch_private.ops import set_allocator_settings
from meshplan.spec.spec import Spec

_NAMES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with allocator settings, in the order in which torch reads them."""
_GROWS: Final = "expandable_segments"


def allocator_problems(
    spec: Spec, environment: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    """Yield a problem if the environment disables the expandable segments that the plan counts on.

    Args:
        spec: The parsed plan file.
        environment: Environment variables by name.
    """
    name, settings = _stated(environment)
    stated = _words(settings).get(_GROWS, "true")
    if spec.allocator == "expandable" and stated != "true":
        yield Problem(
            f"the plan needs expandable segments, but {name} sets {_GROWS}:{stated}",
            spec.origin("allocator"),
            fix=f"remove {_GROWS} from {name}, or remove 'allocator' from the plan",
        )


def set_allocator(spec: Spec) -> None:
    """Turn on expandable segments if the plan asks for them and the environment does not set them.

    Memory that is allocated already stays in ordinary segments. The estimate assumes expandable
    segments for all memory, so a model that is already on the device may reserve a little more.
    """
    settings = with_growth(os.environ)
    if spec.allocator == "expandable" and settings and torch.cuda.is_available():
        set_allocator_settings(settings)


def with_growth(environment: Mapping[str, str]) -> str:
    """Return the environment's allocator settings with expandable segments added.

    All settings are repeated, since torch resets every setting that a new string does not mention.

    Returns:
        The settings string; "" if the environment sets `expandable_segments` itself.
    """
    _, settings = _stated(environment)
    if _GROWS in _words(settings):
        return ""
    return ",".join(filter(None, (settings, f"{_GROWS}:True")))


def _stated(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return (name, settings) of the variable that torch reads; settings are "" if none is set."""
    name = next((name for name in _NAMES if environment.get(name)), _NAMES[0])
    return name, environment.get(name, "").strip().strip(",")


def _words(settings: str) -> dict[str, str]:
    pairs = (word.partition(":") for word in settings.split(","))
    return {key.strip(): value.strip().lower() for key, _, value in pairs}
