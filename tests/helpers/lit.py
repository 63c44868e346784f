"""LightningModules under plans of 4 ranks and in one process, for the tests of Lightning.

Import it in a job only: it imports Lightning.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshplan.interop.lightning import MeshplanStrategy
from tests.helpers.stated import (
    EP,
    INPUT,
    PIPELINE,
    SEQ_LEN,
    TP,
    VOCAB,
    Model,
    next_token_loss,
)

PLANS: Final[Mapping[str, dict[str, Any]]] = {
    "ddp": {"strategy": "ddp"},
    "zero2": {"strategy": "zero2"},
    "full_shard": {"strategy": "full_shard"},
    "hybrid": {"strategy": "hybrid_shard", "mesh": [2, 2]},
    "tp_fsdp": {"mesh": {"dp_shard": 2, "tp": 2}, "rules": TP},
    "pp_fsdp": {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": PIPELINE},
    "cp_fsdp": {"mesh": {"dp_shard": 2, "cp": 2}, "batch": {"seq_len": SEQ_LEN}},
    "ep_fsdp": {"mesh": {"dp_shard": 4, "ep": "2 in dp_shard"}, "rules": EP},
}  # fmt: skip
MICRO: Final = 8
"""Samples of a microbatch on all data ranks."""


def plan_of(name: str, **more: Any) -> dict[str, Any]:
    return {"version": 1, "input": INPUT, **PLANS[name], **more}


def data_ranks(name: str) -> int:
    mesh = PLANS[name].get("mesh")
    return 2 if isinstance(mesh, dict) and "ep" not in mesh else 4


class Sequences(Dataset[Any]):
    """Sequences of tokens; with `masks`, each has another number of targets that count."""

    def __init__(self, num: int, masks: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCAB, (num, SEQ_LEN + 1), generator=generator)
        self.targets = self.tokens[:, 1:].clone()
        if masks:
            for number, row in enumerate(self.targets):
                row[: number * 3 % SEQ_LEN] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.targets[index]


class Lit(pl.LightningModule):
    """As the docs of Lightning write one: a network, its steps, its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = next_token_loss(self.model(inputs), targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        logits = self.model(inputs)
        self.log("val_loss", next_token_loss(logits, targets), sync_dist=True)
        hits = (logits.argmax(-1) == targets).float().sum()
        self.log("hits", hits, reduce_fx="sum", sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("test_loss", next_token_loss(self.model(inputs), targets), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])[:, -1]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = self.trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.losses.append(float(loss))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Pipelined(Lit):
    """The same with the loss where only the last stage has the output."""

    def meshplan_loss(self, output: Tensor, batch: Any) -> Tensor:
        return next_token_loss(output, batch[1])


@contextmanager
def launched() -> Iterator[None]:
    """Set torchrun's variables in a rank of a pool."""
    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def trainer(strategy: Any, devices: int, **more: Any) -> pl.Trainer:
    """A Trainer that writes nothing unless it is asked to."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False,
    }  # fmt: skip
    settings = {"accelerator": "cpu", "max_epochs": 2, **quiet, **more}
    return pl.Trainer(strategy=strategy, devices=devices, **settings)


def loaders(ranks: int, num: int = 3 * MICRO, masks: bool = False) -> Any:
    """Loaders for training, which Lightning shuffles on several ranks only, and for validation."""
    data = Sequences(num, masks)
    sampler = DistributedSampler(data, 1, 0) if ranks == 1 else None
    return (
        DataLoader(data, batch_size=MICRO // ranks, sampler=sampler),
        DataLoader(Sequences(2 * MICRO, masks), batch_size=MICRO // ranks),
    )


def run(
    module: Lit, strategy: Any, devices: int, ranks: int, masks: bool = False, **more: Any
) -> dict[str, Any]:
    """Fit, validate, test and predict; return all numbers."""
    train, valid = loaders(ranks, masks=masks)
    made = trainer(strategy, devices, **more)
    made.fit(module, train, valid)
    out: dict[str, Any] = {"losses": module.losses}
    if "train_loss_epoch" in made.callback_metrics:
        out["epoch"] = float(made.callback_metrics["train_loss_epoch"])
    out |= {key: float(value) for key, value in made.validate(module, valid, verbose=False)[0].items()}
    out |= {key: float(value) for key, value in made.test(module, valid, verbose=False)[0].items()}
    out["predicted"] = torch.cat(made.predict(module, valid))
    return out


SETTINGS: Final = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def alone(masks: bool = False, **more: Any) -> dict[str, Any]:
    """In one process, with Lightning alone."""
    torch.manual_seed(0)
    return run(Lit(), "auto", 1, 1, masks, **{**SETTINGS, **more})


def planned(name: str, masks: bool = False, extra: Any = None, **more: Any) -> dict[str, Any]:
    """Under a plan, on the ranks of a pool."""
    torch.manual_seed(0)
    module = Pipelined() if "pp" in name else Lit()
    loss = {"loss": "tokens"} if masks else {}
    with launched():
        strategy = MeshplanStrategy(plan_of(name, **loss, **(extra or {})))
        return run(module, strategy, 4, data_ranks(name), masks, **{**SETTINGS, **more})
