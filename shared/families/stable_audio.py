"""Stable Audio: Open and 3."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import SHARED, TIMES, forward, rules_for
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        # Open. Positions are a function of the length.
        "StableAudioDiTModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "global_hidden_states",
                timestep=TIMES,
                rotary_embedding=SHARED,
            )
        ),
        "StableAudio3DiTModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "global_hidden_states",
                "encoder_attention_mask",
                "local_add_cond",
                timestep=TIMES,
            )
        ),
    },
    encoders={
        # Of other families too. Not encoded together: a distribution of Oobleck's cannot be divided into rows.
        "AutoencoderOobleck": Encoder({"decode": rules_for("z")}),
        "AutoencoderSAME": Encoder({"encode": rules_for("sample"), "decode": rules_for("latents")}),
    },
    siblings={
        ("StableAudio3Pipeline", Task.AUDIO_TO_AUDIO): "StableAudio3AudioToAudioPipeline",
        ("StableAudio3Pipeline", Task.AUDIO_INPAINT): "StableAudio3InpaintPipeline",
        ("StableAudio3AudioToAudioPipeline", Task.TEXT_TO_AUDIO): "StableAudio3Pipeline",
        ("StableAudio3AudioToAudioPipeline", Task.AUDIO_INPAINT): "StableAudio3InpaintPipeline",
        ("StableAudio3InpaintPipeline", Task.TEXT_TO_AUDIO): "StableAudio3Pipeline",
        ("StableAudio3InpaintPipeline", Task.AUDIO_TO_AUDIO): "StableAudio3AudioToAudioPipeline",
    },
)
