"""Tiny Kandinsky 2.1, 2.2 and 3. The first two are combined pipelines, of a prior and a decoder."""

from __future__ import annotations

from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    Kandinsky3Pipeline,
    Kandinsky3UNet,
    KandinskyCombinedPipeline,
    KandinskyV22CombinedPipeline,
    PriorTransformer,
    UnCLIPScheduler,
    UNet2DConditionModel,
    VQModel,
)
from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
from tiny import components, tokens
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)


def _movq() -> VQModel:
    return VQModel(
        block_out_channels=(32, 32, 32, 32),  # spatial norms have groups of 32
        down_block_types=("DownEncoderBlock2D",) * 3 + ("AttnDownEncoderBlock2D",),
        up_block_types=("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )


def _unet(addition: str, projection: str) -> UNet2DConditionModel:
    """The decoder's UNet; it predicts noise and variance."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=8,
        addition_embed_type=addition,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        encoder_hid_dim=tokens.WIDTH,
        encoder_hid_dim_type=projection,
        cross_attention_dim=tokens.WIDTH,
        attention_head_dim=8,
        resnet_time_scale_shift="scale_shift",
    )


def _image_encoder() -> CLIPVisionModelWithProjection:
    return CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=tokens.WIDTH,
            projection_dim=tokens.WIDTH,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=1,
            image_size=32,
            patch_size=16,
        )
    )


def _prior() -> dict[str, object]:
    """The components of the prior, as combined pipelines name them."""
    tokenizer = tokens.clip()
    transformer = PriorTransformer(
        num_attention_heads=2, attention_head_dim=16, embedding_dim=tokens.WIDTH, num_layers=1
    )
    return {
        "prior_prior": transformer,
        "prior_image_encoder": _image_encoder(),
        "prior_text_encoder": CLIPTextModelWithProjection(components.clip_config(tokenizer)),
        "prior_tokenizer": tokenizer,
        "prior_scheduler": UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=10.0
        ),
        "prior_image_processor": CLIPImageProcessorPil(size=32, crop_size=32),
    }


def _decoder_scheduler() -> DDIMScheduler:
    return DDIMScheduler(
        beta_schedule="linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def kandinsky_21() -> KandinskyCombinedPipeline:
    tokenizer = tokens.xlm_roberta()
    return KandinskyCombinedPipeline(
        text_encoder=MultilingualCLIP(
            MCLIPConfig(
                numDims=tokens.WIDTH,
                transformerDimensions=tokens.WIDTH,
                hidden_size=tokens.WIDTH,
                intermediate_size=37,
                num_attention_heads=4,
                num_hidden_layers=2,
                vocab_size=len(tokenizer),
            )
        ),
        tokenizer=tokenizer,
        unet=_unet("text_image", "text_image_proj"),
        scheduler=_decoder_scheduler(),
        movq=_movq(),
        **_prior(),
    )


def kandinsky_22() -> KandinskyV22CombinedPipeline:
    return KandinskyV22CombinedPipeline(
        unet=_unet("image", "image_proj"), scheduler=_decoder_scheduler(), movq=_movq(), **_prior()
    )


def kandinsky_3() -> Kandinsky3Pipeline:
    tokenizer = tokens.t5(128)
    return Kandinsky3Pipeline(
        tokenizer=tokenizer,
        text_encoder=components.t5_encoder(tokenizer),
        unet=Kandinsky3UNet(
            in_channels=4,
            time_embedding_dim=8,
            groups=4,
            attention_head_dim=4,
            layers_per_block=3,
            block_out_channels=(16, 32),
            cross_attention_dim=8,
            encoder_hid_dim=tokens.WIDTH,
        ),
        scheduler=DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="squaredcos_cap_v2"),
        movq=_movq(),
    )


PIPELINES = {"kandinsky-2.1": kandinsky_21, "kandinsky-2.2": kandinsky_22, "kandinsky-3": kandinsky_3}
