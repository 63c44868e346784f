"""A training script: `launched.py PLAN STATES STEPS`. It saves when it is asked to stop."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshplan

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def train(plan: Any, states: str | Path, num_steps: int, *, on_step: Any = None) -> list[float]:
    """Train from the newest state on, until `num_steps` or a request to stop; return the losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    model = meshplan.parallelize(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    x, y = meshplan.local_batch(model, (inputs, inputs.flip(1)))
    try:
        step = meshplan.load(states, model, optimizer).step
    except FileNotFoundError:
        step = 0
    losses = []
    while step < num_steps:
        losses.append(meshplan.train_step(model, optimizer, x, y, torch.nn.functional.mse_loss))
        step += 1
        if on_step is not None:
            on_step(step, lambda now: meshplan.save(states, model, optimizer, step=now))
        if meshplan.stop_requested():
            meshplan.save(states, model, optimizer, step=step)
            break
    return losses


def note_step(step: int, save: Any) -> None:
    """Say that training has begun; with DIES=1, save and kill rank 1 in step 2 of the first try."""
    if step == 3 and dist.get_rank() == 0:
        print("begun", flush=True)
    if step == 2 and os.environ.get("DIES") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        save(step)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    path, folder, steps = sys.argv[1:]
    every = train(path, folder, int(steps), on_step=note_step)
    place = {name: int(os.environ.get(name, "-1")) for name in PLACE}
    said = {**place, "losses": every[:3] + every[-1:], "steps": len(every)}
    sys.stdout.write(json.dumps(said) + "\n")  # At once, so that lines of ranks do not mix.
    sys.stdout.flush()
