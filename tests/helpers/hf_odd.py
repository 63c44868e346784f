"""Trainers with data and losses that are not the plain ones, alone and under plans of 4 ranks.

Import it in a job only: it imports accelerate.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import types
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset, Subset, WeightedRandomSampler
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import meshplan
from meshplan.runtime.apply.wrap import applied
from tests.helpers.hf_jobs import MICRO, PLANS, Norms, Texts, model, scoring, unscaled
from tests.helpers.lit import launched

RANKS: Final = {"": 1, "tp_fsdp": 2, "pp": 2}
"""Data ranks of a plan, if they are not 4."""


class Stream(IterableDataset[Any]):
    """Sequences of unknown number."""

    def __init__(self, num: int) -> None:
        self.texts = Texts(num)

    def __iter__(self) -> Iterator[Any]:
        return (self.texts[index] for index in range(len(self.texts)))


class Classes(Texts):
    """Sequences of one of 3 classes."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.tokens[index], "labels": index % 3}


class Lengths(Texts):
    """Sequences of different lengths."""

    def __getitem__(self, index: int) -> Any:
        return {
            key: value[: 4 + index * 5 % 9] for key, value in super().__getitem__(index).items()
        }


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of rows of 12 tokens, also where all samples are shorter."""
    found = {"input_ids": torch.zeros(len(samples), 12, dtype=torch.long),
             "labels": torch.full((len(samples), 12), -100)}  # fmt: skip
    for key, rows in found.items():
        for row, sample in zip(rows, samples, strict=True):
            row[: len(sample[key])] = sample[key]
    return found


class Numbers(Texts):
    """Sequences, each with one number to predict."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.tokens[index], "labels": float(index % 7) / 3 - 1}


def classifying() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def untyped() -> Any:
    """A causal model without a `loss_type`, of which the Trainer counts the first tokens, too."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def translating() -> Any:
    """A model with a decoder, whose cache has a class of its own."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def entropy(outputs: Any, labels: Any, **how: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, -2), labels.flatten(), **how)


class Documented(Trainer):  # type: ignore[misc]
    """The loss of its own that transformers' documentation shows."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = entropy(outputs, labels, reduction=reduction)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class OverRanks(Documented):
    """The same, for several ranks."""

    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Mean(Trainer):  # type: ignore[misc]
    """A mean over samples, whatever number of items there is."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = entropy(outputs, labels, label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


class Drawn(Trainer):  # type: ignore[misc]
    """Draws fewer samples than there are."""

    def _get_train_sampler(self, *args: Any) -> Any:
        generator = torch.Generator().manual_seed(4)
        return WeightedRandomSampler([1.0, 2.0] * 16, 21, generator=generator)


class Preferring(Trainer):  # type: ignore[misc]
    """A loss of pairs: each sample is two rows, as in TRL's DPOTrainer and RewardTrainer."""

    loss_is_scaled_for_ga = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.can_return_loss = True
        self.kept: list[float] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        chosen, rejected = outputs.logits[:, 0].chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        every = self.accelerator.gather(chosen.exp())
        self.kept.append(every.dot(torch.arange(len(every)) + 1.0).item())
        return (loss, outputs) if return_outputs else loss


