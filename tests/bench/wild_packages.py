"""Models of packages, tiny, as their users build them; there where these are installed."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import CASES, Wild, ce, images, rows, whole
from tests.bench.zoo_timm import stand_in_for_torchvision


def package(name: str) -> Callable[[Callable[[], Wild]], Callable[[], Wild]]:
    """Register a case where this package is installed; it is imported when the case is made."""

    def register(function: Callable[[], Wild]) -> Callable[[], Wild]:
        def make() -> Wild:
            logging.disable(logging.WARNING)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if importlib.util.find_spec("torchvision") is None and name not in sys.modules:
                    stand_in_for_torchvision()
                try:
                    return function()
                finally:
                    logging.disable(logging.NOTSET)

        if importlib.util.find_spec(name) is not None:
            CASES[f"{name.partition('_')[0]}/{function.__name__}"] = make
        return function

    return register


def still(model: nn.Module) -> nn.Module:
    """Training mode without random numbers."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in vars(module).items():
            if isinstance(value, float) and "drop" in key:
                setattr(module, key, 0.0)
    return model.train()


def classify(model: nn.Module, size: int = 32, *, coupled: bool = False) -> Wild:
    return Wild(still(model), images(3, size), whole(5), F.cross_entropy, coupled=coupled)


# vit-pytorch


@package("vit_pytorch")
def vit() -> Wild:
    from vit_pytorch import ViT

    return classify(
        ViT(
            image_size=32,
            patch_size=8,
            num_classes=5,
            dim=16,
            depth=2,
            heads=2,
            mlp_dim=32,
            dim_head=8,
        )
    )


@package("vit_pytorch")
def simple_vit() -> Wild:
    from vit_pytorch import SimpleViT

    return classify(
        SimpleViT(
            image_size=32,
            patch_size=8,
            num_classes=5,
            dim=16,
            depth=2,
            heads=2,
            mlp_dim=32,
            dim_head=8,
        )
    )


@package("vit_pytorch")
def cait() -> Wild:
    from vit_pytorch.cait import CaiT

    return classify(
        CaiT(
            image_size=32,
            patch_size=8,
            num_classes=5,
            dim=16,
            depth=2,
            cls_depth=1,
            heads=2,
            mlp_dim=32,
            dim_head=8,
        )
    )


@package("vit_pytorch")
def cct() -> Wild:
    from vit_pytorch.cct import CCT

    return classify(
        CCT(
            img_size=32,
            embedding_dim=16,
            n_conv_layers=1,
            num_layers=2,
            num_heads=2,
            mlp_ratio=2.0,
            num_classes=5,
            stochastic_depth=0.0,
        )
    )


@package("vit_pytorch")
def cross_vit() -> Wild:
    from vit_pytorch.cross_vit import CrossViT

    return classify(
        CrossViT(
            image_size=32,
            num_classes=5,
            depth=1,
            sm_dim=16,
            sm_patch_size=8,
            sm_enc_depth=1,
            sm_enc_heads=2,
            sm_enc_mlp_dim=32,
            sm_enc_dim_head=8,
            lg_dim=32,
            lg_patch_size=16,
            lg_enc_depth=1,
            lg_enc_heads=2,
            lg_enc_mlp_dim=32,
            lg_enc_dim_head=8,
            cross_attn_depth=1,
            cross_attn_heads=2,
            cross_attn_dim_head=8,
        )
    )


@package("vit_pytorch")
def pit() -> Wild:
    from vit_pytorch.pit import PiT

    return classify(
        PiT(
            image_size=32,
            patch_size=8,
            dim=16,
            num_classes=5,
            depth=(1, 1),
            heads=2,
            mlp_dim=32,
            dim_head=8,
        )
    )


@package("vit_pytorch")
def max_vit() -> Wild:
    from vit_pytorch.max_vit import MaxViT

    return classify(
        MaxViT(
            num_classes=5,
            dim=16,
            depth=(1,),
            dim_head=8,
            dim_conv_stem=8,
            window_size=8,
            mbconv_expansion_rate=2,
            mbconv_shrinkage_rate=0.5,
        ),
        coupled=True,
    )


