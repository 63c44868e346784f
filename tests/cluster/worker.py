"""One rank of the measured cluster: `python -m tests.cluster.worker JOB`, started by torchrun.

The job is a JSON file: {"nodes", "inside", "speeds", "plans", "steps", "out"}. At each speed, the
ranks calibrate; then each plan is built once and its steps are timed at each speed. Rank 0 appends
a line of JSON to the file `out` for each plan and speed.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshplan
from meshplan.cost import calibration
from meshplan.cost.calibration import Timings
from meshplan.cost.profile import GENERIC
from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime import calibrate
from meshplan.runtime.base.optimizer_steps import is_due
from meshplan.runtime.verify.module_calls import record_forward
from meshplan.traffic import forecast
from tests.cluster.crossing import leaving_bytes
from tests.cluster.plans import CONFIG, PER_NODE, SEQ_LEN, plans_of
from tests.helpers.nodes import INTERFACE, limit, sent

_HEADER_BYTES: Final = 66
"""Ethernet (14), IPv4 (20) and TCP with timestamps (32), of each packet that the kernel counts."""
_SETTLE_S: Final = 0.3
_ROUNDS: Final = 6
"""Rounds of calibration: slow links take seconds for what 30 rounds repeat."""


def build() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    words = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    return LlamaForCausalLM(LlamaConfig(**words)).train()


def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def set_links(between: str | None, inside: str | None) -> None:
    """Limit the links of this node; its first rank does it, the others wait."""
    dist.barrier()
    if int(os.environ["LOCAL_RANK"]) == 0:
        for interface, rate in ((INTERFACE, between), ("lo", inside)):
            subprocess.run(limit(interface, rate), check=rate is not None, capture_output=True)
    dist.barrier()


def counted(interface: str) -> torch.Tensor:
    """Return (payload bytes, packets) that the interface has sent, while no rank sends."""
    dist.barrier()
    time.sleep(_SETTLE_S)  # The last packets of the barrier are on their way.
    num_bytes, packets = sent(interface)
    found = torch.tensor([num_bytes - _HEADER_BYTES * packets, packets])
    time.sleep(_SETTLE_S)
    dist.barrier()
    return found


def computation() -> Timings:
    """Return the timings of this rank alone, while the others wait and use no processor."""
    world, calibrate._world = calibrate._world, lambda: 1
    try:
        return calibrate.measure()
    finally:
        calibrate._world = world


def links() -> dict[str, Any]:
    """Return the timings of the links alone, which are all that another speed changes."""
    device = torch.device("cpu")
    within, across = calibrate._groups(device)
    works = {
        "collectives": list(calibrate._collectives(device, False, within)),
        "reductions": list(calibrate._collectives(device, False, within, reduces=True)),
        "crossings": list(calibrate._collectives(device, False, across)),
    }
    halves = calibrate._timed(device, list(calibrate._by_turns(works.values())))
    return {
        name: tuple(calibrate._sample(work, halves[id(work)]) for work in group)
        for name, group in works.items()
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Job:
    """A plan on the live ranks."""

    def __init__(self, stated: dict[str, Any]) -> None:
        spec = meshplan.load_spec(stated)
        world = dist.get_world_size()
        ids = torch.randint(CONFIG["vocab_size"], (world, SEQ_LEN),
                            generator=torch.Generator().manual_seed(1))  # fmt: skip
        batch = {"input_ids": ids}, ids.roll(-1, 1)
        self.model = meshplan.parallelize(build(), spec, example_inputs=batch[0])
        self.plan: Plan = self.model.meshplan.plan
        self.mine = meshplan.local_batch(self.model, batch)
        assert self.plan.num_data_ranks == self.plan.mesh.size(*DATA_AXES)
        self.sgd = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        forward = record_forward(build(), self.plan, *self.mine, loss)
        self.count = 0
        self.told = forecast(self.plan, forward, dist.get_rank())

    def step(self) -> None:
        self.count += 1
        meshplan.train_step(self.model, self.sgd, *self.mine, loss)

    def leaving(self) -> list[float]:
        """Return the predicted bytes that leave each node in a step."""
        rank, world = dist.get_rank(), dist.get_world_size()
        own = leaving_bytes(self.plan.mesh, self.told, rank, PER_NODE)
        every = torch.zeros(world, dtype=torch.float64)
        every[rank] = own
        dist.all_reduce(every)
        return every.view(-1, PER_NODE).sum(1).tolist()

    def timed(self, steps: int) -> tuple[list[float], list[list[float]]]:
        """Return (seconds of each step, [payload bytes, packets] of a step that left each node)."""
        # Steps 1, 2, 4, 8, ... also compare replicas, and so send more than is predicted.
        while any(is_due(self.count + 1 + number) for number in range(steps)):
            self.step()
        begin, seconds = counted(INTERFACE), []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
        found = (counted(INTERFACE) - begin).double() / steps
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        every = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
        every[dist.get_rank()] = found
        dist.all_reduce(every)
        return slowest.tolist(), every[::PER_NODE].tolist()


def main(path: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(path).read_text())
    calibrate.ROUNDS = _ROUNDS  # type: ignore[misc]
    # Other programs run on the processors that the ranks share: `calibrate` would rightly refuse.
    calibration._WORST_SPREAD = calibration._WORST_LAW = math.inf  # type: ignore[misc]
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    out = Path(job["out"])
    timings = computation() if is_first else None
    dist.barrier()
    for speed in job["speeds"]:
        set_links(speed, job["inside"])
        begin = time.perf_counter()
        of_links = links()
        if timings is not None:
            timings = replace(timings, num_nodes=job["nodes"], **of_links)
            # What a kernel takes whatever its size is lost in the noise of shared processors.
            profile = replace(calibration.profile_from(timings), kernel_s=GENERIC["kernel_s"])
            calibration.write_profile(profile, Path(f"{path}.{speed}.json"))
            say(f"calibrated at {speed} in {time.perf_counter() - begin:.0f} s: {profile}")
    for name, stated in plans_of(job["nodes"]).items():
        if name not in job["plans"]:
            continue
        set_links(None, None)
        begin = time.perf_counter()
        live = Job(stated)
        for _ in range(3):  # The checks of the first steps send, too.
            live.step()
        leaving = live.leaving()
        built = time.perf_counter() - begin
        for speed in job["speeds"]:
            set_links(speed, job["inside"])
            seconds, left = live.timed(job["steps"])
            if is_first:
                facts = {
                    "plan": name, "speed": speed, "seconds": seconds, "told_bytes": leaving,
                    "bytes": [each[0] for each in left], "packets": [each[1] for each in left],
                    "unknown": live.told.unknown,
                }  # fmt: skip
                with out.open("a") as file:
                    file.write(json.dumps(facts) + "\n")
                say(f"{name}, {speed}: {statistics.median(seconds):.2f} s, built in {built:.0f} s")
        del live
        gc.collect()
    set_links(None, None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
