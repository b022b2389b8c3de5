"""Stacking rules of the known architectures, by class name and method.

Each rule is verified twice: by the parity test of its architecture, and by the self-check when a model is loaded.
A denoiser that is not listed is tried with inferred rules; any other class runs unfused.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.engine.fusion.stacking_rules import (
    CACHE,
    FORM,
    GROUPED,
    LISTED,
    REPEATED,
    ROWS,
    SAME,
    SHARED,
    STACKED,
    UNUSED,
    Argument,
    Kind,
    StackingRules,
)

Architectures = Mapping[str, Mapping[str, StackingRules]]

# Integers or floats, depending on the noise scheduler; embedded as float32 in both cases.
_TIMES = Argument(Kind.ROWS, dtype="float32")


def _rules(rows: str, *stacked: str, **others: Argument) -> StackingRules:
    """Return rules that stack `rows` and `stacked`; `others` have rules of their own."""
    return StackingRules(rows, {**dict.fromkeys((rows, *stacked), STACKED), **others})


_TEXT = _rules("input_ids", "attention_mask")
_PIXELS = _rules("pixel_values")
_ENCODE = _rules("x")
_DECODE = _rules("z")

IMAGE_DENOISERS: Architectures = {
    "UNet2DConditionModel": {
        "forward": _rules(
            "sample",
            "encoder_hidden_states",
            "class_labels",
            "timestep_cond",
            "attention_mask",
            "encoder_attention_mask",
            "added_cond_kwargs",
            timestep=_TIMES,
        )
    },
    "SD3Transformer2DModel": {
        "forward": _rules("hidden_states", "encoder_hidden_states", "pooled_projections", timestep=ROWS)
    },
    "FluxTransformer2DModel": {
        "forward": _rules(
            "hidden_states",
            "encoder_hidden_states",
            "pooled_projections",
            "guidance",
            timestep=ROWS,
            img_ids=SAME,  # reference images with the same number of tokens can have different shapes
            txt_ids=SHARED,
        )
    },
    # Its positions are those of the first row.
    "Flux2Transformer2DModel": {
        "forward": _rules(
            "hidden_states", "encoder_hidden_states", "guidance", timestep=ROWS, img_ids=SAME, txt_ids=SAME
        )
    },
    "ZImageTransformer2DModel": {
        "forward": StackingRules("x", {"x": LISTED, "cap_feats": LISTED, "t": ROWS, "return_dict": FORM}, True)
    },
    "QwenImageTransformer2DModel": {
        "forward": _rules(
            "hidden_states",
            "guidance",
            "additional_t_cond",
            # The pipelines drop a mask that hides nothing.
            encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_hidden_states_mask"),
            encoder_hidden_states_mask=Argument(Kind.MASK, dtype="bool"),
            timestep=ROWS,
            img_shapes=REPEATED,
        )
    },
    # Image positions follow the text and are those of the first row: only prompts of equal length fuse.
    "QwenImage21Transformer2DModel": {
        "forward": _rules(
            "hidden_states",
            "encoder_hidden_states",
            "encoder_hidden_states_mask",
            timestep=ROWS,
            img_shapes=REPEATED,
            img_mask=SAME,
        )
    },
    "SanaTransformer2DModel": {
        "forward": _rules("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "guidance", timestep=ROWS)
    },
    "ErnieImageTransformer2DModel": {
        # The model masks `text_bth` beyond each row's `text_lens`.
        "forward": _rules("hidden_states", "text_lens", timestep=ROWS, text_bth=Argument(Kind.PADDED))
    },
    # Glyphs are not padded: attention adds their mask as ones and zeros, which hides nothing.
    "GlmImageTransformer2DModel": {
        "forward": _rules(
            "hidden_states",
            "encoder_hidden_states",
            "prior_token_id",
            "prior_token_drop",
            "target_size",
            "crop_coords",
            timestep=ROWS,
            kv_caches=CACHE,
        )
    },
}

VIDEO_DENOISERS: Architectures = {
    # Wan 2.1 and 2.2. Where tokens have times of their own (2.2 TI2V), `timestep` is [rows, tokens].
    "WanTransformer3DModel": {
        "forward": _rules(
            "hidden_states",
            "encoder_hidden_states",
            timestep=_TIMES,
            encoder_hidden_states_image=GROUPED,  # first and last image are two entries of one row
        )
    },
    "HunyuanVideoTransformer3DModel": {
        "forward": _rules(
            "hidden_states",
            "pooled_projections",
            "guidance",
            timestep=_TIMES,
            # With an image in the prompt its length varies; the mask is always given.
            encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_attention_mask"),
            encoder_attention_mask=Argument(Kind.MASK, dtype="float32"),
        )
    },
    "HunyuanVideo15Transformer3DModel": {
        "forward": _rules(
            "hidden_states",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "encoder_hidden_states_2",
            "encoder_attention_mask_2",
            "image_embeds",
            timestep=_TIMES,
            timestep_r=_TIMES,
        )
    },
    "HeliosTransformer3DModel": {
        "forward": _rules(
            "hidden_states",
            "encoder_hidden_states",
            "latents_history_short",
            "latents_history_mid",
            "latents_history_long",
            timestep=_TIMES,
            indices_hidden_states=SHARED,
            indices_latents_history_short=SHARED,
            indices_latents_history_mid=SHARED,
            indices_latents_history_long=SHARED,
        )
    },
    "LTX2VideoTransformer3DModel": {
        "forward": _rules(
            "hidden_states",
            "audio_hidden_states",
            "encoder_hidden_states",
            "audio_encoder_hidden_states",
            "encoder_attention_mask",
            "audio_encoder_attention_mask",
            "video_coords",
            "audio_coords",
            "perturbation_mask",
            # One time per row for text-to-video, one per token for image-to-video, which gives `audio_timestep` too.
            timestep=_TIMES,
            audio_timestep=Argument(Kind.ROWS, dtype="float32", like="timestep"),
            sigma=_TIMES,
            audio_sigma=_TIMES,
        )
    },
}

# Not listed, so called once per job: AutoencoderKLHunyuanVideo15, whose attention takes one row only (its mask has the
# wrong shape for more); LTX2VocoderWithBWE, whose rows differ by up to 1e-4; LlavaForConditionalGeneration, which
# returns the states of all its images in one tensor.
ENCODERS: Architectures = {
    "AutoencoderKL": {"encode": _ENCODE, "decode": _rules("z", generator=UNUSED)},
    "AutoencoderTiny": {"encode": _ENCODE, "decode": _rules("x", generator=UNUSED)},
    "AutoencoderKLFlux2": {"encode": _ENCODE, "decode": _DECODE},
    "AutoencoderKLQwenImage": {"encode": _ENCODE, "decode": _DECODE},
    "AutoencoderKLQwenImage21": {"encode": _ENCODE, "decode": _DECODE},
    "AutoencoderDC": {"encode": _ENCODE, "decode": _DECODE},
    "AutoencoderKLWan": {"encode": _ENCODE, "decode": _DECODE},
    "AutoencoderKLHunyuanVideo": {"encode": _ENCODE, "decode": _DECODE},
    "AutoencoderKLLTX2Video": {"encode": _ENCODE, "decode": _rules("z", "temb")},
    "AutoencoderKLLTX2Audio": {"decode": _DECODE},
    "LTX2TextConnectors": {"forward": _rules("text_encoder_hidden_states", "attention_mask")},
    "LTX2Vocoder": {"forward": _rules("hidden_states")},
    "CLIPTextModel": {"forward": _TEXT},
    "CLIPTextModelWithProjection": {"forward": _TEXT},
    "T5EncoderModel": {"forward": _TEXT},
    "UMT5EncoderModel": {"forward": _TEXT},
    # Decoder models: pipelines pad prompts to one length and mask the padding; otherwise only equal lengths fuse.
    "Gemma2Model": {"forward": _TEXT},
    "Gemma3ForConditionalGeneration": {"forward": _TEXT},
    "LlamaModel": {"forward": _TEXT},
    "Mistral3ForConditionalGeneration": {"forward": _TEXT},
    "Mistral3Model": {"forward": _TEXT},
    "Qwen2_5_VLForConditionalGeneration": {"forward": _TEXT},
    "Qwen2_5_VLTextModel": {"forward": _TEXT},
    "Qwen3VLForConditionalGeneration": {"forward": _rules("input_ids", "attention_mask", "mm_token_type_ids")},
    "Qwen3ForCausalLM": {"forward": _TEXT},
    "Qwen3Model": {"forward": _TEXT},
    "CLIPVisionModel": {"forward": _PIXELS},
    "SiglipVisionModel": {"forward": _PIXELS},
}

ARCHITECTURES: Architectures = {**IMAGE_DENOISERS, **VIDEO_DENOISERS, **ENCODERS}
