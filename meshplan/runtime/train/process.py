"""What a script does once for all ranks, or in the same way on each of them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from meshplan.errors import ApplyError, Problem
from meshplan.launch.environment import read_rank
from meshplan.runtime.base.mesh import ensure_process_group
from meshplan.runtime.watch.guard import come_together, guarded

_SEEDS: Final = 2**32
"""NumPy takes seeds below this number."""


def is_main() -> bool:
    """Return True on rank 0, which prints and writes for all ranks, and in a job of one process.

    It may be called before `parallelize`.
    """
    if dist.is_initialized():
        return dist.get_rank() == 0
    launched = read_rank(os.environ)
    return launched is None or launched.rank == 0


@contextmanager
def main_first() -> Iterator[None]:
    """Run a block on rank 0 first, and on the other ranks when rank 0 has left it.

    All ranks enter it, for what one of them must prepare: a download, a cache of tokens. If the
    block fails on rank 0, the others do not run it. It may be called before `parallelize`.

    Example:
        >>> with meshplan.main_first():
        ...     data = load_dataset("tokens")
    """
    ensure_process_group()
    with guarded("main_first"):
        if is_main():
            yield
            come_together("main_first")
        else:
            come_together("main_first")
            yield


def seed_everything(seed: int, *, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch, with the same seed on every rank.

    Call it before the model is made. After `parallelize`, each training forward draws numbers of
    its own that follow from this seed: the same along tp, others for other samples.

    Args:
        seed: An integer from 0 to 2**32 - 1.
        deterministic: If True, torch uses deterministic algorithms only, and raises where an
            operator has none. It is slower.

    Raises:
        ApplyError: The seed is out of range.
    """
    if not 0 <= seed < _SEEDS:
        raise ApplyError(Problem(f"seed is {seed}, but must be from 0 to 2**32 - 1"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads it when it makes its first handle; other values let it choose at run time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