@package("vit_pytorch")
def mobile_vit() -> Wild:
    from vit_pytorch.mobile_vit import MobileViT

    return classify(
        MobileViT(
            image_size=(64, 64),
            dims=[16, 20, 24],
            channels=[8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 32],
            num_classes=5,
        ),
        64,
        coupled=True,
    )


@package("vit_pytorch")
def vit_for_mae() -> Wild:
    from vit_pytorch import SimpleViT
    from vit_pytorch.extractor import Extractor

    inner = SimpleViT(
        image_size=32, patch_size=8, num_classes=5, dim=16, depth=2, heads=2, mlp_dim=32, dim_head=8
    )
    return Wild(
        still(Extractor(inner, return_embeddings_only=True, detach=False)),
        images(3, 32),
        rows(17, 16),
        lambda o, t: o.square().mean(),
    )


# x-transformers


def attn_layers(**more: Any) -> Any:
    from x_transformers import Decoder

    return Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **more)


def lm(**more: Any) -> Wild:
    from x_transformers import TransformerWrapper

    model = TransformerWrapper(num_tokens=24, max_seq_len=16, attn_layers=attn_layers(**more))
    return Wild(still(model), whole(24, 8), whole(24, 8, seed=5), ce)


@package("x_transformers")
def decoder() -> Wild:
    return lm()


@package("x_transformers")
def decoder_rotary_swiglu() -> Wild:
    return lm(rotary_pos_emb=True, ff_swish=True, ff_glu=True, use_rmsnorm=True)


@package("x_transformers")
def decoder_alibi_qk_norm() -> Wild:
    return lm(alibi_pos_bias=True, attn_qk_norm=True, attn_kv_heads=1)


@package("x_transformers")
def decoder_hyper_connections() -> Wild:
    return lm(num_residual_streams=2)


@package("x_transformers")
def decoder_t5_bias_shift() -> Wild:
    return lm(rel_pos_bias=True, shift_tokens=1, residual_attn=True)


@package("x_transformers")
def encoder_image() -> Wild:
    from x_transformers import Encoder, ViTransformerWrapper

    return classify(
        ViTransformerWrapper(
            image_size=32,
            patch_size=8,
            num_classes=5,
            attn_layers=Encoder(dim=16, depth=2, heads=2, attn_dim_head=8),
        )
    )


@package("x_transformers")
def autoregressive_wrapper() -> Wild:
    from x_transformers import AutoregressiveWrapper, TransformerWrapper

    inner = TransformerWrapper(num_tokens=24, max_seq_len=16, attn_layers=attn_layers())
    return Wild(still(AutoregressiveWrapper(inner)), whole(24, 9), rows(seed=4), lambda o, t: o)


# open_clip


@package("open_clip")
def clip() -> Wild:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=16, head_width=8, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=8, vocab_size=24, width=16, heads=2, layers=2)
    model = CLIP(16, vision, text)

    def loss(o: Any, t: Tensor) -> Tensor:
        return F.mse_loss((o[0] * o[1]).sum(-1) * o[2] / 14, t)

    return Wild(still(model), {"image": images(3, 32), "text": whole(24, 8)}, rows(seed=4), loss)


@package("open_clip")
def clip_resnet() -> Wild:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=(1, 1, 1, 1), width=8, image_size=32)  # type: ignore[arg-type]
    text = CLIPTextCfg(context_length=8, vocab_size=24, width=16, heads=2, layers=2)

    def loss(o: Any, t: Tensor) -> Tensor:
        return F.mse_loss((o[0] * o[1]).sum(-1), t)

    return Wild(
        still(CLIP(16, vision, text)),
        {"image": images(3, 32), "text": whole(24, 8)},
        rows(seed=4),
        loss,
        coupled=True,
    )


# segmentation_models_pytorch


