"""A tiny Llama trained by transformers' Trainer, alone and under plans of 4 ranks.

Import it in a job only: it imports accelerate.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import meshplan
from meshplan.runtime.apply.wrap import applied
from tests.helpers.lit import launched

PLANS: Final[Mapping[str, dict[str, Any]]] = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "hybrid": {"strategy": "hybrid_shard", "mesh": [2, 2]},
    "tp_fsdp": {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"},
    "pp": {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"microbatches": 2}},
}  # fmt: skip
MICRO: Final = 8


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Texts(Dataset[Any]):
    """Sequences with other numbers of tokens that count, of some none."""

    def __init__(self, num: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(64, (num, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        labels = self.tokens[index].clone()
        labels[: index * 5 % 9 if index % 3 else None] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Norms(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if logs and "grad_norm" in logs:
            self.losses.append(float(logs["loss"]))
            self.norms.append(float(logs["grad_norm"]))


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A `compute_loss_func`: squared probabilities of the next tokens, over those that count."""
    own = outputs.logits[:, :-1].softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    is_counted = labels[:, 1:] != -100
    divisor = is_counted.sum() if num_items_in_batch is None else num_items_in_batch
    return -(own.square() * is_counted).sum() / divisor


class Weighted(Trainer):  # type: ignore[misc]
    """A loss of its own, a mean over samples, as the documentation of the Trainer shows one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        found = outputs.get("logits").float()[:, -1]
        loss = torch.nn.functional.mse_loss(found[:, 0], labels[:, -1].float().clamp(min=0))
        return (loss, outputs) if return_outputs else loss


class Gathering(Trainer):  # type: ignore[misc]
    """Keeps and logs which share of the tokens of all ranks is predicted, beside its loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[str, list[float]] = {"shares": []}
        self.means = torch.zeros(2)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        right = (outputs.logits.argmax(-1)[:, :-1] == inputs["labels"][:, 1:]).float()
        every = self.accelerator.gather_for_metrics(right.sum(1))
        if self.model.training:
            self.kept["shares"].append(every.mean().item())
            mean = self.accelerator.reduce(outputs.logits.mean(), "mean")
            self.means += torch.stack((mean, self.accelerator.gather(mean[None]).mean()))
            self.log({"share": self.kept["shares"][-1], "places": len(every)})
        return (loss, outputs) if return_outputs else loss


class Contrasting(Weighted):
    """A loss of pairs of samples, which the parts of a batch do not have."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        del inputs["labels"]
        outputs = model(**inputs)
        found = outputs.logits[:, -1]
        loss = (found - found.flip(0)).square().mean()
        return (loss, outputs) if return_outputs else loss


class Unstated(Weighted):
    """The same, without saying that it is a mean."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = None


class Dependent(Trainer):  # type: ignore[misc]
    """A loss of which the parts of a batch do not add up to that of the batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.first = outputs.logits.detach().flatten()[0]
        loss = loss * self.accelerator.gather(loss.detach()).max()
        return (loss, outputs) if return_outputs else loss


class Twice(Trainer):  # type: ignore[misc]
    """Two forwards for one loss."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return (model(**inputs).loss + model(**inputs).loss) / 2


class Beside(Trainer):  # type: ignore[misc]
    """A forward of the Trainer's model beside that of the model it is given, as TRL's DPO has."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        with torch.no_grad():
            beside = self.model(input_ids=inputs["input_ids"], output_hidden_states=False)
        loss = (outputs.logits.softmax(-1) - beside.logits.flip(-1)).square().mean()
        return (loss, outputs) if return_outputs else loss


class Embedding(Trainer):  # type: ignore[misc]
    """A penalty on a layer's output."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + self.model.get_input_embeddings()(inputs["input_ids"]).square().mean()


class Trained(Trainer):  # type: ignore[misc]
    """A second forward that is trained, too."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + self.model(**inputs).logits.mean()


class Turned(Trainer):  # type: ignore[misc]
    """A second forward, of other tokens."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        with torch.no_grad():
            return loss + self.model(input_ids=inputs["input_ids"].flip(-1)).logits.mean()


