"""A rank's process ends at each of its calls of the file system: is a whole state always left?

    python -m tests.bench.crash_points [--ranks 4] [--every 1]

A job of several ranks has saved step 1 and saves step 2 with `keep=1`. One rank is ended at its
k-th call, before it, or after half of it if it writes; for every rank, every k, and twice: the
other ranks live on and clean up, or all are killed at that moment. Those that live must end by
themselves. A new job then loads what is left: the whole state of step 1 or of step 2. Its losses
must be those of a job that was never ended, and its next save must leave nothing but itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshplan
from tests.helpers.pool import Pool, PoolError

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
"""What a save asks of the system."""
PLAN = {"version": 1, "strategy": "full_shard"}


class Point(NamedTuple):
    """A moment at which a rank ends.

    Attributes:
        rank: The rank.
        number: The number of its call, from 1.
        is_torn: True if half of what the call writes is written before.
        is_alone: False if all ranks end at that moment.
    """

    rank: int
    number: int
    is_torn: bool
    is_alone: bool


class Calls:
    """The calls of this process so far, and the one at which it ends.

    Args:
        patch: Replaces the functions of `os`.
        point: The moment at which this process ends; None if it does not.
        ranks: The processes that end with it.
    """

    def __init__(self, patch: pytest.MonkeyPatch, point: Point | None, ranks: list[int]) -> None:
        self.names: list[str] = []
        self._point, self._ranks = point, ranks
        for name in CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            if self._point is not None and len(self.names) == self._point.number:
                if self._point.is_torn:
                    real(args[0], bytes(args[1][: len(args[1]) // 2]))
                for process in self._ranks:
                    os.kill(process, signal.SIGKILL)
                os._exit(9)
            return real(*args, **kwargs)

        return call


class TinyJob:
    """A layer that learns, with a state of its optimizer for every parameter."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = meshplan.parallelize(nn.Linear(8, 8), PLAN)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        self.batch = meshplan.local_batch(self.model, batch)

    def train(self, num: int) -> list[float]:
        """The losses of so many more steps."""
        loss_fn = nn.functional.mse_loss
        return [
            meshplan.train_step(self.model, self.optimizer, self.batch, self.batch, loss_fn)
            for _ in range(num)
        ]

    def save(self, path: Path, step: int) -> None:
        meshplan.save(path, self.model, self.optimizer, step=step, keep=1)


def uninterrupted() -> list[float]:
    return TinyJob().train(4)


def save_until(path: Path, point: Point | None) -> list[str]:
    """Save step 1, and step 2 up to a point: the names of this rank's calls."""
    job = TinyJob()
    job.train(1)
    job.save(path, 1)
    job.train(1)
    own, processes = os.getpid(), [0] * dist.get_world_size()
    dist.all_gather_object(processes, own)
    others = [each for each in processes if each != own]
    is_here = point is not None and dist.get_rank() == point.rank
    with pytest.MonkeyPatch.context() as patch:
        ended_with = others if point is not None and not point.is_alone else []
        calls = Calls(patch, point if is_here else None, ended_with)
        job.save(path, 2)
    return calls.names


def resume(path: Path) -> tuple[int, list[float], list[str]]:
    """Load what is left, train and save: its step, the losses after it, the folder at the end."""
    job = TinyJob(seed=1)
    step = meshplan.load(path, job.model, job.optimizer).step
    losses = job.train(2)
    job.save(path, step + 2)
    return step, losses, sorted(each.name for each in path.iterdir())


def points_of(names: list[list[str]]) -> list[Point]:
    """Every moment at which a rank can end, by the names of each rank's calls."""
    return [
        Point(rank, number, is_torn, is_alone)
        for rank, own in enumerate(names)
        for number, name in enumerate(own, 1)
        for is_torn in ((False, True) if name == "write" else (False,))
        for is_alone in (True, False)
    ]


def step_left(pool: Pool, fresh: Pool, point: Point, expected: list[float]) -> int:
    """End a rank of `pool` at a point and resume in `fresh`: the step of the state that was left.

    Raises:
        AssertionError: The job did not end, or it did not go on as if nothing had happened.
    """
    path = Path(tempfile.mkdtemp())
    try:
        with pytest.raises(PoolError) as caught:
            pool.run(save_until, path, point)
        assert "hung" not in str(caught.value), caught.value
        step, losses, names = fresh.run(resume, path)[0]
        assert losses == expected[step : step + 2]
        assert names == [f"step-{step + 2:08d}"]
        return step
    finally:
        shutil.rmtree(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=1, help="take every N-th point only")
    asked = parser.parse_args()
    pool, fresh = Pool(asked.ranks, grace_s=40.0), Pool(asked.ranks)
    expected = fresh.run(uninterrupted)[0]
    with tempfile.TemporaryDirectory() as folder:
        names = fresh.run(save_until, Path(folder), None)
    points = points_of(names)[:: asked.every]
    print(f"{asked.ranks} ranks with {[len(own) for own in names]} calls: {len(points)} points")
    steps: Counter[int] = Counter()
    for point in points:
        step = 0
        with suppress(AssertionError):
            step = step_left(pool, fresh, point, expected)
        steps[step] += 1
        print(f"{point}: {f'step {step}' if step else 'WRONG'}", flush=True)
    pool.close()
    fresh.close()
    print(f"{len(points)} points: {steps[1]} resumed from step 1, {steps[2]} from step 2, "
          f"{steps[0]} wrong")  # fmt: skip
    return 1 if steps[0] else 0


if __name__ == "__main__":
    raise SystemExit(main())
