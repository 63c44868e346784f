"""TRL's trainers of pairs, DPOTrainer and RewardTrainer, alone and under plans with a pipeline.

Import it in a job only: it imports accelerate, peft and trl.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
import trl.trainer.dpo_trainer
import trl.trainer.utils
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from torch import nn
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

import meshplan
from tests.helpers.hf_jobs import MICRO, adapted, error_of, model
from tests.helpers.lit import launched
from tests.helpers.sft_jobs import WORDS, tokenizer

PLANS: Final[Mapping[str, dict[str, Any]]] = {
    "pp": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}},
    "pp_ddp": {"mesh": {"dp_replicate": 2, "pp": 2}, "strategy": "ddp",
               "pipeline": {"microbatches": 2}},
    "pp_fsdp": {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"microbatches": 2}},
    "pp_tp": {"mesh": {"pp": 2, "tp": 2}, "tp_plan": "auto", "pipeline": {"microbatches": 4}},
    "ddp": {"strategy": "ddp"},
}  # fmt: skip
RANKS: Final = {"": 1, "pp": 1, "pp_ddp": 2, "pp_fsdp": 2, "pp_tp": 1, "ddp": 4}
"""Data ranks of a plan."""


def pairs(num: int, *, is_scored: bool = False) -> Dataset:
    """Prompts with a better and a worse answer, of different lengths."""
    generator = torch.Generator().manual_seed(5)
    rows: dict[str, list[Any]] = {"prompt": [], "chosen": [], "rejected": []}
    for number in range(num):
        drawn = torch.randint(len(WORDS), (14,), generator=generator).tolist()
        words = [WORDS[each] for each in drawn]
        rows["prompt"].append(" ".join(words[: 2 + number % 3]) + " ")
        rows["chosen"].append(" ".join(words[5 : 7 + number % 4]))
        rows["rejected"].append(" ".join(words[10 : 11 + number % 3]))
    if is_scored:
        rows["margin"] = [0.1 * (number % 5) for number in range(num)]
    return Dataset.from_dict(rows)


class Logs(TrainerCallback):  # type: ignore[misc]
    """Keeps all numbers that are logged, but times."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        left_out = ("runtime", "per_second", "flos")
        kept = {k: float(v) for k, v in (logs or {}).items() if not any(x in k for x in left_out)}
        self.logs.append(kept)


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(_gpt2_config())


def _gpt2_config() -> GPT2Config:
    return GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip


def gpt2_scores() -> Any:
    torch.manual_seed(0)
    config = _gpt2_config()
    config.num_labels, config.pad_token_id = 1, 2
    return GPT2ForSequenceClassification(config)


def llama_scores() -> Any:
    torch.manual_seed(0)
    config = model().config
    config.num_labels, config.pad_token_id = 1, 2
    return LlamaForSequenceClassification(config)


def other() -> Any:
    """A reference that is not the model as it begins."""
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.9)
    return made


def adapters(**more: Any) -> LoraConfig:
    return LoraConfig(r=4, init_lora_weights=False, **more)


class ScoredAsBefore(RewardTrainer):  # type: ignore[misc]
    """States that its loss is not scaled as TRL did before 1.15."""

    loss_is_scaled_for_ga = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class Unwrapping(DPOTrainer):  # type: ignore[misc]
    """Reads the adapters of the model that its loss is given, as TRL 1.14 does."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.accelerator.unwrap_model(model).peft_config
        return super().compute_loss(model, *args, **kwargs)


CASES: Final[Mapping[str, dict[str, Any]]] = {
    "reward": {"base": RewardTrainer, "model": llama_scores},
    "reward_before": {"base": ScoredAsBefore, "model": llama_scores},
    "reward_margin": {"base": RewardTrainer, "model": gpt2_scores, "is_scored": True,
                      "center_rewards_coefficient": 0.1},
    "reward_lora": {
        "base": RewardTrainer, "model": llama_scores,
        "peft": {"target_modules": "all-linear", "modules_to_save": ["score"],
                 "task_type": "SEQ_CLS"},
    },
    "dpo_other": {"base": DPOTrainer, "model": model, "ref_model": other},
    "dpo_gpt2": {"base": DPOTrainer, "model": gpt2, "ref_model": gpt2},
    "dpo_precomputed": {"base": DPOTrainer, "model": model, "precompute_ref_log_probs": True},
    "dpo_lora": {"base": Unwrapping, "model": model, "peft": {"target_modules": "all-linear"}},
    "dpo_adapted": {"base": DPOTrainer, "model": adapted},
    "dpo_ipo": {"base": DPOTrainer, "model": gpt2, "loss_type": ["ipo"],
                "peft": {"target_modules": ["c_attn"], "fan_in_fan_out": True}},
}  # fmt: skip


def exact_log_probs(
    hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk_size: int,
    softcap: Any = None, scale: float = 1.0, outputs: tuple[str, ...] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """TRL's kernel of log-probabilities in the dtype of the model; its own computes in float32."""
    assert softcap is None
    logs = (nn.functional.linear(hidden, weight, bias) * scale / temperature).log_softmax(-1)
    log_probs = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    if outputs is None:  # Before TRL 1.15.
        return log_probs, entropy
    more = {
        "entropy": entropy,
        "log_sum_sq_probs": (2 * logs).logsumexp(-1),
        "mean_logits": nn.functional.linear(hidden, weight, bias).mean(-1) * scale / temperature,
        "is_top1": logs.argmax(-1) == targets,
    }
    return log_probs, *(each if name in outputs else None for name, each in more.items())


