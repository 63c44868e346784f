"""Compile the optional C code of the package when it is built or installed."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from compile_allocator import LIBRARY, compile_allocator


class CompilingHook(BuildHookInterface):
    """Puts the compiled allocator into the wheel; a wheel without it is as good, but slower."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel's files are collected.

        Args:
            version: "standard", or "editable" for `pip install -e`, which reads the library where
                it is compiled, beside its source.
            build_data: Description of the wheel, which is changed.
        """
        library = compile_allocator(Path(self.root))
        if library is not None and version == "standard":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["force_include"][str(library)] = str(LIBRARY)
