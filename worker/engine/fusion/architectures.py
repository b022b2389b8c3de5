"""Stacking rules of the known architectures: what happens to each argument when calls of one method are fused.

Plain data, without torch. Each rule is verified twice: by the parity test of its architecture, and by the self-check
when a model is loaded. A denoiser that is not listed is tried with inferred rules; any other class runs unfused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """How the values of one argument are combined."""

    STACKED = "stacked"  # dim 0 is rows; a dict, list or tuple is stacked leaf by leaf
    GROUPED = "grouped"  # stacked, with several entries per row, the same number in all calls
    LAYERED = "layered"  # stacked along dim 1; dim 0 is layers of an encoder
    LISTED = "listed"  # a list with one entry per row, each of its own shape
    SHARED = "shared"  # a function of shapes only: the first call's value serves all
    ROWS = "rows"  # a number, a 0-dim tensor or one entry per row: becomes one entry per row
    PADDED = "padded"  # stacked, dim 1 can differ: padded with zeros and masked
    MASK = "mask"  # the mask of a padded argument; created where the pipeline omits it
    EQUAL = "equal"  # must be the same in all calls
    SAME = "same"  # tensors with the same values in all calls; comparing them waits once for the device
    REPEATED = "repeated"  # a list with one entry per row, all equal
    FORM = "form"  # whether the output is an object or a tuple: each call gets the form it asks for
    CACHE = "cache"  # of keys and values: omitted while it has no mode; a call that uses one runs solo
    UNUSED = "unused"  # accepted by the signature, ignored by the code: omitted


@dataclass(frozen=True)
class Argument:
    """Rule of one argument.

    `dtype` is the dtype of ROWS and of a created MASK; `mask` names the mask of a PADDED argument; `like` names the
    argument whose value the model uses when this one is omitted.
    """

    kind: Kind
    dtype: str | None = None
    mask: str | None = None
    like: str | None = None


STACKED = Argument(Kind.STACKED)
GROUPED = Argument(Kind.GROUPED)
LAYERED = Argument(Kind.LAYERED)
LISTED = Argument(Kind.LISTED)
SHARED = Argument(Kind.SHARED)
ROWS = Argument(Kind.ROWS)
EQUAL = Argument(Kind.EQUAL)
SAME = Argument(Kind.SAME)
REPEATED = Argument(Kind.REPEATED)
FORM = Argument(Kind.FORM)
CACHE = Argument(Kind.CACHE)
UNUSED = Argument(Kind.UNUSED)


@dataclass(frozen=True)
class StackingRules:
    """Rules of one method. Argument `rows` has one entry per row; an argument without a rule is EQUAL.

    With `listed_output` the result is a list with one entry per row. Not `exact`: the last bits of a row can depend on
    the other rows, as in a model that pads to the longest prompt of them; reproducible jobs do not use such rules.
    """

    rows: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    listed_output: bool = False
    exact: bool = True

    @cached_property
    def substitutes(self) -> Mapping[str, str]:
        """Names of arguments that can be omitted, with the argument whose value is used instead."""
        return {name: rule.like for name, rule in self.arguments.items() if rule.like is not None}


Methods = Mapping[str, StackingRules]


# Integers or floats, depending on the noise scheduler; embedded as float32 in both cases.
_TIMES = Argument(Kind.ROWS, dtype="float32")


def _rules(rows: str, *stacked: str, **others: Argument) -> StackingRules:
    """Return rules that stack `rows` and `stacked`; `others` have rules of their own."""
    return StackingRules(rows, {**dict.fromkeys((rows, *stacked), STACKED), **others})


def _forward(rows: str, *stacked: str, **others: Argument) -> Methods:
    return {"forward": _rules(rows, *stacked, **others)}


IMAGE_DENOISERS: Mapping[str, Methods] = {
    "UNet2DConditionModel": _forward(
        "sample",
        "encoder_hidden_states",
        "class_labels",
        "timestep_cond",
        "attention_mask",
        "encoder_attention_mask",
        "added_cond_kwargs",
        timestep=_TIMES,
    ),
    "SD3Transformer2DModel": _forward("hidden_states", "encoder_hidden_states", "pooled_projections", timestep=ROWS),
    "FluxTransformer2DModel": _forward(
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "guidance",
        timestep=ROWS,
        img_ids=SAME,  # reference images with the same number of tokens can have different shapes
        txt_ids=SHARED,
    ),
    # Its positions are those of the first row.
    "Flux2Transformer2DModel": _forward(
        "hidden_states", "encoder_hidden_states", "guidance", timestep=ROWS, img_ids=SAME, txt_ids=SAME
    ),
    "ZImageTransformer2DModel": {
        "forward": StackingRules("x", {"x": LISTED, "cap_feats": LISTED, "t": ROWS, "return_dict": FORM}, True)
    },
    "QwenImageTransformer2DModel": _forward(
        "hidden_states",
        "guidance",
        "additional_t_cond",
        # The pipelines drop a mask that hides nothing.
        encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_hidden_states_mask"),
        encoder_hidden_states_mask=Argument(Kind.MASK, dtype="bool"),
        timestep=ROWS,
        img_shapes=REPEATED,
    ),
    # Image positions follow the text and are those of the first row: only prompts of equal length fuse.
    "QwenImage21Transformer2DModel": _forward(
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        timestep=ROWS,
        img_shapes=REPEATED,
        img_mask=SAME,
    ),
    "SanaTransformer2DModel": _forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", "guidance", timestep=ROWS
    ),
    # The model masks `text_bth` beyond each row's `text_lens`.
    "ErnieImageTransformer2DModel": _forward(
        "hidden_states", "text_lens", timestep=ROWS, text_bth=Argument(Kind.PADDED)
    ),
    # Glyphs are not padded: attention adds their mask as ones and zeros, which hides nothing.
    "GlmImageTransformer2DModel": _forward(
        "hidden_states",
        "encoder_hidden_states",
        "prior_token_id",
        "prior_token_drop",
        "target_size",
        "crop_coords",
        timestep=ROWS,
        kv_caches=CACHE,
    ),
}

VIDEO_DENOISERS: Mapping[str, Methods] = {
    # Wan 2.1 and 2.2. Where tokens have times of their own (2.2 TI2V), `timestep` is [rows, tokens].
    "WanTransformer3DModel": _forward(
        "hidden_states",
        "encoder_hidden_states",
        timestep=_TIMES,
        encoder_hidden_states_image=GROUPED,  # first and last image are two entries of one row
    ),
    "HunyuanVideoTransformer3DModel": _forward(
        "hidden_states",
        "pooled_projections",
        "guidance",
        timestep=_TIMES,
        # With an image in the prompt its length varies; the mask is always given.
        encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_attention_mask"),
        encoder_attention_mask=Argument(Kind.MASK, dtype="float32"),
    ),
    "HunyuanVideo15Transformer3DModel": _forward(
        "hidden_states",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "encoder_hidden_states_2",
        "encoder_attention_mask_2",
        "image_embeds",
        timestep=_TIMES,
        timestep_r=_TIMES,
    ),
    "HeliosTransformer3DModel": _forward(
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
    ),
    "LTX2VideoTransformer3DModel": _forward(
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
    ),
}

_TEXT = _forward("input_ids", "attention_mask")
_PIXELS = _forward("pixel_values")
_VAE: Methods = {"encode": _rules("x"), "decode": _rules("z")}

# Not listed, so called once per job: AutoencoderKLHunyuanVideo15, whose attention takes one row only (its mask has the
# wrong shape for more); LTX2VocoderWithBWE, whose rows differ by up to 1e-4; LlavaForConditionalGeneration, which
# returns the states of all its images in one tensor.
ENCODERS: Mapping[str, Methods] = {
    "AutoencoderKL": {**_VAE, "decode": _rules("z", generator=UNUSED)},
    "AutoencoderTiny": {**_VAE, "decode": _rules("x", generator=UNUSED)},
    "AutoencoderKLFlux2": _VAE,
    "AutoencoderKLQwenImage": _VAE,
    "AutoencoderKLQwenImage21": _VAE,
    "AutoencoderDC": _VAE,
    "AutoencoderKLWan": _VAE,
    "AutoencoderKLHunyuanVideo": _VAE,
    "AutoencoderKLLTX2Video": {**_VAE, "decode": _rules("z", "temb")},
    "AutoencoderKLLTX2Audio": {"decode": _rules("z")},
    "LTX2TextConnectors": _forward("text_encoder_hidden_states", "attention_mask"),
    "LTX2Vocoder": _forward("hidden_states"),
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
    "Qwen3VLForConditionalGeneration": _forward("input_ids", "attention_mask", "mm_token_type_ids"),
    "Qwen3ForCausalLM": _TEXT,
    "Qwen3Model": _TEXT,
    "CLIPVisionModel": _PIXELS,
    "SiglipVisionModel": _PIXELS,
}

ARCHITECTURES: Mapping[str, Methods] = {**IMAGE_DENOISERS, **VIDEO_DENOISERS, **ENCODERS}
