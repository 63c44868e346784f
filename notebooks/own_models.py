"""Two models that know nothing of meshplan, for `6_bring_your_own_model.ipynb`."""

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """Images in, images out; every level down also feeds the same level up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()

        def level(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 3, stride, 1)
            return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.SiLU())

        w = width
        self.down1, self.down2, self.down3 = level(3, w), level(w, 2 * w, 2), level(2 * w, 4 * w, 2)
        self.middle = level(4 * w, 4 * w)
        self.up3, self.up2, self.up1 = level(8 * w, 2 * w), level(4 * w, w), level(2 * w, w)
        self.out = nn.Conv2d(w, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(a)
        c = self.down3(b)
        up = self.up3(torch.cat([self.middle(c), c], 1))
        up = self.up2(torch.cat([nn.functional.interpolate(up, scale_factor=2.0), b], 1))
        up = self.up1(torch.cat([nn.functional.interpolate(up, scale_factor=2.0), a], 1))
        return self.out(up)


def unet() -> nn.Module:
    """A small one."""
    return UNet()


def t5() -> nn.Module:
    """Hugging Face's T5, small: an encoder, a decoder, and one embedding for both."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=64, d_kv=16, d_ff=160, num_layers=4, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)
