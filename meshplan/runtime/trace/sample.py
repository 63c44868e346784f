"""Random inputs, targets and a loss of the right shapes, for a model without a training script."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from meshplan.errors import Problem, SpecError
from meshplan.runtime.base.batch import as_arguments
from meshplan.runtime.base.pytree import tensors_in
from meshplan.spec.spec import InputSpec, Spec

_MOST_ELEMENTS: Final = 1 << 20
"""Most elements of one sample for checks that really train the model for some steps."""
_EDGES: Final = {1: 1024, 2: 224, 3: 64}
"""Edge of a guessed input, by the number of dims that a convolution moves along."""
TOKENS: Final = 16
"""Length of a sequence of tokens if the plan does not state one."""
EXAMPLES: Final = (
    f"input: {{shape: [2, {TOKENS}], dtype: int64}} for tokens, "
    "{shape: [2, 3, 224, 224], dtype: float32} for images"
)
"""Values of the key `input` for most models."""


def sample_inputs(
    model: nn.Module, spec: Spec, samples: int, step: int, most: int | None = None
) -> Any:
    """Return a batch of random inputs, the same ones for the same `step`.

    Args:
        model: The model that takes the inputs.
        spec: The plan's spec, of which `input` and `batch` are read.
        samples: Number of samples.
        step: Number of the step, which seeds the random numbers.
        most: Most elements of a tensor with values; larger tensors are on meta. None for no limit.

    Returns:
        A tensor or keyword arguments. The plan's `input` determines them, or else transformers'
        `main_input_name`, or else an embedding that is the model's first layer.

    Raises:
        SpecError: None of the three determines the inputs.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = spec.batch.seq_len or TOKENS
    vocab = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2)

    def drawn(shape: Sequence[int], *, are_real: bool = False) -> torch.Tensor:
        if most is not None and math.prod(shape) > most:
            return torch.empty(shape, dtype=None if are_real else torch.int64, device="meta")
        if are_real:
            return torch.randn(shape, generator=generator)
        # Low ids are special tokens, such as padding, in vocabularies that have any.
        return torch.randint(min(3, vocab - 1), vocab, shape, generator=generator)

    def sampled(stated: InputSpec) -> torch.Tensor:
        assert stated.dtype is not None
        shape, dtype = (samples, *stated.shape[1:]), getattr(torch, stated.dtype)
        return drawn(shape, are_real=dtype.is_floating_point).to(dtype)

    stated = with_dtype(model, spec).input
    if isinstance(stated, InputSpec):
        return sampled(stated)
    if stated is not None:
        # Nothing says which argument a table reads, so the ids are below the sizes of all tables.
        tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
        vocab = min(tables, default=vocab)
        return {name: sampled(each) for name, each in stated.items()}
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and isinstance(size, int):
        channels = getattr(config, "num_channels", 3)
        return {name: drawn((samples, channels, size, size), are_real=True)}
    if name == "input_ids" and config is not None:
        out = {name: drawn((samples, tokens))}
        if getattr(config, "is_encoder_decoder", False):
            out["decoder_input_ids"] = drawn((samples, tokens))
        return out
    if _reads_tokens(model):
        return drawn((samples, tokens))
    what = f"the plan states no input for {type(model).__name__}, and none follows from the model"
    fix = f"add to the plan, with the samples along dim 0: {input_for(model)}"
    raise SpecError(Problem(what, spec.origin("input"), fix))


def with_dtype(model: nn.Module, spec: Spec) -> Spec:
    """Return the spec. An `input` without a dtype gets the one that the first layer reads."""
    if not isinstance(spec.input, InputSpec) or spec.input.dtype is not None:
        return spec
    dtype = "int64" if isinstance(_first_layer(model), nn.Embedding) else "float32"
    return replace(spec, input=replace(spec.input, dtype=dtype))


def is_tokens(stated: InputSpec) -> bool:
    """Return True if an input has the form of token ids: two dims of integers."""
    return len(stated.shape) == 2 and str(stated.dtype).startswith("int")


def _first_layer(model: nn.Module) -> nn.Module | None:
    """Return the first module with parameters and without submodules, or None if there is none."""
    layers = (m for m in model.modules() if not any(True for _ in m.children()))
    return next((m for m in layers if any(True for _ in m.parameters())), None)


