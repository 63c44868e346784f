"""The name "meshplan" among the strategies of Lightning's Trainer and of Fabric."""

from __future__ import annotations

from typing import Final

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from meshplan.interop.lightning.fabric import MeshplanFabricStrategy
from meshplan.interop.lightning.strategy import MeshplanStrategy

NAME: Final = "meshplan"


def register() -> None:
    """Make `strategy="meshplan"` known to Trainer and Fabric."""
    words = "a meshplan plan: that of MESHPLAN_PLAN, else plan.yaml"
    StrategyRegistry.register(NAME, MeshplanStrategy, words, override=True)
    STRATEGY_REGISTRY.register(NAME, MeshplanFabricStrategy, words, override=True)
