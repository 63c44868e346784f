"""The tools whose files are imported and exported, by the name of `--from` and `--to`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from meshplan.interop.configs import (
    accelerate,
    deepspeed,
    lightning,
    megatron,
    nanotron,
    torchtitan,
    trainer,
)
from meshplan.interop.configs.importing import ConfigTool

TOOLS: Final[Mapping[str, ConfigTool]] = MappingProxyType(
    {
        tool.name: tool
        for tool in (
            deepspeed.TOOL,
            accelerate.TOOL,
            lightning.TOOL,
            trainer.TOOL,
            torchtitan.TOOL,
            nanotron.TOOL,
            megatron.TOOL,
        )
    }
)
