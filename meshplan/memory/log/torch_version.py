"""The versions of torch whose steps the rules of `replay` and of `told` follow to the byte.

`tests/bench/torch_versions.md` has what the tests say under each. torch 2.15 made FSDP2 anew:
gradients that wait are kept in the dtype in which they are reduced, the buffer of a gather is given
back before the next one is copied out, and gradients are freed in another order, as in 2.12 alone
of those before.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import Final

KNOWN: Final = ((2, 11), (2, 13), (2, 14))
"""As `pyproject.toml` says."""


@cache
def installed() -> str:
    """The version of torch that is installed; "" where none is. torch itself is not loaded."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def unlike(version: str) -> str:
    """Why rules may not tell the bytes of this version of torch; "" where they do.

    >>> unlike("2.13.0+cpu")
    ''
    >>> unlike("2.15.0").partition(",")[0]
    'torch 2.15.0 is installed'
    """
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])
    if not numbers or numbers in KNOWN:
        return ""
    *others, last = (f"{major}.{minor}" for major, minor in KNOWN)
    return (
        f"torch {version} is installed, and these are the bytes of {', '.join(others)} and {last}: "
        "the rules they were composed by are not those of this version, and --tier 2 or 3 traces "
        "its own"
    )