def likely_shape(model: nn.Module) -> tuple[int, ...] | str | None:
    """Guess the shape of one sample's input from the model's first layer.

    Returns:
        The shape; "tokens" if the layer looks them up; None if it implies neither.
    """
    layer = _first_layer(model)
    if isinstance(layer, nn.Embedding):
        return "tokens"
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        num_dims = len(layer.kernel_size)
        return (1, layer.in_channels, *[_EDGES[num_dims]] * num_dims)
    if isinstance(layer, nn.Linear):
        return (1, layer.in_features)
    if isinstance(layer, nn.RNNBase):
        return (1, TOKENS, layer.input_size)
    return None


def input_for(model: nn.Module) -> str:
    """Return an `input` for a plan: that which the model's first layer suggests, or examples.

    If the forward needs several arguments, it is an example with their names.
    """
    if len(names := _needed(model)) > 1:
        each = ", ".join(f"{name}: {{shape: [2, {TOKENS}], dtype: int64}}" for name in names)
        return f"input: {{{each}}}"
    shape = likely_shape(model)
    if shape is None:
        return EXAMPLES
    if isinstance(shape, str):
        return f"input: {{shape: [2, {TOKENS}], dtype: int64}}"
    return f"input: {{shape: {[2, *shape[1:]]}, dtype: float32}}"


def check_size(spec: Spec) -> None:
    """Check that samples of the stated input are small enough to train on several of them.

    Raises:
        SpecError: A sample has so many elements that the check would take more than a minute.
    """
    given = {"": spec.input} if isinstance(spec.input, InputSpec) else spec.input or {}
    for name, each in given.items():
        size, key = math.prod(each.shape[1:]), f"input.{name}.shape" if name else "input.shape"
        if size > _MOST_ELEMENTS:
            what = f"one sample of the input has {size:,} elements, too many to train on several"
            fix = f"use at most {_MOST_ELEMENTS:,} elements, for example --set '{key}=[2, 64]'"
            raise SpecError(Problem(what, spec.origin(key), fix))


def _reads_tokens(model: nn.Module) -> bool:
    """Return True if the forward needs one argument only, and the first layer is an Embedding."""
    return len(_needed(model)) == 1 and isinstance(_first_layer(model), nn.Embedding)


def _needed(model: nn.Module) -> list[str]:
    """Return the names of the arguments that the forward has no default for."""
    return [
        p.name for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip


def call(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output on a tensor, a tuple of arguments or a mapping of keywords."""
    args, kwargs = as_arguments(inputs)
    return model(*args, **kwargs)


def results(output: Any) -> list[torch.Tensor]:
    """Return the tensors in an output that a loss can use: floating-point, and no scalars."""
    return [t for _, t in tensors_in(output) if t.ndim and t.is_floating_point()]


def sample_targets(
    shapes: Sequence[Sequence[int]], samples: int, step: int, *, are_classes: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return random targets for the `results` of a model, the same ones for the same `step`.

    Args:
        shapes: Shapes of the results, with the samples along dim 0.
        samples: Number of samples in the targets, in place of the size of dim 0.
        step: Number of the step, which seeds the random numbers.
        are_classes: If True, targets are class indices: int64, without the last dim of the result,
            which counts the classes. If False, floats of the shape of the result.

    Returns:
        One target for each result.
    """
    generator = torch.Generator().manual_seed(2000 + step)
    if are_classes:
        return tuple(
            torch.randint(shape[-1], (samples, *shape[1:-1]), generator=generator)
            for shape in shapes
        )
    return tuple(torch.randn(samples, *shape[1:], generator=generator) for shape in shapes)


def sample_loss(output: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the sum, over the results, of cross-entropy (int targets) or mean squared error.

    Both are means over the samples, so the mean of the losses of equal microbatches is the loss of
    the whole batch.
    """
    pairs = zip(results(output), targets, strict=True)
    return torch.stack([_distance(o.float(), target) for o, target in pairs]).sum()


def _distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.is_floating_point():
        return (output - target).square().mean()
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