def segmented(kind: str, encoder: str = "mit_b0", **more: Any) -> Wild:
    import segmentation_models_pytorch as smp

    model = getattr(smp, kind)(encoder, encoder_weights=None, classes=4, **more)
    return Wild(still(model), images(3, 32), whole(4, 32, 32), F.cross_entropy, coupled=True)


@package("segmentation_models_pytorch")
def unet() -> Wild:
    return segmented("Unet", decoder_channels=(16, 8, 8, 8, 8))


@package("segmentation_models_pytorch")
def manet() -> Wild:
    return segmented("MAnet", decoder_channels=(16, 8, 8, 8, 8))


# diffusers


@package("diffusers")
def unet_2d() -> Wild:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return Wild(
        still(model),
        {"sample": images(3, 8), "timestep": whole(100)},
        images(3, 8),
        lambda o, t: F.mse_loss(o.sample, t),
    )


@package("diffusers")
def unet_2d_condition() -> Wild:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    given = {"sample": rows(4, 8, 8), "timestep": whole(100), "encoder_hidden_states": rows(5, 16)}
    return Wild(still(model), given, rows(4, 8, 8, seed=6), lambda o, t: F.mse_loss(o.sample, t))


@package("diffusers")
def autoencoder_kl() -> Wild:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        norm_num_groups=4,
        latent_channels=2,
    )
    return Wild(
        still(model),
        {"sample": images(3, 8), "sample_posterior": False},
        images(3, 8),
        lambda o, t: F.mse_loss(o.sample, t),
    )


@package("diffusers")
def dit() -> Wild:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
        dropout=0.0,
    )
    given = {"hidden_states": rows(4, 8, 8), "timestep": whole(10), "class_labels": whole(5)}
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return Wild(
        still(model), given, rows(4, 8, 8, seed=6), lambda o, t: F.mse_loss(o.sample[:, :4], t)
    )


@package("diffusers")
def vq_model() -> Wild:
    from diffusers import VQModel

    model = VQModel(
        block_out_channels=(16,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        norm_num_groups=4,
        num_vq_embeddings=8,
        latent_channels=3,
    )
    return Wild(
        still(model),
        images(3, 8),
        images(3, 8),
        lambda o, t: F.mse_loss(o.sample, t) + o.commit_loss.mean(),
    )


# peft


def tuned(**more: Any) -> Wild:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        use_cache=False,
    )
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | more
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(**settings))
    return Wild(
        still(model),
        {"input_ids": whole(24, 8)},
        whole(24, 8, seed=5),
        lambda o, t: ce(o.logits, t),
    )


@package("peft")
def lora_llama() -> Wild:
    return tuned()


@package("peft")
def dora_llama() -> Wild:
    return tuned(use_dora=True)


@package("peft")
def lora_saved_embedding() -> Wild:
    return tuned(modules_to_save=["lm_head"])


@package("peft")
def lora_all_linear() -> Wild:
    return tuned(target_modules="all-linear", bias="all")


@package("peft")
def ia3() -> Wild:
    from peft import IA3Config, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=24,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    model = get_peft_model(
        base,
        IA3Config(
            target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True
        ),
    )
    return Wild(
        still(model),
        {"input_ids": whole(24, 8)},
        whole(24, 8, seed=5),
        lambda o, t: ce(o.logits, t),
    )


# timm


def from_timm(name: str, size: int = 32, coupled: bool = False, **more: Any) -> Wild:
    import timm

    return classify(timm.create_model(name, num_classes=5, **more), size, coupled=coupled)


@package("timm")
def resnet10t() -> Wild:
    return from_timm("resnet10t", 32, True, stem_width=8)


@package("timm")
def vit_tiny_registers() -> Wild:
    return from_timm(
        "vit_tiny_patch16_224", 32, img_size=32, embed_dim=24, depth=2, num_heads=2, reg_tokens=2
    )


@package("timm")
def mobilenet_v3() -> Wild:
    return from_timm("mobilenetv3_small_050", 32, True)


@package("timm")
def convnext_atto() -> Wild:
    return from_timm("convnext_atto", 32, dims=(8, 8, 16, 16), depths=(1, 1, 1, 1))
