"""Strategies of accelerate beside a plan: its plugins, and what `accelerate launch` states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from meshplan.errors import Problem

STRATEGIES: Final = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Names of accelerate's own strategies, in `DistributedType` and in environment variables."""
NO_STRATEGY: Final = "leave it out; meshplan import translates its configuration into a plan"
"""Fix of a problem with a strategy of accelerate beside a plan."""
_PLUGINS: Final = (
    "fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin",
)  # fmt: skip
_TRUE: Final = ("1", "true", "yes", "y", "t", "on")


def strategy_problems(settings: Mapping[str, Any]) -> list[Problem]:
    """Return the plugins and variables that give an Accelerator a strategy beside a plan.

    Some have no effect without a GPU, where the script would run, and then fail on the cluster.

    Args:
        settings: Arguments of `accelerate.Accelerator`.
    """
    problems = []
    for name in _PLUGINS:
        if settings.get(name) is not None:
            what = f"two strategies at once: {name} was given, but the plan states how the model "
            what += "is sharded"
            problems.append(Problem(what, fix=NO_STRATEGY))
    for name in (f"ACCELERATE_USE_{each}" for each in STRATEGIES):
        value = os.environ.get(name, "")
        if value.lower() in _TRUE:
            what = f"two strategies at once: the environment has {name}={value}, but the plan "
            what += "states how the model is sharded"
            fix = f"unset {name}; start the ranks with meshplan launch -f plan.yaml or torchrun, "
            fix += "not with accelerate launch; meshplan import translates its configuration"
            problems.append(Problem(what, fix=fix))
    return problems
