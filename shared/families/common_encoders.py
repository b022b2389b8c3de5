"""Text encoders, encoders of images, and VAEs that several families share."""

from shared.architectures.family import Encoder, Family
from shared.architectures.stacking_rules import UNUSED, VAE, forward, rules_for

_TEXT = forward("input_ids", "attention_mask")
_PIXELS = forward("pixel_values")

FAMILY = Family(
    encoders={
        "AutoencoderKL": Encoder({**VAE, "decode": rules_for("z", generator=UNUSED)}),
        "AutoencoderTiny": Encoder({**VAE, "decode": rules_for("x", generator=UNUSED)}),
        "AutoencoderDC": Encoder(VAE),
        "CLIPTextModel": Encoder(_TEXT, adapters_per_row=True),
        "CLIPTextModelWithProjection": Encoder(_TEXT, adapters_per_row=True),
        "T5EncoderModel": Encoder(_TEXT, adapters_per_row=True),
        "UMT5EncoderModel": Encoder(_TEXT, adapters_per_row=True),
        # Decoder models: pipelines pad prompts to one length and mask the padding; otherwise only equal lengths fuse.
        "Gemma2Model": Encoder(_TEXT),
        "Gemma3ForConditionalGeneration": Encoder(_TEXT),
        "LlamaModel": Encoder(_TEXT),
        "Mistral3ForConditionalGeneration": Encoder(_TEXT),
        "Mistral3Model": Encoder(_TEXT),
        "Qwen2_5_VLForConditionalGeneration": Encoder(_TEXT),
        "Qwen2_5_VLTextModel": Encoder(_TEXT),
        "Qwen3VLForConditionalGeneration": Encoder(
            forward("input_ids", "attention_mask", "position_ids", "mm_token_type_ids")
        ),
        "Qwen3ForCausalLM": Encoder(_TEXT),
        "Qwen3Model": Encoder(_TEXT),
        # Not LlavaForConditionalGeneration, which returns the states of all its images in one tensor.
        "CLIPVisionModel": Encoder(_PIXELS),
        "CLIPVisionModelWithProjection": Encoder(_PIXELS),
        "SiglipVisionModel": Encoder(_PIXELS),
    }
)
