"""The video families: their denoisers, and the encoders and decoders that only they have."""

from __future__ import annotations

from worker.engine.fusion.architectures.rules import (
    GROUPED,
    SHARED,
    STACKED,
    Architectures,
    Argument,
    Kind,
    StackingRules,
)

_TIMES = Argument(Kind.ROWS, dtype="float32")  # integers by some schedulers; embedded as float32 all the same

_MASKED_TEXT = StackingRules("input_ids", {"input_ids": STACKED, "attention_mask": STACKED})
_PICTURES = StackingRules("pixel_values", {"pixel_values": STACKED})
_ENCODE = StackingRules("x", {"x": STACKED})
_DECODE = StackingRules("z", {"z": STACKED})

VIDEOS: Architectures = {
    # Wan 2.1 and 2.2. Where tokens have times of their own (2.2 TI2V), `timestep` is [rows, tokens].
    "WanTransformer3DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "timestep": _TIMES,
                "encoder_hidden_states": STACKED,
                "encoder_hidden_states_image": GROUPED,  # first and last picture are two entries of one row
            },
        )
    },
    "HunyuanVideoTransformer3DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "timestep": _TIMES,
                # With a picture in the prompt its length is not fixed; the mask is always given.
                "encoder_hidden_states": Argument(Kind.PADDED, mask="encoder_attention_mask"),
                "encoder_attention_mask": Argument(Kind.MASK, dtype="float32"),
                "pooled_projections": STACKED,
                "guidance": STACKED,
            },
        )
    },
    "HunyuanVideo15Transformer3DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "timestep": _TIMES,
                "timestep_r": _TIMES,
                "encoder_hidden_states": STACKED,
                "encoder_attention_mask": STACKED,
                "encoder_hidden_states_2": STACKED,
                "encoder_attention_mask_2": STACKED,
                "image_embeds": STACKED,
            },
        )
    },
    "HeliosTransformer3DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "timestep": _TIMES,
                "encoder_hidden_states": STACKED,
                "indices_hidden_states": SHARED,
                "indices_latents_history_short": SHARED,
                "indices_latents_history_mid": SHARED,
                "indices_latents_history_long": SHARED,
                "latents_history_short": STACKED,
                "latents_history_mid": STACKED,
                "latents_history_long": STACKED,
            },
        )
    },
    "LTX2VideoTransformer3DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "audio_hidden_states": STACKED,
                "encoder_hidden_states": STACKED,
                "audio_encoder_hidden_states": STACKED,
                # One time a row for text-to-video, one a token for image-to-video, where `audio_timestep` is given.
                "timestep": _TIMES,
                "audio_timestep": Argument(Kind.ROWS, dtype="float32", like="timestep"),
                "sigma": _TIMES,
                "audio_sigma": _TIMES,
                "encoder_attention_mask": STACKED,
                "audio_encoder_attention_mask": STACKED,
                "video_coords": STACKED,
                "audio_coords": STACKED,
                "perturbation_mask": STACKED,
            },
        )
    },
    "AutoencoderKLWan": {"encode": _ENCODE, "decode": _DECODE},
    "AutoencoderKLHunyuanVideo": {"encode": _ENCODE, "decode": _DECODE},
    # None for AutoencoderKLHunyuanVideo15, whose attention takes one row only (it adds a mask of the wrong shape for
    # more), for LTX2VocoderWithBWE, whose rows come out up to 1e-4 off, and for LlavaForConditionalGeneration, which
    # gives its pictures' states in one piece: each is called once a job.
    "AutoencoderKLLTX2Video": {
        "encode": _ENCODE,
        "decode": StackingRules("z", {"z": STACKED, "temb": STACKED}),
    },
    "AutoencoderKLLTX2Audio": {"decode": _DECODE},
    "LTX2TextConnectors": {
        "forward": StackingRules(
            "text_encoder_hidden_states", {"text_encoder_hidden_states": STACKED, "attention_mask": STACKED}
        )
    },
    "LTX2Vocoder": {"forward": StackingRules("hidden_states", {"hidden_states": STACKED})},
    # They are given a fixed length and a mask; padding is attended to by none.
    "UMT5EncoderModel": {"forward": _MASKED_TEXT},
    "LlamaModel": {"forward": _MASKED_TEXT},
    "Qwen2_5_VLTextModel": {"forward": _MASKED_TEXT},
    "Gemma3ForConditionalGeneration": {"forward": _MASKED_TEXT},
    "CLIPVisionModel": {"forward": _PICTURES},
    "SiglipVisionModel": {"forward": _PICTURES},
}