def paired(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Rows of the samples, then the same ones turned."""
    ids = torch.stack([each["input_ids"] for each in samples])
    return {"input_ids": torch.cat((ids, ids.flip(1)))}


def neighbours(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Rows of the samples, each followed by the same one turned."""
    ids = torch.stack([each["input_ids"] for each in samples])
    return {"input_ids": torch.stack((ids, ids.flip(1)), 1).flatten(0, 1)}


class PreferringNeighbours(Preferring):
    """A loss of pairs of rows that are next to each other."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        chosen, rejected = outputs.logits[:, 0].unflatten(0, (-1, 2)).unbind(1)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        return (loss, outputs) if return_outputs else loss


class MeanOfSamples(Mean):
    """The same, which says so."""

    loss_is_scaled_for_ga = False


class Scaled(Trainer):  # type: ignore[misc]
    """A share of the mean over a step's labels, which is NaN for a batch without labels."""

    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[float] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"])
        loss = share_of_mean(outputs, labels, num_items_in_batch)
        if model.training:
            every = self.accelerator.gather((labels[:, 1:] != -100).sum())
            self.kept.append(float(every.sum()))
        return (loss, outputs) if return_outputs else loss


class Early(Trainer):  # type: ignore[misc]
    """The same, but zero without labels. It does not state how it is scaled."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"])
        loss = outputs.logits.sum() * 0.0
        if (labels[:, 1:] != -100).any():
            loss = share_of_mean(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Plain(BertForMaskedLM):  # type: ignore[misc]
    """A model that takes no number of items: its loss is the mean over the labels of a batch."""

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        return super().forward(input_ids=input_ids, labels=labels)


def plain() -> Any:
    torch.manual_seed(0)
    return Plain(unscaled().config)


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A `compute_loss_func` that ignores the number of items."""
    return entropy(outputs, labels)


def share_of_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A `compute_loss_func`: the mean over a batch's labels, weighted by their number."""
    wanted = labels[:, 1:]
    mean = entropy(type(outputs)(logits=outputs.logits[:, :-1]), wanted.contiguous())
    if num_items_in_batch is None:
        return mean
    return mean * (wanted != -100).sum() / num_items_in_batch


def masked(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Hide tokens at random, as for BERT."""
    ids = torch.stack([each["input_ids"] for each in samples])
    is_hidden = torch.rand(ids.shape) < 0.3
    return {
        "input_ids": ids.masked_fill(is_hidden, 63),
        "labels": ids.masked_fill(~is_hidden, -100),
    }


CASES: Final[Mapping[str, dict[str, Any]]] = {
    "tokens": {"data": Texts(29), "accumulate": 2},
    "classes": {"model": classifying, "data": Classes(29)},
    "numbers": {"model": scoring, "data": Numbers(21)},
    "few": {"data": Texts(3)},
    "unlogged": {"data": Texts(32), "logging_steps": 3},
    "smoothing": {"data": Texts(29), "label_smoothing_factor": 0.1},
    "stream": {"data": Stream(29), "accumulate": 2, "max_steps": 4},
    "worker": {"data": Stream(29), "max_steps": 4, "dataloader_num_workers": 1},
    "drawn": {"base": Drawn, "data": Texts(32)},
    "lengths": {
        "data": Lengths(450), "data_collator": padded, "max_steps": 12,
        "train_sampling_strategy": "group_by_length",
    },
    "documented": {"model": classifying, "base": Documented, "data": Classes(29), "accumulate": 2},
    "over_ranks": {"model": classifying, "base": OverRanks, "data": Classes(29), "accumulate": 2},
    "mean": {"model": classifying, "base": Mean, "data": Classes(32)},
    "untyped": {"model": untyped, "data": Texts(29), "accumulate": 2},
    "flat": {"data": Texts(29), "data_collator": DataCollatorWithFlattening(), "accumulate": 2},
    "flat_few": {"data": Texts(17), "data_collator": DataCollatorWithFlattening()},
    "flat_stream": {
        "data": Stream(29), "data_collator": DataCollatorWithFlattening(), "max_steps": 5,
        # The Trainer alone weights the last batch of a stream by its rows.
        "evaluated": Texts(13),
    },
    "pairs": {
        "model": classifying, "base": Preferring, "data": Texts(29), "data_collator": paired,
        "accumulate": 2, "label_names": [], "compute_metrics": lambda found: {},
    },
    "neighbours": {
        "model": classifying, "base": PreferringNeighbours, "data": Texts(29),
        "data_collator": neighbours, "accumulate": 2, "label_names": [],
        "compute_metrics": lambda found: {},
    },
    "samples": {"model": classifying, "base": MeanOfSamples, "data": Classes(29), "accumulate": 2},
    "translating": {"model": translating, "data": Texts(32)},
    "plain": {"model": plain, "data": Texts(29)},
    "shares": {"data": Texts(19), "compute_loss_func": share_of_mean, "accumulate": 2},
    "scaled": {"base": Scaled, "data": Texts(17)},
    "early": {"base": Early, "data": Texts(17)},
    "ignoring": {
        "model": classifying, "compute_loss_func": mean_loss, "data": Classes(29),
    },
}  # fmt: skip
"""Arguments of the Trainer, or of TrainingArguments."""
OF_TRAINER: Final = ("compute_loss_func", "compute_metrics", "data_collator", "callbacks")


def _evaluated(data: Any) -> Any:
    return Stream(13) if isinstance(data, Stream) else Subset(data, range(min(len(data), 13)))


def _made(name: str, folder: str, case: Mapping[str, Any]) -> tuple[Any, Norms]:
    given = dict(case)
    base, make = given.pop("base", Trainer), given.pop("model", model)
    data, micro = given.pop("data"), MICRO // RANKS.get(name, 4)
    evaluated = given.pop("evaluated", None) or _evaluated(data)
    of_trainer = {key: given.pop(key) for key in OF_TRAINER if key in given}
    seen = Norms()
    of_trainer["callbacks"] = [seen, *of_trainer.get("callbacks", ())]
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=micro, per_device_eval_batch_size=micro,
        gradient_accumulation_steps=given.pop("accumulate", 1), learning_rate=0.5, optim="sgd",
        num_train_epochs=given.pop("epochs", 2), max_grad_norm=0.5, use_cpu=True,
        logging_steps=given.pop("logging_steps", 1), report_to=[], disable_tqdm=True,
        save_strategy=given.pop("save_strategy", "no"), seed=3,
        include_num_input_tokens_seen="all", **given,
    )  # fmt: skip
    plan = {"plan": {"version": 1, **PLANS[name]}} if name else {}
    made = meshplan.trainer(base) if name else base
    runner = made(
        model=make(), args=args, train_dataset=data,
        eval_dataset=evaluated,
        **of_trainer, **plan,
    )  # fmt: skip
    return runner, seen


def _run(name: str, folder: str, case: Mapping[str, Any]) -> dict[str, Any]:
    runner, seen = _made(name, folder, case)
    mean = runner.train().training_loss
    if name:
        assert applied(runner.model_wrapped).history.steps == runner.state.global_step
    return {
        "mean": mean, "kept": getattr(runner, "kept", []), "losses": seen.losses,
        "norms": seen.norms, "eval_loss": runner.evaluate()["eval_loss"],
        "tokens": runner.state.num_input_tokens_seen, "flops": runner.state.total_flos,
    }  # fmt: skip


class Again(TrainerCallback):
    """Saves at the end of an epoch, after its last step has been saved."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        control.should_save = True
        return control


def _start_workers() -> None:
    """Let a rank of a pool, which is a daemon, start workers of a DataLoader."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.multiprocessing.set_start_method("fork", force=True)


def _in_ranks(run: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function in ranks of a pool, with torchrun's variables."""

    @functools.wraps(run)
    def wrapped(*args: Any) -> Any:
        with launched():
            os.environ["ACCELERATE_USE_CPU"] = "true"
            _start_workers()
            return run(*args)

    return wrapped


def alone(folder: str) -> dict[str, Any]:
    """Run all cases in one process, with transformers alone."""
    _start_workers()
    return {case: _run("", f"{folder}/{case}", CASES[case]) for case in CASES}


@_in_ranks
def planned(name: str, folder: str, cases: tuple[str, ...]) -> dict[str, Any]:
    """Run cases under a plan."""
    return {case: _run(name, f"{folder}/{case}", CASES[case]) for case in cases}


class Seeing(Trainer):  # type: ignore[misc]
    """Keeps which tokens are hidden."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden: list[Any] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.hidden.append((inputs["labels"] != -100).tolist())
        return super().training_step(model, inputs, *args, **kwargs)


@_in_ranks
def hiding(name: str, folder: str) -> tuple[list[float], list[Any]]:
    """Return the losses of a model that learns hidden tokens, which workers draw, and which."""
    case = {"model": unscaled, "base": Seeing, "data": Texts(16), "data_collator": masked,
            "dataloader_num_workers": 1}  # fmt: skip
    runner, seen = _made(name, folder, case)
    runner.train()
    return seen.losses, runner.hidden


@_in_ranks
def written_over(name: str, folder: str) -> dict[str, Any]:
    """Train twice into one folder, then go on from it after its newest checkpoint was cut off."""
    case = {"data": Texts(32), "save_strategy": "steps", "save_steps": 2, "callbacks": [Again()]}
    for _ in range(2):
        runner, seen = _made(name, folder, case)
        runner.train()
        runner.save_model()
    before = seen.losses
    torch.distributed.barrier()
    if meshplan.is_main():
        Path(folder, "checkpoint-8", "trainer_state.json").unlink()
    torch.distributed.barrier()
    runner, seen = _made(name, folder, case)
    runner.train(resume_from_checkpoint=True)
    return {"before": before, "after": seen.losses,
            "files": sorted(each.name for each in Path(folder).iterdir())}  # fmt: skip


@_in_ranks
def of_rows(name: str, folder: str) -> tuple[str, str]:
    """Return warnings of training, and the error of an evaluation, on rows that a worker makes."""
    case = {"data": Stream(29), "data_collator": DataCollatorWithFlattening(), "max_steps": 4,
            "dataloader_num_workers": 1}  # fmt: skip
    runner, _ = _made(name, folder, case)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runner.train()
    said = "".join(str(each.message) for each in seen if "repeated" in str(each.message))
    try:
        runner.evaluate()
    except Exception as error:
        return said, f"{type(error).__name__}: {error}"
    return said, ""


@_in_ranks
def error_of_adafactor(name: str, folder: str) -> str:
    """Return the error of training with transformers' Adafactor."""
    runner, _ = _made(name, folder, {"data": Texts(8)})
    runner.args.optim = "adafactor"
    try:
        runner.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Hub:
    """In the place of the Hub: keeps which files are uploaded, and whether they can be loaded."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, list[str]]] = []
        self.logits: list[torch.Tensor] = []

    def create_repo(self, name: str, **more: Any) -> Any:
        return types.SimpleNamespace(repo_id=f"user/{name}")

    def upload_folder(self, *, folder_path: str, commit_message: str, **more: Any) -> Any:
        files = sorted(each.name for each in Path(folder_path).iterdir() if each.is_file())
        self.pushed.append((commit_message, files))
        loaded = LlamaForCausalLM.from_pretrained(folder_path)
        self.logits.append(loaded(torch.arange(12)[None]).logits.detach())
        done: Future[str] = Future()
        done.set_result("pushed")
        return done


@_in_ranks
def pushed(name: str, folder: str) -> dict[str, Any]:
    """Return what a Trainer uploads, as `Trainer` or under a plan."""
    hub = _Hub()
    args = TrainingArguments(
        output_dir=os.path.join(folder, "mine"), use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=MICRO // RANKS.get(name, 4), max_steps=2, save_strategy="steps",
        save_steps=1, push_to_hub=True, hub_always_push=True, optim="sgd", learning_rate=0.5,
    )  # fmt: skip
    with unittest.mock.patch("transformers.trainer.hf_api", return_value=hub):
        base: Any = meshplan.trainer(Trainer) if name else Trainer
        plan = {"plan": {"version": 1, **PLANS[name]}} if name else {}
        runner = base(model=model(), args=args, train_dataset=Texts(2 * MICRO), **plan)
        runner.train()
        runner.save_model()
        runner.push_to_hub(commit_message="done")
    return {"pushed": hub.pushed, "logits": hub.logits}
