"""Checkpoints, weights, and models on the Hub, as a Trainer under a plan writes and reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from meshplan.errors import ApplyError, MissingStateError, Origin, Problem
from meshplan.interop.external_step import ExternalStep
from meshplan.interop.trainer_folders import STATE, in_place_of, save_over
from meshplan.runtime.state.load import load
from meshplan.runtime.state.save import save


class Saving:
    """The methods of a Trainer that write and read. Mixed in before the Trainer's class."""

    # Attributes of the Trainer.
    args: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    data_collator: Any
    push_to_hub: Callable[..., Any]
    _get_output_dir: Callable[..., str]
    _planned: Callable[[], nn.Module]
    _step: ExternalStep | None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights as a checkpoint of Hugging Face; all ranks call it.

        With `push_to_hub` in the arguments, rank 0 then uploads the folder, as the Trainer does.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        if self._step is None:
            super().save_model(folder, _internal_call)  # type: ignore[misc]
            return
        save_over(self._step.model, folder)
        own = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if own is not None and self.args.should_save:
            own.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        folder = os.path.join(
            self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}"
        )
        with in_place_of(folder):
            super()._save_checkpoint(model, trial, *args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(
            os.path.join(output_dir, STATE), self._planned(), self.optimizer,
            step=self.state.global_step, scheduler=self.lr_scheduler,
        )  # fmt: skip

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: a state has the loss scale."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: a state has the random number generators."""

    def _load_state(self, checkpoint: Any) -> None:
        """Load model, optimizer, scheduler and random number generators of a checkpoint."""
        folder = os.path.join(checkpoint, STATE)
        try:
            load(folder, self._planned(), self.optimizer, scheduler=self.lr_scheduler)
        except MissingStateError:
            what = "this checkpoint has no training state of meshplan"
            fix = "load its weights into the model, and train without resume_from_checkpoint"
            raise ApplyError(Problem(what, Origin(str(checkpoint)), fix)) from None

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Do nothing: `_load_state` has loaded it."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: `_load_state` loads weights and optimizer together."""

    def _load_best_model(self) -> None:
        load(os.path.join(self.state.best_model_checkpoint, STATE), self._planned())
