"""Text encoders and VAEs, of images and videos."""

from __future__ import annotations

from worker.engine.fusion.architectures.rules import STACKED, UNUSED, Architectures, StackingRules

_TEXT = StackingRules("input_ids", {"input_ids": STACKED, "attention_mask": STACKED})
_VAE_ENCODE = StackingRules("x", {"x": STACKED})
_VAE_DECODE = StackingRules("z", {"z": STACKED})

ENCODERS: Architectures = {
    "AutoencoderKL": {
        "encode": _VAE_ENCODE,
        "decode": StackingRules("z", {"z": STACKED, "generator": UNUSED}),
    },
    "AutoencoderTiny": {
        "encode": _VAE_ENCODE,
        "decode": StackingRules("x", {"x": STACKED, "generator": UNUSED}),
    },
    "AutoencoderKLFlux2": {"encode": _VAE_ENCODE, "decode": _VAE_DECODE},
    "AutoencoderKLQwenImage": {"encode": _VAE_ENCODE, "decode": _VAE_DECODE},
    "AutoencoderKLQwenImage21": {"encode": _VAE_ENCODE, "decode": _VAE_DECODE},
    "AutoencoderDC": {"encode": _VAE_ENCODE, "decode": _VAE_DECODE},
    "CLIPTextModel": {"forward": _TEXT},
    "CLIPTextModelWithProjection": {"forward": _TEXT},
    "T5EncoderModel": {"forward": _TEXT},
    # Decoders by make: their pipelines pad prompts to one length and mask the padding, or else equal lengths fuse.
    "Gemma2Model": {"forward": _TEXT},
    "Mistral3ForConditionalGeneration": {"forward": _TEXT},
    "Mistral3Model": {"forward": _TEXT},
    "Qwen2_5_VLForConditionalGeneration": {"forward": _TEXT},
    "Qwen3VLForConditionalGeneration": {
        "forward": StackingRules(
            "input_ids", {"input_ids": STACKED, "attention_mask": STACKED, "mm_token_type_ids": STACKED}
        )
    },
    "Qwen3ForCausalLM": {"forward": _TEXT},
    "Qwen3Model": {"forward": _TEXT},
}
