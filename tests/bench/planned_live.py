"""Models that no config tells of, for pages that plan them: built on meta, entry by entry.

An encoder of images, an encoder and decoder of text, a denoiser of which no two blocks are alike.
"""

from __future__ import annotations

import itertools
from typing import Final

from torch import Tensor, cat, nn
from torch.nn import functional

from tests.bench.tiers import Residual

HALVED_EVERY: Final = 16
"""Blocks of the denoiser between two halvings of the image."""


def t5_11b() -> nn.Module:
    """T5-11B by its published config. Source: google-t5/t5-11b, config.json."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128, vocab_size=32128,
        dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit_h() -> nn.Module:
    """ViT-H/14 by its published config. Source: google/vit-huge-patch14-224-in21k, config.json."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16,
        patch_size=14, image_size=224, num_labels=1000,
    )  # fmt: skip
    return ViTForImageClassification(config)


class UNet(nn.Module):
    """Blocks of growing widths, no two alike; what goes down is met again on the way up."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        half = blocks // 2
        widths = [32 * (4 + place * 9 // half) for place in range(half + 1)]
        pairs = list(itertools.pairwise(widths))
        self.stem = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down = nn.ModuleList([Residual(a, b) for a, b in pairs])
        self.up = nn.ModuleList([Residual(2 * b, a) for a, b in reversed(pairs)])
        self.head = nn.Conv2d(widths[0], 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for number, block in enumerate(self.down, 1):
            x = block(x)
            skips.append(x)
            if number % HALVED_EVERY == 0:
                x = functional.avg_pool2d(x, 2)
        for block in self.up:
            skip = skips.pop()
            if skip.shape[-1] != x.shape[-1]:
                x = functional.interpolate(x, size=skip.shape[-2:])
            x = block(cat((x, skip), 1))
        return self.head(x)


def unet() -> nn.Module:
    """With 98 blocks."""
    return UNet(98)
