"""Tiny Hunyuan-DiT and HunyuanImage 2.1, and HiDream-I1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKLHunyuanImage,
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    HunyuanDiT2DModel,
    HunyuanDiTPipeline,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
)
from diffusers.pipelines.controlnet_hunyuandit import pipeline_hunyuandit_controlnet
from diffusers.pipelines.hunyuandit import pipeline_hunyuandit
from tiny import components, tokens
from transformers import (
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    CLIPTextModelWithProjection,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
)

TEMPLATE = (
    "system user Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)


def hunyuan_dit() -> HunyuanDiTPipeline:
    first, second = tokens.bert(), tokens.t5(256)
    return HunyuanDiTPipeline(
        vae=components.vae(4),
        text_encoder=BertModel(
            BertConfig(
                vocab_size=len(first),
                hidden_size=tokens.WIDTH,
                intermediate_size=37,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        ),
        tokenizer=first,
        text_encoder_2=components.t5_encoder(second),
        tokenizer_2=second,
        transformer=HunyuanDiT2DModel(
            sample_size=16,
            num_layers=4,  # with fewer it has no connection to which a control net adds
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            in_channels=4,
            cross_attention_dim=tokens.WIDTH,
            cross_attention_dim_t5=tokens.WIDTH,
            pooled_projection_dim=16,
            hidden_size=24,
        ),
        scheduler=DDPMScheduler(prediction_type="v_prediction"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@contextmanager
def small_images() -> Iterator[None]:
    """Add a small size to the list of sizes of Hunyuan-DiT, of a megapixel and more."""
    sizes = [*pipeline_hunyuandit.SUPPORTED_SHAPE, (64, 64)]
    with (
        mock.patch.object(pipeline_hunyuandit, "SUPPORTED_SHAPE", sizes),
        mock.patch.object(pipeline_hunyuandit_controlnet, "SUPPORTED_SHAPE", sizes),
    ):
        yield


def hunyuan_image() -> HunyuanImagePipeline:
    first, second = tokens.qwen(TEMPLATE), ByT5Tokenizer()
    return HunyuanImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            scaling_factor=0.476986,
            spatial_compression_ratio=8,
            sample_size=64,
        ),
        text_encoder=components.qwen_vl(len(first), layers=3),
        tokenizer=first,
        text_encoder_2=T5EncoderModel(
            T5Config(vocab_size=len(second), d_model=16, d_ff=37, d_kv=8, num_heads=2, num_layers=1)
        ),
        tokenizer_2=second,
        transformer=HunyuanImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=tokens.WIDTH,
            text_embed_2_dim=16,
            rope_axes_dim=(8, 8),
        ),
        guider=AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2),
        ocr_guider=AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=3),
    )


def hidream() -> HiDreamImagePipeline:
    first, second, third, fourth = tokens.clip(), tokens.clip(), tokens.t5(128), tokens.llama("")
    return HiDreamImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=components.flow_vae(4),
        text_encoder=CLIPTextModelWithProjection(components.clip_config(first, positions=128)),
        tokenizer=first,
        text_encoder_2=CLIPTextModelWithProjection(components.clip_config(second, positions=128)),
        tokenizer_2=second,
        text_encoder_3=components.t5_encoder(third),
        tokenizer_3=third,
        text_encoder_4=LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(fourth),
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                pad_token_id=fourth.pad_token_id,
            )
        ),
        tokenizer_4=fourth,
        transformer=HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=(tokens.WIDTH, 16),
            text_emb_dim=2 * tokens.WIDTH,
            num_routed_experts=4,
            num_activated_experts=2,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(32, 32),
            llama_layers=(0, 1),
        ),
    )


def small_hidream() -> AbstractContextManager[None]:
    """Scale images to 64x64 pixels, and not to a megapixel."""
    return components.new_ones_have(HiDreamImagePipeline, default_sample_size=8)


PIPELINES = {"hunyuan-dit": hunyuan_dit, "hunyuan-image-2.1": hunyuan_image, "hidream": hidream}
