"""The versions of torch whose memory the rules of `replay` and `analytic` reproduce to the byte.

`tests/bench/torch_versions.md` has the test results under each version. torch 2.15 rewrote FSDP2:
gradients that await their reduction are kept in the dtype in which they are reduced, the buffer of
an all-gather is freed before the next one is copied out, and gradients are freed in another order
(of the earlier versions only 2.12 frees them in that order).
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import Final

KNOWN: Final = ((2, 11), (2, 13), (2, 14))
"""Supported versions, as in `pyproject.toml`."""


@cache
def installed() -> str:
    """Return the installed version of torch without importing it; "" if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def unlike(version: str) -> str:
    """Return a warning that the rules may not hold for this version of torch; "" if they hold.

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
        f"torch {version} is installed, but the bytes are those of {', '.join(others)} and {last}, "
        "whose rules may not hold for this version; --tier 3 traces a step with the installed "
        "version"
    )
