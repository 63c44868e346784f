"""A random rank is killed while it trains and saves: does the job go on as if nothing had happened?

    python -m tests.bench.killed [--num 100] [--seed 0] [--layouts full_shard packed pp]

Each time a job of `tests.helpers.stated` trains and saves after every step, some states in the
background, until a SIGKILL at a random moment of a random rank. It is then resumed under another
layout from the newest whole state. The losses from there on are compared with those of one process
that was never interrupted.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import meshplan
from meshplan.errors import MissingStateError
from tests.helpers.pool import Pool, PoolError
from tests.helpers.stated import LAYOUTS, Job, plan_of

STEPS = 12
TOLERANCE = 1e-6


def uninterrupted() -> list[float]:
    return Job(plan_of("one")).train(STEPS)


def resume(layout: str, path: Path, is_last: bool) -> tuple[int, list[float]]:
    """Go on from the newest state: the step it is of, and the losses of the steps after it."""
    job = Job(plan_of(layout), seed=1)
    try:
        objects = {"scheduler": job.scheduler, "data": job.loader}
        state = meshplan.load(path, job.model, job.optimizer, **objects)
        first = state.step
    except MissingStateError:
        job, first = Job(plan_of(layout)), 0
    losses = []
    for step in range(first, STEPS):
        losses += job.train(1)
        if not is_last:
            meshplan.save(path, job.model, job.optimizer, step=step + 1, keep=2,
                          scheduler=job.scheduler, data=job.loader,
                          asynchronous=step % 2 == 1)  # fmt: skip
    return first, losses


def kill_later(pool: Pool, rank: int, seconds: float) -> None:
    time.sleep(seconds)
    workers = pool._workers
    if rank < len(workers) and workers[rank].process.pid:
        os.kill(workers[rank].process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="+", default=["full_shard", "packed", "pp", "zero2"])
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    pools = {LAYOUTS[name].world: Pool(LAYOUTS[name].world) for name in (*asked.layouts, "one")}
    expected = pools[1].run(uninterrupted)[0]
    worst, states, wrong = 0.0, 0, 0
    for number in range(asked.num):
        path = Path(tempfile.mkdtemp())
        layout, then = draw.choice(asked.layouts), draw.choice([*asked.layouts, "one"])
        pool = pools[LAYOUTS[layout].world]
        pool.run(os.getpid)  # The ranks are there.
        rank, seconds = draw.randrange(pool.world), draw.uniform(0.2, 2.5)
        thread = threading.Thread(target=kill_later, args=(pool, rank, seconds))
        thread.start()
        with suppress(PoolError):
            pool.run(resume, layout, path, False)
        thread.join()
        pool.close()
        first, losses = pools[LAYOUTS[then].world].run(resume, then, path, True)[0]
        apart = max((abs(a - b) for a, b in zip(losses, expected[first:], strict=True)), default=0)
        worst, states = max(worst, apart), states + (first > 0)
        wrong += apart > TOLERANCE
        print(f"{number}: {layout}, rank {rank} after {seconds:.1f} s; step {first}, then {then}: "
              f"{apart:.1e}", flush=True)  # fmt: skip
        shutil.rmtree(path)
    for pool in pools.values():
        pool.close()
    print(f"{asked.num} kills, {states} with a state: {wrong} wrong, worst {worst:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
