"""Text encoders and VAEs, of images and videos."""

from __future__ import annotations

from worker.engine.architectures.rules import STACKED, UNUSED, Architectures, Rules

_TEXT = Rules("input_ids", {"input_ids": STACKED, "attention_mask": STACKED})
_VAE_ENCODE = Rules("x", {"x": STACKED})

ENCODERS: Architectures = {
    "AutoencoderKL": {
        "encode": _VAE_ENCODE,
        "decode": Rules("z", {"z": STACKED, "generator": UNUSED}),
    },
    "AutoencoderTiny": {
        "encode": _VAE_ENCODE,
        "decode": Rules("x", {"x": STACKED, "generator": UNUSED}),
    },
    "CLIPTextModel": {"forward": _TEXT},
    "CLIPTextModelWithProjection": {"forward": _TEXT},
    "T5EncoderModel": {"forward": _TEXT},
}
