"""Runs with callbacks as Lightning's documentation shows them, alone and under plans of 4 ranks.

Import it in a job only: it imports Lightning.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from meshplan.interop.lightning import MeshplanStrategy
from tests.helpers.lit import MICRO, Sequences, data_ranks, launched, plan_of, trainer
from tests.helpers.stated import Model, next_token_loss


class Documented(pl.LightningModule):
    """A network beside a buffer that counts samples, which a checkpoint has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.register_buffer("seen", torch.zeros(()))
        self.losses: list[float] = []
        self.scores: list[float] = []
        self.modes: list[tuple[bool, bool]] = []

    def on_train_start(self) -> None:
        for each in self.model.modules():
            if isinstance(each, nn.LayerNorm):
                each.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note_modes()
        loss = next_token_loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def note_modes(self) -> None:
        """Keep whether any layer of a kind trains: those that were set to evaluation, the rest."""
        kinds = [(isinstance(each, nn.LayerNorm), each.training) for each in self.model.modules()]
        of = [[mode for is_norm, mode in kinds if is_norm == which] for which in (True, False)]
        self.modes.append((any(of[0]), all(of[1])))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", next_token_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.scores.append(float(self.trainer.callback_metrics["val_loss"]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        loss = self.trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.losses.append(float(loss))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=8.0, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


class DocumentedPipeline(Documented):
    """The same with the loss where only the last stage has the output."""

    def meshplan_loss(self, output: Tensor, batch: Any) -> Tensor:
        return next_token_loss(output, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.note_modes()
        super().on_train_batch_end(*args)


def run(name: str, folder: str, extra: dict[str, Any], epochs: int = 12) -> dict[str, Any]:
    """Train until the validation gets worse; then go on from the best checkpoint.

    Args:
        name: A plan; "" for one process.
        folder: The folder of checkpoints.
        extra: What the plan states beside it, which one process is told as arguments.
        epochs: The most epochs.
    """
    torch.manual_seed(0)
    kind = DocumentedPipeline if "pp" in name else Documented
    ranks = data_ranks(name) if name else 1
    sampler = DistributedSampler(Sequences(3 * MICRO), 1, 0) if ranks == 1 else None
    train = DataLoader(Sequences(3 * MICRO), batch_size=MICRO // ranks, sampler=sampler)
    valid = DataLoader(Sequences(2 * MICRO), batch_size=MICRO // ranks)
    settings = {} if name else {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    out: dict[str, Any] = {}
    with launched() if name else nullcontext():
        for again in (False, True):
            torch.manual_seed(0)
            module = kind()
            keeper = ModelCheckpoint(
                folder, monitor="val_loss", mode="min", filename="{epoch}-{step}", save_top_k=2,
                save_last=True,
            )  # fmt: skip
            stopper = EarlyStopping(monitor="val_loss", mode="min", patience=2)
            strategy = MeshplanStrategy(plan_of(name, **extra)) if name else "auto"
            made = trainer(
                strategy, 4 if name else 1, max_epochs=epochs, callbacks=[keeper, stopper],
                enable_checkpointing=True, **settings,
            )  # fmt: skip
            best = out.get("path") if again else None
            made.fit(module, train, valid, ckpt_path=best)
            out["path"] = keeper.best_model_path
            out[f"run{int(again)}"] = {
                "losses": module.losses, "scores": module.scores, "seen": float(module.seen),
                "epoch": made.current_epoch, "step": made.global_step,
                "best": os.path.basename(keeper.best_model_path),
                "kept": sorted(map(os.path.basename, keeper.best_k_models)),
                "score": float(keeper.best_model_score), "stopped": stopper.stopped_epoch,
                "waited": stopper.wait_count, "modes": set(module.modes),
                "rate": made.optimizers[0].param_groups[0]["lr"],
            }  # fmt: skip
    return out


def decisions() -> list[bool]:
    """Return what ranks decide together if only the first one, or all of them, say yes."""
    strategy: Any = MeshplanStrategy({"version": 1, "strategy": "ddp"})
    strategy.parallel_devices = [torch.device("cpu")]
    rank = torch.distributed.get_rank()
    strategy.cluster_environment = type("Environment", (), {"local_rank": lambda self: 0})()
    return [
        strategy.reduce_boolean_decision(answer, all=is_all)
        for answer in (rank == 0, True, False) for is_all in (True, False)
    ]  # fmt: skip
