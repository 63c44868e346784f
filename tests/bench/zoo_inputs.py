"""Inputs for any architecture of transformers, derived from the signature of its forward.

Which tensors, and of what shape, follows from the names of the arguments and from the
configuration. Where that leaves several readings, `candidates` yields them one after the other.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.bench.zoo_configs import FIRST_ID

SEQ_LEN: Final = 16
DECODER_LEN: Final = 8
SPECIAL: Final = 3
"""Ids below this are padding, beginning and end."""

IMAGE_TOKENS: Final = (4, 16, 1, 8, 9, 5, 17, 2, 32, 64, 15, 3, 256)
"""Numbers of text positions that one image may take."""

VISION: Final = ("vision_config", "vit_config", "image_config", "vision_tower_config",
                 "encoder_config", "encoder", "backbone_config", "qformer_config",
                 "perceiver_config",
                 "image_model_config", "vision_model_config")  # fmt: skip
AUDIO: Final = ("audio_config", "audio_encoder_config", "speech_config", "encoder_config",
                "speech_encoder_config", "audio_encoder")  # fmt: skip


def candidates(model: nn.Module, batch: int) -> Iterator[dict[str, Any]]:
    """Possible global batches, as keyword arguments, the most complete first."""
    return _Inputs(model, batch).candidates()


def describe(batch: dict[str, Any]) -> str:
    """A batch in words that tell it from the other candidates."""
    words = []
    for name, value in batch.items():
        shape = ",".join(map(str, value.shape))
        kind = str(value.dtype).removeprefix("torch.")
        media = int((value[0] >= FIRST_ID).sum()) if name == "input_ids" and value.ndim == 2 else 0
        words.append(f"{name}:{kind}[{shape}]" + (f"+{media}" if media else ""))
    return " ".join(words)


class _Inputs:
    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model, self.batch = model, batch
        self.config = model.config
        parameters = inspect.signature(type(model).forward).parameters
        self.names = [name for name in parameters if name != "self"]
        self.required = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and name != "self"
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        self.generator = torch.Generator().manual_seed(7)

    def candidates(self) -> Iterator[dict[str, Any]]:
        main = getattr(self.model, "main_input_name", "input_ids")
        main = main if isinstance(main, str) else main[0]
        wanted = list(dict.fromkeys([*self.required, *([main] if main in self.names else [])]))
        if not wanted and self.names:
            wanted = [self.names[0]]
        has_text = "input_ids" in self.names
        optional: list[list[str]] = []
        if has_text and main == "input_ids":
            if "image_grid_thw" in self.names and "pixel_values" in self.names:
                optional.append(["input_ids", "pixel_values", "image_grid_thw"])
            elif "pixel_values" in self.names:
                optional.append(["input_ids", "pixel_values"])
            for name in ("input_features", "input_values", "audio_values"):
                if name in self.names:
                    optional.append(["input_ids", name])
        elif has_text:
            optional.append(["input_ids", main])
        optional.append([])
        if "bbox" in self.names:
            optional = [["bbox"], *optional]
        for extra in optional:
            yield from self._combine(list(dict.fromkeys([*wanted, *extra])))

    def _combine(self, wanted: list[str]) -> Iterator[dict[str, Any]]:
        config = self.config
        is_decoder = "decoder_input_ids" in self.names
        if (
            is_decoder
            and "decoder_input_ids" not in wanted
            and (getattr(config, "is_encoder_decoder", False) or "input_ids" not in self.names)
        ):
            wanted = [*wanted, "decoder_input_ids"]
        media = [n for n in wanted if n.startswith(("pixel", "input_features", "input_values",
                                                   "audio", "hidden_states"))]  # fmt: skip
        choices = [list(self._tensor(name, wanted)) for name in wanted]
        if any(not choice for choice in choices):
            return
        for values in itertools.islice(itertools.product(*choices), 48):
            inputs = dict(zip(wanted, values, strict=True))
            if "input_ids" in inputs and media and self._media_token(media[0]) is not None:
                for count in IMAGE_TOKENS:
                    yield self._with_media(inputs, media[0], count)
            else:
                yield inputs

    def _with_media(self, inputs: dict[str, Any], medium: str, count: int) -> dict[str, Any]:
        ids = self._ids(SEQ_LEN + count if count > 8 else SEQ_LEN)
        token = self._media_token(medium)
        assert token is not None
        ids[:, 2 : 2 + count] = token
        out = {**inputs, "input_ids": ids}
        if "mm_token_type_ids" in self.names:
            out["mm_token_type_ids"] = (ids == token).long()
        if "token_type_ids" in self.names and "mm_token_type_ids" not in self.names:
            out["token_type_ids"] = (ids == token).long()
        return out

    def _media_token(self, medium: str) -> int | None:
        kind = "image" if medium.startswith("pixel") else "audio"
        for name in (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_soft_token_id",
                     f"{kind}_patch_id"):  # fmt: skip
            value = getattr(self.config, name, None)
            if isinstance(value, int):
                return value
        return None

    def _tensor(self, name: str, wanted: list[str]) -> Iterator[Any]:
        """Every reading of one argument."""
        rows, vision, audio = self.batch, self._sub(VISION), self._sub(AUDIO)
        match name:
            case "input_ids" | "qformer_input_ids" | "classes_input_ids" | "tasks_input_ids":
                yield self._ids(SEQ_LEN)
                yield self._floats(rows, SEQ_LEN, self._width(self.config))
            case "bbox":
                for corners in (2, 4):
                    ordered = torch.arange(10, 10 + 2 * corners).repeat(rows, SEQ_LEN, 1)
                    yield ordered
                    yield ordered.float() / 100
            case "decoder_input_ids":
                yield self._ids(DECODER_LEN)
                yield self._ids(DECODER_LEN)[..., None].expand(-1, -1, 4).contiguous()
            case "pixel_values":
                yield from self._pixels(vision, wanted)
            case "image_grid_thw" | "grid_thw":
                merge = 2
                yield torch.tensor([[1, 2 * merge, 2 * merge]]).repeat(rows, 1)
            case "pixel_values_videos":
                size, channels = self._image(vision)
                frames = getattr(vision, "num_frames", 4) or 4
                yield self._floats(rows, min(frames, 16), channels, *size)
            case "input_features" | "audio_values":
                yield from self._features(audio)
            case "input_features_mask" | "audio_mel_mask":
                yield torch.ones(rows, 64, dtype=torch.bool)
            case "input_values" | "inputs" | "audio":
                yield from self._waves(audio)
            case "latents" | "audio_mel":
                yield self._floats(rows, 64, self._width(audio))
                yield self._floats(rows, self._width(audio), 64)
            case (
                "hidden_states"
                | "inputs_embeds"
                | "query_embeds"
                | "noise_embeds"
                | "context_hidden_states"
            ):
                if "grid_thw" in wanted:
                    yield from self._patches(vision)
                yield self._floats(rows, SEQ_LEN, self._width(self.config))
            case "attention_mask" | "pixel_attention_mask" | "qformer_attention_mask":
                yield torch.ones(rows, SEQ_LEN, dtype=torch.long)
            case "past_values":
                yield from self._series()
            case "past_time_features":
                yield self._floats(rows, self._past(), self._features_of_time())
            case "past_observed_mask":
                yield torch.ones(rows, self._past())
            case "states":
                yield self._floats(rows, SEQ_LEN, self.config.state_dim)
            case "spatial_shapes":
                yield torch.tensor([[4, 4]]).repeat(rows, 1)

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _ids(self, length: int) -> Tensor:
        top = min([FIRST_ID, *(v for v in [self._vocab()] if v)])
        return torch.randint(SPECIAL, top, (self.batch, length), generator=self.generator)

    def _vocab(self) -> int | None:
        value = getattr(self.config, "vocab_size", None)
        return value if isinstance(value, int) and value > SPECIAL else None

    def _sub(self, names: tuple[str, ...]) -> Any:
        """The sub-configuration for a modality, or the configuration itself."""
        found = self.config
        for _ in range(2):
            for name in names:
                inner = getattr(found, name, None)
                if inner is not None and hasattr(inner, "to_dict"):
                    found = inner
                    break
        return found

    def _width(self, config: Any) -> int:
        for name in ("hidden_size", "d_model", "embed_dim", "dim", "input_size"):
            value = getattr(config, name, None)
            if isinstance(value, int):
                return value
        return 64

    def _image(self, vision: Any) -> tuple[tuple[int, int], int]:
        size: Any = None
        for name in ("image_size", "img_size", "input_size", "crop_size"):
            size = getattr(vision, name, None) or getattr(self.config, name, None)
            if size:
                break
        if isinstance(size, (list, tuple)):
            shape = (int(size[0]), int(size[-1]))
        else:
            shape = (size, size) if isinstance(size, int) else (64, 64)
        for name in ("num_channels", "in_channels", "in_chans", "num_input_channels"):
            channels = getattr(vision, name, None)
            if isinstance(channels, int):
                return shape, channels
        return shape, 3

    def _pixels(self, vision: Any, wanted: list[str]) -> Iterator[Tensor]:
        if "image_grid_thw" in wanted or "grid_thw" in wanted:
            yield from self._patches(vision)
            return
        size, channels = self._image(vision)
        yield self._floats(self.batch, channels, *size)
        yield self._floats(self.batch, 1, channels, *size)
        yield self._floats(self.batch, 2, channels, *size)
        frames = getattr(vision, "num_frames", None) or getattr(vision, "frames", None) or 2
        yield self._floats(self.batch, min(int(frames), 32), channels, *size)
        for side in (64, 128, 224):
            if size != (side, side):
                yield self._floats(self.batch, channels, side, side)
        patch = getattr(vision, "patch_size", 8)
        if isinstance(patch, int):
            yield self._floats(self.batch, 16, channels * patch * patch)

    def _patches(self, vision: Any) -> Iterator[Tensor]:
        """Sixteen flattened patches per image, all images one after the other."""
        patch = getattr(vision, "patch_size", None) or 8
        patch = patch if isinstance(patch, int) else patch[-1]
        channels = next((getattr(vision, n) for n in ("in_channels", "num_channels", "in_chans")
                         if isinstance(getattr(vision, n, None), int)), 3)  # fmt: skip
        time = getattr(vision, "temporal_patch_size", None) or 1
        for frames in dict.fromkeys((time, 1, 2)):
            yield self._floats(self.batch * 16, channels * frames * patch * patch)
        yield self._floats(self.batch * 16, channels, patch, patch)

    def _mels(self, audio: Any) -> int:
        names = ("num_mel_bins", "feature_size", "input_feat_per_channel",
                 "feature_projection_input_dim",
                 "input_feat_size", "n_mels", "input_dim", "num_mel_filters", "input_channels",
                 "mel_bins")  # fmt: skip
        for name in names:
            for config in (audio, self.config):
                value = getattr(config, name, None)
                if isinstance(value, int):
                    return value
        return 80

    def _features(self, audio: Any) -> Iterator[Tensor]:
        mels = self._mels(audio)
        positions = getattr(audio, "max_source_positions", None) or 32
        for length in dict.fromkeys((2 * positions, positions, 64, 100, 256)):
            yield self._floats(self.batch, mels, length)
            yield self._floats(self.batch, length, mels)
        yield self._floats(self.batch, 1, 64, mels)

    def _waves(self, audio: Any) -> Iterator[Tensor]:
        mels = self._mels(audio)
        yield self._floats(self.batch, 4000)
        yield self._floats(self.batch, 1, 3840)
        yield self._floats(self.batch, 64, mels)
        yield self._floats(self.batch, SEQ_LEN, self._width(self.config))
        length = getattr(self.config, "max_length", None)
        if isinstance(length, int) and length != 64:
            yield self._floats(self.batch, length, mels)
        yield torch.randint(0, 255, (self.batch, 64), generator=self.generator)

    def _past(self) -> int:
        config = self.config
        lags = max(getattr(config, "lags_sequence", None) or [0])
        return int(getattr(config, "context_length", 32) or 32) + int(lags)

    def _features_of_time(self) -> int:
        return int(getattr(self.config, "num_time_features", 0) or 0)

    def _series(self) -> Iterator[Tensor]:
        channels = getattr(self.config, "num_input_channels", None)
        if isinstance(channels, int):
            yield self._floats(self.batch, self._past(), channels)
        yield self._floats(self.batch, self._past())
        yield self._floats(self.batch, 32)
