"""What is called after each recorded step: `Callback`, and writers of CSV, TensorBoard and W&B."""

from __future__ import annotations

import csv
import importlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshplan.errors import ApplyError, Problem
from meshplan.files import write_bytes
from meshplan.shown import shown


@shown
@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one training step took on rank 0.

    Attributes:
        step: Number of the step, from 1.
        loss: What `train_step` returned: the loss over the global batch.
        seconds: From the end of the step before to the end of this one.
        phases: Seconds of "data" (all before the forward: the loader, and what the loop does
            between steps), "forward" with the loss, "backward", "optimizer", and "communication":
            the time in which the computation of the other phases waits for collectives, or for a
            pipeline's sends and receives. A collective that runs meanwhile is not in it; a slower
            rank, for which this one waits, is.
        values: What `Run.log` was given after this step.
    """

    step: int
    loss: float
    seconds: float
    phases: Mapping[str, float]
    values: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, float]:
        """Return all numbers in one mapping; those of phases are named data_s, forward_s, ..."""
        phases = {f"{name}_s": seconds for name, seconds in self.phases.items()}
        return {"step": self.step, "loss": self.loss, "seconds": self.seconds, **phases,
                **self.values}  # fmt: skip


class Callback:
    """What a `Run` calls on rank 0. Override what is needed; each method does nothing here."""

    def on_start(self, folder: Path, first_step: int) -> None:
        """Called when the run begins.

        Args:
            folder: The folder of the run, which exists.
            first_step: Number of the first step: 1, or after the state that was loaded.
        """

    def on_step(self, record: StepRecord) -> None:
        """Called before the step after `record`, or when the run ends."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called when the run ends, with the content of run.json."""


class CSVWriter(Callback):
    """Writes a row for each step into `metrics.csv` in the run's folder.

    A run that goes on from a saved state goes on in the same file: the rows of steps that are
    repeated, because they came after that state, are removed first. A run that begins anew keeps
    the rows of an earlier one in `metrics.csv.old`.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._columns: list[str] = []

    def on_start(self, folder: Path, first_step: int) -> None:
        self._path = folder / "metrics.csv"
        rows: list[dict[str, str]] = []
        if first_step == 1 and self._path.exists():
            os.replace(self._path, folder / "metrics.csv.old")
        if self._path.exists():
            with open(self._path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or ())
                rows = [row for row in reader if _number(row.get("step")) < first_step]
        write_table(self._path, self._columns, rows)

    def on_step(self, record: StepRecord) -> None:
        row = record.row()
        if new := [name for name in row if name not in self._columns]:
            with open(self._path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            write_table(self._path, self._columns, rows)
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows of named values as CSV, with a header if there are columns."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    if columns:
        writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode(), "the metrics")


def _number(text: str | None) -> float:
    """Return a step number of a file; infinity for a row that was cut off."""
    try:
        return int(text or "")
    except ValueError:
        return float("inf")


class TensorBoardWriter(Callback):
    """Writes every number of a step as a scalar for TensorBoard, if it is installed."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, folder: Path, first_step: int) -> None:
        module = _imported("torch.utils.tensorboard", "tensorboard")
        # Scalars of repeated steps, as after a load, are hidden by those written from now on.
        self._writer = module.SummaryWriter(os.fspath(folder), purge_step=first_step)

    def on_step(self, record: StepRecord) -> None:
        for name, value in record.row().items():
            if name != "step":
                self._writer.add_scalar(name, value, record.step)
        self._writer.flush()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


class WandbWriter(Callback):
    """Logs every number of a step to Weights & Biases, if it is installed.

    Args:
        arguments: What `wandb.init` is called with, such as `project="mine"`.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments, self._run = arguments, None

    def on_start(self, folder: Path, first_step: int) -> None:
        wandb = _imported("wandb", "wandb")
        self._run = wandb.init(**{"dir": os.fspath(folder), **self._arguments})

    def on_step(self, record: StepRecord) -> None:
        assert self._run is not None
        self._run.log(record.row(), step=record.step)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        assert self._run is not None
        self._run.summary.update(summary)
        self._run.finish()


WRITERS: Final[Mapping[str, type[Callback]]] = {
    "csv": CSVWriter, "tensorboard": TensorBoardWriter, "wandb": WandbWriter,
}  # fmt: skip
"""The callbacks that `Run` knows by name."""


def is_service(callback: Callback) -> bool:
    """Return True for a writer that shows its numbers elsewhere, beside those of real runs."""
    return isinstance(callback, TensorBoardWriter | WandbWriter)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        what = f"{package} is not installed"
        raise ApplyError(Problem(what, fix=f"pip install {package}, or leave it out")) from None


def callbacks_of(given: Sequence[str | Callback]) -> list[Callback]:
    """Return the callbacks, of which some may be given by name.

    Raises:
        ApplyError: There is no writer of that name, or something else was given.
    """
    found = []
    for each in given:
        if isinstance(each, str) and each in WRITERS:
            found.append(WRITERS[each]())
        elif isinstance(each, Callback):
            found.append(each)
        else:
            what = f"{each!r} is neither a meshplan.Callback nor the name of a writer"
            raise ApplyError(Problem(what, fix=f"use one of {', '.join(WRITERS)}"))
    return found
