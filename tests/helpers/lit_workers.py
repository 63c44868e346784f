"""A LightningModule and a loop of Fabric, whose samples are drawn by workers of the loader.

Import it in a job only: it imports Lightning.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from meshplan.interop.lightning import MeshplanFabricStrategy, MeshplanStrategy
from tests.helpers.lit import launched
from tests.helpers.lit_odd import INPUT, PLANS, Regression


class Drawn(Dataset[Any]):
    """Samples with noise by three generators."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.tensor([float(torch.rand(())), random.random(), np.random.rand()])
        return noise.sum() + torch.full((8,), float(index)), noise


class Seen(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.noise: list[torch.Tensor] = []

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.noise.append(batch[1].clone())


@contextmanager
def _with_workers() -> Iterator[None]:
    """Let a rank of a pool, which is a daemon, start workers of a DataLoader inside."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config["daemon"]
    config["daemon"] = False
    try:
        with launched():
            yield
    finally:
        config["daemon"] = before


def _plan(name: str) -> dict[str, Any]:
    return {"version": 1, "input": INPUT, **PLANS[name]}


def _loader(workers: int) -> DataLoader[Any]:
    return DataLoader(Drawn(), batch_size=4, num_workers=workers)


def _by_rank(noise: list[torch.Tensor]) -> list[torch.Tensor]:
    own = torch.stack(noise)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return every


def drawn(name: str, workers: int) -> list[torch.Tensor]:
    """Return the noise in the batches of each rank, with the Trainer."""
    with _with_workers():
        trainer = L.Trainer(
            accelerator="cpu", devices=4, max_epochs=1, logger=False,
            strategy=MeshplanStrategy(_plan(name)), enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        module = Seen()
        L.seed_everything(3, workers=True, verbose=False)
        trainer.fit(module, _loader(workers))
        return _by_rank(module.noise)


def drawn_by_fabric(name: str, workers: int) -> list[torch.Tensor]:
    """Do the same in a loop of Fabric."""
    with _with_workers():
        strategy = MeshplanFabricStrategy(_plan(name))
        fabric = L.Fabric(accelerator="cpu", devices=4, strategy=strategy)
        fabric.launch()
        fabric.setup(Regression().model)
        fabric.seed_everything(3, workers=True, verbose=False)
        loader = fabric.setup_dataloaders(_loader(workers))
        return _by_rank([batch[1] for batch in loader])
