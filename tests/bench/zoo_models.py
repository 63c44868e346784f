"""Every architecture of transformers and timm as a function of its name: model, inputs, loss.

Walks transformers' own tables of model classes, takes the class with the most natural output
(`HEADS`), makes its configuration tiny (`zoo_configs`) and derives inputs from the signature of
its forward (`zoo_inputs`). Which recipe and which inputs work is found once, by `survey`, and kept
in zoo_recipes.json with the reason for every architecture that cannot be built or run here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn

from tests.bench import zoo_timm
from tests.bench.zoo_configs import RECIPES, tiny
from tests.bench.zoo_inputs import candidates, describe

RECIPES_FILE: Final = Path(__file__).with_name("zoo_recipes.json")
BATCH: Final = 8
MAX_PARAMS: Final = 30_000_000
BUILD_S: Final = 25
SURVEY_S: Final = 60

HEADS: Final = (
    "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM", "CAUSAL_LM", "CTC", "RNNT", "TDT", "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION",
    "TIME_SERIES_PREDICTION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "IMAGE_TO_IMAGE",
    "IMAGE_MATTING", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "POSE_ESTIMATION",
    "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "BASE",
    "PRETRAINING", "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION",
    "MASK_GENERATION", "MASKED_IMAGE_MODELING", "VISUAL_QUESTION_ANSWERING", "RETRIEVAL",
    "TABLE_RECOGNITION", "TEXT_RECOGNITION", "TEXT_ENCODING", "IMAGE", "BACKBONE",
)  # fmt: skip
"""transformers' tables of classes, the most natural first; BASE is the bare model."""


class NotBuilt(Exception):
    """An architecture that one process cannot build or run: the message says why."""


@dataclass(frozen=True)
class Entry:
    """How an architecture is built.

    Attributes:
        cls: Class name in transformers, "" for a model of timm.
        recipe: Index into RECIPES, those of `zoo_timm` for a model of timm.
        inputs: Which of the `candidates`, as `describe` says it.
        training: Whether it runs in training mode; in evaluation mode if that draws random numbers.
        coupled: Whether a sample's output depends on the other samples of its batch.
    """

    cls: str
    recipe: int
    inputs: str
    training: bool = True
    coupled: bool = False


