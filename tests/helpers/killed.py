"""A job of which rank 1 is killed: `killed.py lightning|trainer PLAN FOLDER STEP [all]`.

With `all` every rank is, as when a machine is switched off. With STEP 0 no rank is killed, and the
job goes on from the newest checkpoint in the folder. Rank 0 prints the losses as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any

import torch.distributed as dist


def kill_rank_1() -> None:
    if dist.get_rank() == 1 or sys.argv[-1] == "all":
        os.kill(os.getpid(), signal.SIGKILL)


def lightning(plan: str, folder: str, step: int) -> dict[str, Any]:
    jobs = importlib.import_module("tests.helpers.lit")
    found: dict[str, Any] = jobs.fitted(plan, folder, 9, not step, step or None, kill_rank_1)
    return found


def trainer(plan: str, folder: str, step: int) -> dict[str, Any]:
    jobs = importlib.import_module("tests.helpers.hf_jobs")

    class Death(jobs.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if step and state.global_step == step:
                kill_rank_1()

    found: dict[str, Any] = jobs.planned(plan, folder, not step, 2, callbacks=[Death()])
    return found


if __name__ == "__main__":
    kind, name, where, died = sys.argv[1:5]
    dist.init_process_group("gloo")
    said = {"lightning": lightning, "trainer": trainer}[kind](name, where, int(died))
    if dist.get_rank() == 0:
        print(json.dumps({"losses": said["losses"], "step": said["step"]}), flush=True)
    dist.destroy_process_group()
