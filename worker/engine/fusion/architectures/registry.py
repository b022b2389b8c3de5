"""Stacking rules of the known architectures.

Plain data, without torch. Each rule is verified twice: by the parity test of its architecture, and by the self-check
when a model is loaded. A denoiser that is not listed is tried with inferred rules; any other class runs unfused.
"""

from collections.abc import Mapping

from worker.engine.fusion.architectures.image_denoisers import CONTROL_NETS, IMAGE_DENOISERS
from worker.engine.fusion.architectures.video_denoisers import VIDEO_DENOISERS
from worker.engine.fusion.stacking_rules import UNUSED, Methods, forward, rules_for

_TEXT = forward("input_ids", "attention_mask")
_PIXELS = forward("pixel_values")
_VAE: Methods = {"encode": rules_for("x"), "decode": rules_for("z")}

# Not listed, so called once per job: AutoencoderKLHunyuanVideo15, whose attention takes one row only (its mask has the
# wrong shape for more); LTX2VocoderWithBWE, whose rows differ by up to 1e-4; LlavaForConditionalGeneration, which
# returns the states of all its images in one tensor.
ENCODERS: Mapping[str, Methods] = {
    "AutoencoderKL": {**_VAE, "decode": rules_for("z", generator=UNUSED)},
    "AutoencoderTiny": {**_VAE, "decode": rules_for("x", generator=UNUSED)},
    "AutoencoderKLFlux2": _VAE,
    "AutoencoderKLQwenImage": _VAE,
    "AutoencoderKLQwenImage21": _VAE,
    "AutoencoderDC": _VAE,
    "AutoencoderKLWan": _VAE,
    "AutoencoderKLHunyuanVideo": _VAE,
    "AutoencoderKLLTX2Video": {**_VAE, "decode": rules_for("z", "temb")},
    "AutoencoderKLLTX2Audio": {"decode": rules_for("z")},
    "LTX2TextConnectors": forward("text_encoder_hidden_states", "attention_mask"),
    "LTX2Vocoder": forward("hidden_states"),
    "AnimaTextConditioner": forward(
        "source_hidden_states", "target_input_ids", "target_attention_mask", "source_attention_mask"
    ),
    "CLIPTextModel": _TEXT,
    "CLIPTextModelWithProjection": _TEXT,
    "T5EncoderModel": _TEXT,
    "UMT5EncoderModel": _TEXT,
    # Decoder models: pipelines pad prompts to one length and mask the padding; otherwise only equal lengths fuse.
    "Gemma2Model": _TEXT,
    "Gemma3ForConditionalGeneration": _TEXT,
    "LlamaModel": _TEXT,
    "Mistral3ForConditionalGeneration": _TEXT,
    "Mistral3Model": _TEXT,
    "Qwen2_5_VLForConditionalGeneration": _TEXT,
    "Qwen2_5_VLTextModel": _TEXT,
    "Qwen3VLForConditionalGeneration": forward("input_ids", "attention_mask", "position_ids", "mm_token_type_ids"),
    "Qwen3ForCausalLM": _TEXT,
    "Qwen3Model": _TEXT,
    "CLIPVisionModel": _PIXELS,
    "CLIPVisionModelWithProjection": _PIXELS,
    "SiglipVisionModel": _PIXELS,
}

ARCHITECTURES: Mapping[str, Methods] = {**IMAGE_DENOISERS, **CONTROL_NETS, **VIDEO_DENOISERS, **ENCODERS}
