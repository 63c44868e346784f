"""How long does saving and loading a state take, beside torch.save and DCP?

    python -m tests.bench.state_time [--mib 64 256] [--ranks 1 4] [--repeat 3] [--folder DIR]

A model of that many MiB of parameters and its AdamW, three times as much in all, is sharded over
the ranks of this machine. The three ways take turns in one run; each figure is the median, with the
slowest rank's seconds. `torch.save` gathers the whole model and its optimizer on rank 0. All write
to the same folder; what is written is in the page cache when it is read.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import meshplan
from tests.helpers.pool import Pool

WIDTH = 1024
WAYS = ("meshplan", "dcp", "torch.save")


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def measure(mib: int, repeat: int, path: Path) -> dict[str, tuple[float, float]]:
    """Seconds of (saving, loading) by way, on this rank's job."""
    blocks = max(1, mib * 2**20 // (4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)))
    model = meshplan.parallelize(model, {"version": 1, "strategy": "full_shard"})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def dcp_load(folder: Path) -> None:
        states = get_state_dict(model, optimizer)
        content = {"model": states[0], "optimizer": states[1]}
        dcp.load(content, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])

    def dcp_save(folder: Path) -> None:
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)

    def torch_save(folder: Path) -> None:
        states = get_state_dict(model, optimizer, options=whole)
        if dist.get_rank() == 0:
            folder.mkdir()
            torch.save(states, folder / "all.pt")

    def torch_load(folder: Path) -> None:
        states = torch.load(folder / "all.pt", weights_only=True, mmap=True)
        set_state_dict(
            model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=whole
        )

    for number in range(repeat):
        folders = {way: path / f"{way}-{number}" for way in WAYS}
        ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "meshplan": (
                lambda f=folders["meshplan"]: meshplan.save(f, model, optimizer, step=1),
                lambda f=folders["meshplan"]: meshplan.load(f, model, optimizer),
            ),
            "dcp": (lambda f=folders["dcp"]: dcp_save(f), lambda f=folders["dcp"]: dcp_load(f)),
            "torch.save": (
                lambda f=folders["torch.save"]: torch_save(f),
                lambda f=folders["torch.save"]: torch_load(f),
            ),
        }  # type: ignore[misc]
        for way, (save, load) in ways.items():
            times[way].append((timed(save), timed(load)))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folders[way])
    return {
        way: (statistics.median(s for s, _ in each), statistics.median(x for _, x in each))
        for way, each in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; the default is /tmp")
    asked = parser.parse_args()
    print(f"torch {torch.__version__}; seconds of saving / loading, and MB/s of saving")
    for ranks in asked.ranks:
        pool = Pool(ranks)
        for mib in asked.mib:
            path = Path(tempfile.mkdtemp(dir=asked.folder))
            found = pool.run(measure, mib, asked.repeat, path, timeout=600.0)[0]
            shutil.rmtree(path)
            cells = [
                f"{way} {saved:.2f} / {loaded:.2f} ({3 * mib * 1.048576 / saved:.0f})"
                for way, (saved, loaded) in found.items()
            ]
            print(f"{ranks} ranks, {3 * mib} MiB:", "; ".join(cells), flush=True)
        pool.close()


if __name__ == "__main__":
    main()
