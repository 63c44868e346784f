"""What a script does once for all ranks, or in the same way on each of them."""

from __future__ import annotations

import logging
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


def rank_logger(name: str, *, all_ranks: bool = False) -> logging.Logger:
    """Return the `logging.Logger` of that name, whose records only the main rank emits.

    It is an ordinary logger: its level, handlers and format are those that the program sets. Calls
    of the other ranks come to nothing, so that they must have no side effects.

    Args:
        name: Name of the logger, such as `__name__`.
        all_ranks: If True, every rank emits its records, with its number in front of the message.

    Example:
        >>> log = meshplan.rank_logger(__name__)
        >>> log.info("epoch %d: loss %.3f", epoch, loss)
    """
    logger = logging.getLogger(name)
    for other in [each for each in logger.filters if isinstance(each, _RankFilter)]:
        logger.removeFilter(other)
    logger.addFilter(_RankFilter(all_ranks))
    return logger


class _RankFilter:
    """A filter of a logger: it drops the records of all ranks but one, or numbers them."""

    def __init__(self, all_ranks: bool) -> None:
        self._all_ranks = all_ranks

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._all_ranks:
            return is_main()
        launched = None if dist.is_initialized() else read_rank(os.environ)
        rank = launched.rank if launched is not None else 0
        rank = dist.get_rank() if dist.is_initialized() else rank
        # The message may have % signs of its own, and arguments that are put in later.
        record.msg = f"[rank {rank}] {record.msg}"
        return True


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