@contextmanager
def computed_exactly() -> Iterator[None]:
    """Let TRL compute log-probabilities in the dtype of the model inside."""
    kernel = types.SimpleNamespace(apply=exact_log_probs)
    name = "_ChunkedLogProbFunction"
    with ExitStack() as stack:
        for module in (trl.trainer.utils, trl.trainer.dpo_trainer):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, kernel))
        yield


def _on_disk(data: Dataset, folder: str) -> Dataset:
    """Return a dataset of files that all ranks read."""
    if meshplan.is_main():
        data.save_to_disk(folder)
    if dist.is_initialized():
        dist.barrier()
    return load_from_disk(folder)


def _run(name: str, folder: str, case: str, **more: Any) -> list[dict[str, float]]:
    given = {**CASES[case], **more}
    if given.pop("is_exact", False):
        with computed_exactly():
            return _run(name, folder, case, **given)
    base, ranks = given.pop("base"), RANKS[name]
    is_scored = given.pop("is_scored", False)
    of_trainer: dict[str, Any] = {}
    if "ref_model" in given:
        of_trainer["ref_model"] = given.pop("ref_model")().double()
    if "peft" in given:
        of_trainer["peft_config"] = adapters(**given.pop("peft"))
    made = given.pop("model")().double()
    num, evaluated = given.pop("num", 4 * MICRO), given.pop("evaluated", 2 * MICRO)
    kind: Any = RewardConfig if issubclass(base, RewardTrainer) else DPOConfig
    if issubclass(base, DPOTrainer):
        given.setdefault("beta", 2.0)
    args = kind(
        output_dir=folder, per_device_train_batch_size=MICRO // ranks,
        per_device_eval_batch_size=MICRO // ranks, gradient_accumulation_steps=2,
        num_train_epochs=2, learning_rate=0.5, optim="sgd", max_grad_norm=0.5, logging_steps=1,
        use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no", seed=3,
        max_length=16, gradient_checkpointing=False, lr_scheduler_type="constant", **given,
    )  # fmt: skip
    seen = Logs()
    plan: dict[str, Any] = {"plan": {"version": 1, **PLANS[name]}} if name else {}
    data = [pairs(num, is_scored=is_scored), pairs(evaluated, is_scored=is_scored)]
    if given.get("precompute_ref_log_probs"):
        # TRL shares what it computes by files beside those of the dataset.
        data = [_on_disk(each, f"{folder}/{index}") for index, each in enumerate(data)]
    runner = (meshplan.trainer(base) if name else base)(
        model=made, args=args, train_dataset=data[0], eval_dataset=data[1],
        processing_class=tokenizer(), callbacks=[seen], **of_trainer, **plan,
    )  # fmt: skip
    runner.train()
    runner.evaluate()
    return seen.logs


def alone(folder: str, cases: tuple[str, ...], more: dict[str, Any]) -> dict[str, Any]:
    """In one process, with TRL alone."""
    return {case: _run("", f"{folder}/{case}", case, **more) for case in cases}


def planned(
    name: str, folder: str, cases: tuple[str, ...], more: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Under a plan, on the ranks of a pool."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return {case: _run(name, f"{folder}/{case}", case, **more) for case in cases}


def refused(name: str, folder: str, case: str, more: dict[str, Any]) -> str:
    """Return the error of a trainer that a plan does not suit; "" if there is none."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return error_of(lambda: _run(name, folder, case, **more))