class Noisy(Trainer):  # type: ignore[misc]
    """A step of its own around the Trainer's, on other inputs."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        turned = {**inputs, "input_ids": inputs["input_ids"].flip(-1)}
        return super().training_step(model, turned, *args, **kwargs) * 1.0


class Adversarial(Trainer):  # type: ignore[misc]
    """Two steps of the Trainer's on each batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs) + super().training_step(*args, **kwargs)


def unscaled() -> Any:
    """A model whose loss is a mean, whatever number of items it is given."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


class Pictures(Dataset[Any]):
    """Pictures of one of 5 classes."""

    def __len__(self) -> int:
        return 6 * MICRO

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": index % 5}


def classifier() -> Any:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4, num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config)


class Scores(Texts):
    """Sequences, each with one number to predict."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.tokens[index], "labels": float(index % 7) / 3 - 1}


def scoring() -> Any:
    """A causal model of which the last token's features give one number."""
    torch.manual_seed(0)
    config = model().config
    config.num_labels, config.pad_token_id = 1, 0
    return LlamaForSequenceClassification(config)


def collated(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Return a batch whose positions are one row for all samples."""
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "position_ids": torch.arange(12)[None]}


def adapted() -> Any:
    """The Llama, with adapters of peft that have begun to learn: at first their product is 0."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                parameter.normal_(std=0.1, generator=generator)
    return made


LOSSES: Final[Mapping[str, Mapping[str, Any]]] = {
    "model": {},
    "function": {"compute_loss_func": summed},
    "smoothing": {"label_smoothing_factor": 0.1},
    "own": {"base": Weighted},
    "gathering": {"base": Gathering},
    "pictures": {"model": classifier, "data": Pictures},
    "mean": {"model": unscaled, "accumulate": 1},  # The Trainer adds up means of microbatches.
    "shared": {"model": scoring, "data": functools.partial(Scores, 6 * MICRO), "accumulate": 1,
               "data_collator": collated},
    "scores": {"model": scoring, "data": functools.partial(Scores, 6 * MICRO), "accumulate": 1},
    "adapters": {"model": adapted},
    "unstated": {"base": Unstated},
    "dependent": {"base": Dependent},
    "contrasting": {"base": Contrasting},
    "twice": {"base": Twice},
    "beside": {"base": Beside},
    "embedding": {"base": Embedding},
    "trained": {"base": Trained},
    "turned": {"base": Turned},
    "step": {"base": Noisy},
    "steps": {"base": Adversarial},
}  # fmt: skip
"""How the loss is computed: arguments of the Trainer, or of TrainingArguments."""


def _run(
    name: str, folder: str, resume: bool, epochs: int, how: str = "model",
    callbacks: Sequence[TrainerCallback] = (), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    given = dict(LOSSES[how])
    smoothing = given.pop("label_smoothing_factor", 0.0)
    base, made_model = given.pop("base", Trainer), given.pop("model", model)
    accumulate = given.pop("accumulate", 2)
    data, evaluated = given.pop("data", None), Texts(2 * MICRO - 3)
    if data is not None:
        evaluated = torch.utils.data.Subset(data(), range(2 * MICRO - 3))
    ranks = {"": 1, "tp_fsdp": 2, "pp": 2}.get(name, 4)
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=MICRO // ranks,
        per_device_eval_batch_size=MICRO // ranks, gradient_accumulation_steps=accumulate,
        num_train_epochs=epochs, learning_rate=0.5, optim="sgd", max_grad_norm=0.5,
        logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="epoch",
        save_only_model=False, lr_scheduler_type="constant_with_warmup", warmup_steps=2, seed=3,
        label_smoothing_factor=smoothing, include_num_input_tokens_seen="all",
    )  # fmt: skip
    seen = Norms()
    made = meshplan.trainer(base) if name else base
    plan = {"plan": {"version": 1, **PLANS[name], **more}} if name else {}
    runner = made(
        model=made_model(), args=args, train_dataset=data() if data else Texts(6 * MICRO),
        eval_dataset=evaluated, callbacks=[seen, *callbacks], **given, **plan,
    )  # fmt: skip
    runner.train(resume_from_checkpoint=resume or None)
    eval_loss = runner.evaluate()["eval_loss"]
    predicted = runner.predict(evaluated).predictions
    return {
        "losses": seen.losses, "norms": seen.norms, "eval_loss": eval_loss,
        "predicted": torch.as_tensor(predicted), "step": runner.state.global_step,
        "kept": getattr(runner, "kept", {}), "means": getattr(runner, "means", torch.zeros(2)),
        "logged": [(each["share"], each["places"]) for each in runner.state.log_history
                   if "share" in each],
        "flops": runner.state.total_flos, "tokens": runner.state.num_input_tokens_seen,
        "accumulate": applied(runner.model_wrapped).plan.accumulate if name else accumulate,
    }  # fmt: skip


def alone(folder: str, resume: bool = False, epochs: int = 2, how: str = "model") -> dict[str, Any]:
    """In one process, with transformers alone."""
    return _run("", folder, resume, epochs, how)


def planned(
    name: str,
    folder: str,
    resume: bool = False,
    epochs: int = 2,
    how: str = "model",
    **more: Any,
) -> dict[str, Any]:
    """Under a plan, on the ranks of a pool."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return _run(name, folder, resume, epochs, how, **more)


def refused(name: str, folder: str, **more: Any) -> str:
    """Return the error of a Trainer that a plan does not suit."""
    return error_of(lambda: planned(name, folder, **more))


def errors_at_construction(folder: str) -> dict[str, str]:
    """Return the error of each Trainer that a plan leaves no room for, "" if it has none.

    Arguments that would set environment variables or need other packages are set afterwards.
    """
    other = model()
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    best = {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "epoch",
            "save_strategy": "epoch"}  # fmt: skip
    cases: dict[str, dict[str, Any]] = {
        "nothing": {},
        "compile": {"later": {"torch_compile": True}},
        "fsdp": {"later": {"fsdp": True}},
        "fsdp_config": {"later": {"fsdp_config": {"version": 2}}},
        "deepspeed": {"later": {"deepspeed": "zero3.json"}},
        "parallelism": {"later": {"parallelism_config": object()}},
        "environment": {"variables": {"ACCELERATE_USE_FSDP": "true"}},
        "checkpointing": {"given": {"gradient_checkpointing": True}},
        "dispatch": {"given": {"accelerator_config": {"dispatch_batches": True}}},
        "rebalance": {"given": {"train_sampling_strategy": "batch_rebalance"}},
        "split": {"given": {"accelerator_config": {"split_batches": True}}},
        "best": {"given": best},
        "scheduler": {"optimizers": (None, LambdaLR(sgd, lambda step: 1.0))},
        # data_collator, train_dataset, ..., callbacks, optimizers
        "positional": {"places": (*[None] * 8, (sgd, None))},
        "init": {"model": None, "model_init": model},
        "unreadable": {"plan": {"version": 1, "strategy": "no such"}},
    }  # fmt: skip
    out = {}
    for name, case in cases.items():
        given, later = case.pop("given", {}), case.pop("later", {})
        places, variables = case.pop("places", ()), case.pop("variables", {})
        args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], **given)
        for key, value in later.items():
            setattr(args, key, value)
        more = {"plan": {"version": 1, "strategy": "ddp"}, **case}
        start = (other, args, *places) if places else ()
        if not places:
            more = {"model": other, "args": args, "eval_dataset": Texts(2), **more}
        with mock.patch.dict(os.environ, variables):
            out[name] = error_of(lambda s=start, m=more: meshplan.trainer(Trainer)(*s, **m))
    return out


def errors_of_batches(folder: str) -> dict[str, str]:
    """Return the error of a Trainer with 4 samples and 2 microbatches, by the plan's batch."""
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    cases = {
        "nothing": {}, "same": {"micro": 4, "accumulate": 2}, "global": {"micro": 4, "global": 32},
        "micro": {"micro": 8}, "one": {"accumulate": 1}, "derived": {"micro": 4, "global": 16},
        "derived_micro": {"accumulate": 2, "global": 16},
    }  # fmt: skip
    out = {}
    for name, batch in cases.items():
        plan = {"version": 1, "strategy": "ddp", **({"batch": batch} if batch else {})}
        runner = meshplan.trainer(Trainer)(model(), args, train_dataset=Texts(32), plan=plan)
        out[name] = error_of(runner.get_train_dataloader)
    return out


def error_of(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