@functools.cache
def classes() -> Mapping[str, str]:
    """Model type -> class name, each class once."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    out: dict[str, str] = {}
    for head in HEADS:
        table = "MODEL_MAPPING_NAMES" if head == "BASE" else f"MODEL_FOR_{head}_MAPPING_NAMES"
        for model_type, name in getattr(auto, table).items():
            first = name if isinstance(name, str) else name[0]
            out.setdefault(model_type, first)
    owners: dict[str, str] = {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        name = out.get(model_type)
        if name is None:
            continue
        # Several types may share a class: it is that of the type it is named after.
        if name.lower().startswith(model_type.replace("_", "").replace("-", "")):
            owners[name] = model_type
        owners.setdefault(name, model_type)
    return {model_type: name for name, model_type in sorted(owners.items(), key=lambda i: i[1])}


@functools.cache
def entries() -> Mapping[str, Entry]:
    """What can be built, by name; without models of timm where it is not installed."""
    kept = json.loads(RECIPES_FILE.read_text())["built"]
    has_timm = zoo_timm.is_there()
    return {
        name: Entry(*values)
        for name, values in kept.items()
        if has_timm or not name.startswith(zoo_timm.PREFIX)
    }


def config_of(name: str, recipe: int) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return tiny(CONFIG_MAPPING[name](), RECIPES[recipe])


def _build(name: str, cls: str, recipe: int, device: str = "cpu") -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if name.startswith(zoo_timm.PREFIX):
        return zoo_timm.create(name, recipe, device)
    with torch.device(device):
        return getattr(transformers, cls)(config_of(name, recipe))


def build(name: str) -> nn.Module:
    """The model, the same on every rank and in every process."""
    entry = entries()[name]
    with _quiet():
        model = _build(name, entry.cls, entry.recipe)
    return prepare(model, entry.training)


def prepare(model: nn.Module, training: bool) -> nn.Module:
    """Training mode, with the running statistics of batch norms instead of the batch's.

    Batch statistics differ between a rank's samples and the global batch by definition.
    Weights are moved off exact zeros and ones, behind which a wrong gradient could hide.
    """
    model.train(training)
    for module in model.modules():
        if "BatchNorm" in type(module).__name__:
            module.eval()
        for attribute, value in vars(module).items():
            if isinstance(value, float) and "drop" in attribute:
                setattr(module, attribute, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.copy_(parameter + 0.02 * noise)
    return model


def inputs_of(name: str, model: nn.Module) -> dict[str, Any]:
    """The global batch, as keyword arguments."""
    entry = entries()[name]
    for batch in _batches(name, model, entry.recipe):
        if describe(batch) == entry.inputs:
            return batch
    raise NotBuilt(f"{name} has no inputs {entry.inputs}")


def _batches(name: str, model: nn.Module, recipe: int) -> Iterator[dict[str, Any]]:
    if name.startswith(zoo_timm.PREFIX):
        return iter([zoo_timm.batch(recipe, BATCH)])
    return candidates(model, BATCH)


def targets(count: int = BATCH) -> Tensor:
    """One number per sample."""
    return torch.linspace(0.0, 3.0, count)


def floats(output: Any) -> Iterator[Tensor]:
    """The floating tensors of an output that have samples along dim 0 and a gradient."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.requires_grad and output.ndim:
            yield output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if "past_key_values" not in key and "loss" not in key and "logits_per" not in key:
                yield from floats(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from floats(value)


def loss(output: Any, phases: Tensor) -> Tensor:
    """Mean over the samples of the squared distance from a wave of each sample's own phase."""
    total = torch.zeros(())
    found = False
    for tensor in floats(output):
        if tensor.shape[0] % len(phases):
            continue
        rows = tensor.reshape(len(phases), -1).float()
        rows = torch.where(rows.detach().abs() < 1e4, rows, 0.0)  # Masks are filled with minima.
        wave = torch.sin(phases[:, None] + torch.arange(rows.shape[1]))
        total = total + (rows - wave).square().mean()
        found = True
    if not found:
        raise NotBuilt("no floating output with samples along dim 0")
    return total


def part(batch: Any, number: int, count: int) -> Any:
    """One of `count` equal parts of a batch."""
    if isinstance(batch, Tensor):
        return batch.chunk(count)[number] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: part(value, number, count) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(part(value, number, count) for value in batch)
    return batch


def gradients(model: nn.Module, batch: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Mean over `count` parts of the batch of every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    phases = targets()
    for number in range(count):
        own = phases.chunk(count)[number]
        (loss(model(**part(batch, number, count)), own) / count).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise NotBuilt(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def survey(name: str) -> Entry | str:
    """Find the recipe and the inputs with which one process can train, or say why none can."""
    is_timm = name.startswith(zoo_timm.PREFIX)
    cls = "" if is_timm else classes()[name]
    first = ""
    began = time.monotonic()
    for recipe in range(len(zoo_timm.RECIPES if is_timm else RECIPES)):
        if time.monotonic() - began > SURVEY_S:
            break
        try:
            with _quiet(), _limit(BUILD_S):
                found = _try(name, cls, recipe)
        except Exception as error:  # Anything may go wrong in a model: the first reason is kept.
            reason = str(error).strip().split("\n")
            text = next((line for line in reversed(reason) if line.strip()), "")
            first = first or f"{type(error).__name__}: {text.strip()}"[:160]
        else:
            return found
    return first


def _try(name: str, cls: str, recipe: int) -> Entry:
    count = sum(p.numel() for p in _build(name, cls, recipe, "meta").parameters())
    if count > MAX_PARAMS:
        raise NotBuilt(f"{count / 1e6:.0f} M parameters when shrunk")
    first: Exception | None = None
    for training in (True, False):
        model = prepare(_build(name, cls, recipe), training)
        for batch in _batches(name, model, recipe):
            try:
                entry = _verify(model, batch, Entry(cls, recipe, describe(batch), training))
            except NotBuilt as error:
                first = first or error
                break
            except Exception as error:  # The next inputs may fit.
                first = first or error
            else:
                return entry
    assert first is not None
    raise first


def _verify(model: nn.Module, batch: Mapping[str, Any], entry: Entry) -> Entry:
    """The entry, if the model can be trained with this batch and always gives one answer."""
    whole = gradients(model, batch, 1)
    if not any(g.any() for g in whole.values()):
        raise NotBuilt("no parameter gets a gradient")
    if not all(g.isfinite().all() for g in whole.values()):
        raise NotBuilt("gradients are not finite")
    if not _same(whole, gradients(model, batch, 1), 1e-9):
        raise NotBuilt("its forward draws random numbers")
    buffers = [_buffers(model, part(batch, 0, count)) for count in (1, 4)]
    if not _same(*buffers, 1e-4):
        raise NotBuilt("its buffers follow the samples of the batch")
    coupled = not _same(whole, gradients(model, batch, 4), 1e-4)
    return Entry(entry.cls, entry.recipe, entry.inputs, entry.training, coupled)


def _buffers(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The floating buffers after one forward of a copy."""
    copied = copy.deepcopy(model)
    copied(**batch)
    return {n: b for n, b in copied.named_buffers() if b.is_floating_point() and b.isfinite().all()}


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float) -> bool:
    scale = max((float(g.abs().max()) for g in a.values() if g.numel()), default=0.0)
    return a.keys() == b.keys() and all(
        float((a[n] - b[n]).abs().max()) <= tolerance * max(scale, 1e-12) for n in a if a[n].numel()
    )
