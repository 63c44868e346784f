"""A tiny Llama with adapters, trained by TRL's SFTTrainer, alone and under plans of 4 ranks.

Import it in a job only: it imports accelerate, peft and trl.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional
from transformers import PreTrainedTokenizerFast
from transformers.loss.loss_utils import fixed_cross_entropy
from trl import SFTConfig, SFTTrainer

import meshplan
from tests.helpers.hf_jobs import MICRO, PLANS, Norms, error_of, model
from tests.helpers.lit import launched

WORDS: Final = tuple(f"w{number}" for number in range(60))


def tokenizer() -> PreTrainedTokenizerFast:
    """Every word is a token."""
    ids = {word: number for number, word in enumerate(("<unk>", "<eos>", "<pad>", *WORDS))}
    words = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )


def texts(num: int) -> Dataset:
    """Prompts and completions of different lengths: only tokens of completions count."""
    generator = torch.Generator().manual_seed(7)
    rows: dict[str, list[str]] = {"prompt": [], "completion": []}
    for number in range(num):
        drawn = torch.randint(len(WORDS), (12,), generator=generator).tolist()
        words = [WORDS[each] for each in drawn]
        place = 2 + number * 5 % 7
        rows["prompt"].append(" ".join(words[:place]) + " ")
        rows["completion"].append(" ".join(words[place : place + 2 + number % 4]))
    return Dataset.from_dict(rows)


class Metrics(Norms):
    """Keeps what TRL adds to a log."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[float, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        super().on_log(args, state, control, logs, **more)
        if logs and "grad_norm" in logs:
            self.metrics.append((logs["entropy"], logs["mean_token_accuracy"]))


def _arguments(folder: str, ranks: int, **more: Any) -> SFTConfig:
    settings: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": MICRO // ranks,
        "per_device_eval_batch_size": MICRO // ranks, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 0.5,
        "logging_steps": 1, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "save_strategy": "epoch", "save_only_model": False, "seed": 3, "max_length": 16,
        "gradient_checkpointing": False, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return SFTConfig(**(settings | more))


def in_float64(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None,
    shift_labels: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """Compute the loss of a causal LM as transformers does, but without its cast to float32.

    A pipeline multiplies means of parts of a batch with their weights, which rounds otherwise than
    a division of the sum: by 2e-6 of a norm after four steps in float32.
    """
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return fixed_cross_entropy(
        logits.view(-1, vocab_size), shift_labels.reshape(-1), num_items_in_batch
    )


def _trainer(name: str, folder: str, seen: Norms, **more: Any) -> Any:
    ranks = {"": 1, "tp_fsdp": 2, "pp": 2}.get(name, 4)
    made = meshplan.trainer(SFTTrainer) if name else SFTTrainer
    plan: dict[str, Any] = {"plan": {"version": 1, **PLANS[name]}} if name else {}
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    own = model().double()
    own.loss_function = in_float64
    return made(
        model=own, args=_arguments(folder, ranks, **more),
        train_dataset=texts(6 * MICRO - 6),
        eval_dataset=texts(2 * MICRO - 3), processing_class=tokenizer(), peft_config=adapters,
        callbacks=[seen], **plan,
    )  # fmt: skip


def _run(
    name: str, folder: str, resume: bool = False, epochs: int = 2, **more: Any
) -> dict[str, Any]:
    seen = Metrics()
    runner = _trainer(name, folder, seen, num_train_epochs=epochs, **more)
    runner.train(resume_from_checkpoint=resume or None)
    evaluated = runner.evaluate()
    last = Path(folder) / f"checkpoint-{runner.state.global_step}"
    files = sorted(each.name for each in last.iterdir()) if last.exists() else []
    return {
        "losses": seen.losses, "norms": seen.norms, "eval_loss": evaluated["eval_loss"],
        "accuracy": evaluated["eval_mean_token_accuracy"], "step": runner.state.global_step,
        "tokens": evaluated["eval_num_tokens"], "metrics": seen.metrics,
        "files": files, "adapters": load_file(last / "adapter_model.safetensors"),
    }  # fmt: skip


def _settings(smoothing: float, is_whole: bool) -> dict[str, Any]:
    """Return the arguments of a loss.

    Args:
        smoothing: TRL's `label_smoothing_factor`.
        is_whole: If True, the loss of all tokens at once. TRL 1.14 has chunks of them by default,
            in float32, which a pipeline cannot record and which cannot be smoothed.
    """
    kind = {"loss_type": "nll"} if is_whole or smoothing else {}
    return {"label_smoothing_factor": smoothing, **kind}


def alone(folder: str, smoothing: float = 0.0, is_whole: bool = False) -> dict[str, Any]:
    """In one process, with TRL alone."""
    return _run("", folder, **_settings(smoothing, is_whole))


def planned(
    name: str, folder: str, resume: bool = False, epochs: int = 2, smoothing: float = 0.0,
    is_whole: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Under a plan, on the ranks of a pool."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return _run(name, folder, resume, epochs, **_settings(smoothing, is_whole))


PACKED: Final[dict[str, dict[str, Any]]] = {
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "eval_packing": False},
    "bfd": {"packing": True, "packing_strategy": "bfd", "eval_packing": False},
    "padding_free": {"padding_free": True, "max_length": None},
}
"""Arguments that put several samples into one row."""


def packed(name: str, folder: str, kind: str) -> dict[str, Any]:
    """Train on rows of several samples."""
    with launched() if name else nullcontext():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return _run(name, folder, **PACKED[kind], **_settings(0.0, is_whole=True))


def refused(name: str, folder: str, **more: Any) -> str:
    """Return the error of an SFTTrainer that a plan does not suit; "" if there is none."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        more |= _settings(0.0, is_whole=name == "pp")
        return error_of(lambda: _trainer(name, folder, Norms(), **more).train())
